"""The commands as functions, for `import kvdoctor` and for the command line alike (docs/python.md).

Nothing is printed, no signal handler is set, and neither folder nor environment of the process changes. Options are
keyword arguments with the names of the command line's; `kvdoctor.options` checks them.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypedDict

from kvdoctor.choices import Agree, Attentions, AxisNames, CacheType, Consumer, Dtype, ExporterName, FailOn, LogitsRows
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.options import (
    BaselineChoices,
    DiffChoices,
    Options,
    ReExportChoices,
    SpeedChoices,
    policy_options,
    read_options,
    refuse_unknown,
)
from kvdoctor.records import record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvdoctor.diagnose.context import ContractContext
    from kvdoctor.findings import Check, Finding, Issue
    from kvdoctor.gating.baseline_match import BaselineUpdate
    from kvdoctor.gating.policy import EffectiveValue, Policy
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.loops.pipeline import WrittenLoop
    from kvdoctor.report.diff_document import DiffReport
    from kvdoctor.report.document import Report
    from kvdoctor.report.info_document import EnvironmentDocument
    from kvdoctor.report.known_messages import KnownMessage
    from kvdoctor.runtime.client import Runtime

    Path = str | os.PathLike[str]
    Words = str | Iterable[str]
    Progress = Callable[[str, int, int], None]

NEEDS_CHECKPOINT = ("exporter", "dtype", "task", "because")


class SharedOptions(TypedDict, total=False):
    """The options of every function. Each has the name of the command line's (`kvdoctor COMMAND --help`).

    Lists may be one text with commas. `progress` is called at the start of each experiment with its name, its number,
    counted from 1, and their count.
    """

    consumer: Consumer
    fail_on: FailOn
    select: "Words"
    ignore: "Words"
    require: "Words"
    seed: int
    hash: bool
    offline: bool
    progress: "Progress | None"


class InspectOptions(SharedOptions, total=False):
    """The options of `inspect`. Lengths in tokens and encoder states, `batch` in sequences."""

    targets: "Words"
    weights: bool
    batch: int | None
    context: int | None
    encoder_length: int | None
    policy: "Policy | Path | None"


class ReproOptions(SharedOptions, total=False):
    """The options of everything that runs a model. `timeout` in seconds for one answer, `max_memory` in MiB.

    `tolerances` are the fractions of the logits' standard deviation that pass, by arithmetic (docs/policy.md).
    """

    thorough: bool
    provider: str
    timeout: float
    max_memory: int | None
    tolerances: "Mapping[str, float] | None"


class ProbeOptions(TypedDict, total=False):
    """The options of `probe`; they mean what they mean everywhere."""

    seed: int
    provider: str
    timeout: float
    max_memory: int | None
    offline: bool
    progress: "Progress | None"


class LoopOptions(ProbeOptions, total=False):
    """The options of `loop`. `reference` is a checkpoint whose tokens the program must find as well, with `check`."""

    reference: "Path | None"


class RecordOptions(ReproOptions, total=False):
    """The options of `record`; they mean what they mean for `step_test`."""

    policy: "Policy | Path | None"


class SpeedOptions(ProbeOptions, total=False):
    """The options of `speed`; `against` is an earlier report of it to compare with."""

    against: "Path | None"
    fail_on: "FailOn"


class JudgeOptions(ProbeOptions, total=False):
    """The options of `judge`."""

    fail_on: "FailOn"
    tolerances: "Mapping[str, float] | None"


class RunOptions(ReproOptions, total=False):
    """The options of everything that runs a model and may fetch what that needs."""

    targets: "Words"


class StepTestOptions(RunOptions, total=False):
    """The options of `step_test`."""

    contract: "Path | None"
    prompt_ids: "str | Iterable[int]"
    inputs: "Path | None"
    reference: "Path | None"
    draft: "Path | None"
    trace: "Path | None"
    against: "Path | None"
    policy: "Policy | Path | None"


class ManyModelsOptions(RunOptions, total=False):
    """The options of everything that runs many models.

    `jobs` is the number of models side by side. `cache_dir` keeps the reports of unchanged models; without it, or with
    `cache=False`, every model is run. `cluster` is the address of a Dask scheduler.
    """

    jobs: int | None
    cache: bool
    cache_dir: "Path | None"
    cluster: str | None
    against: "Path | None"
    policy: "Policy | Path | None"


class BaselineOptions(ManyModelsOptions, total=False):
    """The options of `write_baseline`; `until` is a date, as in 2026-12-31."""

    reason: str | None
    until: str | None
    prune: bool
    check: bool


class GateOptions(ManyModelsOptions, total=False):
    """The options of `gate`; `baseline` is the file of the findings that do not count. `static` runs nothing."""

    baseline: "Path | None"
    static: bool
    by_folder: bool


class ReExportOptions(RunOptions, total=False):
    """The options of `re_export`; `from_` is `--from`."""

    fix: "Words"
    keep_unproved: bool
    layout: str | None
    axes: AxisNames
    ir_version: int | None
    opset: int | None
    attentions: Attentions | None
    cache: str | None
    cache_type: CacheType | None
    exact_layers: "str | Iterable[int]"
    logits: LogitsRows | None
    from_: "Path | None"
    exporter: ExporterName | None
    dtype: Dtype | None
    task: str | None
    because: "Path | None"


class DiffOptions(RunOptions, total=False):
    """The options of `diff`."""

    static: bool
    agree: Agree | None


def inspect(path: "Path", **options: "Unpack[InspectOptions]") -> "Report":
    """Read a model without running it and without its weights: files, inputs, outputs, the cache contract.

    Raises:
        UsageError: there is nothing at the path, or an option does not take a value.
    """
    from kvdoctor.diagnose.inspection import inspect

    return inspect(os.fspath(path), _read("inspect", options, path), _check_advice)


def _check_advice(
    context: "ContractContext", findings: "tuple[Finding, ...]", options: Options, runtime: "Runtime | None"
) -> "tuple[Finding, ...]":
    """Correct the advice of findings; the repairs are loaded only where there are some."""
    from kvdoctor.repair.check_advice import check_advice

    return check_advice(context, findings, options, runtime)


def read_contracts(path: "Path") -> "Report":
    """Read the cache contract of each stack, in a report without other findings than those that say why there is none.

    Raises:
        UsageError: there is nothing at the path.
    """
    from kvdoctor.diagnose.inspection import inspect

    return inspect(os.fspath(path), Options(select=("unreadable",)), predicts=False)


def step_test(path: "Path", **options: "Unpack[StepTestOptions]") -> "Report":
    """Run decode steps with and without the cache in a separate process, and report their results.

    Raises:
        UsageError: there is nothing at the path, an option does not take a value, or `reference` is given and the
            check that judges it is not selected.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("step-test", options, path)
    if asked.reference is not None and not asked.selection.takes("KV320", "reference-differs"):
        raise UsageError(
            "--reference compares logits for KV320 reference-differs, which --select or --ignore leaves out; "
            "select KV320 as well, or give no --reference"
        )
    from kvdoctor.runtime.client import Runtime

    # Started before the rest is loaded: the worker opens the runtime in the meantime.
    with Runtime(asked.limits) as runtime:
        from kvdoctor.diagnose import pipeline

        return pipeline.step_test(os.fspath(path), asked, runtime, pipeline.RunPlan(check_advice=_check_advice))


def re_export(
    path: "Path | None", out: "Path | None" = None, *, force: bool = False, **options: "Unpack[ReExportOptions]"
) -> "Report":
    """Repair a copy of the model in the folder `out`, prove the repair, and write a fix report beside it.

    Without `out` the repair is made and proved in a private folder, and nothing is kept. With `from_` the model is
    exported again from that checkpoint, and `path` is the model to be replaced, or None. `force` replaces an `out` that
    kvdoctor wrote.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    began = time.perf_counter()
    asked = _read("re-export", options)
    how = read_options(ReExportChoices, options)
    from kvdoctor.repair.conversions.registry import read_asked
    from kvdoctor.repair.request import ExportRequest, LayoutRequest, RepairRequest

    opset = how.opset if how.from_ is None else None  # with a checkpoint it is the exporter's business
    request = RepairRequest(
        path=None if path is None else os.fspath(path),
        out=None if out is None else os.fspath(out),
        force=force,
        fix=tuple(name for name in dict.fromkeys(how.fix) if "=" not in name),
        keep_unproved=how.keep_unproved,
        layout=LayoutRequest(how.layout, how.axes == "readable", how.ir_version, opset),
        conversions=read_asked(how),
    )
    if how.from_ is None:
        _refuse_without_checkpoint(how, path)
        from kvdoctor.repair import pipeline

        return pipeline.re_export(request, asked).timed(began)
    if request.conversions:
        raise UsageError(f"--{request.conversions[0].title}: export first, then convert the result in a second call")
    from kvdoctor.repair.export.pipeline import export_from_checkpoint

    export = ExportRequest(
        how.from_, exporter=how.exporter, opset=how.opset, dtype=how.dtype, task=how.task, because=how.because
    )
    return export_from_checkpoint(replace(request, export=export), asked, asked.show_line).timed(began)


def repro(path: "Path", out: "Path", *, force: bool = False, **options: "Unpack[ReproOptions]") -> "Report":
    """Write the smallest model without weights and the script that show the leading failure into the folder `out`.

    Nothing is written where the model has no finding at or above `fail_on`, or where the failure cannot be shown
    without the weights: `report.reproducer` says which. `force` replaces an `out` that kvdoctor wrote.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("repro", options)
    from kvdoctor.reproducer.pipeline import ReproRequest, repro

    return repro(ReproRequest(os.fspath(path), os.fspath(out), force), asked)


def record_golden(path: "Path", out: "Path", *, force: bool = False, **options: "Unpack[RecordOptions]") -> "Report":
    """Step-test the model, and write the golden numbers of a healthy one into the file `out` (`kvdoctor record`).

    `step_test` and `gate` compare with them (`against`). Nothing is written for a model with findings that count, or
    one that could not be checked. `force` replaces an `out` that exists.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("record", options, path)
    from kvdoctor.runtime.client import Runtime

    with Runtime(asked.limits) as runtime:
        from kvdoctor.diagnose import record_golden as recording

        return recording.record_golden(os.fspath(path), os.fspath(out), asked, runtime, force=force)


WRITES_SPEED = "`kvdoctor speed MODEL --output speed.json` writes one"


def speed(path: "Path", **options: "Unpack[SpeedOptions]") -> "Report":
    """Measure how fast each stack decodes on this machine, and what is worse than in an earlier report.

    Raises:
        UsageError: there is nothing at the path, or `against` is no report of `speed`.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    began = time.perf_counter()
    asked = _read("speed", options)
    choices = read_options(SpeedChoices, options)
    from kvdoctor.report.json_format import read_report as read
    from kvdoctor.runtime.client import Runtime

    earlier = None if choices.against is None else read(choices.against, WRITES_SPEED)

    with Runtime(asked.limits) as runtime:
        from kvdoctor.diagnose.speed import measure_speed

        return measure_speed(os.fspath(path), asked, earlier, runtime, choices.against).timed(began)


def loop(  # noqa: PLR0913 - one for each option of the command
    path: "Path",
    out: "Path | None" = None,
    *,
    language: str,
    stack: str | None = None,
    check: bool = False,
    force: bool = False,
    **options: "Unpack[LoopOptions]",
) -> "WrittenLoop":
    """Write a program that decodes with the model into the folder `out`, in one of the languages of docs/loops.md.

    The loop is run here first: for a model that decodes wrong tokens in a right loop, nothing is written. With `check`
    the program is built and must print the tokens that the model means; building fetches its packages. `force` replaces
    an `out` that kvdoctor wrote and nobody changed.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("loop", options)
    from kvdoctor.loops.pipeline import LoopRequest, write_loop

    target = None if out is None else os.fspath(out)
    return write_loop(LoopRequest(os.fspath(path), target, language, stack, force, check), asked)


def probe(
    path: "Path",
    out: "Path",
    *,
    language: str,
    stack: str | None = None,
    force: bool = False,
    **options: "Unpack[ProbeOptions]",
) -> "WrittenLoop":
    """Write a loop as `loop` does, with runs for a machine without kvdoctor; `judge` reads what it writes there.

    Raises:
        UsageError: as `loop`.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("probe", options)
    from kvdoctor.loops.pipeline import LoopRequest, write_loop

    return write_loop(LoopRequest(os.fspath(path), os.fspath(out), language, stack, force, probe=True), asked)


def judge(path: "Path", result: "Path", **options: "Unpack[JudgeOptions]") -> "Report":
    """Compare what the program of a probe fed and got on another machine with the contract and with this machine.

    Raises:
        UsageError: there is nothing at the path, or `result` is not what the program of a probe of this model writes.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("judge", options)
    from kvdoctor.runtime.client import Runtime

    with Runtime(asked.limits) as runtime:
        from kvdoctor.loops import judge as judging

        return judging.judge(os.fspath(path), os.fspath(result), asked, runtime)


def list_languages() -> tuple[str, ...]:
    """The languages that `loop` writes."""
    from kvdoctor.loops.language import languages

    return tuple(languages())


def gate(paths: "Path | Iterable[Path]", **options: "Unpack[GateOptions]") -> "GateResult":
    """Inspect and step-test models, and give one verdict for all of them.

    Raises:
        UsageError: there is nothing at one of the paths, or an option does not take a value.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    refuse_unknown("gate", options)
    from kvdoctor.gating.baseline import read_baseline
    from kvdoctor.gating.plan import plan_gate
    from kvdoctor.gating.run import gate as run_gate

    policy = _policy(options)
    plan = plan_gate("gate", _list_paths(paths), options, policy)
    known = None if plan.choices.baseline is None else read_baseline(plan.choices.baseline)
    done = run_gate(plan.jobs, plan.settings, static=plan.choices.static, baseline=known)
    return replace(done, policy=None if policy is None else policy.file)


@record
class WrittenBaseline:
    """A baseline after an update: its file, its new entries, and whether they differ from those before."""

    file: str
    update: "BaselineUpdate"
    differs: bool


def write_baseline(
    paths: "Path | Iterable[Path]", file: "Path | None" = None, **options: "Unpack[BaselineOptions]"
) -> WrittenBaseline:
    """Run the gate, and write its findings into a baseline, an empty one where there is no file yet.

    With a `reason`, findings that count are added for that reason, for good or `until` a date, as in 2026-12-31. With
    `prune`, entries that are not found any more are removed. With `check`, the file stays as it is. Without `file` it
    is the policy's, else `kvdoctor-baseline.json`.

    Raises:
        UsageError: there is nothing at one of the paths, the file cannot be read or written, or an option does not take
            a value.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    refuse_unknown("baseline", options)
    choices = read_options(BaselineChoices, options)
    from kvdoctor.gating.baseline import DEFAULT_NAME, Baseline, read_baseline, render_baseline, today
    from kvdoctor.gating.baseline_match import match_baseline, update_baseline
    from kvdoctor.gating.plan import plan_gate, read_baseline_request
    from kvdoctor.gating.run import gate as run_gate
    from kvdoctor.model.output_folder import write_whole

    request = read_baseline_request(choices)
    plan = plan_gate("baseline", _list_paths(paths), options, _policy(options))
    place = os.fspath(file) if file is not None else plan.choices.baseline or DEFAULT_NAME
    if not os.path.lexists(place) and not FilePath(place).absolute().parent.is_dir():
        raise UsageError(f"the folder of {place!r} does not exist; make it first")
    known = read_baseline(place) if os.path.lexists(place) else Baseline(place)
    done = run_gate(plan.jobs, plan.settings)
    update = update_baseline(known, match_baseline(known, done.reports, today()), request)
    differs = update.entries != known.entries
    if differs and not choices.check:
        write_whole(FilePath(place), render_baseline(update.entries))
    return WrittenBaseline(place, update, differs)


def diff(a: "Path", b: "Path", **options: "Unpack[DiffOptions]") -> "DiffReport":
    """Compare model B with model A: contract, graph and behavior. Either may be a JSON report of kvdoctor.

    Raises:
        UsageError: there is nothing at a path, a report cannot be read, or an option does not take a value.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asked = _read("diff", options)
    choices = read_options(DiffChoices, options)
    from kvdoctor.comparison import DiffRequest, compare

    return compare(DiffRequest(os.fspath(a), os.fspath(b), choices.static, choices.agree), asked)


def read_report(path: "Path") -> "Report":
    """Read a report that was written with `--format json`; of a gate's document, the only one in it.

    Raises:
        UsageError: the file cannot be read, is no report, or has another version of the schema.
    """
    from kvdoctor.report.json_format import read_report as read

    return read(os.fspath(path))


def render(result: "Report | GateResult | DiffReport", name: str = "text") -> str:
    """Write a report, the result of a gate, or a diff in a format of the command line, as one text without color.

    Raises:
        UsageError: there is no such format.
    """
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.report import diff, formats
    from kvdoctor.report.diff_document import DiffReport

    if isinstance(result, DiffReport):
        _refuse_unknown_format(name, diff.FORMATS)
        return diff.render(result, name)
    _refuse_unknown_format(name, formats.FORMATS)
    if isinstance(result, GateResult):
        return formats.render_gate(result.to_dict, list(result.reports), result.summary_lines(), name)
    return formats.render(result, name)


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every document, by its short name, as `kvdoctor schema NAME` takes it."""
    from kvdoctor.gating.schema import baseline_schema, gate_schema
    from kvdoctor.report.schema import contract_schema, diff_schema, env_schema, explain_schema, report_schema

    return {
        "report": report_schema(),
        "gate": gate_schema(),
        "contract": contract_schema(),
        "baseline": baseline_schema(),
        "diff": diff_schema(),
        "explain": explain_schema(),
        "env": env_schema(),
    }


def read_policy(file: "Path | None" = None) -> "Policy":
    """Read a policy file; without one, the policy of the project that the working folder lies in, or an empty one.

    Raises:
        UsageError: the file cannot be read, holds no policy, or has a key or a value that is none of a policy.
    """
    from kvdoctor.gating import policy

    if file is None:
        return policy.find_policy()
    found = policy.read_policy(os.fspath(file))
    if found is None:
        raise UsageError(f"{os.fspath(file)} has no [tool.kvdoctor]; give a file that has one, or a kvdoctor.toml")
    return found


def effective_values(policy: "Policy", path: "Path | None" = None, **options: Any) -> "dict[str, EffectiveValue]":
    """Return the value of each key of a policy for a model, and where it comes from.

    None is a model that no override fits. `options` take precedence over the policy, as in `gate`.
    """
    refuse_unknown("config", options)
    given = {
        option.key: list(value) if isinstance(value, tuple) else value
        for option in policy_options()
        if (value := options.get(option.keyword)) is not None
    }
    return policy.effective(None if path is None else os.fspath(path), given)


def list_checks() -> "tuple[Check, ...]":
    """Return all checks, by code."""
    from kvdoctor.findings import all_checks

    return all_checks()


def explain(code: str) -> "Check":
    """Return the check of a code or a name, with its documentation.

    Raises:
        UsageError: there is none; the message has the nearest.
    """
    from kvdoctor.findings import find_check

    found = find_check(code)
    if found is None:
        hint = did_you_mean(code, [name for check in list_checks() for name in (check.code, check.name)])
        parts = f"there is no check {code!r};", hint, "`kvdoctor explain` lists all checks"
        raise UsageError(" ".join(filter(None, parts)))
    return found


def find_checks(part: str) -> tuple["Check", ...]:
    """Return the checks whose code begins with a text, or whose name contains it."""
    wanted = part.lower()
    return tuple(one for one in list_checks() if one.code.lower().startswith(wanted) or wanted in one.name)


def find_messages(text: str) -> "tuple[KnownMessage, ...]":
    """Return what is known about an error message: the question that decides between its causes, and what to do."""
    from kvdoctor.report import known_messages

    return known_messages.find_messages(text)


def list_issues(check: str) -> "tuple[Issue, ...]":
    """Return the public issues of other projects that concern a check, by its name (docs/known-issues.md)."""
    from kvdoctor.diagnose.known_issues import issues_of_check

    return issues_of_check(check)


def find_issues(text: str) -> "tuple[Issue, ...]":
    """Return the public issues of other projects whose message is in a text, or that a part of it is."""
    from kvdoctor.diagnose.known_issues import issues_of_message

    return issues_of_message(text)


def list_graph_repairs(check: str) -> tuple[str, ...]:
    """Return the names of the graph repairs that `re-export` tries for a check (docs/repairs.md)."""
    from kvdoctor.repair.repairs.registry import load_for_check

    return tuple(repair.name for repair in load_for_check(check))


def describe_environment() -> "EnvironmentDocument":
    """Return each component that kvdoctor uses: its state, its version, and the command that repairs it."""
    from kvdoctor.repair.export.components import describe_components

    return describe_components()


def cache_folder() -> FilePath:
    """Return the folder in which the command line keeps the reports of unchanged models."""
    from kvdoctor.runtime.environments import cache_folder as folder

    return folder() / "gate"


def _read(command: str, given: Mapping[str, Any], path: "Path | None" = None) -> Options:
    """Return the options of one model: those given, else the policy's, else the defaults."""
    refuse_unknown(command, given)
    policy = _policy(given)
    if policy is None:
        return read_options(Options, given)
    return policy.read_options(command, None if path is None else os.fspath(path), given)


def _policy(given: Mapping[str, Any]) -> "Policy | None":
    policy: Policy | Path | None = given.get("policy")
    return read_policy(policy) if isinstance(policy, (str, os.PathLike)) else policy


def _list_paths(paths: "Path | Iterable[Path]") -> tuple[str, ...]:
    return tuple(os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths))


def _refuse_without_checkpoint(how: ReExportChoices, path: "Path | None") -> None:
    """Refuse what only an export from a checkpoint can do."""
    if path is None:
        raise UsageError("give PATH, the model to repair; or --from CHECKPOINT to export one")
    for name in NEEDS_CHECKPOINT:
        if getattr(how, name) is not None:
            raise UsageError(f"--{name} needs an export from a checkpoint: give --from CHECKPOINT as well")


def _refuse_unknown_format(name: str, formats: tuple[str, ...]) -> None:
    if name not in formats:
        raise UsageError(f"there is no format {name!r}; it is one of {', '.join(formats)}")
