"""Writes examples/loops, and the table in docs/loops.md: `python docs/make_loops.py [--table ZOO]`.

The examples are the loops for two models, in each language, as `kvdoctor loop` writes them. The table is made by
building and running a loop for each of its models in each language, with the tools that are installed. ZOO is a folder
with the exports of the zoo, each as EXPORTER/NAME (tests/zoo).
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options

ROOT = Path(__file__).parent.parent
EXAMPLES, PAGE = ROOT / "examples" / "loops", ROOT / "docs" / "loops.md"
MODELS = {"marian": "marian-4.57.6", "llama": "llama-gqa"}
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COMMITTED = ("marian-4.46.3", "marian-4.57.6", "t5", "whisper", "gpt2", "llama-gqa")
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


def write_example(language: str, model: str, out: Path) -> None:
    """Write one example into a folder that is not there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    made = write_loop(LoopRequest(str(ROOT / "fixtures" / "exports" / MODELS[model]), str(out), language), Options())
    if made.out is None:
        raise RuntimeError(f"no loop in {language} for {model}: {made.reason}")


def examples() -> list[tuple[str, str]]:
    """Every example: a language and a model."""
    return [(language, model) for language in languages() for model in MODELS]


def cell(language: str, model: Path) -> str:
    """What the program did: the same tokens, with its own measurements, or the reason why not."""
    made = write_loop(LoopRequest(str(model), None, language, check=True), Options())
    if reason := made.reason or made.unchecked:
        return reason.replace("|", "\\|")
    if problem := next((result.problem for result in made.results if result.problem), None):
        return f"**{problem}**"
    found = re.search(r"([\d.]+) tokens/s, peak memory (\d+) MiB", made.results[-1].measured)
    rate, memory = (float(found[1]), found[2]) if found else (0.0, "?")
    return f"same tokens, {1000 / rate:.2f} ms, {memory} MiB" if rate else f"same tokens, {memory} MiB"


def models(zoo: Path, scratch: Path) -> Iterator[Path]:
    """The folder of each row."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import text_fixtures

    yield from (ROOT / "fixtures" / "exports" / name for name in COMMITTED)
    yield from (zoo / name for name in ZOO)
    fixtures = text_fixtures.load_all()
    yield from (fixtures[f"{name}-healthy"].write(scratch / name) for name in TEXTS)


def table(zoo: Path) -> str:
    """The table of the page."""
    names = [language for language in languages() if language != "csharp"]
    lines = [f"| model | layout | {' | '.join(languages()[name].title for name in names)} |"]
    lines += [f"|{' --- |' * (len(names) + 2)}"]
    with tempfile.TemporaryDirectory() as scratch:
        for model in models(zoo, Path(scratch)):
            folder = open_folder(str(model))
            layout = read_contract(folder.stacks[0], folder.side_cars).layout
            shown = model.relative_to(zoo).as_posix() if zoo in model.parents else model.name
            with ThreadPoolExecutor(2) as workers:
                cells = workers.map(cell, names, [model] * len(names))
                lines.append(f"| {shown} | {layout} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    """Write the examples, and with --table the table."""
    for language, model in examples():
        place = EXAMPLES / f"{language}-{model}"
        shutil.rmtree(place, ignore_errors=True)
        write_example(language, model, place)
    if "--table" in sys.argv:
        zoo = Path(sys.argv[sys.argv.index("--table") + 1]).absolute()
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table(zoo)}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
