"""A cache contract from a file: written by `kvdoctor contract --format json`, and edited by hand.

All of it is compared with the graphs: a wrong name in the contract would make every run fail, and not by a fault of
the model.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.analysis.axes import STATES, WIDTHS, as_number
from kvdoctor.analysis.completeness import add_missing_parts, find_absent_entries, find_unpaired
from kvdoctor.analysis.configs import MOST_CODEBOOKS, MOST_COUNTED
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.feature_encoders import ROLES
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.analysis.stacks import INPUT_ROLES, FileRole, OnnxFile, StackFiles, StackKind
from kvdoctor.contract import DECODING, Axis, CacheContract, Graph, MissingPart, Phase, PhaseName, Port, Slot
from kvdoctor.decode.embeddings import embedded_inputs
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.model.view import Declared, GraphView
from kvdoctor.records import from_plain, to_plain

SCHEMA = "kvdoctor/contract/1"
HOW_TO_WRITE = "write a contract with `kvdoctor contract MODEL --format json`"
MOST_BYTES = 64 << 20
MOST_STACKS = 64
WITHOUT_PROOF: dict[str, Any] = {
    "used_as": None,
    "used_at": None,
    "continues_as": None,
    "takes_new": None,
    "takes_mask": None,
    "made_as": None,
    "made_at": None,
    "emptied": False,
    "trimmed": False,
    "prepended": False,
}
"""Fields of a slot that only a graph proves, with their values where it proves nothing."""
KNOWN_PHASES = ("encode", "embed", *ROLES, *DECODING)
MOST_WIDE = 1 << 24
"""Entries of one axis of a slot: more than any head width, layer count or context has."""
MOST_LAYERS = 100_000
LENGTHS: tuple[Axis, ...] = ("batch", "batch_heads", "batch_codebooks", "new", "past", "total", "encoder", "vocabulary")
"""Axes whose size a contract must leave open where the graph does."""
TOKEN_AXES = (("batch", "new"), ("batch_codebooks", "new"), ("new",), ("batch", "fixed"), ("fixed",))
IN_BUFFERS = ("shift", "write", "drop-oldest")


def is_contract(file: str) -> bool:
    """Whether a file is a contract, whole or damaged: JSON that names the schema of contracts of any version."""
    try:
        document = json.loads(read_side_file(Path(file), MOST_BYTES), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError):
        return False
    schema = document.get("schema") if isinstance(document, dict) else None
    return isinstance(schema, str) and schema.startswith(SCHEMA.rpartition("/")[0])


def read_required(file: str) -> dict[str, CacheContract]:
    """The contracts of a file by stack, as they are written there; no graph is looked at.

    Raises:
        UsageError: the file cannot be read, or is no contract; the message names the part.
    """
    found = {}
    for name, entry in _read_entries(file).items():
        found[name] = _revive(entry, f"{file!r}, stack {name!r}")
        served = {phase.graph for phase in found[name].phases.values()}
        if not served <= found[name].graphs.keys() or not {*DECODING} <= found[name].phases.keys():
            raise UsageError(f"{file!r}, stack {name!r}: it needs the phases prefill and decode, and their graphs")
    return found


def read_contract_file(file: str, folder: ModelFolder) -> tuple[tuple[StackFiles, CacheContract], ...]:
    """Read the stacks that a contract file describes, for the model in a folder.

    What the graphs prove, and which parts are missing, is taken from the graphs; the file decides the rest, and leaves
    no reading open.

    Raises:
        UsageError: the file cannot be read, is no contract, or does not fit the graphs; the message names the part.
    """
    found = []
    for name, entry in _read_entries(file).items():
        contract = _revive(entry, f"{file!r}, stack {name!r}")
        stack = _find_files(name, contract, folder, file)
        contract = _add_proofs(contract, read_contract(stack, folder.side_cars))
        for conflict in find_conflicts(contract, {f.name: f.view for f in stack.files.values() if f.view is not None}):
            raise UsageError(f"{file!r}, stack {name!r}: {conflict}; `kvdoctor contract MODEL` prints the model's own")
        evidence = (*contract.evidence, "the contract was read from a file")
        contract = replace(contract, evidence=tuple(dict.fromkeys(evidence)), ambiguities=())
        found.append((stack, add_missing_parts(contract, _find_unfed(contract))))
    return tuple(found)


def _revive(entry: dict[str, Any], at: str) -> CacheContract:
    """The contract of one stack as the file has it.

    Raises:
        UsageError: an entry is missing, unknown or of the wrong type.
    """
    for absent in find_absent_entries(entry):
        raise UsageError(f"{at}: {absent}")
    try:
        return from_plain(CacheContract, entry)
    except ValueError as error:
        raise UsageError(f"{at}: {str(error).removeprefix('CacheContract').removeprefix('.')}") from None


def _add_proofs(given: CacheContract, read: CacheContract) -> CacheContract:
    """The contract of the file with everything that the graphs prove as they prove it."""
    slots = {slot.past: slot for slot in read.slots}
    proved = []
    for slot in given.slots:
        by_graph = slots.get(slot.past)
        proofs = {name: getattr(by_graph, name, default) for name, default in WITHOUT_PROOF.items()}
        proved.append(replace(slot, **proofs))
    # A user who renames a slot's output, or its part, overrules the graph's names: contradictions of these are moot.
    same = all((s.past, s.present, s.part) in {(r.past, r.present, r.part) for r in read.slots} for s in given.slots)
    contradictions = read.contradictions if same else ()
    given_slots = {slot.past: slot for slot in given.slots}

    def like_its_slot(port: Port) -> Port:
        slot = given_slots.get(port.name) if port.role == "past" else None
        return replace(port, shape=slot.shape, axes=slot.axes) if slot is not None else port

    given = given.with_ports(like_its_slot)
    return replace(given, slots=tuple(proved), exactness=read.exactness, contradictions=contradictions)


def _read_entries(file: str) -> dict[str, Any]:
    try:
        # From bytes: PowerShell redirects to UTF-16 with a byte order mark, which json detects.
        document = json.loads(read_side_file(Path(file), MOST_BYTES), parse_constant=_refuse_constant)
    except OSError as error:
        raise UsageError(f"{file!r} cannot be read: {error.strerror or error}; {HOW_TO_WRITE}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file!r} is not JSON: {error}"[:300]) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{file!r} is not a document of schema {SCHEMA}; {HOW_TO_WRITE}")
    stacks = document.get("stacks")
    if not isinstance(stacks, dict) or not stacks or not all(isinstance(entry, dict) for entry in stacks.values()):
        raise UsageError(f"{file!r} has no stack under 'stacks'")
    if len(stacks) > MOST_STACKS:
        raise UsageError(f"{file!r} has {len(stacks)} stacks, and {MOST_STACKS} is the most; give those of one model")
    return stacks


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a JSON number")


def _find_files(name: str, contract: CacheContract, folder: ModelFolder, source: str) -> StackFiles:
    """The files that a contract names, as the folder groups them or else by their phases."""
    at = f"{source!r}, stack {name!r}"
    for phase in contract.phases.values():
        if phase.graph not in contract.graphs:
            raise UsageError(f"{at}: a phase names the graph {phase.graph!r}, which is not under 'graphs'")
    unknown = [phase for phase in contract.phases if phase not in KNOWN_PHASES]
    if unknown or not {"prefill", "decode"} <= set(contract.phases):
        raise UsageError(
            f"{at}: the phases must be prefill and decode, encode with an encoder, and embed with an embedding graph"
        )
    joined = (file for stack in folder.stacks for file in stack.files.values() if stack.stages)
    readable = {file.name: file for file in (*folder.files, *joined) if file.view is not None}
    wanted = {phase: contract.graphs[served.graph].file for phase, served in contract.phases.items()}
    for file in wanted.values():
        if file not in readable:
            raise UsageError(f"{at}: {folder.shown} has no readable file {file!r}, only {', '.join(readable)}")
    known = next((stack for stack in folder.stacks if stack.name == name), None)
    others = _list_others({phase: readable[file] for phase, file in wanted.items()})
    if known is not None and {f.name for r, f in known.files.items() if r not in INPUT_ROLES} == {
        wanted["prefill"],
        wanted["decode"],
    }:
        return replace(known, files={**known.files, **others})
    kind, files = _roles(contract.phases["decode"], {phase: readable[file] for phase, file in wanted.items()})
    return StackFiles(name, kind, files)


def _roles(decode: Phase, files: dict[str, OnnxFile]) -> tuple[StackKind, dict[FileRole, OnnxFile]]:
    others = _list_others(files)
    if decode.switch is not None:
        return "merged", {"decoder-merged": files["decode"], **others}
    if files["prefill"].name != files["decode"].name:
        return "pair", {"decoder": files["prefill"], "decoder-with-past": files["decode"], **others}
    return "decoder-only", {"decoder": files["decode"], **others}


def _list_others(files: dict[str, OnnxFile]) -> dict[FileRole, OnnxFile]:
    """The files of phases that do not decode, by role."""
    roles: dict[PhaseName, FileRole] = {"encode": "encoder", "embed": "embedding", **ROLES}
    return {role: replace(files[phase], role=role) for phase, role in roles.items() if phase in files}


def find_conflicts(contract: CacheContract, views: dict[str, GraphView]) -> Iterator[str]:
    """Find where a contract contradicts the graphs, or itself."""
    for graph in contract.graphs.values():
        view = views.get(graph.file)
        if view is None:
            yield f"no phase uses the graph of {graph.file!r}"
            continue
        yield from _compare_ports(graph.file, "input", graph.inputs, view.inputs)
        yield from _compare_ports(graph.file, "output", graph.outputs, view.outputs)
        for port in (*graph.inputs, *graph.outputs):
            yield from _find_port_conflicts(port)
        given = {port.name for port in graph.inputs}
        if absent := [name for name in view.inputs if name not in given]:
            yield f"{graph.file!r} has an input {absent[0]!r}, and the contract does not list it"
    decode = contract.graph("decode")
    pasts = {port.name: port for port in decode.inputs if port.role == "past"}
    names = {slot.past for slot in contract.slots}
    if without_input := sorted(names - set(pasts)):
        yield f"slot {without_input[0]!r} is no past input of {decode.file!r}; an input is one by its role 'past'"
    if without_slot := sorted(set(pasts) - names):
        yield f"{without_slot[0]!r} is a past input of {decode.file!r} without a slot; write one under 'slots'"
    if len(names) != len(contract.slots):
        yield "an input is the past of two slots"
    yield from _find_numbers_out_of_range(contract)
    yield from _find_phase_conflicts(contract)
    yield from _find_embedding_conflicts(contract)
    for slot in contract.slots:
        yield from _find_slot_conflicts(slot, contract, views[decode.file])


def _find_slot_conflicts(slot: Slot, contract: CacheContract, view: GraphView) -> Iterator[str]:
    filling = {name for phase in ("prefill", "encode") for name in _outputs(contract, phase)}
    if len(slot.axes) != len(slot.shape):
        yield f"slot {slot.past!r} has {len(slot.shape)} sizes and {len(slot.axes)} axes"
    elif isinstance(slot.size("past"), int) and any(
        axis in WIDTHS and isinstance(size, str) for axis, size in zip(slot.axes, slot.shape, strict=True)
    ):
        yield f"slot {slot.past!r} has axes in another order: its past is a number, and a width is open"
    lengths = [axis for axis in slot.axes if axis in ("past", "capacity", "encoder", "batch", "batch_heads")]
    if len(set(lengths)) != len(lengths):
        yield f"slot {slot.past!r} has two axes of the same meaning"
    declared = view.inputs.get(slot.past)
    if declared is not None and slot.dtype != declared.dtype:
        yield f"slot {slot.past!r} is {declared.dtype}, not {slot.dtype}"
    yield from _compare_sizes(f"slot {slot.past!r}", slot, declared)
    yield from _find_carry_conflicts(slot, contract)
    yield from find_unpaired(slot, contract)
    if slot.present is not None and slot.present not in _outputs(contract, "decode"):
        yield f"slot {slot.past!r} has the present {slot.present!r}, which is no output of the decode graph"
    given = slot.filled_in == "encode" and "encode" not in contract.phases and slot.filled_by == slot.past
    if slot.filled_by is not None and slot.filled_by not in filling and not given:
        yield f"slot {slot.past!r} is filled by {slot.filled_by!r}, which is no output of the first step"


def _find_carry_conflicts(slot: Slot, contract: CacheContract) -> Iterator[str]:
    """Where growth, first step and carry of a slot contradict one another, or its axes."""
    axes, first, branch = set(slot.axes), slot.first, contract.first_step == "no-past-branch"
    two = contract.phases["prefill"].graph != contract.phases["decode"].graph
    at = slot.length_axis
    fixed = at is not None and (slot.axes[at] == "capacity" or isinstance(slot.shape[at], int))
    bare = slot.kind in (*STATES, "cross-attention", "encoder-states")
    wrong = {
        "first 'prefill' needs a first step with a graph of its own": first == "prefill" and not two,
        "first 'encoder' needs filled_in 'encode'": first == "encoder" and slot.filled_in != "encode",
        "first 'ignored' needs a no-past branch": first == "ignored" and not branch,
        "first 'empty' needs an axis past or encoder": first == "empty" and not axes & {"past", "encoder"},
        "first 'zeros' needs a buffer or a state, without an axis past": first == "zeros" and "past" in axes,
        "first 'dummy' is not supported: give 'empty', a past of length 0": first == "dummy",
        f"kind {slot.kind!r} has no axis past": bare and "past" in axes,
        "growth 'replace' needs a state, without an axis past": slot.growth == "replace" and "past" in axes,
        "growth 'constant' needs carry 'hold'": slot.growth == "constant" and slot.carry != "hold",
        f"carry {slot.carry!r} needs a buffer of fixed length": slot.carry in IN_BUFFERS and not fixed,
        f"layer is {slot.layer}, out of range": slot.layer is not None and not 0 <= slot.layer < MOST_LAYERS,
    }
    yield from (f"slot {slot.past!r}: {reason}" for reason, applies in wrong.items() if applies)


def _find_port_conflicts(port: Port) -> Iterator[str]:
    """Axes by which no feed can be made, and values that are no finite numbers."""
    lengths = [axis for axis in port.axes if axis in ("batch", "new", "past")]
    axes, ids, logits = ", ".join(port.axes), port.role == "token_ids", port.role == "logits"
    wrong = {
        "two axes of the same meaning": len(set(lengths)) != len(lengths),
        f"the role token_ids, but the axes {axes}; they must be batch, new": ids and port.axes not in TOKEN_AXES,
        f"the role logits, but the axes {axes}; they must have vocabulary": logits and "vocabulary" not in port.axes,
        f"the value {port.value}, which is not finite": port.value is not None and not math.isfinite(port.value),
    }
    yield from (f"{port.name!r} has {what}" for what, applies in wrong.items() if applies)


def _find_phase_conflicts(contract: CacheContract) -> Iterator[str]:
    """Phases that do not fit `first_step`."""
    two = contract.phases["prefill"].graph != contract.phases["decode"].graph
    switches = {contract.phases[phase].switch for phase in ("prefill", "decode")}
    if (contract.first_step == "no-past-graph") != two:
        yield "first_step must be 'no-past-graph' if, and only if, prefill and decode use two graphs"
    if contract.first_step == "no-past-branch" and switches != {True, False}:
        yield "the switch of prefill and of decode must be true in one and false in the other"
    if contract.first_step != "no-past-branch" and switches != {None}:
        yield "the phases give values of a switch, but no input has the role branch_switch"


def _find_embedding_conflicts(contract: CacheContract) -> Iterator[str]:
    """An embedding graph that cannot be fed token ids, or whose outputs are not what the decoder takes."""
    if "embed" not in contract.phases:
        return
    graph = contract.graph("embed")
    if [port.role for port in graph.inputs].count("token_ids") != 1:
        yield f"{graph.file!r} serves the phase embed, and does not have one input with the role token_ids"
    if strange := [port.name for port in graph.inputs if port.role not in ("token_ids", "features")]:
        yield f"{strange[0]!r} of {graph.file!r} has neither the role token_ids nor features"
    try:
        pairs = [embedded_inputs(contract, phase) for phase in DECODING]
    except ValueError as error:
        yield str(error)
        return
    if not any(pairs):
        yield f"{graph.file!r} serves the phase embed, and no input of the decoder has the role embeddings"


def _find_numbers_out_of_range(contract: CacheContract) -> Iterator[str]:
    """Numbers that no model has, and by which no feed can be made."""
    switched = any(port.role == "branch_switch" for port in contract.graph("decode").inputs)
    if (contract.first_step == "no-past-branch") != switched:
        yield "first_step must be 'no-past-branch' if, and only if, an input has the role branch_switch"
    if not 1 <= contract.codebooks <= MOST_CODEBOOKS:
        yield f"codebooks is {contract.codebooks}, not 1 to {MOST_CODEBOOKS}"
    logits = contract.graph("decode").port("logits")
    width = logits.shape[-1] if logits is not None and logits.shape else None
    if isinstance(width, int) and (contract.vocabulary or 0) > width:
        yield f"vocabulary is {contract.vocabulary}, but the logits have {width} entries per token"
    rows = {axis for graph in contract.graphs.values() for port in graph.inputs for axis in port.axes}
    if contract.codebooks > 1 and "batch_codebooks" not in rows:
        yield f"codebooks is {contract.codebooks}, but no input has an axis batch_codebooks"
    for name in ("vocabulary", "context_limit", "heads"):
        number = getattr(contract, name)
        if number is not None and not 1 <= number <= MOST_COUNTED:
            yield f"{name} is {number}, not 1 to {MOST_COUNTED}"


def _compare_sizes(what: str, slot: Slot | Port, port: Declared | None) -> Iterator[str]:
    """Sizes that the graph declares as different numbers or leaves open, or that are out of range."""
    for index, size in enumerate(slot.shape or ()):
        declared = port.shape[index] if port is not None and port.shape and index < len(port.shape) else None
        known = as_number(declared)
        fixed = index < len(slot.axes) and slot.axes[index] in LENGTHS and not isinstance(known, int)
        wrong = fixed or (isinstance(known, int) and size != known)
        if isinstance(size, int) and (wrong or not 0 <= size <= MOST_WIDE):
            yield f"{what} has size {size} on axis {index}, where the graph declares {declared!r}"


def _outputs(contract: CacheContract, phase: str) -> set[str]:
    served = contract.phases.get(phase)
    graph: Graph | None = contract.graphs[served.graph] if served is not None else None
    return {port.name for port in graph.outputs} if graph is not None else set()


def _compare_ports(file: str, kind: str, ports: tuple[Port, ...], declared: Mapping[str, Declared]) -> Iterator[str]:
    for port in ports:
        if port.name not in declared:
            yield f"{file!r} has no {kind} {port.name!r}"
        elif declared[port.name].dtype and port.dtype != declared[port.name].dtype:
            yield f"{kind} {port.name!r} of {file!r} is {declared[port.name].dtype}, not {port.dtype}"
        elif port.shape is not None and len(port.axes) != len(port.shape):
            yield f"{kind} {port.name!r} of {file!r} has {len(port.shape)} sizes and {len(port.axes)} axes"
        else:
            yield from _compare_sizes(f"{kind} {port.name!r} of {file!r}", port, declared[port.name])


def _find_unfed(contract: CacheContract) -> Iterator[MissingPart]:
    """Inputs whose role does not determine their feed."""
    for graph in contract.graphs.values():
        for port in graph.inputs:
            if port.role == "auxiliary":
                yield MissingPart(port.name, f"this input of {graph.file} has no known role")
            elif port.role == "setting" and port.value is None:
                yield MissingPart(port.name, "the contract gives no value for this setting")
            elif port.role == "branch_switch" and contract.phases["decode"].switch is None:
                yield MissingPart(port.name, "the phases give no value of the switch for the cached branch")


HOW_READ = ("evidence", "contradictions", "missing", "ambiguities", "features")
"""Fields of a contract that say how it was read, and nothing that a loop does."""


def list_differences(given: CacheContract | None, read: CacheContract | None) -> Iterator[str]:
    """Where a contract that was given differs from the one that was read: `past.0.key carry: hold, not feed-back`."""
    yield from _list_differences("contract", to_plain(given), to_plain(read))


def _list_differences(place: str, given: Any, read: Any) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        name = given.get("past") or given.get("name") or place
        for key in (key for key in given if key not in HOW_READ):
            yield from _list_differences(f"{name} {key}", given[key], read.get(key))
    elif isinstance(given, list) and isinstance(read, list) and any(isinstance(one, dict) for one in given):
        for one, other in zip(given, read, strict=False):
            yield from _list_differences(place, one, other)
    elif given != read:
        yield f"{place}: {given}, not {read}"
