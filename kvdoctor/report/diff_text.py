"""A diff for a terminal or a log: colour and wrapping on a terminal, one line per fact in a pipe; the verdict last."""

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdoctor.report import diff_words
from kvdoctor.report.diff_document import DiffReport
from kvdoctor.report.diff_words import Row
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.text import PIPE_WIDTH

EFFECTS = {"worse": "bold red", "better": "green", "neutral": ""}
MARKS = {"-": "red", "+": "green", "~": "yellow", "=": "dim"}
VERDICTS = {"equal": "bold green", "better": "bold green", "different": "bold", "worse": "bold red"}
LABEL_WIDTH = 13
LONGEST_LABEL = 24


def render(diff: DiffReport, console: Console, verbosity: int = 0) -> None:
    """Print a diff. `verbosity`: -1 what makes B worse or better, and the verdict; 0 as usual; 1 everything."""
    page = _Page(console)
    if verbosity >= 0:
        page.line("kvdoctor diff", "bold")
        page.rows(diff_words.sides(diff))
    for section in diff_words.sections(diff, everything=verbosity > 0):
        rows = [row for row in section.rows if verbosity >= 0 or row.effect != "neutral"]
        if rows:
            page.line("")
            page.line(section.title, "bold")
            page.rows(rows)
    page.line("")
    for text, essential in diff_words.not_compared_lines(diff):
        if essential or verbosity >= 0:
            page.line(text, "yellow" if essential else "dim")
    for note in (*diff.notes, *diff_words.measured_lines(diff)) if verbosity >= 0 else ():
        page.line(note, "dim")
    if len(diff.reasons) > 1:
        page.line("worse, because", "bold red")
        for reason in diff.reasons:
            page.line(f"  {reason}")
    page.line(diff_words.verdict_line(diff), VERDICTS.get(diff.verdict, "bold yellow"))


def plain(diff: DiffReport) -> str:
    """The diff as one text without colour, a line for each fact."""
    page = io.StringIO()
    render(diff, Console(file=page, width=PIPE_WIDTH, no_color=True, highlight=False, markup=False, emoji=False))
    return page.getvalue()


class _Page:
    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str, style: str = "") -> None:
        """One line; only a terminal wraps it."""
        short = printable(shortened(text, LONGEST_QUOTED))
        self.console.print(Text(short, style), soft_wrap=not self.console.is_terminal)

    def rows(self, rows: Iterable[Row]) -> None:
        """Mark, label and text, the text wrapped under itself."""
        cells = [
            (row, printable(shortened(row.what, LONGEST_LABEL)), printable(shortened(row.text, LONGEST_QUOTED)))
            for row in rows
        ]
        width = max([LABEL_WIDTH, *(len(label) + 1 for _, label, _ in cells)])
        if not self.console.is_terminal:
            for row, label, text in cells:
                line = f"  {row.mark} {label:<{width}}{text}".rstrip()
                self.console.print(Text(line), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 0))
        grid.add_column(width=4, no_wrap=True)
        grid.add_column(width=width, no_wrap=True)
        grid.add_column(overflow="fold")
        for row, label, text in cells:
            style = EFFECTS[row.effect]
            grid.add_row(
                Text(f"  {row.mark} ", MARKS.get(row.mark, "")), Text(label, style or "dim"), Text(text, style)
            )
        self.console.print(grid)
