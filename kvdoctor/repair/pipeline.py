"""`re-export`: diagnose, copy, repair in rounds, convert, diagnose again, prove, and write a whole copy or none."""

import tempfile
from pathlib import Path

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import UsageError
from kvdoctor.model.output_folder import refuse_unfit, whole_folder
from kvdoctor.options import Options
from kvdoctor.repair.apply import RepairChoice, RepairedFiles, apply_repairs
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.conversions.pipeline import apply_conversions, refuse_impossible_conversions
from kvdoctor.repair.convert_layout import (
    apply_layout,
    convert_stacks,
    find_replaced_files,
    is_always_proved,
    refuse_impossible_layout,
    refuse_unknown_layout,
)
from kvdoctor.repair.fix_report import report_fix, report_nothing_done, report_refused, report_unproved
from kvdoctor.repair.output import copy_export, write_reports
from kvdoctor.repair.repairs.registry import refuse_unknown_repairs
from kvdoctor.repair.request import RepairRequest
from kvdoctor.repair.rounds import accept_unrepaired, repair_and_prove
from kvdoctor.repair.session import DiagnosisSide, Outcome, RepairSession
from kvdoctor.repair.workspace import CannotConvert
from kvdoctor.report.document import EXIT_FINDINGS, Report, exit_code
from kvdoctor.runtime.client import Runtime


def re_export(request: RepairRequest, options: Options) -> Report:
    """Repair the model at a path into OUT and diagnose the result again.

    A graph that has not the form that a conversion needs may have it when its faults are repaired: so it is diagnosed
    before it is refused, and what was found comes first.

    Raises:
        UsageError: there is nothing at the path, a repair is unknown, OUT must not be written, or a model without
            errors cannot be converted; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    path = _refuse_impossible(request)
    refusal = _find_refusal(path, request, options)
    with (
        Runtime(options.limits) as runtime,
        tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch,
    ):
        before = _diagnose(path, options, runtime, Path(scratch, "before"))
        folder, choice = open_folder(path), RepairChoice(request.fix)
        first = apply_repairs(folder, before.report, choice, runtime, options)
        if refusal is not None and not first.applied:
            return _refuse(before.report, first, refusal)
        if not (first.applied or request.layout.is_asked or request.conversions):
            return report_nothing_done(before.report, first.not_repaired, request.fix)
        with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
            shown, model = request.out or path, "." if Path(path).is_dir() else Path(path).name
            session = RepairSession(options, runtime, Path(scratch), folder, before, shown, pending.path, model)
            try:
                outcome = _make_copy(session, request, first)
            except CannotConvert as reason:
                return _refuse(before.report, first, reason)
            if not outcome.applied:
                return report_nothing_done(before.report, first.not_repaired, request.fix)
            if not (outcome.holds or request.keep_unproved):
                if refusal is not None and not _has_errors(before.report):
                    raise refusal  # the model works, and what was tried to repair it did not help
                may_keep = not (request.conversions or is_always_proved(request.layout))
                return report_unproved(session, outcome, may_keep, refusal)
            report = report_fix(session, outcome, request.out)
            if request.out is not None:
                write_reports(pending.path, report)
                pending.kept = True
        return report


def _refuse_impossible(request: RepairRequest) -> str:
    """Refuse what cannot be asked for, before any work; gives the path.

    Raises:
        UsageError: with the reason.
    """
    if request.path is None:
        raise UsageError("give the path of a model to repair")
    refuse_unknown_repairs(request.fix)
    refuse_unknown_layout(request.layout)
    if request.conversions and request.keep_unproved:
        raise UsageError("--keep-unproved: a conversion that is not proved is never written")
    if request.out is not None and Path(request.path).exists():
        refuse_unfit(Path(request.out), Path(request.path), request.force)
    return request.path


def _find_refusal(path: str, request: RepairRequest, options: Options) -> CannotConvert | None:
    """Why the model at a path cannot be given the form that is asked for, as it is; None if it can.

    Raises:
        UsageError: the form cannot be asked for.
    """
    try:
        refuse_impossible_layout(path, request.layout, request.keep_unproved)
        refuse_impossible_conversions(path, request.conversions, options)
    except CannotConvert as refusal:
        return refusal
    return None


def _refuse(before: Report, tried: RepairedFiles, refusal: CannotConvert) -> Report:
    """The report if a model with errors cannot be converted: its findings, and then why.

    Raises:
        CannotConvert: there are no errors.
    """
    if not _has_errors(before):
        raise refusal
    return report_refused(before, tried, refusal)


def _has_errors(report: Report) -> bool:
    """Whether there are findings that count."""
    return exit_code(report, report.fail_on) == EXIT_FINDINGS


def _diagnose(path: str, options: Options, runtime: Runtime, logits: Path) -> DiagnosisSide:
    logits.mkdir()
    return DiagnosisSide(step_test(path, options, runtime, RunPlan(logits=logits, check_advice=check_advice)), logits)


def _make_copy(session: RepairSession, request: RepairRequest, first: RepairedFiles) -> Outcome:
    """Copy the export, repair it, convert it and give it the layout that is asked for."""
    if first.applied or request.conversions:
        copy_export(session.folder, session.at)
        outcome = accept_unrepaired(session.before, first)
        if first.applied:
            outcome = repair_and_prove(session, first, RepairChoice(request.fix))
        outcome = apply_conversions(session, request.conversions, outcome)
        return apply_layout(session, request.layout, outcome)
    # The files that a layout replaces need not be copied first.
    ready = convert_stacks(session.folder, session.before.contracts, request.layout)
    copy_export(session.folder, session.at, find_replaced_files(session.folder, ready))
    return apply_layout(session, request.layout, accept_unrepaired(session.before, first), ready)
