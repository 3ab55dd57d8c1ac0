"""Writes evidence/repairs.md from a run: every fault that a repair removes, in the exports that it was injected into.

    python -m evidence.repairs.make_page [--exports DIR]

It takes about ten minutes and makes the isolated environments of the zoo. DIR keeps the exports for the next run.
Nothing is written if a repair is not proved.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from evidence.faults.outcome import Missing, healthy_export
from evidence.faults.registry import Fault
from evidence.repairs.repaired import NOT_REPAIRABLE, OUT_OF_REACH, faults, repair_fault
from evidence.zoo.making import Maker

DOCUMENT = Path(__file__).parents[1] / "repairs.md"
MOST = 4
"""Exports that a fault is injected into, of different architectures first."""
HEAD = """# Faults that are repaired

Healthy exports, each with one fault injected ([the faults](faults.md)), repaired by `kvdoctor re-export` and proved:
{summary}. The [repairs](../docs/repairs.md) are those of the graph itself.

Made by `python -m evidence.repairs.make_page` from a run.

| fault | injected change | finding | repaired by | exports | proved |
| --- | --- | --- | --- | --- | --- |
"""
ELSEWHERE = """
## Faults without a repair

Faults that lead to the same findings but cannot be repaired in the graph. Nothing is written for them, and the report
gives the reason.

| fault | injected change | finding | reason |
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
    for base in [name for name in fault.bases if name not in OUT_OF_REACH.get(fault.name, ())]:
        architecture = base.partition("-")[0]
        (more if architecture in seen else first).append(base)
        seen.add(architecture)
    return tuple((first + more)[:MOST])


def page(measured: dict[str, Measured]) -> str:
    """The whole page."""
    rows, elsewhere = [], []
    for name, fault in faults().items():
        if name in NOT_REPAIRABLE:
            elsewhere.append(_line(name, fault.idea, fault.check, NOT_REPAIRABLE[name]))
            continue
        cells, bases = measured[name], chosen(fault)
        by = ", ".join(word for word, _ in sorted(cells.by.items(), key=lambda item: (-item[1], item[0])))
        rows.append(_line(name, fault.idea, fault.check, by, ", ".join(bases), f"{cells.proved} of {len(bases)}"))
    done = {name: fault for name, fault in faults().items() if name not in NOT_REPAIRABLE}
    total, proved = sum(len(chosen(f)) for f in done.values()), sum(measured[n].proved for n in done)
    summary = f"{len(done)} faults in {total} broken exports, {proved} proved"
    head = HEAD.format(summary=summary)
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
            for base in chosen(fault):
                try:
                    repaired = repair_fault(fault, healthy_export(base, maker), Path(scratch, name, base))
                except Missing as missing:
                    problems.append(f"{base}: {missing}")
                    continue
                measured[name].proved += repaired.proved
                measured[name].by.update(repaired.repairs)
                if repaired.proved == (name in NOT_REPAIRABLE):
                    problems.append(f"{name} in {base}: {repaired.details}")
            print(f"{name}: {measured[name].proved} of {len(chosen(fault))} {dict(measured[name].by)}", flush=True)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    DOCUMENT.write_text(page(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
