"""Writes evidence/zoo.md from a run of the whole zoo.

    python -m evidence.zoo.make_page [--exports DIR]

It takes minutes and makes the isolated environments. DIR keeps the exports, for the next run. Nothing is written where
kvdoctor says anything but what the tables hold.
"""

import argparse
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from evidence.zoo import genai_exports, optimum_exports, transformers_exports, variants
from evidence.zoo.diagnosis import Seen, diagnose
from evidence.zoo.making import Maker
from evidence.zoo.row import CONSUMERS, Row
from evidence.zoo.tables import ROWS
from kvdoctor.diagnose.context import Consumer
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

DOCUMENT = Path(__file__).parents[1] / "zoo.md"
HEAD = """# The zoo

Tiny exports of many architectures with random weights, as today's exporters and tools make them, and what kvdoctor
says of each. Made by `python -m evidence.zoo.make_page` from a run; `python -m pytest -n 2 evidence/zoo -m zoo`
compares every row with the tables in `evidence/zoo`, which have the reasons, and fails for one too many or too few.

| made by | versions |
| --- | --- |
{versions}

*contract*: whether the cache contract was read right: the layout, the first step, the slots and what a step does to
each. *plain*, *held*: the verdict for a loop that feeds every returned slot back, and for one that holds the
cross-attention cache, with the errors and warnings. *difference*: the largest one between decoding with the cache and
without, in the loop that holds, in standard deviations of the logits, rounded to a power of ten; int8 makes that noise
with and without a cache. The `committed` exports lie in `fixtures/exports`.

| exporter | architecture | variant | layout | slots | contract | plain | held | difference |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
FAULTS_HEAD = """
## What is wrong with the faulty ones

| check | severity | consumer | exports | reason |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Measured:
    """The cells of a row that come from a run."""

    contract: str
    plain: str
    held: str
    difference: str


def key(row: Row) -> tuple[str, str, str]:
    """The cells that name a row."""
    return row.exporter, row.architecture, row.variant


def page(measured: dict[tuple[str, str, str], Measured]) -> str:
    """The whole page: the tables, and what was measured for each row."""
    lines = []
    for row in ROWS:
        cells = measured[key(row)]
        layouts = ", ".join(stack.layout for stack in row.stacks)
        lines.append(_line(*key(row), layouts, _slots(row), cells.contract, cells.plain, cells.held, cells.difference))
    return HEAD.format(versions="\n".join(_versions())) + "\n".join(lines) + "\n" + FAULTS_HEAD + _faults()


def read(text: str) -> dict[tuple[str, str, str], Measured]:
    """The measured cells of a page."""
    measured = {}
    for line in text.partition(FAULTS_HEAD)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 9 and cells[0] not in ("exporter", "---"):
            measured[cells[0], cells[1], cells[2]] = Measured(*cells[5:])
    return measured


def measure(row: Row, seen: Seen) -> Measured:
    """The cells of a row.

    Raises:
        ValueError: the run does not say what the table holds.
    """
    wrong = [c for c in CONSUMERS if not row.allows(c, seen.told[c]) or seen.verdicts[c] not in row.verdicts(c)]
    if seen.stacks != row.stacks or wrong:
        raise ValueError(f"{row} is not as the table says:\n{seen.details}")
    plain, held = (_verdict(seen, consumer) for consumer in CONSUMERS)
    return Measured("right", plain, held, _power_of_ten(seen.largest))


def _verdict(seen: Seen, consumer: Consumer) -> str:
    checks = sorted({check for check, _, _ in seen.told[consumer]})
    return seen.verdicts[consumer] + (": " + ", ".join(checks) if checks else "")


def _power_of_ten(difference: float | None) -> str:
    if difference is None:
        return "-"
    return f"1e{round(math.log10(difference))}" if difference else "0"


def _slots(row: Row) -> str:
    return " / ".join(dict.fromkeys(", ".join(map(str, stack.slots)) for stack in row.stacks))


def _versions() -> list[str]:
    scripts = {"optimum": optimum_exports, "transformers": transformers_exports, "genai": genai_exports}
    lines = {exporter: script.REQUIREMENTS for exporter, script in scripts.items()}
    lines["int8, fp16, onnxslim, ort-basic, ort-all"] = variants.REQUIREMENTS
    return [_line(name, ", ".join(r.replace("==", " ") for r in requirements)) for name, requirements in lines.items()]


def _faults() -> str:
    """Each fault once, with the exports that have it."""
    exports: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        for fault in row.faults:
            consumers = ", ".join(fault.consumers)
            names = exports.setdefault((fault.check, fault.severity, consumers, fault.why), [])
            names += [str(row)] if str(row) not in names else []
    return "".join(
        f"{_line(check, severity, consumers, _named(names), why)}\n"
        for (check, severity, consumers, why), names in exports.items()
    )


def _named(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{len(names)} of them, {names[0]} the first"


def _line(*cells: str) -> str:
    assert not any(re.search(r"[|\n]", cell) for cell in cells)
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Reads the command line, runs the zoo, writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exports", type=Path, metavar="DIR", help="where the exports are kept, or lie already")
    args = parser.parse_args()
    measured, problems = {}, []
    with tempfile.TemporaryDirectory() as scratch, Runtime(Options().limits) as runtime:
        maker = Maker(args.exports or Path(scratch))
        for row in ROWS:
            made = maker.make(row)
            if made.obstacle or made.failure:
                problems.append(f"{row}: {made.obstacle or made.failure}")
                continue
            try:
                measured[key(row)] = measure(row, diagnose(made.folder, runtime))
            except ValueError as problem:
                problems.append(str(problem))
            print(row, measured.get(key(row), "WRONG"), flush=True)
    if problems:
        print("\n\n".join(problems), file=sys.stderr)
        return 1
    DOCUMENT.write_text(page(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
