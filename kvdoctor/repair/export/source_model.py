"""The model that an export replaces: its facts, from a diagnosis or an earlier report, and the interface to keep."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import describe
from kvdoctor.errors import UsageError
from kvdoctor.records import record
from kvdoctor.report.document import Report
from kvdoctor.report.facts import FileFacts
from kvdoctor.report.json_format import read_report
from kvdoctor.report.repair_record import PortChange, RepairSide


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
    files: tuple[FileFacts, ...]


def no_source(checkpoint: str) -> SourceModel:
    """The facts if there is no model to replace."""
    return SourceModel(SourceFacts(name=checkpoint), RepairSide("nothing-found", ()), ())


def read_source(report: Report) -> SourceModel:
    """The facts in a report."""
    files, contracts = report.model.files, [stack.contract for stack in report.stacks if stack.contract is not None]
    decoders = (file.opsets for file in files if "decoder" in file.role)
    facts = SourceFacts(
        name=report.model.path,
        layouts=tuple(stack.layout for stack in report.stacks if stack.contract is not None),
        roles=tuple(dict.fromkeys(file.role for file in files)),
        opset=max(filter(None, (opsets.get("", opsets.get("ai.onnx")) for opsets in decoders)), default=None),
        dtype=next((slot.dtype for contract in contracts for slot in contract.slots), None),
        faults=tuple(dict.fromkeys(found.name for found in report.findings if found.severity != "note")),
    )
    return SourceModel(facts, RepairSide(report.verdict, report.findings), files)


def read_because(path: str) -> SourceModel:
    """Read the report that `--because` names.

    Raises:
        UsageError: it cannot be read, or is not a report; the message says how to write one.
    """
    try:
        return read_source(read_report(path))
    except UsageError as reason:
        raise UsageError(f"--because {reason}") from None


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


def compare_ports(known: SourceModel, files: tuple[FileFacts, ...]) -> Iterator[PortChange]:
    """Inputs and outputs that differ from the replaced model, in files of the same name or role."""
    for file in files:
        named = [other for other in known.files if other.path == file.path]
        same = [other for other in known.files if other.role == file.role]
        alone = len(same) == 1 and sum(other.role == file.role for other in files) == 1
        for before in (named or (same if alone else []))[:1]:
            for sides in ((before.inputs, file.inputs), (before.outputs, file.outputs)):
                was, now = ({str(port["name"]): port for port in ports} for ports in sides)
                for name in dict.fromkeys([*was, *now]):
                    if not _is_compatible(was.get(name), now.get(name)):
                        types = (None if port is None else _describe(port) for port in (was.get(name), now.get(name)))
                        yield PortChange(file.path, name, *types)


def _is_compatible(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a caller feeds and reads both in the same way; names of free axes do not matter."""
    if was is None or now is None or was.get("dtype") != now.get("dtype"):
        return False
    old, new = was.get("shape"), now.get("shape")
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(a == b or not isinstance(b, int) for a, b in zip(old, new, strict=True))


def _describe(port: dict[str, Any]) -> str:
    return str(port.get("dtype")) if port.get("shape") is None else describe(str(port.get("dtype")), port["shape"])
