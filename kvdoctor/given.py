"""A cache contract that the user gives: written out by `kvdoctor contract --format json`, and edited by hand.

Everything in it is held against the graphs, since a contract that names what is not there would make every run fail
for a reason that is not the model's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract, Phase, Port, Slot
from kvdoctor.errors import UsageError
from kvdoctor.given_misfits import misfits, unfed
from kvdoctor.lacks import in_all
from kvdoctor.model_folder import ModelFolder
from kvdoctor.plain import from_plain
from kvdoctor.reading import read_contract
from kvdoctor.stacks import FileRole, OnnxFile, StackFiles, StackKind

SCHEMA = "kvdoctor/contract/1"
MOST_BYTES = 64 << 20
MOST_STACKS = 64
UNPROVED: dict[str, Any] = {
    "used_as": None,
    "used_at": None,
    "continues_as": None,
    "takes_new": None,
    "made_as": None,
    "made_at": None,
    "emptied": False,
    "trimmed": False,
}
"""What only a graph tells of a slot, and what stands there where it does not."""
KNOWN_PHASES = ("encode", "prefill", "decode")


def given_stacks(file: str, folder: ModelFolder) -> tuple[tuple[StackFiles, CacheContract], ...]:
    """Read the stacks that a contract file describes, for the model in a folder.

    What the graphs themselves prove is read anew, and so is what keeps a stack from being driven: the file is asked for
    the deal alone.

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
        contract = _proved(contract, read_contract(stack, folder.side_cars))
        for problem in misfits(contract, {f.name: f.view for f in stack.files.values() if f.view is not None}):
            raise UsageError(f"{file!r}, stack {name!r}: {problem}; `kvdoctor contract MODEL` prints what is there")
        evidence = (*contract.evidence, "this contract was given")
        contract = replace(contract, missing=in_all(contract, unfed(contract)), evidence=tuple(dict.fromkeys(evidence)))
        found.append((stack, contract))
    return tuple(found)


def _proved(given: CacheContract, read: CacheContract) -> CacheContract:
    """A contract with what the graphs prove in place of what the file says of that."""
    slots = {slot.past: slot for slot in read.slots}
    proved = []
    for slot in given.slots:
        by_graph = slots.get(slot.past)
        proved.append(replace(slot, **{name: getattr(by_graph, name, UNPROVED[name]) for name in UNPROVED}))
    # Who renames a slot's output or its part says that names mislead here.
    same = all((s.past, s.present, s.part) in {(r.past, r.present, r.part) for r in read.slots} for s in given.slots)
    contradictions = read.contradictions if same else ()
    told = {slot.past: slot for slot in given.slots}  # what the file says of a slot holds for its port
    graphs = {
        name: replace(graph, inputs=tuple(_as_told(port, told.get(port.name)) for port in graph.inputs))
        for name, graph in given.graphs.items()
    }
    return replace(given, graphs=graphs, slots=tuple(proved), exactness=read.exactness, contradictions=contradictions)


def _as_told(port: Port, slot: Slot | None) -> Port:
    return replace(port, shape=slot.shape, axes=slot.axes) if port.role == "past" and slot is not None else port


def _stacks(file: str) -> dict[str, Any]:
    path = Path(file)
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{file!r} is no plain file; give the JSON that `kvdoctor contract MODEL` writes")
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{file!r} is larger than 64 MiB; a contract is not")
        # From bytes: a shell of Windows writes UTF-16, and marks the order of bytes.
        document = json.loads(path.read_bytes(), parse_constant=_no_number)
    except OSError as error:
        raise UsageError(f"{file!r} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file!r} is no JSON: {error}"[:300]) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{file!r} is no {SCHEMA}; write one with `kvdoctor contract MODEL --format json`")
    stacks = document.get("stacks")
    if not isinstance(stacks, dict) or not stacks or not all(isinstance(entry, dict) for entry in stacks.values()):
        raise UsageError(f"{file!r} describes no stack under 'stacks'")
    if len(stacks) > MOST_STACKS:
        raise UsageError(f"{file!r} describes {len(stacks)} stacks; give one for each model, {MOST_STACKS} at most")
    return stacks


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


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
