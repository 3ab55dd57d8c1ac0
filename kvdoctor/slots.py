"""Reads the slots of a stack: which past inputs there are, what they hold, what fills them and what carries them on.

The dataflow of the graph is the proof; names say what it leaves open, and which of two outputs the loop will take.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import count
from typing import Any, Literal

from kvdoctor.axes import as_number, slot_axes
from kvdoctor.contract import Carry, Dim, First, Growth, Lack, Slot, SlotKind
from kvdoctor.dataflow import StateFlow, Use
from kvdoctor.dialects import CACHE_LIKE, Dialect, SlotName
from kvdoctor.graph import Declared, GraphView
from kvdoctor.stacks import FLOATS, OnnxFile

ATTENTION_PARTS = ("key", "value", "key-value")
REPLACED: tuple[SlotKind, ...] = ("conv-state", "recurrent-state", "counter")


@dataclass(frozen=True, slots=True)
class Made:
    """An output of the first step that holds keys or values. `site` orders the layers."""

    name: str
    kind: SlotKind
    part: str
    site: int


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
        view = _view(self.decode)
        names = {name.past: name for name in self.templates}
        if self.dialect is not None:
            names |= {n.past: n for n in self.dialect.named(view.inputs) if n.past not in names}
        names = {past: name for past, name in names.items() if past not in self.claimed}
        states = self._states(view, names)
        found = [slot for past, state in states.items() if (slot := self._slot(view.inputs[past], names, state))]
        found += self._replaced(view, found)
        found = self._layered(self._by_affix(_prefixes(found, states), names), states)
        found = [self._declared_elsewhere(self._filled(slot, names.get(slot.past))) for slot in found]
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
        elsewhere = self.first is not self.decode or _view(self.decode).branches is not None
        used = {s.past: state.use for s in found if (state := states.get(s.past)) and state.use and s.used_as}
        made = {
            s.past: use
            for s in found
            if elsewhere
            and flow
            and s.used_as
            and s.filled_by
            and s.filled_in == "prefill"
            and (use := flow.made(s.filled_by))
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
                attended = _proven(state.use) is not None
                kept = state.joined and (state.output is not None or state.delta is not None)
                if attended or (kept and state.use is not None):
                    found[past] = state
        unnamed = len(found.keys() - names.keys())
        if unnamed:
            self.evidence.append(f"{unnamed} past inputs were found by what the graph does with them, not by name")
        return found

    def _updated(self, port: Declared, state: StateFlow) -> StateFlow:
        """A buffer that is written by arithmetic (times a mask, plus new entries): it comes back in its own shape."""
        flow = self.decode.dataflow
        if flow is None or _proven(state.use) is None or state.joined or state.output is not None:
            return state
        outputs = _view(self.decode).outputs.items()
        fitting = {name for name, out in outputs if (out.dtype, out.shape) == (port.dtype, port.shape)}
        output = flow.updated(port.name, fitting) if fitting else None
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
        growth = _growth(kind, name, state, port.shape)
        self.contradictions += _contradictions(name, kind, growth)
        present, continues = self._present(name, names, state, growth)
        returned = _view(self.decode).outputs.get(present or "")
        rows_only = growth == "grow" and _returns_rows(port.shape, state, returned)
        growth = "delta" if rows_only else growth
        axes = slot_axes(port.shape, kind, growth, name, state)
        return Slot(
            kind=kind,
            layer=name.layer if name is not None else -1,
            part=_part(name, state, kind),
            dtype=port.dtype,
            shape=self._sized(port.shape, axes),
            axes=axes,
            past=port.name,
            present=present,
            filled_by=None,
            carry="shift" if rows_only else _carry(kind, name, growth),
            emptied=present is not None and _view(self.decode).emptied(present) is not None,
            growth=growth,
            window=state.window if state is not None else None,
            used_as=_proven(state.use) if state is not None else None,
            continues_as=continues,
            trimmed=growth == "grow" and state is not None and state.trimmed,
            takes_new=self._takes_new(kind, present),
        )

    def _takes_new(self, kind: SlotKind, present: str | None) -> bool | None:
        """Whether the tokens of a step have a part in the present; None where the graph cannot be followed."""
        flow = self.decode.dataflow
        if flow is None or present not in flow.flow.results or not self.tokens or kind != "self-attention":
            return None
        return flow.flow.results[present] in self._reached

    @cached_property
    def _reached(self) -> set[str]:
        """All values of a decode step that the new tokens have a part in."""
        return self.decode.dataflow.reached_from(self.tokens) if self.decode.dataflow is not None else set()

    def _kind(self, name: SlotName | None, state: StateFlow | None) -> SlotKind:
        """Self- or cross-attention by whether it grows; another kind of state by its name or its use."""
        ruled = name.rule.kind if name is not None else None
        use = state.use.part if state is not None and state.use is not None else None
        grows = state is not None and state.how == "append" and not state.trimmed and use in ATTENTION_PARTS
        if ruled is not None and ruled not in ("self-attention", "cross-attention"):
            attended = ruled == "hidden-memory" and state is not None and _proven(state.use) is not None
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
        outputs = _view(self.decode).outputs
        reached = state.output if state is not None else None
        if growth == "delta" and state is not None and reached is None:
            reached = state.delta
        if name is None:
            return reached, reached
        if name.present is None or name.present in outputs:
            return name.present, reached
        others = {other.present for other in names.values()}
        return (reached if reached not in others else None), reached

    def _replaced(self, view: GraphView, found: list[Slot]) -> list[Slot]:
        """Unnamed states of a fixed size: an input and the nearest output of the same type that depends on it."""
        flow = self.decode.dataflow
        if flow is None:
            return []
        taken = {slot.past for slot in found} | self.claimed
        free = {n: p for n, p in view.outputs.items() if n not in {slot.present for slot in found}}
        more = []
        for past, port in view.inputs.items():
            rank = len(port.shape or ())
            if past in taken | self.tokens or rank < 2 or port.dtype not in FLOATS or port.shape is None:
                continue
            # Beside other slots only what is named so, or stands in a graph of tokens: stages pass hidden states on.
            likely = not found or CACHE_LIKE.match(past) or (self.tokens and rank > 2)
            if not likely or sum(not isinstance(size, int) for size in port.shape) > 1:
                continue  # of a state only the batch may vary
            fitting = {n for n, p in free.items() if (p.dtype, p.shape) == (port.dtype, port.shape)}
            output = flow.updated(past, fitting) if fitting else None
            if output is None:
                continue
            del free[output]
            state = flow.state(past, rank)
            kind: SlotKind = "conv-state" if state.use and state.use.part == "conv" else "recurrent-state"
            axes = slot_axes(port.shape, kind, "replace", None, state)
            more.append(
                Slot(
                    kind,
                    -1,
                    "state",
                    port.dtype,
                    port.shape,
                    axes,
                    port.name,
                    output,
                    None,
                    "feed-back",
                    growth="replace",
                    continues_as=output,
                )
            )
        return more

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

    def _filled(self, slot: Slot, name: SlotName | None) -> Slot:
        """Add what first fills the slot, and what the first step is fed."""
        takes_too = shared_pasts(_view(self.decode), _view(self.first), {slot.past})
        if self.first is not self.decode or _view(self.decode).branches is not None:
            filled = self._filled_by_first(slot, name)
            if filled is not None:
                first: First = "prefill" if self.first is not self.decode else "ignored"
                if self.first is not self.decode and slot.past in takes_too:
                    first = "zeros" if slot.growth not in ("grow", "shared") else "empty"
                if self.first is self.decode and slot.present is None:
                    # Both branches of a merged decoder return the same outputs.
                    emptied = _view(self.decode).emptied(filled) is not None
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
        return replace(slot, filled_by=None if missing_first else slot.present, first=first)

    def _declared_elsewhere(self, slot: Slot) -> Slot:
        """Sizes that the past leaves open and that the output which fills it declares as numbers."""
        source = self.encoder if slot.filled_in == "encode" and self.encoder is not None else self.first
        port = _view(source).outputs.get(slot.filled_by or "")
        if port is None or port.shape is None or len(port.shape) != len(slot.shape):
            return slot
        varying = ("batch", "batch_heads", "past", "encoder")
        shape = tuple(
            made if isinstance(made, int) and not isinstance(size, int) and axis not in varying else size
            for size, made, axis in zip(slot.shape, port.shape, slot.axes, strict=True)
        )
        return replace(slot, shape=shape)

    def _filled_by_first(self, slot: Slot, name: SlotName | None) -> str | None:
        outputs = _view(self.first).outputs
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
        return set(_view(self.decode).outputs) <= set(_view(self.first).outputs)

    @cached_property
    def _made(self) -> list[Made]:
        """What the first step makes, by dataflow: keys and values, over tokens or over encoder states."""
        flow, found = self.first.first_dataflow, []
        reached = flow.reached_from(self.ids) if flow is not None else set()
        for output, port in _view(self.first).outputs.items():
            use = flow.made(output) if flow is not None and len(port.shape or (1, 1, 1)) >= 3 else None
            if use is not None and flow is not None:
                own = flow.flow.results.get(output, output) in reached
                found.append(Made(output, "self-attention" if own else "cross-attention", use.part, use.site))
        return found

    def _filled_by_encoder(self, slot: Slot, name: SlotName | None) -> str | None:
        outputs = list(_view(self.encoder).outputs) if self.encoder is not None else []
        named = name.filled_by if name is not None else None
        return next((n for n in (named, slot.past) if n in outputs), None)

    def _sized(self, shape: tuple[Dim, ...], axes: tuple[Any, ...]) -> tuple[Dim, ...]:
        """Sizes that the graph leaves open and a config knows."""
        shape = tuple(map(as_number, shape))
        return tuple(
            dim if isinstance(dim, int) else self.numbers.get(axis, dim) for dim, axis in zip(shape, axes, strict=True)
        )


def _proven(use: Use | None) -> Literal["key", "value", "key-value"] | None:
    return use.part if use is not None and use.proven and use.part in ATTENTION_PARTS else None  # type: ignore[return-value]


def _prefixes(found: list[Slot], states: dict[str, StateFlow | None]) -> list[Slot]:
    """Keys and values that stand in front of a cache (prefix tuning): no output returns them, and none must.

    Another past, which is returned, is used as the same part by the same attention.
    """
    carried = {(slot.used_as, _site(states.get(slot.past))) for slot in found if slot.present is not None}

    def is_prefix(slot: Slot) -> bool:
        alone = slot.present is None and slot.kind == "self-attention"
        return alone and slot.used_as is not None and (slot.used_as, _site(states.get(slot.past))) in carried

    return [replace(s, growth="constant", carry="hold", continues_as=None) if is_prefix(s) else s for s in found]


def by_affix(pasts: list[str], presents: set[str], by_number: bool = False) -> dict[str, str]:
    """Pair pasts and presents by a change at the ends of their names that is the same for all; empty if there is none.

    Numbers alone prove little, `in1` and `out1` may be the first and the second tensor of their kind: they are asked
    for apart.
    """
    if len(pasts) < 2:
        return {}
    for present in sorted(presents):
        core = _longest_common(pasts[0], present)
        if core.isdigit() != by_number or not core or (not by_number and not any(map(str.isalpha, core))):
            continue
        (before, after), (new_before, new_after) = (name.split(core, 1) for name in (pasts[0], present))
        pairs = {}
        for past in pasts:
            middle = past.removeprefix(before).removesuffix(after) if after else past.removeprefix(before)
            if past.startswith(before) and past.endswith(after):
                pairs[past] = f"{new_before}{middle}{new_after}"
        if set(pairs) == set(pasts) and set(pairs.values()) == presents:
            return pairs
    return {}


def _longest_common(one: str, other: str) -> str:
    match = SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return one[match.a : match.a + match.size]


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


def shared_pasts(decode: GraphView, first: GraphView, pasts: set[str]) -> set[str]:
    """The pasts that the first graph takes as well: inputs of the same name, element type and rank.

    The name alone does not tell: where tensors are numbered, t7 of one graph has nothing to do with t7 of another.
    """

    def kind(port: Declared | None) -> tuple[str, int] | None:
        return (port.dtype, len(port.shape or ())) if port is not None else None

    return {name for name in pasts if name in first.inputs and kind(first.inputs[name]) == kind(decode.inputs[name])}


def _view(file: OnnxFile) -> GraphView:
    assert file.view is not None  # noqa: S101 - stacks hold files that were read
    return file.view


def _part(name: SlotName | None, state: StateFlow | None, kind: SlotKind) -> Any:
    if name is not None and name.part != "state":
        return name.part
    use: Use | None = state.use if state is not None else None
    return use.part if use is not None and use.part in ATTENTION_PARTS and kind not in REPLACED else "state"


def _growth(kind: SlotKind, name: SlotName | None, state: StateFlow | None, shape: tuple[Dim, ...]) -> Growth:
    if name is not None and name.rule.growth is not None and not _appended(name.rule.growth, state, shape):
        return name.rule.growth
    if name is not None and name.rule.or_delta and state is not None and state.output is None:
        return "delta"
    if kind == "cross-attention":
        return "constant"
    if kind in REPLACED:
        return "replace"
    seen = state.growth if state is not None and state.joined else None
    if state is None or not isinstance(shape[state.axis or 0], int) or seen not in ("grow", None):
        return seen or "grow"
    if name is None and state.output is None and state.delta is not None:
        return "delta"
    return "ring" if seen == "grow" and state.trimmed else "grow"


def _appended(ruled: Growth, state: StateFlow | None, shape: tuple[Dim, ...]) -> bool:
    """Whether a past that is named like a buffer has no fixed length, and comes back with new entries behind it."""
    if ruled not in ("static", "ring") or state is None or state.how != "append" or state.trimmed:
        return False
    return state.axis is not None and not isinstance(shape[state.axis], int)


def _contradictions(name: SlotName | None, kind: SlotKind, growth: Growth) -> Iterator[Lack]:
    """Where a name promises another kind or growth than the graph shows."""
    if name is None:
        return
    if name.rule.kind != kind:
        yield Lack(name.past, f"it is named as {name.rule.kind}, and the graph uses it as {kind}")
    elif name.rule.growth is not None and name.rule.growth != growth and not name.rule.or_delta:
        yield Lack(name.past, f"it is named as a cache of growth {name.rule.growth!r}, and the graph has it {growth}")


def _returns_rows(shape: tuple[Dim, ...], state: StateFlow | None, present: Declared | None) -> bool:
    """Whether a past of fixed length is declared to come back as fewer rows: the new ones, to be shifted in."""
    if state is None or state.axis is None or state.output is not None or present is None:
        return False
    if present.shape is None or len(present.shape) != len(shape):
        return False
    before, after = shape[state.axis], present.shape[state.axis]
    return isinstance(before, int) and isinstance(after, int) and after < before


def _carry(kind: SlotKind, name: SlotName | None, growth: Growth) -> Carry:
    if name is not None and name.rule.carry is not None:
        return name.rule.carry
    if kind == "cross-attention" or growth == "constant":
        return "hold"
    if growth == "delta":
        return "append" if name is not None and name.rule.or_delta else "write"
    return "feed-back"


def _site(state: StateFlow | None) -> int:
    return state.use.site if state is not None and state.use is not None else -1


def _order(slot: Slot) -> tuple[int, bool, str, str]:
    layer = -1 if slot.layer is None else slot.layer
    return layer, slot.kind != "self-attention", slot.part, slot.past
