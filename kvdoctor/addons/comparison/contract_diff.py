"""Compares two cache contracts: would a loop written for A work with B?

Every difference that requires a change of the loop is worse: an input or output that is removed, renamed, or of another
type or layout, a new input, another carry rule, another first step. Sizes count if the loop makes the tensor (inputs
and pasts). Properties that a loop can read from B have no effect: names of axes, the size of the vocabulary, the
arithmetic.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvdoctor.addons.comparison.document import Difference, Effect
from kvdoctor.contract import DECODING, OF_FEATURES, Axis, CacheContract, Dim, Graph, PhaseName, Port, Slot, describe
from kvdoctor.records import record

T = TypeVar("T")
PHASES: tuple[PhaseName, ...] = ("encode", "embed", *OF_FEATURES, *DECODING)
SLOT_ROLES = ("past", "present")
"""Roles of the ports that are compared as slots."""
LAYER_MARKS = re.compile(r"\d+|key|value", re.ASCII)
"""The parts in which the names of slots of one kind differ."""


@record
class _Subject:
    """What is compared: a stack, an input, an output or a slot, by its name in A."""

    what: str
    name: str = ""

    def neutral(self, field: str, old: object, new: object) -> Iterator[Difference]:
        """A value without an effect on the loop."""
        yield from self._compare(field, old, new, "neutral", "")

    def worse(self, field: str, old: object, new: object, because: str) -> Iterator[Difference]:
        """A value that a loop written for A depends on."""
        yield from self._compare(field, old, new, "worse", because)

    def _compare(self, field: str, old: object, new: object, effect: Effect, because: str) -> Iterator[Difference]:
        if old != new:
            before, after = ("none" if value is None else str(value) for value in (old, new))
            yield Difference(self.what, (self.name,) if self.name else (), field, before, after, effect, because)


def compare_contracts(a: CacheContract, b: CacheContract) -> tuple[Difference, ...]:
    """The differences of the contract of B from that of A."""
    return group_layers([*_compare_stacks(a, b), *_compare_graphs(a, b), *_compare_slots(a, b), *_axis_names(a, b)])


def group_layers(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Merge the same difference of several layers into one, with all their names in `subject`."""
    found: dict[object, Difference] = {}
    for difference in differences:
        key: object = difference
        if difference.what != "operator":
            # Names of renamed tensors are compared without their layer and part.
            renamed = difference.field in ("name", "past", "present", "filled by", "keeps")
            sides = (difference.before, difference.after)
            unnumbered = tuple(LAYER_MARKS.sub("", side) if renamed and side is not None else side for side in sides)
            key = (difference.what, difference.field, *unnumbered, difference.effect, difference.because)
        known = found.get(key)
        merged = difference if known is None else replace(known, subject=(*known.subject, *difference.subject))
        found[key] = merged
    return tuple(found.values())


def _compare_stacks(a: CacheContract, b: CacheContract) -> Iterator[Difference]:
    stack = _Subject("stack")
    yield from stack.neutral("layout", a.layout, b.layout)
    why = "a loop written for A makes another first call"
    yield from stack.worse("first step", a.first_step, b.first_step, why)
    before, after = (" + ".join(one.file for one in side.graph("decode").stages) or None for side in (a, b))
    yield from stack.worse("stages", before, after, "a loop written for A calls other files in turn")
    yield from stack.worse("codebooks", a.codebooks, b.codebooks, "each step takes another number of token rows")
    yield from stack.neutral("arithmetic", a.exactness, b.exactness)
    yield from stack.neutral("vocabulary", a.vocabulary, b.vocabulary)
    yield from stack.neutral("context", a.context_limit, b.context_limit)
    for phase in PHASES:
        if phase in a.phases and phase not in b.phases:
            why = "a loop written for A runs it"
            yield Difference("graph", (a.graph(phase).file,), "", f"serves {phase}", None, "worse", why)
        elif phase in b.phases and phase not in a.phases:
            yield Difference("graph", (b.graph(phase).file,), "", None, f"serves {phase}")


def _compare_graphs(a: CacheContract, b: CacheContract) -> Iterator[Difference]:
    """The ports of graphs that serve the same phase. Two phases of one graph are compared once."""
    compared = []
    for phase in PHASES:
        if phase not in a.phases or phase not in b.phases:
            continue
        pair = (a.phases[phase].graph, b.phases[phase].graph)
        # One graph instead of two: the first step differs, which is reported already, and so do its ports.
        if pair not in compared and not (phase == "prefill" and a.first_step != b.first_step):
            compared.append(pair)
            yield from _compare_ports(a.graph(phase), b.graph(phase))


def _compare_ports(a: Graph, b: Graph) -> Iterator[Difference]:
    for what, old, new in (("input", a.inputs, b.inputs), ("output", a.outputs, b.outputs)):
        old_ports = [port for port in old if port.role not in SLOT_ROLES]
        new_ports = [port for port in new if port.role not in SLOT_ROLES]
        pairs = _match(old_ports, new_ports, lambda port: port.name, lambda port: port.role)
        for before, after in pairs:
            yield from _compare_port(what, before, after)


def _compare_port(what: str, a: Port | None, b: Port | None) -> Iterator[Difference]:
    if b is None and a is not None:
        why = f"a loop written for A {'feeds' if what == 'input' else 'reads'} it"
        yield Difference(what, (a.name,), "", describe(a.dtype, a.shape), None, "worse", why)
    elif a is None and b is not None:
        effect: Effect = "worse" if what == "input" else "neutral"
        why = "a loop written for A does not feed it"
        yield Difference(what, (b.name,), "", None, describe(b.dtype, b.shape), effect, why)
    elif a is not None and b is not None:
        subject = _Subject(what, a.name)
        yield from subject.worse("name", a.name, b.name, "a loop written for A uses the old name")
        yield from subject.worse("role", a.role, b.role, "the same name has another role")
        yield from subject.worse("value", a.value, b.value, "a loop written for A feeds another value")
        yield from _compare_types(subject, (a.dtype, a.shape, a.axes), (b.dtype, b.shape, b.axes))


def _compare_slots(a: CacheContract, b: CacheContract) -> Iterator[Difference]:
    pairs = _match(a.slots, b.slots, lambda slot: slot.past, lambda slot: (slot.kind, slot.layer, slot.part))
    for before, after in pairs:
        if before is not None and after is not None:
            yield from _compare_slot(before, after)
        elif (one := before or after) is not None:
            why = f"a loop written for A {'carries' if one is before else 'does not carry'} it"
            text = f"{one.kind} {describe(one.dtype, one.shape)}, {one.growth}, {one.carry}"
            gone, came = (text, None) if one is before else (None, text)
            yield Difference("slot", (one.past,), "", gone, came, "worse", why)


def _compare_slot(a: Slot, b: Slot) -> Iterator[Difference]:
    subject, renamed = _Subject("slot", a.past), "a loop written for A uses the old name"
    rule = "a loop written for A applies the old rule"
    yield from subject.worse("past", a.past, b.past, renamed)
    if a.present is None:
        yield from subject.neutral("present", a.present, b.present)
    else:
        gone = "a loop written for A reads it" if b.present is None else renamed
        yield from subject.worse("present", a.present, b.present, gone)
    if a.filled_by is not None and b.filled_by is not None and a.filled_by != a.present:
        yield from subject.worse("filled by", a.filled_by, b.filled_by, renamed)
    yield from subject.worse("keeps", _identity(a), _identity(b), "the same name has other content")
    yield from subject.worse("carry", a.carry, b.carry, rule)
    yield from subject.worse("growth", a.growth, b.growth, rule)
    why = "a loop written for A feeds another value at the first step"
    yield from subject.worse("first step", a.first, b.first, why)
    yield from subject.neutral("window", a.window, b.window)
    yield from subject.neutral("emptied by each step", a.emptied, b.emptied)
    yield from _compare_types(subject, (a.dtype, a.shape, a.axes), (b.dtype, b.shape, b.axes))


_Type = tuple[str, tuple[Dim, ...] | None, tuple[Axis, ...]]


def _compare_types(subject: _Subject, a: _Type, b: _Type) -> Iterator[Difference]:
    (dtype, shape, axes), (new_dtype, new_shape, new_axes) = a, b
    yield from subject.worse("dtype", dtype, new_dtype, "a loop written for A makes or reads another type")
    if axes != new_axes:
        same = len(axes) == len(new_axes)
        why = f"a loop written for A uses another {'order or meaning of the axes' if same else 'rank'}"
        before, after = (f"[{', '.join(listed)}]" for listed in (axes, new_axes))
        yield from subject.worse("layout" if same else "rank", before, after, why)
    elif shape is not None and new_shape is not None and len(shape) == len(new_shape) == len(axes):
        for axis, old, new in zip(axes, shape, new_shape, strict=True):
            yield from _compare_size(subject, axis, old, new)


def _compare_size(subject: _Subject, axis: Axis, old: Dim, new: Dim) -> Iterator[Difference]:
    """One axis. A loop can read the size of an output; a tensor that it makes itself has the old size."""
    if old == new or not (isinstance(old, int) or isinstance(new, int)):
        return
    before, after = ("any" if not isinstance(size, int) else str(size) for size in (old, new))
    field = f"size of {axis}"
    if subject.what == "output":
        yield from subject.neutral(field, before, after)
    elif after == "any":
        yield Difference(subject.what, (subject.name,), field, before, after, "better")
    else:
        yield from subject.worse(field, before, after, "a loop written for A makes it with the old size")


def _axis_names(a: CacheContract, b: CacheContract) -> Iterator[Difference]:
    """The names of the dynamic axes, by their meaning."""
    old, new = _dynamic_names(a), _dynamic_names(b)
    for axis in old:
        if axis in new and old[axis] != new[axis]:
            before, after = (" or ".join(sorted(found)) for found in (old[axis], new[axis]))
            yield Difference("axis", (axis,), "name", before, after)


def _dynamic_names(contract: CacheContract) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for graph in contract.graphs.values():
        for port in graph.inputs:
            for axis, size in zip(port.axes, port.shape or (), strict=False):
                if not isinstance(size, int):
                    found.setdefault(axis, set()).add(size or "(unnamed)")
    return found


def _match(
    old: Sequence[T], new: Sequence[T], name: Callable[[T], object], meaning: Callable[[T], object]
) -> Iterator[tuple[T | None, T | None]]:
    """Match by name, otherwise by a meaning that only one unmatched item of each side has."""
    names = {name(one): one for one in new}
    left = {name(one) for one in new} - {name(one) for one in old}
    for one in old:
        if name(one) in names:
            yield one, names[name(one)]
            continue
        equal = [other for other in new if name(other) in left and meaning(other) == meaning(one)]
        rivals = [rival for rival in old if name(rival) not in names and meaning(rival) == meaning(one)]
        found = equal[0] if len(equal) == len(rivals) == 1 else None
        left -= {name(found)} if found is not None else set()
        yield one, found
    for other in new:
        if name(other) in left:
            yield None, other


def _identity(slot: Slot) -> str:
    layer = "all layers" if slot.layer is None else f"layer {slot.layer}"
    return f"{slot.kind}, {layer}, {slot.part}"
