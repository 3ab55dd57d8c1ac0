"""The rows of the health pages: results of one stack, with the releases beside which an exporter gives the same.

Made from results.json, which `measure.py` stores.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

NOT_RUN, NOT_EXPORTABLE = "not run", "not exportable"
STATES = ("healthy", "repaired", "refused", "not checked", NOT_EXPORTABLE, NOT_RUN)
"""What a cell can say, in the order of the pages."""
MEANINGS = {
    "healthy": "the model decodes with its cache as without it; warnings concern uses beyond the plain loop",
    "repaired": "it does not, and the copy that re-export wrote does, by its proof; the warnings are those of the copy",
    "refused": "it does not, and no repair of the graph was proved; the reason is given",
    "not checked": "the deciding experiment could not run; the reason is given",
    NOT_EXPORTABLE: "the exporter made no file; its message is given",
    NOT_RUN: "there is no result for this runtime",
}


@dataclass(frozen=True)
class Cell:
    """The result of one stack in one runtime.

    Attributes:
        state: One of `STATES`.
        errors: The names of the errors that were found.
        warnings: Those of the warnings.
        repairs: The repairs that the proved copy needed.
        why: The reason for a refusal, or for what was not checked.
    """

    state: str
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    why: str = ""

    def words(self) -> str:
        """The cell in short, without the reason."""
        if self.state == "repaired":
            text = f"repaired by {', '.join(self.repairs)}: {', '.join(self.errors)}"
        else:
            text = ": ".join(filter(None, (self.state, ", ".join(self.errors))))
        return f"{text}; warns of {', '.join(self.warnings)}" if self.warnings else text


@dataclass(frozen=True)
class Row:
    """One stack of an export.

    Attributes:
        exporter: The exporter and its release.
        name: The export.
        stack: The stack; empty where nothing was exported.
        layout: Its layout.
        beside: The releases of the other package that give the same, oldest first: `transformers 4.48.3`.
        cells: The result for each runtime.
    """

    exporter: str
    name: str
    stack: str
    layout: str
    beside: tuple[str, ...]
    cells: dict[str, Cell]

    def span(self) -> str:
        """The releases that give the same, as first and last."""
        first, last = self.beside[0], self.beside[-1]
        return first if first == last else f"{first} to {last.rpartition(' ')[2]}"


def rows(document: dict[str, Any]) -> list[Row]:
    """All rows, in the order of the stored results; adjacent releases with the same results are one row."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for entry in document["exports"].values():
        for row in _of_export(entry, document["releases"]):
            known = found.setdefault((row.exporter, row.name, row.stack), [])
            if known and (known[-1].layout, known[-1].cells) == (row.layout, row.cells):
                merged = (*row.beside, *known[-1].beside)
                known[-1] = Row(row.exporter, row.name, row.stack, row.layout, merged, row.cells)
            else:
                known.append(row)
    return [row for each in found.values() for row in each]


def _of_export(entry: dict[str, Any], releases: Iterable[str]) -> Iterator[Row]:
    named = (entry["exporter"], entry["name"])
    if entry["not_exported"] is not None:
        nothing = Cell(NOT_EXPORTABLE, why=entry["not_exported"])
        yield Row(*named, "", "", (entry["beside"],), dict.fromkeys(releases, nothing))
        return
    stacks = {name: facts for cell in reversed(entry["cells"].values()) for name, facts in cell["stacks"].items()}
    for name, facts in stacks.items():
        cells = {}
        for release in releases:
            measured = entry["cells"].get(release, {}).get("stacks", {}).get(name)
            cells[release] = Cell(NOT_RUN) if measured is None else _cell(measured)
        yield Row(*named, name, facts["layout"], (entry["beside"],), cells)


def _cell(facts: dict[str, Any]) -> Cell:
    errors, warnings, repairs = (tuple(facts[key]) for key in ("errors", "warnings", "repairs"))
    return Cell(facts["state"], errors, warnings, repairs, facts["why"])


@dataclass(frozen=True)
class Turn:
    """A release of the other package from which an exporter gives something else.

    Attributes:
        export: The exporter and the export.
        since: The first release that was measured with the new result.
        last: The last one that was measured with the old result.
        before: The old result.
        after: The new result.
    """

    export: str
    since: str
    last: str
    before: str
    after: str


def turns(document: dict[str, Any]) -> list[Turn]:
    """Every such release, by the results in the newest runtime."""
    kin: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in document["exports"].values():
        kin.setdefault((entry["exporter"], entry["name"], entry["beside"].partition(" ")[0]), []).append(entry)
    found = []
    for (exporter, name, _), entries in kin.items():
        ordered = sorted(entries, key=lambda entry: _numbers(entry["beside"]))
        for older, newer in pairwise(ordered):
            old, new = (_outcome(each, document["releases"][:1]) for each in (older, newer))
            if old != new:
                found.append(Turn(f"{exporter}: {name}", newer["beside"], older["beside"], old, new))
    return found


def _outcome(entry: dict[str, Any], releases: Iterable[str]) -> str:
    return "; ".join(
        (f"{row.stack} " if row.stack else "") + cell.words()
        for row in _of_export(entry, releases)
        for cell in row.cells.values()
    )


def _numbers(beside: str) -> tuple[int, ...]:
    """The release in `transformers 4.48.3`, to be compared; none for what has no release."""
    last = beside.rpartition(" ")[2]
    return tuple(int(part) for part in last.split(".")) if last.replace(".", "").isdigit() else ()


def tally(every: list[Row], release: str) -> dict[str, int]:
    """How many rows are in each state, for a runtime."""
    return {state: sum(row.cells[release].state == state for row in every) for state in STATES}
