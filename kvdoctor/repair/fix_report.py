"""The fix report: the changes, the proof, the cost, and the findings that remain."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.errors import as_argument, free_name
from kvdoctor.findings import Finding
from kvdoctor.model.files import sha256
from kvdoctor.repair.check_advice import advise_export
from kvdoctor.repair.repairs.registry import find_repair, load
from kvdoctor.repair.session import Conversion, Outcome, RepairedFiles, RepairSession
from kvdoctor.repair.workspace import CannotConvert, source_of
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import AppliedRepair, ChangedFile, NotRepaired, RepairRecord, RepairSide

COMPARED = ("original", "repaired copy")
"""What a copy is compared with in a claim: the original, or what repairs made of it."""


def report_fix(session: RepairSession, outcome: Outcome, out: str | None) -> Report:
    """The report of a repair; `out` is None if nothing is written, and then the verdict is that on the original."""
    before = outcome.before.report
    findings = _update_advice(outcome.after.report, before.model.path, session.folder, out)
    after = replace(outcome.after.report, findings=findings)
    undo = (f"The original at {before.model.path} was only read.", f"To undo, delete the folder {out}")
    record = replace(
        _make_record(outcome),
        out=out,
        after=_side(after),
        advice=tuple(dict.fromkeys(line for one in outcome.applied for line in one.repair.advice)),
        not_repaired=_explain_remaining(after, outcome.not_repaired),
        files=tuple(_list_files(session, outcome)),
        undo=undo if out is not None else (),
    )
    measured = {"before": before.measured, "after": after.measured, "cost": _measure_cost(session, outcome)}
    notes = list(after.notes)
    if out is None:
        notes.append("nothing was written: this shows the result of a run with -o OUT")
    notes += [
        f"{stack}: the original returns no logits to compare; the proof rests on the parity of the copy's own loops"
        # A layout is compared under the name that the stack has in the copy.
        for stack in dict.fromkeys(one.stack for one in outcome.applied if not one.repair.name.startswith("layout "))
        if not any(entry.stack == stack and any(name in entry.claim for name in COMPARED) for entry in outcome.proof)
    ]
    if not outcome.holds:
        failed = (f"{entry.claim} ({entry.detail or 'no'})" for entry in outcome.proof if not entry.holds)
        notes.append(f"NOT PROVED; failed claims: {'; '.join(failed)}")
    verdict = before.verdict if out is None else after.verdict
    return replace(after, command="re-export", verdict=verdict, repair=record, measured=measured, notes=tuple(notes))


def _update_advice(report: Report, source: str, folder: ModelFolder, out: str | None = None) -> tuple[Finding, ...]:
    """Findings with advice for the time after the repairs of the graph: trying them again would not help."""
    given = as_argument(source)
    copy = given if out is None else as_argument(out)
    fixed = free_name(folder.out, out)
    updated = []
    for finding in report.findings:
        command = finding.repair.command
        if command is None or not command.startswith("kvdoctor re-export"):
            updated.append(finding)
        elif finding.severity == "note":
            command = command.replace(f" {given} ", f" {copy} ")
            updated.append(replace(finding, repair=replace(finding.repair, command=command)))
        else:
            updated.append(advise_export(finding, folder, f"kvdoctor re-export {copy} --from CHECKPOINT -o {fixed}"))
    return tuple(updated)


def report_nothing_done(before: Report, tried: RepairedFiles, fix: tuple[str, ...]) -> Report:
    """The report if no repair of those that were tried changed anything; `fix` are the repairs that were named."""
    left = _explain_remaining(before, tried.not_repaired)
    text = "nothing to repair in the graph: no copy was written"
    if fix:
        calls = "; ".join(f"{name} repairs {', '.join(found.checks)}" for name in fix if (found := find_repair(name)))
        text = f"none of the repairs asked for applies to the findings ({calls}): no copy was written"
    elif before.verdict == "unhealthy" or left:
        text = "no repair of the graph is known for the findings: no copy was written"
    findings = before.findings if fix else _update_advice(before, before.model.path, tried.copy.folder)
    return replace(_report_unwritten(before, text, left), findings=findings)


def _report_unwritten(before: Report, note: str, left: tuple[NotRepaired, ...] = ()) -> Report:
    record = RepairRecord(before.model.path, None, (), _side(before), None, (), not_repaired=left)
    return replace(before, command="re-export", repair=record, notes=(*before.notes, note))


def report_refused(before: Report, tried: RepairedFiles, refusal: CannotConvert) -> Report:
    """The report if a model cannot be converted, neither as it is nor after the repairs that were `tried`."""
    if not tried.applied:
        report = report_nothing_done(before, tried, ())
        return replace(report, notes=(*report.notes, str(refusal)))
    repairs = ", ".join(dict.fromkeys(one.repair.name for one in tried.applied))
    return _report_unwritten(before, f"no copy was written: {repairs} repairs the model, but then {refusal}")


def report_unproved(
    session: RepairSession, outcome: Outcome, may_keep: bool = True, refusal: CannotConvert | None = None
) -> Report:
    """The report if the proof failed: nothing is written; `may_keep` says whether the caller may ask for it.

    `refusal` says why the model as it is could not have been converted.
    """
    before = outcome.before.report
    note = "the copy was not proved, so it was not written"
    if may_keep:
        note = "the repair was not proved, so no copy was written; --keep-unproved writes it nevertheless"
    elif not any(isinstance(one.repair, Conversion) for one in outcome.applied):
        note = "the repair was not proved, so nothing was converted and no copy was written"
        note += f"; without it, {refusal}" if refusal is not None else ""
    tried = {name: one.repair.name for one in outcome.applied for name in one.because}
    record = replace(
        _make_record(outcome),
        not_repaired=_explain_remaining(before, outcome.not_repaired, tried),
    )
    findings = _update_advice(before, before.model.path, session.folder)
    return replace(before, command="re-export", findings=findings, repair=record, notes=(*before.notes, note))


def _make_record(outcome: Outcome) -> RepairRecord:
    before, applied = outcome.before.report, [(one, one.repair) for one in outcome.applied]
    return RepairRecord(
        source=before.model.path,
        out=None,
        changes=tuple(change for one in outcome.applied for change in one.changes),
        before=_side(before),
        after=None,
        proof=outcome.proof,
        repairs=tuple(AppliedRepair(one.stack, by.name, one.because, by.keeps, by.summary) for one, by in applied),
        proved=outcome.holds,
        loop=tuple(dict.fromkeys(rule for _, by in applied if isinstance(by, Conversion) for rule in by.loop)),
        cache_costs=outcome.costs,
        bases=outcome.bases,
    )


def _side(report: Report) -> RepairSide:
    return RepairSide(report.verdict, report.findings)


def _explain_remaining(
    report: Report, declined: Iterable[NotRepaired], tried: Mapping[str, str] = MappingProxyType({})
) -> tuple[NotRepaired, ...]:
    """Why each remaining finding was not repaired: why its repairs declined, else the advice of its check."""
    names = {finding.name for finding in report.findings}
    found = list(dict.fromkeys(entry for entry in declined if entry.finding in names))
    for one in (finding for finding in report.findings if finding.severity != "note"):
        if any(entry.finding == one.name for entry in found):
            continue
        if one.name in tried:
            reason = "the repair was tried, but the copy was not proved and is not kept"
            found.append(NotRepaired(one.stack, one.name, tried[one.name], reason))
            continue
        idle = [repair.name for repair in load() if one.name in repair.checks]
        reason = "the graph holds nothing that this repair changes" if idle else "no repair of the graph is known"
        instead = one.repair.text + (f": {one.repair.command}" if one.repair.command else "")
        found.append(NotRepaired(one.stack, one.name, ", ".join(idle), reason, instead))
    return tuple(found)


def _list_files(session: RepairSession, outcome: Outcome) -> Iterator[ChangedFile]:
    for name in sorted(outcome.changed_files):
        source, made = source_of(session.folder, name), session.at / name
        if source.is_file() and made.is_file():
            yield ChangedFile(name, sha256(source), sha256(made))


def _measure_cost(session: RepairSession, outcome: Outcome) -> dict[str, Any]:
    """Bytes on disk of the models and their data, and seconds per step if one was timed, before and after."""
    after = open_folder(session.shown, session.at)
    seconds: dict[str, dict[str, list[float | None]]] = {}
    for stack in dict.fromkeys(one.stack for one in outcome.applied):
        sides = (outcome.before.report.measured, outcome.after.report.measured)
        old, new = (measured.get(stack, {}).get("step_seconds", {}) for measured in sides)
        seconds[stack] = {label: [old.get(label), new.get(label)] for label in dict.fromkeys([*old, *new])}
    return {"bytes_before": _count_bytes(session.folder), "bytes_after": _count_bytes(after), "step_seconds": seconds}


def _count_bytes(folder: ModelFolder) -> int:
    """Bytes of the models of a folder, with the files that hold their weights."""
    sizes = {file.path: file.skeleton.bytes_on_disk for file in folder.files if file.skeleton}
    return sum((sizes | {data.path: data.bytes or 0 for file in folder.files for data in file.external}).values())
