"""Compares a model with golden numbers, which `kvdoctor record` wrote: side A of the diff is what was recorded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvdoctor.comparison.findings_diff import compare_findings
from kvdoctor.diagnose.golden import CODE, Golden, read_golden
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import means_incomplete
from kvdoctor.options import Options
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.report.diff_document import ComparedModel, DiffReport, DiffVerdict, FindingDiff, NotCompared
from kvdoctor.report.document import Report


def find_golden(a: str, b: str) -> tuple[str, str] | None:
    """The golden file and the model among the two sides; None where neither is a file of golden numbers.

    Raises:
        UsageError: both are.
    """
    golden = [path for path in (a, b) if path.endswith(".npz") and Path(path).is_file()]
    if len(golden) > 1:
        raise UsageError("two files of golden numbers are no models: give one of them and a model")
    return (golden[0], b if golden[0] == a else a) if golden else None


def compare_golden(golden: str, model: str, options: Options, arguments: dict[str, object]) -> DiffReport:
    """Decode with a model along golden tokens, and compare.

    Raises:
        UsageError: the file has no golden numbers, there is nothing at the path, or the check is not selected.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    kept = read_golden(golden)
    if not options.selection.takes(CODE, "golden-differs"):
        raise UsageError(f"--select or --ignore leaves out {CODE} golden-differs, which compares with {golden}")
    report = step_test(model, replace(options, against=golden), plan=RunPlan(check_advice=check_advice))
    found = [finding for finding in report.findings if finding.code == CODE]
    findings = tuple(compare_findings([], found, {}, options.fail_on))
    missing = tuple(_list_missing(report))
    verdict = _decide(findings, any(entry.essential for entry in missing))
    return DiffReport(
        arguments=arguments,
        seed=options.seed,
        verdict=verdict,
        a=_recorded(kept),
        b=ComparedModel(model, "model", report.model.path, report.verdict, report.environment),
        reasons=tuple(dict.fromkeys(one.because for one in findings if one.effect == "worse")),
        findings=findings,
        not_compared=missing,
        notes=(*(note for note in report.notes if kept.words in note), *_list_other_findings(report)),
        measured={"b": report.measured},
    )


def _list_other_findings(report: Report) -> Iterator[str]:
    """What the model has besides, of which golden numbers say nothing."""
    others = (f"{one.severity}[{one.code}] {one.name}" for one in report.findings if one.code != CODE)
    if names := ", ".join(dict.fromkeys(others)):
        yield f"B has findings that golden numbers do not compare: {names}"


def _recorded(kept: Golden) -> ComparedModel:
    return ComparedModel(kept.file, "golden", kept.model, "recorded", {"onnxruntime": kept.onnxruntime})


def _list_missing(report: Report) -> list[NotCompared]:
    found = [NotCompared(e.stack, e.code, e.reason, essential=True) for e in report.not_checked if e.essential]
    unread = (finding for finding in report.findings if means_incomplete(finding.code))
    found += [NotCompared(finding.stack, finding.code, finding.cause, essential=True) for finding in unread]
    if not report.stacks and not found:
        why = next((entry.reason for entry in report.not_checked), "") or "nothing could be read"
        found.append(NotCompared(None, "golden", why, essential=True))
    return found


def _decide(findings: tuple[FindingDiff, ...], incomplete: bool) -> DiffVerdict:
    if any(one.effect == "worse" for one in findings):
        return "worse"
    if incomplete:
        return "incomplete"
    return "different" if findings else "equal"
