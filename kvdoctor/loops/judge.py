"""Judges the result of a probe: each run is held to the probe and to the contract, and run again here."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.contract import Axis, CacheContract, PhaseName
from kvdoctor.decode.caller_trace.check import TraceCheck, compare_trace, find_stacks, phase_of
from kvdoctor.decode.caller_trace.describe import describe_replay
from kvdoctor.decode.caller_trace.probe import SELF_TESTS, ProbeRun, read_probe, with_likeliest
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import REPLAY, Run
from kvdoctor.diagnose.context import CallerContext, ContractContext, extend_context
from kvdoctor.diagnose.facts import build_report, stack_facts
from kvdoctor.diagnose.inspection import build_context
from kvdoctor.diagnose.not_checked import find_undecided_steps, find_unmet_preconditions
from kvdoctor.diagnose.run_checks import CheckResults, run_checks
from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding, NotChecked
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import NoLoop
from kvdoctor.loops.probe import list_runs
from kvdoctor.loops.vectors import LoopTarget, Vector, observe
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

SIZES: tuple[Axis, ...] = ("kv_heads", "head_dim", "layers")
"""Sizes of a cache that are those of the model, in every run."""


def judge(path: str, result: str, options: Options, runtime: Runtime) -> Report:
    """Compare what a program fed and got on another machine with the contract, and with the same steps run here.

    Raises:
        UsageError: there is nothing at the path, or `result` is not what the program of a probe of this model writes.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    began = time.perf_counter()
    runs = read_probe(result)
    folder = open_folder(path)
    context = _find_context(folder, runs, result, options)
    due = _find_due_runs(context, options, runtime)
    found, notes, seen = _compare_with_probe(context, runs, due, result), list[str](), list[Run]()
    for probe in runs:
        results, run, note = _judge_run(context, probe, result, options, runtime)
        found, notes = found + results, [*notes, note]
        seen += [run] if run is not None else []
    facts = stack_facts(context.stack, context.contract, folder.side_cars)
    report = build_report("judge", folder, options, _name_once(found), [facts])
    environment = {"onnxruntime": runtime.versions.get("onnxruntime", "?"), **report.environment}
    full = replace(report, environment=environment, runs=tuple(seen), notes=(*notes, *report.notes))
    return full.timed(began)


def _find_context(folder: ModelFolder, runs: tuple[ProbeRun, ...], result: str, options: Options) -> ContractContext:
    """The stack that the program called."""
    contracts = {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}
    known = {name: contract for name, contract in contracts.items() if contract.slots and not contract.missing}
    trace = next((run.trace for run in runs if run.trace), ())
    if unreadable := next((file for file in folder.files if file.problem is not None), None):
        raise UsageError(f"{unreadable.name} cannot be read: {unreadable.problem}")
    if not known:
        raise UsageError(f"{folder.shown} has no decoder with a complete cache contract; `kvdoctor inspect` says why")
    if not trace:
        raise UsageError(f"the result {result!r} has no call of the model: {runs[0].error or 'the program ended'}")
    name = find_stacks(trace, known, result)[0]
    inputs = {port.name for graph in known[name].graphs.values() for port in graph.inputs}
    if strange := next((fed for step in trace for fed in step.fed if fed not in inputs), None):
        raise UsageError(
            f"the result {result!r} feeds {strange[:200]!r}, which this model does not have; "
            f"give the model that the probe was written for"
        )
    if other := _find_other_size(known[name], runs):
        raise UsageError(f"the result {result!r} is of another model: {other}; give the one the probe was written for")
    stack = next(stack for stack in folder.stacks if stack.name == name)
    if unmet := next(find_unmet_preconditions(stack, known[name]), None):
        raise UsageError(f"the steps cannot be run here: {unmet}")
    return build_context(folder, stack, known[name], options)


def _find_other_size(contract: CacheContract, runs: tuple[ProbeRun, ...]) -> str | None:
    """A size of the model that every run has otherwise, in words."""
    found = [next(_list_other_sizes(contract, run), None) for run in runs if run.trace]
    return found[0] if found and all(found) else None


def _list_other_sizes(contract: CacheContract, run: ProbeRun) -> Iterator[str]:
    for slot in contract.slots:
        fed = next((step.fed[slot.past] for step in run.trace if slot.past in step.fed), None)
        for axis, size in zip(slot.axes, fed.shape if fed is not None else (), strict=False):
            if axis in SIZES and slot.size(axis) not in (None, size):
                yield f"{slot.past} was fed with {size} {axis}, and the model has {slot.size(axis)}"


def _find_due_runs(context: ContractContext, options: Options, runtime: Runtime) -> dict[str, Vector]:
    """The runs of the probe of this model, made as `kvdoctor probe` makes them; none where no loop can be written."""
    try:
        plan = make_plan(context.contract, context.folder.root.name)
    except NoLoop:
        return {}
    target = LoopTarget(context.stack.name, context.folder.root, context.contract, plan)
    return dict(list_runs(observe(target, options, runtime).vectors))


def _compare_with_probe(
    context: ContractContext, runs: tuple[ProbeRun, ...], due: dict[str, Vector], result: str
) -> CheckResults:
    """List as not checked the runs that the result does not have, and runs that were fed other token ids.

    Raises:
        UsageError: no run has the ids of the probe: it was another model's, or of another seed.
    """
    if not due:
        reason = "which runs the probe has could not be found here: a result without its last runs would look complete"
        return CheckResults(not_checked=(NotChecked(context.stack.name, "KV420", reason, essential=True),))
    done = {run.name for run in runs}
    reasons = [f"the result has no run {name}: the program ended before it" for name in due if name not in done]
    others = [
        text for run in runs if run.name in due and (text := _find_other_id(run, due[run.name], context.contract))
    ]
    if not done & due.keys() or len(others) == len(done):
        seen = others[0] if others else f"it has no run {next(iter(due))}"
        raise UsageError(
            f"the result {result!r} is not of the probe of this model: {seen}; give the model that the probe was "
            "written for, and its --seed"
        )
    open_checks = (
        NotChecked(context.stack.name, "KV420", reason, essential=True)
        for reason in (*reasons, *(f"the program did not feed what the probe asks: {text}" for text in others))
    )
    return CheckResults(not_checked=tuple(open_checks))


def _find_other_id(run: ProbeRun, vector: Vector, contract: CacheContract) -> str | None:
    """The first token that a run was fed in place of the probe's, in words."""
    given = list(zip(vector.feeds[::2], vector.feeds[1::2], strict=True))
    prompts, follows = ([_read_ids(ids) for name, ids in given if name == f"--{kind}"] for kind in ("prompt", "follow"))
    longest = max(map(len, prompts))
    asked = [[0] * (longest - len(prompt)) + prompt + follow for prompt, follow in zip(prompts, follows, strict=True)]
    fed = _list_fed_ids(run, contract)
    if fed is None:
        return None
    if len(fed) != len(asked):
        return f"run {run.name}: {len(fed)} sequences in place of {len(asked)}"
    for row, (ids, right) in enumerate(zip(fed, asked, strict=True)):
        for place, (one, wanted) in enumerate(zip(ids, right, strict=False)):
            if one != wanted:
                return f"run {run.name}, sequence {row}: token {one} in place of {wanted} at position {place}"
    return None


def _list_fed_ids(run: ProbeRun, contract: CacheContract) -> list[list[int]] | None:
    """The ids that a run was fed, by sequence; None where the trace does not have them all."""
    phases: tuple[PhaseName, ...] = ("embed",) if "embed" in contract.phases else ("prefill", "decode")
    names = {port.name for name in phases for port in contract.graph(name).inputs if port.role == "token_ids"}
    rows: list[list[int]] = []
    for step in run.trace:
        tensors = [step.fed[name] for name in names if name in step.fed]
        if phase_of(step, contract, None) == "encode" or not tensors:
            continue
        if not tensors[0].has_values or tensors[0].empty:
            return None
        ids = tensors[0].array().reshape(-1, tensors[0].shape[-1] if tensors[0].shape else 1).astype(int).tolist()
        if rows and len(ids) != len(rows):
            return rows  # another number of rows: a self test
        rows = [[*before, *new] for before, new in zip(rows, ids, strict=True)] if rows else ids
    return rows or None


def _read_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _judge_run(
    context: ContractContext, probe: ProbeRun, result: str, options: Options, runtime: Runtime
) -> tuple[CheckResults, Run | None, str]:
    """What one run shows: findings, the same steps here, and a line on it."""
    stack = context.stack.name
    job = ExperimentJob(
        stack=stack,
        folder=context.folder.root.absolute(),
        contract=context.contract,
        experiments=(REPLAY,),
        seed=options.seed,
        provider=options.provider,
        tolerances=dict(options.tolerances),
        trace=Path(result).absolute(),
        trace_run=probe.name,
        timed=False,
    )
    held = compare_trace(with_likeliest(probe, context.contract), context.contract)
    results = runtime.examine(job, options.progress)
    caller = extend_context(context, CallerContext, runs=results.runs, trace_check=held, probe=probe)
    found = run_checks(caller, "caller", options.selection)
    run = caller.find_run(REPLAY)
    reasons = [*_find_open(probe, run), *results.reasons_not_run, *results.crashes]
    opened = (NotChecked(stack, "KV420", f"run {probe.name}: {reason}", essential=True) for reason in reasons)
    findings = tuple(replace(one, where=f"run {probe.name}, {one.where}") for one in found.findings)
    found = replace(found, findings=findings)
    found += CheckResults(not_checked=(*opened, *find_undecided_steps(stack, findings)))
    return found, run, f"run {probe.name}: {_describe(probe, held, run, findings)}"


def _find_open(probe: ProbeRun, run: Run | None) -> Iterator[str]:
    """Why a run decides nothing."""
    if not probe.finished:
        yield "the program ended before it did"
    elif probe.error is None and not all(probe.tokens or ((),)):
        yield "the program found no tokens"
    if run is None or run.outcome in ("skipped", "died", "inconclusive"):
        yield f"it could not be run again here: {(run.reason if run is not None else None) or 'no result'}"
    elif run.outcome == "ambiguous":
        yield "the difference of its outputs is between rounding and a fault"
    elif run.outcome == "passed" and not any(step.difference is not None for step in run.steps):
        yield "nothing in it can be compared: give a result of this model, with the seed of the probe (--seed)"


def _describe(probe: ProbeRun, held: TraceCheck, run: Run | None, findings: tuple[Finding, ...]) -> str:
    steps = f"{held.steps} step{'s' * (held.steps != 1)}"
    if findings:
        return f"{steps}, {findings[0].name}"
    likeliest = f", the same {len(probe.tokens[0])} tokens" if probe.tokens else ""
    alone = ["the step after that was compared by the program alone"] if probe.name in SELF_TESTS else []
    return "; ".join([f"{steps} as the contract asks{likeliest}", *describe_replay(run, None, None), *alone])


def _name_once(found: CheckResults) -> CheckResults:
    """The results with one finding for the runs that show the same: the first of them, and the others by name."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in found.findings:
        key = (one.code, one.cause, one.observed.partition(": ")[2].partition(" is off by")[0])
        first = kept.setdefault(key, one)
        if first is not one:
            also = one.where.partition(",")[0]
            kept[key] = replace(first, effects=(*first.effects, f"the same in {also}"))
    return replace(found, findings=tuple(kept.values()))
