"""Runs the experiments of a stack on other execution providers, and compares them with the CPU.

The tolerance belongs to the provider and its adapter, and is measured on the model itself: how far the logits of first
calls, which have no cache, lie from those of the CPU. It never exceeds what a policy may allow.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from kvdoctor.decode.experiments import load
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import WRONG, FaultLocation, Run
from kvdoctor.decode.tolerances import Tolerance, bounds, find_tolerance
from kvdoctor.diagnose.context import LocalRun, RunContext
from kvdoctor.diagnose.examine import resolve_node_names
from kvdoctor.diagnose.locate.search import LocateContext, guard_search, locate_fault
from kvdoctor.diagnose.targets import compare_logits, judged_job, read_first_gaps
from kvdoctor.options import Options
from kvdoctor.runtime.client import StackResults
from kvdoctor.runtime.providers import read_provider
from kvdoctor.runtime.scratch import scratch_folder
from kvdoctor.runtime.targets import LogitsGap, Target, TargetResult, list_wrong_runs

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
    refusals = tuple((refusal.file, refusal.errors, refusal.opens_at) for refusal in results.refusals)
    noise = statistics.median(first) if first else None
    return TargetResult(
        target, located, refusals, gaps, tolerance=limit, noise=noise, placed=tuple(results.placed.values())
    )


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
