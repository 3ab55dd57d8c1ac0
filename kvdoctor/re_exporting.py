"""`re-export`: repair a copy, prove it, and put it in its place whole or not at all.

A short table of contents; the parts stand in `cure/`. The way of an export: diagnosed, copied, repaired in rounds,
diagnosed again, proved, reported.
"""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from kvdoctor.cure import converting
from kvdoctor.cure.converting import Fit
from kvdoctor.cure.fitting import Refitting, untouched
from kvdoctor.cure.proof import Side
from kvdoctor.cure.record import fix_report, nothing_done, unproved
from kvdoctor.cure.surgery import Surgery
from kvdoctor.cure.treatment import Chosen, treat
from kvdoctor.cure.writing import copy_export, write_reports
from kvdoctor.doctor import Options, step_test
from kvdoctor.errors import UsageError
from kvdoctor.model_folder import open_folder
from kvdoctor.out_folder import refuse_unfit, whole_folder
from kvdoctor.repairs import load
from kvdoctor.report.document import Report
from kvdoctor.runtimes import Runtime
from kvdoctor.tolerances import tolerating


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. Without `out` the repair is made and proved in a private folder, and nothing is kept.

    `fix` are the names of the repairs that may be used; empty: all. `fit` is the layout that the copy shall have.
    """

    path: str
    out: str | None
    force: bool = False
    fix: tuple[str, ...] = ()
    keep_unproved: bool = False
    fit: Fit = field(default_factory=Fit)


def re_export(request: Request, options: Options) -> Report:
    """Repair the model at a path into OUT and diagnose the result again.

    Raises:
        UsageError: there is nothing at the path, a repair is unknown, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    refuse_unknown(request.fix)
    converting.refuse_unknown(request.fit)
    converting.refuse_unfit(request.path, request.fit)
    if request.out is not None and Path(request.path).exists():
        refuse_unfit(Path(request.out), Path(request.path), request.force)
    with (
        tolerating(options.tolerances),
        Runtime(options.limits) as runtime,
        tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch,
    ):
        logits = Path(scratch, "before")
        logits.mkdir()
        before = Side(step_test(request.path, options, runtime, logits), logits)
        folder, chosen = open_folder(request.path), Chosen(request.fix)
        first = treat(folder, before.report, chosen, runtime, options)
        if not (first.applied or request.fit.is_asked):
            return nothing_done(before.report, first.unmended, request.fix)
        out = Path(scratch, "out") if request.out is None else Path(request.out)
        with whole_folder(out) as pending:
            shown = request.path if request.out is None else request.out
            model = "." if Path(request.path).is_dir() else Path(request.path).name
            surgery = Surgery(options, runtime, Path(scratch), folder, before, shown, pending.path, model)
            refitting = Refitting(surgery, request.fit)
            copy_export(folder, pending.path, refitting.left_out(bool(first.applied)))
            outcome = refitting.carry_out(surgery.operate(first, chosen) if first.applied else untouched(before, first))
            if not outcome.applied:
                return nothing_done(before.report, first.unmended, request.fix)
            if not (outcome.holds or request.keep_unproved):
                return unproved(surgery, outcome)
            report = fix_report(surgery, outcome, request.out)
            if request.out is not None:
                write_reports(pending.path, report)
                pending.kept = True
        return report


def refuse_unknown(names: tuple[str, ...]) -> None:
    """Refuse a repair that does not exist.

    Raises:
        UsageError: with the nearest name, and all of them.
    """
    known = [repair.name for repair in load()]
    for name in names:
        if name not in known:
            import difflib

            close = difflib.get_close_matches(name, known, 1, 0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            raise UsageError(f"there is no repair {name!r}{hint} the repairs are {', '.join(sorted(known))}")
