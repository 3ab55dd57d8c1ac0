"""Lines and tables of limited width: words stay whole as long as they fit, continued lines are indented."""

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvdoctor.records import record

GAP = "  "
MOST_NARROW = 20
"""The narrowest line, in cells, in which words are wrapped."""


@record
class TableCell:
    """One text of a row, with its style."""

    text: str
    style: str = ""


def wrap(console: Console, text: Text, lead: int, hang: int) -> Iterator[Text]:
    """A text in lines that fit: the first is indented by `lead`, the others by `hang` more."""
    width = max(console.width - lead - hang, MOST_NARROW)
    for number, part in enumerate(text.wrap(console, width) or [Text()]):
        part.rstrip()
        yield Text(" " * (lead + (hang if number else 0))) + part


def lay_out_table(console: Console, header: list[str], cells: list[list[TableCell]], indent: int = 2) -> Iterator[Text]:
    """A table without rules. If there is room, only the last column is wrapped; a cell that is too long goes below.

    If there is not, every column is wrapped between words; if that is not enough, a row becomes a line of text.
    """
    table = [[TableCell(title, "dim") for title in header], *cells]
    widths = [max(cell_len(row[at].text) for row in table) for at in range(len(header) - 1)]
    left = console.width - indent - sum(widths) - len(GAP) * len(widths)
    last = min(max((cell_len(row[-1].text) for row in table), default=0), MOST_NARROW // 2)
    if console.is_terminal and left < last:
        yield from _squeeze(console, table, indent)
        return
    for row in table:
        start = Text(" " * indent)
        for cell, width in zip(row, widths, strict=False):
            start += Text(cell.text + " " * (width - cell_len(cell.text)), cell.style) + Text(GAP)
        yield from _with_last(console, start, row[-1], left, indent)


def _with_last(console: Console, start: Text, last: TableCell, left: int, indent: int) -> Iterator[Text]:
    """A row whose first cells are laid out, with its last one beside them or below."""
    text = Text(last.text, last.style)
    longest = max((cell_len(word) for word in last.text.split()), default=0)
    if not console.is_terminal:
        yield _strip(start + text)
    elif longest > left:
        yield _strip(start)
        yield from wrap(console, text, indent + 4, 0)
    else:
        first, *others = text.wrap(console, left) or [Text()]
        yield _strip(start + first)
        for other in others:
            yield _strip(Text(" " * start.cell_len) + other)


def _squeeze(console: Console, table: list[list[TableCell]], indent: int) -> Iterator[Text]:
    """A table whose every column is wrapped; a line of words for each row where even single words do not fit."""
    columns = range(len(table[0]))
    longest = [max(cell_len(word) for row in table for word in (row[at].text.split() or [""])) for at in columns]
    natural = [max(cell_len(row[at].text) for row in table) for at in columns]
    room = console.width - indent - len(GAP) * (len(longest) - 1)
    if sum(longest) > room:
        header = [cell.text for cell in table[0]]
        for row in table[1:]:
            yield from wrap(console, _in_words(header, row), indent, 2)
        return
    widths = list(natural)
    while sum(widths) > room:
        widest = max((at for at in columns if widths[at] > longest[at]), key=lambda at: widths[at])
        widths[widest] -= 1
    for row in table:
        parts = [list(Text(cell.text, cell.style).wrap(console, widths[at])) for at, cell in enumerate(row)]
        for number in range(max(map(len, parts), default=0)):
            line = Text(" " * indent)
            for at, part in enumerate(parts):
                piece = _strip(part[number]) if number < len(part) else Text()
                line += piece + Text(" " * (widths[at] - piece.cell_len) + GAP)
            yield _strip(line)


def _strip(text: Text) -> Text:
    text.rstrip()
    return text


def _in_words(header: list[str], row: list[TableCell]) -> Text:
    """`plain-loop: failed at step 2, in Reshape ...`; of the columns that have a title with their titles."""
    titled = [(title, cell) for title, cell in zip(header[1:], row[1:], strict=True) if cell.text]
    line = Text(row[0].text + (": " if header[0] else " "), row[0].style)
    for number, (title, cell) in enumerate(titled):
        line += Text(", " if number and header[0] else " " if number else "")
        line += Text(f"{title} " if title and header[0] else "", "dim") + Text(cell.text, cell.style)
    return line
