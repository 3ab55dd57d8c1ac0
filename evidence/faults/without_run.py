"""What `inspect` names of the faults, without a run: one broken export for each fault, and its section of the page."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evidence.faults.base_models import Export
from evidence.faults.registry import Fault, load
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.options import Options

TITLE = "## Without a run\n"
DEMANDED = 80
"""Faults in a hundred that `inspect` must name."""
HEAD = """
What `kvdoctor inspect` says of one broken export for each fault; it runs nothing and reads no weights. *named*: a
finding has the name that the fault must have; what needs a run to be certain is *suspected*. Made by
`python -m evidence.faults.make_page --without-run`.

{summary}

| fault | export | expected finding | inspect says |
| --- | --- | --- | --- |
"""
NOTHING = "nothing"


@dataclass(frozen=True)
class Said:
    """What an inspection says of one broken export: the names of its warnings and errors."""

    base: str
    names: tuple[str, ...]

    def names_it(self, fault: Fault) -> bool:
        """Whether one is the name that the fault must have; of something harmless, whether there is none."""
        return fault.check in self.names if fault.check else not self.names


def choose_export(name: str, faults: Mapping[str, Fault]) -> str:
    """The export of a fault: in turn, as the slow tests have it."""
    bases, number = faults[name].bases, list(faults).index(name)
    return bases[number % len(bases)]


def inspect_broken(fault: Fault, export: Export, folder: Path) -> tuple[str, ...]:
    """Break an export, and give the names of what an inspection finds."""
    fault.harm(export)
    report = inspect(str(export.write(folder)), Options(consumer=fault.consumer))
    notes = fault.severity == "note"
    return tuple(dict.fromkeys(f.name for f in report.findings if notes or f.severity != "note"))


def section(said: Mapping[str, Said]) -> str:
    """The section of the page."""
    faults = load()
    broken = {name: fault for name, fault in faults.items() if fault.check}
    named = [name for name, fault in broken.items() if said[name].names_it(fault)]
    harmless = [name for name, fault in faults.items() if not fault.check]
    silent = [name for name in harmless if said[name].names_it(faults[name])]
    summary = (
        f"{len(named)} of {len(broken)} faults named without a run ({100 * len(named) / len(broken):.0f} in 100); "
        f"{len(silent)} of {len(harmless)} harmless changes silent."
    )
    rows = []
    for name, fault in faults.items():
        shown = ", ".join(said[name].names) or NOTHING
        rows.append(f"| {name} | {said[name].base} | {fault.check or NOTHING} | {shown} |")
    return f"\n{TITLE}{HEAD.format(summary=summary)}" + "\n".join(rows) + "\n"


def find_section(text: str) -> str:
    """The section of a page as it is; empty where there is none."""
    _, title, rest = text.partition(f"\n{TITLE}")
    return f"{title}{rest.partition(chr(10) + '## ')[0]}" if title else ""


def read(text: str) -> dict[str, Said]:
    """What the section of a page says of each fault."""
    found = {}
    for line in find_section(text).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in ("fault", "---"):
            names = () if cells[3] == NOTHING else tuple(cells[3].split(", "))
            found[cells[0]] = Said(cells[1], names)
    return found
