"""One report as sections: the verdict, the findings, the stacks, what was not checked, and the surroundings."""

from collections.abc import Iterator

from kvdoctor.report.document import Report
from kvdoctor.report.page import cure, findings, stack, surroundings, verdict
from kvdoctor.report.page.blocks import Place, section
from kvdoctor.report.page.markup import Content, Element, h

MOST_STACKS = 8
Part = tuple[str, Content, Element]
"""The id of a section, its name in the list of contents, and the section."""


def parts(report: Report, place: Place) -> Iterator[Part]:
    """The sections under the verdict, in the order in which they are read."""
    if report.repair is not None:
        yield from cure.shown(report, report.repair, place)
    title = "Findings" if report.repair is None else "Findings now"
    shown = section(place, "findings", title, *findings.shown(report.findings, place.below("now")))
    yield place.id("findings"), title, shown
    for number, facts in enumerate(report.stacks[:MOST_STACKS]):
        name = f"stack-{number}"
        yield place.id(name), f"Stack {facts.name[:40]}", stack.shown(facts, report, place, name)
    if left := [facts.name for facts in report.stacks[MOST_STACKS:]]:
        text = f"{len(left)} more stacks are in --format json: {', '.join(left)}"
        yield place.id("more"), "More stacks", section(place, "more", "More stacks", h("p", text))
    yield _one(place, "not-checked", "Not checked", *findings.unchecked(report.not_checked, place))
    if report.notes:
        yield _one(place, "notes", "Notes", *surroundings.notes(report))
    yield _one(place, "environment", "Environment", *surroundings.environment(report))
    yield _one(place, "files", "Files", *surroundings.files(report, place))


def brief(report: Report, place: Place) -> Iterator[Part]:
    """The sections that no reader can do without."""
    yield _one(place, "findings", "Findings", *findings.shown(report.findings[:20], place.below("now")))
    yield _one(place, "not-checked", "Not checked", *findings.unchecked(report.not_checked[:20], place))


def head(report: Report, place: Place) -> Element:
    """What was examined, and the verdict."""
    return verdict.head(report, place)


def _one(place: Place, name: str, title: str, *content: Content) -> Part:
    return place.id(name), title, section(place, name, title, *content)
