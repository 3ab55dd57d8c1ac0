"""The sides of a diff: a model is diagnosed, an earlier report or golden numbers are read, which `record` writes."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvdoctor.addons.comparison.document import ComparedModel, DiffReport, NotCompared, decide
from kvdoctor.addons.comparison.results_diff import compare_findings
from kvdoctor.analysis.contract_file import is_contract, read_required
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.decodings import CODE, digest_stack, is_golden, read_golden, render_golden
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import CannotCheck, UsageError
from kvdoctor.findings import NotChecked, means_incomplete
from kvdoctor.model.output_folder import write_whole
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.session import DiagnosisSide
from kvdoctor.report.document import Report, exit_code
from kvdoctor.report.facts import ModelFacts, StackFacts
from kvdoctor.report.json_format import is_report, read_report
from kvdoctor.report.wording import format_bytes
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder

SAME_OPTIONS = ("consumer", "require", "thorough", "target")
"""Options that must be the same on both sides: otherwise findings differ though the models do not."""
STEP_TEST_OPTIONS = ("contract", "trace", "reference", "inputs", "prompt_ids")
"""Options of `step-test` that a diff does not have; two reports must agree in them as well."""


@record(slots=False)
class DiagnosedSide(DiagnosisSide):
    """One side, with its path as the user wrote it.

    `stored`: it is an earlier report. `required`: it is a contract file, a report of stacks and nothing else.
    """

    path: str
    stored: bool
    required: bool

    def facts(self) -> ComparedModel:
        """The side as part of the diff document."""
        report = self.report
        source: Literal["model", "report", "contract"] = "report" if self.stored else "model"
        source = "contract" if self.required else source
        return ComparedModel(self.path, source, report.model.path, report.verdict, report.environment)


@contextmanager
def diagnose_sides(a: str, b: str, options: Options, static: bool) -> Iterator[tuple[DiagnosedSide, DiagnosedSide]]:
    """Diagnose both sides. Their logits are in a temporary folder. Reports are read before any model is run.

    Raises:
        UsageError: a path does not exist, or a report cannot be read or was made with other options.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    if is_report(b) and is_contract(b):
        raise UsageError(
            f"{b!r} is a contract, which a model is compared with: give it first, as in diff CONTRACT MODEL"
        )
    required = is_report(a) and is_contract(a)
    static = static or required
    stored = {}
    if required:  # the stacks of a contract file as a report without files, runs and findings
        stacks = []
        for name, contract in read_required(a).items():
            named = dict.fromkeys(graph.file for graph in contract.graphs.values())
            stacks.append(StackFacts(name, contract.layout, tuple(named), contract))
        shown = options.as_arguments()
        stored[a] = Report("inspect", shown, options.seed, "nothing-found", {}, ModelFacts(a, ()), tuple(stacks))
    stored |= {path: read_report(path) for path in (a, b) if path not in stored and is_report(path)}
    _refuse_other_options(stored, (a, b), options.as_arguments())
    for path in (a, b):
        if path not in stored and not Path(path).exists():
            open_folder(path)  # raises the error before the other side is run
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(scratch_folder()))
        needed = not static and any(path not in stored for path in (a, b))
        runtime = opened.enter_context(Runtime(options.limits, reads=(a, b))) if needed else None
        sides = []
        for name, path in (("a", a), ("b", b)):
            logits = scratch / name
            logits.mkdir()
            report = stored.get(path)
            if report is None and runtime is None:
                report = inspect(path, options, check_advice)
            elif report is None:
                report = step_test(path, options, runtime, RunPlan(logits=logits, check_advice=check_advice))
            sides.append(DiagnosedSide(report, logits, path, path in stored, required and name == "a"))
        yield sides[0], sides[1]


def _refuse_other_options(stored: dict[str, Report], paths: tuple[str, str], current: dict[str, Any]) -> None:
    for path, other in (paths, paths[::-1]):
        beyond = stored[other].arguments if other in stored else {}
        for name in (*SAME_OPTIONS, *STEP_TEST_OPTIONS) if path in stored else ():
            mine, theirs = stored[path].arguments, current if name in SAME_OPTIONS else beyond
            before, now = (_describe_option(name, arguments.get(name)) for arguments in (mine, theirs))
            if before != now:
                raise UsageError(
                    f"{path!r} was written {before}, and the other side runs {now}: their findings cannot be "
                    "compared; use the same options for both"
                )


def _describe_option(name: str, value: object) -> str:
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")
    option = f"--{name.replace('_', '-')}"
    return f"with {option}{'' if shown == 'True' else f' {shown}'}" if shown else f"without {option}"


def write_golden(path: str, out: str, options: Options, runtime: Runtime, *, force: bool = False) -> Report:
    """Step-test a model, and write its golden numbers where nothing counts against it; a note of the report says so.

    Golden numbers of a faulty model would keep its fault.

    Raises:
        UsageError: there is nothing at the path, or `out` exists or cannot be written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    _refuse_unfit(out, force)
    report = replace(step_test(path, options, runtime), command="record")
    if exit_code(report, options.fail_on):
        return _add_note(report, f"no golden numbers were written to {out}: they are those of a healthy model")
    folder, stacks = open_folder(path), []
    contracts = {facts.name: facts.contract for facts in report.stacks}
    for stack in folder.stacks:
        contract = contracts.get(stack.name) or read_contract(stack, folder.side_cars)
        try:
            stacks.append(digest_stack(stack, contract, folder.root.absolute(), options, runtime))
        except CannotCheck as error:
            missing = NotChecked(stack.name, CODE, f"no golden numbers were written: {error}", essential=True)
            return replace(report, verdict="incomplete", not_checked=(*report.not_checked, missing))
    content = render_golden(folder.root.name, tuple(stacks), options.seed, runtime.versions.get("onnxruntime", ""))
    write_whole(Path(out), content)
    calls = sum(len(walk.logits) for stack in stacks for walk in stack.walks)
    size = format_bytes(len(content))
    names = ", ".join(stack.name for stack in stacks)
    return _add_note(report, f"{out}: golden numbers of {names}: {calls} calls, {size}")


def _refuse_unfit(out: str, force: bool) -> None:
    place = Path(out)
    if place.is_dir():
        raise UsageError(f"{out!r} is a folder; give a file in it")
    if os.path.lexists(place) and not force:
        raise UsageError(f"{out!r} exists; --force replaces it")
    if not place.absolute().parent.is_dir():
        raise UsageError(f"the folder of {out!r} does not exist; make it first")


def _add_note(report: Report, note: str) -> Report:
    return replace(report, notes=(note, *report.notes))


def find_golden(a: str, b: str) -> tuple[str, str] | None:
    """The golden file and the model among the two sides; None where neither is a file of golden numbers.

    Raises:
        UsageError: both are.
    """
    golden = [path for path in (a, b) if is_golden(path)]
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
    names = dict.fromkeys(f"{one.severity}[{one.code}] {one.name}" for one in report.findings if one.code != CODE)
    others = [f"B has findings that golden numbers do not compare: {', '.join(names)}"] if names else []
    findings = tuple(compare_findings([], found, {}, options.fail_on))
    missing = tuple(_list_missing(report))
    reasons = tuple(dict.fromkeys(one.because for one in findings if one.effect == "worse"))
    return DiffReport(
        arguments=arguments,
        seed=options.seed,
        verdict=decide((), findings, worse=bool(reasons), incomplete=any(entry.essential for entry in missing)),
        a=ComparedModel(kept.file, "golden", kept.model, "recorded", {"onnxruntime": kept.onnxruntime}),
        b=ComparedModel(model, "model", report.model.path, report.verdict, report.environment),
        reasons=reasons,
        findings=findings,
        not_compared=missing,
        notes=(*(note for note in report.notes if kept.words in note), *others),
        measured={"b": report.measured},
    )


def _list_missing(report: Report) -> list[NotCompared]:
    found = [NotCompared(e.stack, e.code, e.reason, essential=True) for e in report.not_checked if e.essential]
    unread = (finding for finding in report.findings if means_incomplete(finding.code))
    found += [NotCompared(finding.stack, finding.code, finding.cause, essential=True) for finding in unread]
    if not report.stacks and not found:
        why = next((entry.reason for entry in report.not_checked), "") or "nothing could be read"
        found.append(NotCompared(None, "golden", why, essential=True))
    return found
