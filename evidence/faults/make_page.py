"""Writes evidence/faults.md from a run of all faults.

    python -m evidence.faults.make_page [--exports DIR] [FAULT ...]
    python -m evidence.faults.make_page --generated RESULTS [RESULTS ...]
    python -m evidence.faults.make_page --without-run [--exports DIR]

The first takes about a quarter of an hour and makes the isolated environments of the zoo. DIR keeps the exports, for
the next run. With FAULTs only those are run, and the others stand as they stood. Nothing is written where a fault is
not found, or something harmless is. The second writes the section of the generated decoders alone, from results of
`python -m evidence.generated.measure --record RESULTS`. The third writes what `inspect` says of the faults.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from evidence.faults import without_run
from evidence.faults.outcome import Missing, Outcome, healthy_export, treat
from evidence.faults.registry import Fault, load
from evidence.generated import page as generated_page
from evidence.zoo.making import Maker
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

DOCUMENT = Path(__file__).parents[1] / "faults.md"
DEMANDED = 95
"""Faults in a hundred that must have the right name."""
HEAD = """# The faults

Healthy exports, each broken in one way on purpose, and what kvdoctor says of them. Made by
`python -m evidence.faults.make_page` from a run; `python -m pytest evidence/faults -m 'slow or not slow'` fails if a
cell changes. The code that breaks the exports is in `evidence/faults`: it needs onnx only, and does not use kvdoctor.

*expected finding*: the name of the leading finding, the first of the highest severity; a warning where the loop of one
token a step is right. *found*, *named*: in how many exports the fault was found, and was reported under that name.
*decided by*: the experiment that the finding rests on (`kvdoctor step-test -v` shows them all), the graph, or the file.

{summary}

| fault | what was done | expected finding | severity | exports | found | named | decided by |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
HARMLESS_HEAD = """
## Harmless changes

These must give no finding, and the verdict must be healthy.

| change | what was done | exports | silent |
| --- | --- | --- | --- |
"""
MISNAMED_HEAD = """
## Found under another name

The leading finding has a name, or a severity, that differs from the expected one.

| fault | export | finding |
| --- | --- | --- |
"""


@dataclass
class Measured:
    """The cells of a row that come from a run."""

    found: int = 0
    named: int = 0
    decided: Counter[str] = field(default_factory=Counter)
    misnamed: dict[str, str] = field(default_factory=dict)

    def add(self, base: str, outcome: Outcome) -> None:
        self.found += outcome.found
        self.named += outcome.named
        if outcome.decided_by:
            self.decided[outcome.decided_by] += 1
        if outcome.found and not outcome.named:
            self.misnamed[base] = outcome.called


def generated_section(text: str) -> str:
    """The section of the generated decoders of a page, with its heading; empty where there is none."""
    _, title, rest = text.partition(generated_page.TITLE)
    return f"\n{title}{rest}" if title else ""


def page(measured: dict[str, Measured], sections: str) -> str:
    """The whole page, with the sections that have measurements of their own."""
    faults = load()
    rows, silent, other = [], [], []
    for name, fault in faults.items():
        cells = measured[name]
        if not fault.check:
            silent.append(_line(name, fault.idea, _exports(fault), f"{cells.named} of {len(fault.bases)}"))
            continue
        decided = ", ".join(word for word, _ in sorted(cells.decided.items(), key=lambda item: (-item[1], item[0])))
        counts = (f"{count} of {len(fault.bases)}" for count in (cells.found, cells.named))
        rows.append(_line(name, fault.idea, fault.check, fault.severity, _exports(fault), *counts, decided))
        other += [_line(name, base, called) for base, called in cells.misnamed.items()]
    text = HEAD.format(summary=_summary(measured)) + "\n".join(rows) + "\n" + HARMLESS_HEAD + "\n".join(silent) + "\n"
    return text + (MISNAMED_HEAD + "\n".join(other) + "\n" if other else "") + sections


def other_sections(text: str) -> str:
    """The sections of a page that have measurements of their own."""
    return without_run.find_section(text) + generated_section(text)


def read(text: str) -> dict[str, Measured]:
    """The measured cells of a page."""
    measured: dict[str, Measured] = {}
    text = text.partition(f"\n{without_run.TITLE}")[0].partition(generated_page.TITLE)[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or cells[0] in ("fault", "change", "---"):
            continue
        if len(cells) == 8:
            found, named = (int(cell.partition(" ")[0]) for cell in cells[5:7])
            # The page keeps the order of the words; how often each decided is not read back.
            decided = Counter({word: 100 - place for place, word in enumerate(cells[7].split(", ")) if word})
            measured[cells[0]] = Measured(found, named, decided)
        elif len(cells) == 4:
            measured[cells[0]] = Measured(named=int(cells[3].partition(" ")[0]))
        elif len(cells) == 3:
            measured[cells[0]].misnamed[cells[1]] = cells[2]
    return measured


def counted(measured: dict[str, Measured]) -> tuple[int, int, int]:
    """Broken exports, those of which the fault was found, and those of which it was named."""
    faults = [fault for fault in load().values() if fault.check]
    done = sum(len(fault.bases) for fault in faults)
    return done, sum(measured[f.name].found for f in faults), sum(measured[f.name].named for f in faults)


def _summary(measured: dict[str, Measured]) -> str:
    faults = load().values()
    done, found, named = counted(measured)
    harmless = [fault for fault in faults if not fault.check]
    silent, changed = sum(measured[f.name].named for f in harmless), sum(len(f.bases) for f in harmless)
    return (
        f"{len(faults) - len(harmless)} faults in {done} broken exports: {found} found, {named} of them by the right "
        f"name ({100 * named / done:.1f} in 100). {len(harmless)} harmless changes in {changed} exports: {silent} "
        f"silent."
    )


def _exports(fault: Fault) -> str:
    return ", ".join(fault.bases)


def _line(*cells: str) -> str:
    assert not any(re.search(r"[|\n]", cell) for cell in cells), cells
    return "| " + " | ".join(cells) + " |"


def measure_without_run(exports: Path | None) -> str:
    """The section of what an inspection says."""
    faults, said = load(), {}
    with tempfile.TemporaryDirectory() as scratch:
        maker = Maker(exports or Path(scratch, "exports"))
        for name, fault in faults.items():
            base = without_run.choose_export(name, faults)
            names = without_run.inspect_broken(fault, healthy_export(base, maker), Path(scratch, name))
            said[name] = without_run.Said(base, names)
            print(f"{name} in {base}: {', '.join(names)}", flush=True)
    return without_run.section(said)


def main() -> int:
    """Reads the command line, runs all faults, writes the page and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--exports", type=Path, metavar="DIR", help="where the exports are kept, or lie already")
    parser.add_argument("--generated", type=Path, nargs="+", metavar="RESULTS", help="results of evidence/generated")
    parser.add_argument("--without-run", action="store_true", help="what inspect says of one export for each fault")
    parser.add_argument("faults", nargs="*", metavar="FAULT", choices=[*load(), []], help="run these only")
    args = parser.parse_args()
    chosen = {name: fault for name, fault in load().items() if name in args.faults or not args.faults}
    text = DOCUMENT.read_text(encoding="utf-8")
    if args.generated:
        section = generated_page.section(generated_page.read_results(args.generated))
        DOCUMENT.write_text(page(read(text), f"{without_run.find_section(text)}\n{section}"), encoding="utf-8")
        return 0
    if args.without_run:
        section = measure_without_run(args.exports)
        DOCUMENT.write_text(page(read(text), section + generated_section(text)), encoding="utf-8")
        return 0
    before = read(text) if args.faults else {}
    measured, problems = {name: Measured() if name in chosen else before[name] for name in load()}, []
    with tempfile.TemporaryDirectory() as scratch, Runtime(Options().limits) as runtime:
        maker = Maker(args.exports or Path(scratch, "exports"))
        for name, fault in chosen.items():
            for base in fault.bases:
                try:
                    outcome = treat(fault, healthy_export(base, maker), Path(scratch, name, base), runtime)
                except Missing as missing:
                    problems.append(f"{base}: {missing}")
                    continue
                measured[name].add(base, outcome)
                if not outcome.found:
                    problems.append(f"{name} in {base}: {outcome.details}")
            print(f"{name}: {measured[name].named} of {len(fault.bases)} {measured[name].misnamed}", flush=True)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    DOCUMENT.write_text(page(measured, other_sections(text)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
