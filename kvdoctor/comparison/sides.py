"""The two sides of a diff: a model is diagnosed, an earlier report is read."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from kvdoctor.analysis.contract_file import is_contract, read_required
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.repair.session import DiagnosisSide
from kvdoctor.report.diff_document import ComparedModel
from kvdoctor.report.document import Report
from kvdoctor.report.facts import ModelFacts, StackFacts
from kvdoctor.report.json_format import is_report, read_report
from kvdoctor.runtime.client import Runtime

SAME_OPTIONS = ("consumer", "require", "thorough", "target")
"""Options that must be the same on both sides: otherwise findings differ though the models do not."""
STEP_TEST_OPTIONS = ("contract", "trace", "reference", "inputs", "prompt_ids")
"""Options of `step-test` that a diff does not have; two reports must agree in them as well."""


@record(slots=False)
class DiagnosedSide:
    """One side: its path as the user wrote it, its report and logits.

    `stored`: it is an earlier report. `required`: it is a contract file, a report of stacks and nothing else.
    """

    path: str
    side: DiagnosisSide
    stored: bool
    required: bool = False

    @property
    def report(self) -> Report:
        """The report of the diagnosis."""
        return self.side.report

    def facts(self) -> ComparedModel:
        """The side as part of the diff document."""
        report = self.report
        source: Literal["model", "report", "contract"] = "report" if self.stored else "model"
        if self.required:
            source = "contract"
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
    stored = {a: _required_report(a, options)} if required else {}
    stored |= {path: _read_stored(path, options) for path in (a, b) if path not in stored and is_report(path)}
    _refuse_other_options(stored.get(a), stored.get(b), (a, b))
    for path in (a, b):
        if path not in stored and not Path(path).exists():
            open_folder(path)  # raises the error before the other side is run
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvdoctor-")))
        needed = not static and any(path not in stored for path in (a, b))
        runtime = opened.enter_context(Runtime(options.limits)) if needed else None
        sides = []
        for name, path in (("a", a), ("b", b)):
            logits = scratch / name
            logits.mkdir()
            report = stored.get(path)
            if report is None and runtime is None:
                report = inspect(path, options, check_advice)
            elif report is None:
                report = step_test(path, options, runtime, RunPlan(logits=logits, check_advice=check_advice))
            sides.append(DiagnosedSide(path, DiagnosisSide(report, logits), path in stored, required and name == "a"))
        yield sides[0], sides[1]


def _required_report(path: str, options: Options) -> Report:
    """The stacks of a contract file as a report without files, runs and findings."""
    stacks = []
    for name, contract in read_required(path).items():
        named = dict.fromkeys(graph.file for graph in contract.graphs.values())
        stacks.append(StackFacts(name, contract.layout, tuple(named), contract))
    model = ModelFacts(path, ())
    return Report("inspect", options.as_arguments(), options.seed, "nothing-found", {}, model, tuple(stacks))


def _read_stored(path: str, options: Options) -> Report:
    report = read_report(path)
    current = options.as_arguments()
    for name in SAME_OPTIONS:
        stored, given = (_join(arguments.get(name)) for arguments in (report.arguments, current))
        if stored != given:
            raise UsageError(
                f"{path!r} was written {_with(name, stored)}, and the other side runs {_with(name, given)}: "
                "their findings cannot be compared; use the same options for both"
            )
    return report


def _refuse_other_options(a: Report | None, b: Report | None, paths: tuple[str, str]) -> None:
    """Refuse a report with an option of `step-test` that the other side does not have."""
    for name in STEP_TEST_OPTIONS:
        values = [None if report is None else report.arguments.get(name) for report in (a, b)]
        if values[0] != values[1]:
            path = paths[0] if values[0] is not None else paths[1]
            option = name.replace("_", "-")
            raise UsageError(
                f"{path!r} was written with --{option}, and the other side was not; write it again without that option"
            )


def _with(name: str, value: str) -> str:
    if not value:
        return f"without --{name}"
    return f"with --{name}" + ("" if value == "True" else f" {value}")


def _join(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value or "")
