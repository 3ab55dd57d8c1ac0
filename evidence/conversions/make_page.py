"""Writes evidence/conversions.md: `python -m evidence.conversions.make_page ZOO`.

Each conversion is made from each model, and proved as `kvdoctor convert` proves it. ZOO is a folder with the exports
of the zoo, each as EXPORTER/NAME. `--layout genai` needs the network the first time.
"""

import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvdoctor
from kvdoctor.errors import KvdoctorError

PAGE = Path(__file__).parents[1] / "conversions.md"
HEAD = """# Conversions of exports

Each [conversion](../docs/conversions.md) and layout is proved on at least six architectures: on small models with
random weights that exporters made. *proved*: the copy was made, and agrees with the original. For `--cache growing`
that is the copy with a static cache. A number is the reason why there is no copy.

Made by `python -m evidence.conversions.make_page ZOO`.

"""
STATIC, GROWING = "--cache static=32", "--cache growing"
CONVERSIONS: dict[str, dict[str, Any]] = {
    "--logits last": {"logits": "last"},
    "--logits selectable": {"logits": "selectable"},
    "--sizes batch=1,new=1,past=32": {"sizes": ("batch=1", "new=1", "past=32")},
    STATIC: {"cache": "static=32"},
    GROWING: {"cache": "growing"},
    "--cache-type int8": {"cache_type": "int8"},
    "--attention gqa": {"attention": "gqa"},
    "--layout pair": {"layout": "pair"},
    "--layout optimum": {"layout": "optimum"},
    "--layout shared": {"layout": "shared"},
    "--layout genai": {"layout": "genai"},
}
TABLES = tuple(tuple(one for one in CONVERSIONS if one.startswith("--layout") == layouts) for layouts in (False, True))
"""The columns of the two tables: of more, a screen does not show a line."""
MODELS = (
    "optimum/gpt2",
    "optimum/llama",
    "optimum/bloom",
    "optimum/falcon-alibi",
    "optimum/gemma3_text",
    "optimum/gpt_bigcode",
    "optimum/deepseek_v3",
    "optimum/opt",
    "genai/llama",
    "genai/lfm2",
    "genai/phi3",
    "transformers/llama-dynamo",
    "transformers/llama",
    "transformers/llama-static",
    "transformers/gpt2-static",
    "transformers/lfm2",
    "transformers/qwen3",
    "transformers/bart",
    "transformers/marian",
    "transformers/t5",
    "transformers/whisper",
    "optimum/t5",
    "optimum/whisper",
    "optimum/marian",
    "optimum/bart",
    "optimum/m2m_100",
    "optimum/pegasus",
)
"""Exports of the zoo that differ in operators, layouts or caches."""
REFUSED = re.compile(r"^.*?cannot be (given the layout '[^']+'|converted with --.*?): (\S+: )?")


def convert(model: Path, conversion: str) -> str:
    """`proved`, or why there is no copy. A folder with several decoders is converted by its merged one.

    A cache that grows becomes a buffer first, where a buffer is to become one that grows.
    """
    path = next(iter(model.glob("decoder_model_merged.onnx")), model)
    with TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        try:
            report = kvdoctor.convert(path, copy, **CONVERSIONS[STATIC]) if conversion == GROWING else None
            if report is None or copy.exists():
                report = kvdoctor.convert(path if report is None else copy, **CONVERSIONS[conversion])
        except KvdoctorError as error:
            return REFUSED.sub("", re.sub(r"\s+", " ", str(error)))
    proof = report.repair.proof if report.repair is not None else ()
    failed = next((f"not proved: {entry.claim} ({entry.detail})" for entry in proof if not entry.holds), None)
    refused = (REFUSED.sub("", note) for note in report.notes if REFUSED.match(note))
    return failed or ("proved" if proof else next(refused, "nothing was changed"))


Results = dict[str, dict[str, str]]
"""By model and conversion `proved`, or why there is no copy."""


def measure(zoo: Path) -> Results:
    """Make every conversion of every model."""
    found: Results = {}
    for name in MODELS:
        found[name] = {conversion: shorten(convert(zoo / name, conversion), zoo) for conversion in CONVERSIONS}
        print(name, found[name], flush=True)
    return found


def render(found: Results) -> str:
    """The tables, and under them the reasons why a model has no copy."""
    lines: list[str] = []
    reasons: dict[str, int] = {}
    for columns in TABLES:
        lines += [f"| model | {' | '.join(f'`{name}`' for name in columns)} |", f"|{' --- |' * (len(columns) + 1)}"]
        for name, cells in found.items():
            shown = (_render_cell(cells[column], reasons) for column in columns)
            lines.append(f"| {name} | {' | '.join(shown)} |")
        lines.append("")
    listed = (f"{number}. {reason}" for reason, number in reasons.items())
    return "".join(f"{line}\n" for line in (*lines, *listed))


def _render_cell(cell: str, reasons: dict[str, int]) -> str:
    return cell if cell == "proved" else f"({reasons.setdefault(cell, len(reasons) + 1)})"


def read_tables() -> Results:
    """The cells of the page by model and conversion."""
    lines = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]
    found: Results = {name: {} for name in MODELS}
    columns: list[str] = []
    for name, *cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        if name == "model":
            columns = [cell.strip("`") for cell in cells]
        else:
            found[name].update(zip(columns, cells, strict=True))
    return found


def shorten(reason: str, zoo: Path) -> str:
    """A reason without the paths of this machine, and without the names of inputs, which differ between models."""
    text = reason.replace(str(zoo), "ZOO")
    text = re.sub(r"'?ZOO/\S+'? ?", "", text).strip()
    text = re.sub(r"^(decoder|pair|merged): ", "", text)
    text = re.split(r"; instead: |, so that ", text)[0]
    return text if len(text) <= 160 else f"{text[:157].rpartition(' ')[0]} ..."


def main() -> None:
    """Write the page."""
    PAGE.write_text(HEAD + render(measure(Path(sys.argv[1]).absolute())), encoding="utf-8")


if __name__ == "__main__":
    main()
