"""Writes evidence/health.md and health-table.html from the stored results: `python -m evidence.health.make_page`.

The results are in results.json; `measure.py` measures them.
"""

import json
from pathlib import Path
from typing import Any

from evidence.health import html_table
from evidence.health.rows import MEANINGS, NOT_EXPORTABLE, Row, rows, tally, turns

HERE = Path(__file__).resolve().parent
STORE, PAGE, TABLE = HERE / "results.json", HERE.parent / "health.md", HERE.parent / "health-table.html"
HEAD = """# The health of exports

What exporters write today, and whether it decodes: {exports} tiny exports with random weights, each diagnosed with the
command line in onnxruntime {releases}. The same results with filters: [the table](health-table.html).

A cell is the result of `kvdoctor step-test EXPORT`, with `--target onnxruntime==RELEASE` for the older runtimes, and of
`kvdoctor re-export` where that found an error. Cells of older runtimes include the findings of
{newest}. The loop is the plain one, which feeds every returned slot back; a decoder that is *repaired by pass-through*
is also right in a loop that keeps the cross-attention cache, such as Optimum's. One line is one *stack*: graphs that
decode together. Releases of transformers that give the same result share a line.

| result | meaning | lines in {newest} |
| --- | --- | --- |
{states}

`kvdoctor explain NAME` explains a finding. Measured by `python -m evidence.health.measure --exports DIR`, which
keeps its results in `evidence/health/results.json` and runs only what has no result yet; the last one ran on {made}
with kvdoctor {version}.
This page is made from them by `python -m evidence.health.make_page`.

## What changed since the previous measurement

{changes}

## Since which release

Where another release of transformers with the same exporter changed a result in onnxruntime {newest}: the first
release that was measured with the new result, and the last one with the old. Releases between them were not measured.

{turns}
"""
NOTHING = "Nothing."


def main() -> None:
    """Writes both pages."""
    document = json.loads(STORE.read_text(encoding="utf-8"))
    PAGE.write_text(page(document), encoding="utf-8")
    TABLE.write_text(html_table.page(document), encoding="utf-8")


def page(document: dict[str, Any]) -> str:
    """The Markdown page."""
    every, releases = rows(document), document["releases"]
    counts = tally(every, releases[0])
    parts = [
        HEAD.format(
            exports=sum(entry["not_exported"] is None for entry in document["exports"].values()),
            releases=" and ".join([", ".join(releases[:-1]), releases[-1]] if releases[1:] else releases),
            newest=releases[0],
            states="\n".join(_line(state, meaning, str(counts[state])) for state, meaning in MEANINGS.items()),
            made=document["made"],
            version=_version(document),
            changes=_changes(document),
            turns=_turns(document),
        )
    ]
    for exporter in dict.fromkeys(row.exporter for row in every):
        own = [row for row in every if row.exporter == exporter]
        parts.append(f"\n## {_plain(exporter)}\n\n{_table(own, releases)}{_reasons(own)}")
    return "".join(parts)


def _version(document: dict[str, Any]) -> str:
    versions = {cell["kvdoctor"] for entry in document["exports"].values() for cell in entry["cells"].values()}
    return " and ".join(sorted(versions))


def _changes(document: dict[str, Any]) -> str:
    latest = [each for each in document["changes"] if each["made"] == document["made"] and _differs(each)]
    if not latest:
        return NOTHING
    head = ["| export | stack | onnxruntime | before | now |", "| --- | --- | --- | --- | --- |"]
    cells = (
        _line(each["export"].replace(" | ", ", "), each["stack"], each["runtime"], each["before"], each["after"])
        for each in latest
    )
    return "\n".join([*head, *cells])


def _differs(change: dict[str, str]) -> bool:
    """Whether the outcome changed, and not only that earlier results named no remaining findings."""
    return change["before"] != change["after"].partition(" (")[0]


def _turns(document: dict[str, Any]) -> str:
    found = turns(document)
    if not found:
        return NOTHING
    head = ["| export | first new | last old | old result | new result |", "| --- | --- | --- | --- | --- |"]
    cells = (_line(each.export, each.since, each.last.rpartition(" ")[2], each.before, each.after) for each in found)
    return "\n".join([*head, *cells])


def _table(own: list[Row], releases: list[str]) -> str:
    head = ["export", "stack", "layout", "with", *(f"in {release}" for release in releases)]
    lines = [_line(*head), _line(*["---"] * len(head))]
    for row in own:
        cells = [row.cells[release].words() for release in releases]
        lines.append(_line(row.name, row.stack or "–", row.layout or "–", row.span(), *cells))
    return "\n".join(lines) + "\n"


def _reasons(own: list[Row]) -> str:
    """Each reason once, with the exports that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in own:
        for cell in row.cells.values():
            if cell.why:
                result = cell.state if cell.state == NOT_EXPORTABLE or not cell.errors else cell.words()
                names = found.setdefault((result.partition(";")[0], cell.why), [])
                names += [row.name] if row.name not in names else []
    if not found:
        return ""
    lines = [_line("result", "reason", "exports"), _line("---", "---", "---")]
    lines += [_line(result, why, _named(names)) for (result, why), names in found.items()]
    return "\nWhy:\n\n" + "\n".join(lines) + "\n"


def _named(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def _line(*cells: str) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text of an exporter or a runtime as it stands, in a cell of Markdown."""
    for mark in ("\\", "|", "<", ">", "*", "_", "`", "[", "]"):
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


if __name__ == "__main__":
    main()
