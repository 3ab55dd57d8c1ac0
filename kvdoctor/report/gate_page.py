"""Many models on one page of Markdown: a table of all, then the report of each that is not healthy."""

from collections.abc import Iterator

from kvdoctor.report import markdown, wording
from kvdoctor.report.document import Report
from kvdoctor.report.safe import code, printable, shortened
from kvdoctor.report.safe import markdown as escaped

MOST_ROWS = 2000
SHARE = 2
"""The table of models takes no more than one part in so many of the room."""
SPARE = 200
MOST_KNOWN = 40


def page(verdict: str, reports: list[Report], last: tuple[str, ...], room: int) -> str:
    """The page, of at most `room` bytes; reports that do not fit are left out whole, and counted.

    `last` are the lines that are said of all models.
    """
    said = "".join(f"{escaped(line)}\n\n" for line in last)
    text = f"## kvdoctor: {verdict}\n\n{said}"
    rows = [[code(report.model.path), report.verdict, escaped(wording.counts(report))] for report in reports]
    rows.sort(key=lambda row: row[1] == "healthy")
    table = list(markdown.table(["model", "verdict", "findings"], rows[:MOST_ROWS]))
    rows_left = len(rows) - len(rows[:MOST_ROWS])
    used = _size(text)
    for number, line in enumerate(table):
        used += _size(line) + 1
        if used > room // SHARE:
            rows_left += len(table) - number
            break
        text += line + "\n"
    if rows_left:
        text += f"\n... and {rows_left} models more\n"
    known = [line for report in reports if report.verdict == "healthy" for line in _known(report)]
    text += "\n" + "\n".join(known[:MOST_KNOWN]) + "\n" if known else ""
    text += f"\n... and {len(known) - MOST_KNOWN} known findings more\n" if len(known) > MOST_KNOWN else ""
    used, left = _size(text), 0
    for report in (report for report in reports if report.verdict != "healthy"):
        part = "\n" + markdown.within(min(markdown.MOST_CHARACTERS, max(room // 2, 2000)), report)
        if used + _size(part) > room - SPARE:
            left += 1
            continue
        text, used = text + part, used + _size(part)
    if left:
        text += f"\n{left} report{'s' * (left > 1)} did not fit here; `--format text` and `--format json` have all.\n"
    return text if _size(text) <= room else ""


def _known(report: Report) -> Iterator[str]:
    """The findings that a baseline holds of a model which is not told in full."""
    for finding in report.findings:
        if (reason := wording.known_reason(finding)) is not None:
            words = f"{wording.headline(finding)}; known: {reason}"
            yield f"- {code(report.model.path)} {escaped(printable(shortened(words, 400)))}"


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
