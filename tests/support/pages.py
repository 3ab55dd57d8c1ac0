"""HTML pages as tests read them: parsed by the rules of the standard, every error of which is an error here."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib

from kvdoctor.gating.verdict import judge
from kvdoctor.records import from_plain
from kvdoctor.report import formats
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import printable

ROOT = Path(__file__).parents[2]
HTML = "{http://www.w3.org/1999/xhtml}"
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
LOADING = ("src", "srcset", "action", "formaction", "data", "poster", "background", "ping", "style")


@dataclass
class Page:
    """A page: its source, its tree, and all of its text."""

    source: str
    root: Element
    text: str

    def all(self, *tags: str) -> Iterator[Element]:
        """Elements of HTML by their names, in the order of the page; without names all elements, of SVG too."""
        wanted = {HTML + tag for tag in tags}
        yield from (element for element in self.root.iter() if not tags or element.tag in wanted)


def kvdoctor(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    """The command line, which gives a verdict."""
    done = subprocess.run(
        [sys.executable, "-m", "kvdoctor", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode in (0, 1, 3), done.stderr
    return done


def page(source: str) -> Page:
    """Parse a page strictly."""
    root = html5lib.HTMLParser(strict=True).parse(source)
    return Page(source, root, squeezed("".join(root.find(f"{HTML}body").itertext())))


def squeezed(text: str) -> str:
    """A text without its white space: where an element ends, none need be."""
    return re.sub(r"\s+", "", text)


def revived(document: dict[str, Any]) -> Report:
    """A report from its JSON."""
    return from_plain(Report, {key: value for key, value in document.items() if key not in ("schema", "tool")})


def reports(path: Path) -> list[Report]:
    """The reports of a JSON document, of a gate or not."""
    document = json.loads(path.read_text(encoding="ascii"))
    return [revived(entry) for entry in document.get("reports", [document])]


def rendered(*reports: Report) -> Page:
    """The page of reports; parsing it has found no error."""
    if len(reports) == 1:
        return page(formats.render(reports[0], "html"))
    done = judge(reports)
    return page("".join(formats.write_gate(done.to_dict, reports, (), "html")))


def assert_sound(page: Page) -> None:
    """What holds of every page: nothing is loaded, ids are unique, links lead somewhere, headings are in order."""
    ids = [value for element in page.all() if (value := element.get("id")) is not None]
    assert len(ids) == len(set(ids)), [name for name in ids if ids.count(name) > 1]
    for element in page.all():
        tag = str(element.tag).rpartition("}")[2]
        assert tag not in ("script", "img", "iframe", "link", "object", "embed", "form", "base"), tag
        for name, value in element.attrib.items():
            assert name not in LOADING, (tag, name)
            assert not name.startswith("on"), (tag, name)
            if name.endswith("href"):
                assert value.startswith("#"), value
                assert value[1:] in ids, value
            if name in ("aria-labelledby", "aria-describedby"):
                assert value in ids, value
            if "url(" in value:
                assert re.fullmatch(r"url\(#[a-z0-9-]+\)", value), value
    assert "url(" not in page.source.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in page.source
    levels = [HEADINGS.index(str(element.tag).rpartition("}")[2]) + 1 for element in page.all(*HEADINGS)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    for before, after in itertools.pairwise(levels):
        assert after <= before + 1, levels
    assert all("".join(element.itertext()).strip() for element in page.all(*HEADINGS, "th", "caption", "summary"))
    for element in page.all():
        if str(element.tag).endswith("}svg"):
            assert element.get("aria-hidden") == "true" or (element.get("role"), bool(element.get("aria-label"))) == (
                "img",
                True,
            )
    assert all(element.get("scope") in ("col", "row") for element in page.all("th"))
    assert all(element.find(f"{HTML}caption") is not None for element in page.all("table"))


def assert_tells(page: Page, report: Report) -> None:
    """The facts of the document stand on the page."""
    lacking = [fact for fact in facts(report) if squeezed(printable(fact)) not in page.text]
    assert not lacking, lacking


def facts(report: Report) -> Iterator[str]:
    """What a page must tell of a report."""
    yield report.verdict.replace("-", " ")
    yield report.model.path
    for finding in report.findings:
        yield from (finding.code, finding.name, finding.severity, finding.cause, finding.observed, finding.declared)
        yield from (*finding.evidence, *finding.effects, finding.repair.text, finding.repair.command or "")
        yield finding.fingerprint
    for run in report.runs:
        outcome = run.reason or "" if run.outcome == "skipped" else run.outcome
        yield from (run.experiment, outcome, run.error or "")
    for stack in report.stacks:
        yield from (stack.name, stack.layout)
        for slot in stack.contract.slots if stack.contract else ():
            yield from (slot.past, slot.present or "")
    for entry in report.not_checked:
        yield from (entry.code, entry.reason)
    yield from (word for pair in report.environment.items() for word in pair)
    yield from (file.path for file in report.model.files)
    yield from report.notes
    if report.repair is not None:
        yield from (report.repair.source, report.repair.out or "")
        yield from (text for c in report.repair.changes for text in (c.where, c.before, c.after))
        yield from (proof.claim for proof in report.repair.proof)
        yield from report.repair.advice
