"""`re-export --from CHECKPOINT`: export again, repair the faults of the exporter, compare the result with PyTorch.

The model to be replaced is diagnosed, if there is one; an exporter and its flags are chosen from that; it runs in a
Python of its own. Repairs of the graph follow, then a diagnosis that compares the result with the checkpoint.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.runs import LOOPS, Run
from kvdoctor.diagnose.checkpoint import GREEDY, NAME
from kvdoctor.diagnose.facts import environment
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import NotChecked
from kvdoctor.model.output_folder import whole_folder
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.apply import RepairChoice, apply_repairs
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.convert_layout import apply_layout, refuse_unknown_layout
from kvdoctor.repair.export.check_request import refuse_impossible
from kvdoctor.repair.export.choose_exporter import list_plans
from kvdoctor.repair.export.run_exporter import (
    FOLDER,
    ExportedModel,
    ExportFailed,
    ExportWorkspace,
    run_first_working,
    write_recipe,
)
from kvdoctor.repair.export.source_model import (
    SourceModel,
    compare_ports,
    delete_surplus_decoders,
    no_source,
    read_because,
    read_source,
)
from kvdoctor.repair.fix_report import report_fix, report_unproved
from kvdoctor.repair.output import copy_export, write_reports
from kvdoctor.repair.repairs.registry import refuse_unknown_repairs
from kvdoctor.repair.request import ExportRequest, RepairRequest
from kvdoctor.repair.rounds import accept_unrepaired, repair_and_prove
from kvdoctor.repair.session import DiagnosisSide, Outcome, RepairSession
from kvdoctor.report.document import Report, decide
from kvdoctor.report.facts import ModelFacts
from kvdoctor.report.repair_record import ExportRecord, Proof, RepairRecord
from kvdoctor.runtime.client import Runtime

Announce = Callable[[str], None]
MOST_LOGS = 100
"""Logs of failed exports that are kept beside one OUT; none is overwritten."""
PYTORCH_CLAIMS = {NAME: "logits are those of PyTorch", GREEDY: "greedy tokens are those of PyTorch"}


@record(slots=False)
class _ExportSession:
    """One call under way: the request, the tools, a private folder, and the listener for progress messages."""

    request: RepairRequest
    export: ExportRequest
    options: Options
    runtime: Runtime
    scratch: Path
    listener: Announce | None

    @property
    def shown(self) -> str:
        """The name of the export in reports while it is diagnosed."""
        return self.request.out or self.replaced

    @property
    def replaced(self) -> str:
        """The path of the model to be replaced, or the checkpoint if there is none."""
        return self.request.path or self.export.checkpoint

    @property
    def plain_options(self) -> Options:
        """The options of diagnoses that do not compare with the checkpoint."""
        return replace(self.options, reference=None)

    def announce(self, text: str) -> None:
        """Tell the listener what is done next."""
        if self.listener is not None:
            self.listener(text)


def export_from_checkpoint(request: RepairRequest, options: Options, listener: Announce | None = None) -> Report:
    """Export a checkpoint into OUT and prove the result. `listener` receives progress messages.

    Raises:
        UsageError: the request cannot be carried out, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    export = request.export
    if export is None:
        raise UsageError("give --from CHECKPOINT to export from a checkpoint")
    refuse_unknown_repairs(request.fix)
    refuse_unknown_layout(request.layout)
    refuse_impossible(request, export, options.offline)
    with Runtime(options.limits) as runtime, tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch:
        session = _ExportSession(request, export, options, runtime, Path(scratch), listener)
        source = _read_source(session)
        with _export_folder(session) as folder:
            try:
                exported = _run_exporter(session, source, folder)
            except ExportFailed as reason:
                return _report_failure(session, source, str(reason))
            with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
                report, proved = _repair_export(session, source, exported, folder, pending.path)
                if request.out is not None and (proved or request.keep_unproved):
                    write_recipe(pending.path, exported, export.checkpoint, Path(scratch, "log.txt"))
                    write_reports(pending.path, report)
                    pending.kept = True
        return report


def _read_source(session: _ExportSession) -> SourceModel:
    """The model that is replaced, from an earlier report or from a diagnosis of its own."""
    path, because = session.request.path, session.export.because
    if path is not None and not Path(path).exists():
        raise UsageError(f"{path!r} does not exist; leave it out if there is no ONNX model yet")
    if because is not None:
        return read_because(because)
    if path is None:
        return no_source(session.export.checkpoint)
    session.announce(f"diagnosing {path}")
    return read_source(
        step_test(path, session.plain_options, session.runtime, RunPlan(check_advice=check_advice)).to_dict()
    )


@contextlib.contextmanager
def _export_folder(session: _ExportSession) -> Iterator[Path]:
    """The folder of the exporter: beside OUT, so the copy may share blocks; after a kill the next run sweeps it."""
    out = session.request.out
    folder = session.scratch / "export"
    if out is not None:
        folder = Path(out).with_name(f".{Path(out).name}.kvdoctor-{os.getpid()}.export.partial")
    try:
        folder.mkdir()
        yield folder
    except OSError as error:
        raise UsageError(f"cannot write {str(out)!r}: {error.strerror or error}; nothing was left there") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_exporter(session: _ExportSession, source: SourceModel, folder: Path) -> ExportedModel:
    export, offline = session.export, session.options.offline
    with (session.scratch / "log.txt").open("w", encoding="utf-8", errors="replace") as log:
        workspace = ExportWorkspace(export.checkpoint, folder, log, offline, session.listener)
        return run_first_working(list_plans(export, source.facts), workspace)


def _repair_export(
    session: _ExportSession, source: SourceModel, exported: ExportedModel, folder: Path, target: Path
) -> tuple[Report, bool]:
    """Repair the new export into its place, prove it, and report; gives whether it was proved."""
    deleted = delete_surplus_decoders(folder, source)
    before = _diagnose(session, session.plain_options, folder, "before")
    opened, choice = open_folder(session.shown, folder), RepairChoice(session.request.fix)
    copy_export(replace(opened, shown=str(folder)), target)
    repair = RepairSession(
        session.plain_options, session.runtime, session.scratch, opened, before, session.shown, target, "."
    )
    first = apply_repairs(opened, before.report, choice, session.runtime, session.plain_options)
    outcome = repair_and_prove(repair, first, choice) if first.applied else accept_unrepaired(before, first)
    outcome = apply_layout(repair, session.request.layout, outcome)
    session.announce("comparing it with PyTorch")
    compared = replace(session.options, reference=session.export.checkpoint)
    after = _diagnose(session, compared, target, "compared")
    proof = (*outcome.proof, *_prove_export(after.report, {entry.stack for entry in outcome.proof}))
    outcome = replace(outcome, after=after, proof=proof)
    record = _make_record(source, exported, before.report, after.report, deleted)
    return _report(session, source, repair, outcome, record), outcome.holds


def _diagnose(session: _ExportSession, options: Options, folder: Path, name: str) -> DiagnosisSide:
    logits = session.scratch / name
    logits.mkdir()
    plan = RunPlan(folder, logits, check_advice=check_advice)
    return DiagnosisSide(step_test(session.shown, options, session.runtime, plan), logits)


def _prove_export(after: Report, repaired: set[str]) -> Iterator[Proof]:
    """The claims on each stack: no error, loops that pass, logits and greedy tokens of the checkpoint.

    The loops of `repaired` stacks are proved already.
    """
    stacks = [stack for stack in after.stacks if stack.contract is not None]
    if not stacks:
        yield Proof("export", "it holds a decoder with a cache", False, "no cache contract could be read")
    for stack in stacks:
        errors = sorted({f.name for f in after.findings if f.severity == "error" and f.stack in (stack.name, None)})
        yield Proof(stack.name, "no error is found", not errors, ", ".join(errors))
        runs = {run.experiment: run for run in after.runs if run.stack == stack.name}
        loops = [runs[name] for name in LOOPS if name in runs and runs[name].outcome != "skipped"]
        for run in loops if stack.name not in repaired else ():
            yield Proof(stack.name, f"{run.experiment} passes", run.shows == "passed", f"{len(run.steps)} steps")
        if not loops:
            yield Proof(stack.name, "plain-loop passes", False, "no loop could be run")
        yield from _compare_with_pytorch(stack.name, runs, after)


def _compare_with_pytorch(stack: str, runs: dict[str, Run], after: Report) -> Iterator[Proof]:
    missing = next((e.reason for e in after.not_checked if e.code == "KV320" and e.stack == stack), "")
    for experiment, claim in PYTORCH_CLAIMS.items():
        run = runs.get(experiment)
        holds = run is not None and run.outcome == "passed" and run.reason is not None
        reason = (run.reason if run is not None else None) or missing or "it was not compared with the checkpoint"
        yield Proof(stack, claim, holds, missing if not holds and missing else reason)


def _make_record(
    source: SourceModel, exported: ExportedModel, before: Report, after: Report, deleted: tuple[str, ...]
) -> ExportRecord:
    plan = exported.plan
    return ExportRecord(
        checkpoint=after.arguments["reference"],
        exporter=plan.exporter.name,
        way=exported.way,
        requirements=plan.exporter.needs.requirements,
        versions=exported.versions,
        choices=plan.choices,
        failures=exported.failures,
        findings=before.findings,
        ports=tuple(compare_ports(source, tuple(after.to_dict()["model"]["files"]))),
        left_out=deleted,
        recipe=FOLDER,
    )


def _report(
    session: _ExportSession, source: SourceModel, repair: RepairSession, outcome: Outcome, export: ExportRecord
) -> Report:
    """The fix report of the model that was replaced: its findings are those before, those of the copy after."""
    request, asked = session.request, session.export
    if outcome.holds or request.keep_unproved:
        report = report_fix(repair, outcome, request.out)
    else:  # the last diagnosis is the one that was compared with PyTorch
        report = report_unproved(repair, replace(outcome, before=outcome.after))
    if report.repair is None:
        return report
    written = report.repair.out is not None
    record = replace(
        report.repair,
        source=session.replaced,
        before=source.before,
        export=export if written else replace(export, recipe=None),
        undo=(f"To undo, delete the folder {request.out}",) if written else (),
    )
    arguments = report.arguments | {
        "from": asked.checkpoint,
        "exporter": asked.exporter,
        "opset": asked.opset,
        "dtype": asked.dtype,
        "task": asked.task,
        "because": asked.because,
        "offline": session.options.offline,
    }
    verdict = report.verdict if record.after is None else record.after.verdict
    return replace(report, verdict=verdict, repair=record, arguments=arguments)


def _report_failure(session: _ExportSession, source: SourceModel, reason: str) -> Report:
    """The report if no export could be made: earlier findings stand, and nothing is called healthy."""
    log = _keep_log(session)
    text = f"no export was made: {reason}" + (f"; the full log is {log}" if log is not None else "")
    missing = (NotChecked(None, "*", text, essential=True),)
    before, options = source.before, session.options
    return Report(
        command="re-export",
        arguments=options.as_arguments() | {"from": session.export.checkpoint},
        seed=options.seed,
        verdict=decide("re-export", before.findings, missing, options.fail_on),
        environment=environment(),
        model=ModelFacts(session.replaced, ()),
        findings=before.findings,
        not_checked=missing,
        repair=RepairRecord(session.replaced, None, (), before, None, ()),
        notes=("nothing was written",),
    )


def _keep_log(session: _ExportSession) -> str | None:
    """Keep the exporter's log beside the place of OUT; None if it is empty or nothing may be written."""
    log = session.scratch / "log.txt"
    if session.request.out is None or not log.is_file() or not log.stat().st_size:
        return None
    out = Path(session.request.out)
    for number in range(1, MOST_LOGS):
        place = out.with_name(f"{out.name}.export-log{'' if number == 1 else f'-{number}'}.txt")
        try:
            with place.open("xb") as file, log.open("rb") as source:
                shutil.copyfileobj(source, file)
        except FileExistsError:
            continue
        except OSError:
            return None
        return str(place)
    return None
