"""A cache contract that the user gives: written out by `kvdoctor contract --format json`, and edited by hand.

Everything in it is held against the graphs, since a contract that names what is not there would make every run fail
for a reason that is not the model's.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.axes import as_number
from kvdoctor.configs import MOST_COUNTED
from kvdoctor.contract import CacheContract, Graph, Lack, Phase, Port, Slot
from kvdoctor.errors import UsageError
from kvdoctor.graph import Declared, GraphView
from kvdoctor.lacks import lacks
from kvdoctor.model_folder import ModelFolder
from kvdoctor.plain import from_plain
from kvdoctor.reading import MOST_CODEBOOKS
from kvdoctor.stacks import FileRole, OnnxFile, StackFiles, StackKind

SCHEMA = "kvdoctor/contract/1"
MOST_BYTES = 64 << 20
MOST_WIDE = 1 << 24
"""Entries of one axis of a slot: more than any head, layer count or context of today."""
KNOWN_PHASES = ("encode", "prefill", "decode")


def given_stacks(file: str, folder: ModelFolder) -> tuple[tuple[StackFiles, CacheContract], ...]:
    """Read the stacks that a contract file describes, for the model in a folder.

    What keeps a stack from being driven is found anew: the `missing` of the file is not asked.

    Raises:
        UsageError: the file cannot be read, is no contract, or does not fit the graphs; the message names the place.
    """
    found = []
    for name, entry in _stacks(file).items():
        try:
            contract = from_plain(CacheContract, entry)
        except ValueError as error:
            raise UsageError(f"{file!r}, stack {name!r}: {error}") from None
        stack = _stack(name, contract, folder, file)
        for problem in _misfits(contract, {f.name: f.view for f in stack.files.values() if f.view is not None}):
            raise UsageError(f"{file!r}, stack {name!r}: {problem}; `kvdoctor contract MODEL` prints what is there")
        missing = tuple(dict.fromkeys([*lacks(contract), *_unfed(contract)]))
        evidence = (*contract.evidence, "this contract was given")
        found.append((stack, replace(contract, missing=missing, evidence=tuple(dict.fromkeys(evidence)))))
    return tuple(found)


def _stacks(file: str) -> dict[str, Any]:
    path = Path(file)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file!r} is larger than 64 MiB; a contract is not")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file!r} is no JSON: {error}"[:300]) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{file!r} is no {SCHEMA}; write one with `kvdoctor contract MODEL --format json`")
    stacks = document.get("stacks")
    if not isinstance(stacks, dict) or not stacks or not all(isinstance(entry, dict) for entry in stacks.values()):
        raise UsageError(f"{file!r} describes no stack under 'stacks'")
    return stacks


def _stack(name: str, contract: CacheContract, folder: ModelFolder, source: str) -> StackFiles:
    """The files that a contract speaks of, as the folder groups them or as the phases say."""
    for phase in contract.phases.values():
        if phase.graph not in contract.graphs:
            raise UsageError(f"{source!r}, stack {name!r}: a phase is served by {phase.graph!r}, which is no graph")
    unknown = [phase for phase in contract.phases if phase not in KNOWN_PHASES]
    if unknown or not {"prefill", "decode"} <= set(contract.phases):
        raise UsageError(f"{source!r}, stack {name!r}: phases are prefill and decode, and encode where there is one")
    readable = {file.name: file for file in folder.files if file.view is not None}
    wanted = {phase: contract.graphs[served.graph].file for phase, served in contract.phases.items()}
    for file in wanted.values():
        if file not in readable:
            raise UsageError(
                f"{source!r}, stack {name!r}: {folder.shown} has no readable {file!r}, only {', '.join(readable)}"
            )
    known = next((stack for stack in folder.stacks if stack.name == name), None)
    if known is not None and {f.name for r, f in known.files.items() if r != "encoder"} == {
        wanted["prefill"],
        wanted["decode"],
    }:
        return known
    kind, files = _roles(contract.phases["decode"], {phase: readable[file] for phase, file in wanted.items()})
    return StackFiles(name, kind, files)


def _roles(decode: Phase, files: dict[str, OnnxFile]) -> tuple[StackKind, dict[FileRole, OnnxFile]]:
    encoder: dict[FileRole, OnnxFile] = {"encoder": files["encode"]} if "encode" in files else {}
    if decode.switch is not None:
        return "merged", {"decoder-merged": files["decode"], **encoder}
    if files["prefill"].name != files["decode"].name:
        return "pair", {"decoder": files["prefill"], "decoder-with-past": files["decode"], **encoder}
    return "decoder-only", {"decoder": files["decode"], **encoder}


def _misfits(contract: CacheContract, views: dict[str, GraphView]) -> Iterator[str]:
    """Where a contract contradicts the graphs, or itself."""
    for graph in contract.graphs.values():
        view = views.get(graph.file)
        if view is None:
            yield f"{graph.file!r} serves no phase"
            continue
        yield from _unlike(graph.file, "input", graph.inputs, view.inputs)
        yield from _unlike(graph.file, "output", graph.outputs, view.outputs)
        if lacking := [name for name in view.inputs if name not in {port.name for port in graph.inputs}]:
            yield f"{graph.file!r} has an input {lacking[0]!r}, and the contract does not say what to feed it"
    decode = contract.graph("decode")
    pasts = {port.name: port for port in decode.inputs if port.role == "past"}
    held = {slot.past for slot in contract.slots}
    if set(pasts) != held:
        yield f"{min(set(pasts) ^ held)!r} is a slot and no past input of {decode.file!r}, or the other way round"
    if len(held) != len(contract.slots):
        yield "an input is named as the past of two slots"
    yield from _out_of_bounds(contract)
    for slot in contract.slots:
        yield from _slot_misfits(slot, contract, views[decode.file])


def _slot_misfits(slot: Slot, contract: CacheContract, view: GraphView) -> Iterator[str]:
    """Where one slot contradicts the graphs, or itself."""
    filling = {name for phase in ("prefill", "encode") for name in _outputs(contract, phase)}
    if len(slot.axes) != len(slot.shape):
        yield f"slot {slot.past!r} has {len(slot.shape)} sizes and {len(slot.axes)} axes"
    lengths = [axis for axis in slot.axes if axis in ("past", "capacity", "encoder", "batch", "batch_heads")]
    if len(set(lengths)) != len(lengths):
        yield f"slot {slot.past!r} has two axes of the same meaning"
    yield from _other_sizes(slot, view.inputs.get(slot.past))
    if slot.present is not None and slot.present not in _outputs(contract, "decode"):
        yield f"slot {slot.past!r} comes back as {slot.present!r}, which is no output of the decode graph"
    if slot.filled_by is not None and slot.filled_by not in filling:
        yield f"slot {slot.past!r} is filled by {slot.filled_by!r}, which is no output of the first step"


def _out_of_bounds(contract: CacheContract) -> Iterator[str]:
    """Numbers that no model has, and of which no feed could be made."""
    switched = any(port.role == "branch_switch" for port in contract.graph("decode").inputs)
    if (contract.first_step == "no-past-branch") != switched:
        yield "first_step is 'no-past-branch' where there is a branch_switch, and only there"
    if not 1 <= contract.codebooks <= MOST_CODEBOOKS:
        yield f"codebooks is {contract.codebooks}, not 1 to {MOST_CODEBOOKS}"
    for name in ("vocabulary", "context_limit", "heads"):
        number = getattr(contract, name)
        if number is not None and not 1 <= number <= MOST_COUNTED:
            yield f"{name} is {number}, which no model has"


def _other_sizes(slot: Slot, port: Declared | None) -> Iterator[str]:
    """Sizes that the graph declares as other numbers, or that nothing can have."""
    for index, size in enumerate(slot.shape):
        declared = port.shape[index] if port is not None and port.shape and index < len(port.shape) else None
        known = as_number(declared)
        if isinstance(size, int) and (not 0 <= size <= MOST_WIDE or (isinstance(known, int) and size != known)):
            yield f"slot {slot.past!r} has size {size} on axis {index}, where the graph declares {declared!r}"


def _outputs(contract: CacheContract, phase: str) -> set[str]:
    served = contract.phases.get(phase)
    graph: Graph | None = contract.graphs[served.graph] if served is not None else None
    return {port.name for port in graph.outputs} if graph is not None else set()


def _unlike(file: str, what: str, ports: tuple[Port, ...], declared: dict[str, Any]) -> Iterator[str]:
    for port in ports:
        if port.name not in declared:
            yield f"{file!r} has no {what} {port.name!r}"
        elif declared[port.name].dtype and port.dtype != declared[port.name].dtype:
            yield f"{what} {port.name!r} of {file!r} is {declared[port.name].dtype}, not {port.dtype}"
        elif port.axes and port.shape is not None and len(port.axes) != len(port.shape):
            yield f"{what} {port.name!r} of {file!r} has {len(port.shape)} sizes and {len(port.axes)} axes"


def _unfed(contract: CacheContract) -> Iterator[Lack]:
    """Inputs whose role says nothing of what to feed."""
    for graph in contract.graphs.values():
        for port in graph.inputs:
            if port.role == "auxiliary":
                yield Lack(port.name, f"this input of {graph.file} plays no known part")
            elif port.role == "setting" and port.value is None:
                yield Lack(port.name, "the contract gives no value for this setting")
            elif port.role == "branch_switch" and contract.phases["decode"].switch is None:
                yield Lack(port.name, "the phases do not say which branch is the cached one")
