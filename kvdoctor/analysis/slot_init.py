"""What first fills a slot, and what the first step is fed: from another graph, another branch, the encoder, or none."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.analysis.stacks import FLOATS, StackParts
from kvdoctor.contract import First, Slot, SlotKind
from kvdoctor.model.view import Declared, GraphView

VARYING = ("batch", "batch_heads", "past", "encoder")
"""Axes whose size differs between the graph that fills a slot and the one that takes it."""


@dataclass(eq=False, repr=False)
class SlotInit:
    """The first step of a stack, as its slots need it.

    `ids` are the inputs of the first step that carry tokens, `slots` those to be filled. `evidence` grows where outputs
    are matched by their order alone.
    """

    parts: StackParts
    ids: set[str]
    slots: list[Slot]
    evidence: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.decode, self.first, self.encoder = self.parts.decode, self.parts.first, self.parts.encoder

    def add_first_values(self, slot: Slot, name: SlotName | None) -> Slot:
        """Add which output first fills the slot, and what the first step is fed."""
        has_first_graph = self.first is not self.decode
        if has_first_graph or self.decode.graph.branches is not None:
            filled = self._find_output_of_first(slot, name)
            if filled is not None:
                return self._fill_from_first(slot, filled)
            if has_first_graph and slot.growth != "constant":
                return replace(slot, first="prefill")
        if slot.growth == "constant" and self.encoder is not None:
            names = (name.filled_by if name else None, slot.past, name.present if name else None)
            by_name = next((one for one in names if one in self.encoder.graph.outputs), None)
            filled = by_name or self._encoder_outputs_by_order.get(slot.past)
            if filled is not None:
                return replace(slot, filled_by=filled, filled_in="encode", first="encoder", carry="hold")
        first: First = "prefill" if has_first_graph else _empty_or_zeros(slot)
        # No graph of the stack computes a constant that a step only passes on.
        constant = slot.growth == "constant" and slot.present not in self._made_of_states
        made = None if has_first_graph or constant else slot.present
        return replace(slot, filled_by=made, first=first)

    @cached_property
    def _made_of_states(self) -> set[str]:
        """Outputs that the graph also computes of another input, such as encoder states, where their past is empty."""
        flow, pasts = self.decode.dataflow, {slot.past for slot in self.slots}
        inputs = {name: port for name, port in self.decode.graph.inputs.items() if name not in pasts | self.ids}
        states = {name for name, port in inputs.items() if port.dtype in FLOATS and len(port.shape or ()) == 3}
        if flow is None or not states:
            return set()
        reached = flow.descent.reached_from(states)
        return {output for output, value in flow.flow.results.items() if value in reached}

    def _fill_from_first(self, slot: Slot, filled: str) -> Slot:
        """The slot with the output of the first graph, or of the no-past branch, that fills it."""
        if self.first is not self.decode:
            first: First = "prefill"
            if shared_pasts(self.decode.graph, self.first.graph, {slot.past}):
                first = "zeros" if slot.growth not in ("grow", "shared") else "empty"
            return replace(slot, filled_by=filled, first=first)
        if slot.present is None:
            # Both branches of a merged decoder return the same outputs.
            slot = replace(slot, present=filled, emptied=self.decode.graph.emptied(filled) is not None)
        flow = self.decode.first_dataflow  # the no-past branch is fed any value, unless it reads the past too
        unread = flow is None or slot.past not in flow.flow.consumers
        return replace(slot, filled_by=filled, first="ignored" if unread else _empty_or_zeros(slot))

    def add_sizes(self, slot: Slot) -> Slot:
        """Add sizes that the past leaves open and that the output which fills it declares as numbers."""
        source = self.encoder if slot.filled_in == "encode" and self.encoder is not None else self.first
        port = source.graph.outputs.get(slot.filled_by or "")
        if port is None or port.shape is None or len(port.shape) != len(slot.shape):
            return slot
        shape = tuple(
            made if isinstance(made, int) and not isinstance(size, int) and axis not in VARYING else size
            for size, made, axis in zip(slot.shape, port.shape, slot.axes, strict=True)
        )
        return replace(slot, shape=shape)

    def _find_output_of_first(self, slot: Slot, name: SlotName | None) -> str | None:
        outputs = self.first.graph.outputs
        # Numbered names of one graph mean nothing in the other, unless both have the same output names.
        own = slot.present if name is not None or set(self.decode.graph.outputs) <= set(outputs) else None
        for named in (own, name.filled_by if name else None, name.present if name else None):
            if named is not None and named in outputs:
                return named
        if name is not None and name.present is not None:
            return None
        ordered = self._prefill_outputs.get((slot.kind, slot.part), [])
        return ordered[slot.layer] if slot.layer is not None and 0 <= slot.layer < len(ordered) else None

    @cached_property
    def _prefill_outputs(self) -> dict[tuple[SlotKind, str], list[str]]:
        """Keys and values that the first step returns, of tokens and of encoder states, by layer: by dataflow."""
        flow, found = self.first.first_dataflow, dict[tuple[SlotKind, str], list[str]]()
        if flow is None:
            return found
        reached, wide = flow.descent.reached_from(self.ids), self.first.graph.outputs.items()
        uses = [(name, flow.uses.use_of_output(name)) for name, port in wide if len(port.shape or (1, 1, 1)) >= 3]
        for name, use in sorted(uses, key=lambda one: one[1].site if one[1] is not None else -1):
            if use is not None:  # the index of its attention orders the layers
                own = flow.flow.results.get(name, name) in reached
                found.setdefault(("self-attention" if own else "cross-attention", use.part), []).append(name)
        return found

    @cached_property
    def _encoder_outputs_by_order(self) -> dict[str, str]:
        """Outputs of the encoder for slots that no name connects: keys before values, layer after layer.

        Nothing else distinguishes them: the projection in the encoder does not show its use in the decoder.
        """
        flow = self.encoder.dataflow.flow if self.encoder is not None and self.encoder.dataflow is not None else None
        if self.encoder is None or flow is None:
            return {}
        held = sorted((s for s in self.slots if s.growth == "constant"), key=lambda s: (s.layer or 0, s.part))

        def position(output: str) -> tuple[int, int]:
            value = flow.results.get(output, output)
            node = flow.producers.get(value)
            return (node.index, node.outputs.index(value)) if node is not None else (-1, 0)

        outputs, wanted = self.encoder.graph.outputs, self.decode.graph.inputs
        fitting = (o for o, port in outputs.items() if any(port.like(wanted[slot.past]) for slot in held))
        given = sorted(fitting, key=position)
        fits = all(outputs[output].like(wanted[slot.past]) for slot, output in zip(held, given, strict=False))
        if not held or len(given) != len(held) or not fits:
            return {}
        self.evidence.append("encoder outputs are matched to the cross-attention cache by their order, not by name")
        return {slot.past: output for slot, output in zip(held, given, strict=True)}


def give_cross_caches(slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Let the caller's encoder make the cross-attention caches that no file of the folder makes, under their own names.

    Not where one is declared as long as the cache of the tokens: that is a past without its present.
    """
    own = (slot for slot in slots if slot.kind != "cross-attention")
    lengths = {slot.shape[at] for slot in own if (at := slot.length_axis) is not None}

    def is_given(slot: Slot) -> bool:
        at = slot.length_axis
        unfilled = slot.kind == "cross-attention" and slot.growth == "constant" and slot.filled_by is None
        return unfilled and at is not None and (slot.shape[at] is None or slot.shape[at] not in lengths)

    return tuple(
        replace(slot, filled_by=slot.past, filled_in="encode", first="encoder", carry="hold")
        if is_given(slot)
        else slot
        for slot in slots
    )


def shared_pasts(decode: GraphView, first: GraphView, pasts: set[str]) -> set[str]:
    """The pasts that the first graph takes as well: inputs of the same name, element type and rank.

    The name alone proves nothing: where tensors are numbered, t7 of one graph has nothing to do with t7 of another.
    """

    def kind(port: Declared | None) -> tuple[str, int] | None:
        return (port.dtype, len(port.shape or ())) if port is not None else None

    return {name for name in pasts if name in first.inputs and kind(first.inputs[name]) == kind(decode.inputs[name])}


def _empty_or_zeros(slot: Slot) -> First:
    return "empty" if {"past", "encoder"} & set(slot.axes) else "zeros"
