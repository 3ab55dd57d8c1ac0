"""The report as JUnit XML: a suite is a stack of a model, a case is an experiment or a check.

`failure`: the model is at fault, by a finding that counts for the exit code. An experiment fails where its stack has
such a finding and it is one that findings rest on; the others show what becomes of what teams try. `error`: nothing is
known of what was asked (exit code 3). `skipped`: not checked, with the reason. What neither fails nor is skipped says
in `system-out` what it showed. Times stand in the cases alone. The dialect is that of Jenkins (junit-10.xsd).
"""

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from kvdoctor.findings import Check, Finding, NotChecked, Selection, all_checks
from kvdoctor.report import matrix, wording
from kvdoctor.report.document import Report, counts
from kvdoctor.report.safe import printable, shortened
from kvdoctor.trace import Run

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, not even escaped."""

ASKED_BY = {"inspect": {"contract"}}
"""The rounds of a command in which a stack is asked about; of all others these three."""
ROUNDS = {"contract", "runs", "caller"}
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}
LONGEST_MESSAGE = 1200


def render(report: Report) -> str:
    """The suites of one model."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """The suites of all models."""
    suites = [suite for report in reports for suite in _suites(report)]
    sums = {key: str(sum(int(suite.get(key, "0")) for suite in suites)) for key in ("tests", "failures", "errors")}
    top = ET.Element("testsuites", {"name": "kvdoctor", **sums})
    top.extend(suites)
    ET.indent(top)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(top, "unicode") + "\n"


def _suites(report: Report) -> Iterator[ET.Element]:
    names: dict[str | None, None] = dict.fromkeys([None, *(stack.name for stack in report.stacks)])
    for told in (report.runs, report.findings, report.not_checked):
        names |= dict.fromkeys(entry.stack for entry in told)
    for stack in names:
        cases = [*_experiments(report, stack), *_checks(report, stack), *_others(report, stack)]
        if cases:
            name = report.model.path if stack is None else f"{report.model.path} ({stack})"
            counts = {key: sum(case.find(tag) is not None for case in cases) for key, tag in COUNTS.items()}
            numbers = {"tests": str(len(cases)), **{key: str(count) for key, count in counts.items()}}
            suite = ET.Element("testsuite", {"name": _text(name), **numbers})
            suite.extend(cases)
            yield suite


def _experiments(report: Report, stack: str | None) -> Iterator[ET.Element]:
    if stack is None:
        return
    counted = any(_counts(report, finding) for finding in report.findings if finding.stack == stack)
    seconds = report.measured.get(stack, {}).get("seconds", {})
    here = matrix.runs_here(report, stack)
    for run in (run for run in report.runs if run.stack == stack):
        is_here = any(run is one for one in here)
        case = _case(report, stack, run.experiment if is_here else f"{run.experiment} under {run.target}")
        if is_here and run.experiment in seconds:
            case.set("time", f"{seconds[run.experiment]:.3f}")
        said = f"{wording.outcome(run)}: {wording.detail(run)}"
        if run.outcome == "skipped":
            _add(case, "skipped", run.reason or "skipped")
        elif run.outcome == "died":
            _add(case, "error", said)
        elif counted and _is_bad(run):
            _add(case, "failure", said)
        else:
            ET.SubElement(case, "system-out").text = _text(said)
        yield case


def _is_bad(run: Run) -> bool:
    from kvdoctor.experiments import load

    judged = {experiment.name for experiment in load() if experiment.judged}
    return run.experiment in judged and run.outcome in ("failed", "differs")


def _checks(report: Report, stack: str | None) -> Iterator[ET.Element]:
    """One case for each check that was asked of the stack, or of the files where there is none."""
    for check in all_checks():
        found = [f for f in report.findings if f.code == check.code and f.stack == stack]
        left = [e for e in report.not_checked if e.stack == stack and e.code == check.code]
        unasked = None if found or left else _why_unasked(report, stack, check)
        if unasked == "":
            continue
        case = _case(report, stack, f"{check.code} {check.name}")
        counted = [finding for finding in found if _counts(report, finding)]
        for finding in counted:
            _add(
                case,
                "error" if check.incomplete else "failure",
                wording.headline(finding),
                _evidence(finding),
                finding.severity,
            )
        if not counted and (left or unasked):
            kind = "error" if any(entry.essential for entry in left) else "skipped"
            _add(case, kind, unasked or "; ".join(entry.reason for entry in left))
        below = [finding for finding in found if finding not in counted]
        if below:
            text = "\n".join(f"{_text(wording.headline(f))}\n{_evidence(f)}" for f in below)
            ET.SubElement(case, "system-out").text = text
        yield case


def _why_unasked(report: Report, stack: str | None, check: Check) -> str | None:
    """Why a check without a finding is no case that passes: empty for none at all, None for one that passes."""
    chosen = Selection(tuple(report.arguments.get("select", ())), tuple(report.arguments.get("ignore", ())))
    rounds = {"file"} if stack is None else ASKED_BY.get(report.command, ROUNDS)
    rounds = rounds | ({"targets"} if report.targets and stack is not None else set())
    if not (chosen.takes(check.code, check.name) and rounds & set(check.asks)) or not report.model.files:
        return ""
    by_runs = set(check.asks) & rounds <= {"runs"}
    if by_runs and not any(run.stack == stack and run.outcome != "skipped" for run in report.runs):
        return "no decode step was run"
    if set(check.asks) & rounds <= {"caller"}:
        return "" if report.arguments.get("trace") is None else None
    return None


def _others(report: Report, stack: str | None) -> Iterator[ET.Element]:
    """What could not be checked and is not one check: the whole diagnosis, a group of checks."""
    codes = {check.code for check in all_checks()}
    left: dict[str, list[NotChecked]] = {}
    for entry in report.not_checked:
        if entry.stack == stack and entry.code not in codes:
            left.setdefault("diagnosis" if entry.code == "*" else entry.code, []).append(entry)
    for name, entries in left.items():
        case = _case(report, stack, name)
        kind = "error" if any(entry.essential for entry in entries) else "skipped"
        _add(case, kind, "; ".join(entry.reason for entry in entries))
        yield case


def _counts(report: Report, finding: Finding) -> bool:
    return counts(finding, report.arguments.get("fail_on", "error"))


def _evidence(finding: Finding) -> str:
    return "\n".join(_text(f"{label or ' ' * 6}  {text}") for label, text in wording.evidence(finding))


def _case(report: Report, stack: str | None, name: str) -> ET.Element:
    classname = f"{report.model.path}.{stack}" if stack else report.model.path
    return ET.Element("testcase", {"classname": _text(classname), "name": _text(name)})


def _add(case: ET.Element, kind: str, message: str, text: str = "", of: str = "") -> None:
    attributes = {"message": _text(message), **({"type": of} if of else {})}
    ET.SubElement(case, kind, attributes).text = text or None


def _text(text: str) -> str:
    return NOT_IN_XML.sub("\ufffd", printable(shortened(text, LONGEST_MESSAGE)))
