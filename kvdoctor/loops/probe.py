"""The runs of a probe: how a program is called on a machine without kvdoctor (docs/probe.md)."""

from collections.abc import Iterator

from kvdoctor.loops.vectors import Vector

FILE = "probe.txt"
"""The file of a project with a run on each line."""
ANY = -1
"""In place of an expected token, where several are right."""


def list_runs(vectors: tuple[Vector, ...]) -> Iterator[tuple[str, Vector]]:
    """Each run with its name: every vector, each self test with as many sequences as it can, the first vector again."""
    for vector in vectors:
        yield vector.name.replace(" ", "-"), vector
    for test in dict.fromkeys(test for vector in vectors for test in vector.self_tests):
        yield test, max((one for one in vectors if test in one.self_tests), key=lambda one: len(one.expected))
    for vector in vectors[:1]:
        yield f"{vector.name.replace(' ', '-')}-again", vector


def write_runs(vectors: tuple[Vector, ...]) -> str:
    """The text of the file: arguments with one space between them."""
    lines = []
    for name, vector in list_runs(vectors):
        arguments = ["--run", name, *vector.feeds]
        for row in vector.expected:
            arguments += ["--expect", ",".join(str(ANY if token is None else token) for token in row)]
        arguments += ["--self-test", name] if name in vector.self_tests else []
        lines.append(" ".join(arguments))
    return "\n".join(lines) + "\n"
