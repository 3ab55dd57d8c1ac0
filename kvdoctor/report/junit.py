"""The report as JUnit XML: a suite is a stack of a model, a case is an experiment or a check.

A check fails by the findings that count for the exit code. An experiment fails where its stack has such a finding and
it is one that findings rest on; the others show what becomes of what teams try. Times stand in the cases alone.
"""

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from kvdoctor.findings import Finding, all_checks
from kvdoctor.report import wording
from kvdoctor.report.document import Report, counts
from kvdoctor.report.safe import printable, shortened
from kvdoctor.trace import Run

NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML 1.0 document may hold, not even escaped."""


def render(report: Report) -> str:
    """The suites of one model."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """The suites of all models."""
    suites = [suite for report in reports for suite in _suites(report)]
    top = ET.Element("testsuites", {"name": "kvdoctor", **_sums(suites)})
    top.extend(suites)
    ET.indent(top)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(top, "unicode") + "\n"


def _suites(report: Report) -> Iterator[ET.Element]:
    stacks = [stack.name for stack in report.stacks]
    for stack in (None, *stacks):
        cases = [*_experiments(report, stack), *_checks(report, stack)]
        if cases:
            name = report.model.path if stack is None else f"{report.model.path} ({stack})"
            suite = ET.Element("testsuite", {"name": _text(name), **_sums(cases)})
            suite.extend(cases)
            yield suite


def _experiments(report: Report, stack: str | None) -> Iterator[ET.Element]:
    counted = any(_counts(report, finding) for finding in report.findings if finding.stack == stack)
    seconds = report.measured.get(stack or "", {}).get("seconds", {})
    for run in report.runs:
        if run.stack != stack:
            continue
        case = _case(report, stack, run.experiment)
        if run.experiment in seconds:
            case.set("time", f"{seconds[run.experiment]:.3f}")
        said = f"{wording.outcome(run)}: {wording.detail(run)}"
        if run.outcome == "skipped":
            _add(case, "skipped", run.reason or "skipped")
        elif counted and _is_bad(run):
            _add(case, "failure", said)
        else:
            ET.SubElement(case, "system-out").text = _text(said)
        yield case


def _is_bad(run: Run) -> bool:
    from kvdoctor.experiments import load

    judged = {experiment.name for experiment in load() if experiment.judged}
    return run.experiment in judged and run.outcome in ("failed", "differs", "died")


def _checks(report: Report, stack: str | None) -> Iterator[ET.Element]:
    """One case for each check that was asked of the stack, or of the files where there is none."""
    asked = {"file"} if stack is None else {"contract", "runs", "caller"}
    for check in all_checks():
        found = [f for f in report.findings if f.code == check.code and f.stack == stack]
        left = [e.reason for e in report.not_checked if e.stack == stack and check.code.startswith(e.code.rstrip("*"))]
        if not (found or left or asked & set(check.asks)):
            continue
        case = _case(report, stack, f"{check.code} {check.name}")
        counted = [finding for finding in found if _counts(report, finding)]
        for finding in counted:
            _add(case, "failure", wording.headline(finding), _evidence(finding), finding.severity)
        if not counted and left:
            _add(case, "skipped", "; ".join(left))
        below = [finding for finding in found if finding not in counted]
        if below:
            text = "\n".join(f"{_text(wording.headline(f))}\n{_evidence(f)}" for f in below)
            ET.SubElement(case, "system-out").text = text
        yield case
    for entry in report.not_checked:
        if stack is None and entry.code == "*":
            case = _case(report, stack, "diagnosis")
            _add(case, "error" if entry.essential else "skipped", entry.reason)
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


def _sums(cases: list[ET.Element]) -> dict[str, str]:
    """The counts that readers show: of the cases given, or of the suites that have counts already."""
    if cases and cases[0].tag == "testsuite":
        return {
            key: str(sum(int(case.get(key, "0")) for case in cases))
            for key in ("tests", "failures", "errors", "skipped")
        }
    held = {key: sum(case.find(tag) is not None for case in cases) for key, tag in KINDS}
    return {"tests": str(len(cases)), **{key: str(count) for key, count in held.items()}}


KINDS = (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))


def _text(text: str) -> str:
    return NOT_IN_XML.sub("\ufffd", printable(shortened(text, 4000)))
