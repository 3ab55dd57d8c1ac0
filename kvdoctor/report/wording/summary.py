"""The verdict in one line: of a report, of a gate over many reports; and a report in short, for an error message."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdoctor.errors import as_argument
from kvdoctor.findings import Finding, reaches
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened
from kvdoctor.report.wording.alike import group_findings
from kvdoctor.report.wording.finding import format_headline, list_details
from kvdoctor.report.wording.units import format_count

if TYPE_CHECKING:
    from kvdoctor.report.document import Report

LABEL_WIDTH = 11


VERDICT_WORDS = {
    "healthy": "healthy",
    "unhealthy": "unhealthy",
    "incomplete": "not diagnosed, not a pass",
    "nothing-found": "nothing found in the files; step-test runs decode steps",
}
AS_HERE = "the probe shows what the same calls show locally; step-test checks the model itself"
"""`nothing-found` of a judged probe."""
AS_FAST = "as fast as before; step-test checks that it decodes right"
NOT_SLOWER = "not slower where it could be compared; step-test checks that it decodes right"
MEASURED = "measured; step-test checks that it decodes right"
"""`nothing-found` of a measured speed, with an earlier report and without."""
NO_ERROR = "no error in the files; step-test runs decode steps"
"""`nothing-found` of an inspection that lists warnings or notes."""
NONE_COUNTS = "no finding in the files that counts by --fail-on; step-test runs decode steps"
ONLY_KNOWN = "healthy but for known findings"


def count_findings(findings: Sequence[Finding]) -> str:
    """`1 error, 2 notes, 1 known`, of several stacks with the same one once; empty where nothing was found."""
    findings = [group.first for group in group_findings(findings)]
    found = {severity: sum(f.severity == severity for f in findings) for severity in ("error", "warning", "note")}
    counts = [format_count(number, severity) for severity, number in found.items() if number]
    known = sum(finding.known is not None for finding in findings)
    return ", ".join([*counts, *([f"{known} known"] if known else [])])


def format_counts(report: "Report") -> str:
    """`1 error, 2 notes, 1 known, 1 not checked`; empty where nothing was found and all was checked."""
    counts = [count_findings(report.findings), f"{len(report.not_checked)} not checked" if report.not_checked else ""]
    return ", ".join(filter(None, counts))


def name_open(report: "Report", essential: bool) -> str:
    """`not checked`; of a healthy model, why it is healthy all the same."""
    needed = essential or report.verdict != "healthy"
    return "not checked" if needed else "not checked, and not needed for the verdict"


def name_verdict(report: "Report") -> str:
    """The verdict in words; of a repair that was only planned, the verdicts on the original and on the copy."""
    record = report.repair
    if record is not None and record.is_planned and record.after is not None:
        before = record.before
        found = count_findings(before.findings) or "no findings"
        copy = "the copy" if before.verdict == "healthy" else "the repaired copy"
        return f"dry run: the original stays {before.verdict} ({found}); {copy} would be {record.after.verdict}"
    if record is not None and record.out is None and record.after is not None:
        return f"nothing was written: the new export would be {record.after.verdict}"
    if report.command == "judge" and report.verdict == "nothing-found":
        return AS_HERE
    if report.command == "speed" and report.verdict == "nothing-found":
        if report.arguments.get("against") is None:
            return MEASURED
        return NOT_SLOWER if any(one.code == "KV503" for one in report.not_checked) else AS_FAST
    if report.verdict == "nothing-found" and any(one.severity == "error" and not one.known for one in report.findings):
        return NONE_COUNTS
    if report.command == "inspect" and report.verdict == "nothing-found" and report.findings:
        return NO_ERROR
    known = any(finding.known is not None for finding in report.findings)
    return ONLY_KNOWN if known and report.verdict == "healthy" else VERDICT_WORDS[report.verdict]


def format_verdict(report: "Report") -> str:
    """The verdict of a report in one line: path, verdict and counts."""
    counts = format_counts(report)
    return f"{report.model.path}: {name_verdict(report)}" + (f" ({counts})" if counts else "")


def format_gate_verdict(verdict: str, reports: "Sequence[Report]") -> str:
    """The verdict over all models, with the number of models by verdict, of known findings, and of cached reports."""
    known = [sum(finding.known is not None for finding in report.findings) for report in reports]
    pairs = list(zip(reports, known, strict=True))
    healthy = sum(report.verdict == "healthy" for report in reports)
    only_known = sum(report.verdict == "healthy" and count > 0 for report, count in pairs)
    words = {"unhealthy": "unhealthy", "incomplete": "not diagnosed", "nothing-found": "not run"}
    numbers = {word: sum(report.verdict == name for report in reports) for name, word in words.items()}
    cached = sum(bool(report.measured.get("cached")) for report in reports)
    return "".join(
        [
            f"gate: {verdict}; {healthy} of {format_count(len(reports), 'model')} healthy",
            f", {only_known} of them with known findings alone" if only_known else "",
            *(f", {number} {word}" for word, number in numbers.items() if number),
            f"; {format_count(sum(known), 'known finding')}" if any(known) else "",
            f"; {cached} unchanged and not run again" if cached else "",
        ]
    )


MODEL_WORDS = {"incomplete": "not diagnosed", "nothing-found": "not run"}
MOST_MODELS, MOST_CODES = 200, 6


def tabulate_models(reports: "Sequence[Report]") -> tuple[list[str], list[list[str]]]:
    """A header, and a row for each model: verdict, the codes of errors and warnings, and time."""
    rows = []
    for report in reports[:MOST_MODELS]:
        known = any(finding.known is not None for finding in report.findings)
        word = ONLY_KNOWN if known and report.verdict == "healthy" else MODEL_WORDS.get(report.verdict, report.verdict)
        codes = list(dict.fromkeys(f.code for f in report.findings if f.severity != "note" and f.known is None))
        more = f" and {len(codes) - MOST_CODES} more" if len(codes) > MOST_CODES else ""
        seconds = report.measured.get("total_seconds")
        time = "unchanged" if report.measured.get("cached") else format_seconds(seconds or 0.0) if seconds else ""
        rows.append([report.model.path, word, ", ".join(codes[:MOST_CODES]) + more, time])
    if len(reports) > MOST_MODELS:
        rows.append([f"{len(reports) - MOST_MODELS} more", "", "", ""])
    return ["model", "verdict", "errors, warnings", "time"], rows


def format_seconds(seconds: float) -> str:
    """`2.4 s`."""
    return f"{seconds:.1f} s"


def name_worst(report: "Report") -> str:
    """What keeps a model from being healthy, in a few words: `KV203 cross-cache-emptied and 1 more`."""
    counted = list(dict.fromkeys(f"{found.code} {found.name}" for found in _find_counted(report)))
    if counted:
        return counted[0] + (f" and {len(counted) - 1} more" if counted[1:] else "")
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
    script = as_argument(f"{made.out}/reproduce.py")
    return f"reproducer: {made.out} ({made.bytes:,} bytes, no weights): {made.shows}; python {script}"
