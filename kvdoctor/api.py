"""The commands of the core as functions, for `import kvdoctor` and for the command line (docs/python.md).

Nothing is printed, no signal handler is set, and neither folder nor environment of the process changes. Options are
keyword arguments with the names of the command line's; `kvdoctor.options` checks them.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from kvdoctor import addons
from kvdoctor.choices import Consumer, Dtype, ExporterName, FailOn, Fusions
from kvdoctor.errors import UsageError
from kvdoctor.options import (
    BaselineChoices,
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
    from kvdoctor.findings import Check, Finding
    from kvdoctor.gating.baseline import BaselineUpdate
    from kvdoctor.gating.policy import EffectiveValue, Policy
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.report.document import Report
    from kvdoctor.report.info_document import EnvironmentDocument, Explanation
    from kvdoctor.runtime.client import Runtime

    Path = str | os.PathLike[str]
    Words = str | Iterable[str]
    Progress = Callable[[str, int, int], None]

NEEDS_CHECKPOINT = ("exporter", "opset", "dtype", "fusions", "static_cache", "task")


class SharedOptions(TypedDict, total=False):
    """The options of every function. Each has the name of the command line's (`kvdoctor COMMAND --help`).

    Lists may be one text with commas. `progress` is called at the start of each experiment with its name, its number,
    counted from 1, and their count. `feed` has constants for inputs whose role the file does not show, by name;
    `logits_output` is the output that has the logits.
    """

    feed: "Mapping[str, float]"
    logits_output: str | None
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


class WorkerOptions(TypedDict, total=False):
    """The options of everything that runs a model. `timeout` in seconds for one answer, `max_memory` in MiB."""

    seed: int
    providers: "Words"
    timeout: float
    max_memory: int | None
    sandbox: bool
    offline: bool
    progress: "Progress | None"


class JudgingOptions(SharedOptions, WorkerOptions, total=False):
    """The options of everything that runs a model and judges it.

    `tolerances` are the fractions of the logits' standard deviation that pass, by arithmetic (docs/policy.md).
    """

    thorough: bool
    tolerances: "Mapping[str, float] | None"


class SpeedOptions(WorkerOptions, total=False):
    """The options of `speed`; `against` is an earlier report of it to compare with."""

    feed: "Mapping[str, float]"
    logits_output: str | None
    against: "Path | None"
    fail_on: "FailOn"


class RunOptions(JudgingOptions, total=False):
    """The options of everything that runs a model and may fetch what that needs."""

    targets: "Words"


class StepTestOptions(RunOptions, total=False):
    """The options of `step_test`."""

    contract: "Path | None"
    prompt_ids: "str | Iterable[int]"
    inputs: "Path | None"
    reference: "Path | None"
    trace: "Path | None"
    against: "Path | None"
    policy: "Policy | Path | None"


class ManyModelsOptions(RunOptions, total=False):
    """The options of everything that runs many models.

    `jobs` is the number of models side by side. `cache_dir` keeps the reports of unchanged models; without it, or with
    `cache=False`, every model is run. `cluster` is the address of a Dask scheduler.
    """

    exclude: "Words"
    allow_incomplete: "Mapping[str, str] | str | Iterable[str]"
    jobs: int | None
    cache: bool
    cache_dir: "Path | None"
    cache_size: int
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
    opset: int | None
    from_: "Path | None"
    exporter: ExporterName | None
    dtype: Dtype | None
    fusions: Fusions | None
    static_cache: int | None
    task: str | None


def inspect(path: "Path", **options: "Unpack[InspectOptions]") -> "Report":
    """Read a model without running it and without its weights: files, inputs, outputs, the cache contract.

    Raises:
        UsageError: there is nothing at the path, or an option does not take a value.
    """
    from kvdoctor.diagnose.inspection import inspect

    return inspect(os.fspath(path), read_given("inspect", options, path), _check_advice)


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
    asked = read_given("step-test", options, path)
    if asked.reference is not None and not asked.selection.takes("KV320", "reference-differs"):
        why = "--reference compares logits for KV320 reference-differs, which --select or --ignore leaves out"
        raise UsageError(f"{why}; select KV320 as well, or give no --reference")
    from kvdoctor.runtime.client import Runtime

    # Started before the rest is loaded: the worker opens the runtime in the meantime.
    with Runtime(asked.limits) as runtime:
        from kvdoctor.diagnose import pipeline

        return pipeline.step_test(os.fspath(path), asked, runtime, pipeline.RunPlan(check_advice=_check_advice))


def re_export(
    path: "Path | None", out: "Path | None" = None, *, force: bool = False, **options: "Unpack[ReExportOptions]"
) -> "Report":
    """Repair a copy of the model in the folder `out`, prove the repair, and write a fix report next to it.

    Without `out` the repair is made and proved in a private folder, which is deleted. With `from_` the model is
    exported again from that checkpoint, and `path` is the model to be replaced, or None. `force` replaces an `out` that
    kvdoctor wrote.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option does not take a value; nothing
            was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    began = time.perf_counter()
    asked, how = read_given("re-export", options), read_options(ReExportChoices, options)
    from kvdoctor.repair.session import RepairRequest

    source, target = (None if place is None else os.fspath(place) for place in (path, out))
    request = RepairRequest(source, target, force, how)
    if how.from_ is None:
        if path is None:
            raise UsageError("give PATH, the model to repair; or --from CHECKPOINT to export one")
        for name in NEEDS_CHECKPOINT:
            if getattr(how, name) is not None:
                raise UsageError(f"--{name} needs an export from a checkpoint: give --from CHECKPOINT as well")
        from kvdoctor.repair import pipeline

        return pipeline.re_export(request, asked).timed(began)
    from kvdoctor.repair.export.pipeline import export_from_checkpoint

    return export_from_checkpoint(request, asked, asked.show_line).timed(began)


WRITES_SPEED = "`kvdoctor speed MODEL --output speed.json` writes one"


def speed(path: "Path", **options: "Unpack[SpeedOptions]") -> "Report":
    """Measure how fast each stack decodes on this machine, and what is worse than in an earlier report.

    Raises:
        UsageError: there is nothing at the path, or `against` is no report of `speed`.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    began = time.perf_counter()
    asked, choices = read_given("speed", options), read_options(SpeedChoices, options)
    from kvdoctor.report.json_format import read_report as read
    from kvdoctor.runtime.client import Runtime

    earlier = None if choices.against is None else read(choices.against, WRITES_SPEED)

    with Runtime(asked.limits) as runtime:
        from kvdoctor.diagnose.speed import measure_speed

        return measure_speed(os.fspath(path), asked, earlier, runtime, choices.against).timed(began)


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
    return replace(done, policy=None if policy is None else policy.file, left_out=plan.left_out)


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
    from kvdoctor.gating import baseline
    from kvdoctor.gating.plan import plan_gate, refuse_no_change
    from kvdoctor.gating.run import gate as run_gate
    from kvdoctor.model.output_folder import write_whole

    refuse_no_change(choices)
    plan = plan_gate("baseline", _list_paths(paths), options, _policy(options))
    place = os.fspath(file) if file is not None else plan.choices.baseline or baseline.DEFAULT_NAME
    if not os.path.lexists(place) and not FilePath(place).absolute().parent.is_dir():
        raise UsageError(f"the folder of {place!r} does not exist; make it first")
    known = baseline.read_baseline(place) if os.path.lexists(place) else baseline.Baseline(place)
    done = run_gate(plan.jobs, plan.settings)
    update = baseline.update_baseline(known, baseline.match_baseline(known, done.reports, baseline.today()), choices)
    differs = update.entries != known.entries
    if differs and not choices.check:
        write_whole(FilePath(place), baseline.render_baseline(update.entries))
    return WrittenBaseline(place, update, differs)


def read_report(path: "Path") -> "Report":
    """Read a report that was written with `--format json`; of a gate's document, the only one in it.

    Raises:
        UsageError: the file cannot be read, is no report, or has another version of the schema.
    """
    from kvdoctor.report.json_format import read_report as read

    return read(os.fspath(path))


class Document(Protocol):
    """What a command returns: a report, the result of a gate, or the document of an add-on."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""


def render(result: Document, name: str = "text") -> str:
    """Write a report, the result of a gate, or a diff in a format of the command line, as one text without color.

    Raises:
        UsageError: there is no such format.
    """
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.report import formats
    from kvdoctor.report.document import Report

    writers = (one for one in addons.modules("report") if isinstance(result, one.DOCUMENT))
    writer: Any = formats if isinstance(result, GateResult | Report) else next(writers)
    if name not in writer.FORMATS:
        raise UsageError(f"there is no format {name!r}; it is one of {', '.join(writer.FORMATS)}")
    if isinstance(result, GateResult):
        return "".join(formats.write_gate(result.outline, result.reports, result.summary_lines(), name))
    return str(writer.render(result, name))


def schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every document, by its short name, as `kvdoctor schema NAME` takes it."""
    from kvdoctor.gating.verdict import baseline_schema, gate_schema
    from kvdoctor.report.schema import list_schemas

    known = {**list_schemas(), "gate": gate_schema(), "baseline": baseline_schema()}
    found = {name: known[name] for name in ("report", "gate", "contract", "baseline", "explain", "env")}
    for module in addons.modules("report"):
        found |= module.schemas()
    return found


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
    found = ((option.key, options.get(option.keyword)) for option in policy_options())
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in found if value is not None}
    return policy.effective(None if path is None else os.fspath(path), given)


def list_checks() -> "tuple[Check, ...]":
    """Return all checks, by code."""
    from kvdoctor.findings import all_checks

    return all_checks()


def explain(text: str | None) -> "Explanation":
    """Return what is known of a code, a name, a term or an error message; without one, all checks.

    Raises:
        UsageError: the text is empty, or a name that is spelled almost as a check.
    """
    from kvdoctor.report.info_document import explain as explain_any

    return explain_any(text, list_graph_repairs)


def list_graph_repairs(check: str) -> tuple[str, ...]:
    """Return the names of the graph repairs that `re-export` tries for a check (docs/repairs.md)."""
    from kvdoctor.repair.repairs.registry import load_for_check

    return tuple(repair.name for repair in load_for_check(check))


def describe_environment() -> "EnvironmentDocument":
    """Return each component that kvdoctor uses: its state, its version, and the command that repairs it."""
    from kvdoctor.repair.export.exporters import describe_components

    return describe_components()


def cache_folder() -> FilePath:
    """Return the folder in which the command line keeps the reports of unchanged models."""
    from kvdoctor.runtime.environments import cache_folder as folder

    return folder() / "gate"


def read_given(command: str, given: Mapping[str, Any], path: "Path | None" = None) -> Options:
    """Return the options of one model: those given, else the policy's, else the defaults."""
    refuse_unknown(command, given)
    if (policy := _policy(given)) is None:
        return read_options(Options, given, command)
    return policy.read_options(command, None if path is None else os.fspath(path), given)


def _policy(given: Mapping[str, Any]) -> "Policy | None":
    policy: Policy | Path | None = given.get("policy")
    return read_policy(policy) if isinstance(policy, (str, os.PathLike)) else policy


def _list_paths(paths: "Path | Iterable[Path]") -> tuple[str, ...]:
    return tuple(os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths))
