"""The verdict in one line: of a report, of a gate over many reports; and a report in short, for an error message."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.findings import Finding, reaches
from kvdoctor.report.blocks import Span, Table, Text, table
from kvdoctor.report.escaping import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.wording import format_count, join_some
from kvdoctor.report.wording.finding import OpenChecks, format_headline, list_details

if TYPE_CHECKING:
    from kvdoctor.report.document import Report

LABEL_WIDTH, LONGEST_REASON = 11, 600

VERDICT_TEXTS = {
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "incomplete": "incomplete, not a pass",
    "not-applicable": "not applicable",
    "nothing-found": "nothing wrong found in the files",
}
AS_FAST = "as fast as before; step-test checks that it decodes right"
NOT_SLOWER = "not slower where it could be compared; step-test checks that it decodes right"
MEASURED = "measured; step-test checks that it decodes right"
"""`nothing-found` of a measured speed, with an earlier report and without."""
ONLY_KNOWN = "healthy but for known findings"


def count_findings(findings: Sequence[Finding]) -> str:
    """`1 error, 2 notes, 1 known`, each stack's own; empty where nothing was found."""
    found = {severity: sum(f.severity == severity for f in findings) for severity in ("error", "warning", "note")}
    counts = [format_count(number, severity) for severity, number in found.items() if number]
    known = sum(finding.known is not None for finding in findings)
    return ", ".join([*counts, *([f"{known} known"] if known else [])])


def format_counts(report: "Report") -> str:
    """`1 error, 2 notes, 1 known, 1 not checked`; empty where nothing was found and all was checked."""
    left = len(report.open_checks) if report.verdict != "not-applicable" else 0
    return ", ".join(filter(None, [count_findings(report.findings), f"{left} not checked" if left else ""]))


def format_open(report: "Report", group: OpenChecks) -> str:
    """`not checked: KV301 (merged): why`."""
    if report.verdict == "not-applicable":
        return f"not applicable: {shortened(group.reason, LONGEST_REASON).removeprefix('not run: ')}"
    state, allowed = "not checked", dict.fromkeys(report.allowed(entry.code) for entry in group.entries)
    if group.essential and None not in allowed:
        state = f"not checked, allowed ({', '.join(map(str, allowed))})"
    elif not group.essential and report.verdict == "healthy":
        state = "not checked, and not needed for the verdict"
    elif not group.essential and not set(group.entries) & set(report.open_checks):
        state = "explained by a finding"
    return f"{state}: {group.describe(LONGEST_REASON)}"


def name_verdict(report: "Report") -> str:
    """The verdict in text; of a repair that was only planned, the verdicts on the original and on the copy."""
    record = report.repair
    if record is not None and record.is_planned and record.after is not None:
        before = record.before
        found = count_findings(before.findings) or "no findings"
        copy = "the copy" if before.verdict == "healthy" else "the repaired copy"
        return f"dry run: the original stays {before.verdict} ({found}); {copy} would be {record.after.verdict}"
    if record is not None and record.out is None and record.after is not None:
        return f"nothing was written: the new export would be {record.after.verdict}"
    if report.command == "speed" and report.verdict == "nothing-found":
        if report.arguments.get("against") is None:
            return MEASURED
        return NOT_SLOWER if any(one.code == "KV503" for one in report.not_checked) else AS_FAST
    if report.verdict == "nothing-found" and report.findings:
        known = all(finding.known is not None for finding in report.findings)
        what = {"error": "no error", "warning": "no error or warning"}.get(report.fail_on, "nothing that counts")
        return f"{'nothing new' if known else what} found in the files"
    if report.allowance is not None and report.verdict in ("incomplete", "not-applicable"):
        return f"{report.verdict.replace('-', ' ')}, allowed: {report.allowance}"
    known = any(finding.known is not None for finding in report.findings)
    return ONLY_KNOWN if known and report.verdict == "healthy" else VERDICT_TEXTS[report.verdict]


def format_verdict(report: "Report") -> str:
    """The verdict of a report in one line: path, verdict and counts."""
    counts = format_counts(report)
    return f"{name_model(report)}: {name_verdict(report)}" + (f" ({counts})" if counts else "")


def format_gate_verdict(verdict: str, reports: "Sequence[Report]") -> str:
    """The verdict over all models, with the number of models by verdict, of known findings, and of cached reports."""
    sums, known, only_known, allowed, cached = Counter[str](), 0, 0, 0, 0
    for report in reports:
        count = sum(finding.known is not None for finding in report.findings)
        sums[report.verdict] += 1
        known, only_known = known + count, only_known + (report.verdict == "healthy" and count > 0)
        allowed += report.allowance is not None
        cached += bool(report.measured.get("cached"))
    verdicts = ("unhealthy", "incomplete", "not-applicable", "nothing-found")
    text = f"gate: {verdict.replace('-', ' ')}; {sums['healthy']} of {format_count(len(reports), 'model')} healthy"
    text += f", {only_known} of them with known findings alone" if only_known else ""
    text += "".join(f", {sums[name]} {name.replace('-', ' ')}" for name in verdicts if sums[name])
    text += f" ({allowed} allowed)" if allowed else ""
    text += f"; {format_count(known, 'known finding')}" if known else ""
    return text + (f"; {cached} unchanged and not run again" if cached else "")


MOST_CODES = 6


def name_model(report: "Report") -> str:
    """The path of a model as it was given; of `.`, which names nothing, with the name of the folder."""
    path = report.model.path
    return path if Path(path).name else f"{path} ({Path(path).absolute().name})"


def tabulate_models(reports: "Iterable[Report]", left: int) -> Table:
    """A row for each model: verdict, the codes of errors and warnings, and time; `left` are models without a row."""
    rows: list[list[Text]] = []
    for report in reports:
        known = any(finding.known is not None for finding in report.findings)
        word = ONLY_KNOWN if known and report.verdict == "healthy" else report.verdict.replace("-", " ")
        word += ", allowed" if report.allowance is not None else ""
        codes = list(dict.fromkeys(f.code for f in report.findings if f.severity != "note" and f.known is None))
        seconds = report.measured.get("total_seconds")
        time = "unchanged" if report.measured.get("cached") else format_seconds(seconds or 0.0) if seconds else ""
        rows.append([Span(name_model(report)), Span(word, report.verdict), join_some(codes, MOST_CODES), time])
    if left > 0:
        rows.append([f"{left} more", "", "", ""])
    return table(("model", "verdict", "errors, warnings", "time"), rows, of="model")


def format_seconds(seconds: float) -> str:
    """`2.4 s`."""
    return f"{seconds:.1f} s"


def name_worst(report: "Report") -> str:
    """What keeps a model from being healthy, in brief: `KV203 cross-cache-emptied and 1 more`."""
    counted = list(dict.fromkeys(f"{found.code} {found.name}" for found in _find_counted(report)))
    if counted:
        return join_some(counted, 1)
    reasons = [f"{entry.code} not checked: {entry.reason}" for entry in report.not_checked if entry.essential]
    return printable(shortened(reasons[0])) if reasons else name_verdict(report)


def _find_counted(report: "Report") -> list[Finding]:
    """The findings that count by the report's `fail_on`; by errors where it has none."""
    lowest = "error" if report.fail_on == "never" else report.fail_on
    return [finding for finding in report.findings if reaches(finding, lowest)]


def summarize(report: "Report") -> str:
    """Verdict, the findings that count by the report's `fail_on`, and the essential checks that could not run."""
    lines = [format_verdict(report)]
    for finding in _find_counted(report):
        details = (f"  {label:<{LABEL_WIDTH}}{text}" for label, text in list_details(finding))
        lines += ["", format_headline(finding), *details]
    for entry in report.not_checked:
        stack = f" ({entry.stack})" if entry.stack else ""
        lines += [f"not checked: {entry.code}{stack} {entry.reason}"] if entry.essential else []
    return "\n".join(printable(shortened(line, LONGEST_QUOTED)) for line in lines)


def format_reproducer(report: "Report") -> str | None:
    """The folder that `repro` wrote, or the reason why it wrote none; None for other commands."""
    if report.command != "repro":
        return None
    made = report.reproducer
    if made is None:
        return "nothing to reproduce: no finding of the requested severity; no folder was written"
    if made.out is None:
        return f"no reproducer was written: {made.reason}"
    return f"reproducer: {made.out} ({made.bytes:,} bytes, no weights): {made.shows}; `{made.command}`"
