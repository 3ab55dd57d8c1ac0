"""The second diagnosis: the stacks that a repair touched are run again, of the others the first diagnosis holds."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdoctor.cure.proof import Side
from kvdoctor.doctor import step_test
from kvdoctor.findings import Finding, told_apart
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.options import Options
from kvdoctor.out_folder import copy_whole
from kvdoctor.patient import SIDE_CARS
from kvdoctor.report.document import Report, TargetFacts, decide, worst_first
from kvdoctor.runtimes import Runtime


@dataclass(frozen=True)
class Again:
    """The first diagnosis, and the copy that is diagnosed under the name `shown` that it will have."""

    before: Side
    shown: str
    at: Path
    runtime: Runtime
    options: Options

    def diagnose(self, changed: Collection[str], logits: Path) -> Side:
        """Diagnose the copy. `changed` are its files that are other than in the first diagnosis.

        Where a finding was there before, its place is not looked for again. A stack of which no file changed is not
        run again, as its files are copies byte for byte, and its logits are those of the first diagnosis.
        """
        touched = _touched(open_folder(self.shown, self.at), self.before.report, changed)
        options = replace(self.options, locate=False, only=touched)
        after = step_test(self.shown, options, self.runtime, logits, self.at)
        for stack in self.before.report.stacks:
            kept = self.before.logits / f"{stack.name}.npz"
            if stack.name not in touched and kept.is_file():
                copy_whole(kept, logits / kept.name)
        return Side(_merged(self.before.report, after, touched, self.options), logits)


def _touched(folder: ModelFolder, before: Report, changed: Collection[str]) -> frozenset[str]:
    """The stacks that must be run again: those with a changed file, new ones, and all where a config changed."""
    known = {stack.name: set(stack.files) for stack in before.stacks}
    every = not {Path(name).name for name in changed}.isdisjoint(SIDE_CARS)
    names = set()
    for stack in folder.stacks:
        files = {file.name for file in stack.files.values()}
        if every or known.get(stack.name) != files or not files.isdisjoint(changed):
            names.add(stack.name)
    return frozenset(names)


def _merged(before: Report, after: Report, touched: frozenset[str], options: Options) -> Report:
    """The report on the whole copy: what was run again, and what holds of the rest."""
    kept = [stack for stack in before.stacks if stack.name not in touched and stack.name not in _names(after)]
    names = {stack.name for stack in kept}
    order = {stack.name: place for place, stack in enumerate(before.stacks)}
    stacks = sorted((*kept, *after.stacks), key=lambda stack: order.get(stack.name, len(order)))
    found = [_with_place(finding, before) for finding in after.findings]
    findings = told_apart(worst_first([*found, *(one for one in before.findings if one.stack in names)]))
    not_checked = (*after.not_checked, *(entry for entry in before.not_checked if entry.stack in names))
    runs = [*(run for run in before.runs if run.stack in names), *after.runs]
    return replace(
        after,
        stacks=tuple(stacks),
        findings=findings,
        not_checked=not_checked,
        runs=tuple(sorted(runs, key=lambda run: order.get(run.stack, len(order)))),
        targets=tuple(_both(target, before.targets, names) for target in after.targets),
        verdict=decide(after.command, findings, not_checked, options.fail_on),
        measured={**{name: before.measured[name] for name in names if name in before.measured}, **after.measured},
    )


def _both(after: TargetFacts, before: Collection[TargetFacts], kept: Collection[str]) -> TargetFacts:
    """What a target did to the stacks that were run again, and before to those that were not."""
    old = next((target for target in before if target.asked == after.asked), after)

    def of(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        return {**{name: fact for name, fact in then.items() if name in kept}, **now}

    return replace(
        after,
        refused=of(old.refused, after.refused),
        other_logits=of(old.other_logits, after.other_logits),
        not_run=of(old.not_run, after.not_run),
    )


def _names(report: Report) -> set[str]:
    return {stack.name for stack in report.stacks}


def _with_place(finding: Finding, before: Report) -> Finding:
    """A finding that was there before, with what its place showed then."""
    known = next((other for other in before.findings if other.fingerprint == finding.fingerprint), None)
    return replace(finding, because=known.because) if known is not None and not finding.because else finding
