"""Writes examples/loops, and the table in docs/loops.md: `python docs/make_loops.py [--table]`.

The examples are the loops for two models, in each language, as `kvdoctor loop` writes them. The table is made by
building and running a loop for each of its models in each language, with the tools that are installed.
"""

import re
import shutil
import sys
from pathlib import Path

from kvdoctor.loops.language import languages
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options

ROOT = Path(__file__).parent.parent
EXAMPLES, PAGE = ROOT / "examples" / "loops", ROOT / "docs" / "loops.md"
MODELS = {"marian": "marian-4.57.6", "llama": "llama-gqa"}
TABLE = ("marian-4.46.3", "marian-4.57.6", "t5", "whisper", "gpt2", "llama-gqa")
"""The exports of the table, all of them committed."""
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def write_example(language: str, model: str, out: Path) -> None:
    """Write one example into a folder that is not there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    made = write_loop(LoopRequest(str(ROOT / "fixtures" / "exports" / MODELS[model]), str(out), language), Options())
    if made.out is None:
        raise RuntimeError(f"no loop in {language} for {model}: {made.reason}")


def examples() -> list[tuple[str, str]]:
    """Every example: a language and a model."""
    return [(language, model) for language in languages() for model in MODELS]


def cell(language: str, model: str) -> str:
    """What the program did: the same tokens, with its own measurements, or the reason why not."""
    request = LoopRequest(str(ROOT / "fixtures" / "exports" / model), None, language, check=True)
    made = write_loop(request, Options())
    if reason := made.reason or made.unchecked:
        return reason.replace("|", "\\|")
    if problem := next((result.problem for result in made.results if result.problem), None):
        return f"**{problem}**"
    found = re.search(r"([\d.]+) tokens/s, peak memory (\d+) MiB", made.results[-1].measured)
    rate, memory = (float(found[1]), found[2]) if found else (0.0, "?")
    return f"same tokens, {1000 / rate:.2f} ms, {memory} MiB" if rate else f"same tokens, {memory} MiB"


def table() -> str:
    """The table of the page."""
    names = [language for language in languages() if language != "csharp"]
    head = f"| export | {' | '.join(languages()[name].title for name in names)} |\n|{' --- |' * (len(names) + 1)}\n"
    rows = [f"| {model} | {' | '.join(cell(name, model) for name in names)} |\n" for model in TABLE]
    return head + "".join(rows)


def main() -> None:
    """Write the examples, and with --table the table."""
    for language, model in examples():
        place = EXAMPLES / f"{language}-{model}"
        shutil.rmtree(place, ignore_errors=True)
        write_example(language, model, place)
    if "--table" in sys.argv:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
