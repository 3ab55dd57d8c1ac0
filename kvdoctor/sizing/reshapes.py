"""What the numbers of a Reshape stand for, and how to write them so that they hold at every length.

Rules of the operator: a 0 copies the axis of the same place, unless `allowzero` is set; one -1 is worked out from the
rest, which cannot be done where the rest holds a 0 (ONNX operator Reshape; ONNX Runtime, ReshapeHelper).
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvdoctor.sizing.terms import Term, product, whole

Size = Callable[[Term], int]


@dataclass(frozen=True, slots=True)
class Target:
    """The numbers of a Reshape: whole ones, 0 and -1 among them, or terms that are computed where it runs."""

    entries: "tuple[int | Term, ...]"
    allowzero: bool


def aligned(into: tuple[Term, ...], target: tuple[Term, ...], guess: int | None, size: Size) -> tuple[Term, ...] | None:
    """What the entries of a target stand for at every length; None where that cannot be told.

    Axes are walked on both sides in step: as many entries as have the same product in the file as it is must have the
    same product at every length. `target` holds what the file says, with copies put in, and at `guess`, the place of
    its -1, the size that this works out to.
    """
    found: list[Term] = []
    i = 0
    while i < len(into) or len(found) < len(target):
        j = len(found)
        axis, entry = (into[i] if i < len(into) else None), (target[j] if j < len(target) else None)
        alike = axis is not None and entry is not None and size(axis) == size(entry)
        if not alike and entry is not None and entry.number == 1 and (j != guess or axis is None):
            found.append(entry)  # an axis of 1 that is put in
        elif not alike and axis is not None and axis.number == 1:
            i += 1  # one that is left out
        elif not alike and axis is not None and size(axis) == 1 and guess is not None and guess == j - 1:
            found[guess], i = found[guess] * axis, i + 1
        else:
            group = _group_at(into[i:], target[j:], size)
            if group is None:
                return None
            left, right = group
            entries = _group(left, right, size, None if guess is None else guess - j)
            if entries is None:
                return None
            found, i = [*found, *entries], i + len(left)
    return tuple(found)


def _group_at(
    into: tuple[Term, ...], target: tuple[Term, ...], size: Size
) -> tuple[tuple[Term, ...], tuple[Term, ...]] | None:
    """The fewest axes and entries from here on that have the same product in the file as it is."""
    i = j = 1
    while i <= len(into) and j <= len(target):
        left, right = _product_of(into[:i], size), _product_of(target[:j], size)
        if left == right:
            return into[:i], target[:j]
        if left < right:
            i += 1
        else:
            j += 1
    return None


def _product_of(terms: tuple[Term, ...], size: Size) -> int:
    found = 1
    for term in terms:
        found *= size(term)
    return found


def _group(left: tuple[Term, ...], right: tuple[Term, ...], size: Size, guess: int | None) -> list[Term] | None:
    """The entries of one group, whose product must be that of the axes it is made from."""
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
        # One length by itself is likelier than a multiple of it; of two such the first, as batch stands in front.
        if at == guess or (guess is None and all(number == 1 for _, number in quotient.parts)):
            return candidate
        best = best or candidate
    return best or _several(left, right, size)


def _several(left: tuple[Term, ...], right: tuple[Term, ...], size: Size) -> list[Term] | None:
    """More than one entry of a group stands for a length: each takes the axis of its size, the last one the rest."""
    unused, found = list(left), list[Term]()
    for entry in right:
        same = next((axis for axis in unused if size(axis) == size(entry) and axis.symbols), None)
        if same is not None and not entry.symbols:
            unused.remove(same)
            found.append(same)
        else:
            found.append(entry)
    return found if product(found) == product(left) else None


def written(into: tuple[Term, ...], out: tuple[Term, ...], allowzero: bool, may_be_empty: frozenset[str]) -> Target:
    """A target that gives these axes at every length, also where the lengths of `may_be_empty` are 0."""
    entries: list[int | Term] = []
    for at, term in enumerate(out):
        number = term.number
        if number is not None:
            entries.append(number)
        elif not allowzero and at < len(into) and into[at] == term:
            entries.append(0)
        else:
            entries.append(term)
    terms = [entry for entry in entries if isinstance(entry, Term)]
    empties = [term for term in out if vanishes(term, may_be_empty)]
    if len(terms) == 1 and (not empties or empties == terms):
        return Target(tuple(-1 if isinstance(entry, Term) else entry for entry in entries), allowzero)
    if allowzero or not any(vanishes(term, may_be_empty) for term in terms):
        return Target(tuple(entries), allowzero)
    # A computed 0 must mean 0: then nothing may be copied.
    return Target(tuple(n if n is not None else term for term in out for n in (term.number,)), True)


def vanishes(term: Term, empty: frozenset[str]) -> bool:
    """Whether a size is 0 where the given lengths are."""
    return not term.replaced(dict.fromkeys(empty, whole(0))).parts


def given(
    into: tuple[Term, ...], target: tuple[Term, ...], allowzero: bool
) -> "tuple[tuple[Term, ...], int | None] | None":
    """The target with copies put in, and the place of its -1; None where it copies an axis that is not there."""
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
