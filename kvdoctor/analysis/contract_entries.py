"""Entries that a contract file must have, and what to write where one is missing.

A file that was written by hand may not have all entries of a printed one: each is named with its place.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvdoctor.contract import CacheContract, Slot

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
