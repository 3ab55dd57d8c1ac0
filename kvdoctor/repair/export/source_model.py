"""The model that an export replaces: its facts, from a diagnosis or an earlier report, and the interface to keep."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding
from kvdoctor.records import from_plain, record
from kvdoctor.report.document import SCHEMA
from kvdoctor.report.facts import Verdict
from kvdoctor.report.repair_record import PortChange, RepairSide

MOST_BYTES = 256 << 20


@record
class SourceFacts:
    """Facts of the model that an export replaces; all empty if there is none.

    `layouts` are those of its stacks, `roles` those of its files, `opset` is the newest that a file imports, `dtype`
    the element type of its cache, `faults` are the checks that fired as warnings or errors.
    """

    name: str = ""
    layouts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    opset: int | None = None
    dtype: str | None = None
    faults: tuple[str, ...] = ()


@record(slots=False)
class SourceModel:
    """The model that is replaced: facts for the choice of an exporter, its findings, and its files as in a report."""

    facts: SourceFacts
    before: RepairSide
    files: tuple[dict[str, Any], ...]


def no_source(checkpoint: str) -> SourceModel:
    """The facts if there is no model to replace."""
    return SourceModel(SourceFacts(name=checkpoint), RepairSide("nothing-found", ()), ())


def read_source(document: dict[str, Any]) -> SourceModel:
    """Read a report, as `--format json` writes it.

    Raises:
        UsageError: it is not a report of this version of kvdoctor.
    """
    try:
        model, stacks = document["model"], [stack for stack in document["stacks"] if stack["contract"]]
        findings = tuple(from_plain(Finding, entry) for entry in document["findings"])
        verdict = _verdict(document["verdict"])
        files = tuple(dict(file) for file in model["files"])
        return SourceModel(
            SourceFacts(
                name=str(model["path"]),
                layouts=tuple(str(stack["layout"]) for stack in stacks),
                roles=tuple(dict.fromkeys(str(file["role"]) for file in files)),
                opset=max(_opsets(files), default=None),
                dtype=next((str(slot["dtype"]) for stack in stacks for slot in stack["contract"]["slots"]), None),
                faults=tuple(dict.fromkeys(f.name for f in findings if f.severity != "note")),
            ),
            RepairSide(verdict, findings),
            files,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"it is not a report of a model ({type(error).__name__}: {str(error)[:200]})") from None


def read_because(path: str) -> SourceModel:
    """Read the report that `--because` names.

    Raises:
        UsageError: it cannot be read, or is not a report; the message says how to write one.
    """
    advice = "; `kvdoctor step-test MODEL --output json=REPORT.json` writes one"
    try:
        document = json.loads(read_side_file(Path(path), MOST_BYTES))
    except OSError as error:
        raise UsageError(f"--because {path!r} cannot be read: {error.strerror or error}{advice}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--because {path!r} cannot be read ({type(error).__name__}){advice}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"--because {path!r} is not a report with the schema {SCHEMA}{advice}")
    try:
        return read_source(document)
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


DECODERS = ("decoder-merged", "decoder", "decoder-with-past")


def delete_surplus_decoders(folder: Path, known: SourceModel) -> tuple[str, ...]:
    """Delete decoders that the replaced model does not have, if all of its own are there; gives their names."""
    if not known.facts.roles:
        return ()
    files = open_folder(str(folder)).files
    wanted = set(known.facts.roles).intersection(DECODERS)
    if not wanted or not wanted <= {file.role for file in files}:
        return ()
    surplus = [file for file in files if file.role in DECODERS and file.role not in wanted]
    shared = {external.path for file in files if file not in surplus for external in file.external}
    for file in surplus:
        file.path.unlink()
        for external in file.external:
            if external.path not in shared and external.path.is_relative_to(folder):
                external.path.unlink(missing_ok=True)
    return tuple(file.name for file in surplus)


def compare_ports(known: SourceModel, files: tuple[dict[str, Any], ...]) -> Iterator[PortChange]:
    """Inputs and outputs that differ from the replaced model, in files of the same name or role."""
    for file in files:
        before = _find_counterpart(file, known.files, files)
        if before is None:
            continue
        for kind in ("inputs", "outputs"):
            was, now = ({str(port["name"]): port for port in each.get(kind) or ()} for each in (before, file))
            for name in dict.fromkeys([*was, *now]):
                if not _is_compatible(was.get(name), now.get(name)):
                    yield PortChange(
                        str(file["path"]), name, _describe_port(was.get(name)), _describe_port(now.get(name))
                    )


def _find_counterpart(
    file: dict[str, Any], old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]
) -> dict[str, Any] | None:
    named = next((other for other in old if other["path"] == file["path"]), None)
    if named is not None:
        return named
    same = [other for other in old if other["role"] == file["role"]]
    alone = sum(other["role"] == file["role"] for other in new) == 1
    return same[0] if len(same) == 1 and alone else None


def _is_compatible(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a caller feeds and reads both in the same way; names of free axes do not matter."""
    if was is None or now is None:
        return False
    old, new = was.get("shape"), now.get("shape")
    if was.get("dtype") != now.get("dtype"):
        return False
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(
        before == after or not isinstance(after, int) for before, after in zip(old, new, strict=True)
    )


def _describe_port(port: dict[str, Any] | None) -> str | None:
    if port is None:
        return None
    shape = port.get("shape")
    sizes = "" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
    return f"{port.get('dtype')}{sizes}"
