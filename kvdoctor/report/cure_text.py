"""The words of the fix report that all formats share."""

from kvdoctor.report import wording
from kvdoctor.report.document import RepairRecord, Report, Unmended


def repair_names(record: RepairRecord) -> str:
    """The names of the repairs that changed something."""
    return ", ".join(dict.fromkeys(repair.name for repair in record.repairs))


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
