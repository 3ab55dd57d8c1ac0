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
from kvdoctor.contract import DECODING, OF_FEATURES, CacheContract, Graph, PhaseName, Port, Slot, describe
from kvdoctor.report.facts import FileFacts

T = TypeVar("T")
OLD_NAME = "a loop written for A uses the old name"
PHASES: tuple[PhaseName, ...] = ("encode", "embed", *OF_FEATURES, *DECODING)
SLOT_ROLES = ("past", "present")
"""Roles of the ports that are compared as slots."""
LAYER_MARKS = re.compile(r"\d+|key|value", re.ASCII)
"""The parts in which the names of slots of one kind differ."""


Change = tuple[str, object, object, str | None]
"""A field, its values in A and in B, and why another value makes B worse; empty where no loop depends on it, None where
it makes B better."""


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
    before, after = (" + ".join(one.file for one in side.graph("decode").stages) or None for side in (a, b))
    changes: tuple[Change, ...] = (
        ("layout", a.layout, b.layout, ""),
        ("first step", a.first_step, b.first_step, "a loop written for A makes another first call"),
        ("stages", before, after, "a loop written for A calls other files in turn"),
        ("codebooks", a.codebooks, b.codebooks, "each step takes another number of token rows"),
        ("arithmetic", a.exactness, b.exactness, ""),
        ("vocabulary", a.vocabulary, b.vocabulary, ""),
        ("context", a.context_limit, b.context_limit, ""),
    )
    yield from _list_changes("stack", "", changes)
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
        pairs = pair_up(old_ports, new_ports, lambda port: port.name, lambda port: port.role, single=True)
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
        changes: tuple[Change, ...] = (
            ("name", a.name, b.name, OLD_NAME),
            ("role", a.role, b.role, "the same name has another role"),
            ("value", a.value, b.value, "a loop written for A feeds another value"),
        )
        yield from _list_changes(what, a.name, (*changes, *_compare_types(what, a, b)))


def _compare_slots(a: CacheContract, b: CacheContract) -> Iterator[Difference]:
    pairs = pair_up(
        a.slots, b.slots, lambda slot: slot.past, lambda slot: (slot.kind, slot.layer, slot.part), single=True
    )
    for before, after in pairs:
        if before is not None and after is not None:
            yield from _compare_slot(before, after)
        elif (one := before or after) is not None:
            why = f"a loop written for A {'carries' if one is before else 'does not carry'} it"
            text = f"{one.kind} {describe(one.dtype, one.shape)}, {one.growth}, {one.carry}"
            gone, came = (text, None) if one is before else (None, text)
            yield Difference("slot", (one.past,), "", gone, came, "worse", why)


def _compare_slot(a: Slot, b: Slot) -> Iterator[Difference]:
    rule = "a loop written for A applies the old rule"
    filled = a.filled_by is not None and b.filled_by is not None and a.filled_by != a.present
    read = "a loop written for A reads it" if b.present is None else OLD_NAME
    changes: tuple[Change, ...] = (
        ("past", a.past, b.past, OLD_NAME),
        ("present", a.present, b.present, "" if a.present is None else read),
        *((("filled by", a.filled_by, b.filled_by, OLD_NAME),) if filled else ()),
        ("keeps", _identity(a), _identity(b), "the same name has other content"),
        ("carry", a.carry, b.carry, rule),
        ("growth", a.growth, b.growth, rule),
        ("first step", a.first, b.first, "a loop written for A feeds another value at the first step"),
        ("window", a.window, b.window, ""),
        ("emptied by each step", a.emptied, b.emptied, ""),
    )
    yield from _list_changes("slot", a.past, (*changes, *_compare_types("slot", a, b)))


def _list_changes(what: str, name: str, changes: Iterable[Change]) -> Iterator[Difference]:
    for field, old, new, because in changes:
        if old != new:
            before, after = ("none" if value is None else str(value) for value in (old, new))
            effect: Effect = "better" if because is None else "worse" if because else "neutral"
            yield Difference(what, (name,) if name else (), field, before, after, effect, because or "")


def _compare_types(what: str, a: Port | Slot, b: Port | Slot) -> Iterator[Change]:
    yield "dtype", a.dtype, b.dtype, "a loop written for A makes or reads another type"
    if a.axes != b.axes:
        same = len(a.axes) == len(b.axes)
        why = f"a loop written for A uses another {'order or meaning of the axes' if same else 'rank'}"
        before, after = (f"[{', '.join(one.axes)}]" for one in (a, b))
        yield "layout" if same else "rank", before, after, why
    elif a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape) == len(a.axes):
        for axis, old, new in zip(a.axes, a.shape, b.shape, strict=True):
            # A loop can read the size of an output; a tensor that it makes itself has the old size.
            before, after = ("any" if not isinstance(size, int) else str(size) for size in (old, new))
            made = "a loop written for A makes it with the old size" if after != "any" else None
            yield f"size of {axis}", before, after, "" if what == "output" else made


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


def _identity(slot: Slot) -> str:
    layer = "all layers" if slot.layer is None else f"layer {slot.layer}"
    return f"{slot.kind}, {layer}, {slot.part}"


def compare_graphs(a: Sequence[FileFacts], b: Sequence[FileFacts]) -> tuple[Difference, ...]:
    """The differences between the files of a stack. Files are matched by their role, then by their name."""
    found = list[Difference]()
    for old, new in match_files(a, b):
        if old is not None and new is not None:
            found += _compare_file(old, new)
        elif (one := old or new) is not None:
            found.append(Difference("file", (one.path,), "", old.role if old else None, new.role if new else None))
    return group_layers(found)


def match_files(a: Sequence[FileFacts], b: Sequence[FileFacts]) -> Iterator[tuple[FileFacts | None, FileFacts | None]]:
    """Pair the files of both sides: by role and name, then by role, then by name; one of each side in any case."""
    keys = (lambda file: (file.role, file.path), lambda file: file.role, lambda file: file.path)
    return pair_up(a, b, *keys, rest=len(a) == 1)


def pair_up(
    a: Sequence[T], b: Sequence[T], *keys: Callable[[T], object], rest: bool = False, single: bool = False
) -> Iterator[tuple[T | None, T | None]]:
    """Pair what has the same key, the first key first: those of A in order, then those of B that are left.

    With `single` a key pairs only what is left with it once on each side, with `rest` the last one of each side is
    paired as well.
    """
    left, pairs = list(b), dict[int, T]()
    for key in keys:
        open_keys = [key(old) for at, old in enumerate(a) if at not in pairs]
        for at, old in enumerate(a):
            fits = [new for new in left if key(new) == key(old)] if at not in pairs else []
            if fits and not (single and (len(fits) > 1 or open_keys.count(key(old)) > 1)):
                pairs[at] = fits[0]
                left.remove(fits[0])
    alone = [at for at in range(len(a)) if at not in pairs]
    if rest and len(alone) == len(left) == 1:
        pairs[alone[0]] = left.pop()
    yield from ((old, pairs.get(at)) for at, old in enumerate(a))
    yield from ((None, new) for new in left)


def _compare_file(a: FileFacts, b: FileFacts) -> Iterator[Difference]:
    file = ("file", a.path)
    found: list[tuple[tuple[str, str], str, object, object]] = [
        (file, "name", a.path, b.path),
        (file, "role", a.role, b.role),
        (file, "IR version", a.ir_version, b.ir_version),
    ]
    domains = dict.fromkeys([*a.opsets, *b.opsets])
    found += ((file, f"opset {one or 'ai.onnx'}", a.opsets.get(one), b.opsets.get(one)) for one in domains)
    found.append((file, "producer", a.producer or None, b.producer or None))
    if (old := a.graph) is not None and (new := b.graph) is not None:
        found.append((file, "nodes", old.nodes, new.nodes))
        kinds = sorted({*old.operators, *new.operators})
        found += ((("operator", op), f"in {a.path}", old.operators.get(op), new.operators.get(op)) for op in kinds)
        found.append((file, "initializers", old.initializers, new.initializers))
        found.append((file, "bytes of initializers", old.initializer_bytes, new.initializer_bytes))
    if a.sha256 is not None and b.sha256 is not None:
        found.append((file, "SHA-256", a.sha256, b.sha256))
    for (what, name), field, one, other in found:
        if one != other:
            before, after = (None if value is None else str(value) for value in (one, other))
            yield Difference(what, (name,), field, before, after)
