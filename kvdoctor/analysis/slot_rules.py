"""What a slot is by its name, its shapes and its dataflow: its part, and how it grows.

The presents of a cache may hold the new entries alone, which a loop appends to the past (`NewEntries`). A paged cache
has pools: buffers of blocks, of which a table of the caller selects those of a sequence (`PagedPools`). The scales of a
cache in 8 or 4 bits are slots of their own next to the values, named `NAME_scale` (`convert --cache-type` writes them
so): a scale grows, is held and is reordered as its values are, and belongs to the same layer.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from kvdoctor.analysis.axes import likely_length
from kvdoctor.analysis.dataflow.states import Dataflow, StateFlow
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS, StateUse
from kvdoctor.analysis.dataflow.walks import MOST_VISITED, Walk, outputs_with_content
from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.analysis.port_roles import INTEGERS
from kvdoctor.contract import SCALE_SUFFIX, Carry, Dim, Growth, MissingPart, Part, Slot, SlotKind
from kvdoctor.model.operators import operator_of
from kvdoctor.model.view import Declared, GraphView

REPLACED: tuple[SlotKind, ...] = ("conv-state", "recurrent-state", "counter")
"""Kinds of states that each step returns anew, in the same size."""

NAME_PARTS = (re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+"), re.compile(r"[0-9]+|[a-zA-Z]"))
"""The parts of a name: runs of letters and numbers; single letters and numbers."""


def proven_part(use: StateUse | None) -> Literal["key", "value", "key-value"] | None:
    """What a past is used as, where the attention that uses it was found; None for a likely use."""
    return use.part if use is not None and use.proven and use.part in ATTENTION_PARTS else None  # type: ignore[return-value]


def part_of(name: SlotName | None, state: StateFlow | None, kind: SlotKind) -> Any:
    """Key, value or both: by its name, else by its use. States that are replaced are a `state`."""
    if name is not None and name.part != "state":
        return name.part
    use: StateUse | None = state.use if state is not None else None
    return use.part if use is not None and use.part in ATTENTION_PARTS and kind not in REPLACED else "state"


def growth_of(kind: SlotKind, name: SlotName | None, state: StateFlow | None, shape: tuple[Dim, ...]) -> Growth:
    """What a step does to the length: by the naming rule unless the graph refutes it, else by the dataflow."""
    if name is not None and name.rule.growth is not None and not _is_appended(name.rule.growth, state, shape):
        return name.rule.growth
    if name is not None and name.rule.or_delta and state is not None and state.output is None:
        return "delta"
    if kind == "cross-attention":
        return "constant"
    if kind in REPLACED:
        return "replace"
    by_flow = state.growth if state is not None and state.joined else None
    if name is None and by_flow == "grow" and state is not None and state.output is None and state.delta is not None:
        return "delta"  # no output returns the past, but one the new entries
    if state is None or not isinstance(shape[state.axis or 0], int) or by_flow not in ("grow", None):
        return by_flow or "grow"
    return "ring" if by_flow == "grow" and state.trimmed else "grow"


def _is_appended(by_name: Growth, state: StateFlow | None, shape: tuple[Dim, ...]) -> bool:
    """Whether new entries are concatenated to a past that is named like a buffer: it has no fixed length, or shifts.

    Or to one whose present is named like the new entries alone, and is returned whole.
    """
    if by_name == "delta" and state is not None and state.output is not None:
        return state.joined
    if by_name not in ("static", "ring") or state is None or state.how != "append":
        return False
    length = shape[likely_length(shape) if state.axis is None else state.axis]
    return by_name == "static" if state.trimmed else not isinstance(length, int)


def find_contradictions(name: SlotName | None, kind: SlotKind, growth: Growth) -> Iterator[MissingPart]:
    """Where a name promises another kind or growth than the graph shows."""
    if name is None:
        return
    if name.rule.kind != kind:
        yield MissingPart(name.past, f"its name says {name.rule.kind}, but the graph uses it as {kind}")
    elif name.rule.growth is not None and name.rule.growth != growth and not name.rule.or_delta:
        yield MissingPart(
            name.past, f"its name says growth {name.rule.growth!r}, but in the graph its growth is {growth!r}"
        )


def returns_new_rows(shape: tuple[Dim, ...], state: StateFlow | None, present: Declared | None) -> bool:
    """Whether a past of fixed length is declared to come back with fewer rows: the new ones, to be shifted in."""
    if state is None or state.axis is None or state.output is not None or present is None:
        return False
    if present.shape is None or len(present.shape) != len(shape):
        return False
    before, after = shape[state.axis], present.shape[state.axis]
    return isinstance(before, int) and isinstance(after, int) and after < before


def carry_of(
    kind: SlotKind, name: SlotName | None, growth: Growth, state: StateFlow | None, shape: tuple[Dim, ...]
) -> Carry:
    """How a correct loop computes the next past: by the naming rule, else by the growth."""
    if name is not None and name.rule.carry is not None and name.rule.growth in (None, growth):
        return name.rule.carry
    if kind == "cross-attention" or growth == "constant":
        return "hold"
    if name is None and growth == "static" and state is not None and state.at_end:
        return "extend"
    if growth == "delta":
        if name is not None and name.rule.or_delta:
            return "append"
        if state is None or state.cut:
            return "write"
        if state.axis is None:  # rows are written into a buffer of a fixed length only
            open_ended = state.joined and not isinstance(shape[likely_length(shape)], int)
            return "append" if open_ended else "write"
        # A graph that reads the whole buffer leaves no free rows: new rows are appended, or push the oldest out.
        return "shift" if isinstance(shape[state.axis], int) else "append"
    return "feed-back"


def pair_by_name(pasts: list[str], presents: set[str], by_number: bool = False) -> dict[str, str]:
    """Pair pasts and presents whose names differ by the same parts: `x` and `x_out`, `in_x` and `out_x`.

    Empty where no such change pairs all pasts, or all presents, two at least. Names that share a number alone are
    paired only with `by_number`: `in1` and `out1` may be the first and the second tensor of their kind.
    """
    most = min(len(pasts), len(presents))
    for part in NAME_PARTS:
        parts = {name: part.findall(name) for name in (*pasts, *presents)}
        for past, present in product(pasts[: len(pasts) - most + 1], sorted(presents) if most > 1 else ()):
            shared = Counter(parts[past]) & Counter(parts[present])
            if not shared or all(map(str.isdigit, shared)) != by_number:
                continue
            gone, added = Counter(parts[past]) - shared, Counter(parts[present]) - shared
            known = {_without(added, parts[name]): name for name in presents}
            pairs = {name: known.get(_without(gone, parts[name]), "") for name in pasts}
            pairs = {name: found for name, found in pairs.items() if found}
            if len(pairs) == len({*pairs.values()}) >= most:
                return pairs
    return {}


def share_words(one: str, other: str) -> bool:
    """Whether two names have a part of letters in common."""
    parts, others = ({part for part in NAME_PARTS[0].findall(name) if part.isalpha()} for name in (one, other))
    return not parts.isdisjoint(others)


def _without(gone: Counter[str], parts: list[str]) -> tuple[str, ...]:
    """A name without some of its parts; as it is where it does not have them."""
    left, rest = gone.copy(), []
    for part in parts:
        if left[part]:
            left[part] -= 1
        else:
            rest.append(part)
    return tuple(parts if left.total() else rest)


WITH_PAST = {"past", "total"}
"""Parts of the name of an axis that counts past and new tokens together."""

WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
INVENTED = re.compile(r"_dim_\d+$")
"""The end of a name that torch makes of an operator, an output and the number of the axis."""


@dataclass(eq=False, repr=False)
class NewEntries:
    """The presents of one decode graph; `tokens` are its inputs that carry tokens or embeddings."""

    view: GraphView
    tokens: set[str]

    def find_named(self, names: dict[str, SlotName], states: dict[str, StateFlow | None]) -> set[str]:
        """Pasts with a known name whose presents have the new entries alone; none where only some are like that.

        A present that is declared as long as past and new together, or one among others that grow, lost its past.
        """
        joined = {past: state for past, state in states.items() if state is not None and state.joined}
        found = {past for past, state in joined.items() if past in names and self._is_named(names[past], state)}
        return found if len(found) == len(joined) else set()

    def _is_named(self, name: SlotName, state: StateFlow) -> bool:
        if state.output is not None or state.growth != "grow":
            return False
        if name.present is not None and self._size_of(name.present, state.axis) in self._token_sizes:
            return True
        is_present = name.present == state.delta or name.present not in self.view.outputs
        return state.delta is not None and is_present and self.are_alone(state)

    def find_changed(self, states: dict[str, StateFlow]) -> dict[str, StateFlow]:
        """Unnamed pasts whose new entries are changed on their way out, each with the output that fits it.

        No output returns the entries that the attention sees. One that is declared as long as the tokens, and has the
        name or the place of the past, is what a loop appends; whether its content is right, a run shows.
        """
        joined = {past: state for past, state in states.items() if state.joined and state.growth == "grow"}
        lost = {past for past, state in joined.items() if state.output is None and state.delta is None}
        if not lost or any(state.output is not None for state in joined.values()):
            return {}
        known = {state.delta for state in joined.values() if state.delta is not None}
        fitting = {name for name in self.view.outputs if any(self._fits(past, joined[past], name) for past in lost)}
        pairs = pair_by_name(list(joined), known | fitting) or self._pair_by_order(joined, known | fitting)
        return {past: replace(joined[past], delta=pairs[past]) for past in lost if pairs.get(past) in fitting - known}

    def _pair_by_order(self, joined: dict[str, StateFlow], presents: set[str]) -> dict[str, str]:
        """Pair pasts and presents in the order of the graph, if those that the dataflow pairs are in this order."""
        pasts = [name for name in self.view.inputs if name in joined]
        pairs = dict(zip(pasts, (name for name in self.view.outputs if name in presents), strict=False))
        known = {past: state.delta for past, state in joined.items() if state.delta is not None}
        return pairs if len(pasts) == len(presents) and known and known.items() <= pairs.items() else {}

    def _fits(self, past: str, state: StateFlow, output: str) -> bool:
        """Whether an output is declared like a past, but for its length, which is that of the tokens."""
        before, after = self.view.inputs[past], self.view.outputs[output]
        if before.shape is None or after.shape is None or len(before.shape) != len(after.shape):
            return False
        if before.dtype != after.dtype or self._size_of(output, state.axis) not in self._token_sizes:
            return False
        sizes = zip(before.shape, after.shape, strict=True)
        return all(one == other for at, (one, other) in enumerate(sizes) if at != state.axis)

    def are_alone(self, state: StateFlow | None) -> bool:
        """Whether an output of new entries is declared as long as the tokens, not as past and new together.

        No run can tell: the loop that appends them computes right logits in both cases. Only the name says what the
        exporter meant.
        """
        output = state.delta if state is not None else None
        size = self._size_of(output, state.axis) if state is not None and output else None
        if not isinstance(size, str) or size in self._token_sizes:
            return True
        words = () if INVENTED.search(size) else WORD.findall(size.replace(output or " ", " "))
        if any(word.lower() in WITH_PAST for word in words):
            return False
        # A name that no other port has proves nothing: torch invents one for each axis.
        ports = (*self.view.inputs.values(), *self.view.outputs.values())
        return sum(size in (port.shape or ()) for port in ports) < 2

    def _size_of(self, output: str, axis: int | None) -> Dim:
        """The declared size of one axis of an output; None where nothing is declared."""
        port = self.view.outputs.get(output)
        shape = port.shape if port is not None else None
        return shape[axis] if shape is not None and axis is not None and axis < len(shape) else None

    @cached_property
    def _token_sizes(self) -> set[str]:
        sizes = (size for name in self.tokens for size in self.view.inputs[name].shape or ())
        return {size for size in sizes if isinstance(size, str)}


NO_TABLES = ("mask", "position")
"""Parts of the names of inputs that say which tokens are there, and where."""


@dataclass(eq=False, repr=False)
class PagedPools:
    """The inputs of one decode graph; `tokens` are those that carry tokens, `batches` the names of the batch axis."""

    dataflow: Dataflow
    inputs: Mapping[str, Declared]
    tokens: set[str]
    batches: set[Dim]

    def has(self, port: Declared) -> bool:
        """Whether a table selects what an attention sees of a buffer, along its first axis: blocks, not sequences."""
        if not port.shape or port.shape[0] in self.batches or not self._selected:
            return False
        walk = Walk([port.name], self.dataflow.budget, MOST_VISITED)
        for node, index in walk.takers(self.dataflow.flow):
            places = operator_of(node.op).places if node.has("pick") and index == 0 else ()
            if any(node.input(at) in self._selected for at in places) and node.number("axis", 0) == 0:
                return True
            walk.add(output for output, _ in outputs_with_content(node, index))
        return False

    @cached_property
    def _selected(self) -> set[str]:
        """Values that depend on integers of two axes, as a table of blocks has them: no tokens, positions or masks."""
        shapes = [self.inputs[name].shape for name in self.tokens]
        tables = {
            name
            for name, port in self.inputs.items()
            if port.dtype in INTEGERS
            and len(port.shape or ()) == 2
            and name not in self.tokens
            and port.shape not in shapes
            and not any(word in name.lower() for word in NO_TABLES)
        }
        return self.dataflow.descent.reached_from(tables) if tables else set()


SCALE_PARTS: dict[Part, Part] = {"key": "key-scale", "value": "value-scale"}
STORED = ("int8", "uint8")
"""Element types of values that have a scale."""
SCALES = ("float16", "float", "bfloat16")


def find_stored(inputs: Mapping[str, Declared]) -> dict[str, str]:
    """The inputs that have a scale: by the name of the scale, that of the values."""
    found = {}
    for name, port in inputs.items():
        values = inputs.get(name.removesuffix(SCALE_SUFFIX)) if name.endswith(SCALE_SUFFIX) else None
        if values is None or values.dtype not in STORED or port.dtype not in SCALES:
            continue
        sizes = list(zip(port.shape or (), values.shape or (), strict=False))
        same_rank = port.shape is not None and values.shape is not None and len(port.shape) == len(values.shape)
        if same_rank and any(size == 1 and other != 1 for size, other in sizes):
            found[name] = values.name
    return found


def name_scales(names: Mapping[str, SlotName], stored: Mapping[str, str]) -> Iterator[SlotName]:
    """What the names of the values say about their scales."""
    for scale, values in stored.items():
        if values in names:
            name = names[values]
            yield replace(
                name,
                past=scale,
                part=scale_part(name.part),
                present=f"{name.present}{SCALE_SUFFIX}" if name.present is not None else None,
                filled_by=f"{name.filled_by}{SCALE_SUFFIX}" if name.filled_by is not None else None,
            )


def mark_scales(slots: list[Slot], stored: Mapping[str, str]) -> list[Slot]:
    """Scales as slots like their values: dataflow proves where they go, not what they are for."""
    by_past = {slot.past: slot for slot in slots}
    return [
        replace(
            values,
            past=slot.past,
            present=slot.present or (f"{values.present}{SCALE_SUFFIX}" if values.present is not None else None),
            dtype=slot.dtype,
            shape=slot.shape,
            part=scale_part(values.part),
            continues_as=slot.continues_as,
            takes_new=slot.takes_new,
            emptied=slot.emptied,
            used_as=None,
        )
        if (values := by_past.get(stored.get(slot.past, ""))) is not None and len(slot.shape) == len(values.shape)
        else slot
        for slot in slots
    ]


def fill_scales(slots: list[Slot], stored: Mapping[str, str], outputs: Collection[str]) -> list[Slot]:
    """Scales with the output that first fills them, where no name said it; `outputs` are those of the graph."""
    by_past = {slot.past: slot for slot in slots}
    filled = []
    for slot in slots:
        values = by_past.get(stored.get(slot.past, ""))
        scales = f"{values.filled_by}{SCALE_SUFFIX}" if values is not None and values.filled_by is not None else None
        if values is None or scales not in outputs or slot.filled_by == scales:
            filled.append(slot)
        else:
            filled.append(replace(slot, filled_by=scales, filled_in=values.filled_in, first=values.first))
    return filled


def scale_part(part: Part) -> Part:
    """The part that the scales of a key or of a value are."""
    return SCALE_PARTS.get(part, part)
