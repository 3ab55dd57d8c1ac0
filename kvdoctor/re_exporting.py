"""`re-export`: repair a copy, prove it, and put it in its place whole or not at all."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.doctor import Options, step_test
from kvdoctor.findings import Finding
from kvdoctor.lowering import MENDS, CannotLower, wanted
from kvdoctor.lowering.files import Lowered, lower_files
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.out_folder import MARK, copy_whole, refuse_unfit, regular_files, whole_folder, write_whole
from kvdoctor.report.document import Change, Proof, RepairRecord, Report, Side
from kvdoctor.runtimes import Runtime
from kvdoctor.stacks import StackFiles
from kvdoctor.targets import parse_targets
from kvdoctor.trace import Run

if TYPE_CHECKING:
    import onnx

    from kvdoctor.repairs import Repair

NOT_WRITTEN = "no copy was written"
SIDE_CARS = {"config.json", "generation_config.json", "genai_config.json", "export.json"}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for. Without `out` the repair is made and proved in a private folder, and nothing is kept."""

    path: str
    out: str | None
    force: bool = False
    ir_version: int | None = None
    opset: int | None = None

    @property
    def numbers(self) -> bool:
        """Whether an IR version or an opset was asked for by number."""
        return self.ir_version is not None or self.opset is not None


@dataclass(frozen=True)
class Treatment:
    """The repairs of one stack: the changed model, and what was changed."""

    stack: StackFiles
    repairs: "tuple[Repair, ...]"
    changes: tuple[Change, ...]
    model: "onnx.ModelProto | None"
    mends: tuple[str, ...] = ()


def re_export(request: Request, options: Options) -> Report:
    """Repair the model at a path into OUT and diagnose the result again.

    Raises:
        UsageError: there is nothing at the path, or OUT must not be written; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if request.out is not None and Path(request.path).exists():
        refuse_unfit(Path(request.out), Path(request.path), request.force)
    with Runtime(options.limits) as runtime, tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch:
        before_logits, after_logits = Path(scratch, "before"), Path(scratch, "after")
        before_logits.mkdir()
        after_logits.mkdir()
        before = step_test(request.path, options, runtime, before_logits)
        folder = open_folder(request.path)
        treatments = tuple(_treatments(folder, before))
        try:
            lowered = _lowered(folder, treatments, before, options, request)
        except CannotLower as reason:
            if request.numbers:
                raise
            return replace(_nothing_done(before), notes=(*before.notes, str(reason), NOT_WRITTEN))
        treatments = _with_lowered(folder, treatments, lowered, before)
        if not treatments:
            return _nothing_done(before)
        shown = request.path if request.out is None else request.out
        with whole_folder(Path(scratch, "out") if request.out is None else Path(request.out)) as pending:
            _fill(pending.path, folder, treatments, lowered)
            after = step_test(shown, options, runtime, after_logits, at=pending.path / _relative_path(request.path))
            proof = (
                *_proof(treatments, before, after),
                *_same_logits(treatments, before_logits, after_logits, before, after),
                *_under_targets(treatments, after),
            )
            if not all(entry.holds for entry in proof):
                return _unproved(before, treatments, proof)
            report = _fix_report(before, after, treatments, proof, request)
            if request.out is not None:
                _write_reports(pending.path, report)
                pending.kept = True
        return report


def _treatments(folder: ModelFolder, before: Report) -> Iterator[Treatment]:
    """For each stack the repairs that its findings call for."""
    import onnx

    from kvdoctor.repairs import load

    for stack in folder.stacks:
        found = {finding.name for finding in before.findings if finding.stack == stack.name}
        wanted = [repair for repair in load() if repair.mends in found]
        if not wanted:
            continue
        contract = next(known.contract for known in before.stacks if known.name == stack.name)
        if contract is None:
            continue
        model = onnx.load(str(stack.main.path), load_external_data=False)
        changes: list[Change] = []
        used = []
        for repair in wanted:
            done = repair.apply(model, contract)
            changes += done
            used += [repair] if done else []
        if changes:
            yield Treatment(stack, tuple(used), tuple(changes), model)


def _lowered(
    folder: ModelFolder, treatments: tuple[Treatment, ...], before: Report, options: Options, request: Request
) -> Lowered:
    """The files that had to be lowered, for the targets or as asked for; without either, for the runtime that is here.

    Raises:
        CannotLower: something that the model uses needs more.
    """
    targets = options.targets
    if not targets and any(finding.name in MENDS for finding in before.findings):
        targets = parse_targets([f"onnxruntime=={before.environment['onnxruntime']}"])
    want = wanted(targets, request.ir_version, request.opset)
    if not any(finding.name == "operator-unsupported" for finding in before.findings):
        want = replace(want, lacks=frozenset())  # whatever the table says, the targets have all operators
    models = {t.stack.main.path: t.model for t in treatments if t.model is not None}
    return lower_files(folder, want, models)


def _with_lowered(
    folder: ModelFolder, treatments: tuple[Treatment, ...], lowered: Lowered, before: Report
) -> tuple[Treatment, ...]:
    """The treatments with what was lowered, and one for each stack that was only lowered."""
    known = {treatment.stack.name: treatment for treatment in treatments}
    for stack in folder.stacks:
        if stack.name in lowered.changes:
            found = tuple(f.name for f in before.findings if f.stack == stack.name and f.name in MENDS)
            mine = known.get(stack.name) or Treatment(stack, (), (), None)
            changes = (*mine.changes, *lowered.changes[stack.name])
            known[stack.name] = replace(mine, changes=changes, mends=found)
    return tuple(known.values())


def _fill(target: Path, folder: ModelFolder, treatments: tuple[Treatment, ...], lowered: Lowered) -> None:
    """Copy what is not changed, write what is."""
    repaired = {t.stack.main.path: t.model for t in treatments if t.model is not None}
    changed = {**repaired, **lowered.models}
    for path in _belonging(folder):
        place = target / path.relative_to(folder.root)
        if path not in changed and path.name not in (MARK, "kvdoctor-report.md"):
            copy_whole(path, place)
    for path, model in changed.items():
        place = target / path.relative_to(folder.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(model.SerializeToString())


def _belonging(folder: ModelFolder) -> Iterator[Path]:
    """The files of the export: everything below a folder; for a single file its stack, its data and its configs."""
    if Path(folder.shown).is_dir():
        yield from regular_files(folder.root)
        return
    wanted = {file.path for file in folder.files}
    wanted |= {external.path for file in folder.files for external in file.external}
    wanted |= {folder.root / name for name in SIDE_CARS if (folder.root / name).is_file()}
    yield from sorted(wanted)


def _relative_path(path: str) -> str:
    return "." if Path(path).is_dir() else Path(path).name


def _proof(treatments: tuple[Treatment, ...], before: Report, after: Report) -> Iterator[Proof]:
    """What the second diagnosis shows: the fault is gone, nothing new came, the plain loop has parity."""
    known = {(finding.stack, finding.name) for finding in before.findings}
    for treatment in treatments:
        stack, mended = treatment.stack.name, {*treatment.mends, *(repair.mends for repair in treatment.repairs)}
        mine = [finding for finding in after.findings if finding.stack == stack]
        if mended:
            yield Proof(stack, f"{', '.join(sorted(mended))} is gone", not any(f.name in mended for f in mine))
        fresh = [f for f in mine if (stack, f.name) not in known and f.severity != "note" and not _of_target(f)]
        words = "; ".join(f"{f.name}: {f.cause}" for f in fresh)
        yield Proof(stack, "no finding that was not there before", not fresh, words)
        for experiment in ("plain-loop", "held-loop"):
            run = _run(after, stack, experiment)
            if run is not None and run.outcome != "skipped":
                worst = max((s.difference.relative for s in run.steps if s.difference), default=0.0)
                text = f"{len(run.steps)} steps, logits within {worst:.1e} of their spread of the reference run"
                yield Proof(stack, f"{experiment} passes", run.shows == "passed", text)


def _of_target(finding: Finding) -> bool:
    """Whether it is a use that a target is not fit for, which could not show while the target refused the file."""
    return finding.severity == "warning" and finding.name in ("target-fails", "target-differs")


def _under_targets(treatments: tuple[Treatment, ...], after: Report) -> Iterator[Proof]:
    """That the consumer's loop passes under every target that could be run, with the logits of here."""
    for treatment in treatments:
        stack = treatment.stack.name
        for target in after.targets:
            if stack in target.not_run:
                continue
            for experiment in (name for name in ("plain-loop", "held-loop") if _took(after, stack, name)):
                run = next((run for run in _runs(after, stack, experiment) if run.target == target.runtime), None)
                if run is not None and (run.outcome != "skipped" or target.refused.get(stack)):
                    apart = experiment in target.other_logits.get(stack, ())
                    detail = "other logits than here" if apart else run.error or f"{len(run.steps)} steps"
                    holds = run.shows == "passed" and not apart
                    yield Proof(stack, f"{experiment} passes under {target.asked}", holds, detail)


def _same_logits(
    treatments: tuple[Treatment, ...], before: Path, after: Path, old_report: Report, report: Report
) -> Iterator[Proof]:
    """The held loop of the original and of the copy, bit for bit: on its way nothing was changed. Else the plain one.

    Where the original does not open here, there is nothing to hold the copy against but its own run without a cache.
    """
    import numpy as np

    for treatment in treatments:
        stack = treatment.stack.name
        name = "held-loop" if _took(report, stack, "held-loop") else "plain-loop"
        if not (_took(report, stack, name) and _took(old_report, stack, name)):
            continue
        files = [folder / f"{stack}.npz" for folder in (before, after)]
        if not all(file.is_file() for file in files):
            yield Proof(stack, f"{name} logits equal to the original's", False, "no logits were kept")
            continue
        with np.load(files[0]) as old, np.load(files[1]) as new:
            both = name in old and name in new
            same = both and old[name].size > 0 and np.array_equal(old[name], new[name], equal_nan=True)
        yield Proof(stack, f"{name} logits equal to the original's, bit for bit", bool(same))


def _run(report: Report, stack: str, experiment: str) -> Run | None:
    return next(iter(_runs(report, stack, experiment)), None)


def _runs(report: Report, stack: str, experiment: str) -> Iterator[Run]:
    """The runs of an experiment, that of the runtime which is here first."""
    return (run for run in report.runs if run.stack == stack and run.experiment == experiment)


def _took(report: Report, stack: str, experiment: str) -> bool:
    run = _run(report, stack, experiment)
    return run is not None and run.outcome != "skipped"


def _fix_report(
    before: Report, after: Report, treatments: tuple[Treatment, ...], proof: tuple[Proof, ...], request: Request
) -> Report:
    advice = dict.fromkeys(line for treatment in treatments for repair in treatment.repairs for line in repair.advice)
    record = replace(
        _record(before, treatments, proof),
        out=request.out,
        after=Side(after.verdict, after.findings),
        advice=tuple(advice),
    )
    measured = {"before": before.measured, "after": after.measured}
    note = () if request.out is not None else ("nothing was written: this shows what would be",)
    return replace(after, command="re-export", repair=record, measured=measured, notes=(*after.notes, *note))


def _nothing_done(before: Report) -> Report:
    text = "nothing to repair on the graph: no copy was written"
    if before.verdict == "unhealthy":
        text = "no repair on the graph is known for what was found: no copy was written"
    return replace(before, command="re-export", repair=_record(before), notes=(*before.notes, text))


def _unproved(before: Report, treatments: tuple[Treatment, ...], proof: tuple[Proof, ...]) -> Report:
    failed = "; ".join(f"{entry.claim} ({entry.detail or 'no'})" for entry in proof if not entry.holds)
    note = f"the repair was not proved, so no copy was written; what did not hold: {failed}"
    record = _record(before, treatments, proof)
    return replace(before, command="re-export", repair=record, notes=(*before.notes, note))


def _record(before: Report, treatments: tuple[Treatment, ...] = (), proof: tuple[Proof, ...] = ()) -> RepairRecord:
    return RepairRecord(
        source=before.model.path,
        out=None,
        changes=tuple(change for treatment in treatments for change in treatment.changes),
        before=Side(before.verdict, before.findings),
        after=None,
        proof=proof,
    )


def _write_reports(target: Path, report: Report) -> None:
    from kvdoctor.report import machine, markdown

    write_whole(target / "kvdoctor-report.md", markdown.render(report))
    write_whole(target / MARK, machine.render(report))
