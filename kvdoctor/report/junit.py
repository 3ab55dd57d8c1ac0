"""The report as JUnit XML: a suite is a stack of a model, a case is an experiment or a check.

`failure`: a finding that counts for the exit code, and nothing else. `error`: a check that is essential for the verdict
could not run (exit code 3). `skipped`: without a result, with the reason. Experiments and findings that do not count
have their result in `system-out`. Only cases have times. The dialect is that of Jenkins (junit-10.xsd).
"""

import re
import tempfile
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from kvdoctor.findings import Check, Finding, NotChecked, all_checks
from kvdoctor.report.document import Report, counts
from kvdoctor.report.escaping import printable, shortened
from kvdoctor.report.wording.finding import format_headline, list_details
from kvdoctor.report.wording.runs import describe_result, format_outcome, select_local_runs

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that an XML 1.0 document must not have, not even escaped."""

ASKED_BY = {"inspect": {"contract"}, "speed": {"speed"}}
"""The rounds of checks that a command runs on a stack; all other commands run `ROUNDS`."""
ROUNDS = {"contract", "runs", "golden", "caller"}
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}
LONGEST_MESSAGE = 1200


def render_all(reports: Sequence[Report]) -> Iterator[str]:
    """The suites of all models. They wait in a file without a name: their sums stand before them."""
    sums = dict.fromkeys(("tests", "failures", "errors"), 0)
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as waiting:
        for suite in (suite for report in reports for suite in _suites(report)):
            sums = {key: number + int(suite.get(key, "0")) for key, number in sums.items()}
            ET.indent(suite, level=1)
            waiting.write(f"  {ET.tostring(suite, 'unicode')}\n")
        attributes = "".join(f' {key}="{number}"' for key, number in sums.items())
        yield f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="kvdoctor"{attributes}>\n'
        waiting.seek(0)
        yield from waiting
    yield "</testsuites>\n"


def _suites(report: Report) -> Iterator[ET.Element]:
    names: dict[str | None, None] = dict.fromkeys([None, *(stack.name for stack in report.stacks)])
    for entries in (report.runs, report.findings, report.not_checked):
        names |= dict.fromkeys(entry.stack for entry in entries)
    for stack in names:
        cases = [*_experiments(report, stack), *_checks(report, stack), *_others(report, stack)]
        if cases:
            name = report.model.path if stack is None else f"{report.model.path} ({stack})"
            numbers = {key: str(sum(case.find(tag) is not None for case in cases)) for key, tag in COUNTS.items()}
            suite = ET.Element("testsuite", {"name": _text(name), "tests": str(len(cases)), **numbers})
            suite.extend(cases)
            yield suite


def _experiments(report: Report, stack: str | None) -> Iterator[ET.Element]:
    if stack is None:
        return
    seconds = report.measured.get(stack, {}).get("seconds", {})
    local = select_local_runs(report, stack)
    for run in (run for run in report.runs if run.stack == stack):
        is_local = any(run is one for one in local)
        case = _case(report, stack, run.experiment if is_local else f"{run.experiment} under {run.target}")
        if is_local and run.experiment in seconds:
            case.set("time", f"{seconds[run.experiment]:.3f}")
        if run.outcome == "skipped":
            _add(case, "skipped", run.reason or "skipped")
        else:
            ET.SubElement(case, "system-out").text = _text(f"{format_outcome(run)}: {describe_result(run)}")
        yield case


def _checks(report: Report, stack: str | None) -> Iterator[ET.Element]:
    """One case for each check that the command has for the stack; without a stack, for the files."""
    rounds = {"file"} if stack is None else ASKED_BY.get(report.command, ROUNDS)
    rounds = rounds | ({"targets"} if report.targets and stack is not None else set())
    for check in all_checks() if report.model.files else ():
        found = [f for f in report.findings if f.code == check.code and f.stack == stack]
        left = [e for e in report.not_checked if e.stack == stack and e.code == check.code]
        if not found and not left:
            if not rounds.intersection(check.rounds) or not report.selection.takes(check.code, check.name):
                continue
            left = _why_not_run(report, stack, check)
        case = _case(report, stack, f"{check.code} {check.name}")
        counted = [finding for finding in found if counts(finding, report.fail_on)]
        for finding in counted:
            kind = "failure" if not check.incomplete else "skipped" if report.allowed(check.code) else "error"
            _add(case, kind, format_headline(finding), _evidence(finding), finding.severity)
        if not counted and left:
            _add_open(report, case, left)
        if below := [finding for finding in found if finding not in counted]:
            text = "\n".join(f"{_text(format_headline(f))}\n{_evidence(f)}" for f in below)
            ET.SubElement(case, "system-out").text = text
        yield case


def _why_not_run(report: Report, stack: str | None, check: Check) -> list[NotChecked]:
    """Why a check without a finding does not pass; nothing if it passes."""
    if absent := [e for e in report.absent if e.code == check.code and e.stack in (None, stack)]:
        return absent[:1]
    ran = any(run.stack == stack and run.outcome != "skipped" for run in report.runs)
    by_runs = set(check.rounds) <= {"runs"} and not ran
    return [NotChecked(stack, check.code, "no decode step was run", kind="not-run")] if by_runs else []


def _others(report: Report, stack: str | None) -> Iterator[ET.Element]:
    """Entries of `not_checked` for more than one check: the whole diagnosis, or a group of checks."""
    codes = {check.code for check in all_checks()}
    left: dict[str, list[NotChecked]] = {}
    for entry in report.not_checked:
        if entry.stack == stack and entry.code not in codes:
            left.setdefault("diagnosis" if entry.code == "*" else entry.code, []).append(entry)
    for name, entries in left.items():
        case = _case(report, stack, name)
        _add_open(report, case, entries)
        yield case


def _add_open(report: Report, case: ET.Element, left: list[NotChecked]) -> None:
    is_error = any(entry.essential and report.allowed(entry.code) is None for entry in left)
    _add(case, "error" if is_error else "skipped", "; ".join(entry.reason for entry in left))


def _evidence(finding: Finding) -> str:
    return "\n".join(_text(f"{label or ' ' * 6}  {text}") for label, text in list_details(finding))


def _case(report: Report, stack: str | None, name: str) -> ET.Element:
    classname = f"{report.model.path}.{stack}" if stack else report.model.path
    return ET.Element("testcase", {"classname": _text(classname), "name": _text(name)})


def _add(case: ET.Element, kind: str, message: str, text: str = "", of: str = "") -> None:
    attributes = {"message": _text(message), **({"type": of} if of else {})}
    ET.SubElement(case, kind, attributes).text = text or None


def _text(text: str) -> str:
    return NOT_IN_XML.sub("\ufffd", printable(shortened(text, LONGEST_MESSAGE)))
