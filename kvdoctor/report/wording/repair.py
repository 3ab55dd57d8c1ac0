"""The fix report in words: the copy, its costs, the caller's duties, what was not repaired, and how it was exported."""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import ExportRecord, NotRepaired, PortChange, RepairRecord
from kvdoctor.report.wording.units import format_bytes, format_count, format_milliseconds

MOST_PORTS = 8


def list_repair_names(record: RepairRecord) -> str:
    """What changed something: `repair: pass-through`, or `conversion: logits last`, which answers no finding."""
    kinds: dict[str, dict[str, None]] = {}
    for one in record.repairs:
        kinds.setdefault("repair" if one.checks else "conversion", {})[one.name] = None
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items())


def format_copy(record: RepairRecord) -> str:
    """Whether a repaired copy was written, and where."""
    if record.out is None:
        return "no copy was written" + ("" if record.proved or not record.changes else ": it was not proved")
    proved = "" if record.proved else ", NOT PROVED"
    return f"written: {record.out}{proved} (fix report: {record.out}/kvdoctor-report.md)"


def format_repaired(record: RepairRecord) -> Iterator[str]:
    """What was repaired, or would be: the findings that are gone, the changes, and how much of the proof holds."""
    if record.export is not None:
        yield format_export_title(record.export)
    if not (record.changes and record.proof):
        return
    after = {(finding.code, finding.stack) for finding in (record.after.findings if record.after else ())}
    tried = {name for repair in record.repairs for name in repair.checks}
    fitting = (f for f in record.before.findings if record.after is not None or f.name in tried)
    gone = [f"{f.code} {f.name}" for f in fitting if (f.code, f.stack) not in after]
    verb = "would repair" if record.is_planned else "repaired" if record.after is not None else "tried to repair"
    mark = "\u2713" if record.proved else "!"
    if gone:
        yield f"{mark} {verb}: {', '.join(dict.fromkeys(gone))}"
    else:
        places = format_count(len(record.changes), "place")
        verb = "would change" if record.is_planned else "changed" if record.after is not None else "tried to change"
        yield f"{mark} {verb}: {places}"
    first = record.changes[0]
    others = len(record.changes) - 1
    more = f" (and in {format_count(others, 'more place')})" if others else ""
    change = f"{first.file}: {first.where}: {first.before} \u2192 {first.after}{more}"
    yield f"  change  {change}; {list_repair_names(record)}"
    holding = sum(entry.holds for entry in record.proof)
    yield f"  proof   {holding} of {format_count(len(record.proof), 'claim')} hold (-v lists them)"
    yield from (f"  base    {line}" for line in record.bases)
    yield from (f"  loop    {line}" for line in (record.loop if record.proved else ()))


def list_failed_proofs(record: RepairRecord) -> Iterator[str]:
    """The claims that do not hold."""
    for entry in record.proof:
        if not entry.holds:
            yield f'  fails   {entry.stack}: "{entry.claim}"' + (f": {entry.detail}" if entry.detail else "")


def list_not_repaired(record: RepairRecord) -> list[str]:
    """What was not repaired and why; what differs in its stack alone is one line."""
    found: dict[NotRepaired, list[str]] = {}
    for entry in record.not_repaired:
        found.setdefault(replace(entry, stack=None), []).append(entry.stack or "")
    return [
        format_not_repaired(replace(entry, stack=", ".join(filter(None, stacks)) or None))
        for entry, stacks in found.items()
    ]


def list_caller_duties(record: RepairRecord) -> list[str]:
    """What the caller of the copy must still take care of."""
    if record.out is None:
        return []
    if record.loop and record.proved:
        return ["The copy is converted. Its loop differs from that of the original:", *record.loop, *_list_left(record)]
    if not record.proved:
        return ["The copy is not proved. It was written because --keep-unproved was given; the proof lists what fails."]
    left = _list_left(record)
    if not left:
        return [
            "No error or warning is left for the diagnosed loop; `kvdoctor contract` describes how to run the copy."
        ]
    return ["The copy still has these findings, which your loop must handle:", *left]


def _list_left(record: RepairRecord) -> list[str]:
    """The findings of the copy that its loop must handle, with the advice of each."""
    left = [finding for finding in (record.after.findings if record.after else ()) if finding.severity != "note"]
    return list(
        dict.fromkeys(
            f"{finding.name} ({finding.stack or finding.file}): {finding.repair.text.removeprefix('or ')}"
            for finding in left
        )
    )


def format_not_repaired(entry: NotRepaired) -> str:
    """A finding that was not repaired, the reason, and the alternative."""
    by = f" by {entry.repair}" if entry.repair else ""
    stack = f" ({entry.stack})" if entry.stack else ""
    instead = f"; instead: {entry.instead}" if entry.instead else ""
    return f"not repaired{by}: {entry.finding}{stack}: {entry.reason}{instead}"


def list_costs(report: Report) -> list[str]:
    """What the repair costs: bytes on disk, and the time of a step where both sides were timed."""
    cost = report.measured.get("cost")
    if not isinstance(cost, dict):
        return []
    before, after = cost["bytes_before"], cost["bytes_after"]
    lines = [f"model files: {format_bytes(before)} before, {format_bytes(after)} after"]
    for stack, steps in cost.get("step_seconds", {}).items():
        for kind, words in (("cached", "with the cache"), ("uncached", "without the cache")):
            timed = [_step(label, *both) for label, both in steps.items() if label.startswith(f"{kind}:") and all(both)]
            if timed:
                lines.append(f"{stack}: time of a step {words}: {'; '.join(timed)}")
    return lines


def _step(label: str, before: float, after: float) -> str:
    tokens = label.partition(":")[2]
    return f"at {tokens} tokens {format_milliseconds(before)} before, {format_milliseconds(after)} after"


def format_export_title(record: ExportRecord) -> str:
    """The checkpoint that was exported, the exporter and its versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return f"exported again from {record.checkpoint} with {record.exporter} ({versions}; Python: {record.way})"


def describe_export(record: ExportRecord, replaced: str) -> Iterator[tuple[str, str]]:
    """Label and text: each choice with its reason, failed attempts, and the differences from the replaced model."""
    for choice in record.choices:
        yield choice.what, f"{choice.value}: {choice.because}"
    for failure in record.failures:
        yield "failed", failure
    if record.left_out:
        yield "left out", f"{', '.join(record.left_out)}: {replaced} has no such file"
    for port in record.ports[:MOST_PORTS]:
        yield "changed", _port(port, replaced)
    if len(record.ports) > MOST_PORTS:
        yield "changed", f"{len(record.ports) - MOST_PORTS} more inputs and outputs (all in the JSON report)"
    if record.recipe is not None:
        yield "recipe", f"{record.recipe} in OUT holds the scripts, the pinned versions, the command and the log"


def _port(port: PortChange, replaced: str) -> str:
    if port.before is None:
        return f"{port.name} of {port.file} is new: {port.after}"
    if port.after is None:
        return f"{port.name} of {port.file} was removed: {port.before} in {replaced}"
    return f"{port.name} of {port.file} is {port.after}; it was {port.before} in {replaced}"
