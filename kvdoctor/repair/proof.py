"""The proof of a repaired stack: the finding is gone, no new one appears, the loops pass, the numbers are the same."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvdoctor.decode.parity import compare, describe_gap, judge
from kvdoctor.decode.runs import HELD_LOOP, LOOPS, UNDECIDED, Run, quote_error
from kvdoctor.decode.tolerances import Tolerance, find_tolerance
from kvdoctor.findings import Finding
from kvdoctor.repair.repairs.registry import Keeps
from kvdoctor.repair.session import Applied, DiagnosisSide, concerns
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import Proof
from kvdoctor.report.wording import format_count

ENDED = ("passed", "ambiguous", "inconclusive", "differs")
"""Outcomes of a loop that ran to its end."""
STRICTEST: tuple[Keeps, ...] = ("sizes", "own", "reference", "first-step", "bits")


def prove(
    applied: Iterable[Applied], before: DiagnosisSide, after: DiagnosisSide, instead: dict[str, Proof]
) -> Iterator[Proof]:
    """The claims on each repaired stack, and whether they hold.

    `instead` replaces the comparison of numbers for stacks that were run without graph optimization.
    """
    by_stack: dict[str, list[Applied]] = {}
    for one in applied:
        by_stack.setdefault(one.stack, []).append(one)
    for stack, mine in by_stack.items():
        yield from _prove_findings(stack, mine, before, after.report)
        yield from prove_loops(stack, after, before)
        yield from _prove_targets(stack, after.report)
        yield from [instead[stack]] if stack in instead else _prove_numbers(stack, mine, before, after)


def find_unhelpful(applied: Iterable[Applied], before: Report, after: Report) -> Iterator[Applied]:
    """The repairs whose finding is still there."""
    for one in applied:
        if _find_remaining(one.stack, before, after).intersection(one.because):
            yield one


def _find_remaining(stack: str, before: Report, after: Report) -> set[str]:
    """Findings of a stack that are still there.

    A note next to a graver finding of the same check does not count: it calls for no repair (one new token in a graph
    for decode steps).
    """
    grave = {finding.name for finding in _find_of_stack(before, stack, before) if finding.severity != "note"}
    return {f.name for f in _find_of_stack(after, stack, before) if f.severity != "note" or f.name not in grave}


def _find_of_stack(report: Report, stack: str, named: Report) -> list[Finding]:
    """The findings on a stack and its files, which another report may have named."""
    files = next((known.files for known in named.stacks if known.name == stack), ())
    return [finding for finding in report.findings if concerns(finding, stack, files)]


def _prove_findings(stack: str, applied: list[Applied], before: DiagnosisSide, after: Report) -> Iterator[Proof]:
    known, mine = ({f.name for f in _find_of_stack(one, stack, one)} for one in (before.report, after))
    for name in sorted({name for one in applied for name in one.because}):
        yield Proof(stack, f"{name} is gone", name not in _find_remaining(stack, before.report, after))
    new = (f for f in after.findings if f.name in mine - known and f.severity != "note" and f.stack in (stack, None))
    # A use under a target could not show while the target refused the file.
    fresh = (f for f in new if f.severity != "warning" or f.name not in ("target-fails", "target-differs"))
    yield _prove_none_new(stack, [f.name for f in fresh if _could_show_before(f, stack, before)])


def prove_no_new_finding(stack: str, before: Report, after: Report, revealed: Iterable[str] = ()) -> Proof:
    """The claim that a conversion of a healthy copy brings no finding; `revealed` are checks that it lets see more.

    Stacks and files may have other names since, so findings of all of them are compared, by their check.
    """
    known = {finding.name for finding in before.findings} | set(revealed)
    return _prove_none_new(stack, sorted({one.name for one in after.findings if one.severity != "note"} - known))


def _prove_none_new(stack: str, fresh: Sequence[str]) -> Proof:
    return Proof(stack, "no finding that was not there before", not fresh, ", ".join(fresh))


def _could_show_before(finding: Finding, stack: str, before: DiagnosisSide) -> bool:
    """Whether the original would have shown the same finding if it had the fault.

    If no loop passes, findings on further uses are not reported: then its own run of the same use decides.
    """
    passed = any(run.shows == "passed" for name in LOOPS if (run := before.run(stack, name)))
    if finding.severity == "error" or passed:
        return True
    run = before.run(stack, finding.experiment or "")
    return run is not None and run.shows == "passed"


def prove_loops(stack: str, after: DiagnosisSide, before: DiagnosisSide | None = None) -> Iterator[Proof]:
    """The claims that the loops of a stack pass.

    Where the numbers decide for neither model, a loop may equal the held loop of the original `before` the repair.
    """
    ran = False
    for experiment in LOOPS:
        run = after.run(stack, experiment)
        if run is not None and run.outcome != "skipped":
            ran = True
            held = before.run(stack, HELD_LOOP) if before is not None and run.shows in UNDECIDED else None
            if (
                before is not None
                and held is not None
                and held.shows in UNDECIDED
                and equal(before.read_logits(stack, HELD_LOOP), after.read_logits(stack, experiment))
            ):
                claim = f"{experiment} logits equal to those of the original's held loop, bit for bit"
                yield Proof(stack, claim, True, f"whether these are right is undecided: {run.outcome}")
                continue
            seen = [step.difference for step in run.steps if step.difference]
            worst = max((difference.relative for difference in seen), default=0.0)
            within = f"logits off by at most {worst:.1e} standard deviations from {run.yardstick}"
            within = within if all(difference.finite for difference in seen) else "logits that are not finite"
            text = f"{format_count(len(run.steps), 'step')}, {within}"
            if run.error:
                text = f'step {run.failed_step} fails: "{quote_error(run.error)}"'
            yield Proof(stack, f"{experiment} passes", run.shows == "passed", text)
    if not ran:
        yield Proof(stack, "plain-loop passes", False, "no loop could be run on the repaired model")


def _prove_numbers(stack: str, applied: list[Applied], before: DiagnosisSide, after: DiagnosisSide) -> Iterator[Proof]:
    """The comparison with the numbers of the original, as strict as the least strict of the repairs."""
    keeps = min((one.repair.keeps for one in applied), key=STRICTEST.index)
    if keeps == "sizes":
        yield Proof(stack, "outputs equal to the original's at the sizes that it accepts, bit for bit", True)
        runs = [run for name in LOOPS if (run := after.run(stack, name))]
        held = any(step.difference for run in runs for step in run.steps)
        held = held or any(equal(before.read_logits(stack, name), after.read_logits(stack, name)) for name in LOOPS)
        why = "no call takes several tokens without a cache: lengths other than the traced ones are unproved"
        claim = "the loop is compared with a reference run or with the original's own loop"
        yield Proof(stack, claim, held, "" if held else why)
        return
    if keeps == "bits":
        untouched = [name for name in LOOPS if _ended(before.run(stack, name), name)]
        for experiment in untouched:
            same = equal(before.read_logits(stack, experiment), after.read_logits(stack, experiment))
            yield Proof(stack, f"{experiment} logits equal to the original's, bit for bit", same)
        if untouched:
            return
    for experiment in LOOPS if keeps != "own" else ():
        old, new = before.first_step(stack, experiment), after.first_step(stack, experiment)
        if old is not None:
            yield _prove_first_step(stack, keeps, old, new, after)
            return


def _ended(run: Run | None, experiment: str) -> bool:
    """Whether the original's loop ran to its end with logits that a repair must keep."""
    ended = ("passed", "ambiguous") if experiment == "plain-loop" else ENDED
    return run is not None and run.outcome in ended


def _prove_first_step(stack: str, keeps: Keeps, old: Any, new: Any, after: DiagnosisSide) -> Proof:
    if keeps != "reference":
        return Proof(stack, "logits of the first step equal to the original's, bit for bit", equal(old, new))
    claim = "logits of the first step are those of the original"
    contract = after.contract(stack)
    if new is None or contract is None or new.shape != old.shape:
        return Proof(stack, claim, False, "no logits of that shape")
    limit = find_tolerance(contract.exactness, after.tolerances)
    return prove_close(Proof(stack, claim, False), new, old, limit)


def prove_close(claim: Proof, new: Any, old: Any, limit: Tolerance) -> Proof:
    """The claim with whether logits, float[batch, tokens, vocabulary], are as close as the arithmetic allows."""
    found = compare(new, old, limit)
    text = f"{describe_gap(found)} of the logits" if found.finite else describe_gap(found)
    return replace(claim, holds=judge(found, limit) == "pass", detail=text)


def equal(old: Any, new: Any) -> bool:
    """Whether both arrays exist and are equal bit for bit."""
    import numpy as np

    return old is not None and new is not None and bool(np.array_equal(old, new, equal_nan=True))


def _prove_targets(stack: str, after: Report) -> Iterator[Proof]:
    """The claims that the loops that ran locally pass under every target that could be run."""
    for target in after.targets:
        for experiment in LOOPS if stack not in target.not_run else ():
            # The run of the local runtime comes first.
            runs = [run for run in after.runs if run.stack == stack and run.experiment == experiment]
            run = next((run for run in runs if run.target == target.runtime), None)
            if run is not None and runs[0].outcome != "skipped":
                differs = experiment in target.other_logits.get(stack, ())
                detail = run.error or run.reason or f"{len(run.steps)} steps"
                detail = "the logits differ from the local ones" if differs else detail
                holds = run.shows == "passed" and not differs
                yield Proof(stack, f"{experiment} passes under {target.asked}", holds, detail)
