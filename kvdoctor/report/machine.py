"""The report as JSON."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvdoctor.report.diff_document import DiffReport
from kvdoctor.report.document import CONTRACT_SCHEMA, Report


def render(report: Report) -> str:
    """One JSON object and a newline; keys in the order of the contract."""
    return dump(report.to_dict())


def render_diff(diff: DiffReport) -> str:
    """The document of `diff`."""
    return dump(diff.to_dict())


def render_gate(document: Callable[[], dict[str, Any]], _reports: Sequence[Report], _last: Sequence[str]) -> str:
    """The document of `gate`."""
    return dump(document())


def render_contracts(report: Report) -> str:
    """The document of `contract`: the cache contract of each stack."""
    contracts = {stack["name"]: stack["contract"] for stack in report.to_dict()["stacks"]}
    return _laid_out({"schema": CONTRACT_SCHEMA, "stacks": contracts}) + "\n"


def dump(document: dict[str, Any]) -> str:
    """One line for each key, and for each item of its list: short to store, and `grep` and `diff` find their way.

    ASCII, so that no terminal or encoding can be hurt by a name from a model.
    """
    return "{\n" + ",\n".join(f"{_line(key)}: {_value(value)}" for key, value in document.items()) + "\n}\n"


def _value(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return _line(value)
    return "[\n" + ",\n".join(f"  {_line(item)}" for item in value) + "\n]"


def _laid_out(value: Any, indent: str = "") -> str:
    """JSON to be edited by hand: each port and each slot has a line of its own."""
    inner = indent + "  "
    if not any(map(_holds_objects, _items(value))):
        return _line(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inner}{_line(item)}" for item in value) + f"\n{indent}]"
    rows = (f"{inner}{_line(key)}: {_laid_out(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}" + "}"


def _holds_objects(value: Any) -> bool:
    return isinstance(value, dict) or any(map(_holds_objects, _items(value)))


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _line(value: Any) -> str:
    """One line. A `#` before another one is escaped: runners obey `##[...]` anywhere in a line (`safe.OBEYED`)."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("##", "#\\u0023")
