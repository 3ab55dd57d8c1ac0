"""What a report is made of: frozen blocks. A section is made once, in `sections`, and each format writes its blocks.

The writers are `console`, `markdown` and `page.write`. They differ in layout alone: wrapping, columns, folding. Texts
in blocks are data as they are; each writer shortens and escapes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from kvdoctor.findings import Severity
from kvdoctor.records import record

Style = Literal["", "strong", "dim", "good", "bad", "open"]
"""How a line stands out: as a title, as a remark, or in the color of what it says."""


@record
class Span:
    """A piece of a line.

    Attributes:
        text: the piece.
        kind: `name` for a name or value of the model, `command` for a command to copy, `link` for an address of ours,
            `wrong` for the cell at fault, `better` and `worse` for what a change does; else a term whose color depends
            on its kind: an outcome, a severity, a verdict, `plain`.
    """

    text: str
    kind: str = "name"


Text = str | Span | tuple[str | Span, ...]


def plain(text: Text) -> str:
    """A line without its kinds."""
    return "".join(part if isinstance(part, str) else part.text for part in pieces(text))


def pieces(text: Text) -> tuple[str | Span, ...]:
    """The pieces of a line."""
    return text if isinstance(text, tuple) else (text,)


@record
class Lines:
    """Lines of text; `listed` ones are points of a list."""

    lines: tuple[Text, ...]
    style: Style = ""
    listed: bool = False


@record
class Pairs:
    """Labels with their texts; the label is empty where it repeats."""

    rows: tuple[tuple[Text, Text], ...]


@record
class Table:
    """A table. `of` is the noun of its rows, and `look` the class that the style sheet of the page has for it."""

    header: tuple[str, ...]
    rows: tuple[tuple[Text, ...], ...]
    title: str = ""
    of: str = "row"
    look: str = ""


@record
class Card:
    """A finding.

    Attributes:
        severity: its severity; `known` findings do not count.
        code: the code of its check.
        name: the name of its check.
        place: the stacks or files that have it.
        cause: what happens.
        picture: the cache step by step, up to the step that goes wrong.
        quote: the message with which that step fails.
        facts: where it is, what shows it, what follows.
        fix: the command, and the other way out.
        more: how it is explained, and how it is identified across runs.
    """

    severity: Severity
    code: str
    name: str
    place: str
    cause: str
    picture: Table | None = None
    quote: str | None = None
    facts: tuple[tuple[str, Text], ...] = ()
    fix: tuple[tuple[str, Text], ...] = ()
    more: tuple[tuple[str, Text], ...] = ()
    known: bool = False

    @property
    def title(self) -> str:
        """`error[KV203] cross-cache-emptied`."""
        return f"{self.severity}[{self.code}] {self.name}"


@record
class Cards:
    """Findings, the worst first."""

    cards: tuple[Card, ...]


@record
class Picture:
    """A drawing, which the page alone has.

    Attributes:
        name: the drawing.
        subject: what is drawn: the arguments of the function that `page.write` has for the name.
        instead: the same in text; empty where other sections have it.
    """

    name: Literal["loops", "contract", "differences", "layers", "times"]
    subject: tuple[Any, ...]
    instead: "tuple[Block, ...]" = ()


@record
class Section:
    """A titled part of a report.

    Attributes:
        title: the title, beginning with a small letter where it is no name.
        content: its blocks, sections among them.
        name: how links lead to it; letters, digits and hyphens. Empty for a section within one.
        folded: whether it is evidence of one thing among many, shown on demand where that is possible.
        extra: whether it is printed only where all is asked for.
    """

    title: Text
    content: "tuple[Block, ...]"
    name: str = ""
    folded: bool = False
    extra: bool = False


Block = Lines | Pairs | Table | Cards | Picture | Section


def pairs(rows: Iterable[tuple[Text, Text]]) -> Iterator[Pairs]:
    """Label and text, if there are any."""
    if found := tuple(rows):
        yield Pairs(found)


def lines(found: Iterable[Text], style: Style = "", listed: bool = False) -> Iterator[Lines]:
    """Lines, if there are any."""
    if made := tuple(found):
        yield Lines(made, style, listed)


def table(
    header: Sequence[str], rows: Iterable[Sequence[Text]], title: str = "", of: str = "row", look: str = ""
) -> Table:
    """A table of sequences."""
    return Table(tuple(header), tuple(map(tuple, rows)), title, of, look)


def names(row: Iterable[str]) -> tuple[Text, ...]:
    """A row whose cells are all names or values of the model."""
    return tuple(map(Span, row))


def capitalized(title: Text) -> Text:
    """A title as it begins a page: with a capital letter, unless it begins with a name."""
    first, *rest = pieces(title)
    return (first[:1].upper() + first[1:], *rest) if isinstance(first, str) else title


def drop_folded(section: Section) -> Section:
    """A section without what is folded in it."""
    found = (drop_folded(one) if isinstance(one, Section) else one for one in section.content)
    return replace(section, content=tuple(one for one in found if not (isinstance(one, Section) and one.folded)))
