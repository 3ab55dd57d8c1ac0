"""Compares the files of both sides: the structure of their graphs, and their weights by content.

Structure is versions, operators by type and initializers. No difference in it makes a model worse by itself: a fault
shows in the contract or in the runs.

Of weights it finds which differ, how far, in which layers; values are read in portions. Equal content is matched first:
by name, then where the same node of the same graph reads it, then by digest, so that a new export with other numbers in
its names shows no difference. A name of a module keeps its meaning, so that weights that were exchanged do. What is
left is matched by name, then by type and sizes where only one is left on each side.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from pathlib import Path
from typing import TypeVar

from kvdoctor.addons.comparison.contract_diff import group_layers
from kvdoctor.addons.comparison.document import Difference, WeightDifference, WeightsDiff
from kvdoctor.diagnose.locate.runnable import LAYER
from kvdoctor.model.weights import Weight, list_weights
from kvdoctor.report.facts import FileFacts

T = TypeVar("T")


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
    a: Sequence[T], b: Sequence[T], *keys: Callable[[T], object], rest: bool = True
) -> Iterator[tuple[T | None, T | None]]:
    """Pair what has the same key, the first key first; with `rest` the only remaining one of each side as well."""
    left, pairs = list(b), dict[int, T]()
    for key in keys:
        for at, old in enumerate(a):
            found = next((new for new in left if key(new) == key(old)), None)
            if at not in pairs and found is not None:
                pairs[at] = found
                left.remove(found)
    alone = [at for at in range(len(a)) if at not in pairs]
    if rest and len(alone) == len(left) == 1:
        pairs[alone[0]] = left.pop()
    yield from ((old, pairs.get(at)) for at, old in enumerate(a))
    yield from ((None, new) for new in left)


def _compare_file(a: FileFacts, b: FileFacts) -> Iterator[Difference]:
    name = (a.path,)
    yield from _compare_value("file", name, "name", a.path, b.path)
    yield from _compare_value("file", name, "role", a.role, b.role)
    yield from _compare_value("file", name, "IR version", a.ir_version, b.ir_version)
    for domain in dict.fromkeys([*a.opsets, *b.opsets]):
        title = f"opset {domain or 'ai.onnx'}"
        yield from _compare_value("file", name, title, a.opsets.get(domain), b.opsets.get(domain))
    yield from _compare_value("file", name, "producer", a.producer or None, b.producer or None)
    if (one := a.graph) is not None and (other := b.graph) is not None:
        yield from _compare_value("file", name, "nodes", one.nodes, other.nodes)
        for op in sorted({*one.operators, *other.operators}):
            yield from _compare_value("operator", (op,), f"in {a.path}", one.operators.get(op), other.operators.get(op))
        yield from _compare_value("file", name, "initializers", one.initializers, other.initializers)
        yield from _compare_value("file", name, "bytes of initializers", one.initializer_bytes, other.initializer_bytes)
    if a.sha256 is not None and b.sha256 is not None:
        yield from _compare_value("file", name, "SHA-256", a.sha256, b.sha256)


def _compare_value(what: str, subject: tuple[str, ...], title: str, old: object, new: object) -> Iterator[Difference]:
    if old != new:
        before, after = (None if value is None else str(value) for value in (old, new))
        yield Difference(what, subject, title, before, after)


GENERATED = re.compile(r"(^|[/:_])(Constant|val|onnx::\w+)(_\d+)?(_output_\d+)?$|^_?\d+$")
"""Names that an exporter counts: the next export may give them to others."""
NUMBERED = re.compile(r"[^./]*\d+$")
"""Names that may be counted as well (`w12`), or be those of a person: the weights of the other file decide."""
MANY = 3
"""Weights that have each other's names, at least, where names are said to be counted: two may be exchanged."""


def compare_weights(pairs: Iterable[tuple[str, Path, Path]]) -> WeightsDiff:
    """Compare the weights of pairs of files; each with the name for the report.

    Raises:
        UnreadableError: a file or its weights cannot be read.
        OSError: likewise, while they are read.
    """
    found = [_compare_files(name, list_weights(a), list_weights(b)) for name, a, b in pairs]
    return WeightsDiff(
        same=sum(one.same for one in found),
        renamed=sum(one.renamed for one in found),
        changed=tuple(change for one in found for change in one.changed),
        only_a=tuple(name for one in found for name in one.only_a),
        only_b=tuple(name for one in found for name in one.only_b),
    )


@dataclass
class _Left:
    """The weights of both files that have no counterpart yet, each with the digest of its content."""

    a: list[tuple[Weight, str]]
    b: list[tuple[Weight, str]]

    def match(self, key: Callable[[Weight, str], object], alone: bool = False) -> list[tuple[Weight, Weight]]:
        """Take those with the same key out of both; with `alone` only where each side has a single one."""
        groups: dict[object, tuple[list[Weight], list[Weight]]] = {}
        for at, side in enumerate((self.a, self.b)):
            for weight, digest in side:
                groups.setdefault(key(weight, digest), ([], []))[at].append(weight)
        found, taken = [], set[int]()
        for ours, others in groups.values():
            if not alone or len(ours) == len(others) == 1:
                found += list(zip(ours, others, strict=False))
        for pair in found:
            taken |= {id(pair[0]), id(pair[1])}
        self.a = [entry for entry in self.a if id(entry[0]) not in taken]
        self.b = [entry for entry in self.b if id(entry[0]) not in taken]
        return found


def _compare_files(file: str, a: list[Weight], b: list[Weight]) -> WeightsDiff:
    left = _Left([(one, _digest(one)) for one in a], [(one, _digest(one)) for one in b])
    same = left.match(lambda weight, digest: (weight.name, digest))
    renamed = []
    if sorted(map(_place, a)) == sorted(map(_place, b)):
        # The same content at the same place is the same weight, whatever its name.
        renamed += left.match(lambda weight, digest: (digest, _place(weight)))
    kept = {one.name for one in a} & {one.name for one in b}
    # A name that a person chose keeps its meaning: other content under it is another weight, not another name.
    stays = {name for name in kept if not GENERATED.search(name)} - _find_counted(left, kept)
    renamed += left.match(lambda weight, digest: object() if weight.name in stays else (digest, weight.reader))
    alone = left.match(lambda weight, digest: object() if weight.name in stays else digest, alone=True)
    # A weight went from one node to another where both graphs have both nodes under names of modules.
    readers = {one.reader for one in a if "/" in one.reader or "." in one.reader} & {one.reader for one in b}
    moved = [(old, new) for old, new in alone if old.reader != new.reader and {old.reader, new.reader} <= readers]
    renamed += [pair for pair in alone if pair not in moved]
    renamed += left.match(lambda weight, digest: object() if weight.name in stays else digest)
    pairs = left.match(lambda weight, _: weight.name)
    pairs += left.match(lambda weight, _: (weight.data_type, weight.dims), alone=True)
    order = {id(weight): index for index, weight in enumerate(a)}
    changed = [_describe(file, old, new) for old, new in sorted(pairs, key=lambda pair: order[id(pair[0])])]
    changed += [_facts(file, old, new, f"moved from {old.reader} to {new.reader}") for old, new in moved]
    changed += _match_quantized(file, left)
    only_a, only_b = (tuple(weight.name for weight, _ in side) for side in (left.a, left.b))
    return WeightsDiff(len(same), len(renamed), tuple(changed), only_a, only_b)


def _place(weight: Weight) -> tuple[str, int, int]:
    """Where a graph reads a weight: the operator, the number of the node among those of it, and the input."""
    return weight.op, weight.order, weight.input


def _find_counted(left: _Left, kept: set[str]) -> set[str]:
    """Numbered names of both files that an exporter counted anew: most of the weights have each other's names.

    Weights that have each other's names in a circle are exchanged, not counted: counting goes on to new names.
    """
    after: dict[str, list[str]] = {}
    for weight, digest in left.b:
        after.setdefault(digest, []).append(weight.name)
    names = [(weight.name, digest) for weight, digest in left.a if weight.name in kept and NUMBERED.match(weight.name)]
    moved = {name: after[digest] for name, digest in names if digest in after}
    exchanged = {one for there in moved.values() for one in there} <= {*moved}
    if exchanged or len(moved) < MANY or 2 * len(moved) <= len(names):
        return set()
    return {name for name, _ in names}


def _match_quantized(file: str, left: _Left) -> list[WeightDifference]:
    """Take out floats of one side that the other has in parts whose names begin with theirs: numbers and scales."""
    found = []
    for mine, theirs, words in ((left.a, left.b, "quantized in B"), (left.b, left.a, "quantized in A")):
        for entry in list(mine):
            weight = entry[0]
            parts = [other for other in theirs if other[0].name.startswith(f"{weight.name}_")]
            packed = next((one for one, _ in parts if not one.is_float), None)
            if not weight.is_float or packed is None:
                continue
            mine.remove(entry)
            for part in parts:
                theirs.remove(part)
            old, new = (weight, packed) if mine is left.a else (packed, weight)
            found.append(_facts(file, old, new, f"{words}, so values are not compared"))
    return found


def _digest(weight: Weight) -> str:
    digest = hashlib.blake2b(repr((weight.data_type, weight.dims)).encode(), digest_size=16)
    for part in weight.read():
        digest.update(part)
    return digest.hexdigest()


def _facts(file: str, old: Weight, new: Weight, reason: str = "") -> WeightDifference:
    match = LAYER.search(old.name) or LAYER.search(new.name) or LAYER.search(old.reader)
    types = " -> ".join(dict.fromkeys(f"{one.dtype}{list(one.dims)}" for one in (old, new)))
    return WeightDifference(file, old.name, new.name, int(match[1]) if match else None, types, reason=reason)


def _describe(file: str, old: Weight, new: Weight) -> WeightDifference:
    reason = ""
    if old.dims != new.dims:
        reason = "their sizes differ"
    elif not (old.has_values and new.has_values):
        reason = "a packed or unknown element type is not compared as numbers"
    elif old.is_float != new.is_float:
        reason = "one side is quantized: integers are not compared with floats"
    facts = _facts(file, old, new, reason)
    if reason:
        return facts
    largest, relative, correlation = measure(old, new)
    if not isfinite(largest):
        return replace(facts, reason="one side or both hold NaN or Inf")
    return replace(facts, largest=largest, relative=relative, correlation=correlation)


def measure(old: Weight, new: Weight) -> tuple[float, float | None, float | None]:
    """The largest difference, its root mean square as a fraction of A's, and the correlation; in one pass."""
    import numpy as np

    sums, largest, squares = np.zeros(5), 0.0, 0.0
    with np.errstate(all="ignore"):
        for one, two in zip(old.values(), new.values(), strict=True):
            x, y = one.astype(np.float64), two.astype(np.float64)
            apart = x - y
            worst = float(np.abs(apart).max(initial=0.0))
            largest = worst if not isfinite(worst) else max(largest, worst)
            if not isfinite(largest):
                return largest, None, None
            squares += float(apart @ apart)
            sums += (x.sum(), y.sum(), x @ x, y @ y, x @ y)
    count = max(old.size, 1)
    mean_x, mean_y, xx, yy, xy = (float(one) / count for one in sums)
    spread = (xx - mean_x**2) * (yy - mean_y**2)
    relative = _short(sqrt(squares / count) / sqrt(xx)) if xx > 0 else None
    correlation = (
        _short(max(-1.0, min(1.0, (xy - mean_x * mean_y) / sqrt(spread)))) if spread > 1e-24 * xx * yy else None
    )
    return _short(largest), relative, correlation


def _short(number: float) -> float:
    return float(f"{number:.6g}")
