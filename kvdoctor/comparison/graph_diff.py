"""Compares the structure of graphs: versions, operators by type, initializers; never the values of weights.

No difference makes a model worse by itself: a fault shows in the contract or in the runs.
"""

from collections.abc import Iterator, Sequence

from kvdoctor.comparison.contract_diff import group_layers
from kvdoctor.report.diff_document import Difference
from kvdoctor.report.facts import FileFacts, GraphFacts


def compare_graphs(a: Sequence[FileFacts], b: Sequence[FileFacts]) -> tuple[Difference, ...]:
    """The differences between the files of a stack. Files are matched by their role, then by their name."""
    return group_layers(_compare_files(a, b))


def _compare_files(a: Sequence[FileFacts], b: Sequence[FileFacts]) -> Iterator[Difference]:
    for old, new in match_files(a, b):
        if new is None and old is not None:
            yield Difference("file", (old.path,), "", old.role, None)
        elif old is None and new is not None:
            yield Difference("file", (new.path,), "", None, new.role)
        elif old is not None and new is not None:
            yield from _compare_file(old, new)


def match_files(a: Sequence[FileFacts], b: Sequence[FileFacts]) -> Iterator[tuple[FileFacts | None, FileFacts | None]]:
    """Pair the files of both sides: by role and name, then by role, then by name."""
    left = list(b)
    for old in a:
        alike = [new for new in left if new.role == old.role]
        named = [new for new in left if new.path == old.path]
        found = next(iter((*(new for new in alike if new in named), *alike, *named)), None)
        if found is None and len(a) == len(b) == 1:
            found = left[0]
        if found is not None:
            left.remove(found)
        yield old, found
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
    if a.graph is not None and b.graph is not None:
        yield from _compare_graph(name, a.graph, b.graph)
    if a.sha256 is not None and b.sha256 is not None:
        yield from _compare_value("file", name, "SHA-256", a.sha256, b.sha256)


def _compare_graph(name: tuple[str, ...], a: GraphFacts, b: GraphFacts) -> Iterator[Difference]:
    yield from _compare_value("file", name, "nodes", a.nodes, b.nodes)
    for operator in sorted({*a.operators, *b.operators}):
        yield from _compare_value(
            "operator", (operator,), f"in {name[0]}", a.operators.get(operator), b.operators.get(operator)
        )
    yield from _compare_value("file", name, "initializers", a.initializers, b.initializers)
    yield from _compare_value("file", name, "bytes of initializers", a.initializer_bytes, b.initializer_bytes)


def _compare_value(what: str, subject: tuple[str, ...], title: str, old: object, new: object) -> Iterator[Difference]:
    if old != new:
        before, after = (None if value is None else str(value) for value in (old, new))
        yield Difference(what, subject, title, before, after)
