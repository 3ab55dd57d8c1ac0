"""Values that are moved, or made from lengths: other axes, axes in another order, shapes, numbers that count."""

from collections.abc import Sequence
from dataclasses import replace

from kvdoctor.analysis.proof.call import Made, Reading, Rule, is_calm, known, refuse, regroup
from kvdoctor.analysis.proof.constants import read_constant
from kvdoctor.analysis.proof.types import (
    MOST_ITEMS,
    ONE,
    UNKNOWN,
    ZERO,
    Axis,
    Region,
    Term,
    Type,
    axis_of,
    constant_of,
    linear_of,
    number,
    product,
    size_of,
)


def moved(call: Reading, shape: Sequence[Axis], axes: dict[int, int], taken: Type) -> Type:
    """A value under other axes: `axes` maps each old axis of more than one element to the new one, from the end."""
    linear = taken.linear
    if linear is not None:
        if any(at not in axes for at, _ in linear[1]):
            return call.opaque(shape, [taken], taken.kind, is_calm(taken))
        linear = (linear[0], tuple(sorted((axes[at], factor) for at, factor in linear[1])))
    regions: list[Region] = []
    for (row, column), marks in taken.regions:
        if row in axes and column in axes:
            regions.append(((axes[row], axes[column]), marks))
    if linear is not None or taken.items is not None:
        return replace(taken, shape=tuple(shape), linear=linear, regions=tuple(regions), past=False)
    return replace(call.opaque(shape, [taken], taken.kind, taken.calm, tuple(regions)), past=taken.past)


def viewed(call: Reading, taken: Type, targets: Sequence[Term]) -> Made:
    """A value under another shape, with as many elements."""
    old = known(taken.shape)
    shape = regroup(old, targets)
    if shape is None:
        as_many = call.lengths.equal(product(map(size_of, old)), product(targets))
        known(constant_of(taken) if as_many else None)
        shape = tuple(map(axis_of, targets))
    made = moved(call, shape, _match(old, shape), taken)
    same, canonical = _stripped(old) == _stripped(shape), call.lengths.canonical
    return Made(made, 0 if same else ("steps", ("view", canonical(old), canonical(shape))))


def _stripped(shape: Sequence[Axis]) -> tuple[Axis, ...]:
    """A shape as a value is broadcast: without leading axes of one element."""
    at = next((at for at, axis in enumerate(shape) if axis), len(shape))
    return tuple(shape[at:])


def _match(old: Sequence[Axis], new: Sequence[Axis]) -> dict[int, int]:
    """The new axis of each old one that has the same elements, both from the end."""
    places, before = dict[tuple[Term, Axis], int](), ONE
    for at, axis in enumerate(new):
        if axis:
            places[before, axis] = at - len(new)
        before = before * size_of(axis)
    matched, before = dict[int, int](), ONE
    for at, axis in enumerate(old):
        if axis and (before, axis) in places:
            matched[at - len(old)] = places[before, axis]
        before = before * size_of(axis)
    return matched


def reshape(call: Reading) -> Made:
    """Reshape: 0 takes the size of the input, -1 what is left."""
    targets, sizes = known(call.input(1).items), [size_of(axis) for axis in call.axes(0)]
    found: list[Term] = []
    for at, target in enumerate(targets):
        copies = at < len(sizes) and not call.node.number("allowzero", 0)
        # Where the past is empty, its length as a size stands for that of the input.
        refuse(target.number is None and not call.lengths.at_least(target, 1) and not (copies and sizes[at] is target))
        found.append(sizes[at] if copies and target is ZERO else call.lengths.named(target))
    found = _with_token(call, found)
    opened = [at for at, target in enumerate(found) if target.number == -1]
    empty = any(not call.lengths.at_least(size, 1) for at, size in enumerate(found) if at not in opened)
    refuse(len(opened) > 1 or (opened and empty))
    if opened:
        whole, rest = product(sizes), product([one for at, one in enumerate(found) if at != opened[0]])
        found[opened[0]] = known(whole.divided(rest) if rest.parts else None)
    return viewed(call, call.input(0), found)


def _with_token(call: Reading, targets: list[Term]) -> list[Term]:
    """The targets of a graph for one new token, which may say 1 for the axis that counts it."""
    new, axes = call.lengths.new, call.axes(0)
    counting = next((n for n, axis in enumerate(axes) if axis and axis[-1] is new), None)
    if not call.lengths.single or counting is None or any(new.symbols & target.symbols for target in targets):
        return targets
    ones = [n for n, target in enumerate(targets) if target is ONE]
    chosen = counting if counting in ones else next(iter(ones), None)
    return [new if n == chosen else target for n, target in enumerate(targets)]


def flatten(call: Reading) -> Made:
    """Flatten: two axes."""
    at, sizes = call.node.number("axis", 1), [size_of(axis) for axis in call.axes(0)]
    return viewed(call, call.input(0), [product(sizes[:at]), product(sizes[at:])])


def unsqueeze(call: Reading) -> Made:
    """Unsqueeze: axes of one element."""
    shape, axes = call.axes(0), known(call.numbers(1, "axes"))
    rank = len(shape) + len(axes)
    added, left = {axis % rank for axis in axes}, iter(shape)
    return viewed(call, call.input(0), [ONE if at in added else size_of(next(left)) for at in range(rank)])


def squeeze(call: Reading) -> Made:
    """Squeeze: axes of one element go."""
    shape, axes = call.axes(0), call.numbers(1, "axes")
    # The length of an axis that is no number may be 1.
    refuse(axes is None and (call.has(1) or any(factor.number is None for axis in shape for factor in axis)))
    gone = {axis % len(shape) for axis in axes} if axes is not None else {a for a, axis in enumerate(shape) if not axis}
    refuse(any(shape[at] for at in gone))
    return viewed(call, call.input(0), [size_of(axis) for at, axis in enumerate(shape) if at not in gone])


def transpose(call: Reading) -> Made:
    """Transpose: axes in another order."""
    taken, shape = call.input(0), call.axes(0)
    rank = len(shape)
    order = call.node.numbers("perm") or tuple(reversed(range(rank)))
    refuse(sorted(order) != list(range(rank)))
    return Made(transposed(call, taken, order), ("steps", ("permute", tuple(order))))


def transposed(call: Reading, taken: Type, order: Sequence[int]) -> Type:
    """A value with its axes in another order."""
    rank, shape = len(order), tuple(known(taken.shape)[old] for old in order)
    axes = {old - rank: new - rank for new, old in enumerate(order)}
    counted = [old for old, axis in zip(order, shape, strict=True) if call.lengths.counts(axis)]
    if call.lengths.first and counted != sorted(counted):
        return Type(taken.kind, shape)  # in the first call queries and keys are known by their order alone
    made = moved(call, shape, axes, replace(taken, items=None))
    if taken.items is not None:
        made = replace(made, items=taken.items) if rank < 2 else UNKNOWN
    return made


def expand(call: Reading) -> Made:
    """Expand: broadcast to a shape."""
    wanted = Type("i", tuple(axis_of(call.lengths.named(one)) for one in known(call.input(1).items)))
    taken = call.input(0)
    return Made(_broadcast(call, taken, call.broadcast([taken, wanted])), 0)


def _broadcast(call: Reading, taken: Type, shape: tuple[Axis, ...]) -> Type:
    """A value broadcast to a shape: one element may become many."""
    linear = linear_of(taken)
    if linear is not None:
        return replace(taken, shape=shape, linear=linear, items=None, past=False)
    return call.opaque(shape, [taken], taken.kind, is_calm(taken), taken.regions)


def tile(call: Reading) -> Made:
    """Tile: axes of one element are repeated; others where they are the same in all calls."""
    taken = call.input(0)
    pairs = list(zip(call.axes(0), known(call.input(1).items), strict=True))
    shape = tuple(axis_of(times, *axis) for axis, times in pairs)
    if all(not axis or times is ONE for axis, times in pairs):
        return Made(_broadcast(call, taken, shape), 0)
    whole = all(times is ONE or not axis or (call.lengths.is_even(axis) and times.number) for axis, times in pairs)
    return Made(call.opaque(shape, [taken], taken.kind, is_calm(taken)) if whole else Type(taken.kind, shape))


def shape_of(call: Reading) -> Made:
    """Shape: the lengths of the axes."""
    shape = call.axes(0)
    sizes = tuple(map(size_of, shape[slice(call.node.number("start", 0), call.node.number("end", len(shape)))]))
    return Made(Type("i", (axis_of(number(len(sizes))),), items=sizes))


def size(call: Reading) -> Made:
    """Size: the number of elements."""
    return Made(Type("i", (), items=(product([size_of(axis) for axis in call.axes(0)]),)))


def range_(call: Reading) -> Made:
    """Range: numbers that count up by 1."""
    bounds = [constant_of(call.input(at)) for at in range(3)]
    terms = [number(int(one)) if isinstance(one, float) and one == int(one) else one for one in bounds]
    start, end, step = terms
    if not isinstance(start, Term) or not isinstance(end, Term) or step is not ONE:
        return Made(UNKNOWN)
    count = call.lengths.named(end - start)
    refuse(not call.lengths.at_least(count, 0))
    kind, size = call.input(0).kind, count.number
    items = tuple(start + number(one) for one in range(size)) if size is not None and size <= MOST_ITEMS else None
    linear = (start, ((-1, 1),) if count is not ONE else ())
    return Made(Type(kind, (axis_of(count),), items=items, linear=linear))


def places_of_all(call: Reading) -> Made:
    """NonZero of what is nowhere 0: the indexes of every element, the same in each call where the axes are numbers."""
    value, count = constant_of(call.input(0)), product(map(size_of, call.axes(0)))
    if not isinstance(value, Term) or not value.number or count.number is None:
        return Made(UNKNOWN)
    shape = (axis_of(number(len(call.axes(0)))), axis_of(count))
    linear = (ZERO, ((-1, 1),)) if len(call.axes(0)) == 1 else None
    return Made(Type("i", shape, uniform=True, linear=linear))


def constant_of_shape(call: Reading) -> Made:
    """ConstantOfShape: one number in a shape."""
    targets, attribute = known(call.input(0).items), call.node.attribute("value")
    filled = read_constant(attribute.t, None) if attribute is not None else Type("f", (), linear=(0.0, ()))
    shape = tuple(axis_of(call.lengths.named(one)) for one in targets)
    return Made(Type(filled.kind, shape, linear=known(linear_of(filled))))


RULES: dict[str, Rule] = {
    "Identity": lambda call: Made(call.input(0), 0),
    "Reshape": reshape,
    "Flatten": flatten,
    "Unsqueeze": unsqueeze,
    "Squeeze": squeeze,
    "Transpose": transpose,
    "Expand": expand,
    "Tile": tile,
    "Shape": shape_of,
    "Size": size,
    "Range": range_,
    "NonZero": places_of_all,
    "ConstantOfShape": constant_of_shape,
}
