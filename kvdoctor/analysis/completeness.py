"""What a contract needs and lacks before a decode loop can run by it: parts, entries of its file, and lost caches.

Entries: a file that was written by hand may not have all entries of a printed one; each is named with its place. Lost
caches are no slots. A state inside a module becomes a constant: no state leaves the graph. A Loop or Scan may keep its
layers in a sequence of tensors, or change them in a way that no walk follows. Whether one of its outputs returns the
past is open then: that is no fault of the model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvdoctor.analysis.axes import unequal_axes
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.slot_rules import proven_part
from kvdoctor.analysis.stacks import FLOATS, OnnxFile, has_named_logits, makes_logits
from kvdoctor.contract import DECODING, CacheContract, MissingPart, Port, Slot, describe
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import operator_of
from kvdoctor.model.traverse import describe_node

NO_PAST = "no past input was found, neither by the names of known exporters nor by dataflow"
NO_LOGITS = "no output has the role logits; --logits-output NAME says which one has them"

MOST_FED = 2**27
"""Elements of one input by its declared numbers: half a gigabyte of floats, more than any decoder takes for a token."""


def find_missing_parts(contract: CacheContract) -> Iterator[MissingPart]:
    """Find what the roles of ports and the sizes of slots leave open.

    A past length may be open, but the widths of a slot must be numbers: an empty past is made with them.
    """
    decode = contract.graph("decode")
    if not contract.slots:
        yield MissingPart(decode.file, NO_PAST)
    if not any(decode.port(role) for role in ("token_ids", "token_and_position", "embeddings")):
        yield MissingPart(decode.file, "no input has the role token_ids")
    if not decode.port("logits") and not decode.port("next_token"):
        yield MissingPart(decode.file, NO_LOGITS)
    carried = {slot.continues_as for slot in contract.slots if slot.continues_as is not None}
    if (logits := decode.port("logits")) is not None and logits.name in carried:
        reason = "it is named as the logits, but the graph returns a past there"
        yield MissingPart(logits.name, reason, contradicts=True)
    for role in ("token_ids", "logits"):
        rivals = [port.name for port in (*decode.inputs, *decode.outputs) if port.role == role]
        if len(rivals) > 1:
            names = " and ".join(rivals[:3])
            yield MissingPart(rivals[1], f"{names} look like {role}, and nothing shows which one it is")
    yield from (
        MissingPart(port.name, "this input has no known role, and no rule says what to feed it")
        for phase in DECODING
        for port in contract.graph(phase).inputs
        if port.role == "auxiliary" and port.dtype
    )
    yield from _find_unfeedable(port for graph in contract.graphs.values() for port in graph.inputs)
    yield from _find_open_widths(contract)
    yield from find_unfilled(contract)


def find_unfilled(contract: CacheContract) -> Iterator[MissingPart]:
    """Find slots that no output of any file fills, and that the caller does not provide either."""
    for slot in contract.slots:
        if slot.filled_by is None and not slot.is_given:
            yield MissingPart(slot.past, "no output of any file fills this past")


def add_missing_parts(contract: CacheContract, found: Iterable[MissingPart]) -> CacheContract:
    """Add the missing parts that a reader found and those of the contract itself, each once.

    A paged cache lacks nothing that a contract could say: its tables are those of a serving engine.
    """
    if any(slot.growth == "paged" for slot in contract.slots):
        return contract
    parts = [*found, *find_missing_parts(contract)]
    first = {part.subject: part for part in reversed(parts)}
    return replace(contract, missing=tuple(first[name] for name in dict.fromkeys(part.subject for part in parts)))


def as_no_decoder(contract: CacheContract) -> CacheContract:
    """The contract of what is no decoder: it lacks none of a decoder's parts.

    What no output fills is no cache: keys and values that are new, or those of an encoder.
    """
    slots = tuple(slot for slot in contract.slots if slot.filled_by is not None)
    pasts = {slot.past for slot in slots}

    def as_input(port: Port) -> Port:
        return replace(port, role="auxiliary") if port.role == "past" and port.name not in pasts else port

    return replace(contract.with_ports(as_input), slots=slots, missing=(), contradictions=())


def _find_open_widths(contract: CacheContract) -> Iterator[MissingPart]:
    for slot in contract.slots:
        open_sizes = {a for d, a in zip(slot.shape, slot.axes, strict=True) if not isinstance(d, int)}
        if unknown := {"kv_heads", "head_dim", "channels", "state", "layers"} & open_sizes:
            yield MissingPart(slot.past, f"its {' and '.join(sorted(unknown))} is no number")
        if "batch_heads" in slot.axes and not contract.heads:
            reason = "neither a config nor the graph gives the number of heads"
            yield MissingPart(slot.past, f"an axis counts batch times heads, and {reason}")


def _find_unfeedable(ports: Iterable[Port]) -> Iterator[MissingPart]:
    """Inputs that cannot be fed. A past of length 0 has a check of its own."""
    for port in ports:
        if not port.dtype:
            reason = (
                "is not a tensor, or declares no element type; a sequence is read where constants say which element"
            )
            yield MissingPart(port.name, f"this input {reason}")
        elif port.shape is None:
            yield MissingPart(port.name, "this input has no declared shape")
        elif any(size == 0 and axis != "past" for size, axis in zip(port.shape, port.axes, strict=True)):
            yield MissingPart(port.name, f"an input of shape {describe(port.dtype, port.shape)} has no elements")
        elif math.prod(size for size in port.shape if isinstance(size, int)) > MOST_FED:
            yield MissingPart(port.name, f"{describe(port.dtype, port.shape)} has more elements than can be fed")


OF_STACK = {
    "layout": "a name for the layout, such as unnamed-decoder-only",
    "graphs": "the graphs of the stack, with their inputs and outputs",
    "phases": "the graph that serves each of prefill and decode",
    "slots": "one entry for each past input; an empty list where there is none",
    "first_step": "what the first step is fed, such as zero-length",
}
"""The entries that a contract needs."""

OF_SLOT = {
    "kind": "what it holds, such as self-attention",
    "layer": "the number of its layer, or null where one tensor has all layers",
    "part": "key, value, key-value or state",
    "dtype": "the element type of the input",
    "shape": "the sizes of the input",
    "axes": "what each size counts, such as batch, kv_heads, past, head_dim",
    "past": "the name of the input",
    "present": "the output of a decode step that returns it, or null for one that is held",
    "filled_by": "the output of the first step that fills it: where one graph serves all steps, the present",
    "carry": "how the next past is made, such as feed-back",
}
"""The entries that each slot needs; all others have a default."""

OF_PORT = {
    "name": "its name",
    "dtype": "its element type",
    "shape": "its sizes",
    "role": "what it is for, such as token_ids, past, present, logits",
    "axes": "what each size counts, such as batch, new, vocabulary; fixed for a size without a meaning",
}
"""The entries that each input and output needs. The axes of a past are those of its slot."""


def find_absent_entries(stack: Mapping[str, Any]) -> Iterator[str]:
    """Find entries that a stack, its slots and its ports do not have in the file; other types are passed over."""
    yield from _find_absent(stack, OF_STACK, "the contract", None)
    for index, slot in enumerate(_objects(stack.get("slots"))):
        yield from _find_absent(slot, OF_SLOT, f"slots[{index}]", slot.get("past"))
    graphs = stack.get("graphs")
    for name, graph in graphs.items() if isinstance(graphs, dict) else ():
        for kind in ("inputs", "outputs") if isinstance(graph, dict) else ():
            for index, port in enumerate(_objects(graph.get(kind))):
                wanted = {**OF_PORT}
                if not port.get("shape") or (kind == "inputs" and port.get("role") == "past"):
                    del wanted["axes"]
                yield from _find_absent(port, wanted, f"graphs.{name}.{kind}[{index}]", port.get("name"))


def _find_absent(given: Mapping[str, Any], wanted: Mapping[str, str], place: str, name: Any) -> Iterator[str]:
    called = f" ({name!r})" if isinstance(name, str) else ""
    absent = [entry for entry in wanted if entry not in given]
    if absent:
        written = "; ".join(f"{entry!r}: {wanted[entry]}" for entry in absent[:3])
        more = f"; and {', '.join(map(repr, absent[3:]))}" if absent[3:] else ""
        yield f"{place}{called} has entries missing; write {written}{more}"


def _objects(listed: Any) -> list[dict[str, Any]]:
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def find_unpaired(slot: Slot, contract: CacheContract) -> Iterator[str]:
    """Find where a slot names no output, and the graph has one of its type that is of no other slot."""
    if slot.is_given or slot.growth == "paged":
        return
    others = {name for s in contract.slots if s.past != slot.past for name in (s.present, s.filled_by)}
    asked = {"filled_by": slot.filled_by, "present": slot.present if slot.carry != "hold" else ""}
    for entry, name in asked.items():
        graph = contract.graph("prefill" if entry == "filled_by" else "decode")
        fitting = [
            port.name
            for port in graph.outputs
            if port.role in ("present", "auxiliary")
            and port.name not in others
            and (port.dtype, len(port.shape or ())) == (slot.dtype, len(slot.shape))
        ]
        if name is None and fitting:
            outputs = ", ".join(map(repr, fitting[:3]))
            yield f"slot {slot.past!r} has no {entry!r}; write {OF_SLOT[entry]}; outputs of its type: {outputs}"


def returns_logits(file: OnnxFile) -> bool:
    """Whether a graph returns logits: by name, or as a float output as wide as the embedding table has rows."""
    view, flow = file.view, file.dataflow
    return view is not None and (has_named_logits(view) or (flow is not None and makes_logits(view, flow)))


def is_cacheless(file: OnnxFile) -> bool:
    """Whether a graph returns logits and has no float input and output of four or more axes, which may be a cache."""
    if not returns_logits(file) or file.view is None:
        return False
    sides = (file.view.inputs.values(), file.view.outputs.values())
    return not all(any(port.dtype in FLOATS and len(port.shape or ()) >= 4 for port in side) for side in sides)


def find_constant_caches(file: OnnxFile) -> tuple[str, ...]:
    """Find constants that new keys or values join before an attention, in the order of the graph."""
    dataflow = file.dataflow
    if dataflow is None:
        return ()
    joins = [(_constant_operand(node, dataflow.flow.fixed), node.output()) for node in dataflow.flow.nodes]
    near = ((name, output) for name, output in joins if name is not None and dataflow.budget.goes_on())
    return tuple(dict.fromkeys(name for name, output in near if proven_part(dataflow.uses.use_of(output)) is not None))


def _constant_operand(node: FlatNode, fixed: set[str]) -> str | None:
    """The constant that a node joins new entries to; None where it is no constant."""
    if node.has("join"):
        constants = [name for name in node.inputs if name in fixed]
        return constants[0] if constants and len(constants) < len(node.inputs) else None
    new = operator_of(node.op).new
    if not new or new >= len(node.inputs) or node.inputs[0] not in fixed or node.inputs[new] in fixed:
        return None
    return node.inputs[0]


MOST_LOOPS = 50
"""Loops of one graph that are looked at: each takes two walks over all nodes."""

LEAST_AXES = 3


def find_unread_loops(dataflow: Dataflow | None, contract: CacheContract) -> dict[str, str]:
    """The loop between leftover ports of the decode graph, as reports name it, by the names of the ports."""
    taken = {name for slot in contract.slots if slot.filled_by for name in (slot.past, slot.present) if slot.present}
    taken |= {slot.past for slot in contract.slots if slot.is_given}
    graph = contract.graph("decode")
    pasts = [port for port in graph.inputs if port.role in ("past", "auxiliary") and port.name not in taken]
    presents = [port for port in graph.outputs if port.role in ("present", "auxiliary") and port.name not in taken]
    wide = [(past, present) for past in pasts for present in presents if len(past.shape or ()) >= LEAST_AXES]
    fitting = [pair for pair in wide if (unequal := unequal_axes(*pair)) is not None and len(unequal) < 2]
    if dataflow is None or not fitting:
        return {}
    found, flow = dict[str, str](), dataflow.flow
    for node in [node for node in flow.nodes if node.has("loop")][:MOST_LOOPS]:
        before = dataflow.descent.ancestors(*node.inputs)
        behind = dataflow.descent.reached_from(set(filter(None, node.outputs)))
        for past, present in fitting:
            if past.name in before and flow.results.get(present.name) in behind:
                found.setdefault(past.name, describe_node(node.proto))
                found.setdefault(present.name, describe_node(node.proto))
    return found
