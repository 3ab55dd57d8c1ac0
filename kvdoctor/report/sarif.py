"""The report as SARIF 2.1.0 (OASIS), for code scanning.

A model is not text: logical locations (file, graph and node, values) give the location of a finding. Code scanning
requires a region, so line 1 stands for the whole file. GitHub recognizes a finding by `primaryLocationLineHash`
together with rule and path; other tools find the same fingerprint under kvdoctor's own name.
GitHub's limits: 25,000 results (5,000 of them shown), 25,000 rules and 10 MB (compressed) a run, 10 tags a rule, 1,024
characters of a description (GitHub Docs, SARIF support for code scanning; SARIF results exceed one or more limits).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.findings import SEVERITIES, Check, Finding, all_checks
from kvdoctor.report import json_format
from kvdoctor.report.document import Report, exit_code_of_all
from kvdoctor.report.escaping import printable, shortened
from kvdoctor.report.github import path_of, uri
from kvdoctor.report.wording.finding import HOME, format_headline, known_reason, link_check, write_lines

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MOST_RESULTS, MOST_IN_FULL = 25_000, 2_500
MOST_NAMES, MOST_NOTICES = 64, 1_000
LONGEST_NAME, LONGEST_LINE, LONGEST_MESSAGE, LONGEST_DESCRIPTION = 200, 900, 4000, 1024
FINGERPRINT, GITHUB_FINGERPRINT = "kvdoctorFinding/v1", "primaryLocationLineHash"
LABEL = re.compile(r"^(What it means|Reproduce|Repair|Source)([^:\n]*):", re.MULTILINE)


def render_all(reports: Sequence[Report]) -> str:
    """One run with the findings of all models: code scanning accepts few runs in a file, but many results in a run."""
    known = {check.code: check for check in all_checks()}
    found = [
        (-SEVERITIES.index(finding.severity), number, place, finding.code)
        for number, report in enumerate(reports)
        for place, finding in enumerate(report.findings)
        if finding.code in known
    ]
    kept = (sorted(found, key=itemgetter(0)) if len(found) > MOST_RESULTS else found)[:MOST_RESULTS]
    codes = sorted({code for *_, code in kept})
    rules = [_rule(known[code]) for code in codes]
    results, suppressions = list[dict[str, Any]](), list[str | None]()
    for number, entries in groupby(kept, itemgetter(1)):
        report = reports[number]
        for finding in (report.findings[place] for _, _, place, _ in entries):
            results.append(_result(report, finding, codes.index(finding.code), len(results) < MOST_IN_FULL))
            suppressions.append(known_reason(finding))
    run = {
        "tool": {"driver": {"name": "kvdoctor", "version": __version__, "informationUri": HOME, "rules": rules}},
        "automationDetails": {"id": f"kvdoctor/{_text(reports[0].command) if len(reports) else 'gate'}/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(reports, len(found) - len(kept))],
        "results": _suppressed(results, suppressions),
    }
    return json_format.dump({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(check: Check) -> dict[str, Any]:
    summary = shortened(check.summary, LONGEST_DESCRIPTION)
    body = check.documentation.partition("\n")[2].strip() or summary
    meaning = re.search(r"^What it means[^:\n]*:\s*(.+?)(?:\n\n|\Z)", body, re.MULTILINE | re.DOTALL)
    full = " ".join(meaning[1].split()) if meaning else summary
    return {
        "id": check.code,
        "name": "".join(word.capitalize() for word in check.name.split("-")),
        "shortDescription": {"text": summary},
        "fullDescription": {"text": shortened(full[:1].upper() + full[1:], LONGEST_DESCRIPTION)},
        "help": {
            "text": check.documentation,
            "markdown": f"# {check.code} {check.name}\n\n{check.summary}\n\n" + LABEL.sub(r"**\1\2:**", body),
        },
        "helpUri": link_check(check),
        "properties": {"tags": ["onnx", "kv-cache", check.name]},
    }


def _result(report: Report, finding: Finding, rule: int, in_full: bool) -> dict[str, Any]:
    """One finding; only the first ones in full, because a file has a size limit."""
    words = write_lines(finding) if in_full else [format_headline(finding)]
    location = {
        "physicalLocation": {"artifactLocation": _locate(report, finding), "region": {"startLine": 1}},
        "logicalLocations": list(_logical(finding, MOST_NAMES if in_full else 1)),
    }
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": shortened("\n".join(_text(line, LONGEST_LINE) for line in words), LONGEST_MESSAGE)},
        "locations": [location],
        "partialFingerprints": {FINGERPRINT: finding.fingerprint, GITHUB_FINGERPRINT: f"{finding.fingerprint}:1"},
        "properties": {"confidence": finding.confidence, "stack": _text(finding.stack or "")},
    }


def _suppressed(results: list[dict[str, Any]], reasons: list[str | None]) -> list[dict[str, Any]]:
    """Results with their suppressions: where one of a run has some, all must say whether they have (SARIF 3.27.23)."""
    if not any(reason is not None for reason in reasons):
        return results
    accepted = {"kind": "external", "status": "accepted"}
    each = ([] if why is None else [{**accepted, "justification": _text(why, 1000)}] for why in reasons)
    return [{**result, "suppressions": one} for result, one in zip(results, each, strict=True)]


def _locate(report: Report, finding: Finding | None = None) -> dict[str, str]:
    """The file of a finding, or the model; a relative path is taken as relative to the repository."""
    place = uri(path_of(report, finding))
    return {"uri": place, **({} if place.startswith("file:") else {"uriBaseId": "%SRCROOT%"})}


def _logical(finding: Finding, most: int) -> Iterator[dict[str, str]]:
    """The location in the graph, the values and nodes of the finding, each after its file, and PyTorch modules."""
    file = _text(finding.file or "")
    names = dict.fromkeys([(finding.where, "member"), *((name, "variable") for name in finding.subject)])
    for name, kind in list(names)[:most]:
        short = _text(name)
        yield {"name": short, "fullyQualifiedName": f"{file}/{short}" if file else short, "kind": kind}
    modules = dict.fromkeys(source.module for source in finding.sources if source.module)
    for name in list(modules)[: max(0, most - len(names))]:
        yield {"name": _text(name), "fullyQualifiedName": _text(name), "kind": "module"}


def _invocation(reports: Sequence[Report], left_out: int) -> dict[str, Any]:
    """How the run ended. A check that could not run is not a result: it is a notification of the tool."""
    code = exit_code_of_all(reports)
    notices: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    count = Counter[bool]()
    for report, entry in ((one, entry) for one in reports for entry in one.not_checked):
        count[entry.essential] += 1
        if count[entry.essential] <= MOST_NOTICES:
            stack = f" ({entry.stack})" if entry.stack else ""
            text = f"not checked: {entry.code}{stack}: {entry.reason}"
            place = {"physicalLocation": {"artifactLocation": _locate(report)}}
            notices[entry.essential].append(
                {**_notice("warning" if entry.essential else "note", text), "locations": [place]}
            )
    notifications = (notices[True] + notices[False])[:MOST_NOTICES]
    if left_out:
        limit = f"the limit of a run is {MOST_RESULTS} results"
        notifications.append(_notice("warning", f"{left_out} more findings are left out: {limit}"))
    if count.total() > MOST_NOTICES:
        notifications.append(_notice("note", f"{count.total() - MOST_NOTICES} more checks could not run"))
    return {"executionSuccessful": not count[True], "exitCode": code, "toolExecutionNotifications": notifications}


def _notice(level: str, text: str) -> dict[str, Any]:
    return {"level": level, "message": {"text": _text(text, LONGEST_LINE)}}


def _text(text: str, longest: int = LONGEST_NAME) -> str:
    return printable(shortened(text, longest))
