"""Runs one stack: the experiments in the worker, again in float32 where the model rounds, and the search for a node."""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.analysis.contract_reader import add_observed_sizes
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import ONLY_THOROUGH, PAGED_LOOP, REPLAY, Node, Run
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.float32_rerun import rerun_in_float32
from kvdoctor.diagnose.lengths import find_ring, list_thresholds, list_unvisited
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.diagnose.operator_parts import CannotOpen, open_operator
from kvdoctor.findings import NotChecked
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime, StackResults
from kvdoctor.runtime.targets.result import Refused

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment


@record
class WorkerFiles:
    """Where the worker leaves what is too large for the pipe: a file for logits, if wanted, and a folder for calls."""

    logits: Path | None
    calls: Path


@record
class StackObservation:
    """What the experiments on one stack showed.

    `contract` is the one given, with what only the runs could show. `ran` is the context of what was run, where that is
    not the stack itself but the graphs inside its operator. `timings` are seconds by label, `measured` is all
    that the report states as measured (seconds, bytes).
    """

    contract: CacheContract
    runs: tuple[Run, ...] = ()
    refusals: tuple[Refused, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    not_checked: tuple[NotChecked, ...] = ()
    ran: ContractContext | None = None


def examine(context: ContractContext, options: Options, runtime: Runtime, files: WorkerFiles) -> StackObservation:
    """Run all experiments on one stack, if its preconditions are met.

    Raises:
        UsageError: the runtime does not have the execution provider.
    """
    from kvdoctor.decode.experiments import load

    name, contract = context.stack.name, context.contract
    if unmet := next(find_unmet_preconditions(context.stack, contract, opened=True), None):
        reason = NotChecked(name, "KV2-KV3", f"not run: {unmet}", essential=True)
        return StackObservation(contract, measured=_list_measurements(StackResults()), not_checked=(reason,))

    runtime.require_provider(options.provider)
    ran, opened = context, None
    if context.stack.operator is not None:
        try:
            opened = open_operator(context, files.calls)
        except CannotOpen as error:
            reason = NotChecked(name, "KV2-KV3", f"not run: {error}", essential=True)
            return StackObservation(contract, measured=_list_measurements(StackResults()), not_checked=(reason,))
        ran = opened.context
    job = replace(build_job(ran, options), keep_logits=files.logits, keep_calls=files.calls, scratch=files.calls)
    job = job if opened is None else replace(job, search=opened.search)
    results = runtime.examine(job, options.progress)
    others = (e for e in load() if e.on_request in ("", "reference") and not _is_wanted(e, options))
    skipped = tuple(_skip(name, e, options, runtime) for e in others)
    runs = (*(resolve_node_names(run, ran) for run in results.runs), *skipped)
    shown = opened.shown if opened is not None else {}
    refusals = tuple((shown.get(one.file, one.file), one.errors, one.opens_at) for one in results.refusals)
    observed = replace(context, contract=add_observed_sizes(contract, runs), runs=runs)
    rerun = rerun_in_float32(replace(ran, runs=runs), job, options, runtime)
    results.unrounded_seconds = rerun.seconds
    results.peak_bytes = max(results.peak_bytes, rerun.peak_bytes)
    return StackObservation(
        contract=observed.contract,
        runs=rerun.runs,
        refusals=refusals,
        timings=results.timings,
        measured=_list_measurements(results),
        not_checked=(
            *_list_not_run(name, contract, results),
            *rerun.not_checked,
            *list_unvisited(observed),
        ),
        ran=ran if opened is not None else None,
    )


def _list_not_run(stack: str, contract: CacheContract, results: StackResults) -> Iterator[NotChecked]:
    """Experiments that could not be carried out, or not wholly."""
    if _is_frozen(contract):
        reason = f"run only up to a past of the fixed length {contract.frozen_past}"
        yield NotChecked(stack, "KV2-KV3", reason, essential=True)
    for crash in dict.fromkeys(crash.strip().splitlines()[-1] for crash in results.crashes):
        reason = f"an experiment crashed ({crash}); please report it"
        yield NotChecked(stack, "KV2-KV3", reason, essential=True)
    for note in dict.fromkeys(results.notes):
        yield NotChecked(stack, "KV2-KV3", note)
    for text in results.reasons_not_run:
        yield NotChecked(stack, "KV2-KV3", text, essential=True)


def _list_measurements(results: StackResults) -> dict[str, Any]:
    return {
        "seconds": results.seconds,
        "step_seconds": results.timings,
        "peak_bytes": results.peak_bytes,
        **({"unrounded_seconds": results.unrounded_seconds} if results.unrounded_seconds else {}),
    }


def build_job(context: ContractContext, options: Options) -> ExperimentJob:
    """All experiments that the options ask for, on one stack."""
    from kvdoctor.decode.experiments import load
    from kvdoctor.decode.experiments.lengths import FROZEN_PAST
    from kvdoctor.decode.experiments.paged_loop import is_paged

    frozen, features = _is_frozen(context.contract), bool(context.contract.features)
    fitting = (e for e in load() if (e.name == FROZEN_PAST) == frozen and (features or not e.with_features))
    fitting = (e for e in fitting if context.contract.new_tokens == 1 or not e.one_token)
    chosen = [e.name for e in fitting if _is_wanted(e, options)]
    paged = is_paged(context.contract) is None
    chosen = [name for name in chosen if (name == PAGED_LOOP) == paged]
    return ExperimentJob(
        stack=context.stack.name,
        folder=context.folder.root.absolute(),
        contract=context.contract,
        experiments=(*chosen, *((REPLAY,) if options.trace is not None else ())),
        seed=options.seed,
        provider=options.provider,
        tolerances=dict(options.tolerances),
        thresholds=tuple(one.length for one in list_thresholds(context.stack, context.contract)),
        ring=find_ring(context.stack, context.contract),
        prompt=options.prompt_ids,
        inputs=Path(options.inputs).absolute() if options.inputs is not None else None,
        trace=Path(options.trace).absolute() if options.trace is not None else None,
    )


def _is_frozen(contract: CacheContract) -> bool:
    """Whether the past has one length only, and can be driven up to it."""
    from kvdoctor.decode.experiments.lengths import can_be_filled

    return contract.frozen_past is not None and can_be_filled(contract) is None


def _is_wanted(experiment: "Experiment", options: Options) -> bool:
    """Whether an experiment runs. A thorough one does on request, or where a required use depends on it."""
    if experiment.on_request:
        return experiment.on_request == "reference" and options.reference is not None
    use = experiment.use
    return not experiment.thorough or options.thorough or (use is not None and use.required in options.require)


def _skip(stack: str, experiment: "Experiment", options: Options, runtime: Runtime) -> Run:
    """The entry of an experiment that nobody asked for in the list of runs."""
    target = f"onnxruntime=={runtime.versions.get('onnxruntime', '?')}"
    reason = "only with --reference" if experiment.on_request else ONLY_THOROUGH
    return Run(stack, experiment.name, target, options.provider, "all", "skipped", reason=reason)


def resolve_node_names(run: Run, context: ContractContext) -> Run:
    """Turn names that the runtime mentioned into a node, if the graph has one of that name."""
    view = context.decode_graph
    if run.steps:
        phase = run.steps[-1].phase if run.steps[-1].phase != "reference" else "prefill"
        file = context.contract.graphs[context.contract.phases[phase].graph].file
        view = next((f.view for f in context.stack.files.values() if f.name == file and f.view), view)
    for name in reversed(run.node_names):
        node = view.node(name)
        if node is not None and node.op_type not in ("If", "Loop", "Scan"):
            return replace(run, node=Node(name, node.op_type), node_names=())
    return replace(run, node_names=())


def locate_faults(
    context: ContractContext, options: Options, runtime: Runtime, calls: Path, ran: ContractContext | None = None
) -> tuple[Run, ...]:
    """The runs, with the fault location of those that findings rest on; `ran` is the context of what was run.

    That is the checked loop; where it passes, the runs of other sizes that fail or differ.
    """
    from kvdoctor.decode.experiments import uses

    loop, bad = context.checked_loop, [run for run in context.runs if run.shows in ("failed", "differs")]
    if loop is None:
        return context.runs
    wanted = [loop] if loop in bad else [run for run in bad if run.experiment in uses()]
    if not wanted:
        return context.runs
    from kvdoctor.diagnose.locate.search import LocateContext, locate_fault

    within = ran or context
    search = LocateContext(within.stack, within.contract, runtime, options.provider, calls, context.tolerance)
    located = []
    for run in context.runs:
        if run in wanted and options.show_line is not None:
            options.show_line(f"locating the fault of {run.experiment} in the graph")
        located.append(locate_fault(run, search) if run in wanted else run)
    return tuple(located)
