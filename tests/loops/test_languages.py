"""Every language writes a program that decodes what the model means; where its tools are not installed, a skip says so."""

import filecmp
import json
from pathlib import Path

import make_loops
import pytest
from support import text_fixtures
from support.isolated import EXPORTS, give_up
from support.loop_programs import written

from kvdoctor.loops.language import languages

COMPILED = [name for name in languages() if name != "python"]
NOT_BUILT_HERE = {"csharp": "there is no .NET SDK"}
"""Languages whose tools a machine of the project does not have: written, and not compiled."""

LAYOUTS = (
    "layout-delta-appended-healthy",
    "layout-delta-healthy",
    "layout-scatter-static-pair-healthy",
    "layout-ort-t5-init-healthy",
    "layout-rwkv-healthy",
    "layout-aihub-whisper-healthy",
)
"""Layouts whose loops differ: rows that the loop appends or writes, buffers, an encoder within the first call, states."""


def decodes(language: str, model: Path) -> None:
    """The program is built, and prints the tokens of the model.

    It is a skip where the tools of the language are missing, and a failure of the test where CI says that they are there.
    """
    made = written(model, language)
    if made.reason is not None and made.reason.startswith("not checked:") and "not found" in made.reason:
        if language in NOT_BUILT_HERE:
            pytest.skip(made.reason)
        give_up(made.reason)
    assert made.reason is None
    assert made.results
    assert not [result.problem for result in made.results if result.problem]


@pytest.mark.slow
@pytest.mark.parametrize("model", make_loops.TABLE)
@pytest.mark.parametrize("language", COMPILED)
def test_an_export_is_decoded(language: str, model: str) -> None:
    decodes(language, EXPORTS / model)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("language", COMPILED)
def test_a_layout_is_decoded(language: str, layout: str, tmp_path: Path) -> None:
    decodes(language, text_fixtures.load_all()[layout].write(tmp_path))


@pytest.mark.parametrize(("language", "model"), make_loops.examples())
def test_an_example_is_what_is_written_today(language: str, model: str, tmp_path: Path) -> None:
    made, kept = tmp_path / "made", make_loops.EXAMPLES / f"{language}-{model}"
    make_loops.write_example(language, model, made)
    names = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file())
    _, differing, failed = filecmp.cmpfiles(made, kept, names, shallow=False)
    assert not [name for name in (*differing, *failed) if name != "kvdoctor-loop.json"], "python docs/make_loops.py"
    written_today, as_kept = (json.loads((folder / "kvdoctor-loop.json").read_text()) for folder in (made, kept))
    assert written_today["vectors"] == as_kept["vectors"]
