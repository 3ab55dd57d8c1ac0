"""The report as JSON."""

import json
from typing import Any

from kvdoctor.report.document import GATE_SCHEMA, Report


def render(report: Report) -> str:
    """One JSON object and a newline; keys in the order of the contract."""
    return dump(report.to_dict())


def render_gate(verdict: str, reports: list[Report]) -> str:
    """The document of `gate`: all reports under one verdict."""
    return dump({"schema": GATE_SCHEMA, "verdict": verdict, "reports": [report.to_dict() for report in reports]})


def dump(document: dict[str, Any]) -> str:
    """Write ASCII, so that no terminal or encoding can be hurt by a name from a model."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"
