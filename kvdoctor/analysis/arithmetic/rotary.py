"""The frequencies of rotary embeddings: those that a graph rotates by, and those that a config declares.

A graph holds them as a vector that positions are multiplied with, or as tables of cosines and sines with one row for
each position, whose second row shows them. Sources of the scalings: transformers 4.57 and 5.23, modeling_rope_utils.py.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import field
from itertools import islice, pairwise
from typing import Any

from kvdoctor.analysis.arithmetic.numbers import FixedValues, Numbers
from kvdoctor.analysis.dataflow.walks import Walk
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import CONTRIB, Trait, operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.records import record

TABLES = {
    (CONTRIB, "GroupQueryAttention"): (7, 8),
    (CONTRIB, "RotaryEmbedding"): (2, 3),
    ("", "RotaryEmbedding"): (1, 2),
}
"""The operators that take tables of cosines and sines, with the inputs that do."""
MOST_SEEN = 60
CLOSE, TINY = 1e-2, 2e-7
"""The largest relative and absolute difference of two frequencies that are the same: half precision rounds tables."""
EXACT = 1e-3
"""Frequencies from here on show the base well in any precision."""

ReadRow = Callable[[TensorProto, int], Numbers | None]
"""Reads a row of a table."""


@record
class Frequencies:
    """The frequencies of one rotation in radians for each token, the highest first, and the node that holds them."""

    numbers: Numbers
    node: FlatNode

    @property
    def dim(self) -> int:
        """How many numbers of a head are rotated."""
        return 2 * len(self.numbers)

    @property
    def base(self) -> float | None:
        """The base, where the frequencies are its powers; None of scaled ones."""
        at = max((at for at, number in enumerate(self.numbers) if number >= EXACT), default=0)
        base = (1 / self.numbers[at]) ** (self.dim / (2 * at)) if at else None
        return base if base is not None and are_close(self.numbers, powers(base, self.dim)) else None


def powers(base: float, dim: int) -> Numbers:
    """The frequencies of a base without scaling."""
    return tuple(base ** (-2 * at / dim) for at in range(dim // 2))


def are_close(one: Numbers, other: Numbers) -> bool:
    """Whether two lists of frequencies are the same."""
    return len(one) == len(other) and all(
        math.isclose(x, y, rel_tol=CLOSE, abs_tol=TINY) for x, y in zip(one, other, strict=True)
    )


CHOOSES: tuple[Trait, ...] = ("product", "multiply", "divide", "join", "select", "copy")
"""Operators of which each operand may hold the frequencies."""


def find_frequencies(flow: Flow, fixed: FixedValues, read_row: ReadRow) -> tuple[list[Frequencies], bool]:
    """The rotations of a graph, and whether all of them could be read."""
    found, whole = list[Frequencies](), True
    for node in fixed.nodes({"Cos"} | {name for _, name in TABLES}):
        if len(node.inputs) == 1:  # a Cos
            read = _behind_cosine(flow, fixed, node)
            found += [Frequencies(numbers, node) for numbers in read]
            whole &= bool(read)
        elif (node.domain, node.op) in TABLES and node.input(TABLES[node.domain, node.op][0]):
            rows = list(_rows(flow, node, read_row))
            found += [Frequencies(numbers, node) for numbers in rows if numbers is not None]
            whole &= bool(rows) and None not in rows
    for node in fixed.nodes(operators_with("embed")) if whole and not found else ():
        table = flow.constant(node.input(0))
        sines = _sines(table, read_row) if table is not None else None
        found += [Frequencies(sines, node)] if sines else []
    return found, whole


def _sines(table: TensorProto, read_row: ReadRow) -> Numbers | None:
    """The frequencies in a table of sines, or of sines and then cosines, that is looked up by position."""
    first, second = read_row(table, 0), read_row(table, 1)
    if first is None or second is None or len(first) < 4 or any(first[: len(first) // 2]):
        return None
    half = len(first) // 2
    whole = first[half:] == (1.0,) * half  # cosines follow
    if not whole and any(first[half:]):
        return None
    sines = second[:half] if whole or second[:half] == second[half:] else second[::2]
    numbers = tuple(math.asin(min(max(sine, -1.0), 1.0)) for sine in sines)
    return numbers if _are_frequencies(numbers) else None


def _behind_cosine(flow: Flow, fixed: FixedValues, cosine: FlatNode) -> list[Numbers]:
    """The vector that positions are multiplied with before a cosine, or two that a length chooses from."""
    walk, found = Walk([cosine.input(0)], most=MOST_SEEN), set[Numbers]()
    for name in walk:
        numbers = fixed.of(name)
        if numbers is not None:
            if len(numbers) > 1 and _are_frequencies(numbers):
                found.add(numbers)
            continue
        node = flow.producers.get(name)
        if node is None or node.has("sizes", "embed"):
            continue
        walk.add(node.inputs if node.has(*CHOOSES) else node.inputs[:1])
    return sorted(found) if len(found) <= 2 else []


def divides_positions(flow: Flow, fixed: FixedValues, cosine: FlatNode, factor: float) -> bool:
    """Whether something before a cosine is divided by a factor: old exports of linear scaling divide the positions."""
    scaling = [node for node in islice(flow.before(cosine.input(0)), MOST_SEEN) if node.has("multiply", "divide")]
    numbers = (fixed.one(name) for node in scaling for name in node.inputs if name)
    return any(one and math.isclose(max(one, 1 / one), factor) for one in numbers)


def _are_frequencies(numbers: Numbers) -> bool:
    falls = all(x > y for x, y in pairwise(numbers))
    return falls and numbers[-1] > 0 and numbers[0] <= 1 + CLOSE


def _rows(flow: Flow, node: FlatNode, read_row: ReadRow) -> Iterator[Numbers | None]:
    """The frequencies in the tables of an operator; where a branch chooses between tables, those of each."""
    cosines, sines = (list_tables(flow, node.input(at)) for at in TABLES[node.domain, node.op])
    for cosine, sine in zip(cosines, sines, strict=False):
        rows = (read_row(cosine, 1), read_row(sine, 1)) if cosine is not None and sine is not None else (None, None)
        yield None if rows[0] is None or rows[1] is None else tuple(map(math.atan2, rows[1], rows[0]))


def list_tables(flow: Flow, name: str) -> list[TensorProto | None]:
    """A constant table, or those that a branch chooses between; None for what is no constant."""
    made = flow.producers.get(name)
    names = made.inputs if made is not None and made.has("copy") else (name,)
    return [flow.constant(one) for one in names]


@record
class Declared:
    """A rotation as a config declares it: base, numbers of a head that are rotated, and the scaling with its factors.

    `key` is the key of its base, `dim_key` that of `dim`, empty where it is the width of a head. A `dim` of None is not
    known.
    """

    key: str
    base: float
    dim_key: str
    dim: int | None
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)

    def frequencies(self, dim: int) -> list[Numbers] | None:
        """The frequencies of each range of lengths; None of a scaling that is not known, or lacks a factor."""
        plain, rule = powers(self.base, dim), SCALED.get(self.kind)
        try:
            return rule(self, plain) if rule is not None else None
        except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
            return None


def _llama3(one: Declared, plain: Numbers) -> list[Numbers]:
    factor, low, high, length = (
        float(one.scaling[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    scaled = []
    for number in plain:
        wave = 2 * math.pi / number
        smooth = min(max((length / wave - low) / (high - low), 0.0), 1.0)
        scaled.append((1 - smooth) * number / factor + smooth * number)
    return [tuple(scaled)]


def _yarn(one: Declared, plain: Numbers) -> list[Numbers]:
    factor, length = float(one.scaling["factor"]), float(one.scaling["original_max_position_embeddings"])
    fast, slow = (float(one.scaling.get(key) or default) for key, default in (("beta_fast", 32), ("beta_slow", 1)))
    dim = 2 * len(plain)

    def place(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(one.base))

    low, high = place(fast), place(slow)
    if one.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramps = [min(max((at - low) / width, 0.0), 1.0) for at in range(len(plain))]
    return [tuple(x / factor * ramp + x * (1 - ramp) for x, ramp in zip(plain, ramps, strict=True))]


def _longrope(one: Declared, plain: Numbers) -> list[Numbers]:
    lists = [one.scaling[key] for key in ("short_factor", "long_factor")]
    return [tuple(x / float(factor) for x, factor in zip(plain, factors, strict=True)) for factors in lists]


SCALED: dict[str, Callable[[Declared, Numbers], list[Numbers]]] = {
    "default": lambda _, plain: [plain],
    "mrope": lambda _, plain: [plain],
    "linear": lambda one, plain: [tuple(number / float(one.scaling["factor"]) for number in plain)],
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
"""The scalings that are known. Dynamic scaling, whose base follows the length, is not among them."""
