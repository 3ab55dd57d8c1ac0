"""A finding on the first screen: a card with the picture of the cache, cause and fix; or a line."""

import re
from collections.abc import Iterator, Set

from rich.text import Text

from kvdoctor.decode.runs import LOOPS, WRONG, Run
from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.safe import cut, shortened
from kvdoctor.report.text_page import STYLES, Page
from kvdoctor.report.wording.alike import FindingGroup, format_places
from kvdoctor.report.wording.cache_lengths import tabulate_lengths
from kvdoctor.report.wording.finding import format_name, known_reason
from kvdoctor.report.wording.targets import select_local_runs

MARKS = {"error": "\u2717", "warning": "!", "note": "\u00b7"}
LONGEST_FACT, LONGEST_CAUSE = 180, 240


def make_card(
    page: Page, report: Report, group: FindingGroup, drawn: Set[str | None], verbosity: int = 0
) -> list[Text]:
    """A finding in full: what happens, the picture of the cache, cause, fix, and the other way out.

    `drawn` are the stacks whose picture another card has.
    """
    finding = group.first
    place = format_places(group.places)
    if len(group.findings) == 1 and finding.file is not None:
        place = finding.file
    lines = page.head(f"{MARKS[finding.severity]} {format_name(finding)}", place, _style(finding))
    lines += page.lines(f"  {shortened(finding.cause, 300)}", hang=0)
    if verbosity >= 0 and finding.severity == "error" and finding.stack not in drawn:
        lines += _draw_cache(page, report, finding)
    return [*lines, *page.pair_lines(_list_labels(finding))]


def make_line(page: Page, group: FindingGroup) -> list[Text]:
    """A finding in short: its name, where, what happens, and the fix."""
    finding = group.first
    text = f"{MARKS[finding.severity]} {format_name(finding)} ({format_places(group.places)}): {finding.cause}"
    lines = page.lines(shortened(text, 400), _style(finding))
    reason = known_reason(finding)
    label = ("known", reason) if reason is not None else ("fix", finding.repair.command or finding.repair.text)
    return [*lines, *page.pair_lines([(label[0], cut(label[1], LONGEST_CAUSE))])]


def _style(finding: Finding) -> str:
    return "dim" if finding.known is not None else STYLES[finding.severity]


def _list_labels(finding: Finding) -> Iterator[tuple[str, str]]:
    """Label and text: observed, cause, fix, or."""
    if (reason := known_reason(finding)) is not None:
        yield "known", cut(reason, LONGEST_CAUSE)
    yield "observed", cut(finding.observed, LONGEST_FACT)
    if finding.evidence:
        yield "cause", cut(finding.evidence[0], LONGEST_CAUSE)
    else:
        yield "where", cut(finding.where, LONGEST_FACT)
    if finding.confidence == "suspected":
        yield "certainty", "suspected, not confirmed by a run"
    text = re.sub(r"^or,? ", "", finding.repair.text)
    if finding.repair.command:
        yield "fix", finding.repair.command
        yield "or", cut(text, LONGEST_CAUSE)
    else:
        yield "fix", cut(finding.repair.text, LONGEST_CAUSE)
    if finding.severity == "error":
        yield "more", f"kvdoctor explain {finding.code}"


def _draw_cache(page: Page, report: Report, finding: Finding) -> list[Text]:
    """The steps of the run that shows a finding, with the length of each cache; nothing where no run does."""
    contract = next((stack.contract for stack in report.stacks if stack.name == finding.stack), None)
    run = _find_run(report, finding)
    table = tabulate_lengths(run, contract) if run is not None and contract is not None else None
    if table is None:
        return []
    quote = page.lines(f'        "{table.quote}"', hang=1) if table.quote else []
    return [Text(""), *page.table_lines(table.header, table.rows, indent=4), *quote, Text("")]


def _find_run(report: Report, finding: Finding) -> Run | None:
    """The run that a finding is about: of its use, else the loop that is wrong, else the first wrong run."""
    if finding.stack is None:
        return None
    runs = [run for run in select_local_runs(report, finding.stack) if run.shows in WRONG and run.steps]
    if not runs:
        return None
    from kvdoctor.decode.experiments import load  # with numpy, which a report without runs does not need

    experiments = {experiment.name: experiment for experiment in load()}
    judged = [run for run in runs if (known := experiments.get(run.experiment)) and known.judged and known.shown]
    if finding.use is not None:
        for run in judged:
            use = experiments[run.experiment].use
            if use is not None and use.required == finding.use:
                return run
        return None
    loops = [run for run in judged if run.experiment in LOOPS]
    if report.arguments.get("consumer") == "held":
        loops = [run for run in loops if run.experiment != "plain-loop"] or loops
    errors = [run for run in judged if (use := experiments[run.experiment].use) is None or use.severity == "error"]
    return next(iter([*loops, *errors]), None)
