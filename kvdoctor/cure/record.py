"""What `re-export` tells: the record of a repair, what it cost, and what is left to the caller."""

import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvdoctor.cure.diff import diff
from kvdoctor.cure.surgery import Outcome, Surgery
from kvdoctor.findings import Finding
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.patient import source_of
from kvdoctor.repairs import load, named
from kvdoctor.report.document import (
    AppliedRepair,
    ChangedFile,
    FileDiff,
    RepairRecord,
    Report,
    Unmended,
)
from kvdoctor.report.document import (
    Side as Found,
)
from kvdoctor.skeleton import read_skeleton


def fix_report(surgery: Surgery, outcome: Outcome, out: str | None) -> Report:
    """The report of a repair; `out` is None where nothing is written."""
    before = outcome.before.report
    after = replace(outcome.after.report, findings=tuple(_advised(outcome, out)))
    advice = dict.fromkeys(line for one in outcome.applied for line in one.repair.advice)
    record = replace(
        _record(outcome),
        out=out,
        after=Found(after.verdict, after.findings),
        advice=tuple(advice),
        unmended=_left(after, outcome.unmended),
        diff=tuple(_diffs(surgery, outcome)),
        files=tuple(_files(surgery, outcome)),
        undo=_undo(before.model.path, out),
    )
    measured = {"before": before.measured, "after": after.measured, "cost": _cost(surgery, outcome)}
    notes = list(after.notes)
    if out is None:
        notes.append("nothing was written: this shows what would be")
    notes += [
        f"{stack}: the original gave no logits to hold the copy against; parity of the copy's own loops speaks for it"
        for stack in dict.fromkeys(one.stack for one in outcome.applied)
        if not any(entry.stack == stack and "original" in entry.claim for entry in outcome.proof)
    ]
    if not outcome.holds:
        notes.append(f"NOT PROVED; what did not hold: {_failed(outcome)}")
    return replace(after, command="re-export", repair=record, measured=measured, notes=tuple(notes))


def _advised(outcome: Outcome, out: str | None) -> Iterator[Finding]:
    """What is still found on the copy, with advice that leads on: what this repair did not mend, another will not."""
    source = shlex.quote(outcome.before.report.model.path)
    copy = source if out is None else shlex.quote(out)
    for finding in outcome.after.report.findings:
        command = finding.repair.command
        if command is not None and command.startswith("kvdoctor re-export"):
            fresh = f"kvdoctor re-export {copy} --from CHECKPOINT -o FIXED"
            command = fresh if finding.severity != "note" else command.replace(f" {source} ", f" {copy} ")
            finding = replace(finding, repair=replace(finding.repair, command=command))  # noqa: PLW2901 - the same one
        yield finding


def nothing_done(before: Report, unmended: tuple[Unmended, ...], fix: tuple[str, ...]) -> Report:
    """The report where no repair changed anything."""
    left = _left(before, unmended)
    text = "nothing to repair on the graph: no copy was written"
    if fix:
        calls = "; ".join(f"{name} mends {', '.join(found.mends)}" for name in fix if (found := named(name)))
        text = f"none of the repairs asked for has anything to mend here ({calls}): no copy was written"
    elif before.verdict == "unhealthy":
        text = "no repair on the graph is known for what was found: no copy was written"
    record = RepairRecord(before.model.path, None, (), Found(before.verdict, before.findings), None, (), unmended=left)
    return replace(before, command="re-export", repair=record, notes=(*before.notes, text))


def unproved(surgery: Surgery, outcome: Outcome) -> Report:
    """The report where repairs did not do what they must: nothing is written."""
    before = outcome.before.report
    note = (
        f"the repair was not proved, so no copy was written; what did not hold: {_failed(outcome)}; --keep-unproved "
        "writes it all the same"
    )
    tried = {name: one.repair.name for one in outcome.applied for name in one.because}
    record = replace(
        _record(outcome),
        unmended=tuple(_left(before, outcome.unmended, tried)),
        diff=tuple(_diffs(surgery, outcome)),
    )
    return replace(before, command="re-export", repair=record, notes=(*before.notes, note))


def _record(outcome: Outcome) -> RepairRecord:
    before = outcome.before.report
    return RepairRecord(
        source=before.model.path,
        out=None,
        changes=tuple(change for one in outcome.applied for change in one.changes),
        before=Found(before.verdict, before.findings),
        after=None,
        proof=outcome.proof,
        repairs=tuple(
            AppliedRepair(one.stack, one.repair.name, one.because, one.repair.keeps, one.repair.summary)
            for one in outcome.applied
        ),
        proved=outcome.holds,
    )


def _failed(outcome: Outcome) -> str:
    return "; ".join(f"{entry.claim} ({entry.detail or 'no'})" for entry in outcome.proof if not entry.holds)


def _not_repairable(report: Report, told: Iterable[Unmended], tried: Mapping[str, str]) -> Iterator[Unmended]:
    """What is left of warnings and errors that no repair spoke of, and what each check says would do it."""
    known = {entry.finding for entry in told}
    for finding in report.findings:
        if finding.severity != "note" and finding.name not in known:
            known.add(finding.name)
            if finding.name in tried:
                reason = "it was tried, and the copy is not proved: nothing of it is kept"
                yield Unmended(finding.stack, finding.name, tried[finding.name], reason)
                continue
            idle = [repair.name for repair in load() if finding.name in repair.mends]
            reason = (
                "nothing that this repair changes is found in the graph" if idle else "no repair on the graph is known"
            )
            instead = f"{finding.repair.text}" + (f": {finding.repair.command}" if finding.repair.command else "")
            yield Unmended(finding.stack, finding.name, ", ".join(idle), reason, instead)


def _left(
    report: Report, told: Iterable[Unmended], tried: Mapping[str, str] = MappingProxyType({})
) -> tuple[Unmended, ...]:
    """Why what is still found was not repaired: what repairs said of it, and where none is known."""
    found = {finding.name for finding in report.findings}
    told = tuple(dict.fromkeys(entry for entry in told if entry.finding in found))
    return (*told, *_not_repairable(report, told, tried))


def _changed_names(outcome: Outcome) -> list[str]:
    return sorted({change.file for one in outcome.applied for change in one.changes})


def _diffs(surgery: Surgery, outcome: Outcome) -> Iterator[FileDiff]:
    """What is other in each changed graph, and in each changed config."""
    for name in _changed_names(outcome):
        source = next((file.path for file in surgery.folder.files if file.name == name), None)
        if source is not None and (surgery.at / name).is_file():
            yield diff(name, read_skeleton(source).model, read_skeleton(surgery.at / name).model)


def _files(surgery: Surgery, outcome: Outcome) -> Iterator[ChangedFile]:
    """The digests of what was written anew, and of what stands in its place in the source."""
    for name in _changed_names(outcome):
        source, made = source_of(surgery.folder, name), surgery.at / name
        if source.is_file() and made.is_file():
            yield ChangedFile(name, _sha256(source), _sha256(made))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _undo(source: str, out: str | None) -> tuple[str, ...]:
    if out is None:
        return ()
    return (
        f"The original at {source} was read and never written to.",
        f"To undo, delete the copy: rm -r {shlex.quote(out)}",
    )


def _cost(surgery: Surgery, outcome: Outcome) -> dict[str, Any]:
    """Bytes on disk of the models and their data, and seconds per step where one was timed, before and after."""
    after = open_folder(surgery.shown, surgery.at)
    before, now = outcome.before.report.measured, outcome.after.report.measured
    seconds = {
        stack: _paired(before.get(stack, {}), now.get(stack, {}))
        for stack in dict.fromkeys(one.stack for one in outcome.applied)
    }
    return {"bytes_before": _bytes(surgery.folder), "bytes_after": _bytes(after), "step_seconds": seconds}


def _bytes(folder: ModelFolder) -> int:
    """The models of a folder, with the files that hold their weights."""
    sizes = {file.path: file.skeleton.bytes_on_disk for file in folder.files if file.skeleton}
    return sum((sizes | {data.path: data.bytes or 0 for file in folder.files for data in file.external}).values())


def _paired(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[float | None]]:
    """Seconds of each timed call of a stack, before and after."""
    old, new = before.get("step_seconds", {}), after.get("step_seconds", {})
    return {label: [old.get(label), new.get(label)] for label in dict.fromkeys([*old, *new])}
