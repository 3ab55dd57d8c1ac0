"""What two graphs are made of: versions, operators by type, initializers. Never the values of weights.

Nothing of it makes a model worse: that shows in the contract and in the runs.
"""

from collections.abc import Iterator

from kvdoctor.report.diff_document import Delta
from kvdoctor.report.document import FileFacts, GraphFacts, StackFacts


def graph_deltas(a: tuple[FileFacts, ...], b: tuple[FileFacts, ...]) -> Iterator[Delta]:
    """What is other in the files of B's stack; files are matched by their role, then by their name."""
    for old, new in pairs(a, b):
        if new is None and old is not None:
            yield Delta("file", (old.path,), "", old.role, None)
        elif old is None and new is not None:
            yield Delta("file", (new.path,), "", None, new.role)
        elif old is not None and new is not None:
            yield from _file(old, new)


def pairs(a: tuple[FileFacts, ...], b: tuple[FileFacts, ...]) -> Iterator[tuple[FileFacts | None, FileFacts | None]]:
    """Files that take one another's place."""
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


def files_of(stack: StackFacts, files: tuple[FileFacts, ...]) -> tuple[FileFacts, ...]:
    """The files of a stack."""
    return tuple(file for file in files if file.path in stack.files)


def _file(a: FileFacts, b: FileFacts) -> Iterator[Delta]:
    name = (a.path,)
    yield from _other("file", name, "name", a.path, b.path)
    yield from _other("file", name, "role", a.role, b.role)
    yield from _other("file", name, "IR version", a.ir_version, b.ir_version)
    for domain in dict.fromkeys([*a.opsets, *b.opsets]):
        title = f"opset {domain or 'ai.onnx'}"
        yield from _other("file", name, title, a.opsets.get(domain), b.opsets.get(domain))
    yield from _other("file", name, "producer", a.producer or None, b.producer or None)
    if a.graph is not None and b.graph is not None:
        yield from _graph(name, a.graph, b.graph)
    if a.sha256 is not None and b.sha256 is not None:
        yield from _other("file", name, "SHA-256", a.sha256, b.sha256)


def _graph(name: tuple[str, ...], a: GraphFacts, b: GraphFacts) -> Iterator[Delta]:
    yield from _other("file", name, "nodes", a.nodes, b.nodes)
    for operator in sorted({*a.operators, *b.operators}):
        yield from _other(
            "operator", (operator,), f"in {name[0]}", a.operators.get(operator), b.operators.get(operator)
        )
    yield from _other("file", name, "initializers", a.initializers, b.initializers)
    yield from _other("file", name, "bytes of initializers", a.initializer_bytes, b.initializer_bytes)


def _other(what: str, subject: tuple[str, ...], title: str, old: object, new: object) -> Iterator[Delta]:
    if old != new:
        before, after = (None if value is None else str(value) for value in (old, new))
        yield Delta(what, subject, title, before, after)
