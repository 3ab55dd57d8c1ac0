"""The elements of a page: sections, tables, figures, commands to copy; and the frame around them.

No script, and nothing is loaded: the policy in the head allows the one style sheet and no more. Elements escape by
construction: every text and every attribute is data, never markup. Jinja2 escapes only where a template asks for it;
dominate, htpy and xml.etree build elements as this module does. None of them makes control and direction characters
visible, limits the length of a text, or refuses what loads something.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from functools import cache
from html import escape
from pathlib import Path
from typing import Union

from kvdoctor._version import __version__
from kvdoctor.records import record
from kvdoctor.report.escaping import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.wording import format_count

FRAME_HEIGHT = "40rem"
Value = str | int | float | bool | None
Content = Union[str, int, "Element", None, Iterable["Content"]]
VOID = {"br", "input", "meta", "wbr"}
NEVER = {"script", "style", "iframe", "object", "embed", "form", "base", "link", "img"}
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
LOADING = {"src", "style", "srcset", "srcdoc", "action", "formaction", "ping", "background", "data"}
LOCAL = re.compile(r"#[a-z0-9-]+|url\(#[a-z0-9-]+\)")
LONGEST_CELL = 400
LONGEST_COMMAND = 5000
KINDS = dict.fromkeys(("incomplete", "not-applicable"), "open")
KINDS |= {"unhealthy": "bad", "healthy": "good", "nothing-found": "plain"}
"""The color of each verdict."""
APPENDIX, PRINT_ALL = "appendix", "print-all"
"""The class of what is not printed, and the id of the box that has it printed; the style sheet knows both."""


@record
class Element:
    """An element with its attributes and children. Text is escaped and bounded when the page is written."""

    tag: str
    attributes: dict[str, Value] = field(default_factory=dict)
    children: "tuple[str | Element, ...]" = ()

    def __str__(self) -> str:
        return "".join(_written(self))


def h(tag: str, *children: Content, **attributes: Value) -> Element:
    """Make an element: `h("td", name, class_="name", aria_label="...")`. None and False leave an attribute out.

    Raises:
        ValueError: the page must not have such an element or attribute: scripts, styles, and what loads anything.
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    if tag in NEVER or not NAME.fullmatch(tag):
        raise ValueError(f"a page has no <{tag}>")
    for name, value in named.items():
        if name in LOADING or name.startswith("on") or not NAME.fullmatch(name):
            raise ValueError(f"a page has no attribute {name!r}")
        if (name == "href" or str(value).startswith("url(")) and not LOCAL.fullmatch(str(value)):
            raise ValueError("a link leads to the page itself only")
    return Element(tag, named, tuple(_flat(children)))


def _flat(content: Content) -> "Iterator[str | Element]":
    """Texts and elements, whatever they were wrapped in: an element can be written as often as one likes."""
    if content is None:
        return
    if isinstance(content, Element):
        yield content
    elif isinstance(content, str | int):
        yield str(content)
    else:
        for part in content:
            yield from _flat(part)


def text(value: str) -> str:
    """A text as HTML: short enough, without control or direction characters, escaped."""
    return escape(printable(shortened(value, LONGEST_QUOTED)), quote=True)


def _written(element: Element) -> Iterator[str]:
    yield f"<{element.tag}"
    for name, value in element.attributes.items():
        if value is not None and value is not False:
            # Coordinates have at most one decimal: pages stay small.
            shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
            yield f" {name}" if value is True else f' {name}="{text(shown)}"'
    yield ">"
    if element.tag not in VOID:
        for child in element.children:
            if isinstance(child, Element):
                yield from _written(child)
            else:
                yield text(child)
        yield f"</{element.tag}>"


def frame(page: str, title: str) -> str:
    """A page in a frame of its own, as HTML for a notebook. `title` names the frame, and stands above it.

    The page is a whole document, with a style sheet for `body`, `table` and `h1` and a content security policy. Written
    among the cells as it is, its styles would reach the notebook and the reverse, and the policy would be lost.
    A frame with `srcdoc` holds the whole document and needs no second file; `sandbox` without permissions forbids what
    the policy forbids, in the terms of the notebook: scripts, forms, its origin.
    Where a notebook is shown without its frames (not trusted, or as a preview on a web site), the title is left.
    """
    # A link of a `srcdoc` is relative to the notebook: one to a section would load the notebook into the frame.
    page = page.replace("<head>", '<head><base href="about:srcdoc">', 1)
    # The page is escaped already: as the value of an attribute it is escaped once more, and not shortened.
    source = page.replace("&", "&amp;").replace('"', "&quot;")
    named = text(title)
    style = f"width:100%;height:{FRAME_HEIGHT};border:1px solid #888;resize:vertical"
    return f'<p>{named}</p>\n<iframe sandbox srcdoc="{source}" title="{named}" style="{style}"></iframe>\n'


@record
class PagePosition:
    """A position on a page: the prefix of its ids, and the level of its headings."""

    prefix: str = ""
    level: int = 2

    def id(self, name: str) -> str:
        """An id that no other part of the page has."""
        return f"{self.prefix}{name}"

    def below(self, name: str = "") -> "PagePosition":
        """The position of a part of it."""
        return PagePosition(f"{self.prefix}{name}-" if name else self.prefix, self.level + 1)

    def within(self, name: str) -> "PagePosition":
        """The position of a part of it that is under the same heading."""
        return PagePosition(f"{self.prefix}{name}-", self.level)

    def heading(self, *title: Content, id_: str | None = None, class_: str | None = None) -> Element:
        """A heading of the level of this position."""
        return h(f"h{min(self.level, 6)}", title, id=id_, class_=class_)


def appendix(*content: Content) -> Element:
    """A part that is printed only where all is asked for; so is a section of this class."""
    return h("div", content, class_=APPENDIX)


def section(place: PagePosition, name: str, title: Content, *content: Content, class_: str | None = None) -> Element:
    """A section under its heading; links lead to `name`. Those of the highest level are landmarks, with a name."""
    heading = place.id(f"{name}-title")
    named = {"aria_labelledby": heading} if place.level == PagePosition().level else {}
    return h("section", place.heading(title, id_=heading), content, id=place.id(name), class_=class_, **named)


def table(
    name: str, caption: Content, header: Sequence[Content], rows: Iterable[Sequence[Content]], class_: str = ""
) -> Element:
    """A table that scrolls where it is too wide; the first cell heads its row. `name` is the id of its caption."""
    head = h("tr", (h("th", title, scope="col") if title else h("td") for title in header))
    body = (h("tr", (_cell(cell, index) for index, cell in enumerate(row))) for row in rows)
    made = h("table", h("caption", caption, id=name), h("thead", head), h("tbody", body), class_=class_ or None)
    return scrollable(name, made)


def _cell(cell: Content, index: int) -> Element:
    if isinstance(cell, Element) and cell.tag in ("td", "th"):
        return cell
    return h("th", cell, scope="row") if index == 0 and cell else h("td", cell)


def scrollable(named_by: str, *content: Content) -> Element:
    """A part that scrolls, also by keyboard; `named_by` is the id of the element that names it."""
    return h("div", content, class_="scroll", role="group", aria_labelledby=named_by, tabindex=0)


def drawing(width: int, height: float, label: str, *content: Content, **more: Value) -> Element:
    """A picture of that size; `label` is the same in text, for who cannot see it."""
    box = f"0 0 {width} {height}"
    return h("svg", content, width=width, height=height, viewBox=box, role="img", aria_label=label, **more)


def label_list(rows: Iterable[tuple[Content, Content]], class_: str = "facts") -> Element:
    """Labels with their texts; a label that repeats is empty."""
    return h("dl", (h("div", h("dt", label), h("dd", value)) for label, value in rows), class_=class_)


def code(text: str, longest: int = LONGEST_CELL) -> Element | None:
    """A name or a value of the model."""
    return h("code", shortened(text, longest)) if text else None


def command(text: str) -> Element:
    """A command to copy: one click selects it. A note warns of escapes, which a shell does not take."""
    short = shortened(text, LONGEST_COMMAND)
    altered = printable(short) != text
    parts = [short[start : start + 1000] for start in range(0, len(short), 1000)]
    note = h("p", "The name has characters that are shown as escapes here. Type them yourself.", class_="hint")
    return h("div", h("pre", h("code", parts, class_="copy")), note if altered else None, class_="command")


def fold(summary: Content, *content: Content, open_: bool = False) -> Element:
    """Details that open on a click; printed, they are open."""
    return h("details", h("summary", summary), content, open=open_)


def bullets(items: Iterable[Content]) -> Element:
    """A list with bullets."""
    return h("ul", (h("li", item) for item in items))


def chip(word: str, kind: str) -> Element:
    """A term with the color of its kind."""
    return h("span", word, class_=f"chip {kind}")


def more_line(left_out: int, what: str) -> Element | None:
    """How much is not shown, and where it is."""
    if left_out <= 0:
        return None
    verb = "are" if left_out > 1 else "is"
    text = f"{format_count(left_out, f'more {what}')} {verb} not shown here; --format json has all of them."
    return h("p", text, class_="hint")


@cache
def read_style() -> str:
    """The style sheet as it is written into the page."""
    lines = Path(__file__).with_name("style.css").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def write_page(title: str, links: Iterable[tuple[str, Content]], *content: Content) -> str:
    """The whole document. `links` are ids on the page with the titles of the sections there."""
    # Nothing but the one style sheet with this SHA-256 (CSP level 3).
    digest = base64.b64encode(hashlib.sha256(read_style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{text(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(title)}</title>\n<style>{read_style()}</style>"
    )
    contents = h("ul", (h("li", h("a", word, href=f"#{name}")) for name, word in links))
    nav = h("nav", h("p", "On this page", class_="nav-title"), contents, aria_label="On this page")
    skip = h("a", "Skip to the report", href="#report", class_="skip")
    main = h("div", nav, h("main", content, id="report", tabindex=-1), class_="frame")
    written = "".join(map(str, (skip, main, h("footer", _foot()))))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{written}\n</body>\n</html>\n'


def _foot() -> Content:
    """Who wrote it; the box that decides how much is printed, without a script; on paper, that the page has more."""
    by = f"Written by kvdoctor {__version__}, which diagnoses ONNX decoders with a KV cache."
    same = "This page has no script and loads nothing. The same report for programs: "
    rest = "contracts in text, differences by layer, experiments, steps, times, versions, options and files"
    box = h("input", type="checkbox", id=PRINT_ALL)
    return (
        h("p", f"{by} {same}", h("code", "--format json"), "."),
        h("p", h("label", box, " Print all of this page: also ", rest, "."), class_="screen"),
        h("p", "The page has more than is printed here: ", rest, ".", class_="paper"),
    )
