"""What a second diagnosis must show of a repaired stack: the fault is gone, nothing new came, the numbers are right."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import CacheContract
from kvdoctor.cure.target_proof import is_of_use_there, under_targets
from kvdoctor.cure.treatment import Applied, concerns
from kvdoctor.findings import Finding
from kvdoctor.parity import compare, judge
from kvdoctor.repairs import Keeps
from kvdoctor.report.document import Proof, Report
from kvdoctor.trace import Run

if TYPE_CHECKING:
    import numpy as np

LOOPS = ("plain-loop", "held-loop")
ENDED = ("passed", "ambiguous", "inconclusive", "differs")
"""Outcomes of a loop that ran to its end."""
STRICTEST: tuple[Keeps, ...] = ("sizes", "own", "reference", "first-step", "bits")


@dataclass(frozen=True)
class Side:
    """One diagnosis, and the folder in which each stack left the logits of its experiments."""

    report: Report
    logits: Path

    def run(self, stack: str, experiment: str) -> Run | None:
        """The run of an experiment on a stack."""
        return next((r for r in self.report.runs if (r.stack, r.experiment) == (stack, experiment)), None)

    def kept(self, stack: str, experiment: str) -> "np.ndarray[Any, Any] | None":
        """The logits of all steps of an experiment, one after the other; None where none were left."""
        import numpy as np

        file = self.logits / f"{stack}.npz"
        if not file.is_file():
            return None
        with np.load(file) as store:
            return store[experiment] if experiment in store and store[experiment].size else None

    def first_step(self, stack: str, experiment: str) -> "np.ndarray[Any, Any] | None":
        """The logits of the first step of an experiment, float[batch, new, vocabulary]."""
        run, kept, contract = self.run(stack, experiment), self.kept(stack, experiment), self.contract(stack)
        port = contract.graph("prefill").port("logits") if contract is not None else None
        if run is None or kept is None or not run.steps or port is None or port.name not in run.steps[0].returned:
            return None
        shape = run.steps[0].returned[port.name].shape
        return kept[: math.prod(shape)].reshape(shape)

    def contract(self, stack: str) -> CacheContract | None:
        """The contract of a stack as this diagnosis read it."""
        return next((known.contract for known in self.report.stacks if known.name == stack), None)


def prove(applied: Iterable[Applied], before: Side, after: Side, instead: dict[str, Proof]) -> Iterator[Proof]:
    """One stack after the other: what holds of it, and what does not.

    `instead` holds what stands in the place of the comparison of numbers, where a stack was run in another way.
    """
    by_stack: dict[str, list[Applied]] = {}
    for one in applied:
        by_stack.setdefault(one.stack, []).append(one)
    for stack, mine in by_stack.items():
        yield from _findings(stack, mine, before, after.report)
        yield from loops(stack, after)
        yield from under_targets(stack, after.report)
        yield from [instead[stack]] if stack in instead else _numbers(stack, mine, before, after)


def unhelpful(applied: Iterable[Applied], before: Report, after: Report) -> Iterator[Applied]:
    """The repairs that changed something, and whose finding is still there."""
    for one in applied:
        if _still(one.stack, before, after).intersection(one.because):
            yield one


def _still(stack: str, before: Report, after: Report) -> set[str]:
    """Findings of a stack that are still there.

    Notes that stand beside a graver finding of the same check are no reason for a repair, and stay (one new token in a
    graph for decode steps).
    """
    files = next((known.files for known in before.stacks if known.name == stack), ())
    grave = {f.name for f in before.findings if concerns(f, stack, files) and f.severity != "note"}
    return {
        f.name for f in after.findings if concerns(f, stack, files) and (f.severity != "note" or f.name not in grave)
    }


def _findings(stack: str, applied: list[Applied], before: Side, after: Report) -> Iterator[Proof]:
    known, mine = _of_stack(before.report, stack), _of_stack(after, stack)
    mended = {name for one in applied for name in one.because}
    for name in sorted(mended):
        yield Proof(stack, f"{name} is gone", name not in _still(stack, before.report, after))
    fresh = [
        finding.name
        for finding in after.findings
        if finding.name in mine - known
        and finding.severity != "note"
        and finding.stack in (stack, None)
        and not is_of_use_there(finding)
        and _would_have_shown(finding, stack, before)
    ]
    yield Proof(stack, "no finding that was not there before", not fresh, ", ".join(fresh))


def _would_have_shown(finding: Finding, stack: str, before: Side) -> bool:
    """Whether the original would have had the same finding, if it had the fault.

    Where no loop passes, what else a model is not fit for is not told: then its own run of the same use decides.
    """
    passed = any(run.shows == "passed" for name in LOOPS if (run := before.run(stack, name)))
    if finding.severity == "error" or passed:
        return True
    run = before.run(stack, finding.where.rpartition(", ")[2])
    return run is not None and run.shows == "passed"


def _of_stack(report: Report, stack: str) -> set[str]:
    files = next((known.files for known in report.stacks if known.name == stack), ())
    return {finding.name for finding in report.findings if concerns(finding, stack, files)}


def loops(stack: str, after: Side) -> Iterator[Proof]:
    """The loops of a stack end, and pass."""
    ran = False
    for experiment in LOOPS:
        run = after.run(stack, experiment)
        if run is not None and run.outcome != "skipped":
            ran = True
            seen = [step.difference for step in run.steps if step.difference]
            worst = max((difference.relative for difference in seen), default=0.0)
            within = f"logits within {worst:.1e} of their spread of {run.yardstick}"
            within = within if all(difference.finite for difference in seen) else "logits that are not finite"
            text = f"{len(run.steps)} steps, {within}"
            yield Proof(stack, f"{experiment} passes", run.shows == "passed", text)
    if not ran:
        yield Proof(stack, "plain-loop passes", False, "no loop could be run on the repaired model")


def _numbers(stack: str, applied: list[Applied], before: Side, after: Side) -> Iterator[Proof]:
    """Held against the original, as far as it gave anything: the least that one of the repairs must keep."""
    keeps = min((one.repair.keeps for one in applied), key=STRICTEST.index)
    if keeps == "sizes":
        yield Proof(stack, "outputs equal to the original's at the sizes that it takes, bit for bit", True)
        runs = [run for name in LOOPS if (run := after.run(stack, name))]
        held = any(step.difference for run in runs for step in run.steps)
        held = held or any(equal(before.kept(stack, name), after.kept(stack, name)) for name in LOOPS)
        why = (
            "" if held else "no call takes several tokens without a cache: lengths other than the trace's are unproved"
        )
        yield Proof(stack, "a reference run, or the original's own loop, to hold the loop against", held, why)
        return
    if keeps == "bits":
        untouched = [name for name in LOOPS if _is_whole(before.run(stack, name), name)]
        for experiment in untouched:
            claim = f"{experiment} logits equal to the original's, bit for bit"
            yield Proof(stack, claim, equal(before.kept(stack, experiment), after.kept(stack, experiment)))
        if untouched:
            return
    for experiment in LOOPS if keeps != "own" else ():
        old, new = before.first_step(stack, experiment), after.first_step(stack, experiment)
        if old is not None:
            yield _first_step(stack, keeps, old, new, after.contract(stack))
            return


def _is_whole(run: Run | None, experiment: str) -> bool:
    """Whether the original's run went to its end on a way that a repair leaves as it was: the held loop always does."""
    ended = ("passed", "ambiguous") if experiment == "plain-loop" else ENDED
    return run is not None and run.outcome in ended


def _first_step(stack: str, keeps: Keeps, old: Any, new: Any, contract: CacheContract | None) -> Proof:
    if keeps != "reference":
        return Proof(stack, "logits of the first step equal to the original's, bit for bit", equal(old, new))
    claim = "logits of the first step are those of the original"
    if new is None or contract is None or new.shape != old.shape:
        return Proof(stack, claim, False, "no logits of that shape")
    found = compare(new, old, contract.exactness)
    text = f"within {found.relative:.1e} of their spread" if found.finite else "not finite"
    return Proof(stack, claim, judge(found, contract.exactness) == "pass", text)


def equal(old: Any, new: Any) -> bool:
    """Whether two arrays are there, and the same bit for bit."""
    import numpy as np

    return old is not None and new is not None and bool(np.array_equal(old, new, equal_nan=True))
