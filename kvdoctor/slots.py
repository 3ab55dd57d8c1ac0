"""Reads the slots of a stack: which past inputs there are, what they hold, what fills them and what carries them on.

The dataflow of the graph is the proof; names say what it leaves open, and which of two outputs the loop will take.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from kvdoctor.affixes import by_affix
from kvdoctor.axes import as_number, slot_axes
from kvdoctor.contract import Axis, Dim, Growth, Lack, Slot, SlotKind
from kvdoctor.dataflow import StateFlow, Use
from kvdoctor.dialects import Dialect, SlotName
from kvdoctor.first_filling import FirstFilling
from kvdoctor.graph import Declared, GraphView
from kvdoctor.head_sizes import head_width
from kvdoctor.replaced_states import ReplacedStates
from kvdoctor.slot_rules import (
    ATTENTION_PARTS,
    REPLACED,
    carry_of,
    contradictions,
    growth_of,
    part_of,
    proven_part,
    returns_rows,
)
from kvdoctor.stacks import FLOATS, OnnxFile

UNCHANGED: tuple[SlotKind, ...] = ("cross-attention", "encoder-states", "counter")
"""What new tokens need no part in; a counter goes by their number."""


@dataclass
class SlotReader:
    """The slots of one stack.

    `decode`, `first` and `encoder` are its files: the one that takes the cache, the one that serves the first step (the
    same file, but in a pair), and the encoder. `claimed` are inputs that play another part by name, `ids` the inputs of
    the first step that carry tokens, `tokens` those of the decode graph, or their embeddings. `numbers` gives sizes
    that a config knows and the graph does not.
    """

    decode: OnnxFile
    first: OnnxFile
    encoder: OnnxFile | None
    dialect: Dialect | None
    templates: tuple[SlotName, ...]
    claimed: set[str]
    ids: set[str]
    tokens: set[str]
    numbers: dict[str, int]
    missing: list[Lack] = field(default_factory=list)
    contradictions: list[Lack] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)

    def read(self) -> tuple[Slot, ...]:
        """Read all slots, in the order of layers, self-attention first, keys before values."""
        view = self.decode.graph
        names = {name.past: name for name in self.templates}
        if self.dialect is not None:
            names |= {n.past: n for n in self.dialect.named(view.inputs) if n.past not in names}
        names = {past: name for past, name in names.items() if past not in self.claimed}
        states = self._states(view, names)
        found = [slot for past, state in states.items() if (slot := self._slot(view.inputs[past], names, state))]
        found += self._replaced(view, found)
        found = self._layered(self._by_affix(_prefixes(found, states), names), states)
        filling = FirstFilling(self.decode, self.first, self.encoder, self.ids, found)
        found = [filling.sized(filling.filled(slot, names.get(slot.past))) for slot in found]
        self.evidence += filling.evidence
        return tuple(sorted(self._traced(found, states), key=_order))

    def _by_affix(self, found: list[Slot], names: dict[str, SlotName]) -> list[Slot]:
        """Unnamed slots that all say by an affix which output is theirs, `x` and `x_out`: a loop goes by that.

        Where the content leaves by another such output, that is for the checks to say.
        """
        unnamed = {slot.past: slot.present for slot in found if slot.past not in names and slot.present is not None}
        presents = {name for name in unnamed.values() if name is not None}
        for past, numbered in by_affix(list(unnamed), presents, by_number=True).items():
            if numbered != unnamed[past]:
                reason = f"it is numbered like {numbered!r}, and its content leaves as {unnamed[past]!r}"
                self.contradictions.append(Lack(past, reason))
        promised = by_affix(list(unnamed), presents)
        return [replace(slot, present=promised.get(slot.past, slot.present)) for slot in found]

    def _traced(self, found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
        """Add which attention each slot is used in, and what its first filling is used for where that is made."""
        flow = self.first.first_dataflow
        elsewhere = self.first is not self.decode or self.decode.graph.branches is not None
        used = {s.past: state.use for s in found if (state := states.get(s.past)) and state.use and s.used_as}
        made = {
            s.past: use
            for s in found
            if elsewhere
            and flow
            and s.used_as
            and s.filled_by
            and s.filled_in == "prefill"
            and (use := flow.uses.made(s.filled_by))
            and use.proven
        }
        used_at, made_at = _ranked(found, used), _ranked(found, made)
        return [
            replace(
                slot,
                used_at=used_at.get(slot.past),
                made_as=made[slot.past].part if slot.past in made else None,  # type: ignore[arg-type]
                made_at=made_at.get(slot.past),
            )
            for slot in found
        ]

    def _states(self, view: GraphView, names: dict[str, SlotName]) -> dict[str, StateFlow | None]:
        """The inputs that are states, by name or by what the graph does with them."""
        found: dict[str, StateFlow | None] = {}
        flow = self.decode.dataflow
        for past, port in view.inputs.items():
            rank = len(port.shape) if port.shape is not None else 0
            if past in names:
                state = flow.state(past, rank) if flow is not None and rank else None
                is_cross = names[past].rule.kind == "cross-attention"
                found[past] = self._updated(port, state) if state is not None and not is_cross else state
            elif flow is not None and past not in self.claimed and port.dtype in FLOATS and rank >= 3:
                state = self._updated(port, flow.state(past, rank))
                if self._kept(port, state):
                    found[past] = state
        # What another past is returned as holds no new entries alone: a prefix stands in front of a cache.
        whole = {state.output for state in found.values() if state is not None and state.output is not None}
        found |= {p: replace(s, delta=None) for p, s in found.items() if s is not None and s.delta in whole}
        unnamed = len(found.keys() - names.keys())
        if unnamed:
            self.evidence.append(f"{unnamed} past inputs were found by what the graph does with them, not by name")
        return found

    def _kept(self, port: Declared, state: StateFlow) -> bool:
        """Whether an unnamed input is a past: attended to, or joined by new entries and returned."""
        flow, rank = self.decode.dataflow, len(port.shape or ())
        attended = proven_part(state.use) is not None
        if flow is None or (state.trimmed and not attended and _of_one(port, state)):
            return False
        if not state.joined and state.output is None:
            # What is reckoned with new tokens is a table or a mask; keys and values at once are states of an encoder.
            memory = rank == 3 and state.use is not None and state.use.part == "key-value"
            return attended and not memory and not flow.descent.meets(port.name, self._reached)
        kept = state.joined and (state.output is not None or state.delta is not None)
        return attended or (kept and state.use is not None)

    def _updated(self, port: Declared, state: StateFlow) -> StateFlow:
        """A buffer that is written by arithmetic (times a mask, plus new entries): it comes back in its own shape."""
        flow = self.decode.dataflow
        if flow is None or proven_part(state.use) is None or state.joined or state.output is not None:
            return state
        outputs = self.decode.graph.outputs.items()
        fitting = {name for name, out in outputs if (out.dtype, out.shape) == (port.dtype, port.shape)}
        output = flow.descent.updated(port.name, fitting) if fitting else None
        if output is None or flow.flow.results.get(output) not in self._reached:
            return state
        return replace(state, output=output, how="update", growth="static", joined=True)

    def _slot(self, port: Declared, names: dict[str, SlotName], state: StateFlow | None) -> Slot | None:
        name = names.get(port.name)
        if port.shape is None:
            lack = "has no declared shape" if port.dtype else "is no tensor, or declares no element type"
            self.missing.append(Lack(port.name, f"this input {lack}"))
            return None
        kind = self._kind(name, state)
        growth = growth_of(kind, name, state, port.shape)
        if name is None and growth == "delta" and not self._only_new(state):
            growth = "grow"
        self.contradictions += contradictions(name, kind, growth)
        present, continues = self._present(name, names, state, growth)
        returned = self.decode.graph.outputs.get(present or "")
        rows_only = growth == "grow" and returns_rows(port.shape, state, returned)
        growth = "delta" if rows_only else growth
        axes = slot_axes(port.shape, kind, growth, name, state)
        if growth in ("grow", "shared") and _of_one_length(port, returned, axes, state):
            growth = "static"
            axes = slot_axes(port.shape, kind, growth, name, state)
        return Slot(
            kind=kind,
            layer=name.layer if name is not None else None if "layers" in axes else -1,
            part=part_of(name, state, kind),
            dtype=port.dtype,
            shape=self._sized(port, axes, state),
            axes=axes,
            past=port.name,
            present=present,
            filled_by=None,
            carry="shift" if rows_only else carry_of(kind, name, growth, state, port.shape),
            emptied=present is not None and self.decode.graph.emptied(present) is not None,
            growth=growth,
            window=state.window if state is not None else None,
            used_as=proven_part(state.use) if state is not None else None,
            continues_as=continues,
            trimmed=growth == "grow" and state is not None and state.trimmed,
            takes_new=self._takes_new(kind, present),
        )

    def _only_new(self, state: StateFlow | None) -> bool:
        """Whether an output of new entries is declared as such: as long as the tokens, not as past and new together."""
        returned = self.decode.graph.outputs.get(state.delta or "") if state is not None else None
        shape, inputs = returned.shape if returned is not None else None, self.decode.graph.inputs
        at = state.axis if state is not None else None
        if state is None or at is None or shape is None or len(shape) <= at:
            return True
        size = shape[at]
        if not isinstance(size, str):
            return True
        # A name that no other port has proves nothing: torch makes one up for each axis.
        tokens = {size for name in self.tokens for size in inputs[name].shape or ()}
        ports = (*inputs.values(), *self.decode.graph.outputs.values())
        return size in tokens or sum(size in (port.shape or ()) for port in ports) < 2

    def _takes_new(self, kind: SlotKind, present: str | None) -> bool | None:
        """Whether the tokens of a step have a part in the present; None where the graph cannot be followed."""
        flow = self.decode.dataflow
        if flow is None or present not in flow.flow.results or not self.tokens or kind in UNCHANGED:
            return None
        return flow.flow.results[present] in self._reached

    @cached_property
    def _reached(self) -> set[str]:
        """All values of a decode step that the new tokens have a part in."""
        return self.decode.dataflow.descent.reached_from(self.tokens) if self.decode.dataflow is not None else set()

    def _kind(self, name: SlotName | None, state: StateFlow | None) -> SlotKind:
        """Self- or cross-attention by whether it grows; another kind of state by its name or its use."""
        ruled = name.rule.kind if name is not None else None
        use = state.use.part if state is not None and state.use is not None else None
        if ruled is None and state is not None and (state.how, state.growth) == ("operator", "replace"):
            return "conv-state" if use == "conv" else "recurrent-state"
        grows = state is not None and state.how == "append" and not state.trimmed and use in ATTENTION_PARTS
        if ruled is not None and ruled not in ("self-attention", "cross-attention"):
            attended = ruled == "hidden-memory" and state is not None and proven_part(state.use) is not None
            return "self-attention" if attended or (grows and ruled in REPLACED) else ruled
        if use == "conv":
            return "conv-state"
        if use in ATTENTION_PARTS and state is not None:
            if state.joined:
                return "self-attention"
            # A past that nothing joins is attended to as it is: constant, unless its present is what the graph lost.
            return ruled if ruled == "self-attention" else "cross-attention"
        if ruled is not None:
            return ruled
        return "hidden-memory"

    def _present(
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

    def _replaced(self, view: GraphView, found: list[Slot]) -> list[Slot]:
        """Unnamed states of a fixed size."""
        flow = self.decode.dataflow
        if flow is None:
            return []
        taken = {slot.past for slot in found} | self.claimed | self.tokens
        returned = {slot.present for slot in found}
        return list(
            ReplacedStates(
                flow,
                inputs=[port for past, port in view.inputs.items() if past not in taken],
                outputs=[port for name, port in view.outputs.items() if name not in returned],
                tokens=self.tokens,
                beside=bool(found),
            ).read()
        )

    def _layered(self, found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
        """Give unnamed slots their layer: the rank of their attention among those of the same kind and part."""
        unnamed = [slot for slot in found if slot.layer == -1]
        groups: dict[tuple[str, str], list[Slot]] = {}
        for slot in unnamed:
            groups.setdefault((slot.kind, slot.part), []).append(slot)
        layers: dict[str, int] = {}
        for group in groups.values():
            ordered = sorted(group, key=lambda slot: _site(states.get(slot.past))) if group[0].past in states else group
            alike = (slot for slot in found if (slot.kind, slot.part) == (group[0].kind, group[0].part))
            named = {slot.layer for slot in alike}
            free = (number for number in count() if number not in named)
            layers |= {slot.past: next(free) for slot in ordered}
        return [replace(slot, layer=layers[slot.past]) if slot.past in layers else slot for slot in found]

    def _sized(self, port: Declared, axes: tuple[Axis, ...], state: StateFlow | None) -> tuple[Dim, ...]:
        """Sizes that the declaration leaves open and the attention shows, or else a config knows."""
        shape, known = tuple(map(as_number, port.shape or ())), dict(self.numbers)
        flow = self.decode.dataflow
        if flow is not None and state is not None and state.use is not None and "float" in port.dtype:
            width = head_width(self.decode.graph, flow.flow, flow.flow.nodes[state.use.site])
            known |= {"head_dim": width} if width is not None else {}
        return tuple(
            dim if isinstance(dim, int) else known.get(axis, dim) for dim, axis in zip(shape, axes, strict=True)
        )


def _of_one(port: Declared, state: StateFlow) -> bool:
    """Whether a state keeps one entry: the last input of a layer, which each step replaces."""
    return state.axis is not None and port.shape is not None and port.shape[state.axis] == 1


def _of_one_length(past: Declared, present: Declared | None, axes: tuple[Axis, ...], state: StateFlow | None) -> bool:
    """Whether a past and its present are declared with the same number of entries: a buffer, however it is written."""
    if "past" not in axes or present is None or past.shape is None or len(past.shape) != len(present.shape or ()):
        return False
    if state is not None and state.trimmed:
        return False
    at = axes.index("past")
    before, after = (as_number(shape[at]) for shape in (past.shape, present.shape or ()))
    return isinstance(before, int) and before == after and before > 0


def _prefixes(found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
    """Keys and values that stand in front of a cache (prefix tuning): no output returns them, and none must.

    Another past, which is returned, is used as the same part by the same attention.
    """
    carried = {(slot.used_as, _site(states.get(slot.past))) for slot in found if slot.present is not None}

    def is_prefix(slot: Slot) -> bool:
        alone = slot.present is None and slot.kind == "self-attention"
        return alone and slot.used_as is not None and (slot.used_as, _site(states.get(slot.past))) in carried

    return [replace(s, growth="constant", carry="hold", continues_as=None) if is_prefix(s) else s for s in found]


def _ranked(slots: list[Slot], uses: dict[str, Use]) -> dict[str, int]:
    """Number the attentions of each kind and part in the order of the graph."""
    groups: dict[tuple[str, str], list[str]] = {}
    for slot in slots:
        if slot.past in uses:
            groups.setdefault((slot.kind, uses[slot.past].part), []).append(slot.past)
    return {
        past: rank
        for group in groups.values()
        for rank, past in enumerate(sorted(group, key=lambda past: uses[past].site))
    }


def _site(state: StateFlow | None) -> int:
    return state.use.site if state is not None and state.use is not None else -1


def _order(slot: Slot) -> tuple[int, bool, str, str]:
    layer = -1 if slot.layer is None else slot.layer
    return layer, slot.kind != "self-attention", slot.part, slot.past
