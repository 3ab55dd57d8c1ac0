"""Writes loops and runs their programs."""

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdoctor.loops.pipeline import LoopRequest, WrittenLoop, write_loop
from kvdoctor.options import Options


def written(model: Path, language: str = "python", out: Path | None = None) -> WrittenLoop:
    """The loop for a model, its program held to the test vectors."""
    request = LoopRequest(str(model), None if out is None else str(out), language, check=True)
    return write_loop(request, Options())


def assert_decodes(language: str, model: Path) -> None:
    """The program is built, and prints the tokens of the model; a skip where the tools of the language are missing."""
    with one_at_a_time(language):
        made = written(model, language)
    if made.unchecked is not None and "not found" in made.unchecked:
        pytest.skip(made.unchecked)
    assert (made.reason, made.unchecked) == (None, None)
    assert made.results
    assert not [result.problem for result in made.results if result.problem]


@contextmanager
def one_at_a_time(language: str) -> Iterator[None]:
    """Lets one process of the tests build in a language: not every tool shares its cache of packages with another."""
    with (Path(tempfile.gettempdir()) / f"kvdoctor-tests-{language}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
