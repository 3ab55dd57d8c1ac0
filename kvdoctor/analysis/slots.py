"""Reads the slots of a stack: past inputs, their content, and the outputs that first fill and then update them.

The dataflow of the graph is the proof; names decide what it leaves open, and which of two outputs a loop will take.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from kvdoctor.analysis import slot_rules
from kvdoctor.analysis.axes import WIDTHS, as_number, find_head_dim, likely_length, slot_axes
from kvdoctor.analysis.dataflow.states import StateFlow
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS, StateUse
from kvdoctor.analysis.dataflow.walks import skip_copies
from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.analysis.port_roles import InputFlow
from kvdoctor.analysis.recurrent_states import ReplacedStates, find_computed, find_masked_axis, is_convolved
from kvdoctor.analysis.slot_init import SlotInit
from kvdoctor.analysis.slot_rules import fill_scales, find_stored, mark_scales, name_scales
from kvdoctor.analysis.stacks import FLOATS, StackParts
from kvdoctor.contract import Axis, Dim, Growth, MissingPart, Slot, SlotKind
from kvdoctor.model.view import Declared, GraphView

UNCHANGED: tuple[SlotKind, ...] = ("cross-attention", "encoder-states", "counter")
"""Kinds whose content does not depend on the new tokens; a counter depends on their number alone."""

NO_LAYER = -1
"""The layer of a slot without a name until `_number_layers` has ranked it."""


@dataclass(eq=False, repr=False)
class SlotReader:
    """Reads the slots of one stack.

    `claimed` are inputs of the decode graph that have another role by name, `ids` the inputs of the first step that
    carry tokens, `tokens` the inputs of the decode graph that carry tokens or embeddings.
    """

    parts: StackParts
    claimed: set[str]
    ids: set[str]
    tokens: set[str]
    missing: list[MissingPart] = field(default_factory=list, init=False)
    contradictions: list[MissingPart] = field(default_factory=list, init=False)
    evidence: list[str] = field(default_factory=list, init=False)
    _named_deltas: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.decode, self.first = self.parts.decode, self.parts.first
        self._new_entries = slot_rules.NewEntries(self.decode.graph, self.tokens)

    def read(self) -> tuple[Slot, ...]:
        """All slots in the order of layers, self-attention first, keys before values."""
        view, names = self.decode.graph, self._slot_names()
        states = self._find_states(view, names)
        self._named_deltas = self._new_entries.find_named(names, states)
        if self._named_deltas:
            self.evidence.append("every present holds the new entries alone: the loop appends them to the past")
        if unnamed := len(states.keys() - names.keys()):
            self.evidence.append(f"past inputs found by their use in the graph, not by name: {unnamed}")
        found = [slot for past, state in states.items() if (slot := self._read_slot(view.inputs[past], names, state))]
        found = self._grow_together(found)
        found += self._find_replaced(view, found)
        found = mark_scales(found, self._stored)
        found = self._match_presents(_mark_prefixes(found, states), names)
        found = _number_layers(found, states)
        init = SlotInit(self.parts, self.ids, found)
        found = [init.add_sizes(init.add_first_values(slot, names.get(slot.past))) for slot in found]
        found = fill_scales(found, self._stored, self.first.graph.outputs)

        def place(slot: Slot) -> tuple[int, bool, str, str]:  # replaced states stay as a layer computes them
            layer, name = -1 if slot.layer is None else slot.layer, slot.past if slot.growth != "replace" else ""
            return layer, slot.kind != "self-attention", slot.part, name

        slots = tuple(sorted(self._add_attentions(found, states), key=place))
        self.evidence += init.evidence
        return slots

    def _slot_names(self) -> dict[str, SlotName]:
        """Past inputs by name: as genai_config.json names them, else as the dialect does, where it fits the outputs."""
        names = {name.past: name for name in self.parts.known.find_slots(self.decode.graph.inputs)}
        found = self._dialect_names
        if any(name.present is None or name.present in self.decode.graph.outputs for name in found):
            names |= {name.past: name for name in found if name.past not in names}
        names |= {name.past: name for name in name_scales(names, self._stored)}
        return {past: name for past, name in names.items() if past not in self.claimed}

    @cached_property
    def _dialect_names(self) -> list[SlotName]:
        dialect = self.parts.dialect
        return list(dialect.find_slots(self.decode.graph.inputs)) if dialect is not None else []

    def _grow_together(self, found: list[Slot]) -> list[Slot]:
        """Let a slot grow that seems to be a buffer, where another one grows that is declared in the same sizes."""
        outputs = self.decode.graph.outputs

        def declared(slot: Slot) -> tuple[object, ...]:
            present = outputs.get(slot.present or "")
            return slot.kind, slot.dtype, slot.shape, present.shape if present is not None else None

        growing = {declared(slot): slot for slot in found if slot.growth == "grow" and slot.present is not None}
        pairs = ((slot, growing.get(declared(slot)) if slot.growth == "static" else None) for slot in found)
        return [replace(one, growth="grow", axes=o.axes, carry=o.carry) if o is not None else one for one, o in pairs]

    def _match_presents(self, found: list[Slot], names: dict[str, SlotName]) -> list[Slot]:
        """Match unnamed inputs and outputs by prefix or suffix (`x`, `x_out`), as a loop would."""
        known = {name.past for name in self._dialect_names}
        unnamed = {
            slot.past: slot.present
            for slot in found
            if slot.past not in names and slot.past not in known and slot.present is not None
        }
        presents = {name for name in unnamed.values() if name is not None}
        for past, numbered in slot_rules.pair_by_name(list(unnamed), presents, by_number=True).items():
            if numbered != unnamed[past]:
                reason = f"its number is that of {numbered!r}, but the graph returns its content as {unnamed[past]!r}"
                self.contradictions.append(MissingPart(past, reason))
        promised = slot_rules.pair_by_name(list(unnamed), presents)
        found = [replace(slot, present=promised.get(slot.past, slot.present)) for slot in found]
        return self._add_computed_presents(found, names)

    def _add_computed_presents(self, found: list[Slot], names: dict[str, SlotName]) -> list[Slot]:
        """Add the presents that the graph computes of a past otherwise than by joining entries: by their names."""
        inputs, outputs = self.decode.graph.inputs, self.decode.graph.outputs
        types = {name: (port.dtype, len(port.shape or ())) for name, port in {**inputs, **outputs}.items()}
        attended = [slot.past for slot in found if slot.kind == "self-attention" and slot.past not in names]
        fitting = {name for name in outputs if types[name] in map(types.get, attended)}
        promised = slot_rules.pair_by_name(attended, fitting)
        flow = self.decode.dataflow
        made = {name: skip_copies(flow.flow, value) for name, value in flow.flow.results.items()} if flow else {}
        taken = {made.get(slot.present) for slot in found if slot.present is not None}
        lost = {slot.past for slot in found if slot.present is None and slot.carry == "feed-back"}
        free = {past: name for past, name in promised.items() if past in lost and made.get(name) not in taken}
        return [replace(slot, present=free.get(slot.past, slot.present)) for slot in found]

    def _add_attentions(self, found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
        """Add which attention uses each slot, and what the graph that first fills it uses the value for."""
        used = {s.past: state.use for s in found if (state := states.get(s.past)) and state.use and s.used_as}
        made = dict(self._uses_when_filled(found))
        flow = self.decode.dataflow
        in_loop = flow is not None and bool(flow.flow.iterations)
        used_at, made_at = _rank_attentions(found, used, in_loop), _rank_attentions(found, made, in_loop)
        return [
            replace(
                slot,
                used_at=used_at.get(slot.past),
                made_as=slot_rules.proven_part(made.get(slot.past)),
                made_at=made_at.get(slot.past),
            )
            for slot in found
        ]

    def _uses_when_filled(self, found: list[Slot]) -> Iterator[tuple[str, StateUse]]:
        """By past, the proven use of the value that the first step, another graph or branch, fills it with."""
        flow = self.first.first_dataflow
        whole = self.first is self.decode and self.decode.graph.branches is None
        for slot in found:
            if flow is None or (whole and slot.growth != "constant"):
                continue  # one computation makes it in every step
            if slot.used_as and slot.filled_by and slot.filled_in == "prefill":
                use = flow.uses.use_of_output(slot.filled_by)
                if use is not None and use.proven:
                    yield slot.past, use

    def _find_states(self, view: GraphView, names: dict[str, SlotName]) -> dict[str, StateFlow | None]:
        """Find the inputs that are states, by name or by their use in the graph."""
        found: dict[str, StateFlow | None] = {}
        flow = self.decode.dataflow
        for past, port in view.inputs.items():
            rank = len(port.shape) if port.shape is not None else 0
            if past in names:
                state = flow.state(past, rank) if flow is not None and rank else None
                is_cross = names[past].rule.kind == "cross-attention"
                found[past] = self._with_update(port, state) if state is not None and not is_cross else state
            elif flow is not None and past not in self.claimed and port.dtype in FLOATS and rank >= 3:
                state = self._with_update(port, flow.state(past, rank))
                if self._is_past(port, state) or past in self._stored:
                    found[past] = state
        named = {name.present for name in names.values()}
        unread = [port for past, port in view.inputs.items() if past not in names and past not in self.claimed]
        found |= find_computed(flow, unread, found, view.outputs, named) if flow is not None else {}
        # A prefix joins a cache, so its delta is the whole present of that cache: such an output is no delta.
        whole = {state.output for state in found.values() if state is not None and state.output is not None}
        found |= {p: replace(s, delta=None) for p, s in found.items() if s is not None and s.delta in whole}
        unnamed = {past: state for past, state in found.items() if past not in names and state is not None}
        return found | self._new_entries.find_changed(unnamed)

    def _is_past(self, port: Declared, state: StateFlow) -> bool:
        """Whether an unnamed input is a past: used by an attention, or joined by new entries and returned."""
        flow, rank = self.decode.dataflow, len(port.shape or ())
        attended = slot_rules.proven_part(state.use) is not None
        if flow is None or (state.joined and not attended and self._is_replaced(port, state)):
            return False
        if not state.joined and state.output is None:
            # An input that is combined with new tokens is a table or a mask. One that gives keys and values at once
            # holds encoder states.
            memory = rank == 3 and state.use is not None and state.use.part == "key-value"
            return attended and not memory and not flow.descent.meets(port.name, self._reached)
        returned = state.joined and (state.output is not None or state.delta is not None)
        return attended or (returned and state.use is not None)

    def _is_replaced(self, port: Declared, state: StateFlow) -> bool:
        """Whether entries that no attention reads are a state of fixed size: the last input of a layer, or several.

        Hidden states from which keys and values are computed are multiplied by a weight, one by one.
        """
        shape, flow = port.shape or (), self.decode.dataflow
        size = shape[state.axis] if state.axis is not None else 0
        if not isinstance(size, int) or sum(not isinstance(d, int) for d in shape) > 1 or flow is None:
            return False
        memory = state.use is not None and state.use.part == "memory"
        return size == 1 or not memory or is_convolved(flow, port.name, len(shape))

    def _with_update(self, port: Declared, state: StateFlow) -> StateFlow:
        """Find the present of a buffer that arithmetic writes, of its type and shape, or the axis of its mask."""
        flow = self.decode.dataflow
        if flow is not None and (state.how, state.axis) == ("write", None):
            return replace(state, axis=find_masked_axis(flow, port.name, len(port.shape or ())))
        if flow is None or slot_rules.proven_part(state.use) is None or state.joined or state.output is not None:
            return state
        outputs = self.decode.graph.outputs.items()
        fitting = {name for name, out in outputs if (out.dtype, out.shape) == (port.dtype, port.shape)}
        output = flow.descent.find_update(port.name, fitting) if fitting else None
        if output is None or flow.flow.results.get(output) not in self._reached:
            return state
        axis = find_masked_axis(flow, port.name, len(port.shape or ()))
        return replace(state, output=output, how="update", growth="static", axis=axis, joined=True)

    def _read_slot(self, port: Declared, names: dict[str, SlotName], state: StateFlow | None) -> Slot | None:
        name = names.get(port.name)
        if port.shape is None:
            reason = "has no declared shape" if port.dtype else "is not a tensor, or declares no element type"
            self.missing.append(MissingPart(port.name, f"this input {reason}"))
            return None
        kind = self._kind_of(name, state, port.shape)
        growth = slot_rules.growth_of(kind, name, state, port.shape)
        if name is None and growth == "delta" and not self._new_entries.are_alone(state):
            growth = "grow"
        if growth == "grow" and port.name in self._named_deltas:
            growth = "delta"
        self.contradictions += slot_rules.find_contradictions(name, kind, growth)
        growth = "paged" if growth == "static" and self._pools is not None and self._pools.has(port) else growth
        present, continues = self._present_of(name, names, state, growth)
        returned = self.decode.graph.outputs.get(present or "")
        rows_only = growth == "grow" and slot_rules.returns_new_rows(port.shape, state, returned)
        growth = "delta" if rows_only else growth
        axes = self._with_batch(port.shape, slot_axes(port.shape, kind, growth, name, state), state)
        if growth in ("grow", "shared") and _has_constant_length(port, returned, axes, state):
            growth = "static"
            axes = self._with_batch(port.shape, slot_axes(port.shape, kind, growth, name, state), state)
        return Slot(
            kind=kind,
            layer=name.layer if name is not None else None if "layers" in axes else NO_LAYER,
            part=slot_rules.part_of(name, state, kind),
            dtype=port.dtype,
            shape=self._sizes_of(port, axes, state),
            axes=axes,
            past=port.name,
            present=present,
            filled_by=None,
            carry="shift" if rows_only else slot_rules.carry_of(kind, name, growth, state, port.shape),
            emptied=present is not None and self.decode.graph.emptied(present) is not None,
            growth=growth,
            window=state.window if state is not None else None,
            used_as=slot_rules.proven_part(state.use) if state is not None else None,
            continues_as=continues,
            trimmed=growth == "grow" and state is not None and state.trimmed,
            prepended=growth == "grow" and state is not None and state.prepended,
            takes_new=self._takes_new(kind, present),
        )

    def _with_batch(self, shape: tuple[Dim, ...], axes: tuple[Axis, ...], state: StateFlow | None) -> tuple[Axis, ...]:
        """The axes with the batch where the shape has the name that the tokens give it: others may come first.

        The axis along which new entries are joined is no batch, whatever its name.
        """
        joined = state.axis if state is not None else None
        named = [at for at, size in enumerate(shape) if size in self._batch_names]
        length = axes[named[0]] if len(named) == 1 else None
        if "batch" in axes and (length == "capacity" or (length == "past" and joined is None)):
            swapped: dict[Axis, Axis] = {"batch": length, length: "batch"}
            axes = tuple(swapped.get(axis, axis) for axis in axes)
        movable = [at for at, axis in enumerate(axes) if axis not in ("past", "capacity", "encoder", "batch_heads")]
        if "batch" not in axes or len(named) != 1 or named[0] not in movable:
            return axes
        others = (axes[at] for at in movable if axes[at] != "batch")
        moved: dict[int, Axis] = {at: "batch" if at == named[0] else next(others) for at in movable}
        return tuple(moved.get(at, axis) for at, axis in enumerate(axes))

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Inputs that hold the scales of others, each with that other."""
        return find_stored(self.decode.graph.inputs)

    @cached_property
    def _batch_names(self) -> set[Dim]:
        """Names that inputs of tokens give their first axis, of two or more."""
        shapes = (self.decode.graph.inputs[name].shape or () for name in self.tokens)
        return {shape[0] for shape in shapes if len(shape) > 1 and isinstance(shape[0], str)}

    @cached_property
    def _pools(self) -> slot_rules.PagedPools | None:
        flow = self.decode.dataflow
        return (
            slot_rules.PagedPools(flow, self.decode.graph.inputs, self.tokens, self._batch_names)
            if flow is not None
            else None
        )

    def _takes_new(self, kind: SlotKind, present: str | None) -> bool | None:
        """Whether the present depends on the tokens of a step; None where the graph cannot be followed."""
        flow = self.decode.dataflow
        if flow is None or present not in flow.flow.results or not self.tokens or kind in UNCHANGED:
            return None
        return flow.flow.results[present] in self._reached

    @cached_property
    def _reached(self) -> set[str]:
        """All values of a decode step that depend on the new tokens."""
        return self.decode.dataflow.descent.reached_from(self.tokens) if self.decode.dataflow is not None else set()

    def _kind_of(self, name: SlotName | None, state: StateFlow | None, shape: tuple[Dim, ...]) -> SlotKind:
        """Self- or cross-attention by whether it grows; another kind of state by its name or its use."""
        ruled = name.rule.kind if name is not None else None
        use = state.use.part if state is not None and state.use is not None else None
        if ruled is None and state is not None and (state.how, state.growth) == ("operator", "replace"):
            return "conv-state" if use == "conv" else "recurrent-state"
        grows = False
        if state is not None and state.how == "append" and use in ATTENTION_PARTS:
            length = shape[likely_length(shape) if state.axis is None else state.axis]
            grows = not state.trimmed or not isinstance(length, int)
        if ruled is not None and ruled not in ("self-attention", "cross-attention"):
            attended = ruled == "hidden-memory" and state is not None and slot_rules.proven_part(state.use) is not None
            return "self-attention" if attended or (grows and ruled in slot_rules.REPLACED) else ruled
        if use == "conv":
            return "conv-state"
        if use in ATTENTION_PARTS and state is not None:
            if state.joined:
                return "self-attention"
            # A past that no entries join is a constant, unless its name says that the graph has lost its present.
            return ruled if ruled == "self-attention" else "cross-attention"
        return ruled if ruled is not None else "hidden-memory"

    def _present_of(
        self, name: SlotName | None, names: dict[str, SlotName], state: StateFlow | None, growth: Growth
    ) -> tuple[str | None, str | None]:
        """The output that a loop takes for the next past, and the one that the content of the past reaches."""
        outputs = self.decode.graph.outputs
        reached = state.output if state is not None else None
        if state is not None and reached is None and (growth == "delta" or name is None):
            reached = state.delta
        if name is None:
            return reached, reached
        if name.present is None or name.present in outputs:
            return name.present, reached
        others = {other.present for other in names.values()}
        return (reached if reached not in others else None), reached

    def _find_replaced(self, view: GraphView, found: list[Slot]) -> list[Slot]:
        """Unnamed states of a fixed size."""
        flow = self.decode.dataflow
        if flow is None:
            return []
        taken = {slot.past for slot in found} | self.claimed | self.tokens
        returned = {slot.present for slot in found}
        states = ReplacedStates(
            InputFlow(flow, view.inputs),
            inputs=[port for past, port in view.inputs.items() if past not in taken],
            outputs=[port for name, port in view.outputs.items() if name not in returned],
            tokens=self.tokens,
            has_other_slots=bool(found),
        )
        found = [replace(slot, axes=self._with_batch(slot.shape, slot.axes, None)) for slot in states.read()]
        return sorted(found, key=lambda slot: flow.descent.computed_at(slot.present or ""))

    def _sizes_of(self, port: Declared, axes: tuple[Axis, ...], state: StateFlow | None) -> tuple[Dim, ...]:
        """The declared sizes; open ones as the attention shows them, or else as a config gives them."""
        shape, known = tuple(map(as_number, port.shape or ())), dict(self.parts.known.numbers)
        flow = self.decode.dataflow
        if flow is not None and state is not None and state.use is not None and "float" in port.dtype:
            width = find_head_dim(self.decode.graph, flow.flow, flow.flow.nodes[state.use.site])
            known |= {"head_dim": width} if width is not None else {}
        if flow is not None and any(
            not isinstance(d, int) for d, axis in zip(shape, axes, strict=True) if axis in WIDTHS
        ):
            made = zip(axes, flow.find_entry_sizes(port.name, len(shape)), strict=True)
            known |= {axis: size for axis, size in made if axis in WIDTHS and size is not None}
        pairs = zip(shape, axes, strict=True)
        return tuple(dim if isinstance(dim, int) else known.get(axis, dim) for dim, axis in pairs)


def _has_constant_length(
    past: Declared, present: Declared | None, axes: tuple[Axis, ...], state: StateFlow | None
) -> bool:
    """Whether past and present are declared with the same number of entries: a buffer, however it is written."""
    if "past" not in axes or present is None or past.shape is None or len(past.shape) != len(present.shape or ()):
        return False
    if state is not None and state.trimmed:
        return False
    at = axes.index("past")
    before, after = (as_number(shape[at]) for shape in (past.shape, present.shape or ()))
    return isinstance(before, int) and before == after and before > 0


def _mark_prefixes(found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
    """Mark keys and values that stand in front of a cache (prefix tuning) as constant: no output returns them.

    A prefix shares its attention, and its part, with another past that is returned.
    """
    carried = {(slot.used_as, _site_of(states.get(slot.past))) for slot in found if slot.present is not None}

    def is_prefix(slot: Slot) -> bool:
        alone = slot.present is None and slot.kind == "self-attention"
        return alone and slot.used_as is not None and (slot.used_as, _site_of(states.get(slot.past))) in carried

    return [replace(s, growth="constant", carry="hold", continues_as=None) if is_prefix(s) else s for s in found]


def _number_layers(found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
    """Give unnamed slots their layer: their rank among those of the same kind and part, and of states the same size."""

    def kind_of(slot: Slot) -> tuple[object, ...]:
        return slot.kind, slot.part, slot.shape if slot.growth == "replace" else None

    groups: dict[tuple[object, ...], list[Slot]] = {}
    for slot in found:
        if slot.layer == NO_LAYER:
            groups.setdefault(kind_of(slot), []).append(slot)
    layers: dict[str, int] = {}
    for kind, group in groups.items():
        ordered = sorted(group, key=lambda slot: _site_of(states.get(slot.past))) if group[0].past in states else group
        taken = {slot.layer for slot in found if kind_of(slot) == kind}
        free = (number for number in count() if number not in taken)
        layers |= {slot.past: next(free) for slot in ordered}
    return [replace(slot, layer=layers[slot.past]) if slot.past in layers else slot for slot in found]


def _rank_attentions(slots: list[Slot], uses: dict[str, StateUse], in_loop: bool) -> dict[str, int]:
    """Number the attentions of each kind and part in the order of the graph; slots of one attention share a number.

    An attention `in_loop` is one of each layer in turn.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for slot in slots:
        if slot.past in uses:
            groups.setdefault((slot.kind, uses[slot.past].part), []).append(slot.past)
    ranks: dict[str, int] = {}
    for group in groups.values():
        ordered = sorted(group, key=lambda past: uses[past].site)
        sites = [uses[past].site for past in ordered]
        ranks |= {past: at if in_loop else sites.index(sites[at]) for at, past in enumerate(ordered)}
    return ranks


def _site_of(state: StateFlow | None) -> int:
    return state.use.site if state is not None and state.use is not None else -1
