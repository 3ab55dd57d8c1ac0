"""Elements of a page that escape by construction: every text and every attribute is data, never markup.

Jinja2 escapes only where a template asks for it; dominate, htpy and xml.etree build elements as this module does. None
of them makes control and direction characters visible, limits the length of a text, or refuses what loads something.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from html import escape
from typing import Union

from kvdoctor.records import record
from kvdoctor.report.escaping import LONGEST_QUOTED, printable, shortened

FRAME_HEIGHT = "40rem"
Value = str | int | float | bool | None
Content = Union[str, int, "Element", None, Iterable["Content"]]
VOID = {"br", "input", "meta", "wbr"}
NEVER = {"script", "style", "iframe", "object", "embed", "form", "base", "link", "img"}
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
LOADING = {"src", "style", "srcset", "srcdoc", "action", "formaction", "ping", "background", "data"}
LOCAL = re.compile(r"#[a-z0-9-]+|url\(#[a-z0-9-]+\)")


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
            yield f" {name}" if value is True else f' {name}="{text(_number(value))}"'
    yield ">"
    if element.tag not in VOID:
        for child in element.children:
            if isinstance(child, Element):
                yield from _written(child)
            else:
                yield text(child)
        yield f"</{element.tag}>"


def _number(value: Value) -> str:
    """Coordinates with at most one decimal: pages stay small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


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
