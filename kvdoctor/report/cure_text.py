"""The words of the fix report that all formats share."""

from kvdoctor.report import wording
from kvdoctor.report.document import RepairRecord, Report, Unmended


def repair_names(record: RepairRecord) -> str:
    """The names of the repairs that changed something."""
    return ", ".join(dict.fromkeys(repair.name for repair in record.repairs))


def outcome_line(record: RepairRecord) -> str:
    """What became of the copy."""
    if record.out is None:
        return "no copy was written" + ("" if record.proved or not record.changes else ": it was not proved")
    proved = "" if record.proved else ", NOT PROVED"
    return f"written: {record.out}{proved} (fix report: {record.out}/kvdoctor-report.md)"


def caller_lines(record: RepairRecord) -> list[str]:
    """What the copy asks of its caller."""
    if record.out is None:
        return []
    if not record.proved:
        return ["The copy is not proved: it was written since that was asked for, and what fails stands above."]
    left = [finding for finding in (record.after.findings if record.after else ()) if finding.severity != "note"]
    if not left:
        return ["Nothing is left that hurts the loop this was diagnosed for; `kvdoctor contract` says how to drive it."]
    asks = dict.fromkeys(
        f"{finding.name} ({finding.stack or finding.file}): {finding.repair.text.removeprefix('or ')}"
        for finding in left
    )
    return ["Still there, and to be heeded by the loop:", *asks]


def unmended_line(entry: Unmended) -> str:
    """What was not repaired, by which repair, why not, and what would do it."""
    by = f" by {entry.repair}" if entry.repair else ""
    stack = f" ({entry.stack})" if entry.stack else ""
    instead = f"; instead: {entry.instead}" if entry.instead else ""
    return f"not repaired{by}: {entry.finding}{stack}: {entry.reason}{instead}"


def cost_lines(report: Report) -> list[str]:
    """What the repair costs: bytes on disk, and seconds per step where both sides were timed."""
    cost = report.measured.get("cost")
    if not isinstance(cost, dict):
        return []
    before, after = cost["bytes_before"], cost["bytes_after"]
    lines = [f"size of the models: {wording.in_bytes(before)} before, {wording.in_bytes(after)} after"]
    for stack, steps in cost.get("step_seconds", {}).items():
        for kind, words in (("cached", "with the cache"), ("uncached", "without it")):
            timed = [_step(label, *both) for label, both in steps.items() if label.startswith(f"{kind}:") and all(both)]
            if timed:
                lines.append(f"{stack}: a step {words} takes {', '.join(timed)}")
    return lines


def _step(label: str, before: float, after: float) -> str:
    return f"{after * 1000:.2f} ms at {label.partition(':')[2]} tokens (before: {before * 1000:.2f} ms)"
