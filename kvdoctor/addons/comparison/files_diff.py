"""Compares the files of both sides: versions, operators by type and initializers.

No difference in these makes a model worse by itself: a fault shows in the contract or in the runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvdoctor.addons.comparison.contract_diff import group_layers
from kvdoctor.addons.comparison.document import Difference
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
