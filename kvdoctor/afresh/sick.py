"""What is known of the sick model: from its own diagnosis, or from a report that was written earlier."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from kvdoctor.errors import UsageError
from kvdoctor.export.wishes import Sick
from kvdoctor.findings import Finding
from kvdoctor.plain import from_plain
from kvdoctor.report.document import SCHEMA, Side, Verdict

MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Known:
    """What is known of the model that is replaced: for the choice, for the report, and its files as facts."""

    sick: Sick
    before: Side
    files: tuple[dict[str, Any], ...]


def nothing(checkpoint: str) -> Known:
    """Where there is no model to replace."""
    return Known(Sick(name=checkpoint), Side("nothing-found", ()), ())


def known_of(document: dict[str, Any]) -> Known:
    """Read a report, as `--format json` writes it.

    Raises:
        UsageError: it is no report of this version of kvdoctor.
    """
    try:
        model, stacks = document["model"], [stack for stack in document["stacks"] if stack["contract"]]
        findings = tuple(from_plain(Finding, entry) for entry in document["findings"])
        verdict = _verdict(document["verdict"])
        files = tuple(dict(file) for file in model["files"])
        return Known(
            Sick(
                name=str(model["path"]),
                layouts=tuple(str(stack["layout"]) for stack in stacks),
                roles=tuple(dict.fromkeys(str(file["role"]) for file in files)),
                opset=max(_opsets(files), default=None),
                dtype=next(_dtypes(stacks), None),
                faults=tuple(dict.fromkeys(f.name for f in findings if f.severity != "note")),
            ),
            Side(verdict, findings),
            files,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"it is no report of a model ({type(error).__name__}: {str(error)[:200]})") from None


def read_because(path: str) -> Known:
    """Read the report that `--because` names.

    Raises:
        UsageError: it cannot be read, or is no report; the message says how to write one.
    """
    advice = "; `kvdoctor step-test MODEL --output json=REPORT.json` writes one"
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise UsageError(f"--because {path!r} is larger than 256 MiB{advice}")
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--because {path!r} cannot be read ({type(error).__name__}){advice}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"--because {path!r} is no report with the schema {SCHEMA}{advice}")
    try:
        return known_of(document)
    except UsageError as reason:
        raise UsageError(f"--because {path!r}: {reason}{advice}") from None


def _verdict(word: Any) -> Verdict:
    if word not in get_args(Verdict):
        raise ValueError(f"verdict {word!r}")
    found: Verdict = word
    return found


def _opsets(files: tuple[dict[str, Any], ...]) -> Iterator[int]:
    for file in files:
        if "decoder" in str(file["role"]):
            version = file["opsets"].get("", file["opsets"].get("ai.onnx"))
            if isinstance(version, int):
                yield version


def _dtypes(stacks: list[dict[str, Any]]) -> Iterator[str]:
    for stack in stacks:
        for slot in stack["contract"]["slots"]:
            yield str(slot["dtype"])
