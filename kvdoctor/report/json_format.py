"""The report as JSON, and read back from it. A file that is read is data: it may hold anything."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.records import from_plain
from kvdoctor.report.document import CONTRACT_SCHEMA, GATE_SCHEMA, SCHEMA, Report

MOST_BYTES = 256 << 20
LOOKED_AT = 64
"""Bytes at the start of a file that tell JSON from a model."""
ADVICE = "`kvdoctor step-test MODEL --output json=REPORT.json` writes one"


def render(report: Report) -> str:
    """One JSON object and a newline; keys in the order of the contract."""
    return dump(report.to_dict())


def render_gate(
    document: Callable[[], dict[str, Any]], _reports: Sequence[Report], _last: Sequence[str]
) -> Iterator[str]:
    """The document of `gate`, line by line."""
    return _lines(document())


def render_contracts(report: Report) -> str:
    """The document of `contract`: the cache contract of each stack."""
    contracts = {stack["name"]: stack["contract"] for stack in report.to_dict()["stacks"]}
    return _laid_out({"schema": CONTRACT_SCHEMA, "stacks": contracts}) + "\n"


def dump(document: dict[str, Any]) -> str:
    """One line for each key, and for each item of its list, for `grep` and `diff`; in ASCII, whatever a name holds."""
    return "".join(_lines(document))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """The lines of a document; those of a list are made one after the other, also where it is an iterator."""
    for number, (key, value) in enumerate(document.items()):
        yield f"{',' if number else '{'}\n{_line(key)}: "
        if not isinstance(value, list | Iterator) or value == []:
            yield _line(value)
            continue
        before = "["
        for item in value:
            yield f"{before}\n  {_line(item)}"
            before = ","
        yield "[]" if before == "[" else "\n]"
    yield "\n}\n"


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


def is_report(path: str) -> bool:
    """Whether a path is that of a report and not of a model: JSON by its name, or by its first bytes."""
    place = Path(path)
    try:
        if not place.is_file() or place.suffix.lower() in (".onnx", ".ort"):
            return False
        if place.suffix.lower() == ".json":
            return True
        with place.open("rb") as stream:
            return stream.read(LOOKED_AT).lstrip().startswith(b"{")
    except (OSError, ValueError):
        return False


def read_report(path: str, advice: str = ADVICE) -> Report:
    """Read a report; of a gate's document, the only one in it. `advice` says which command writes one.

    Raises:
        UsageError: it cannot be read, is not a report, or has another version of the schema.
    """
    try:
        text = read_side_file(Path(path), MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror or error}; {advice}") from None
    except ValueError:
        raise UsageError(f"{path!r} is not a report: it is not text in UTF-8; {advice}") from None
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path!r} is not JSON ({str(error)[:120]}); {advice}") from None
    return report_of(_single(document, path), path, advice)


def report_of(document: Any, called: str, advice: str = ADVICE) -> Report:
    """The report in a document of the schema `kvdoctor/report/1`; fields that later versions added are ignored.

    Raises:
        UsageError: it is another document, or does not fit the schema; the message names the field.
    """
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        found = f"it says {schema!r}" if isinstance(schema, str) else "it names no schema"
        other = isinstance(schema, str) and schema.startswith("kvdoctor/report/")
        hint = "another version of kvdoctor wrote it: write it again with this one" if other else advice
        raise UsageError(f"{called!r} is not a {SCHEMA} ({found[:120]}); {hint}")
    try:
        report = from_plain(Report, document, newer=True)
        _refuse_contradictions(report)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{called!r} does not fit {SCHEMA}: {str(error)[:300]}; {advice}") from None
    return report


def _refuse_contradictions(report: Report) -> None:
    """Refuse values that have the right types but contradict each other.

    Raises:
        ValueError: the message names the field.
    """
    for name in ("select", "ignore"):
        codes = report.arguments.get(name, [])
        if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
            raise ValueError(f"Report.arguments.{name}: expected a list of codes, got {codes!r}")
    for name, contract in ((stack.name, stack.contract) for stack in report.stacks):
        served = [] if contract is None else [phase.graph for phase in contract.phases.values()]
        if contract is not None and (
            not {"prefill", "decode"} <= set(contract.phases) or not set(served) <= set(contract.graphs)
        ):
            raise ValueError(f"the contract of {name!r} has a phase that none of its graphs serves")
    for number, stack in enumerate(report.speed):
        for place, point in enumerate(stack.points):
            for what, rounds in (("first", point.first), ("step", point.step)):
                if not rounds or not all(0 < seconds < math.inf for seconds in rounds):
                    entry = f"Report.speed[{number}].points[{place}].{what}"
                    raise ValueError(f"{entry}: expected seconds above 0, got {list(rounds)}")


def _refuse(word: str) -> None:
    """NaN and the infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{word} is not a number in JSON")


def _single(document: Any, path: str) -> Any:
    """The report itself, or the only one of a gate's document."""
    if not isinstance(document, dict) or document.get("schema") != GATE_SCHEMA:
        return document
    reports = document.get("reports")
    if not isinstance(reports, list) or len(reports) != 1:
        number = len(reports) if isinstance(reports, list) else "no"
        raise UsageError(f"{path!r} is the document of a gate with {number} reports; give one with a single model")
    return reports[0]
