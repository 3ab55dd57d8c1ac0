"""A report that was written earlier, read back from its file: what is in it is data, and may be anything."""

import json
from pathlib import Path
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.plain import from_plain
from kvdoctor.report.document import GATE_SCHEMA, SCHEMA, Report

MOST_BYTES = 256 << 20
LOOKED_AT = 64
"""Bytes at the start of a file that tell JSON from a model."""
ADVICE = "`kvdoctor step-test MODEL --output json=REPORT.json` writes one"


def is_report(path: str) -> bool:
    """Whether a path is meant for a report and not for a model: JSON by its name, or by how it begins."""
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


def read_report(path: str) -> Report:
    """Read a report; of a gate's document, the only one in it.

    Raises:
        UsageError: it cannot be read, is none, or is one of another version of the schema.
    """
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise UsageError(f"{path!r} is larger than {MOST_BYTES >> 20} MiB; a report is not")
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror or error}; {ADVICE}") from None
    except ValueError:
        raise UsageError(f"{path!r} is no report: it is no text in UTF-8; {ADVICE}") from None
    try:
        document = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path!r} is no JSON ({str(error)[:120]}); {ADVICE}") from None
    return report_of(_single(document, path), path)


def report_of(document: Any, called: str) -> Report:
    """The report that a document of the schema `kvdoctor/report/1` holds; fields that were added later are passed over.

    Raises:
        UsageError: it is another document, or does not fit the schema; the message names the place.
    """
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        said = f"it says {schema!r}" if isinstance(schema, str) else "it names no schema"
        other = isinstance(schema, str) and schema.startswith("kvdoctor/report/")
        hint = "another version of kvdoctor wrote it: write it again with this one" if other else ADVICE
        raise UsageError(f"{called!r} is no {SCHEMA} ({said[:120]}); {hint}")
    try:
        report = from_plain(Report, document, newer=True)
        _refuse_contradictions(report)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{called!r} does not fit {SCHEMA}: {str(error)[:300]}; {ADVICE}") from None
    return report


def _refuse_contradictions(report: Report) -> None:
    """Refuse what has the types of a report, and that no report holds.

    Raises:
        ValueError: the message names the place.
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


def _refuse(word: str) -> None:
    """What Python's JSON reads, and JSON has not: NaN and the infinities."""
    raise ValueError(f"{word} is no number of JSON")


def _single(document: Any, path: str) -> Any:
    """The report itself, or the only one of a gate's document."""
    if not isinstance(document, dict) or document.get("schema") != GATE_SCHEMA:
        return document
    reports = document.get("reports")
    if not isinstance(reports, list) or len(reports) != 1:
        number = len(reports) if isinstance(reports, list) else "no"
        raise UsageError(f"{path!r} is a gate's document with {number} reports; give one with a single model")
    return reports[0]
