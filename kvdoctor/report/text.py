"""The report on one screen: findings first, worst first; what was not checked; the verdict last. Details with -v."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.text import Text

from kvdoctor.errors import as_argument
from kvdoctor.findings import Finding
from kvdoctor.report.document import TOTAL_SECONDS, Report, counts, exit_code, exit_code_of_all
from kvdoctor.report.repair_record import RepairRecord
from kvdoctor.report.safe import shortened
from kvdoctor.report.text_card import make_card, make_line
from kvdoctor.report.text_details import (
    show_cache_costs,
    show_details,
    show_findings,
    show_plan,
    show_repair,
    show_speed,
    show_targets,
    show_variants,
)
from kvdoctor.report.text_page import VERDICTS, Page, open_console, open_text
from kvdoctor.report.wording.alike import FindingGroup, format_places, group_findings, group_open_checks
from kvdoctor.report.wording.contract import describe_contract, format_files, outline_contracts
from kvdoctor.report.wording.deciding import find_deciding, find_pictured, quote_observed, tabulate_cache
from kvdoctor.report.wording.devices import outline_devices
from kvdoctor.report.wording.drafts import describe_drafts
from kvdoctor.report.wording.finding import format_name, known_reason
from kvdoctor.report.wording.health import (
    count_uses,
    describe_closeness,
    explain_undecided,
    format_working,
    list_unshown,
    list_working,
    name_not_tried,
)
from kvdoctor.report.wording.memory import is_plan_requested
from kvdoctor.report.wording.repair import format_copy, format_repaired, list_failed_proofs, list_not_repaired
from kvdoctor.report.wording.summary import (
    format_counts,
    format_reproducer,
    format_seconds,
    format_verdict,
    name_open,
    name_verdict,
    tabulate_models,
)
from kvdoctor.report.wording.targets import list_target_limits
from kvdoctor.report.wording.units import format_count

__all__ = ("open_console", "print_contracts", "print_gate", "print_report", "render", "render_gate")

MOST_LINES, COLUMNS = 26, 80
"""Lines that findings take on a terminal of so many columns; what is left then is counted."""
MOST_OPEN, MOST_STACKS, MOST_NOTES, MOST_KNOWN, MOST_FULL = 3, 3, 3, 20, 6
DETAILS = "details: -v"


def render(report: Report) -> str:
    """The report as plain text: without color, one fact a line."""
    page, console = open_text()
    print_report(report, console)
    return page.getvalue()


def render_gate(_document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """Several models as plain text; `last` are the lines about all of them."""
    page, console = open_text()
    print_gate(reports, last, console)
    return page.getvalue()


def print_report(report: Report, console: Console, verbosity: int = 0, show_diff: bool = False) -> None:
    """Print a report. `verbosity`: -1 findings and verdict alone, 0 one screen, 1 everything."""
    page = Page(console)
    if verbosity >= 0:
        _show_title(page, report, verbosity)
    if verbosity > 0:
        show_findings(page, report)
        show_details(page, report, show_diff)
    else:
        _show_screen(page, report, verbosity, show_diff)
    _show_verdict(page, report, verbosity)


def print_gate(reports: list[Report], last: tuple[str, ...], console: Console, verbosity: int = 0) -> None:
    """Print the reports of a gate: of several models the unhealthy ones, then a table of all.

    `last` are the lines about all models.
    """
    page = Page(console)
    if len(reports) == 1:
        print_report(reports[0], console, verbosity)
    else:
        _show_models(page, reports, verbosity)
    if last:
        page.line("")
    for number, line in enumerate(last):
        first = number == 0 and len(reports) > 1
        page.line(f"{line} \u00b7 exit {exit_code_of_all(map(_exit_code, reports))}" if first else line, "bold")


def render_contracts(report: Report) -> str:
    """The cache contract of each stack as plain text."""
    page, console = open_text()
    print_contracts(report, console)
    return page.getvalue()


def print_contracts(report: Report, console: Console, verbosity: int = 0) -> None:
    """Print the cache contract of each stack and nothing else; with `verbosity` -1 the layout of each."""
    page = Page(console)
    for stack in report.stacks:
        page.line(stack.name, "bold")
        pairs = describe_contract(stack)
        page.pairs(pairs if verbosity >= 0 else list(pairs)[:1])


def _exit_code(report: Report) -> int:
    return exit_code(report, report.fail_on)


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


def _show_screen(page: Page, report: Report, verbosity: int, show_diff: bool) -> None:
    """Findings, what works, and what was not checked; without more than findings where it is to be quiet."""
    if report.repair is not None and verbosity >= 0:
        _show_repair(page, report, report.repair, show_diff)
    _show_cards(page, report, verbosity)
    if verbosity < 0:
        _show_open_checks(page, report, essential=True)
        return
    if report.command == "inspect":
        _outline_stacks(page, report)
    else:
        _show_working(page, report)
    if report.verdict == "incomplete":
        _show_undecided(page, report)
    for stack in report.stacks:
        show_targets(page, report, stack)
    show_variants(page, report)
    show_speed(page, report)
    for line in describe_drafts(report):
        page.line(line)
    _show_open_checks(page, report, False if report.verdict == "incomplete" else None)
    for note in report.notes[:MOST_NOTES]:
        page.line(f"note: {note}", "dim")
    if len(report.notes) > MOST_NOTES:
        page.line(f"{format_count(len(report.notes) - MOST_NOTES, 'more note')} (-v)", "dim")


def _show_cards(page: Page, report: Report, verbosity: int, in_short: bool = False) -> None:
    """The findings, as many as fit one screen: a card for each that counts, a line for each other one."""
    groups = [group for group in group_findings(report.findings) if _is_shown(group.first, report)]
    in_full = [] if in_short else find_deciding(report, groups)
    room = MOST_LINES * max(1, COLUMNS // page.console.width)
    pictured = find_pictured(groups) if verbosity >= 0 else []
    after_card = True
    for number, group in enumerate(groups):
        is_card = group in in_full
        picture = tabulate_cache(report, group.first) if is_card and group in pictured else None
        observed = quote_observed(report, group.first)
        lines = make_card(page, group, observed, picture) if is_card else make_line(page, group)
        if number and len(lines) > room:
            _show_rest(page, groups[number:])
            break
        page.show([Text(""), *lines] if is_card or after_card else lines)
        room, after_card = room - len(lines), is_card
    names = list(dict.fromkeys(list_unshown(report)))
    if verbosity >= 0 and names and not any(group.first.severity == "note" for group in groups):
        page.show([Text("")] if after_card else [])
        page.line(f"\u00b7 notes: {', '.join(names[:MOST_KNOWN])}", "dim")


def _is_shown(finding: Finding, report: Report) -> bool:
    """Whether a finding stands on the screen: a note does only where it counts."""
    return finding.severity != "note" or counts(finding, report.fail_on)


def _show_rest(page: Page, groups: Sequence[FindingGroup]) -> None:
    """Findings for which there is no room, by their names."""
    names = dict.fromkeys(f"{format_name(group.first)} ({format_places(group.places)})" for group in groups)
    shown = ", ".join(list(names)[:MOST_OPEN])
    more = f" and {len(names) - MOST_OPEN} more" if len(names) > MOST_OPEN else ""
    page.line(f"... {format_count(len(groups), 'more finding')}: {shown}{more}   {DETAILS}", "bold")


def _show_open_checks(page: Page, report: Report, essential: bool | None = None) -> None:
    """What was not checked, alike reasons in one line; of many the first ones. `essential` takes one kind alone."""
    groups = [g for g in group_open_checks(report.not_checked) if essential is None or g.essential == essential]
    if groups:
        page.line("")
    for group in groups[:MOST_OPEN]:
        number = f"{len(group.entries)} " if len(group.entries) > 1 else ""
        page.line(
            f"{number}{name_open(report, group.essential)}: {group.title}: {shortened(group.reason, 600)}", "yellow"
        )
    if len(groups) > MOST_OPEN:
        page.line(f"{sum(len(group.entries) for group in groups[MOST_OPEN:])} more not checked (-v)", "yellow")


def _show_working(page: Page, report: Report) -> None:
    """What works: of a healthy model also how closely, and what was not tried."""
    stacks = list_working(report)
    if stacks:
        page.line("")
    for line in islice(format_working(report, stacks), MOST_STACKS):
        page.line(f"\u2713 {line}", "green")
    if stacks and report.verdict == "healthy":
        for line in islice(describe_closeness(report, stacks), MOST_STACKS):
            page.line(f"  {line}", hang=0)
        if (left := name_not_tried(report, stacks)) is not None:
            page.line(f"  not tried: {left}", hang=0)


def _show_undecided(page: Page, report: Report) -> None:
    """That the verdict is not a pass, why, and what decides."""
    page.line("")
    page.line("? not diagnosed: not a pass", VERDICTS["incomplete"])
    page.pairs(explain_undecided(report, "-v"))


def _outline_stacks(page: Page, report: Report) -> None:
    """What an inspection read: the files, and the contract of each stack in short."""
    page.line("")
    if report.model.files:
        page.line(format_files(report.model.files))
    for line in list_target_limits(report):
        page.line(line, "dim")
    stacks = [stack for stack in report.stacks if stack.contract is not None][:MOST_STACKS]
    if stacks:
        page.line(f"{', '.join(stack.name for stack in stacks)}: the cache contract", "bold")
        page.pairs((*outline_contracts(stacks), *outline_devices(stacks)))
    if len(report.stacks) > MOST_STACKS:
        page.line(f"{format_count(len(report.stacks) - MOST_STACKS, 'more stack')} (-v)", "dim")
    if is_plan_requested(report.arguments):
        for stack in report.stacks:
            show_plan(page, stack)


def _show_repair(page: Page, report: Report, record: RepairRecord, show_diff: bool) -> None:
    """What a repair changed, what failed of its proof, and what it left; every change where that was asked for."""
    if show_diff:
        show_repair(page, report, record, show_diff)
        return
    lines = list(format_repaired(record))
    if lines:
        page.line("")
    for line in lines:
        page.line(line, "green" if record.proved else "yellow")
    for line in list_failed_proofs(record):
        page.line(line, "red")
    show_cache_costs(page, record, whole=False)
    for line in list_not_repaired(record):
        page.line(line, "yellow")
    if record.out is not None:
        page.line(format_copy(record), "bold")


def _show_verdict(page: Page, report: Report, verbosity: int) -> None:
    """The last line: verdict, tally, time and exit code."""
    if made := format_reproducer(report):
        page.line(made, "bold")
    if verbosity < 0:
        if report.findings or report.not_checked:
            page.line("")
        if report.repair is not None:
            page.line(format_copy(report.repair), "bold")
        page.line(format_verdict(report), VERDICTS[report.verdict])
        return
    page.line("")
    found = format_counts(report)
    of_copy = ""
    if report.repair is not None and report.repair.out is not None:
        of_copy = "the copy is "
    elif report.repair is not None and report.repair.proof and not report.repair.is_planned:
        of_copy = "no copy was written; the original is "
    seconds = report.measured.get(TOTAL_SECONDS)
    parts = (
        of_copy + name_verdict(report) + (f": {found}" if found else ""),
        count_uses(report),
        format_seconds(seconds) if isinstance(seconds, float) else None,
        f"exit {_exit_code(report)}",
    )
    details = f"     {DETAILS}" if verbosity == 0 else ""
    page.line(" \u00b7 ".join(filter(None, parts)) + details, VERDICTS[report.verdict])


def _show_models(page: Page, reports: Sequence[Report], verbosity: int) -> None:
    """Several models: the findings of those that do not pass, then a table of all."""
    full = [report for report in reports if verbosity > 0 or report.verdict not in ("healthy", "nothing-found")]
    for number, report in enumerate(full if verbosity > 0 else full[:MOST_FULL]):
        if verbosity > 0:
            print_report(report, page.console, verbosity)
        else:
            page.line(f"{report.model.path}: {name_verdict(report)}", VERDICTS[report.verdict])
            _show_cards(page, report, verbosity, in_short=number > 0)
            _show_open_checks(page, report, essential=True)
        page.line("")
    if verbosity == 0 and len(full) > MOST_FULL:
        page.line(f"{len(full) - MOST_FULL} more models do not pass: see the table; {DETAILS}", "bold")
        page.line("")
    for report in reports:
        _show_known(page, report)
    page.table(*tabulate_models(reports), styled=1)


def _show_known(page: Page, report: Report) -> None:
    """Known findings of a model in short, with their reasons."""
    for path, text in _list_known(report):
        page.line(f"{path}: {text}", "dim")


def _list_known(report: Report) -> Iterator[tuple[str, str]]:
    for group in group_findings(report.findings)[:MOST_KNOWN]:
        if (reason := known_reason(group.first)) is not None:
            yield report.model.path, f"known: {format_name(group.first)}: {shortened(reason, 300)}"
