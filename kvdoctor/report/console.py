"""Writes blocks on a console: wrapped on a terminal, one fact a line in a pipe, in ASCII where that is all there is."""

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text as Line

from kvdoctor.report import blocks
from kvdoctor.report.blocks import Span, Text, pieces, plain
from kvdoctor.report.escaping import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.wording.summary import LABEL_WIDTH

PIPE_WIDTH, LOG_WIDTH, LEAST_WIDTH = 4096, 120, 40
WIDEST_HEAD = 100
"""Columns within which the location of a finding is put to the right."""
GAP, GLUE = "  ", "\ue000"
"""What stands between columns, and for a blank at which no line is broken."""
JOINED = r"[^\s,;(]+(?: (?:[=+]|->) [^\s,;:]+)+", r"`[^`]*`|\w+\[[^\]]*\]|equal within .|\d SD\b|\u2190 ."
"""What stays on a line where it has room: an equation; then a command, a shape, a difference, a mark and its text."""
MOST_NARROW = 20
"""The narrowest line, in cells, in which text is wrapped at blanks."""
STYLES = {"strong": "bold", "good": "green", "bad": "red", "open": "yellow"}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
VERDICTS = {"healthy": "bold green", "unhealthy": "bold red", "incomplete": "bold yellow", "nothing-found": "bold"}
VERDICTS["not-applicable"] = VERDICTS["incomplete"]
CHANGES = {"gone": "red", "new": "green", "changed": "yellow", "same": "dim", "worse": "bold red", "better": "green"}
FAULTY = dict.fromkeys(("failed", "differs", "died", "wrong"), "red")
COLORS = {**CHANGES, **SEVERITIES, **VERDICTS, **FAULTY, "passed": "green"}
"""The style of each kind of piece that has one."""
MARKS = {"error": "\u2717", "warning": "!", "note": "\u00b7"}
BEYOND_ASCII = "\u2717\u2713\u2192\u2190\u00b7\u2014\u2013\u2026"
IN_ASCII = dict(zip(map(ord, BEYOND_ASCII), ("x", "+", "->", "<-", "|", "-", "-", "..."), strict=True))


class _Console(Console):
    """A console that leaves a closed pipe to the command line: rich would end the process with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this while it handles the error


def open_console(color: str) -> Console:
    """Standard output: as wide as the terminal, or as COLUMNS says; else in a pipe one line per fact."""
    # With LINES it is what a library (readline) exported for its own terminal, and nobody's wish.
    terminal, columns = sys.stdout.isatty(), os.environ.get("COLUMNS", "") * ("LINES" not in os.environ)
    wide = int(columns) if columns.isdecimal() and LEAST_WIDTH <= int(columns) <= PIPE_WIDTH else None
    # Source: force-color.org and bixense.com/clicolors.
    asked = (os.environ.get(name, "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    colored = terminal or color == "always" or (color == "auto" and any(one not in ("", "0") for one in asked))
    return _Console(
        force_terminal=colored or wide is not None,  # what is to be wrapped
        color_system="auto" if colored and color != "never" else None,
        width=None if terminal else wide or (LOG_WIDTH if colored else PIPE_WIDTH),
        highlight=False,
        markup=False,
        emoji=False,
    )


def open_text() -> tuple[io.StringIO, Console]:
    """A text without color, one fact a line."""
    page = io.StringIO()
    return page, Console(file=page, width=PIPE_WIDTH, no_color=True, highlight=False, markup=False, emoji=False)


class Page:
    """Makes the lines of blocks for a console, and prints them. Labels take `label_width` columns, or more."""

    def __init__(self, console: Console, label_width: int = LABEL_WIDTH) -> None:
        self.console, self.label_width, self._ascii = console, label_width, _takes_ascii_alone(console)

    def show(self, made: Iterable[Line]) -> None:
        """Print lines as they are."""
        for line in made:
            self.console.print(line, soft_wrap=True)

    def line(self, text: str, style: str = "", hang: int = 2) -> None:
        """Print one line; only a terminal wraps it, and indents what follows by `hang` more than it begins with."""
        self.show(self.lines(text, style, hang))

    def join(self, parts: Sequence[str], between: str, style: str = "") -> None:
        """Print parts on as few lines as they need; a part is broken only where it is longer than a line."""
        room = self.console.width - 4 if self.console.is_terminal else PIPE_WIDTH
        glued = [part.replace(" ", GLUE) if cell_len(part) < room else part for part in map(self.clean, parts)]
        body = Line(self.clean(between).replace(" ", GLUE, 1).join(glued), style)
        made = _wrap(self.console, body, 0, 2) if self.console.is_terminal else [body]
        self.show(Line(line.plain.replace(GLUE, " ").rstrip(self.clean(between)), style) for line in made)

    def write(self, content: Iterable[blocks.Block]) -> None:
        """Print blocks."""
        for block in content:
            self.show(self.make(block))

    def make(self, block: blocks.Block, path: str = "") -> list[Line]:
        """The lines of a block; `path` is the title of the section that a section is in."""
        match block:
            case blocks.Lines():
                indent = "  " if path or block.listed else ""
                style = STYLES.get(block.style, block.style)
                return [made for text in block.lines for made in self.lines(indent + plain(text), style)]
            case blocks.Pairs():
                return self.pair_lines(block.rows)
            case blocks.Table():
                title = self.lines(f"  {block.title}", "bold") if block.title else []
                return [*title, *self.table_lines(block)]
            case blocks.Cards():
                return [made for card in block.cards for made in (Line(""), *self.card_lines(card))][1:]
            case blocks.Picture():
                return [made for inner in block.instead for made in self.make(inner, path)]
            case blocks.Section():
                return self._make_section(block, path)

    def _make_section(self, section: blocks.Section, path: str) -> list[Line]:
        """A section under its title; of one within another the title of the outermost one comes first."""
        title = plain(section.title)
        parts = [made for block in section.content if (made := self.make(block, path or title))]
        body = [line for part in parts for line in part]
        if not body:
            return []
        if path and section.folded:
            return [*self.lines(f"  {title}", "bold"), *body]
        named = f"{path}: {title}" if path else title
        has_own = bool(title) and parts[0][0].plain != ""
        return [Line(""), *(self.lines(named, "bold") if has_own else []), *body] if has_own or not title else body

    def card_lines(self, card: blocks.Card) -> list[Line]:
        """A finding: what happens, the picture of the cache, label and text."""
        style = "dim" if card.known else SEVERITIES[card.severity]
        made = self._make_head(f"{MARKS[card.severity]} {card.title}", card.place, style)
        made += self.lines(f"  {card.cause}", hang=0)
        if card.picture is not None:
            quote = self.lines(f'        "{card.quote}"', hang=1) if card.quote else []
            made += [Line(""), *self.table_lines(card.picture, indent=4), *quote, Line("")]
        return [*made, *self.pair_lines((*card.facts, *card.fix, *card.more))]

    def _make_head(self, text: str, place: str, style: str) -> list[Line]:
        """A title with a location, which stands to the right where there is room."""
        short, at = self.clean(shortened(text)), self.clean(shortened(place))
        room = min(self.console.width, WIDEST_HEAD) - cell_len(short) - cell_len(at)
        if not place:
            return self.lines(text, style)
        if not self.console.is_terminal or room < 2:
            return self.lines(f"{text}  ({place})", style)
        return [Line(short, style) + Line(" " * room + at, "dim")]

    def lines(self, text: str, style: str = "", hang: int = 2) -> list[Line]:
        """One line, in as many lines as the terminal needs."""
        short = self.clean(text)
        if not self.console.is_terminal:
            return [Line(short, style)]
        body = short.lstrip(" ")
        return list(_wrap(self.console, Line(body, style), len(short) - len(body), hang))

    def pair_lines(self, rows: Sequence[tuple[Text, Text]]) -> list[Line]:
        """Label and text, the text wrapped under itself, and under a label that is too long for its column."""
        made: list[Line] = []
        terminal, most = self.console.is_terminal, self.console.width * 3 // 8
        longest = max((size for label, _ in rows if (size := len(plain(label))) <= most), default=0)
        width = self.label_width if longest < self.label_width else longest + len(GAP)
        for label, text in rows:
            lead = self._make_line(label, "dim" if terminal else "")
            if lead.cell_len > width:  # on a line of its own
                made, lead = [*made, Line("  ") + lead], Line()
            lead = Line(f"  {lead.plain:<{width}}", lead.style)
            body = self._make_line(text)
            if not terminal:
                made.append(lead + body)
                continue
            first, *remark = pieces(text)
            is_command = isinstance(first, Span) and first.kind == "command"
            if is_command and lead.cell_len + body.cell_len > self.console.width:
                # In two pieces it cannot be copied: it stands below its label, and only the terminal may break it.
                made += [_strip(lead), Line("    ") + self._make_line(first)]
                made += self.lines(f"    {plain(tuple(remark)).lstrip()}", hang=0) if remark else []
                continue
            for number, part in enumerate(_wrap(self.console, body, lead.cell_len, 0)):
                made.append(part if number else lead + part[lead.cell_len :])
        return made

    def _make_line(self, text: Text, style: str = "") -> Line:
        """A line, in the color of its first piece that has one."""
        kinds = [part.kind for part in pieces(text) if isinstance(part, Span) and part.kind in COLORS]
        return Line(self.clean(plain(text)), COLORS[kinds[0]] if kinds else style)

    def table_lines(self, table: blocks.Table, indent: int = 2) -> list[Line]:
        """A table without rules."""
        header = [Line(self.clean(shortened(title)), "dim") for title in table.header]
        cells = [[self._make_line(cell) for cell in row] for row in table.rows]
        rows = [[Line(shortened(cell.plain), cell.style) for cell in row] for row in cells]
        joined = [[_join(cell, self.console.width - indent - 4) for cell in row] for row in rows]
        return list(map(_strip, _lay_out_table(self.console, [header, *joined], indent)))

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


def _wrap(console: Console, text: Line, lead: int, hang: int) -> Iterator[Line]:
    """A text in lines that fit: the first is indented by `lead`, the others by `hang` more."""
    width = max(console.width - lead - hang, MOST_NARROW)
    for number, part in enumerate(_join(text, width).wrap(console, width) or [Line()]):
        yield Line(" " * (lead + (hang if number else 0))) + _strip(part)


def _join(text: Line, room: int) -> Line:
    """A text in which no line is broken within what is `JOINED` and has room on a line."""
    made = text.copy()
    for pattern in JOINED:
        made.plain = re.sub(pattern, lambda f: f[0].replace(" ", GLUE * (cell_len(f[0]) < room) or " "), made.plain)
    return made


def _lay_out_table(console: Console, table: Sequence[Sequence[Line]], indent: int) -> Iterator[Line]:
    """A table without rules: its last column is wrapped; without room for that every one, or each row is a line."""
    widths = [max(row[at].cell_len for row in table) for at in range(len(table[0]) - 1)]
    left = console.width - indent - sum(widths) - len(GAP) * len(widths)
    last = min(max((row[-1].cell_len for row in table), default=0), MOST_NARROW // 2)
    if console.is_terminal and left < last:
        yield from _squeeze(console, table, indent)
        return
    for row in table:
        start = Line(" " * indent)
        for cell, width in zip(row, widths, strict=False):
            start += cell + Line(" " * (width - cell.cell_len) + GAP)
        if not console.is_terminal:
            yield _strip(start + row[-1])
        elif max((cell_len(word) for word in row[-1].plain.split()), default=0) > left:
            yield _strip(start)
            yield from _wrap(console, row[-1], indent + 4, 0)
        else:
            first, *others = row[-1].wrap(console, left) or [Line()]
            yield from map(_strip, (start + first, *(Line(" " * start.cell_len) + other for other in others)))


def _squeeze(console: Console, table: Sequence[Sequence[Line]], indent: int) -> Iterator[Line]:
    """A table whose every column is wrapped; a line of text for each row that does not fit even so."""
    columns = range(len(table[0]))
    longest = [max(cell_len(word) for row in table for word in (row[at].plain.split() or [""])) for at in columns]
    widths = [max(row[at].cell_len for row in table) for at in columns]
    room = console.width - indent - len(GAP) * (len(longest) - 1)
    if sum(longest) > room:
        for row in table[1:]:
            yield from _wrap(console, _join_row([cell.plain for cell in table[0]], row), indent, 2)
        return
    while sum(widths) > room:
        widest = max((at for at in columns if widths[at] > longest[at]), key=lambda at: widths[at])
        widths[widest] -= 1
    for row in table:
        parts = [list(cell.wrap(console, widths[at])) for at, cell in enumerate(row)]
        for number in range(max(map(len, parts), default=0)):
            line = Line(" " * indent)
            for at, part in enumerate(parts):
                piece = _strip(part[number]) if number < len(part) else Line()
                line += piece + Line(" " * (widths[at] - piece.cell_len) + GAP)
            yield _strip(line)


def _strip(text: Line) -> Line:
    """A line as it is printed: with the blanks at which it was not broken, and none at its end."""
    text.plain = text.plain.replace(GLUE, " ")
    text.rstrip()
    return text


def _join_row(header: Sequence[str], row: Sequence[Line]) -> Line:
    """`plain-loop: failed at step 2, in Reshape ...`; of the columns that have a title with their titles."""
    titled = [(title, cell) for title, cell in zip(header[1:], row[1:], strict=True) if cell.plain]
    line = Line(row[0].plain + (": " if header[0] else " "), row[0].style)
    for number, (title, cell) in enumerate(titled):
        line += Line(", " if number and header[0] else " " if number else "")
        line += Line(f"{title} " if title and header[0] else "", "dim") + Line(cell.plain, cell.style)
    return line
