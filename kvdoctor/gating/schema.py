"""The JSON Schemas of the gate's documents: its result, and its baseline."""

from typing import Any

from kvdoctor.gating.baseline import SCHEMA as BASELINE_SCHEMA
from kvdoctor.gating.baseline import BaselineEntry
from kvdoctor.report.document import GATE_SCHEMA
from kvdoctor.report.schema import DIALECT, define_types, report_schema


def gate_schema() -> dict[str, Any]:
    """The schema of `gate --format json`."""
    report = report_schema()
    definitions = report.pop("$defs")
    del report["$schema"]
    return {
        "$schema": DIALECT,
        "title": GATE_SCHEMA,
        "type": "object",
        "properties": {
            "schema": {"const": GATE_SCHEMA},
            "policy": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "baseline": {"anyOf": [_status_schema(), {"type": "null"}]},
            "verdict": {"enum": ["healthy", "unhealthy", "incomplete", "nothing-found"]},
            "reports": {"type": "array", "items": report},
        },
        "required": ["schema", "verdict", "reports"],
        "$defs": definitions,
    }


def _status_schema() -> dict[str, Any]:
    """The baseline in a gate's document: entries as in its file, without `shape`."""
    entry = define_types(BaselineEntry)["BaselineEntry"]
    del entry["properties"]["shape"], entry["description"]
    entry["required"].remove("shape")
    lists = {kind: {"type": "array", "items": entry} for kind in ("stale", "expired", "moved")}
    properties = {"file": {"type": "string"}, "known": {"type": "integer"}, **lists}
    return {"type": "object", "properties": properties, "required": list(properties)}


def baseline_schema() -> dict[str, Any]:
    """The schema of a baseline's file."""
    definitions = define_types(BaselineEntry)
    properties = definitions["BaselineEntry"]["properties"]
    properties["reason"]["pattern"] = r"\S"
    properties["until"] = {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}
    entries = {"type": "array", "items": {"$ref": "#/$defs/BaselineEntry"}}
    return {
        "$schema": DIALECT,
        "title": BASELINE_SCHEMA,
        "type": "object",
        "properties": {"schema": {"const": BASELINE_SCHEMA}, "entries": entries},
        "required": ["schema", "entries"],
        "additionalProperties": False,
        "$defs": definitions,
    }
