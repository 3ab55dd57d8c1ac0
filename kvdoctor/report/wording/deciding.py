"""The findings that decide a report: which they are, the cause and fix of each, and the run that shows it."""

import re
from collections.abc import Iterable, Iterator, Sequence

from kvdoctor.decode.runs import LOOPS, SEARCH, WRONG, Run, quote_error
from kvdoctor.errors import as_argument
from kvdoctor.findings import Finding
from kvdoctor.report.document import Report, counts
from kvdoctor.report.wording.alike import FindingGroup
from kvdoctor.report.wording.cache_lengths import CacheTable, tabulate_lengths
from kvdoctor.report.wording.targets import select_local_runs

TARGETS, REFERENCE = "KV404", "KV320"
"""The codes of what compares with a target runtime, and with a checkpoint."""


def find_deciding(report: Report, groups: Sequence[FindingGroup]) -> list[FindingGroup]:
    """The findings that are shown in full: those that count; else the warnings, unless a repair left them."""
    main = [group for group in groups if counts(group.first, report.fail_on)]
    if main or report.repair is not None:
        return main
    return [group for group in groups if group.first.severity != "note"]


def find_pictured(groups: Iterable[FindingGroup]) -> list[FindingGroup]:
    """The errors that get a picture of the cache: the first one of each stack, and known ones before it."""
    pictured: list[FindingGroup] = []
    drawn: set[str | None] = set()
    for group in groups:
        if group.first.severity != "error":
            continue
        if group.first.stack not in drawn:
            pictured.append(group)
        if group.first.known is None:
            drawn.update(group.places)
    return pictured


def name_cause(finding: Finding) -> tuple[str, str]:
    """Label and text of what a finding rests on: its first evidence as `cause`, else `where` it is."""
    return ("cause", finding.evidence[0]) if finding.evidence else ("where", finding.where)


def advise_missing(report: Report, again: str) -> str | None:
    """What decides where all that is missing is what was asked for besides: a target runtime, or a checkpoint.

    `again` is the command without these options; None where something else is missing.
    """
    missing = {entry.code for entry in report.not_checked if entry.essential}
    targets, reference = report.arguments.get("target"), report.arguments.get("reference")
    if targets and missing and missing <= {TARGETS}:
        command, repairs = f"{again} --target {','.join(targets)}", "install what the reason names, then the same again"
    elif reference and missing == {REFERENCE}:
        command = f"{again} --reference {as_argument(reference)}"
        repairs = "fix the checkpoint by the reason above, then the same again"
    else:
        return None
    once = "once without --offline; what is downloaded then is kept"
    return f"{command}   ({once if report.arguments.get('offline') else repairs})"


def quote_observed(report: Report, finding: Finding) -> str:
    """What was observed, with the end of a runtime's message in place of the whole, which -v has."""
    said = next((run.error for run in report.runs if run.error and run.error in finding.observed), None)
    return finding.observed if said is None else finding.observed.replace(said, f'"{quote_error(said)}"')


def list_fixes(finding: Finding) -> Iterator[tuple[str, str]]:
    """Label and text: the command as `fix` and the other way out as `or`; without a command the text is the fix."""
    if finding.repair.command:
        yield "fix", finding.repair.command
        yield "or", re.sub(r"^or,? ", "", finding.repair.text)
    else:
        yield "fix", finding.repair.text


def tabulate_cache(report: Report, finding: Finding) -> CacheTable | None:
    """The steps of the run that shows a finding, with the length of each cache; None where no run does."""
    contract = next((stack.contract for stack in report.stacks if stack.name == finding.stack), None)
    run = _find_run(report, finding)
    return tabulate_lengths(run, contract) if run is not None and contract is not None else None


def _find_run(report: Report, finding: Finding) -> Run | None:
    """The run that a finding is about: of its use, else the loop that is wrong, else the first wrong run."""
    if finding.stack is None:
        return None
    runs = [run for run in select_local_runs(report, finding.stack) if run.shows in WRONG and run.steps]
    if not runs:
        return None
    from kvdoctor.decode.experiments import by_name  # with numpy, which a report without runs does not need

    experiments = by_name()
    judged = [run for run in runs if (known := experiments.get(run.experiment)) and known.judged and known.shown]
    judged = [run for run in judged if run.experiment != SEARCH]  # its call of an operator shows no cache
    named = {finding.where.rpartition(", ")[2].removeprefix("experiment "), finding.observed.partition(", ")[0]}
    if finding.use is not None:
        tried = [r for r in judged if (use := experiments[r.experiment].use) and use.required == finding.use]
        return next((run for run in tried if run.experiment in named), next(iter(tried), None))
    for run in judged:
        if run.experiment in named:
            return run
    loops = [run for run in judged if run.experiment in LOOPS]
    if report.arguments.get("consumer") == "held":
        loops = [run for run in loops if run.experiment != "plain-loop"] or loops
    errors = [run for run in judged if (use := experiments[run.experiment].use) is None or use.severity == "error"]
    return next(iter([*loops, *errors]), None)
