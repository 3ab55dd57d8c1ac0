"""The sections of a report: each is made once, and text, Markdown and page have all that it says."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.pages import page, squeezed

from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report import formats, markdown, text
from kvdoctor.report.blocks import Block, Cards, Lines, Pairs, Picture, Section, Table, Text, plain
from kvdoctor.report.document import Report
from kvdoctor.report.sections.whole import list_sections
from kvdoctor.runtime.client import Runtime

EXPORTS = Path("fixtures/exports")


@pytest.fixture(scope="module", params=["marian-4.46.3", "gpt2", "llama-gqa"])
def report(request: pytest.FixtureRequest) -> Report:
    if request.param == "llama-gqa":
        return inspect(str(EXPORTS / request.param), Options(batch=2))
    with Runtime(Options().limits) as runtime:
        return step_test(str(EXPORTS / request.param), Options(), runtime)


def said(block: Block) -> Iterator[Text]:
    """Every text of a block."""
    match block:
        case Lines():
            yield from block.lines
        case Pairs():
            yield from (text for row in block.rows for text in row)
        case Table():
            yield from (block.title, *block.header, *(cell for row in block.rows for cell in row))
        case Cards():
            for card in block.cards:
                yield from (card.severity, card.code, card.name, card.place, card.cause)
                yield from (text for row in (*card.facts, *card.fix, *card.more) for text in row)
                # On a console the picture needs no title: it stands within the finding.
                yield from said(replace(card.picture, title="")) if card.picture is not None else ()
        case Picture():
            yield from (text for inner in block.instead for text in said(inner))
        case Section():
            found = [text for inner in block.content for text in said(inner)]
            yield from (block.title, *found) if found else ()


def written(report: Report) -> dict[str, str]:
    """The three formats without what belongs to them: white space, and in Markdown what escapes."""
    shown = io.StringIO()
    text.print_report(report, Console(file=shown, width=4096), verbosity=2)
    escaped = re.sub(r"<!-- -->|\\(?=[^\w\s])|[`]|<(?=https)|(?<=\d)>(?=:)", "", markdown.render_whole(report))
    html = page(formats.render(report, "html")).text
    return {"text": squeezed(shown.getvalue()), "markdown": squeezed(escaped), "page": html}


def test_every_format_says_all_of_every_section(report: Report) -> None:
    found = {name: shown.lower() for name, shown in written(report).items()}
    texts = {plain(text) for section in list_sections(report) for text in said(section)}
    assert len(texts) > 50
    for name, shown in found.items():
        lacking = [text for text in texts if squeezed(text.replace("`", "")).lower() not in shown.replace("`", "")]
        assert not lacking, (name, lacking)
