"""What the axes of a value count, and how the axes of an operator's result follow.

`new` is one row for each token of the call, `total` one for each token of the sequence, on the key side of an
attention; `folded` are new tokens and something else in one axis. Axes that count neither have an empty label.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

Label = Literal["", "new", "total", "folded"]
Labels = tuple[Label, ...]
Shape = tuple[int, ...]


class Mixes(Exception):
    """An operator combines positions in a way that a cache of keys and values does not follow; says how."""


def unlabelled(rank: int) -> Labels:
    """The labels of a value without content of tokens."""
    labels: list[Label] = [""] * rank
    return tuple(labels)


def broadcast(operands: Iterable[tuple[Labels, Shape]]) -> Labels:
    """The labels of a result whose operands are broadcast to each other.

    Raises:
        Mixes: one operand has new tokens where another has the key side, or a folded axis.
    """
    found: dict[int, Label] = {}
    rank = 0
    for labels, _ in operands:
        rank = max(rank, len(labels))
        for at, label in enumerate(reversed(labels)):
            if label and found.setdefault(at, label) != label:
                raise Mixes(f"it combines {found[at]} tokens with {label} tokens on one axis")
    return tuple(found.get(at, "") for at in reversed(range(rank)))


def regroup(labels: Labels, before: Shape, after: Shape, tokens: int) -> Labels:
    """The labels of a value under another shape.

    Raises:
        Mixes: the axis of the tokens is split, or the key side is folded into another axis.
    """
    made: list[Label] = [""] * len(after)
    for sources, targets in _pair_axes(before, after):
        inside = {labels[at] for at in sources} - {""}
        if not inside:
            continue
        alone = [at for at in targets if after[at] == tokens]
        if len(inside) == 1 and len(alone) == 1:
            made[alone[0]] = "new" if inside == {"folded"} else next(iter(inside))
            continue
        if inside & {"total"}:
            raise Mixes("it folds positions of the key side into another axis")
        holding = [at for at in targets if after[at] % tokens == 0]
        if len(holding) != 1:
            raise Mixes("it splits the axis of the tokens")
        made[holding[0]] = "folded"
    return tuple(made)


def _pair_axes(before: Shape, after: Shape) -> Iterable[tuple[list[int], list[int]]]:
    """The smallest runs of axes of both shapes that have as many entries, without axes of one entry."""
    ones = [at for at, size in enumerate(before) if size != 1]
    others = [at for at, size in enumerate(after) if size != 1]
    sources, targets, left, right = list[int](), list[int](), 1, 1
    while ones or others:
        if others and (right < left or not ones):
            targets.append(others.pop(0))
            right *= after[targets[-1]]
        else:
            sources.append(ones.pop(0))
            left *= before[sources[-1]]
        if left == right:
            yield sources, targets
            sources, targets, left, right = [], [], 1, 1


def multiply(
    letters: Sequence[str], result: str, labels: Sequence[Labels], flipped: bool
) -> tuple[Labels, tuple[int, ...]]:
    """The labels of a product by the letters of its axes, and the operands that become the key side.

    Of scores, the second operand has the keys; where it is `flipped`, the first.

    Raises:
        Mixes: it adds positions up otherwise than by the weights of an attention.
    """
    counted = [dict(zip(term, own, strict=True)) for term, own in zip(letters, labels, strict=True)]
    cuts = list[int]()
    for letter in sorted({one for term in letters for one in term} - set(result)):
        found = [own.get(letter, "") for own in counted]
        if set(found) == {"total", "new"}:
            cuts.append(found.index("new"))
        elif found != ["total", "total"] and any(found):
            raise Mixes("it adds up over positions with weights that are no attention")
    made: dict[str, Label] = {}
    for own in counted:
        for letter in set(own) & set(result):
            if own[letter] and made.setdefault(letter, own[letter]) != own[letter]:
                raise Mixes(f"it combines {made[letter]} tokens with {own[letter]} tokens on one axis")
    if sum(label == "new" for label in made.values()) > 1:
        operand = 0 if flipped else len(letters) - 1
        made[_find_keys(counted, made, operand)] = "total"
        cuts.append(operand)
    if sum(label == "total" for label in made.values()) > 1:
        raise Mixes("it relates the key side with itself")
    return tuple(made.get(letter, "") for letter in result), tuple(cuts)


def _find_keys(counted: Sequence[dict[str, Label]], made: dict[str, Label], operand: int) -> str:
    """The axis of scores that counts the keys: that of the tokens which one operand has alone."""
    new = [letter for letter, label in made.items() if label == "new"]
    keys = [letter for letter in new if [own.get(letter, "") == "new" for own in counted].count(True) == 1]
    keys = [letter for letter in keys if counted[operand].get(letter) == "new"]
    if len(new) != 2 or len(keys) != 1 or "total" in made.values():
        raise Mixes("it relates positions in a way that is no attention")
    return keys[0]


def spell_product(left: int, right: int, transposed: tuple[bool, bool] = (False, False)) -> tuple[list[str], str]:
    """The letters of a MatMul of operands with so many axes."""
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    rows, columns = ("" if left == 1 else "m"), ("" if right == 1 else "n")
    one, other = f"{rows}k", f"k{columns}"
    one = one[::-1] if transposed[0] else one
    other = other[::-1] if transposed[1] else other
    lead = [batch[len(batch) - max(rank - 2, 0) :] for rank in (left, right)]
    return [lead[0] + one, lead[1] + other], batch + rows + columns
