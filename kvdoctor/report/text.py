"""The report on one screen: findings first, worst first; what was not checked; the verdict last. All of it with -v."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.text import Text as Line

from kvdoctor.errors import as_argument
from kvdoctor.report.blocks import Block, Lines, Pairs, Section, Span, drop_folded, lines, pairs, plain
from kvdoctor.report.console import MARKS, SEVERITIES, VERDICTS, Page, open_console, open_text
from kvdoctor.report.document import Report, counts, exit_code_of_all
from kvdoctor.report.escaping import cut, shortened
from kvdoctor.report.facts import UNDIAGNOSED
from kvdoctor.report.sections.findings import find_deciding, find_pictured, make_short_card, shorten_advice
from kvdoctor.report.sections.repair import format_copy, outline_repair
from kvdoctor.report.sections.stack import is_plan_requested, show_memory, show_targets
from kvdoctor.report.sections.whole import list_sections, show_speed, show_variants
from kvdoctor.report.wording import format_count, health, join_some, summary
from kvdoctor.report.wording.contract import describe_contract, format_files, list_fed, list_ports, outline_contracts
from kvdoctor.report.wording.finding import (
    FindingGroup,
    format_name,
    format_places,
    group_findings,
    group_open_checks,
    known_reason,
)
from kvdoctor.report.wording.runs import list_target_limits

__all__ = ("open_console", "print_contracts", "print_gate", "print_report", "render", "render_gate")

MOST_LINES, COLUMNS = 26, 80
"""Lines that findings take on a terminal of so many columns; what is left then is counted."""
MOST_OPEN, MOST_STACKS, MOST_NOTES, MOST_KNOWN, MOST_FULL, MOST_MODELS = 3, 3, 3, 20, 6, 200
MOST_FILES, MOST_PORTS = 2, 16
LONGEST_FACT = 400
DETAILS = "details: -v"


def render(report: Report) -> str:
    """The report as plain text: without color, one fact a line."""
    page, console = open_text()
    print_report(report, console)
    return page.getvalue()


def render_gate(_document: Callable[[], dict[str, Any]], reports: Sequence[Report], last: tuple[str, ...]) -> str:
    """Several models as plain text; `last` are the lines about all of them."""
    page, console = open_text()
    print_gate(reports, last, console)
    return page.getvalue()


def print_report(report: Report, console: Console, verbosity: int = 0) -> None:
    """Print a report. `verbosity`: -1 findings and verdict alone, 0 one screen, 1 the evidence, 2 all."""
    page = Page(console)
    if verbosity >= 0:
        _show_title(page, report, verbosity)
    if verbosity > 0:
        page.write(list_sections(report) if verbosity > 1 else map(drop_folded, list_sections(report)))
    else:
        if report.repair is not None and verbosity == 0:
            page.write([Section("", tuple(outline_repair(report, report.repair)))])
        _show_cards(page, report, verbosity)
        page.write(_outline(report) if verbosity == 0 else _list_open_checks(report, essential=True))
    _show_verdict(page, report, verbosity)


def print_gate(reports: Sequence[Report], last: tuple[str, ...], console: Console, verbosity: int = 0) -> None:
    """Print the reports of a gate, of several models the unhealthy ones, then a table of all and the `last` lines."""
    page = Page(console)
    if len(reports) == 1:
        print_report(reports[0], console, verbosity)
    else:
        _show_models(page, reports, verbosity)
    if last:
        page.line("")
    code = exit_code_of_all(reports)
    for number, line in enumerate(last):
        page.line(f"{line} \u00b7 exit {code}" if number == 0 and len(reports) > 1 else line, "bold")


def render_contracts(report: Report) -> str:
    """The cache contract of each stack as plain text."""
    page, console = open_text()
    print_contracts(report, console)
    return page.getvalue()


def print_contracts(report: Report, console: Console, verbosity: int = 0) -> None:
    """Print the cache contract of each stack and nothing else; with `verbosity` -1 the layout of each."""
    page = Page(console)
    for stack in report.stacks:
        rows = tuple(describe_contract(stack))
        page.write([Lines((stack.name,), "strong"), Pairs(rows if verbosity >= 0 else rows[:1])])


def _show_title(page: Page, report: Report, verbosity: int) -> None:
    """The command and the policy; with -v also the versions."""
    record = report.repair
    paths = as_argument(report.model.path if record is None else record.source)
    paths += f" -o {as_argument(record.out)}" if record is not None and record.out else ""
    page.line(f"kvdoctor {report.command} {paths}", "bold")
    if verbosity > 0:
        page.line(", ".join(f"{name} {version}" for name, version in report.environment.items()), "dim")
    if report.command != "gate" and report.arguments.get("policy") is not None:
        page.line(f"policy {report.arguments['policy']}", "dim")


def _show_cards(page: Page, report: Report, verbosity: int, in_short: bool = False) -> None:
    """The findings, as many as fit one screen: a card for each that counts, a line for each other one."""
    found = ((group, group.first) for group in group_findings(report.findings))
    groups = [group for group, first in found if first.severity != "note" or counts(first, report.fail_on)]
    in_full = [] if in_short else find_deciding(report, groups)
    room = MOST_LINES * max(1, COLUMNS // page.console.width)
    pictured = find_pictured(groups) if verbosity >= 0 else []
    after_card = True
    for number, group in enumerate(groups):
        in_card = make_short_card(report, group, picture=group in pictured) if group in in_full else None
        made = page.card_lines(in_card) if in_card is not None else []
        is_card = bool(made) and (not number or len(made) <= room)
        made = made if is_card else _make_short(page, group)
        if number and len(made) > room:
            rest = [f"{format_name(group.first)} ({format_places(group.places)})" for group in groups[number:]]
            more = f"{format_count(len(rest), 'more finding')}: {join_some(list(dict.fromkeys(rest)), MOST_OPEN)}"
            page.line(f"... {more}   {DETAILS}", "bold")
            break
        page.show([Line(""), *made] if is_card or after_card else made)
        room, after_card = room - len(made), is_card
    notes = [one.first for one in group_findings(report.findings) if one.first.severity == "note"]
    notes = [note for note in notes if note.known is None and not counts(note, report.fail_on)]
    if verbosity >= 0 and notes:
        page.show([Line("")] if after_card else [])
        if groups or len(notes) > MOST_NOTES:  # what else was found says more than a note
            named = dict.fromkeys(f"{note.code} {note.name}" for note in notes)
            page.line(f"\u00b7 notes (-v): {', '.join(list(named)[:MOST_KNOWN])}", "dim")
        else:
            page.write(lines(dict.fromkeys(f"\u00b7 note: {note.code} {note.name}: {note.cause}" for note in notes)))


def _make_short(page: Page, group: FindingGroup) -> list[Line]:
    """A finding in short: its name, where, what happens, and the fix."""
    finding = group.first
    text = f"{MARKS[finding.severity]} {format_name(finding)} ({format_places(group.places)}): {finding.cause}"
    advice = cut(shorten_advice(finding.repair.text), LONGEST_FACT)
    way = Span(made, "command") if (made := finding.repair.command) else advice
    if (reason := known_reason(finding)) is not None:
        return page.lines(f"\u00b7 known: {format_name(finding)} ({format_places(group.places)}): {reason}", "dim")
    style = SEVERITIES[finding.severity]
    return [*page.lines(shortened(text, 400), style), *page.pair_lines([("fix", way)])]


def _outline(report: Report) -> Iterator[Block]:
    """What works or was read, what is undecided, what was measured, what was not checked, and notes."""
    yield from _outline_stacks(report) if report.command == "inspect" else _outline_working(report)
    if report.verdict == "not-applicable":
        ((_, text),) = health.explain_undecided(report, "-v")
        first, *advice = plain(text).split("; ")
        yield Section(
            "", (Lines((Span(f"? not applicable: {first}", report.verdict), *(f"  {one}" for one in advice))),)
        )
        return
    if report.verdict == "incomplete":
        why = health.explain_undecided(report, "-v")
        if len(why) > 1 or not report.findings:  # else the fix of the finding decides
            yield Section("", (Lines((Span(f"? {summary.name_verdict(report)}", report.verdict),)), Pairs(tuple(why))))
    for stack in report.stacks:
        yield Section(Span(stack.name), tuple(show_targets(report, stack, in_short=True)))
    yield from show_variants(report)
    yield from show_speed(report)
    yield from _list_open_checks(report, False if report.verdict in UNDIAGNOSED else None)
    notes = lines((f"note: {note}" for note in report.notes[:MOST_NOTES]), "dim")
    yield Section("", (*notes, *_count_rest(report.notes, MOST_NOTES, "note")))


def _count_rest(found: Sequence[object], most: int, of: str) -> Iterator[Lines]:
    """How many are left out, and where they are."""
    if len(found) > most:
        yield Lines((f"{format_count(len(found) - most, f'more {of}')} (-v)",), "dim")


def _list_open_checks(report: Report, essential: bool | None = None) -> Iterator[Section]:
    """What was not checked, with one line for a reason; of many the first ones. `essential` takes one kind alone."""
    groups = [g for g in group_open_checks(report.open_checks) if essential is None or g.essential == essential]
    counted = ((f"{len(group.entries)} " if len(group.entries) > 1 else "", group) for group in groups[:MOST_OPEN])
    made = [f"{number}{summary.format_open(report, group)}" for number, group in counted]
    if (left := sum(len(group.entries) for group in groups[MOST_OPEN:])) > 0:
        made.append(f"{left} more not checked (-v)")
    if made:
        yield Section("", (Lines(tuple(made), "open"),))


def _outline_working(report: Report) -> Iterator[Section]:
    """What works: of a healthy model also how closely, and what was not tried."""
    works, fails, closely = (found[:MOST_STACKS] for found in health.describe_health(report))
    if not works:
        return
    if report.verdict == "healthy":
        closely += [f"fed: {text}; --feed gives another value" for text in list_fed(report.stacks)]
        closely += health.list_not_tried(report)
    good, bad = (f"\u2713 {line}" for line in works), (f"! {line}" for line in fails)
    yield Section("", (Lines(tuple(good), "good"), Lines(tuple(bad), "open"), *lines(closely, listed=True)))


def _outline_stacks(report: Report) -> Iterator[Section]:
    """What an inspection read: the files, and the contract of each stack in short."""
    files = [format_files(report.model.files)] if report.model.files else []
    read: list[Block] = [*lines(files), *lines(list_target_limits(report), "dim")]
    first = [file for stack in report.stacks[:1] for file in stack.files]
    files_shown = sorted(report.model.files, key=lambda file: file.path not in first)
    for file in files_shown[:MOST_FILES]:
        ports = ((Span(f"{way:<5}{name}"), Span(kind)) for way, name, kind in islice(list_ports(file), MOST_PORTS))
        read += [Lines((f"  {file.path}",)), *pairs(ports)]
    read += _count_rest(files_shown, MOST_FILES, "file")
    stacks = [stack for stack in report.stacks if stack.contract is not None][:MOST_STACKS]
    if stacks:
        read.append(Lines(("", f"{', '.join(stack.name for stack in stacks)}: the cache contract"), "strong"))
        read += pairs(outline_contracts(stacks))
    yield Section("", (*read, *_count_rest(report.stacks, MOST_STACKS, "stack")))
    if is_plan_requested(report.arguments):
        plans: dict[tuple[Section, ...], list[str]] = {}
        for stack in report.stacks:
            plans.setdefault(tuple(show_memory(stack)), []).append(stack.name)
        yield from (Section(Span(", ".join(named)), plan) for plan, named in plans.items())


def _show_verdict(page: Page, report: Report, verbosity: int) -> None:
    """The last line: verdict, tally, time and exit code."""
    if made := summary.format_reproducer(report):
        page.write([Section("", (Lines((made,), "strong"),))])
    if verbosity >= 0:
        details = [f"{DETAILS}{'v' * verbosity}"] if verbosity < 2 else []
        page.line("")
        page.join([*health.list_tally(report), *details], health.BETWEEN, VERDICTS[report.verdict])
        return
    if report.findings or report.open_checks:
        page.line("")
    if report.repair is not None:
        page.line(format_copy(report.repair), "bold")
    page.line(summary.format_verdict(report), VERDICTS[report.verdict])


def _show_models(page: Page, reports: Sequence[Report], verbosity: int) -> None:
    """Several models: the findings of those that do not pass, then a table of all."""
    left = 0
    full = (report for report in reports if verbosity > 0 or report.verdict not in ("healthy", "nothing-found"))
    for number, report in enumerate(full):
        if verbosity > 0:
            print_report(report, page.console, verbosity)
        elif number >= MOST_FULL:
            left += 1
            continue
        else:
            page.line(f"{summary.name_model(report)}: {summary.name_verdict(report)}", VERDICTS[report.verdict])
            _show_cards(page, report, verbosity, in_short=number > 0)
            page.write(_list_open_checks(report, essential=True))
        page.line("")
    if verbosity == 0 and left:
        page.line(f"{left} more models do not pass: see the table; {DETAILS}", "bold")
        page.line("")
    for text in islice(_list_known(reports), MOST_KNOWN):
        page.line(text, "dim")
    page.write([summary.tabulate_models(islice(reports, MOST_MODELS), len(reports) - MOST_MODELS)])


def _list_known(reports: Sequence[Report]) -> Iterator[str]:
    """A line for each known finding and its reason, with the models that have it."""
    found: dict[str, dict[str, None]] = {}
    for report in reports:
        for group in group_findings(report.findings):
            if (reason := known_reason(group.first)) is not None:
                text = f"{format_name(group.first)}: {shortened(reason, 300)}"
                found.setdefault(text, {})[report.model.path] = None
    for text, paths in found.items():
        yield f"known in {format_places(tuple(paths))}: {text}"
