"""The JSON Schemas of the documents, derived from the dataclasses that they are made of."""

import dataclasses
import types
import typing
from typing import Any

from kvdoctor.baseline import SCHEMA as BASELINE_SCHEMA
from kvdoctor.baseline import Entry
from kvdoctor.contract import CacheContract
from kvdoctor.report.diff_document import DIFF_SCHEMA, DiffReport
from kvdoctor.report.document import CONTRACT_SCHEMA, GATE_SCHEMA, SCHEMA, Report

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
INTERNAL = {"node_names"}
"""Fields that the documents leave out."""


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by its short name: report, gate, contract, diff, baseline."""
    return {
        "report": report_schema(),
        "gate": gate_schema(),
        "contract": contract_schema(),
        "baseline": baseline_schema(),
        "diff": diff_schema(),
    }


def report_schema() -> dict[str, Any]:
    """The schema of `--format json`."""
    return _document(Report, SCHEMA)


def diff_schema() -> dict[str, Any]:
    """The schema of `diff --format json`."""
    schema = _document(DiffReport, DIFF_SCHEMA)
    schema["properties"]["command"] = {"const": "diff"}
    schema["required"] = [*schema["required"], "command"]
    return schema


def _document(kind: Any, title: str) -> dict[str, Any]:
    """A document with its head, which says what it is and who wrote it."""
    definitions: dict[str, Any] = {}
    body = _object(kind, definitions)
    body["properties"] = {
        "schema": {"const": title},
        "tool": {
            "type": "object",
            "properties": {"name": {"const": "kvdoctor"}, "version": {"type": "string"}},
            "required": ["name", "version"],
        },
        **body["properties"],
    }
    body["required"] = ["schema", "tool", *body["required"]]
    return {"$schema": DIALECT, "title": title, **body, "$defs": definitions}


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
            "baseline": {"anyOf": [_told(), {"type": "null"}]},
            "verdict": {"enum": ["healthy", "unhealthy", "incomplete", "nothing-found"]},
            "reports": {"type": "array", "items": report},
        },
        "required": ["schema", "verdict", "reports"],
        "$defs": definitions,
    }


def contract_schema() -> dict[str, Any]:
    """The schema of `contract --format json`: the cache contract of each stack."""
    definitions: dict[str, Any] = {}
    reference = _schema(CacheContract, definitions)
    return {
        "$schema": DIALECT,
        "title": CONTRACT_SCHEMA,
        "type": "object",
        "properties": {
            "schema": {"const": CONTRACT_SCHEMA},
            "stacks": {"type": "object", "additionalProperties": reference},
        },
        "required": ["schema", "stacks"],
        "$defs": definitions,
    }


def baseline_schema() -> dict[str, Any]:
    """The schema of a baseline's file."""
    definitions: dict[str, Any] = {}
    reference = _schema(Entry, definitions)
    definitions["Entry"]["properties"]["reason"]["pattern"] = r"\S"
    definitions["Entry"]["properties"]["until"]["anyOf"][0] = {"type": "string", "format": "date"}
    return {
        "$schema": DIALECT,
        "title": BASELINE_SCHEMA,
        "type": "object",
        "properties": {
            "schema": {"const": BASELINE_SCHEMA},
            "entries": {"type": "array", "items": reference},
        },
        "required": ["schema", "entries"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _told() -> dict[str, Any]:
    """What a gate says of its baseline: entries as in the file, without `shape`."""
    entry = _object(Entry, {})
    del entry["properties"]["shape"], entry["description"]
    entry["required"].remove("shape")
    lists = {kind: {"type": "array", "items": entry} for kind in ("stale", "expired", "moved")}
    properties = {"file": {"type": "string"}, "known": {"type": "integer"}, **lists}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _object(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """A dataclass: every field is always written; readers must bear fields that are added later."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in INTERNAL]
    summary = (kind.__doc__ or "").partition("\n")[0]
    properties = {name: _schema(hints[name], definitions) for name in names}
    return {"type": "object", "description": summary, "properties": properties, "required": names}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    return dict(SCALARS[kind])
