"""Where a contract that the user gives contradicts the graphs, or itself."""

import math
from collections.abc import Iterator, Mapping

from kvdoctor.axes import as_number
from kvdoctor.configs import MOST_COUNTED
from kvdoctor.contract import Axis, CacheContract, Graph, Lack, Port, Slot
from kvdoctor.graph import Declared, GraphView
from kvdoctor.reading import MOST_CODEBOOKS

MOST_WIDE = 1 << 24
"""Entries of one axis of a slot: more than any head, layer count or context of today."""
MOST_LAYERS = 100_000
LENGTHS: tuple[Axis, ...] = ("batch", "batch_heads", "batch_codebooks", "new", "past", "total", "encoder", "vocabulary")
"""Axes whose size a contract does not fix where the graph leaves it open."""
TOKEN_AXES = (("batch", "new"), ("batch_codebooks", "new"), ("new",), ("batch", "fixed"), ("fixed",))
IN_BUFFERS = ("shift", "write", "drop-oldest")
STATES = ("conv-state", "recurrent-state", "counter")


def misfits(contract: CacheContract, views: dict[str, GraphView]) -> Iterator[str]:
    """Where a contract contradicts the graphs, or itself."""
    for graph in contract.graphs.values():
        view = views.get(graph.file)
        if view is None:
            yield f"{graph.file!r} serves no phase"
            continue
        yield from _unlike(graph.file, "input", graph.inputs, view.inputs)
        yield from _unlike(graph.file, "output", graph.outputs, view.outputs)
        for port in (*graph.inputs, *graph.outputs):
            yield from _port_misfits(port)
        if lacking := [name for name in view.inputs if name not in {port.name for port in graph.inputs}]:
            yield f"{graph.file!r} has an input {lacking[0]!r}, and the contract does not say what to feed it"
    decode = contract.graph("decode")
    pasts = {port.name: port for port in decode.inputs if port.role == "past"}
    held = {slot.past for slot in contract.slots}
    if alone := sorted(held - set(pasts)):
        yield f"slot {alone[0]!r} is no past input of {decode.file!r}"
    if lonely := sorted(set(pasts) - held):
        yield f"{lonely[0]!r} is a past input of {decode.file!r}, and no slot"
    if len(held) != len(contract.slots):
        yield "an input is named as the past of two slots"
    yield from _out_of_bounds(contract)
    yield from _phase_misfits(contract)
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
    declared = view.inputs.get(slot.past)
    if declared is not None and slot.dtype != declared.dtype:
        yield f"slot {slot.past!r} is {declared.dtype}, not {slot.dtype}"
    yield from _other_sizes(f"slot {slot.past!r}", slot, declared)
    yield from _deal_misfits(slot, contract)
    if slot.present is not None and slot.present not in _outputs(contract, "decode"):
        yield f"slot {slot.past!r} comes back as {slot.present!r}, which is no output of the decode graph"
    if slot.filled_by is not None and slot.filled_by not in filling:
        yield f"slot {slot.past!r} is filled by {slot.filled_by!r}, which is no output of the first step"


def _deal_misfits(slot: Slot, contract: CacheContract) -> Iterator[str]:
    """Where growth, first step and carry of a slot do not go together, or not with its axes."""
    axes, first, branch = set(slot.axes), slot.first, contract.first_step == "no-past-branch"
    two = contract.phases["prefill"].graph != contract.phases["decode"].graph
    at = slot.length_axis
    fixed = at is not None and (slot.axes[at] == "capacity" or isinstance(slot.shape[at], int))
    bare = slot.kind in (*STATES, "cross-attention", "encoder-states")
    wrong = {
        "first 'prefill' is for a first step with a graph of its own": first == "prefill" and not two,
        "first 'encoder' is for what an encoder fills": first == "encoder" and slot.filled_in != "encode",
        "first 'ignored' is for a branch that reads no past": first == "ignored" and not branch,
        "first 'empty' is for a cache of open length": first == "empty" and not axes & {"past", "encoder"},
        "first 'zeros' is for a buffer or a state": first == "zeros" and "past" in axes,
        "first 'dummy' is not driven: a past of length 0 is": first == "dummy",
        f"kind {slot.kind!r} has no past axis": bare and "past" in axes,
        "growth 'replace' is for what has no past axis": slot.growth == "replace" and "past" in axes,
        "growth 'constant' is held": slot.growth == "constant" and slot.carry != "hold",
        f"carry {slot.carry!r} is for a buffer of fixed length": slot.carry in IN_BUFFERS and not fixed,
        f"layer is {slot.layer}": slot.layer is not None and not 0 <= slot.layer < MOST_LAYERS,
    }
    yield from (f"slot {slot.past!r}: {words}" for words, is_so in wrong.items() if is_so)


def _port_misfits(port: Port) -> Iterator[str]:
    """Axes that no feed can be made by, and values that are no numbers."""
    lengths = [axis for axis in port.axes if axis in ("batch", "new", "past")]
    if len(set(lengths)) != len(lengths):
        yield f"{port.name!r} has two axes of the same meaning"
    if port.role == "token_ids" and port.axes not in TOKEN_AXES:
        yield f"{port.name!r} are token ids, with axes {', '.join(port.axes)} and not batch, new"
    if port.value is not None and not math.isfinite(port.value):
        yield f"{port.name!r} has the value {port.value}, which is no number"


def _phase_misfits(contract: CacheContract) -> Iterator[str]:
    """Phases that do not fit the first step."""
    two = contract.phases["prefill"].graph != contract.phases["decode"].graph
    switches = {contract.phases[phase].switch for phase in ("prefill", "decode")}
    if (contract.first_step == "no-past-graph") != two:
        yield "first_step is 'no-past-graph' where two graphs serve prefill and decode, and only there"
    if contract.first_step == "no-past-branch" and switches != {True, False}:
        yield "the phases do not say which value of the branch_switch means which branch"
    if contract.first_step != "no-past-branch" and switches != {None}:
        yield "the phases give values of a branch_switch, and there is none"


def _out_of_bounds(contract: CacheContract) -> Iterator[str]:
    """Numbers that no model has, and of which no feed could be made."""
    switched = any(port.role == "branch_switch" for port in contract.graph("decode").inputs)
    if (contract.first_step == "no-past-branch") != switched:
        yield "first_step is 'no-past-branch' where there is a branch_switch, and only there"
    if not 1 <= contract.codebooks <= MOST_CODEBOOKS:
        yield f"codebooks is {contract.codebooks}, not 1 to {MOST_CODEBOOKS}"
    logits = contract.graph("decode").port("logits")
    width = logits.shape[-1] if logits is not None and logits.shape else None
    if isinstance(width, int) and (contract.vocabulary or 0) > width:
        yield f"vocabulary is {contract.vocabulary}, and the logits are {width} wide"
    rows = {axis for graph in contract.graphs.values() for port in graph.inputs for axis in port.axes}
    if contract.codebooks > 1 and "batch_codebooks" not in rows:
        yield f"codebooks is {contract.codebooks}, and no input has an axis batch_codebooks"
    for name in ("vocabulary", "context_limit", "heads"):
        number = getattr(contract, name)
        if number is not None and not 1 <= number <= MOST_COUNTED:
            yield f"{name} is {number}, which no model has"


def _other_sizes(what: str, slot: Slot | Port, port: Declared | None) -> Iterator[str]:
    """Sizes that the graph declares as other numbers or leaves open, or that nothing can have."""
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


def _unlike(file: str, what: str, ports: tuple[Port, ...], declared: Mapping[str, Declared]) -> Iterator[str]:
    for port in ports:
        if port.name not in declared:
            yield f"{file!r} has no {what} {port.name!r}"
        elif declared[port.name].dtype and port.dtype != declared[port.name].dtype:
            yield f"{what} {port.name!r} of {file!r} is {declared[port.name].dtype}, not {port.dtype}"
        elif port.shape is not None and len(port.axes) != len(port.shape):
            yield f"{what} {port.name!r} of {file!r} has {len(port.shape)} sizes and {len(port.axes)} axes"
        else:
            yield from _other_sizes(f"{what} {port.name!r} of {file!r}", port, declared[port.name])


def unfed(contract: CacheContract) -> Iterator[Lack]:
    """Inputs whose role says nothing of what to feed."""
    for graph in contract.graphs.values():
        for port in graph.inputs:
            if port.role == "auxiliary":
                yield Lack(port.name, f"this input of {graph.file} plays no known part")
            elif port.role == "setting" and port.value is None:
                yield Lack(port.name, "the contract gives no value for this setting")
            elif port.role == "branch_switch" and contract.phases["decode"].switch is None:
                yield Lack(port.name, "the phases do not say which branch is the cached one")
