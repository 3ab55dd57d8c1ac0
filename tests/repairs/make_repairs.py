"""Writes docs/repairs.md from a run: every fault that a repair mends, in the exports it is done to.

    python tests/repairs/make_repairs.py [--exports DIR]

It takes about ten minutes and makes the isolated environments of the zoo. DIR keeps the exports, for the next run.
Nothing is written where a repair is not proved.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "faults"), str(HERE.parent / "zoo"), str(HERE.parent)]

from cured import MENDED_ELSEWHERE, OUT_OF_REACH, cure, faults  # noqa: E402 - the modules are found from here on
from making import Maker  # noqa: E402
from outcome import Missing, healthy_export  # noqa: E402
from registry import Fault  # noqa: E402

from kvdoctor.repairs import load  # noqa: E402

DOCUMENT = HERE.parents[1] / "docs" / "repairs.md"
MOST = 4
"""Exports that a fault is tried in; those of different architectures first."""
HEAD = """# The repairs

What `kvdoctor re-export PATH -o OUT` can mend on the graph itself. A repair is applied where a check that calls for it
fired, to a copy, and is proved by a second diagnosis: the finding is gone, nothing new is there, the plain and the held
loop have the logits of the reference run, and the numbers of the original are kept as the column *keeps* says. Where a
proof fails nothing is written (`--keep-unproved` writes it all the same, and says so). `--fix NAMES` takes only the
named ones. A finding that is a note is mended where it is named, or where nothing worse is there to be mended.

*keeps*: bits, all logits of the loops that were right before, bit for bit; first-step, those of the first step, bit for
bit; reference, those of the first step within the noise of the arithmetic; own, none, as the fault is in all of them.

Made by `python tests/repairs/make_repairs.py` from a run.

| repair | what it does | mends | keeps |
| --- | --- | --- | --- |
{repairs}

What each one requires and ensures stands at the head of its file in `kvdoctor/repairs`.

## What was mended

Healthy exports, broken in one way on purpose (docs/faults.md), repaired and proved: {summary}.

| fault | what was done | called | mended by | exports | proved |
| --- | --- | --- | --- | --- | --- |
"""
ELSEWHERE = """
## What no repair mends

Faults that are called by the same names. Nothing is written for them, and the report says why.

| fault | what was done | called | why |
| --- | --- | --- | --- |
"""


@dataclass
class Measured:
    """The cells of a row that come from a run."""

    proved: int = 0
    by: Counter[str] = field(default_factory=Counter)


def chosen(fault: Fault) -> tuple[str, ...]:
    """The exports that a fault is tried in: one of each architecture before the second of any."""
    seen: set[str] = set()
    first, more = [], []
    for patient in [name for name in fault.patients if name not in OUT_OF_REACH.get(fault.name, ())]:
        architecture = patient.partition("-")[0]
        (more if architecture in seen else first).append(patient)
        seen.add(architecture)
    return tuple((first + more)[:MOST])


def page(measured: dict[str, Measured]) -> str:
    """The whole page."""
    repairs = "\n".join(_line(f"`{r.name}`", r.summary, ", ".join(r.mends), r.keeps) for r in load())
    rows, elsewhere = [], []
    for name, fault in faults().items():
        if name in MENDED_ELSEWHERE:
            elsewhere.append(_line(name, fault.idea, fault.check, MENDED_ELSEWHERE[name]))
            continue
        cells, patients = measured[name], chosen(fault)
        by = ", ".join(word for word, _ in sorted(cells.by.items(), key=lambda item: (-item[1], item[0])))
        rows.append(_line(name, fault.idea, fault.check, by, ", ".join(patients), f"{cells.proved} of {len(patients)}"))
    done = {name: fault for name, fault in faults().items() if name not in MENDED_ELSEWHERE}
    total, proved = sum(len(chosen(f)) for f in done.values()), sum(measured[n].proved for n in done)
    summary = f"{len(done)} faults in {total} broken exports, {proved} proved"
    head = HEAD.format(repairs=repairs, summary=summary)
    return head + "\n".join(rows) + "\n" + ELSEWHERE + "\n".join(elsewhere) + "\n"


def read(text: str) -> dict[str, Measured]:
    """The measured cells of a page."""
    found: dict[str, Measured] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 6 and cells[0] not in ("fault", "---"):
            # The page keeps the order of the names; how often each was used is not read back.
            by = Counter({word: 100 - place for place, word in enumerate(cells[3].split(", ")) if word})
            found[cells[0]] = Measured(int(cells[5].partition(" ")[0]), by)
    return found


def _line(*cells: str) -> str:
    assert not any(re.search(r"[|\n]", cell) for cell in cells), cells
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Reads the command line, cures all faults, writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exports", type=Path, metavar="DIR", help="where the exports are kept, or lie already")
    args = parser.parse_args()
    measured, problems = {name: Measured() for name in faults()}, []
    with tempfile.TemporaryDirectory() as scratch:
        maker = Maker(args.exports or Path(scratch, "exports"))
        for name, fault in faults().items():
            for patient in chosen(fault):
                try:
                    cured = cure(fault, healthy_export(patient, maker), Path(scratch, name, patient))
                except Missing as missing:
                    problems.append(f"{patient}: {missing}")
                    continue
                measured[name].proved += cured.proved
                measured[name].by.update(cured.repairs)
                if cured.proved == (name in MENDED_ELSEWHERE):
                    problems.append(f"{name} in {patient}: {cured.details}")
            print(f"{name}: {measured[name].proved} of {len(chosen(fault))} {dict(measured[name].by)}", flush=True)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    DOCUMENT.write_text(page(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
