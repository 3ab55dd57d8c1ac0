"""`re-export`: diagnose, copy, repair in rounds, diagnose again, prove, and write a whole copy or none.

A fault may be hidden by another and show only after that one is repaired: it gets a round of its own. Repairs that did
not help are left out of a second attempt, so that they do not prevent the proof of the others.
"""

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.diagnose.run_checks import with_distinct_fingerprints
from kvdoctor.errors import UsageError
from kvdoctor.model.files import SIDE_CARS
from kvdoctor.model.output_folder import copy_whole, refuse_unfit, whole_folder
from kvdoctor.options import Options
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.fix_report import report_fix, report_nothing_done, report_unproved
from kvdoctor.repair.proof import find_unhelpful, prove
from kvdoctor.repair.repairs.registry import refuse_unknown_repairs
from kvdoctor.repair.session import (
    Applied,
    DiagnosisSide,
    Outcome,
    RepairChoice,
    RepairedFiles,
    RepairRequest,
    RepairSession,
    apply_repairs,
    read_saved,
)
from kvdoctor.repair.workspace import copy_export, put_back, write_changed, write_reports
from kvdoctor.report.document import Report, decide, worst_first
from kvdoctor.report.facts import TargetFacts
from kvdoctor.report.repair_record import NotRepaired, Proof
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

MOST_ROUNDS = 3


def re_export(request: RepairRequest, options: Options) -> Report:
    """Repair the model at a path into OUT and diagnose the result again.

    Raises:
        UsageError: there is nothing at the path, a repair is unknown, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    path, how = request.path, request.how
    if path is None:
        raise UsageError("give the path of a model to repair")
    refuse_unknown_repairs(how.fix)
    if request.out is not None and Path(path).exists():
        refuse_unfit(Path(request.out), Path(path), request.force)
    with Runtime(options.limits) as runtime, scratch_folder() as scratch:
        before = diagnose(path, options, runtime, Path(scratch, "before"))
        folder, choice = open_folder(path), RepairChoice(how.fix)
        first = apply_repairs(folder, before.report, choice, runtime, options)
        if not first.applied:
            return report_nothing_done(before.report, first, how.fix)
        with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
            shown, model = request.out or path, "." if Path(path).is_dir() else Path(path).name
            session = RepairSession(options, runtime, Path(scratch), folder, before, shown, pending.path, model)
            copy_export(session.folder, session.at)
            outcome = repair_and_prove(session, first, choice)
            if not (outcome.holds or how.keep_unproved):
                return report_unproved(session, outcome)
            report = report_fix(session, outcome, request.out)
            if request.out is not None:
                write_reports(pending.path, report)
                pending.kept = True
        return report


def diagnose(path: str, options: Options, runtime: Runtime, logits: Path, at: Path | None = None) -> DiagnosisSide:
    """The diagnosis of a model, which lies `at` another place if that is its name to be; `logits` is a new folder."""
    logits.mkdir()
    plan = RunPlan(at, logits, check_advice=check_advice)
    return DiagnosisSide(step_test(path, options, runtime, plan), logits)


def repair_and_prove(session: RepairSession, first: RepairedFiles, choice: RepairChoice) -> Outcome:
    """Write the first repairs, go on in rounds, and prove; if that fails, once more without unhelpful repairs."""
    outcome, changed = _attempt(session, first, choice, frozenset())
    idle = tuple(find_unhelpful(outcome.applied, session.before.report, outcome.after.report))
    useless = tuple((one.stack, one.repair.name) for one in idle)
    if outcome.holds or not idle or not {(a.stack, a.repair.name) for a in outcome.applied} - set(useless):
        return replace(outcome, not_repaired=(*outcome.not_repaired, *map(_report_unhelpful, idle)))
    put_back(session.folder, outcome.changed_files, session.at)
    choice = RepairChoice(choice.names, (*choice.left_out, *useless))
    fewer = apply_repairs(session.folder, session.before.report, choice, session.runtime, session.options)
    outcome, _ = _attempt(session, fewer, choice, changed)
    return replace(outcome, not_repaired=(*outcome.not_repaired, *map(_report_unhelpful, idle)))


def _attempt(
    session: RepairSession, repaired: RepairedFiles, choice: RepairChoice, changed: frozenset[str]
) -> tuple[Outcome, frozenset[str]]:
    """The outcome of all rounds, and the names of all files that differ from the original or did so before."""
    applied, not_repaired = list(repaired.applied), list(repaired.not_repaired)
    changed |= _write(session, repaired)
    after = rediagnose(session, changed)
    for _ in range(MOST_ROUNDS - 1):
        used = tuple((one.stack, one.repair.name) for one in applied)
        remaining = RepairChoice(choice.names, (*choice.left_out, *used), notes=False)
        repaired = apply_repairs(session.open_copy(), after.report, remaining, session.runtime, session.options)
        if not repaired.applied:
            break
        applied += repaired.applied
        not_repaired += repaired.not_repaired
        changed |= _write(session, repaired)
        after = rediagnose(session, changed)
    instead = {}
    for stack in {one.stack for one in applied}:
        sides = (session.before.report, after.report)
        was, now = ({run.level for run in side.runs if run.stack == stack and run.steps} for side in sides)
        if was and was != now:  # the runtime loads the original at a lower level of graph optimization
            instead[stack] = prove_unoptimized(session, stack, after)
    proof = tuple(prove(applied, session.before, after, instead))
    return Outcome(session.before, after, tuple(applied), tuple(not_repaired), proof), changed


def _write(session: RepairSession, repaired: RepairedFiles) -> frozenset[str]:
    """Write the changed files of the copy; gives their names."""
    repairs: dict[str, tuple[str, ...]] = {}
    for one in repaired.applied:
        for file in dict.fromkeys(change.file for change in one.changes):
            repairs[file] = (*repairs.get(file, ()), one.repair.name)
    write_changed(repaired.copy, session.at, repairs)
    return frozenset(repaired.copy.changed)


def _report_unhelpful(one: Applied) -> NotRepaired:
    reason = f"it changed {len(one.changes)} places, and the finding is still there"
    return NotRepaired(one.stack, one.because[0], one.repair.name, reason)


UNOPTIMIZED = "way-off"
"""The experiment that runs the held loop without graph optimization, and a reference run as usual."""


def rediagnose(session: RepairSession, changed: Collection[str]) -> DiagnosisSide:
    """Diagnose the repaired copy; `changed` are the files that differ from the original.

    The location of a finding that was there before is not searched for again. A stack without a changed file is not run
    again: its files are byte for byte copies, and its logits are those of the first diagnosis.
    """
    touched = _find_touched(session.open_copy(), session.before.report, changed)
    after = diagnose_copy(session, session.model, touched)
    for stack in session.before.report.stacks:
        kept = session.before.logits / f"{stack.name}.npz"
        if stack.name not in touched and kept.is_file():
            copy_whole(kept, after.logits / kept.name)
    return replace(after, report=_merge_reports(session.before.report, after.report, touched, session.options))


def diagnose_copy(session: RepairSession, model: str = ".", touched: frozenset[str] | None = None) -> DiagnosisSide:
    """Diagnose the copy as it is now, under the name that it will have: all of it, or the `touched` stacks alone."""
    logits = Path(tempfile.mkdtemp(prefix="logits-", dir=session.scratch))
    plan = RunPlan(session.at / model, logits, touched, locate=touched is None, check_advice=check_advice)
    return DiagnosisSide(step_test(session.shown, session.options, session.runtime, plan), logits)


def _find_touched(folder: ModelFolder, before: Report, changed: Collection[str]) -> frozenset[str]:
    """The stacks to run again: those with a changed file, new ones, and all if a config changed."""
    known = {stack.name: set(stack.files) for stack in before.stacks}
    every = not {Path(name).name for name in changed}.isdisjoint(SIDE_CARS)
    now = {stack.name: {file.name for file in stack.files.values()} for stack in folder.stacks}
    return frozenset(n for n, files in now.items() if every or known.get(n) != files or not files.isdisjoint(changed))


def _merge_reports(before: Report, after: Report, touched: frozenset[str], options: Options) -> Report:
    """The report on the whole copy: new results of the stacks that were run again, earlier results of the others."""
    again = {stack.name for stack in after.stacks}
    kept = [stack for stack in before.stacks if stack.name not in touched and stack.name not in again]
    names = {stack.name for stack in kept}
    order = {stack.name: index for index, stack in enumerate(before.stacks)}
    stacks = sorted((*kept, *after.stacks), key=lambda stack: order.get(stack.name, len(order)))
    located = {finding.fingerprint: finding.evidence for finding in before.findings}
    found = [f if f.evidence else replace(f, evidence=located.get(f.fingerprint, ())) for f in after.findings]
    found += [one for one in before.findings if one.stack in names]
    findings = with_distinct_fingerprints(worst_first(found))
    not_checked = (*after.not_checked, *(entry for entry in before.not_checked if entry.stack in names))
    absent = (*after.absent, *(entry for entry in before.absent if entry.stack in names))
    runs = [*(run for run in before.runs if run.stack in names), *after.runs]
    return replace(
        after,
        stacks=tuple(stacks),
        findings=findings,
        not_checked=not_checked,
        absent=absent,
        runs=tuple(sorted(runs, key=lambda run: order.get(run.stack, len(order)))),
        targets=tuple(_merge_target(target, before.targets, names) for target in after.targets),
        verdict=decide(after.command, findings, not_checked, options.fail_on),
        measured={**{name: before.measured[name] for name in names if name in before.measured}, **after.measured},
    )


def _merge_target(after: TargetFacts, before: Collection[TargetFacts], kept: Collection[str]) -> TargetFacts:
    """The results under a target: new ones of the stacks that were run again, earlier ones of the others."""
    old = next((target for target in before if target.asked == after.asked), after)
    merged: dict[str, Any] = {}
    for name in ("refused", "other_logits", "not_run"):
        then = {stack: fact for stack, fact in getattr(old, name).items() if stack in kept}
        merged[name] = {**then, **getattr(after, name)}
    return replace(after, **merged)


def prove_unoptimized(session: RepairSession, stack: str, after: DiagnosisSide) -> Proof:
    """Run original and copy without graph optimization and compare their logits.

    If the runtime loads the original at a lower level only, its fusions compute the copy differently. Without them on
    both sides, a repair that changes no value leaves all logits equal.
    """
    claim = "without graph optimization, logits equal to the original's, bit for bit"
    found = []
    for name, folder, side in (("original", session.folder.root, session.before), ("copy", session.at, after)):
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
    run = ExperimentJob(name, folder.absolute(), contract, (UNOPTIMIZED,), keep_logits=file, timed=False)
    session.runtime.examine(replace(run, seed=options.seed, provider=options.provider))
    return read_saved(file, UNOPTIMIZED)
