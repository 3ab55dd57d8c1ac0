"""Two cache contracts held against one another: would a loop written for A drive B?

Whatever such a loop would have to be changed for is worse: an input or output that is gone, renamed, of another type or
layout, a new input that it does not feed, another carry rule, another first step. Sizes count where the loop must make
the tensor (inputs and pasts). What it may ask of B itself is told and decides nothing: names of axes, the size of the
vocabulary, the arithmetic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvdoctor.comparing.grouping import grouped
from kvdoctor.contract import Axis, CacheContract, Dim, Graph, PhaseName, Port, Slot, describe
from kvdoctor.report.diff_document import Delta, Effect

T = TypeVar("T")
PHASES: tuple[PhaseName, ...] = ("encode", "prefill", "decode")
IN_SLOTS = ("past", "present")
"""Roles of ports that are compared as slots."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What may be other: a stack, an input, an output or a slot, by its name in A."""

    what: str
    name: str = ""

    def other(self, field: str, old: object, new: object) -> Iterator[Delta]:
        """A value that decides nothing."""
        yield from self._delta(field, old, new, "neutral", "")

    def worse(self, field: str, old: object, new: object, because: str) -> Iterator[Delta]:
        """A value that a loop written for A relies on."""
        yield from self._delta(field, old, new, "worse", because)

    def _delta(self, field: str, old: object, new: object, effect: Effect, because: str) -> Iterator[Delta]:
        if old != new:
            before, after = ("none" if value is None else str(value) for value in (old, new))
            yield Delta(self.what, (self.name,) if self.name else (), field, before, after, effect, because)


def contract_deltas(a: CacheContract, b: CacheContract) -> tuple[Delta, ...]:
    """What is other in the contract of B."""
    return grouped([*_whole(a, b), *_all_ports(a, b), *_slots(a, b), *_axis_names(a, b)])


def _whole(a: CacheContract, b: CacheContract) -> Iterator[Delta]:
    """What is said of the stack as a whole."""
    stack = _Place("stack")
    yield from stack.other("layout", a.layout, b.layout)
    why = "a loop written for A makes its first call in another way"
    yield from stack.worse("first step", a.first_step, b.first_step, why)
    yield from stack.worse("codebooks", a.codebooks, b.codebooks, "each step takes other rows of tokens")
    yield from stack.other("arithmetic", a.exactness, b.exactness)
    yield from stack.other("vocabulary", a.vocabulary, b.vocabulary)
    yield from stack.other("context", a.context_limit, b.context_limit)
    for phase in PHASES:
        if phase in a.phases and phase not in b.phases:
            why = "a loop written for A runs it"
            yield Delta("graph", (a.graph(phase).file,), "", f"serves {phase}", None, "worse", why)
        elif phase in b.phases and phase not in a.phases:
            yield Delta("graph", (b.graph(phase).file,), "", None, f"serves {phase}")


def _all_ports(a: CacheContract, b: CacheContract) -> Iterator[Delta]:
    """Ports of the graphs that serve the same phase; two phases of one graph are looked at once."""
    seen = []
    for phase in PHASES:
        if phase not in a.phases or phase not in b.phases:
            continue
        pair = (a.phases[phase].graph, b.phases[phase].graph)
        # One graph against two: the first step is another, which is said already, and so are its ports.
        if pair not in seen and not (phase == "prefill" and a.first_step != b.first_step):
            seen.append(pair)
            yield from _ports(a.graph(phase), b.graph(phase))


def _ports(a: Graph, b: Graph) -> Iterator[Delta]:
    for what, old, new in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        mine = [port for port in old if port.role not in IN_SLOTS]
        theirs = [port for port in new if port.role not in IN_SLOTS]
        pairs = _paired(mine, theirs, lambda port: port.name, lambda port: port.role)
        for before, after in pairs:
            yield from _port(what, before, after)


def _port(what: str, a: Port | None, b: Port | None) -> Iterator[Delta]:
    if b is None and a is not None:
        why = f"a loop written for A {'feeds' if what == 'input' else 'reads'} it"
        yield Delta(what, (a.name,), "", _typed(a), None, "worse", why)
    elif a is None and b is not None:
        effect: Effect = "worse" if what == "input" else "neutral"
        yield Delta(what, (b.name,), "", None, _typed(b), effect, "a loop written for A does not feed it")
    elif a is not None and b is not None:
        place = _Place(what, a.name)
        yield from place.worse("name", a.name, b.name, "a loop written for A uses the old name")
        yield from place.worse("role", a.role, b.role, "the same name plays another part")
        yield from place.worse("value", a.value, b.value, "a loop written for A feeds another number")
        yield from _types(place, (a.dtype, a.shape, a.axes), (b.dtype, b.shape, b.axes))


def _slots(a: CacheContract, b: CacheContract) -> Iterator[Delta]:
    pairs = _paired(a.slots, b.slots, lambda slot: slot.past, lambda slot: (slot.kind, slot.layer, slot.part))
    for before, after in pairs:
        if after is None and before is not None:
            yield Delta(
                "slot", (before.past,), "", _slot_typed(before), None, "worse", "a loop written for A carries it"
            )
        elif before is None and after is not None:
            why = "a loop written for A does not carry it"
            yield Delta("slot", (after.past,), "", None, _slot_typed(after), "worse", why)
        elif before is not None and after is not None:
            yield from _slot(before, after)


def _slot(a: Slot, b: Slot) -> Iterator[Delta]:
    place, renamed = _Place("slot", a.past), "a loop written for A uses the old name"
    rule = "a loop written for A carries it by the old rule"
    yield from place.worse("past", a.past, b.past, renamed)
    if a.present is None:
        yield from place.other("present", a.present, b.present)
    else:
        gone = "a loop written for A reads it" if b.present is None else renamed
        yield from place.worse("present", a.present, b.present, gone)
    if a.filled_by is not None and b.filled_by is not None and a.filled_by != a.present:
        yield from place.worse("filled by", a.filled_by, b.filled_by, renamed)
    yield from place.worse("keeps", _identity(a), _identity(b), "the same name keeps something else")
    yield from place.worse("carry", a.carry, b.carry, rule)
    yield from place.worse("growth", a.growth, b.growth, rule)
    why = "a loop written for A feeds something else at the first step"
    yield from place.worse("first step", a.first, b.first, why)
    yield from place.other("window", a.window, b.window)
    yield from place.other("emptied by each step", a.emptied, b.emptied)
    yield from _types(place, (a.dtype, a.shape, a.axes), (b.dtype, b.shape, b.axes))


_Type = tuple[str, tuple[Dim, ...] | None, tuple[Axis, ...]]


def _types(place: _Place, a: _Type, b: _Type) -> Iterator[Delta]:
    """Type, rank, layout and sizes of one tensor."""
    (dtype, shape, axes), (new_dtype, new_shape, new_axes) = a, b
    yield from place.worse("dtype", dtype, new_dtype, "a loop written for A makes or reads another type")
    if len(axes) != len(new_axes):
        yield from place.worse("rank", _listed(axes), _listed(new_axes), "a loop written for A has another rank for it")
    elif axes != new_axes:
        why = "a loop written for A has its axes in another order or meaning"
        yield from place.worse("layout", _listed(axes), _listed(new_axes), why)
    elif shape is not None and new_shape is not None and len(shape) == len(new_shape) == len(axes):
        for axis, old, new in zip(axes, shape, new_shape, strict=True):
            yield from _size(place, axis, old, new)


def _size(place: _Place, axis: Axis, old: Dim, new: Dim) -> Iterator[Delta]:
    """One axis. What B returns may have any size, since a loop sees it; what the loop makes itself has the old one."""
    if old == new or not (isinstance(old, int) or isinstance(new, int)):
        return
    before, after = ("any" if not isinstance(size, int) else str(size) for size in (old, new))
    field = f"size of {axis}"
    if place.what == "output":
        yield from place.other(field, before, after)
    elif after == "any":
        yield Delta(place.what, (place.name,), field, before, after, "better")
    else:
        yield from place.worse(field, before, after, "a loop written for A makes it with the old size")


def _axis_names(a: CacheContract, b: CacheContract) -> Iterator[Delta]:
    """What open axes are called, by what they count."""
    old, new = _names(a), _names(b)
    for axis in old:
        if axis in new and old[axis] != new[axis]:
            before, after = (" or ".join(sorted(found)) for found in (old[axis], new[axis]))
            yield Delta("axis", (axis,), "name", before, after)


def _names(contract: CacheContract) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for graph in contract.graphs.values():
        for port in graph.inputs:
            for axis, size in zip(port.axes, port.shape or (), strict=False):
                if not isinstance(size, int):
                    found.setdefault(axis, set()).add(size or "(unnamed)")
    return found


def _paired(
    old: Sequence[T], new: Sequence[T], name: Callable[[T], object], meaning: Callable[[T], object]
) -> Iterator[tuple[T | None, T | None]]:
    """What belongs together: by name, else by a meaning that only one is left of on either side."""
    names = {name(one): one for one in new}
    left = {name(one) for one in new} - {name(one) for one in old}
    for one in old:
        if name(one) in names:
            yield one, names[name(one)]
            continue
        alike = [other for other in new if name(other) in left and meaning(other) == meaning(one)]
        rivals = [mine for mine in old if name(mine) not in names and meaning(mine) == meaning(one)]
        found = alike[0] if len(alike) == len(rivals) == 1 else None
        left -= {name(found)} if found is not None else set()
        yield one, found
    for other in new:
        if name(other) in left:
            yield None, other


def _identity(slot: Slot) -> str:
    layer = "all layers" if slot.layer is None else f"layer {slot.layer}"
    return f"{slot.kind}, {layer}, {slot.part}"


def _typed(port: Port) -> str:
    return describe(port.dtype, port.shape)


def _slot_typed(slot: Slot) -> str:
    return f"{slot.kind} {describe(slot.dtype, slot.shape)}, {slot.growth}, {slot.carry}"


def _listed(axes: Iterable[str]) -> str:
    return f"[{', '.join(axes)}]"
