"""The lines of a text report: wrapped on a terminal, one fact a line in a pipe, in ASCII where that is all there is."""

import io
import os
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvdoctor.report import layout
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.wording.summary import LABEL_WIDTH

PIPE_WIDTH, LOG_WIDTH = 4096, 120
WIDEST_HEAD = 100
"""Columns within which the location of a finding is put to the right."""
STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan", "passed": "green", "failed": "red"}
VERDICTS = {"healthy": "bold green", "unhealthy": "bold red", "incomplete": "bold yellow", "nothing-found": "bold"}
IN_ASCII = str.maketrans(
    {
        "\u2717": "x",
        "\u2713": "+",
        "\u2192": "->",
        "\u2190": "<-",
        "\u00b7": "|",
        "\u2014": "-",
        "\u2013": "-",
        "\u2026": "...",
    }
)


class _Console(Console):
    """A console that leaves a closed pipe to the command line: rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the error


def open_console(color: str) -> Console:
    """Standard output: as wide as the terminal; in a pipe one line per fact, whatever its length."""
    terminal = sys.stdout.isatty()
    colored = terminal or color == "always" or (color == "auto" and _color_is_forced())
    return _Console(
        force_terminal=colored,
        color_system=None if color == "never" else "auto",
        width=None if terminal else LOG_WIDTH if colored else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _color_is_forced() -> bool:
    """Whether the environment asks for color also in a pipe. Source: force-color.org and bixense.com/clicolors."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))


def open_text() -> tuple[io.StringIO, Console]:
    """A text without color, one fact a line."""
    page = io.StringIO()
    return page, Console(file=page, width=PIPE_WIDTH, no_color=True, highlight=False, markup=False, emoji=False)


class Page:
    """Makes lines and tables for a console, and prints them."""

    def __init__(self, console: Console) -> None:
        self.console, self._ascii = console, _takes_ascii_alone(console)

    def show(self, lines: Iterable[Text]) -> None:
        """Print lines as they are."""
        for line in lines:
            self.console.print(line, soft_wrap=True)

    def line(self, text: str, style: str = "", hang: int = 2) -> None:
        """Print one line; only a terminal wraps it, and indents what follows by `hang` more than it begins with."""
        self.show(self.lines(text, style, hang))

    def pairs(self, rows: Iterable[tuple[str, str]], indent: int = 2) -> None:
        """Print label and text, the text wrapped under itself."""
        self.show(self.pair_lines(rows, indent))

    def table(self, header: list[str], rows: list[list[str]], styled: int = -1, indent: int = 2) -> None:
        """Print a table without rules; the column `styled` has the color of its first word."""
        self.show(self.table_lines(header, rows, styled, indent))

    def lines(self, text: str, style: str = "", hang: int = 2) -> list[Text]:
        """One line, in as many lines as the terminal needs."""
        short = self.clean(text)
        if not self.console.is_terminal:
            return [Text(short, style)]
        body = short.lstrip(" ")
        return list(layout.wrap(self.console, Text(body, style), len(short) - len(body), hang))

    def pair_lines(self, rows: Iterable[tuple[str, str]], indent: int = 2, width: int = LABEL_WIDTH) -> list[Text]:
        """Label and text, the text wrapped under itself."""
        made = []
        for label, text in rows:
            lead = Text(f"{' ' * indent}{label:<{width}}", "dim" if self.console.is_terminal else "")
            body = Text(self.clean(text))
            if not self.console.is_terminal:
                made.append(lead + body)
                continue
            for number, part in enumerate(layout.wrap(self.console, body, lead.cell_len, 0)):
                made.append(lead + part[lead.cell_len :] if number == 0 else part)
        return made

    def table_lines(
        self, header: list[str], rows: Sequence[Sequence[str]], styled: int = -1, indent: int = 2
    ) -> list[Text]:
        """A table without rules."""
        cells = [[layout.TableCell(self.clean(shortened(cell))) for cell in row] for row in rows]
        if styled >= 0:
            for row in cells:
                text = row[styled].text
                row[styled] = layout.TableCell(text, STYLES.get(text.partition(" ")[0], ""))
        return list(layout.lay_out_table(self.console, header, cells, indent))

    def head(self, text: str, place: str, style: str) -> list[Text]:
        """A title with a location, which stands to the right where there is room."""
        short, at = self.clean(shortened(text)), self.clean(shortened(place))
        room = min(self.console.width, WIDEST_HEAD) - cell_len(short) - cell_len(at)
        if not place:
            return self.lines(text, style)
        if not self.console.is_terminal or room < 2:
            first, *rest = self.lines(f"{text}  ({place})", style)
            return [first, *rest]
        return [Text(short, style) + Text(" " * room + at, "dim")]

    def clean(self, text: str) -> str:
        """A text as it is printed: shortened, harmless, in ASCII if need be."""
        safe = printable(shortened(text, LONGEST_QUOTED))
        if not self._ascii:
            return safe
        return safe.translate(IN_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def _takes_ascii_alone(console: Console) -> bool:
    """Whether the console cannot show more than ASCII: by its encoding, its kind, or the locale that was asked for."""
    if not console.encoding.lower().replace("-", "").startswith("utf"):
        return True
    if console.file is not sys.stdout:
        return False
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return locale in ("C", "POSIX") or (console.is_terminal and os.environ.get("TERM") == "dumb")
