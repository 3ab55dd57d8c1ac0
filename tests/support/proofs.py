"""What a report says of a repair or a conversion."""

from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import RepairRecord


def repair_of(report: Report) -> RepairRecord:
    assert report.repair is not None
    return report.repair


def claims(report: Report) -> dict[str, bool]:
    """Whether each claim about the copy holds."""
    return {entry.claim: entry.holds for entry in repair_of(report).proof}


def failed(report: Report) -> list[str]:
    """The claims that do not hold, with their details."""
    return [f"{entry.claim}: {entry.detail}" for entry in repair_of(report).proof if not entry.holds]
