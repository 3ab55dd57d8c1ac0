"""The frame of a page: head with its policy, the way through it, the foot. No script, and nothing is loaded."""

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from kvdoctor import __version__
from kvdoctor.report.page.markup import Content, Element, h, text

KINDS = {"unhealthy": "bad", "incomplete": "open", "healthy": "good", "nothing-found": "plain"}
"""The colour of each verdict."""


@cache
def style() -> str:
    """The style sheet, as it stands in the page."""
    lines = files("kvdoctor.report.page").joinpath("style.css").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def policy() -> str:
    """What the page may do: nothing but wear the one style sheet whose SHA-256 this is (CSP level 3)."""
    digest = base64.b64encode(hashlib.sha256(style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def page(title: str, links: Iterable[tuple[str, Content]], *content: Content) -> str:
    """The whole document. `links` are ids on the page, with what is found there."""
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{text(policy())}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{text(title)}</title>\n<style>{style()}</style>"
    )
    contents = h("ul", (h("li", h("a", word, href=f"#{name}")) for name, word in links))
    body: tuple[Element, ...] = (
        h("a", "Skip to the report", href="#report", class_="skip"),
        h(
            "div",
            h("nav", h("p", "On this page", class_="nav-title"), contents, aria_label="On this page"),
            h("main", content, id="report", tabindex=-1),
            class_="frame",
        ),
        h("footer", _foot()),
    )
    written = "".join(map(str, body))
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{written}\n</body>\n</html>\n'


def _foot() -> Element:
    return h(
        "p",
        f"Written by kvdoctor {__version__}, the doctor for ONNX decoders with a KV cache. This page holds no script "
        "and loads nothing; the same facts for programs: ",
        h("code", "--format json"),
        ".",
    )
