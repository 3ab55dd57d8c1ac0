"""What pages are made of: sections with headings in order, tables with captions, figures, commands to copy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import printable, shortened

LONGEST_CELL = 400
LONGEST_COMMAND = 5000


@dataclass(frozen=True, slots=True)
class Place:
    """Where on a page something stands: what its ids begin with, and the level of the headings there."""

    prefix: str = ""
    level: int = 2

    def id(self, name: str) -> str:
        """An id that no other part of the page has."""
        return f"{self.prefix}{name}"

    def below(self, name: str = "") -> "Place":
        """The place of a part of it."""
        return Place(f"{self.prefix}{name}-" if name else self.prefix, self.level + 1)

    def heading(self, *title: Content, id_: str | None = None, class_: str | None = None) -> Element:
        """A heading of the level of this place."""
        return h(f"h{min(self.level, 6)}", title, id=id_, class_=class_)


def section(place: Place, name: str, title: Content, *content: Content, class_: str | None = None) -> Element:
    """A section under its heading; links lead to `name`. Those of the highest level are landmarks, with a name."""
    heading = place.id(f"{name}-title")
    named = {"aria_labelledby": heading} if place.level == Place().level else {}
    return h("section", place.heading(title, id_=heading), content, id=place.id(name), class_=class_, **named)


def table(
    name: str, caption: Content, header: Sequence[Content], rows: Iterable[Sequence[Content]], class_: str = ""
) -> Element:
    """A table that scrolls where it is too wide; the first cell heads its row. `name` is the id of its caption."""
    head = h("tr", (h("th", title, scope="col") for title in header))
    body = (h("tr", (_cell(cell, index) for index, cell in enumerate(row))) for row in rows)
    made = h("table", h("caption", caption, id=name), h("thead", head), h("tbody", body), class_=class_ or None)
    return scrolled(name, made)


def _cell(cell: Content, index: int) -> Element:
    if isinstance(cell, Element) and cell.tag in ("td", "th"):
        return cell
    return h("th", cell, scope="row") if index == 0 else h("td", cell)


def scrolled(named_by: str, *content: Content) -> Element:
    """What a keyboard can scroll; `named_by` is the id of what names it."""
    return h("div", content, class_="scroll", role="group", aria_labelledby=named_by, tabindex=0)


def facts(rows: Iterable[tuple[Content, Content]], class_: str = "facts") -> Element:
    """Labels and what stands beside them; a label that repeats is empty."""
    return h("dl", (h("div", h("dt", label), h("dd", value)) for label, value in rows), class_=class_)


def code(text: str, longest: int = LONGEST_CELL) -> Element | None:
    """A name or a value of the model."""
    return h("code", shortened(text, longest)) if text else None


def command(text: str) -> Element:
    """A command to copy: one click takes all of it. What has an escape in it is not what the shell must be given."""
    short = shortened(text, LONGEST_COMMAND)
    altered = printable(short) != text
    parts = [short[start : start + 1000] for start in range(0, len(short), 1000)]
    note = h("p", "The name has characters that are shown as escapes here: write them yourself.", class_="hint")
    return h("div", h("pre", h("code", parts, class_="copy"), tabindex=0), note if altered else None, class_="command")


def folded(summary: Content, *content: Content, open_: bool = False) -> Element:
    """What is there for who asks; printed, it is open."""
    return h("details", h("summary", summary), content, open=open_)


def listed(items: Iterable[Content]) -> Element:
    """A list."""
    return h("ul", (h("li", item) for item in items))


def chip(word: str, kind: str) -> Element:
    """A word with the colour of its kind; the word says it too."""
    return h("span", word, class_=f"chip {kind}")


def counted(number: int, what: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def more_line(left_out: int, what: str) -> Element | None:
    """What is not shown, and where it is."""
    if left_out <= 0:
        return None
    text = f"{counted(left_out, what)} more are not shown here" if left_out > 1 else f"1 {what} more is not shown here"
    return h("p", f"{text}; --format json has all of them.", class_="hint")
