"""Writes evidence/loops.md: `python -m evidence.loops.make_page ZOO`.

The table is made by building and running a loop for each of its models in each language, with the tools that are
installed. ZOO is a folder with the exports of the zoo, each as EXPORTER/NAME.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.isolated import EXPORTS
from support.loop_programs import COMMITTED, materials, played
from support.text_fixtures import load_all

from evidence.loops import against_pytorch
from kvdoctor.addons.loops.contract_file import VECTORS_FILE
from kvdoctor.addons.loops.languages import LANGUAGES
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder

PAGE = Path(__file__).parents[1] / "loops.md"
HEAD = """# Loops in each language

Each program of `kvdoctor loop` was built once, and played the runs of each model by its contract: one sequence, two,
and two of unequal length where the model pads; then a step taken back, the rows reordered, and the first again.
A cell has the number of tokens that are those of calls without a cache.

Made by `python -m evidence.loops.make_page ZOO`.

"""
ZOO = (
    "transformers/llama",
    "transformers/t5",
    "transformers/llama-static",
    "transformers/marian-static",
    "transformers/lfm2",
    "transformers/llama-dynamo-pair",
    "genai/llama",
    "genai/llama-fp16",
    "genai/gpt-oss",
    "genai/whisper",
    "optimum/bart",
    "optimum/moonshine",
    "optimum/trocr",
    "optimum/bloom",
    "optimum/gpt_bigcode",
)
"""Exports of the zoo whose loops differ."""
TEXTS = (
    "decoder-only-half-cache",
    "layout-aihub-whisper",
    "layout-delta",
    "layout-delta-appended",
    "layout-embed-tokens",
    "layout-per-layer-embeddings",
    "layout-hybrid-recurrent",
    "layout-mamba-states",
    "layout-moonshine-v1",
    "layout-ort-gpt2-stacked",
    "layout-ort-t5-init",
    "layout-ort-whisper",
    "layout-retained-state",
    "layout-scatter-static-pair",
    "layout-sherpa-whisper",
    "pair",
)
"""Text fixtures of layouts that no export above has."""


def cell(language: str, model: Path, scratch: Path) -> str:
    """The tokens that the program found, or the first run that went wrong."""
    try:
        done = played(language, model, scratch)
    except pytest.skip.Exception as missing:
        return str(missing).replace("|", "\\|")
    if done.returncode:
        wrong = [line for line in (done.stdout + done.stderr).splitlines() if not line.endswith(": as expected")]
        return f"**{wrong[0] if wrong else done.returncode}**".replace("|", "\\|")
    runs = json.loads((materials(model, scratch).folder / VECTORS_FILE).read_text("utf-8"))["runs"]
    expected = [call["expect"] for run in runs for call in run["calls"] if "expect" in call]
    return f"{sum(token >= 0 for row in expected for token in row)} tokens"


def models(zoo: Path, scratch: Path) -> Iterator[Path]:
    """The folder of each row."""
    yield from (EXPORTS / name for name in COMMITTED)
    yield from (zoo / name for name in ZOO)
    fixtures = load_all()
    yield from (fixtures[f"{name}-healthy"].write(scratch / name) for name in TEXTS)


def table(zoo: Path) -> str:
    """The table of the page."""
    names = list(LANGUAGES)
    lines = [f"| model | layout | {' | '.join(LANGUAGES[name].title for name in names)} |"]
    lines += [f"|{' --- |' * (len(names) + 2)}"]
    with tempfile.TemporaryDirectory() as scratch:
        for model in models(zoo, Path(scratch)):
            folder = open_folder(str(model))
            layout = read_contract(folder.stacks[0], folder.side_cars).layout
            shown = model.relative_to(zoo).as_posix() if zoo in model.parents else model.name
            cells = [cell(language, model, Path(scratch)) for language in names]
            lines.append(f"| {shown} | {layout} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the page."""
    zoo = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as scratch:
        languages = [name for name, one in LANGUAGES.items() if one.program is None]
        compared = against_pytorch.table(zoo, languages, Path(scratch))
    PAGE.write_text(HEAD + table(zoo) + against_pytorch.HEAD + compared, encoding="utf-8")


if __name__ == "__main__":
    main()
