"""The second diagnosis: stacks that a repair touched are run again, the others keep their first results."""

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.diagnose.fingerprints import with_distinct_fingerprints
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.findings import Finding
from kvdoctor.model.files import SIDE_CARS
from kvdoctor.model.output_folder import copy_whole
from kvdoctor.options import Options
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.session import DiagnosisSide, RepairSession
from kvdoctor.report.document import Report, decide, worst_first
from kvdoctor.report.facts import TargetFacts
from kvdoctor.report.repair_record import Proof

UNOPTIMIZED = "way-off"
"""The experiment that runs the held loop without graph optimization, and a reference run as usual."""


def rediagnose(session: RepairSession, changed: Collection[str]) -> DiagnosisSide:
    """Diagnose the repaired copy; `changed` are the files that differ from the original.

    The location of a finding that was there before is not searched for again. A stack without a changed file is not run
    again: its files are byte for byte copies, and its logits are those of the first diagnosis.
    """
    touched = _find_touched(session.open_copy(), session.before.report, changed)
    logits = _logits_folder(session)
    plan = RunPlan(session.at / session.model, logits, touched, locate=False, check_advice=check_advice)
    after = step_test(session.shown, session.options, session.runtime, plan)
    for stack in session.before.report.stacks:
        kept = session.before.logits / f"{stack.name}.npz"
        if stack.name not in touched and kept.is_file():
            copy_whole(kept, logits / kept.name)
    return DiagnosisSide(_merge_reports(session.before.report, after, touched, session.options), logits)


def diagnose_copy(session: RepairSession, model: str = ".") -> DiagnosisSide:
    """Diagnose all of the copy as it is now, under the name that it will have."""
    logits = _logits_folder(session)
    plan = RunPlan(session.at / model, logits, check_advice=check_advice)
    report = step_test(session.shown, session.options, session.runtime, plan)
    return DiagnosisSide(report, logits)


def _logits_folder(session: RepairSession) -> Path:
    return Path(tempfile.mkdtemp(prefix="logits-", dir=session.scratch))


def _find_touched(folder: ModelFolder, before: Report, changed: Collection[str]) -> frozenset[str]:
    """The stacks to run again: those with a changed file, new ones, and all if a config changed."""
    known = {stack.name: set(stack.files) for stack in before.stacks}
    every = not {Path(name).name for name in changed}.isdisjoint(SIDE_CARS)
    names = set()
    for stack in folder.stacks:
        files = {file.name for file in stack.files.values()}
        if every or known.get(stack.name) != files or not files.isdisjoint(changed):
            names.add(stack.name)
    return frozenset(names)


def _merge_reports(before: Report, after: Report, touched: frozenset[str], options: Options) -> Report:
    """The report on the whole copy: new results of the stacks that were run again, earlier results of the others."""
    again = {stack.name for stack in after.stacks}
    kept = [stack for stack in before.stacks if stack.name not in touched and stack.name not in again]
    names = {stack.name for stack in kept}
    order = {stack.name: index for index, stack in enumerate(before.stacks)}
    stacks = sorted((*kept, *after.stacks), key=lambda stack: order.get(stack.name, len(order)))
    found = [_add_known_location(finding, before) for finding in after.findings]
    findings = with_distinct_fingerprints(
        worst_first([*found, *(one for one in before.findings if one.stack in names)])
    )
    not_checked = (*after.not_checked, *(entry for entry in before.not_checked if entry.stack in names))
    runs = [*(run for run in before.runs if run.stack in names), *after.runs]
    return replace(
        after,
        stacks=tuple(stacks),
        findings=findings,
        not_checked=not_checked,
        runs=tuple(sorted(runs, key=lambda run: order.get(run.stack, len(order)))),
        targets=tuple(_merge_target(target, before.targets, names) for target in after.targets),
        verdict=decide(after.command, findings, not_checked, options.fail_on),
        measured={**{name: before.measured[name] for name in names if name in before.measured}, **after.measured},
    )


def _merge_target(after: TargetFacts, before: Collection[TargetFacts], kept: Collection[str]) -> TargetFacts:
    """The results under a target: new ones of the stacks that were run again, earlier ones of the others."""
    old = next((target for target in before if target.asked == after.asked), after)

    def merge(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
        return {**{name: fact for name, fact in then.items() if name in kept}, **now}

    return replace(
        after,
        refused=merge(old.refused, after.refused),
        other_logits=merge(old.other_logits, after.other_logits),
        not_run=merge(old.not_run, after.not_run),
    )


def _add_known_location(finding: Finding, before: Report) -> Finding:
    """A finding that was there before, with the evidence of its location from then."""
    known = next((other for other in before.findings if other.fingerprint == finding.fingerprint), None)
    return replace(finding, evidence=known.evidence) if known is not None and not finding.evidence else finding


def opened_at_other_level(stack: str, before: DiagnosisSide, after: DiagnosisSide) -> bool:
    """Whether the runtime loads the original at a lower level of graph optimization than the copy."""
    levels = [{run.level for run in side.report.runs if run.stack == stack and run.steps} for side in (before, after)]
    return bool(levels[0]) and levels[0] != levels[1]


def prove_unoptimized(session: RepairSession, stack: str, after: DiagnosisSide) -> Proof:
    """Run original and copy without graph optimization and compare their logits.

    If the runtime loads the original at a lower level only, its fusions compute the copy differently. Without them on
    both sides, a repair that changes no value leaves all logits equal.
    """
    claim = "without graph optimization, logits equal to the original's, bit for bit"
    found = []
    for name, folder, side in (
        ("original", session.folder.root, session.before),
        ("copy", session.at, after),
    ):
        contract = side.contract(stack)
        if contract is None:
            return Proof(stack, claim, False, f"the cache contract of the {name} could not be read")
        found.append(_run_unoptimized(session, f"{stack}-{name}", folder, contract))
    old, new = found
    if old is None or new is None:
        return Proof(stack, claim, False, f"the {'original' if old is None else 'copy'} returns no logits")
    return Proof(stack, claim, bool(np.array_equal(old, new, equal_nan=True)))


def _run_unoptimized(session: RepairSession, name: str, folder: Path, contract: CacheContract) -> Array | None:
    file, options = session.scratch / f"unoptimized-{name}.npz", session.options
    file.unlink(missing_ok=True)
    job = ExperimentJob(
        name, folder.absolute(), contract, (UNOPTIMIZED,), options.seed, options.provider, file, timed=False
    )
    session.runtime.examine(job)
    if not file.is_file():
        return None
    with np.load(file) as store:
        return store[UNOPTIMIZED] if UNOPTIMIZED in store.files else None
