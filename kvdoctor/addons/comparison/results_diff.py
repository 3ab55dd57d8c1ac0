"""Compares the results of two stacks: the outcomes of experiments, the logits on the same feeds, and the findings.

An experiment that passed with A must pass with B. Synthetic feeds depend on the seed and the contract: they are the
same if the vocabularies are, and both sides make their encoder states in the same way. Of each side the loop with the
most steps is used, up to the last step that both have.

Findings are gone, new, changed or the same. They are matched by fingerprint. A fingerprint includes the names of stacks
and tensors, so the remaining findings are matched by check and stack: the same fault with other names is not a new
finding.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvdoctor.addons.comparison.contract_diff import pair_up
from kvdoctor.addons.comparison.document import Effect, FindingDiff, Logits, LogitsAgreement, Outcomes
from kvdoctor.choices import FailOn
from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import load
from kvdoctor.decode.parity import Verdict, judge
from kvdoctor.decode.parity import compare as measure_difference
from kvdoctor.decode.runs import LOOPS, WRONG, Run
from kvdoctor.decode.tolerances import TOLERANCES, find_tolerance
from kvdoctor.findings import SEVERITIES, Finding, all_checks, means_incomplete, reaches
from kvdoctor.repair.session import DiagnosisSide
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import shortened
from kvdoctor.report.wording.runs import select_local_runs

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def compare_findings(
    a: list[Finding], b: list[Finding], stacks: dict[str, str], fail_on: FailOn
) -> Iterator[FindingDiff]:
    """Each finding with its state, new ones first. `stacks` maps the stacks of B to those of A.

    A new finding at or above `fail_on` makes B worse; one that is gone makes it better.
    """
    names = {id(new): stacks.get(new.stack or "", new.stack) for new in b}
    keys = (lambda one: one.fingerprint or id(one), lambda one: (one.code, names.get(id(one), one.stack)))
    for new, old in pair_up(b, a, *keys):
        if new is None:
            if old is not None:
                better = reaches(old, fail_on) or old.severity != "note"
                yield FindingDiff("gone", old.fingerprint, None, old, "better" if better else "neutral")
        elif old is None:
            found = FindingDiff("new", None, new.fingerprint, new)
            counts = reaches(new, fail_on) and not means_incomplete(new.code)
            yield (
                replace(found, effect="worse", because=f"new {new.severity} {new.code} {new.name}") if counts else found
            )
        elif SEVERITIES.index(new.severity) > SEVERITIES.index(old.severity) and reaches(new, fail_on):
            why = f"{new.code} {new.name} had severity {old.severity}, and has {new.severity}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        elif len(new.subject) > len(old.subject) and reaches(new, fail_on):
            why = f"{new.code} {new.name} affects {len(new.subject)} tensors, not {len(old.subject)}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        else:
            same = (old.severity, old.cause) == (new.severity, new.cause)
            yield FindingDiff("same" if same else "changed", old.fingerprint, new.fingerprint, new)


def needs_no_run(finding: Finding) -> bool:
    """Whether an inspection, which runs nothing, can find it."""
    rounds = next((check.rounds for check in all_checks() if check.code == finding.code), ())
    return bool({"file", "contract"}.intersection(rounds))


LOCAL = "here"
"""The target name of runs in this Python, whose release may differ between a report and today."""

LENGTH_AXES = ("batch", "new", "past", "total")
AGREEMENTS: tuple[LogitsAgreement, ...] = ("other", "tokens", "logits", "bits")


def compare_outcomes(a: Report, b: Report, stack_a: str, stack_b: str) -> Iterator[Outcomes]:
    """Every experiment that was run on one side. An experiment that no finding depends on has no effect."""
    judged = {experiment.name for experiment in load() if experiment.judged and not experiment.explains}
    old, new = _runs(a, stack_a), _runs(b, stack_b)
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if all(run is None or run.outcome == "skipped" for run in (before, after)):
            continue
        effect: Effect = "neutral"
        if key[0] in judged and before is not None and after is not None:
            # A run that was ended by a limit says nothing about the model; it is listed as not compared.
            if before.shows == "passed" and after.shows in WRONG and after.died_by not in ("timeout", "memory"):
                effect = "worse"
            elif before.shows in WRONG and after.shows == "passed":
                effect = "better"
        yield Outcomes(*key, _describe(before), _describe(after), effect)


def _runs(report: Report, stack: str) -> dict[tuple[str, str], Run]:
    local = select_local_runs(report, stack)
    found = {(run.experiment, LOCAL): run for run in local}
    under_targets = (run for run in report.runs if run.stack == stack and run not in local)
    return found | {(run.experiment, run.target): run for run in under_targets}


def _describe(run: Run | None) -> str | None:
    if run is None:
        return None
    at = f" at step {run.failed_step}" if run.shows in ("failed", "differs") and run.failed_step is not None else ""
    return shortened(f"skipped: {run.reason}" if run.outcome == "skipped" else run.shows + at)


_StepLogits = tuple[int, "Array"]
"""The position after the last token of a step, and its logits, float[batch, new, vocabulary]."""


class CannotCompareLogits(Exception):
    """The logits of the two sides cannot be compared. The message says why."""


def compare_logits(
    a: DiagnosisSide, b: DiagnosisSide, stacks: tuple[str, str], tolerances: Mapping[str, float]
) -> tuple[Logits, Verdict]:
    """How far the logits of a stack of B agree with those of a stack of A, and the verdict on the difference.

    `stacks` are their names in A and B, `tolerances` the requested shares that pass (decode/tolerances.py).

    Raises:
        CannotCompareLogits: the feeds of the two differ, or one of them has no logits.
    """
    old, new = _contract(a, stacks[0]), _contract(b, stacks[1])
    _refuse_different_feeds(old, new)
    (name, first), (_, second) = _longest_loop(a, stacks[0], old), _longest_loop(b, stacks[1], new)
    pairs = [_common_positions(x, y) for x, y in zip(first, second, strict=False)]
    width = pairs[0][0].shape[-1]
    rows = [[part.reshape(1, -1, width) for part in side] for side in zip(*pairs, strict=True)]
    import numpy as np

    expected, actual = (np.concatenate(parts, axis=1) for parts in rows)
    exactness = max(old.exactness, new.exactness, key=lambda kind: TOLERANCES[kind].passes)
    limit = find_tolerance(exactness, tolerances)
    found = measure_difference(actual, expected, limit)
    same = found.same_top1 + found.near_ties
    verdict = judge(found, limit)
    agree: LogitsAgreement = "tokens" if found.finite and same >= 1 else "other"
    agree = "logits" if verdict == "pass" else agree
    agree = "bits" if bool(np.array_equal(expected, actual, equal_nan=True)) else agree
    relative = found.relative if found.finite else None
    return Logits(name, len(pairs), agree, exactness, relative, round(same, 4)), verdict


def _contract(side: DiagnosisSide, stack: str) -> CacheContract:
    contract = side.contract(stack)
    if contract is None:
        raise CannotCompareLogits(f"{stack} has no cache contract")
    return contract


def _refuse_different_feeds(a: CacheContract, b: CacheContract) -> None:
    if a.vocabulary != b.vocabulary:
        sizes = [f"{contract.vocabulary or 'an unknown number of'} tokens" for contract in (a, b)]
        raise CannotCompareLogits(f"their vocabularies differ: {sizes[0]} and {sizes[1]}")
    if ("encode" in a.phases) != ("encode" in b.phases):
        raise CannotCompareLogits("one of them has an encoder file, and the other has synthetic encoder states")
    if ("embed" in a.phases) != ("embed" in b.phases):
        raise CannotCompareLogits("one of them has an embedding file, and the other has synthetic embeddings")
    if a.codebooks != b.codebooks:
        raise CannotCompareLogits(f"their sequences have {a.codebooks} and {b.codebooks} rows of tokens")
    for role in ("token_ids", "token_and_position", "embeddings", "encoder_input", "encoder_states"):
        if _widths(a, role) != _widths(b, role):
            raise CannotCompareLogits(f"the widths of their inputs with the role {role} differ")


def _widths(contract: CacheContract, role: str) -> set[object]:
    """Rank and fixed sizes of the inputs of a role: besides lengths, synthetic feeds depend only on these."""
    found: set[object] = set()
    for graph in contract.graphs.values():
        for port in graph.inputs:
            if port.role == role:
                axes = zip(port.axes, port.shape or (), strict=False)
                sizes = (size for axis, size in axes if axis not in LENGTH_AXES)
                found.add((len(port.axes), *(size for size in sizes if isinstance(size, int))))
    return found


def _longest_loop(side: DiagnosisSide, stack: str, contract: CacheContract) -> "tuple[str, list[_StepLogits]]":
    """The name and the logits of the loop with the most steps; the held loop if the plain one has as many."""
    best: tuple[str, list[_StepLogits]] = ("", [])
    for name in reversed(LOOPS):
        run, logits = side.run(stack, name), side.read_logits(stack, name)
        if run is not None and logits is not None:
            steps = _split_steps(run, logits, contract)
            best = (name, steps) if len(steps) > len(best[1]) else best
    if not best[1]:
        raise CannotCompareLogits(f"no loop of {side.report.model.path} ({stack}) has logits")
    return best


def _split_steps(run: Run, values: "Array", contract: CacheContract) -> "list[_StepLogits]":
    found, at = [], 0
    for step in run.steps:
        port = contract.graph("prefill" if step.phase == "prefill" else "decode").port("logits")
        observed = step.returned.get(port.name) if port is not None else None
        if observed is None or at + math.prod(observed.shape) > values.size:
            break
        logits = values[at : at + math.prod(observed.shape)].reshape(observed.shape)
        found.append((step.past_length + step.new_tokens, logits))
        at += math.prod(observed.shape)
    return found


def _common_positions(a: "_StepLogits", b: "_StepLogits") -> "tuple[Array, Array]":
    """The logits of the last positions of a step that both sides have.

    Raises:
        CannotCompareLogits: there are none: the steps end at different positions, or the shapes do not match.
    """
    (end, old), (other, new) = a, b
    if end != other:
        raise CannotCompareLogits("their loops split the tokens into different steps")
    if old.ndim != 3 or new.ndim != 3 or (old.shape[0], old.shape[2]) != (new.shape[0], new.shape[2]):
        raise CannotCompareLogits(f"their logits have the shapes {list(old.shape)} and {list(new.shape)}")
    count = min(old.shape[1], new.shape[1])
    return old[:, old.shape[1] - count :], new[:, new.shape[1] - count :]
