"""What first fills a slot, and what the first step is fed: another graph, another branch, the encoder, or nothing."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from kvdoctor.contract import First, Slot, SlotKind
from kvdoctor.dialects import SlotName
from kvdoctor.graph import Declared, GraphView
from kvdoctor.stacks import OnnxFile


@dataclass(frozen=True, slots=True)
class Made:
    """An output of the first step that holds keys or values. `site` orders the layers."""

    name: str
    kind: SlotKind
    part: str
    site: int


@dataclass
class FirstFilling:
    """The first step of a stack, as its slots see it.

    `decode`, `first` and `encoder` are its files as in `SlotReader`, `ids` the inputs of the first step that carry
    tokens, `slots` those that are to be filled.
    """

    decode: OnnxFile
    first: OnnxFile
    encoder: OnnxFile | None
    ids: set[str]
    slots: list[Slot]
    evidence: list[str] = field(default_factory=list)

    def filled(self, slot: Slot, name: SlotName | None) -> Slot:
        """Add what first fills the slot, and what the first step is fed."""
        takes_too = shared_pasts(self.decode.graph, self.first.graph, {slot.past})
        if self.first is not self.decode or self.decode.graph.branches is not None:
            filled = self._filled_by_first(slot, name)
            if filled is not None:
                first: First = "prefill" if self.first is not self.decode else self._in_other_branch(slot)
                if self.first is not self.decode and slot.past in takes_too:
                    first = "zeros" if slot.growth not in ("grow", "shared") else "empty"
                if self.first is self.decode and slot.present is None:
                    # Both branches of a merged decoder return the same outputs.
                    emptied = self.decode.graph.emptied(filled) is not None
                    slot = replace(slot, present=filled, emptied=emptied)
                return replace(slot, filled_by=filled, first=first)
            if self.first is not self.decode and slot.growth != "constant":
                return replace(slot, first="prefill")
        if slot.growth == "constant" and self.encoder is not None:
            filled = self._filled_by_encoder(slot, name)
            if filled is not None:
                return replace(slot, filled_by=filled, filled_in="encode", first="encoder", carry="hold")
        missing_first = self.first is not self.decode
        first = "prefill" if missing_first else "empty" if {"past", "encoder"} & set(slot.axes) else "zeros"
        # A constant that a step only passes on is made by nothing here.
        made = None if missing_first or slot.growth == "constant" else slot.present
        return replace(slot, filled_by=made, first=first)

    def _in_other_branch(self, slot: Slot) -> First:
        """What the branch without a cache is fed: nothing that counts, unless it reads the past too."""
        flow = self.decode.first_dataflow
        if flow is None or slot.past not in flow.flow.consumers:
            return "ignored"
        return "empty" if {"past", "encoder"} & set(slot.axes) else "zeros"

    def sized(self, slot: Slot) -> Slot:
        """Sizes that the past leaves open and that the output which fills it declares as numbers."""
        source = self.encoder if slot.filled_in == "encode" and self.encoder is not None else self.first
        port = source.graph.outputs.get(slot.filled_by or "")
        if port is None or port.shape is None or len(port.shape) != len(slot.shape):
            return slot
        varying = ("batch", "batch_heads", "past", "encoder")
        shape = tuple(
            made if isinstance(made, int) and not isinstance(size, int) and axis not in varying else size
            for size, made, axis in zip(slot.shape, port.shape, slot.axes, strict=True)
        )
        return replace(slot, shape=shape)

    def _filled_by_first(self, slot: Slot, name: SlotName | None) -> str | None:
        outputs = self.first.graph.outputs
        own = slot.present if name is not None or self._alike else None
        for named in (own, name.filled_by if name else None, name.present if name else None):
            if named is not None and named in outputs:
                return named
        if name is not None and name.present is not None:
            return None
        made = sorted((m for m in self._made if (m.kind, m.part) == (slot.kind, slot.part)), key=lambda m: m.site)
        return made[slot.layer].name if slot.layer is not None and 0 <= slot.layer < len(made) else None

    @property
    def _alike(self) -> bool:
        """Whether both graphs call their outputs the same: names made by counting say nothing of one another."""
        return set(self.decode.graph.outputs) <= set(self.first.graph.outputs)

    @cached_property
    def _made(self) -> list[Made]:
        """What the first step makes, by dataflow: keys and values, over tokens or over encoder states."""
        flow, found = self.first.first_dataflow, []
        reached = flow.descent.reached_from(self.ids) if flow is not None else set()
        for output, port in self.first.graph.outputs.items():
            use = flow.uses.made(output) if flow is not None and len(port.shape or (1, 1, 1)) >= 3 else None
            if use is not None and flow is not None:
                own = flow.flow.results.get(output, output) in reached
                found.append(Made(output, "self-attention" if own else "cross-attention", use.part, use.site))
        return found

    def _filled_by_encoder(self, slot: Slot, name: SlotName | None) -> str | None:
        outputs = list(self.encoder.graph.outputs) if self.encoder is not None else []
        named = name.filled_by if name is not None else None
        passed_on = name.present if name is not None else None
        return next((n for n in (named, slot.past, passed_on) if n in outputs), None) or self._by_order.get(slot.past)

    @cached_property
    def _by_order(self) -> dict[str, str]:
        """Outputs of the encoder for slots that no name connects: keys before values, layer after layer.

        Nothing else tells them apart: a projection does not say what it is used for in another graph.
        """
        flow = self.encoder.dataflow.flow if self.encoder is not None and self.encoder.dataflow is not None else None
        if self.encoder is None or flow is None:
            return {}
        held = sorted((s for s in self.slots if s.growth == "constant"), key=lambda s: (s.layer or 0, s.part))

        def made_at(output: str) -> tuple[int, int]:
            value = flow.results.get(output, output)
            node = flow.producers.get(value)
            return (node.index, node.outputs.index(value)) if node is not None else (-1, 0)

        outputs, wanted = self.encoder.graph.outputs, self.decode.graph.inputs
        given = sorted(
            (o for o, port in outputs.items() if any(port.like(wanted[slot.past]) for slot in held)), key=made_at
        )
        fits = all(outputs[output].like(wanted[slot.past]) for slot, output in zip(held, given, strict=False))
        if not held or len(given) != len(held) or not fits:
            return {}
        self.evidence.append("outputs of the encoder fill the cross-attention cache in their order: no name tells")
        return {slot.past: output for slot, output in zip(held, given, strict=True)}


def shared_pasts(decode: GraphView, first: GraphView, pasts: set[str]) -> set[str]:
    """The pasts that the first graph takes as well: inputs of the same name, element type and rank.

    The name alone does not tell: where tensors are numbered, t7 of one graph has nothing to do with t7 of another.
    """

    def kind(port: Declared | None) -> tuple[str, int] | None:
        return (port.dtype, len(port.shape or ())) if port is not None else None

    return {name for name in pasts if name in first.inputs and kind(first.inputs[name]) == kind(decode.inputs[name])}
