"""The words of the fix report that all formats share."""

from kvdoctor.report import wording
from kvdoctor.report.document import RepairRecord, Report, Unmended


def repair_names(record: RepairRecord) -> str:
    """The names of the repairs that changed something."""
    return ", ".join(dict.fromkeys(repair.name for repair in record.repairs))


def unmended_line(entry: Unmended) -> str:
    """What was not repaired, by which repair, why not, and what would do it."""
    by = f" by {entry.repair}" if entry.repair else ""
    instead = f"; instead: {entry.instead}" if entry.instead else ""
    return f"not repaired{by}: {entry.finding}: {entry.reason}{instead}"


def cost_lines(report: Report) -> list[str]:
    """What the repair costs: bytes on disk, and seconds per step where both sides were timed."""
    cost = report.measured.get("cost")
    if not isinstance(cost, dict):
        return []
    before, after = cost["bytes_before"], cost["bytes_after"]
    lines = [f"size of the models: {wording.in_bytes(before)} before, {wording.in_bytes(after)} after"]
    for stack, steps in cost.get("step_seconds", {}).items():
        for label, (old, new) in steps.items():
            kind, _, length = label.partition(":")
            lines.append(f"{stack}: a step at length {length}, {kind}: {_ms(old)} before, {_ms(new)} after")
    return lines


def _ms(seconds: float | None) -> str:
    return "not timed" if seconds is None else f"{seconds * 1000:.2f} ms"
