"""Runs one stack: the experiments in the worker, again in float32 where the model rounds, and the search for a node.

The graphs inside an operator that runs the whole loop become models of a private folder, which a loop can call, with
weights copied from file to file. The readings of a contract are settled before the experiments, or after runs that show
trouble. Length thresholds of the graphs that no run visited are listed after the runs.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from kvdoctor.analysis.configs import declared_lengths
from kvdoctor.analysis.contract_reader import add_observed_sizes
from kvdoctor.analysis.proof import Proof
from kvdoctor.analysis.search_operators import read_search, read_search_graph
from kvdoctor.analysis.stacks import FileRole, OnnxFile, StackFiles, operator_bodies
from kvdoctor.analysis.thresholds import Threshold, find_thresholds
from kvdoctor.contract import Ambiguity, CacheContract, MissingPart, Phase, PhaseName
from kvdoctor.decode.experiments.each_length import FAR_LENGTH
from kvdoctor.decode.messages import ExperimentJob, FileRefused, Settled, SettleJob
from kvdoctor.decode.runs import KEYS_CHANGE, NOT_FULL, ONLY_THOROUGH, REFERENCE_CHANGES, RING, Node, Run
from kvdoctor.decode.search import SearchPlan
from kvdoctor.diagnose import not_checked
from kvdoctor.diagnose.build_report import find_proof
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.float32 import ALWAYS, demand_room, rerun_in_float32, unrounded_bytes
from kvdoctor.errors import CannotCheck, UnreadableError, UsageError
from kvdoctor.findings import NotChecked
from kvdoctor.model.join import NotClosed, cut_out
from kvdoctor.model.operators import has
from kvdoctor.model.output_folder import copy_whole, write_model
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.view import GraphView
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.wording import format_count, shorten_names
from kvdoctor.runtime.client import Runtime, StackResults

GENERATOR = "generator"
"""The name of the whole model among the graphs of a contract."""
MOST_LISTED = 4


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
    that the report states as measured (seconds, bytes). `proof` is that of the contract as it is after the runs.
    """

    contract: CacheContract
    runs: tuple[Run, ...] = ()
    refusals: tuple[FileRefused, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    not_checked: tuple[NotChecked, ...] = ()
    ran: ContractContext | None = None
    proof: Proof | None = None


def examine(context: ContractContext, options: Options, runtime: Runtime, files: WorkerFiles) -> StackObservation:
    """Run all experiments on one stack, if it can be run; raises `UsageError` where the provider is not there."""
    name, contract = context.stack.name, context.contract
    if unmet := next(not_checked.find_unmet_preconditions(context.stack, contract, opened=True), None):
        return _leave_unrun(contract, NotChecked(name, "KV2-KV3", f"not run: {unmet}", essential=True))
    runtime.require_provider(options.provider)
    contract, open_parts = settle_unknown(context, options, runtime)
    context = replace(context, contract=contract)
    if open_parts:
        return _leave_unrun(contract, *open_parts)
    seen = _run(context, options, runtime, files)
    crashed = any(entry.essential for entry in seen.not_checked)
    again = settle_after(context, seen.runs, crashed, options, runtime)
    return seen if again is None else _run(replace(context, contract=again), options, runtime, files)


def _run(context: ContractContext, options: Options, runtime: Runtime, files: WorkerFiles) -> StackObservation:
    name, contract = context.stack.name, context.contract
    context = replace(context, proof=find_proof(context.stack, contract))
    ran, search, shown = context, None, dict[str, str]()
    if context.stack.operator is not None:
        try:
            ran, search, shown = open_operator(context, files.calls)
        except CannotCheck as error:
            return _leave_unrun(contract, NotChecked(name, "KV2-KV3", f"not run: {error}", essential=True))
    job = replace(build_job(ran, options), keep_logits=files.logits, keep_calls=files.calls, scratch=files.calls)
    # The first call of each experiment shows how large values of float16 become.
    job = replace(job, search=search, keep_step=0 if contract.exactness == "float16" else None)
    results = runtime.examine(job, options.progress)
    runs = (*(resolve_node_names(run, ran) for run in results.runs), *_list_skipped(ran, options, runtime))
    refusals = tuple(replace(one, file=shown.get(one.file, one.file)) for one in results.refusals)
    observed = replace(context, contract=add_observed_sizes(contract, runs), runs=runs)
    rerun = rerun_in_float32(replace(ran, runs=runs), job, options, runtime)
    interrupted = not_checked.find_interrupted(name, contract, results)
    results.unrounded_seconds = rerun.seconds
    results.peak_bytes = max(results.peak_bytes, rerun.peak_bytes)
    return StackObservation(
        contract=observed.contract,
        runs=rerun.runs,
        refusals=refusals,
        timings=results.timings,
        measured=_list_measurements(results),
        not_checked=(*interrupted, *rerun.not_checked, *list_unvisited(observed)),
        ran=None if ran is context else ran,
        proof=context.proof if observed.contract.slots == contract.slots else None,
    )


def _leave_unrun(contract: CacheContract, *reasons: NotChecked) -> StackObservation:
    return StackObservation(contract, measured=_list_measurements(StackResults()), not_checked=reasons)


def _list_measurements(results: StackResults) -> dict[str, Any]:
    copy = {"unrounded_seconds": results.unrounded_seconds} if results.unrounded_seconds else {}
    return {"seconds": results.seconds, "step_seconds": results.timings, "peak_bytes": results.peak_bytes, **copy}


def build_job(context: ContractContext, options: Options) -> ExperimentJob:
    """All experiments that the options ask for, on one stack."""
    from kvdoctor.decode.experiments import load

    wanted = (one for one in load() if not_checked.why_skipped(one, context, options) is None)
    chosen = [one.name for one in wanted if not_checked.why_unfit(one, context.contract) is None]
    # What an export lost has no threshold in its graph.
    declared = declared_lengths(context.folder.side_cars.config) if options.reference is not None else frozenset()
    return ExperimentJob(
        stack=context.stack.name,
        folder=context.folder.root.absolute(),
        contract=context.contract,
        experiments=(*chosen, *(one.name for one in context.added)),
        seed=options.seed,
        provider=options.provider,
        tolerances=dict(options.tolerances),
        thresholds=tuple(
            sorted(declared.union(one.length for one in list_thresholds(context.stack, context.contract)))
        ),
        prompt=options.prompt_ids,
        inputs=Path(options.inputs).absolute() if options.inputs is not None else None,
        added=context.added,
    )


def _list_skipped(context: ContractContext, options: Options, runtime: Runtime) -> Iterator[Run]:
    """The entries of experiments that nobody asked for, or that a proof answers, in the list of runs."""
    from kvdoctor.decode.experiments import load

    target = f"onnxruntime=={runtime.versions.get('onnxruntime', '?')}"
    for experiment in load():
        reason = not_checked.why_skipped(experiment, context, options)
        if reason is not None and experiment.on_request in not_checked.REPORTED_REQUESTS:
            yield Run(context.stack.name, experiment.name, target, options.provider, "all", "skipped", reason=reason)


def resolve_node_names(run: Run, context: ContractContext) -> Run:
    """Turn names that the runtime mentioned into a node, if the graph has one of that name."""
    view = context.decode_graph
    if run.steps:
        phase = run.steps[-1].phase if run.steps[-1].phase != "reference" else "prefill"
        file = context.contract.graphs[context.contract.phases[phase].graph].file
        view = next((f.view for f in context.stack.files.values() if f.name == file and f.view), view)
    for name in reversed(run.node_names):
        node = view.named_nodes.get(name)
        if node is not None and not has(node.op_type, "branch", "loop"):
            return replace(run, node=Node(name, node.op_type), node_names=())
    return replace(run, node_names=())


def locate_faults(
    context: ContractContext, options: Options, runtime: Runtime, calls: Path, ran: ContractContext | None = None
) -> tuple[Run, ...]:
    """The runs with the location of the faults that findings rest on: of the loop, or of other uses. `ran` was run."""
    loop, bad = context.checked_loop, [run for run in context.runs if run.shows in ("failed", "differs")]
    wanted = [loop] if loop in bad else [run for run in bad if run.experiment in context.uses]
    if loop is None or not wanted:
        return context.runs
    from kvdoctor.diagnose.locate.search import LocateContext, locate_fault

    search = LocateContext.of(ran or context, runtime, options.provider, calls)
    located = []
    for run in context.runs:
        if run in wanted and options.show_line is not None:
            options.show_line(f"locating the fault of {run.experiment} in the graph")
        located.append(locate_fault(run, search) if run in wanted else run)
    return tuple(located)


def measure_largest(context: ContractContext, options: Options, runtime: Runtime, calls: Path) -> Any:
    """The largest value (`locate.search.LargestValue`) of a model in float16 that is small, or with --thorough."""
    small = unrounded_bytes(context.stack.files.values()) <= ALWAYS
    if context.contract.exactness != "float16" or not (small or options.thorough):
        return None
    from kvdoctor.diagnose.locate.search import LocateContext, find_largest

    return find_largest(LocateContext.of(context, runtime, options.provider, calls))


def open_operator(context: ContractContext, folder: Path) -> tuple[ContractContext, SearchPlan, dict[str, str]]:
    """Write the graphs inside the operator of a stack into a folder.

    Returns the stack with these files, how the operator is called, and the names of the files in reports.

    Raises:
        CannotCheck: they cannot be written, or the operator feeds them otherwise than a loop does. Source:
            ONNX Runtime, subgraph_t5_decoder.cc (`use_sequence_as_input_ids_`).
    """
    stack = context.stack
    model = next(file for file in context.folder.files if file.path == stack.main.path)
    search, ids = read_search(model), context.contract.graph("decode").port("token_ids")
    if search.prompts and stack.operator == "BeamSearch" and ids is not None and (ids.shape or ())[-1:] != (1,):
        raise CannotCheck(f"BeamSearch feeds {ids.name!r} all tokens so far, since its axis is not fixed at 1")
    parts: dict[FileRole, OnnxFile] = {}
    try:
        demand_room([model.path.stat().st_size * len(stack.files)], model.external, folder)
        located = read_skeleton(model.path, located=True).model
        for external in model.external:
            if not (target := folder / external.location).exists():
                copy_whole(external.path, target)
        for role, body in operator_bodies(located).items():
            own, name = stack.files[role], f"{role}-of-{model.path.name}"
            write_model(cut_out(located, body), model.path, folder / name)
            part = read_skeleton(folder / name)
            parts[role] = replace(own, path=folder / name, name=name, skeleton=part, view=GraphView(part.model))
    except (OSError, NotClosed, UnreadableError, UsageError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        raise CannotCheck(f"the graphs inside {stack.operator} cannot be written out: {why}") from None
    inside = replace(context.folder, root=folder, files=tuple(parts.values()))
    contract = _rename(context.contract, parts, model)
    opened = replace(context, folder=inside, stack=replace(stack, files=parts), contract=contract)
    shown = {part.name: stack.files[role].name for role, part in parts.items()}
    return opened, search, {**shown, str(model.path.absolute()): model.name}


def _rename(contract: CacheContract, parts: Mapping[FileRole, OnnxFile], model: OnnxFile) -> CacheContract:
    """The contract with the files of the private folder, and the whole model as a graph of its own."""
    roles: dict[str, FileRole] = {"encoder": "encoder", "decoder": "decoder", "first-step": "decoder"}
    if "decoder-with-past" in parts:
        roles["decoder"] = "decoder-with-past"
    graphs = {name: replace(graph, file=parts[roles[name]].name) for name, graph in contract.graphs.items()}
    graphs[GENERATOR] = read_search_graph(model, str(model.path.absolute()))
    return replace(contract, graphs=graphs, phases={**contract.phases, "generate": Phase(GENERATOR)})


def list_thresholds(stack: StackFiles, contract: CacheContract) -> tuple[Threshold, ...]:
    """Return the length thresholds of the graphs that decode, one for each length."""
    found: dict[int, Threshold] = {}
    phases: tuple[PhaseName, ...] = ("decode", "prefill")
    for phase in phases:
        graph = contract.graph(phase)
        for file in (one for one in stack.files.values() if one.name == graph.file and one.view is not None):
            dataflow = file.dataflow if phase == "decode" else file.first_dataflow
            for threshold in find_thresholds(dataflow.flow, graph) if dataflow is not None else ():
                found.setdefault(threshold.length, threshold)
    return tuple(found[length] for length in sorted(found))


def list_unvisited(context: ContractContext) -> Iterator[NotChecked]:
    """Yield one entry for what the walk over the lengths did not judge, unless a length is wrong already."""
    run, loop = context.find_run("each-length"), context.checked_loop
    steps_agree = loop is not None and loop.shows == "passed"
    if steps_agree and run is not None and run.outcome == "skipped" and run.reason == REFERENCE_CHANGES:
        reason = f"{run.reason}: lengths were not visited one by one"
        known = any(one.cause is not None and one.cause.name == KEYS_CHANGE for one in context.runs)
        yield NotChecked(context.stack.name, "KV308", reason, kind="explained" if known else "cannot-check")
    ring = context.find_run(RING)
    if ring is not None and (ring.reason or "").startswith(NOT_FULL):
        yield NotChecked(context.stack.name, "KV308", ring.reason or "", essential="full-context" in context.required)
    if run is None or run.shows != "passed":
        return
    walked, longest = _longest_past((run,)), _longest_past(context.runs)
    # An input, such as a mask of fixed size, may declare the most tokens that it takes.
    ports = [port for graph in context.contract.graphs.values() for port in graph.inputs]
    most = (size for port in ports if (size := port.size("total")) is not None)
    usable = min([context.contract.usable_length or sys.maxsize, *most])
    found = list_thresholds(context.stack, context.contract)
    longest = max([longest, *(one.cause.from_length for one in context.runs if one.cause is not None)])
    left = [one for one in found if longest + 1 < one.length < usable]  # a table of n rows ends at a past of n - 1
    if not left:
        return
    listed = shorten_names([f"{one.length} ({one.node})" for one in left], MOST_LISTED)
    reason = f"every past up to {walked} tokens was run, and none beyond {longest}; thresholds of the graph beyond: "
    far = context.find_run("far-thresholds")
    tried = far is not None and (far.outcome != "skipped" or far.reason != ONLY_THOROUGH)
    longer = "" if tried else f"; --thorough visits those up to {FAR_LENGTH}"
    yield NotChecked(context.stack.name, "KV308", f"{reason}{listed}{longer}")


def _longest_past(runs: Sequence[Run]) -> int:
    """The longest past of a step whose logits were compared, in tokens; 0 where there is none."""
    steps = (step for run in runs for step in run.steps if step.phase == "decode" and step.difference is not None)
    return max((step.past_length for step in steps), default=0)


CODE = "KV2-KV3"
MOST_NAMES = 4
FACTOR = re.compile(r"(?<![a-z])(bias|scal|temp|gain|alpha|factor|penal|strength|weight|ratio)", re.IGNORECASE)
MASK_NAMES = ("attention_mask", "attn_mask")
"""Ends of names of masks in which 1 marks an entry that may be seen, by the convention of transformers."""


Reading = tuple[CacheContract, tuple[NotChecked, ...]]
"""A contract whose readings were settled as well as runs allow, and why nothing can be run by it."""


def settle_unknown(context: ContractContext, options: Options, runtime: Runtime) -> Reading:
    """Settle what nothing in the file decides; the contract as it is where there is nothing of the kind."""
    contract = context.contract
    unknown = [one for one in contract.ambiguities if one.unknown and not one.settled]
    if not unknown or (contract.new_tokens is not None and all(map(_is_condition, unknown))):
        return contract, ()
    if contract.new_tokens is not None:
        count = format_count(contract.new_tokens, "new token")
        why = f"no run without a cache decides, since a call takes {count} only"
        return _leave_unsettled(context, contract, unknown, why)
    settled, failed = _ask(context, options, runtime)
    if settled is None:
        return contract, (NotChecked(context.stack.name, CODE, f"not run: {failed}", essential=True),)
    unknown = [one for one in settled.contract.ambiguities if one.unknown and not one.settled]
    tried = settled.tried or all(FACTOR.search(one.subject) for one in unknown)
    known = all(_is_number(one) or _is_condition(one) for one in unknown)
    if settled.holds or (settled.runs and tried and known):
        return settled.contract, ()  # what differs differs under every number that a loop would feed
    why = "the logits with and without the cache differ" if settled.runs else "the runtime refuses the first call"
    ends = "" if settled.tried else f" (not all were tried in {settled.calls} calls)"
    return _leave_unsettled(context, settled.contract, unknown, f"under each reading that was tried {why}{ends}")


def _is_condition(ambiguity: Ambiguity) -> bool:
    """Whether an input can only be what the caller has for a whole sequence: an encoder frame, a speaker.

    Rows of integers may as well be the tokens before the new ones.
    """
    return [one.port.role for one in ambiguity.readings if "int" not in one.port.dtype] == ["condition"]


def _leave_unsettled(context: ContractContext, contract: CacheContract, unknown: list[Ambiguity], why: str) -> Reading:
    """The contract with what is open, and the options that give it."""
    names = " and ".join(repr(one.subject) for one in unknown[:MOST_NAMES])
    ways = " ".join(f"--feed {one.subject}=VALUE" for one in unknown[:MOST_NAMES])
    reason = f"not run: nothing in the file says what to feed {names}, and {why}"
    reason += f"; {ways} gives a constant, --contract a role"
    return contract, (NotChecked(context.stack.name, CODE, reason, essential=True),)


def settle_after(
    context: ContractContext, runs: tuple[Run, ...], crashed: bool, options: Options, runtime: Runtime
) -> CacheContract | None:
    """The contract under other readings, where runs fail or differ, or `crashed`, and it comes further by them."""
    doubtful = [one for one in context.contract.ambiguities if not one.settled]
    rounds = context.contract.exactness.endswith("quantization")  # its noise decides between no readings
    outcomes = ("failed", "died") if rounds else ("failed", "differs", "inconclusive", "died")
    trouble = crashed or any(run.outcome in outcomes for run in runs)
    if not doubtful or not trouble:
        return None
    settled, _ = _ask(context, options, runtime)
    if settled is None:
        return None
    before = [one.readings[0] for one in context.contract.ambiguities]
    changed = [one.readings[0] for one in settled.contract.ambiguities] != before
    return with_contradictions(settled.contract) if changed else None


def _ask(context: ContractContext, options: Options, runtime: Runtime) -> tuple[Settled | None, str]:
    job = SettleJob(context.side, seed=options.seed, provider=options.provider)
    found, failed = runtime.answer(job, Settled)
    return (found[0] if found else None), failed


def _is_number(ambiguity: Ambiguity) -> bool:
    """Whether an input takes one number, for all sequences or for each; of a float its name tells what it means."""
    port, named = ambiguity.readings[0].port, any(reading.basis == "name" for reading in ambiguity.readings)
    floats = port.dtype.startswith(("float", "bfloat", "double"))
    if floats and not named and FACTOR.search(port.name) is None:
        return False
    return {*port.axes} <= {"batch", "fixed"} and port.role != "condition"


def with_contradictions(contract: CacheContract) -> CacheContract:
    """The contract with the masks whose name says that 1 marks what may be seen, where runs show that 1 hides."""
    reason = "its name says that 1 marks an entry that may be seen, and runs show that 1 hides it"
    masks = [one for one in contract.ambiguities if one.settled and one.readings[0].port.role == "padding_mask"]
    misnamed = (MissingPart(one.subject, reason) for one in masks if one.subject.endswith(MASK_NAMES))
    return replace(contract, contradictions=(*contract.contradictions, *misnamed))
