"""`re-export --from CHECKPOINT`: export afresh, repair what the exporter does wrong, prove it against PyTorch.

The sick model is diagnosed, where there is one; an exporter and its flags are chosen from that; it runs in a Python of
its own; the graph repairs follow, then a diagnosis that holds the result against the checkpoint.
"""

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.afresh import keeping, sick
from kvdoctor.afresh.asked import Asked, refuse_impossible
from kvdoctor.afresh.choosing import plans
from kvdoctor.afresh.making import FOLDER, Bench, Made, NotMade, make, write_recipe
from kvdoctor.afresh.proving import prove
from kvdoctor.afresh.sick import Known
from kvdoctor.cure import converting
from kvdoctor.cure.fitting import Refitting, untouched
from kvdoctor.cure.proof import Side
from kvdoctor.cure.record import fix_report, unproved
from kvdoctor.cure.surgery import Outcome, Surgery
from kvdoctor.cure.treatment import Chosen, treat
from kvdoctor.cure.writing import copy_export, write_reports
from kvdoctor.doctor import Options, step_test
from kvdoctor.errors import UsageError
from kvdoctor.export.wishes import Wishes
from kvdoctor.facts import environment
from kvdoctor.findings import NotChecked
from kvdoctor.model_folder import open_folder
from kvdoctor.out_folder import whole_folder
from kvdoctor.re_exporting import refuse_unknown
from kvdoctor.report.document import (
    ExportChoice,
    ExportRecord,
    ModelFacts,
    RepairRecord,
    Report,
    decide,
)
from kvdoctor.runtimes import Runtime

Said = Callable[[str], None]
MOST_LOGS = 100
"""Logs of failed exports that are kept beside one OUT; none is written over."""


@dataclass(frozen=True)
class _Bed:
    """The tools of one call."""

    asked: Asked
    options: Options
    runtime: Runtime
    scratch: Path
    told: Said | None

    @property
    def shown(self) -> str:
        """What the export is called while it is diagnosed."""
        return self.asked.out or self.asked.path or self.asked.checkpoint


def export_afresh(asked: Asked, options: Options, told: Said | None = None) -> Report:
    """Export a checkpoint into OUT and prove the result. `told` is told what is being done.

    Raises:
        UsageError: what was asked for cannot be done, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    refuse_unknown(asked.fix)
    converting.refuse_unknown(asked.fit)
    refuse_impossible(asked, options.offline)
    with Runtime(options.limits) as runtime, tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch:
        bed = _Bed(asked, options, runtime, Path(scratch), told)
        known = _known(bed)
        with _source_folder(bed) as source:
            try:
                made = _made(bed, known, source)
            except NotMade as reason:
                return _failed(bed, known, str(reason))
            with whole_folder(Path(scratch, "out") if asked.out is None else Path(asked.out)) as pending:
                report, proved = _cured(bed, known, made, source, pending.path)
                if asked.out is not None and (proved or asked.keep_unproved):
                    write_recipe(pending.path, made, asked.checkpoint, Path(scratch, "log.txt"))
                    write_reports(pending.path, report)
                    pending.kept = True
        return report


def _known(bed: _Bed) -> Known:
    """What is known of the model that is replaced: by an earlier report, else by a diagnosis of its own."""
    asked = bed.asked
    if asked.path is not None and not Path(asked.path).exists():
        raise UsageError(f"{asked.path!r} does not exist; leave it out where there is no ONNX model yet")
    if asked.because is not None:
        return sick.read_because(asked.because)
    if asked.path is None:
        return sick.nothing(asked.checkpoint)
    _say(bed, f"diagnosing {asked.path}")
    report = step_test(asked.path, replace(bed.options, reference=None), bed.runtime)
    return sick.known_of(report.to_dict())


@contextlib.contextmanager
def _source_folder(bed: _Bed) -> Iterator[Path]:
    """Where the exporter writes: beside OUT, so that the copy may share its blocks; swept with the rest if killed."""
    out = bed.asked.out
    place = bed.scratch / "export"
    if out is not None:
        place = Path(out).with_name(f".{Path(out).name}.kvdoctor-{os.getpid()}.export.partial")
    try:
        place.mkdir()
        yield place
    except OSError as error:
        raise UsageError(f"cannot write {str(out)!r}: {error.strerror or error}; nothing was left there") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _made(bed: _Bed, known: Known, source: Path) -> Made:
    asked = bed.asked
    wishes = Wishes(
        asked.checkpoint, asked.exporter, asked.opset, asked.dtype, asked.task, bed.options.required, known.sick
    )
    with (bed.scratch / "log.txt").open("w", encoding="utf-8", errors="replace") as log:
        return make(plans(wishes), Bench(asked.checkpoint, source, log, bed.options.offline, bed.told))


def _cured(bed: _Bed, known: Known, made: Made, source: Path, target: Path) -> tuple[Report, bool]:
    """Repair the fresh export into its place, prove it, and tell; whether it was proved."""
    left_out = keeping.leave_out(source, known)
    plain, logits = replace(bed.options, reference=None), bed.scratch / "before"
    logits.mkdir()
    before = Side(step_test(bed.shown, plain, bed.runtime, logits, source), logits)
    folder, chosen = open_folder(bed.shown, source), Chosen(bed.asked.fix)
    copy_export(replace(folder, shown=str(source)), target)
    first = treat(folder, before.report, chosen, bed.runtime, plain)
    surgery = Surgery(plain, bed.runtime, bed.scratch, folder, before, bed.shown, target, ".")
    outcome = surgery.operate(first, chosen) if first.applied else untouched(before, first)
    outcome = Refitting(surgery, bed.asked.fit).carry_out(outcome)
    held = bed.scratch / "held"
    held.mkdir()
    _say(bed, "holding it against PyTorch")
    after = step_test(bed.shown, replace(plain, reference=bed.asked.checkpoint), bed.runtime, held, target)
    outcome = replace(
        outcome,
        after=Side(after, held),
        proof=(*outcome.proof, *prove(after, {entry.stack for entry in outcome.proof})),
    )
    export = _record(known, made, before.report, after, left_out)
    if _writes(bed, outcome):
        report = fix_report(surgery, outcome, bed.asked.out)
    else:  # what holds it against PyTorch is the last diagnosis
        report = unproved(surgery, replace(outcome, before=outcome.after))
    return _told(report, bed, known, export), outcome.holds


def _writes(bed: _Bed, outcome: Outcome) -> bool:
    return outcome.holds or bed.asked.keep_unproved


def _told(report: Report, bed: _Bed, known: Known, export: ExportRecord) -> Report:
    """The fix report, of the model that was replaced: its findings stand before, those of the copy after."""
    assert report.repair is not None  # noqa: S101 - made with one
    written = report.repair.out is not None
    record = replace(
        report.repair,
        source=bed.asked.path or bed.asked.checkpoint,
        before=known.before,
        export=export if written else replace(export, recipe=None),
        undo=(f"To undo, delete the export: rm -r {shlex.quote(bed.asked.out or '')}",) if written else (),
    )
    arguments = report.arguments | {
        "from": bed.asked.checkpoint,
        "exporter": bed.asked.exporter,
        "opset": bed.asked.opset,
        "dtype": bed.asked.dtype,
        "task": bed.asked.task,
        "because": bed.asked.because,
        "offline": bed.options.offline,
    }
    return replace(report, repair=record, arguments=arguments)


def _record(known: Known, made: Made, before: Report, after: Report, left_out: tuple[str, ...]) -> ExportRecord:
    plan = made.plan
    return ExportRecord(
        checkpoint=after.arguments["reference"],
        exporter=plan.exporter.name,
        way=made.way,
        requirements=plan.exporter.needs.requirements,
        versions=made.versions,
        choices=tuple(ExportChoice(choice.what, choice.value, choice.because) for choice in plan.choices),
        failures=made.failures,
        findings=before.findings,
        ports=tuple(keeping.changed_ports(known, tuple(after.to_dict()["model"]["files"]))),
        left_out=left_out,
        recipe=FOLDER,
    )


def _failed(bed: _Bed, known: Known, reason: str) -> Report:
    """The report where no export could be made: what was found before stands, and nothing is called healthy."""
    log = _kept_log(bed)
    text = f"no export was made: {reason}" + (f"; the full log is {log}" if log is not None else "")
    missing = (NotChecked(None, "*", text, essential=True),)
    before = known.before
    return Report(
        command="re-export",
        arguments=bed.options.as_arguments() | {"from": bed.asked.checkpoint},
        seed=bed.options.seed,
        verdict=decide("re-export", before.findings, missing, bed.options.fail_on),
        environment=environment(),
        model=ModelFacts(bed.asked.path or bed.asked.checkpoint, ()),
        findings=before.findings,
        not_checked=missing,
        repair=RepairRecord(bed.asked.path or bed.asked.checkpoint, None, (), before, None, ()),
        notes=("nothing was written",),
    )


def _kept_log(bed: _Bed) -> str | None:
    """Keep what the exporter said beside where OUT would be; None where nothing was said, or nothing is written."""
    log = bed.scratch / "log.txt"
    if bed.asked.out is None or not log.is_file() or not log.stat().st_size:
        return None
    out = Path(bed.asked.out)
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


def _say(bed: _Bed, text: str) -> None:
    if bed.told is not None:
        bed.told(text)
