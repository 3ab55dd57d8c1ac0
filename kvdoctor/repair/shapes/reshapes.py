"""What the numbers of a Reshape stand for, and targets that are right at every length.

Rules of the operator: a 0 copies the axis at the same index, unless `allowzero` is set; one -1 is computed from the
rest, which is impossible if the rest contains a 0 (ONNX operator Reshape; ONNX Runtime, ReshapeHelper).
"""

from collections.abc import Callable
from math import prod

from kvdoctor.analysis.proof.types import Term, product
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.records import record
from kvdoctor.repair.shapes.facts import Dims, NodeInputs, ValueFacts, WalkedReshape

Size = Callable[[Term], int]


@record
class ReshapeTarget:
    """The entries of the target of a Reshape: integers, 0 and -1 among them, or terms that are computed at run time."""

    entries: "tuple[int | Term, ...]"
    allowzero: bool


def align_target(
    into: tuple[Term, ...], target: tuple[Term, ...], guess: int | None, size: Size
) -> tuple[Term, ...] | None:
    """The terms that the entries of a target stand for; None if they cannot be determined.

    Both sides are walked in step: the fewest axes and entries with the same product in the file must have the same
    product at every length. `target` is that of the file with copied axes filled in; at `guess`, the index of its -1,
    it has the computed size.
    """
    found: list[Term] = []
    i = 0
    while i < len(into) or len(found) < len(target):
        j = len(found)
        axis, entry = (into[i] if i < len(into) else None), (target[j] if j < len(target) else None)
        equal = axis is not None and entry is not None and size(axis) == size(entry)
        if not equal and entry is not None and entry.number == 1 and (j != guess or axis is None):
            found.append(entry)  # an inserted axis of 1
        elif not equal and axis is not None and axis.number == 1:
            i += 1  # a removed axis of 1
        elif not equal and axis is not None and size(axis) == 1 and guess is not None and guess == j - 1:
            found[guess], i = found[guess] * axis, i + 1
        else:
            group = _find_group(into[i:], target[j:], size)
            if group is None:
                return None
            left, right = group
            entries = _solve_group(left, right, size, None if guess is None else guess - j)
            if entries is None:
                return None
            found, i = [*found, *entries], i + len(left)
    return tuple(found)


def _find_group(
    into: tuple[Term, ...], target: tuple[Term, ...], size: Size
) -> tuple[tuple[Term, ...], tuple[Term, ...]] | None:
    """The fewest leading axes and entries that have the same product in the file."""
    i = j = 1
    while i <= len(into) and j <= len(target):
        left, right = prod(map(size, into[:i])), prod(map(size, target[:j]))
        if left == right:
            return into[:i], target[:j]
        if left < right:
            i += 1
        else:
            j += 1
    return None


def _solve_group(left: tuple[Term, ...], right: tuple[Term, ...], size: Size, guess: int | None) -> list[Term] | None:
    """The entries of one group, whose product must be that of its axes."""
    total = product(left)
    if product(right) == total:
        return list(right)
    if len(left) == len(right) and [size(a) for a in left] == [size(b) for b in right]:
        return list(left)
    best: list[Term] | None = None
    for at, entry in enumerate(right):
        quotient = total.divided(product([*right[:at], *right[at + 1 :]]))
        if quotient is None or size(quotient) != size(entry):
            continue
        candidate = [*right[:at], quotient, *right[at + 1 :]]
        # A length alone is likelier than a multiple of it; of two such the first, because batch is in front.
        if at == guess or (guess is None and all(number == 1 for _, number in quotient.parts)):
            return candidate
        best = best or candidate
    return best or _assign_several(left, right, size)


def _assign_several(left: tuple[Term, ...], right: tuple[Term, ...], size: Size) -> list[Term] | None:
    """The entries of a group if several stand for lengths: each takes the axis of its size."""
    unused, found = list(left), list[Term]()
    for entry in right:
        same = next((axis for axis in unused if size(axis) == size(entry) and axis.symbols), None)
        if same is not None and not entry.symbols:
            unused.remove(same)
            found.append(same)
        else:
            found.append(entry)
    return found if product(found) == product(left) else None


def write_target(
    into: tuple[Term, ...], out: tuple[Term, ...], allowzero: bool, may_be_empty: frozenset[str]
) -> ReshapeTarget:
    """A target that gives these axes at every length, also if the lengths in `may_be_empty` are 0."""
    plain: list[int | Term] = [n if (n := term.number) is not None else term for term in out]
    copied = [not allowzero and at < len(into) and into[at] == term for at, term in enumerate(out)]
    entries = [0 if same and isinstance(one, Term) else one for one, same in zip(plain, copied, strict=True)]
    terms = [entry for entry in entries if isinstance(entry, Term)]
    empties = [term for term in out if vanishes(term, may_be_empty)]
    if len(terms) == 1 and (not empties or empties == terms):
        return ReshapeTarget(tuple(-1 if isinstance(entry, Term) else entry for entry in entries), allowzero)
    if allowzero or not any(vanishes(term, may_be_empty) for term in terms):
        return ReshapeTarget(tuple(entries), allowzero)
    # A computed 0 must mean 0, so no axis may be copied.
    return ReshapeTarget(tuple(plain), True)


def vanishes(term: Term, empty: frozenset[str]) -> bool:
    """Whether a size is 0 if the given lengths are."""
    return not term.replaced(dict.fromkeys(empty, whole(0))).parts


def fill_target(
    into: tuple[Term, ...], target: tuple[Term, ...], allowzero: bool
) -> "tuple[tuple[Term, ...], int | None] | None":
    """The target with copied axes filled in, and the index of its -1; None if it copies a missing axis."""
    found, guess = list[Term](), None
    for at, term in enumerate(target):
        if term.number == -1:
            guess = at
            found.append(whole(1))
        elif term.number == 0 and not allowzero:
            if at >= len(into):
                return None
            found.append(into[at])
        else:
            found.append(term)
    return tuple(found), guess


def infer_reshape(r: NodeInputs) -> list[ValueFacts]:
    """The rule for a Reshape."""
    data, target = r.at(0), r.at(1)
    choices = [choice for choice in (target.numbers, *target.others) if choice is not None]
    if data.shape is None or not choices:
        return [ValueFacts((None,) * len(target.numbers))] if target.numbers is not None else []
    made = [shape for choice in choices if (shape := _reshape_to(r, data.shape, choice)) is not None]
    return [ValueFacts(made[0], table=data.table)] if made else [ValueFacts((None,) * len(choices[0]))]


def _reshape_to(r: NodeInputs, into: Dims, target: Dims) -> Dims | None:
    """The axes of the result of a Reshape; entries that must be a length are bound to it."""
    opened = tuple(None if term is None else r.facts.open(term) for term in target)
    axes = tuple(r.facts.real(term) for term in into if term is not None)
    entries = tuple(r.facts.real(term) for term in opened if term is not None)
    if len(axes) != len(into) or len(entries) != len(opened):
        return None
    size, allowzero = r.facts.size, bool(r.number("allowzero", 0))
    filled = fill_target(axes, entries, allowzero)
    if filled is None:
        r.note_conflict("a missing axis is copied")
        return None
    said, guess = list(filled[0]), filled[1]
    held = _holds_at_every_length(axes, said, guess, size)
    if held is not None:
        _note_reshape(r, axes, held, entries)
        return held
    if guess is not None:
        total, rest = size(product(axes)), size(product(said))
        if not rest or total % rest:
            r.note_conflict(f"{rest} elements do not divide {total}", *axes, *entries)
            return None
        said[guess] = whole(total // rest)
    out = align_target(axes, tuple(said), guess, size)
    if out is None:
        said_text, axes_text = list(map(str, entries)), list(map(str, axes))
        r.note_conflict(f"the meaning of {said_text} cannot be determined for axes of {axes_text}", *axes, *entries)
        return None
    for at, term in enumerate(out):
        mine = opened[at]
        said_so = at == guess or mine is None or entries[at] == term or entries[at].number == 0
        if not said_so and mine is not None and r.facts.agree(mine, term) is None:
            r.note_conflict(f"entry {at} is {entries[at]} and must be {term}", *axes, *entries)
    _note_reshape(r, axes, out, entries)
    return out


def _holds_at_every_length(
    axes: tuple[Term, ...], said: list[Term], guess: int | None, size: Size
) -> tuple[Term, ...] | None:
    """The axes of the result if the target is right at every length as it is."""
    total = product(axes)
    if guess is None:
        return tuple(said) if product(said) == total else None
    numbers = {entry.number for at, entry in enumerate(said) if at != guess}
    quotient = total.divided(product(said))
    if quotient is None or any(axis.symbols and size(axis) in numbers for axis in axes):
        return None
    return (*said[:guess], quotient, *said[guess + 1 :])


def _note_reshape(r: NodeInputs, axes: tuple[Term, ...], out: tuple[Term, ...], entries: tuple[Term, ...]) -> None:
    before = r.notes.reshapes.get(id(r.node))
    r.notes.reshapes[id(r.node)] = WalkedReshape(r.node, axes, out, (*(before.targets if before else ()), entries))
