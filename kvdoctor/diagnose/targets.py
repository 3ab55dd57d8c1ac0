"""Runs the experiments of a stack under a target or on another execution provider, and compares the logits.

Those of a target are compared with those of the local runtime. The tolerance of a provider and its adapter is measured
on the model itself: how far the logits of first calls, which have no cache, lie from those of the CPU. It never exceeds
what a policy may allow.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvdoctor.choices import CPU
from kvdoctor.decode.calls import Array
from kvdoctor.decode.experiments import load
from kvdoctor.decode.messages import ExperimentJob, NodesPlaced
from kvdoctor.decode.parity import compare, judge
from kvdoctor.decode.runs import WRONG, FaultLocation, LogitsDifference, Run
from kvdoctor.decode.tolerances import Tolerance, bounds, find_tolerance
from kvdoctor.diagnose.context import LocalRun, RunContext
from kvdoctor.diagnose.examine import build_job, resolve_node_names
from kvdoctor.diagnose.locate.search import LocateContext, guard_search, locate_fault
from kvdoctor.diagnose.not_checked import REASONS
from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.findings import NotChecked
from kvdoctor.options import Options
from kvdoctor.report.facts import TargetFacts
from kvdoctor.runtime.client import StackResults
from kvdoctor.runtime.environments import EnvironmentUnavailable, hide_home
from kvdoctor.runtime.providers import read_provider
from kvdoctor.runtime.release_environments import measure_limits, prepare_environment
from kvdoctor.runtime.scratch import scratch_folder
from kvdoctor.runtime.targets import LogitsGap, Target, TargetResult, list_wrong_runs

BROKEN = "onnxruntime {} does not start on this machine; remove {} and try again, or name another release"
PADDED = ("left-padding", "right-padding")
"""Experiments whose first step has logits of padding, which nobody reads."""
UNCLEAR = "the difference to the logits of the installed runtime is between noise and a fault"
UNCLEAR_HERE = "the difference to the logits of the CPU is between the measured noise and a fault"


def run_targets(context: RunContext, options: Options, local: LocalRun) -> tuple[TargetResult, ...]:
    """What the model shows under each target. Targets with the same runtime share its runs."""
    by_runtime: dict[str, TargetResult] = {}
    for target in options.targets:
        if target.runtime not in by_runtime:
            by_runtime[target.runtime] = _run_target(context, options, local, target)
    found = ((target, by_runtime[target.runtime]) for target in options.targets)
    return tuple(replace(one, target=replace(target, measured=one.target.measured)) for target, one in found)


def _run_target(context: RunContext, options: Options, local: LocalRun, target: Target) -> TargetResult:
    own = context.local_runtime
    if own is not None and own.onnxruntime == target.onnxruntime:
        return TargetResult(replace(target, measured=own.measured), context.runs, context.refusals, is_local=True)
    try:
        python = prepare_environment(target.onnxruntime, offline=options.offline)
        runtime = local.runtime.beside(str(python))
        runtime.greet()
        target = measure_limits(target, runtime)
    except EnvironmentUnavailable as reason:
        return TargetResult(target, not_run=str(reason))
    except (KvdoctorError, WorkerDied):
        return TargetResult(target, not_run=BROKEN.format(target.onnxruntime, hide_home(str(python.parent.parent))))
    with scratch_folder() as scratch:
        logits, calls = Path(scratch, "logits.npz"), Path(scratch, "calls")
        calls.mkdir()
        job = replace(judged_job(context, options, local), keep_logits=logits, keep_calls=calls)
        results = runtime.examine(job, options.progress)
        search = LocateContext.of(context, runtime, options.provider, calls)
        right = {run.experiment for run in context.runs if run.outcome not in WRONG}
        named = (resolve_node_names(run, context) for run in results.runs)
        # What goes wrong under the target alone is located.
        wrong = ("failed", "differs")
        runs = tuple(
            locate_fault(run, search) if run.outcome in wrong and run.experiment in right else run for run in named
        )
        gaps = compare_logits(context, runs, local.logits, logits, context.tolerance)
    crash = next((text.strip().splitlines()[-1] for text in results.crashes), None)
    crashed = f"an experiment crashed under this target ({crash}); please report it"
    not_run = next(iter(results.reasons_not_run), None) if crash is None else crashed
    return TargetResult(target, runs, tuple(results.refusals), gaps, not_run=not_run)


def judged_job(context: RunContext, options: Options, local: LocalRun) -> ExperimentJob:
    """The experiments on which findings rest, but for those that look for a cause or measure a time."""
    job = build_job(replace(context, contract=local.contract), options)
    judged = (one.name for one in load() if one.judged and not (one.explains or one.on_request))
    return replace(job, experiments=tuple(name for name in judged if name in job.experiments), timed=False)


def compare_logits(
    context: RunContext, runs: Iterable[Run], local: Path | None, target: Path, limit: Tolerance
) -> dict[str, LogitsGap]:
    """Logits that differ between the local runtime and the target, of experiments that pass in both.

    One that ends earlier under the target is a difference; one that goes on further is compared up to the shorter.
    """
    gaps = dict[str, LogitsGap | None]()
    for run, ours, others in _pair_logits(runs, local, target):
        gaps[run.experiment] = None
        for step, difference in _compare_steps(context, run, ours, others):
            verdict = judge(difference, limit)
            if verdict == "fail" or (verdict == "ambiguous" and gaps[run.experiment] is None):
                gaps[run.experiment] = LogitsGap(step, difference, verdict)
            if verdict == "fail":
                break
        else:
            here = context.find_run(run.experiment)
            if here is not None and here.outcome == "passed" and 0 < len(run.steps) < len(here.steps):
                gaps[run.experiment] = LogitsGap(run.steps[-1].step, None, "fail")
    return {name: gap for name, gap in gaps.items() if gap is not None}


def read_first_gaps(context: RunContext, runs: Iterable[Run], local: Path | None, target: Path) -> list[float]:
    """How far the logits of first calls, without a cache, lie from the local ones, in standard deviations."""
    found = []
    for run, ours, others in _pair_logits(runs, local, target):
        if ours.size == others.size and run.steps and run.steps[0].past_length == 0:
            first = next(_compare_steps(context, run, ours, others), None)
            found += [first[1].relative] if first is not None and first[1].finite else []
    return found


def _pair_logits(runs: Iterable[Run], local: Path | None, target: Path) -> Iterator[tuple[Run, Array, Array]]:
    """Runs that are not wrong, with the logits of all their steps here and there, both float[values]."""
    if local is None or not (local.is_file() and target.is_file()):
        return
    with np.load(local) as ours, np.load(target) as others:
        for run in runs:
            if run.experiment in ours and run.experiment in others and run.outcome not in WRONG:
                yield run, ours[run.experiment], others[run.experiment]


def _compare_steps(context: RunContext, run: Run, ours: Array, others: Array) -> Iterator[tuple[int, LogitsDifference]]:
    """Each step with how its logits differ from the local ones; both are float[values], those of all steps in order."""
    start = 0
    for step in run.steps:
        port = context.contract.graph("decode" if step.phase == "decode" else "prefill").port("logits")
        if port is None or port.name not in step.returned:
            continue
        shape = step.returned[port.name].shape
        stop = start + math.prod(shape)
        if stop > min(ours.size, others.size):
            return  # a run ends where its runtime takes no more tokens: one may look past the end of a table
        unread = run.experiment in PADDED and step.phase == "prefill"
        if len(shape) == 3 and stop > start and not unread:
            here, there = ours[start:stop].reshape(shape), others[start:stop].reshape(shape)
            yield step.step, compare(there, here, context.tolerance)
        start = stop


def find_open_targets(context: RunContext) -> Iterator[NotChecked]:
    """Targets under which nothing was run, or what passes in the local runtime gave no clear answer."""
    stack, loop = context.stack.name, context.checked_loop
    for result in context.target_results:
        if result.not_run is not None:
            yield NotChecked(stack, "KV404", f"{result.target.words}: {result.not_run}", essential=True)
            continue
        passed = {run.experiment for run in context.runs if run.outcome == "passed"}
        for run in result.runs if not result.is_local else ():
            gap, is_loop = result.gaps.get(run.experiment), loop is not None and run.experiment == loop.experiment
            undecided = run.experiment in passed and run.outcome in ("ambiguous", "inconclusive", "skipped")
            if undecided or (is_loop and gap is not None and gap.verdict == "ambiguous"):
                there = UNCLEAR if result.target.provider == CPU else UNCLEAR_HERE
                reason = REASONS[run.outcome].format(reason=run.reason) if undecided else there
                text = f"{result.target.words}: {run.experiment}: {reason}"
                yield NotChecked(stack, "KV405", text, essential=is_loop and context.contract.exactness == "float")


def list_target_runs(results: Mapping[str, tuple[TargetResult, ...]]) -> Iterator[Run]:
    """The runs under other runtimes than the local one, each once."""
    for of_stack in results.values():
        listed = set()
        for result in of_stack:
            place = result.target.runtime, result.target.ran_on
            if not result.is_local and place not in listed:
                listed.add(place)
                yield from result.runs


def target_facts(
    targets: tuple[Target, ...], results: Mapping[str, tuple[TargetResult, ...]]
) -> tuple[TargetFacts, ...]:
    """The targets as the report shows them, with the result of every stack."""
    return tuple(_describe_target(target, results) for target in targets)


def describe_placement(placed: Iterable[NodesPlaced]) -> Iterator[str]:
    """For each file, which of its nodes run on the CPU, by operator."""
    for one in placed:
        if one.elsewhere:
            count, listed = sum(one.elsewhere.values()), ", ".join(f"{op} {n}" for op, n in one.elsewhere.items())
            yield f"{count} of {count + one.there} nodes of {one.file} run on the CPU, with copies between: {listed}"


def _describe_target(target: Target, results: Mapping[str, tuple[TargetResult, ...]]) -> TargetFacts:
    own = {name: result for name, found in results.items() for result in found if result.target == target}
    refused = {name: tuple(one.file for one in result.refusals if one.opens_at is None) for name, result in own.items()}
    apart = {name: tuple(n for n, gap in result.gaps.items() if gap.verdict == "fail") for name, result in own.items()}
    limits = next((result.target for result in own.values()), target).limits
    tolerances = {name: result.tolerance.passes for name, result in own.items() if result.tolerance is not None}
    on_cpu = {name: tuple(describe_placement(result.placed)) for name, result in own.items() if result.placed}
    return TargetFacts(
        asked=target.asked,
        onnxruntime=target.onnxruntime,
        ir=limits.ir if limits else None,
        opset=limits.opset if limits else None,
        refused={name: files for name, files in refused.items() if files},
        other_logits={name: names for name, names in apart.items() if names},
        not_run={name: result.not_run for name, result in own.items() if result.not_run is not None},
        provider=target.ran_on,
        adapter=target.adapter,
        tolerance=tolerances,
        on_cpu={name: found for name, found in on_cpu.items() if found},
    )


MARGIN = 4.0
"""Times the measured noise of first calls that a later step may be off: what is cached is rounded once more."""
ALONE = "it takes the file and computes on the CPU alone: nothing was tested on it"
NEXT = "; see `kvdoctor env` for the providers and adapters of this machine, and how to get others"
UNPLACED = "onnxruntime {} does not say which nodes run on it; pip install -U onnxruntime"


def run_providers(
    context: RunContext, options: Options, local: LocalRun, asked: Iterable[str]
) -> tuple[TargetResult, ...]:
    """What the model shows on each provider; where two adapters depart in the same experiment, both results say so."""
    results = [_run_provider(context, options, local, one) for one in asked]
    return tuple(replace(one, agreed=any(_agree(one, other) for other in results)) for one in results)


def _agree(one: TargetResult, other: TargetResult) -> bool:
    """Whether two adapters depart in the same experiment."""
    if one.target.adapter == other.target.adapter or one.target.ran_on == other.target.ran_on:
        return False
    wrong = [{n for n, gap in each.gaps.items() if gap.verdict == "fail"} for each in (one, other)]
    failed = [{run.experiment for run in each.runs if run.outcome in WRONG} for each in (one, other)]
    return bool(wrong[0] & wrong[1] or failed[0] & failed[1])


def _run_provider(context: RunContext, options: Options, local: LocalRun, asked: str) -> TargetResult:
    found, release = local.runtime.find_provider(asked), local.runtime.greet()
    name = found.name or read_provider(asked).name
    adapter = found.adapter + (", a software adapter" if found.software and found.adapter else "")
    target = Target(asked, release, provider=name, adapter=adapter, software=found.software)
    if found.error:
        return TargetResult(target, not_run=found.error + NEXT)
    options = replace(options, providers=(asked,))
    with scratch_folder() as scratch:
        logits, calls = Path(scratch, "logits.npz"), Path(scratch, "calls")
        calls.mkdir()
        job = replace(judged_job(context, options, local), keep_logits=logits, keep_calls=calls)
        results = local.runtime.examine(job, options.progress)
        # What callers try runs on the CPU: it must run here too. Where one ends the process, the others are still run.
        ran = {run.experiment for run in context.runs if run.outcome in ("passed", "differs")}
        workarounds = tuple(one.name for one in load() if one.why and not one.judged and one.name in ran)
        tried = replace(job, experiments=workarounds, keep_logits=None)
        results.runs += local.runtime.examine(tried, options.progress).runs
        if (reason := _why_untested(results, release)) is not None:
            return TargetResult(target, not_run=reason + NEXT)
        first = read_first_gaps(context, results.runs, local.logits, logits)
        limit = measure_tolerance(context, first)
        runs = _judge_again(job, results.runs, limit, context, local)
        named = tuple(replace(resolve_node_names(run, context), provider=target.ran_on) for run in runs)
        gaps = compare_logits(context, named, local.logits, logits, limit)
        search = replace(LocateContext.of(context, local.runtime, asked, calls), tolerance=limit)
        gaps = _locate_gaps(context, named, gaps, search, job)
        located = tuple(_locate_wrong(context, named, search, job, gaps))
    refused, placed = tuple(results.refusals), tuple(results.placed.values())
    noise = statistics.median(first) if first else None
    return TargetResult(target, located, refused, gaps, tolerance=limit, noise=noise, placed=placed)


def _why_untested(results: StackResults, release: str) -> str | None:
    """Why the runs say nothing of the provider; None where they do."""
    if results.crashes:
        return f"an experiment crashed ({results.crashes[0].strip().splitlines()[-1]}); please report it"
    if results.reasons_not_run:
        return results.reasons_not_run[0]
    opened = any(step.returned for run in results.runs for step in run.steps)
    if not results.placed:
        return UNPLACED.format(release) if opened else None
    return ALONE if not any(one.there for one in results.placed.values()) else None


def measure_tolerance(context: RunContext, first: list[float]) -> Tolerance:
    """The tolerance on a provider whose first calls are so far off, in standard deviations of the logits."""
    own, exactness = context.tolerance, context.contract.exactness
    noise = MARGIN * statistics.median(first) if first else 0.0
    passes = min(noise, bounds(exactness)[1])
    return own if passes <= own.passes else find_tolerance(exactness, {exactness: float(f"{passes:.2g}")})


def _judge_again(
    job: ExperimentJob, runs: list[Run], limit: Tolerance, context: RunContext, local: LocalRun
) -> list[Run]:
    """The runs; those with a difference, or with an earlier end, are run again by the provider's tolerance if wider."""
    steps = {run.experiment: len(run.steps) for run in context.runs if run.outcome == "passed"}
    went_on = [run for run in runs if run.outcome not in ("failed", "died")]
    ended = [run for run in went_on if len(run.steps) < steps.get(run.experiment, 0)]
    unclear = tuple(run.experiment for run in went_on if run.outcome in ("ambiguous", "differs") or run in ended)
    if limit == context.tolerance or not unclear:
        return runs
    wider = {**job.tolerances, context.contract.exactness: limit.passes}
    again = local.runtime.examine(replace(job, experiments=unclear, tolerances=wider, keep_logits=None)).runs
    found = {run.experiment: run for run in again}
    return [found.get(run.experiment, run) for run in runs]


def _locate_wrong(
    context: RunContext,
    runs: tuple[Run, ...],
    search: LocateContext,
    job: ExperimentJob,
    gaps: Mapping[str, LogitsGap],
) -> Iterator[Run]:
    """The runs; the first of each kind that goes wrong on the provider alone has the location of its fault."""
    wrong = list_wrong_runs(context.runs, runs, on_provider=True)
    seen = {"differs"} if any(gap.verdict == "fail" for gap in gaps.values()) else set[str]()
    for run in runs:
        if run not in wrong or run.outcome in seen:
            yield run
            continue
        seen.add(run.outcome)
        yield _locate_one(run, search, job)


def _locate_one(run: Run, search: LocateContext, job: ExperimentJob) -> Run:
    from kvdoctor.diagnose.locate.provider_search import locate_crash, locate_departure

    if run.outcome == "died":
        return guard_search(run, lambda: replace(run, location=locate_crash(run, search, job)))
    if run.outcome == "failed":
        return locate_fault(run, search)
    step = run.failed_step or 0
    found = guard_search(run, lambda: replace(run, location=locate_departure(run, step, search, job)))
    return found if found.location is not None else locate_fault(run, search)


def _locate_gaps(
    context: RunContext, runs: tuple[Run, ...], gaps: dict[str, LogitsGap], search: LocateContext, job: ExperimentJob
) -> dict[str, LogitsGap]:
    """The differences to the CPU; the one that the finding rests on with the location of its fault."""
    from kvdoctor.diagnose.locate.provider_search import locate_departure

    apart = sorted(name for name, gap in gaps.items() if gap.verdict == "fail" and gap.difference is not None)
    loop = context.checked_loop.experiment if context.checked_loop else "plain-loop"
    name = loop if loop in apart else next(iter(apart), None)
    run = next((run for run in runs if run.experiment == name), None)
    if run is None or name is None:
        return gaps

    def locate() -> FaultLocation:
        return locate_departure(run, gaps[name].step, search, job)

    found = guard_search(run, lambda: replace(run, location=locate()))
    return gaps | {name: replace(gaps[name], location=found.location, no_location=found.no_location)}
