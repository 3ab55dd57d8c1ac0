"""Writes loops and runs their programs."""

from pathlib import Path

import pytest

from kvdoctor.loops.pipeline import LoopRequest, WrittenLoop, write_loop
from kvdoctor.options import Options
from support.isolated import give_up


def written(model: Path, language: str = "python", out: Path | None = None) -> WrittenLoop:
    """The loop for a model, its program held to the test vectors."""
    request = LoopRequest(str(model), None if out is None else str(out), language, check=True)
    return write_loop(request, Options())


NOT_BUILT_HERE = ("csharp",)
"""Languages whose tools a machine of the project does not have: written, and not compiled."""


def assert_decodes(language: str, model: Path) -> None:
    """The program is built, and prints the tokens of the model.

    A skip where the tools of the language are missing; a failure where CI says that they are there.
    """
    made = written(model, language)
    if made.reason is not None and made.reason.startswith("not checked:") and "not found" in made.reason:
        if language in NOT_BUILT_HERE:
            pytest.skip(made.reason)
        give_up(made.reason)
    assert made.reason is None
    assert made.results
    assert not [result.problem for result in made.results if result.problem]
