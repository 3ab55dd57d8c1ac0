"""Parts of values: cut out along an axis, picked from one, joined along one, or written over."""

from collections.abc import Sequence
from dataclasses import replace

from kvdoctor.analysis.proof.call import Made, Reading, Rule, is_calm, known, refuse
from kvdoctor.analysis.proof.shaping import viewed
from kvdoctor.analysis.proof.types import (
    ONE,
    PAST,
    UNKNOWN,
    ZERO,
    Axis,
    Lengths,
    Linear,
    Term,
    Type,
    axis_of,
    constant_of,
    is_fixed,
    linear_of,
    number,
    plain_number,
    size_of,
)


def slice_(call: Reading) -> Made:
    """Slice: a part along each of some axes."""
    taken, shape = call.input(0), call.input(0).shape
    bounds = _read_bounds(call)
    if shape is None or bounds is None:
        return _every_so_many(call)
    found, rank, extra, last = taken, len(shape), [], False
    for axis, start, end in bounds:
        at = axis % rank
        cut = _cut(call, found, at, start, end)
        if cut is None:
            return Made(UNKNOWN)
        found, kept, only = cut
        extra += [] if kept else [(at - rank, start.parts, end.parts)]
        last = last or only
    if last:
        return Made(found, ("last",)) if not extra else Made(replace(found, uniform=False))
    return Made(found, ("steps", ("slice", *extra)) if extra else 0)


def _every_so_many(call: Reading) -> Made:
    """A slice in steps, along one axis that is the same in all calls."""
    taken = call.input(0)
    parts = [call.numbers(at) for at in range(1, 5)]
    if not taken.shape or any(part is None or len(part) != 1 for part in parts):
        return Made(UNKNOWN)
    (start,), (end,), (axis,), (step,) = [part for part in parts if part is not None]
    at = axis % len(taken.shape)
    whole = known(size_of(taken.shape[at]).number)
    count = len(range(whole)[slice(start, end if -whole <= end < 1 << 31 else None if step > 0 else end, step)])
    shape = (*taken.shape[:at], axis_of(number(count)), *taken.shape[at + 1 :])
    where = (at - len(shape), start, end, step)
    return Made(call.opaque(shape, [taken], taken.kind, is_calm(taken)), ("steps", ("slice", where)))


def _read_bounds(call: Reading) -> list[tuple[int, Term, Term]] | None:
    """The axis, start and end of each part; None where they are unknown or leave out elements between."""
    node = call.node
    listed = enumerate((node.numbers("starts"), node.numbers("ends")), 1)
    starts, ends = (call.input(at).items if one is None else tuple(map(number, one)) for at, one in listed)
    if starts is None or ends is None or len(starts) != len(ends):
        return None
    axes = call.numbers(3, "axes") if call.has(3) or node.numbers("axes") is not None else list(range(len(starts)))
    steps = call.numbers(4) if call.has(4) else [1] * len(starts)
    if axes is None or steps is None or set(steps) != {1} or len(axes) != len(starts):
        return None
    return list(zip(axes, starts, ends, strict=True))


def _cut(call: Reading, taken: Type, at: int, start: Term, end: Term) -> tuple[Type, bool, bool] | None:
    """A part of a value, whether it is the same function of absolute positions, and whether it is the last token.

    None where its bounds are unknown.
    """
    lengths, shape = call.lengths, taken.shape or ()
    whole = size_of(shape[at])
    begin, stop = _resolve(lengths, start, whole), _resolve(lengths, end, whole)
    if begin is None or stop is None:
        return None
    stop = whole if lengths.at_least(stop - whole, 0) else stop
    if lengths.equal(begin, ZERO) and lengths.equal(stop, whole):
        return taken, True, False
    if not lengths.at_least(begin, 0) or not lengths.at_least(stop - begin, 0):
        return None
    if not lengths.at_least(whole - stop, 0) and (whole.number is None or not _limit(call, whole.number, stop)):
        return None
    return _take(call, taken, at, begin, stop)


def _take(call: Reading, taken: Type, at: int, begin: Term, stop: Term) -> tuple[Type, bool, bool]:
    """The same for bounds that are counted from the start."""
    lengths, old_shape = call.lengths, taken.shape or ()
    old, new = old_shape[at], axis_of(stop - begin)
    shape, where = (*old_shape[:at], new, *old_shape[at + 1 :]), at - len(old_shape)
    linear = _shifted(taken.linear, where, begin) if taken.linear is not None else None
    fixed = begin.number is not None and stop.number is not None
    if taken.items is not None and fixed and len(shape) == 1:
        return Type(taken.kind, shape, items=taken.items[begin.number : stop.number], linear=linear), False, False
    if linear is not None:
        return replace(taken, shape=shape, linear=linear, items=None), True, False
    alone = not any(map(lengths.counts, shape))  # the key of the last token says nothing of earlier ones
    if not new and old in ((lengths.new,), (lengths.total,)) and stop is size_of(old) and alone:
        return Type(taken.kind, shape, uniform=taken.uniform, calm=taken.calm, last=True), True, True
    whole, first, then = replace(taken, items=None), lengths.offset(old), lengths.offset(new)
    # A part of a table along tokens is taken by indexes, which are no positions where tokens are padded.
    counts = new and not is_fixed(new) and lengths.is_padded(new) == lengths.is_padded(old)
    if counts and first is not None and then is not None and first + begin is then:
        return call.opaque(shape, [whole], taken.kind, taken.calm, taken.regions), True, False
    if lengths.is_even(old) and fixed:
        regions = tuple(one for one in taken.regions if where not in one[0])
        made = call.opaque(shape, [whole], taken.kind, taken.calm, regions)
        return replace(made, past=taken.past), False, False
    return Type(taken.kind, shape), True, False


def _shifted(linear: Linear, at: int, begin: Term) -> Linear:
    """A linear function that counts from another index along an axis."""
    start, factors = linear
    factor = dict(factors).get(at, 0)
    if not factor or isinstance(start, float):
        return linear
    return start + begin.times(factor), factors


def _resolve(lengths: Lengths, bound: Term, whole: Term) -> Term | None:
    """A bound of a slice, counted from the start; None where it is unknown whether it counts from the end."""
    if bound.number is not None and abs(bound.number) >= (1 << 31) - 1:
        return whole if bound.number > 0 else ZERO
    if lengths.at_least(bound, 0):
        return bound
    return whole + bound if lengths.at_least(bound.times(-1), 1) else None


def _limit(call: Reading, rows: int, end: Term) -> bool:
    """Note that a table of some rows must reach up to an end: whether that is a limit of the total."""
    rest = (end - call.lengths.total).number
    if rest is None and call.lengths.at_least(call.lengths.total - end, 0):
        rest = 0
    if rest is not None:
        call.limits.append((rows - rest, 0))
    return rest is not None


def gather(call: Reading) -> Made:
    """Gather: entries along an axis."""
    call.inputs = [call.input(0), _with_row(call, call.input(1))]
    data, places, axes = call.input(0), call.input(1), call.axes(0, 1)
    at = call.node.number("axis", 0) % len(axes)
    shape = (*axes[:at], *call.axes(1), *axes[at + 1 :])
    value = constant_of(data)
    if value is not None:
        return Made(Type(data.kind, shape, linear=(value, ())))
    if data.items is not None and len(axes) == 1 and places.items is not None:
        picked = [one.number for one in places.items]
        if all(one is not None and -len(data.items) <= one < len(data.items) for one in picked):
            return Made(Type(data.kind, shape, items=tuple(data.items[one] for one in picked if one is not None)))
    if call.lengths.is_even(axes[at]):
        return _gather_rows(call, data, at, shape)
    index = linear_of(places)
    if index is not None and not places.shape:
        return _gather_last(call, data, at, index, shape)
    return Made(Type(data.kind, shape))


def _with_row(call: Reading, places: Type) -> Type:
    """Places of a graph for one new token: where they are its position and so much, the last axis counts it."""
    start = constant_of(places)
    by = dict(start.parts).get((PAST,), 0) if isinstance(start, Term) else 0
    if not call.lengths.single or not by or not places.shape or places.shape[-1]:
        return places
    return Type(places.kind, (*places.shape[:-1], (call.lengths.new,)), linear=(start or ZERO, ((-1, by),)))


def gather_nd(call: Reading) -> Made:
    """GatherND: rows of a table, or elements that are all one number."""
    data, places, axes, listed = call.input(0), call.input(1), call.axes(0, 1), call.axes(1, 1)
    deep, value = known(size_of(listed[-1]).number), constant_of(data)
    shape = (*listed[:-1], *axes[deep:])
    refuse(call.node.number("batch_dims", 0))
    if value is not None:
        return Made(Type(data.kind, shape, linear=(value, ())))
    own = tuple((ZERO, ((at - len(listed), 1),)) for at, axis in enumerate(listed[:-1]) if axis)
    if places.grid == own and tuple(axis for axis in listed[:-1] if axis) == axes:
        return viewed(call, data, [size_of(axis) for axis in shape])  # each element at its own place
    if deep > 1:
        whole = all(map(call.lengths.is_even, axes[:deep]))
        return Made(call.opaque(shape, [data, places], data.kind, is_calm(data)) if whole else Type(data.kind, shape))
    call.inputs = [data, viewed(call, places, [size_of(axis) for axis in listed[:-1]]).type]
    return gather(call)


def _gather_rows(call: Reading, data: Type, at: int, shape: tuple[Axis, ...]) -> Made:
    """Rows of a table: by a number, by position, or by token."""
    places, rank = call.input(1), len(data.shape or ())
    index, regions, how = linear_of(places), data.regions[:0], None
    rows = size_of((data.shape or ())[at]).number
    if rows is not None and (plain_number(constant_of(places)) or 0) < 0 and index and isinstance(index[0], Term):
        index = number(rows) + index[0], ()
    if index is not None and index[1]:
        absolute = call.lengths.absolute(places)
        if absolute is None or rows is None or not _limits_rows(call, absolute, rows):
            return Made(Type(data.kind, shape))
        how = "gathered", at - rank, absolute
        if len(places.shape or ()) == 1 and absolute[0] is ZERO:
            regions = data.regions
    if index is not None and not index[1] and not _is_within(call, index[0], (data.shape or ())[at]):
        return Made(Type(data.kind, shape))
    if data.linear is not None and index is not None and dict(data.linear[1]).keys() <= {at - rank}:
        return _gather_linear(data, index, at, shape)
    if data.past and index is not None and isinstance(index[0], Term) and not places.shape:
        return _pick(call, data, at, index[0])
    taken = [replace(data, items=None) if data.linear else data, places]
    return Made(call.opaque(shape, taken, data.kind, is_calm(data), regions), how)


def _pick(call: Reading, data: Type, at: int, place: Term) -> Made:
    """One of the pasts that are stacked along an axis."""
    axes = data.shape or ()
    cut = _take(call, data, at, place, place + ONE)[0]
    made = viewed(call, cut, [size_of(axis) for n, axis in enumerate(axes) if n != at])
    bound = ("slice", (at - len(axes), place.parts, (place + ONE).parts))
    return Made(made.type, ("steps", bound, *(made.how[1:] if isinstance(made.how, tuple) else ())))


def _is_within(call: Reading, place: Term | float, axis: Axis) -> bool:
    """Whether one place is in a table, and not counted from its end; notes the total up to which it is."""
    rows = size_of(axis).number
    if isinstance(place, float) or rows is None or not call.lengths.at_least(place, 0):
        return False
    return place.number < rows if place.number is not None else _limit(call, rows, place + ONE)


def gather_elements(call: Reading) -> Made:
    """GatherElements: rows of a table by position or token, where all other axes are those of the places."""
    data, places, axes, shape = call.input(0), call.input(1), call.axes(0, 1), call.axes(1, 1)
    at = call.node.number("axis", 0) % len(axes)
    others = all(one == other for n, (one, other) in enumerate(zip(axes, shape, strict=True)) if n != at)
    index = linear_of(places)
    if index is not None and index[1]:
        absolute, rows = call.lengths.absolute(places), size_of(axes[at]).number
        others = others and absolute is not None and rows is not None and _limits_rows(call, absolute, rows)
    if not others or not call.lengths.is_even(axes[at]):
        return Made(Type(data.kind, shape))
    return Made(call.opaque(shape, [data, places], data.kind, is_calm(data)))


def _gather_linear(data: Type, index: Linear, at: int, shape: tuple[Axis, ...]) -> Made:
    """Entries of a table that counts: the index itself, in steps."""
    start, factors = data.linear or (ZERO, ())
    by = dict(factors).get(at - len(data.shape or ()), 0)
    after = len(data.shape or ()) - at - 1
    if isinstance(start, float) or isinstance(index[0], float):
        return Made(Type(data.kind, shape))
    linear = (start + index[0].times(by), tuple((one - after, factor * by) for one, factor in index[1] if by))
    return Made(Type(data.kind, shape, linear=linear))


def _gather_last(call: Reading, data: Type, at: int, index: Linear, shape: tuple[Axis, ...]) -> Made:
    """One entry along an axis of tokens: that of the last one is known."""
    whole = size_of((data.shape or ())[at])
    place = _resolve(call.lengths, index[0], whole) if isinstance(index[0], Term) else None
    axis = (data.shape or ())[at]
    if place is None or axis not in ((call.lengths.new,), (call.lengths.total,)) or data.linear is not None:
        return Made(Type(data.kind, shape))
    if not call.lengths.equal(place, whole - ONE) or any(map(call.lengths.counts, shape)):
        return Made(Type(data.kind, shape))
    return Made(Type(data.kind, shape, uniform=call.lengths.is_uniform(data), calm=data.calm, last=True), ("last", at))


def _limits_rows(call: Reading, absolute: Linear, rows: int) -> bool:
    """Note the total up to which a table has a row for each position."""
    start, factors = absolute
    if not isinstance(start, Term) or len(factors) != 1 or factors[0][1] != 1:
        return False
    return call.lengths.at_least(start, 0) and _limit(call, rows, call.lengths.total + start)


def concat(call: Reading) -> Made:
    """Concat: values one after another along an axis."""
    taken = call.given
    shapes = [known(one.shape) for one in taken]
    at, kind = call.node.number("axis", 0) % max(len(shapes[0]), 1), taken[0].kind
    if all(one.items is not None for one in taken) and len(shapes[0]) == 1:
        items = tuple(item for one in taken for item in one.items or ())
        return Made(Type(kind, (axis_of(number(len(items))),), items=items))
    size = sum((size_of(shape[at]) for shape in shapes), ZERO)
    refuse(any(len(shape) != len(shapes[0]) for shape in shapes))
    others = call.broadcast([Type(kind, (*shape[:at], (), *shape[at + 1 :])) for shape in shapes])
    shape = (*others[:at], axis_of(size), *others[at + 1 :])
    values = {constant_of(one) for one in taken}
    value = constant_of(taken[0])
    if len(values) == 1 and value is not None:
        return Made(Type(kind, shape, linear=(value, ())))
    if len(taken) == 1:
        return Made(taken[0], 0)
    if all(call.lengths.is_even(one[at]) for one in shapes):
        made = call.opaque(shape, taken, kind, all(map(is_calm, taken)))
        if at == len(shape) - 1 and kind == "i":
            listed = [one.linear for one in taken if one.linear is not None and one.shape and not one.shape[-1]]
            return Made(replace(made, grid=tuple(listed) if len(listed) == len(taken) else ()))
        sizes = tuple(size_of(one[at]).number for one in shapes)
        return Made(made, ("concat", at - len(shape), sizes) if None not in sizes else None)
    return _join_tokens(call, taken, shapes, at, shape)


def scatter(call: Reading) -> Made:
    """ScatterND that writes over every element, each at its own place."""
    data, places, updates = (call.input(at) for at in range(3))
    if data.shape is None or places.shape is None or updates.shape != data.shape:
        return Made(UNKNOWN if data.shape is None else Type(data.kind, data.shape))
    rank = len(data.shape)
    own = tuple((ZERO, ((at - rank - 1, 1),) if axis else ()) for at, axis in enumerate(data.shape))
    reduction = call.node.attribute("reduction")
    whole = places.grid == own and places.shape[:-1] == data.shape and (reduction is None or reduction.s == b"none")
    return Made(updates, 2) if whole else Made(Type(data.kind, data.shape))


def _join_tokens(
    call: Reading, taken: list[Type], shapes: Sequence[Sequence[Axis]], at: int, shape: tuple[Axis, ...]
) -> Made:
    """The past and the new tokens; in the first call the past is empty."""
    lengths, kind = call.lengths, taken[0].kind
    if len(taken) != 2 or shapes[0][at] != (lengths.past,) or shapes[1][at] != (lengths.new,):
        return Made(Type(kind, shape))
    past, new = taken
    where = at - len(shape)
    if past.past and not new.last:
        return Made(call.opaque(shape, taken, kind, is_calm(new)), ("join",))
    value = plain_number(constant_of(past))
    if value is None or not new.uniform:
        return Made(Type(kind, shape))
    # A mask with the same number for the whole past: that of all earlier tokens among the new ones.
    columns = [one for one in new.regions if one[0][1] == where and one[1][2] == value]
    rows = [one for one in columns if shape[one[0][0]] == (lengths.new,)]
    if len(rows) != 1:
        return Made(Type(kind, shape))
    return Made(call.opaque(shape, [new], kind, new.calm, tuple(rows)), 1)


def split(call: Reading) -> Made | list[Made]:
    """Split: parts along an axis that is the same in all calls."""
    taken, axes, count = call.input(0), call.axes(0), len(call.node.outputs)
    at = call.node.number("axis", 0) % len(axes)
    whole, sizes = known(size_of(axes[at]).number), call.numbers(1, "split")
    if sizes is None and (call.has(1) or whole % count):
        return []
    sizes, found, begin = sizes or [whole // count] * count, [], 0
    for size in sizes:
        cut = _cut(call, replace(taken, regions=()), at, number(begin), number(begin + size))
        bounds = (at - len(axes), number(begin).parts, number(begin + size).parts)
        found.append(Made(cut[0], ("steps", ("slice", bounds))) if cut is not None else Made(UNKNOWN))
        begin += size
    return found


RULES: dict[str, Rule] = {
    "Slice": slice_,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Concat": concat,
    "ScatterND": scatter,
    "Split": split,
}
