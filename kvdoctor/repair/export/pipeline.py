"""`re-export --from CHECKPOINT`: export again, repair the faults of the exporter, compare the result with PyTorch.

A request that cannot be carried out is refused before any work is done. The model to be replaced is diagnosed, if there
is one; an exporter and its flags are chosen from that; it runs in a Python of its own. Repairs of the graph follow,
then a diagnosis that compares the result with the checkpoint.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.analysis.model_folder import MOST_CONFIG_BYTES, open_folder
from kvdoctor.decode.runs import LOOPS
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.diagnose.build_report import environment
from kvdoctor.diagnose.checkpoint import NAME, Checkpoint
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import NotChecked
from kvdoctor.model.output_folder import refuse_unfit, whole_folder
from kvdoctor.options import Options, ReExportChoices
from kvdoctor.records import record
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.export import run_exporter
from kvdoctor.repair.export.exporters import EXPORTERS, OPTIMUM, SOME_TAKE, TRANSFORMERS_5, Exporter, find_exporter
from kvdoctor.repair.export.run_exporter import ExportedModel, SourceModel
from kvdoctor.repair.fix_report import report_fix, report_unproved
from kvdoctor.repair.pipeline import diagnose, repair_and_prove
from kvdoctor.repair.repairs.registry import refuse_unknown_repairs
from kvdoctor.repair.session import Outcome, RepairChoice, RepairRequest, RepairSession, apply_repairs
from kvdoctor.repair.workspace import copy_export, write_reports
from kvdoctor.report.document import Report, decide
from kvdoctor.report.facts import ModelFacts
from kvdoctor.report.repair_record import ExportRecord, Proof, RepairRecord
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model.bin.index.json")
Announce = Callable[[str], None]
MOST_LOGS = 100
"""Logs of failed exports that stay next to one OUT; none is overwritten."""


def refuse_impossible(request: RepairRequest, checkpoint: str, offline: bool) -> None:
    """Refuse a request that cannot be carried out.

    Raises:
        UsageError: no checkpoint, no weights in it, an OUT that must not be written, an option that the exporter lacks.
    """
    Checkpoint(checkpoint, offline).close()
    folder = Path(checkpoint)
    if folder.is_dir():
        _refuse_unfit_checkpoint(checkpoint, folder)
    if request.out is not None:
        for source in (request.path, checkpoint if folder.is_dir() else None):  # a name of the hub is no file
            if source is not None:
                refuse_unfit(Path(request.out), Path(source), request.force)
    if request.how.exporter is not None:
        _refuse_unfit_options(request.how, find_exporter(request.how.exporter))
    elif not any(run_exporter.supports(exporter, request.how) for exporter in EXPORTERS):
        _refuse_unfit_options(request.how, TRANSFORMERS_5 if request.how.task is None else OPTIMUM)


def _refuse_unfit_checkpoint(shown: str, folder: Path) -> None:
    file = folder / "config.json"
    try:
        config: Any = json.loads(read_side_file(file, MOST_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        why = f"cannot be read ({type(error).__name__}); give a checkpoint"
        raise UsageError(f"config.json of {shown!r} {why}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        why = "names no model_type; --from takes a folder that save_pretrained wrote"
        raise UsageError(f"config.json of {shown!r} {why}")
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        onnx = next(folder.rglob("*.onnx"), None)
        hint = f"it holds an ONNX export ({onnx.name}), and" if onnx is not None else "it has a config.json, and"
        raise UsageError(
            f"no weights in {shown!r}: {hint} --from takes a PyTorch checkpoint with model.safetensors or "
            "pytorch_model.bin, as save_pretrained writes it"
        )


def _refuse_unfit_options(export: ReExportChoices, exporter: Exporter) -> None:
    name = exporter.name
    if export.dtype is not None and export.dtype not in exporter.dtypes:
        raise UsageError(f"--dtype {export.dtype}: the exporter {name} writes {', '.join(exporter.dtypes)}")
    for option in SOME_TAKE:
        if getattr(export, option) is not None and option not in exporter.takes:
            takers = ", ".join(other.name for other in EXPORTERS if option in other.takes)
            raise UsageError(f"--{option.replace('_', '-')} is for the exporter {takers}; {name} has no such option")
    if export.opset is not None and exporter.opsets is None:
        raise UsageError(f"--opset: the exporter {name} writes an opset of its own choice; leave it out")
    lowest, highest = exporter.opsets or (0, 0)
    if export.opset is not None and not lowest <= export.opset <= highest:
        raise UsageError(f"--opset {export.opset}: the exporter {name} writes {lowest} to {highest}")


@record(slots=False)
class _ExportSession:
    """One call under way: the request, the tools, a private folder, and the listener for progress messages."""

    request: RepairRequest
    checkpoint: str
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
        return self.request.path or self.checkpoint

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
    checkpoint = request.how.from_
    if checkpoint is None:
        raise UsageError("give --from CHECKPOINT to export from a checkpoint")
    refuse_unknown_repairs(request.how.fix)
    refuse_impossible(request, checkpoint, options.offline)
    with Runtime(options.limits) as runtime, scratch_folder() as scratch:
        session = _ExportSession(request, checkpoint, options, runtime, Path(scratch), listener)
        source = _read_source(session)
        with _export_folder(session) as folder:
            try:
                exported = _run_exporter(session, source, folder)
            except run_exporter.ExportFailed as reason:
                return _report_failure(session, source, str(reason))
            with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
                report, proved = _repair_export(session, source, exported, folder, pending.path)
                if request.out is not None and (proved or request.how.keep_unproved):
                    run_exporter.write_recipe(pending.path, exported, checkpoint, Path(scratch, "log.txt"))
                    write_reports(pending.path, report)
                    pending.kept = True
        return report


def _read_source(session: _ExportSession) -> SourceModel:
    """The model that is replaced, by a diagnosis of its own."""
    path = session.request.path
    if path is not None and not Path(path).exists():
        raise UsageError(f"{path!r} does not exist; leave it out if there is no ONNX model yet")
    if path is None:
        return run_exporter.no_source(session.checkpoint)
    session.announce(f"diagnosing {path}")
    return run_exporter.read_source(
        step_test(path, session.plain_options, session.runtime, RunPlan(check_advice=check_advice))
    )


@contextlib.contextmanager
def _export_folder(session: _ExportSession) -> Iterator[Path]:
    """The folder of the exporter: next to OUT, so the copy may share blocks; after a kill the next run sweeps it."""
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
    offline = session.options.offline
    with (session.scratch / "log.txt").open("w", encoding="utf-8", errors="replace") as log:
        workspace = run_exporter.ExportWorkspace(session.checkpoint, folder, log, offline, session.listener)
        return run_exporter.run_first_working(run_exporter.list_plans(session.request.how, source.facts), workspace)


def _repair_export(
    session: _ExportSession, source: SourceModel, exported: ExportedModel, folder: Path, target: Path
) -> tuple[Report, bool]:
    """Repair the new export into its place, prove it, and report; gives whether it was proved."""
    deleted = run_exporter.delete_surplus_decoders(folder, source)
    before = diagnose(session.shown, session.plain_options, session.runtime, session.scratch / "before", folder)
    opened, choice = open_folder(session.shown, folder), RepairChoice(session.request.how.fix)
    copy_export(replace(opened, shown=str(folder)), target)
    options, runtime = session.plain_options, session.runtime
    repair = RepairSession(options, runtime, session.scratch, opened, before, session.shown, target, ".")
    first = apply_repairs(opened, before.report, choice, runtime, options)
    outcome = Outcome(before, before, (), first.not_repaired, ())
    outcome = repair_and_prove(repair, first, choice) if first.applied else outcome
    session.announce("comparing it with PyTorch")
    compared = replace(session.options, reference=session.checkpoint)
    after = diagnose(session.shown, compared, session.runtime, session.scratch / "compared", target)
    proof = (*outcome.proof, *_prove_export(after.report, {entry.stack for entry in outcome.proof}))
    outcome = replace(outcome, after=after, proof=proof)
    plan = exported.plan
    record = ExportRecord(
        checkpoint=after.report.arguments["reference"],
        exporter=plan.exporter.name,
        way=exported.way,
        requirements=plan.exporter.needs.requirements,
        versions=exported.versions,
        choices=plan.choices,
        failures=exported.failures,
        findings=before.report.findings,
        ports=tuple(run_exporter.compare_ports(source, after.report.model.files)),
        left_out=deleted,
        recipe=run_exporter.FOLDER,
    )
    return _report(session, source, repair, outcome, record), outcome.holds


def _prove_export(after: Report, repaired: set[str]) -> Iterator[Proof]:
    """The claims on each stack: no error, loops that pass, logits of the checkpoint.

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
        missing = next((e.reason for e in after.not_checked if e.code == "KV320" and e.stack == stack.name), "")
        compared = runs.get(NAME)
        holds = compared is not None and compared.outcome == "passed" and compared.reason is not None
        reason = (compared.reason if compared is not None else None) or missing
        reason = missing if not holds and missing else reason or "it was not compared with the checkpoint"
        yield Proof(stack.name, "logits are those of PyTorch", holds, reason)


def _report(
    session: _ExportSession, source: SourceModel, repair: RepairSession, outcome: Outcome, export: ExportRecord
) -> Report:
    """The fix report of the model that was replaced: its findings are those before, those of the copy after."""
    request, asked = session.request, session.request.how
    if outcome.holds or request.how.keep_unproved:
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
    names = ("exporter", "opset", "dtype", "task")
    given = {"from": asked.from_, **{name: getattr(asked, name) for name in names}}
    arguments = {**report.arguments, **given, "offline": session.options.offline}
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
        arguments=options.as_arguments() | {"from": session.checkpoint},
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
    """Keep the exporter's log next to the place of OUT; None if it is empty or nothing may be written."""
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
