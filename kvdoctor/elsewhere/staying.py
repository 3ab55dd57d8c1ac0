"""Puts the experiments of a stack to it under a target, and holds the logits of there against those of here."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvdoctor.case import UNDECIDED, Case
from kvdoctor.elsewhere.environments import environment, shown
from kvdoctor.elsewhere.here import Here
from kvdoctor.elsewhere.measuring import measured
from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.export.environments import Unavailable
from kvdoctor.findings import NotChecked
from kvdoctor.options import Options
from kvdoctor.report.document import TargetFacts
from kvdoctor.runtimes import Examined, Runtime
from kvdoctor.stack_test import located, made_job
from kvdoctor.targets import Target
from kvdoctor.targets.stay import Gap, Stay
from kvdoctor.trace import Run

if TYPE_CHECKING:
    import numpy as np

    Logits = np.ndarray[Any, np.dtype[Any]]
    """float[values], those of all steps of a run in order."""

BAD = ("failed", "differs", "died")
BROKEN = "onnxruntime {} does not start on this machine; remove {} and try again, or name another release"
UNCLEAR = "the difference to the logits of the installed runtime lies between noise and fault"


def with_stays(case: Case, options: Options, here: Here) -> Case:
    """The case with what it showed under every target. Targets with the same runtime share its runs."""
    stays: dict[str, Stay] = {}
    for target in options.targets:
        if target.runtime not in stays:
            stays[target.runtime] = _stay(case, options, here, target)
    of_each = ((target, stays[target.runtime]) for target in options.targets)
    return replace(
        case,
        stays=tuple(replace(stay, target=replace(target, measured=stay.target.measured)) for target, stay in of_each),
    )


def _stay(case: Case, options: Options, here: Here, target: Target) -> Stay:
    if case.here is not None and case.here.onnxruntime == target.onnxruntime:
        return Stay(replace(target, measured=case.here.measured), case.runs, case.refusals, here=True)
    try:
        python = environment(target.onnxruntime, offline=options.offline)
        there = here.runtime.beside(str(python))
        there.greet()
        target = measured(target, there)
    except Unavailable as reason:
        return Stay(target, not_run=str(reason))
    except (KvdoctorError, WorkerDied):
        return Stay(target, not_run=BROKEN.format(target.onnxruntime, shown(python.parent.parent)))
    with TemporaryDirectory(prefix="kvdoctor-") as scratch:
        logits, calls = Path(scratch, "logits.npz"), Path(scratch, "calls")
        calls.mkdir()
        job = made_job(replace(case, contract=here.contract), options)
        job = replace(job, experiments=_chosen(job.experiments), keep_logits=logits, keep_calls=calls, timed=False)
        examined = there.examine(job)
        runs = tuple(_placed(located(run, case), case, options, there, calls) for run in examined.runs)
        refusals = tuple((refusal.file, refusal.errors, refusal.opens_at) for refusal in examined.refusals)
        gaps = _gaps(case, runs, here.logits, logits)
    return Stay(target, runs, refusals, gaps, not_run=_broken(examined))


def _broken(examined: Examined) -> str | None:
    """Why what was run there tells nothing, or None."""
    crash = next((text.strip().splitlines()[-1] for text in examined.crashes), None)
    if crash is not None:
        return f"an experiment crashed there ({crash}); please report it"
    return next(iter(examined.obstacles), None)


def _chosen(asked: tuple[str, ...]) -> tuple[str, ...]:
    """The experiments on which findings rest, but for those that look for a cause or measure a time."""
    from kvdoctor.experiments import load

    return tuple(e.name for e in load() if e.name in asked and e.judged and not (e.asks_why or e.on_request))


def _placed(run: Run, case: Case, options: Options, there: Runtime, calls: Path) -> Run:
    """The place of a fault that is there alone, looked for there."""
    mine = case.run(run.experiment)
    if run.outcome not in ("failed", "differs") or mine is None or mine.outcome in BAD:
        return run
    if case.stack is None or case.contract is None:
        return run
    from kvdoctor.place.search import Scene, with_place

    return with_place(run, Scene(case.stack, case.contract, there, options.provider, calls))


def _gaps(case: Case, runs: tuple[Run, ...], mine: Path | None, theirs: Path) -> dict[str, Gap]:
    """Logits that are not the same here and there, of experiments that pass in both."""
    if mine is None or not (mine.is_file() and theirs.is_file()):
        return {}
    import numpy as np

    with np.load(mine) as ours, np.load(theirs) as others:
        found = {}
        for run in runs:
            if run.experiment in ours and run.experiment in others and run.outcome not in BAD:
                gap = _gap(case, run, ours[run.experiment], others[run.experiment])
                if gap is not None:
                    found[run.experiment] = gap
    return found


def _gap(case: Case, run: Run, ours: "Logits", others: "Logits") -> Gap | None:
    """The first step whose logits are not those of here; None where all are."""
    from kvdoctor.parity import compare, judge

    exactness = case.contract.exactness if case.contract else "float"
    if ours.size != others.size:
        return Gap(0, None, "fail")
    start, unclear = 0, None  # Gap | None
    for step, shape in _logits(case, run):
        stop = start + _count(shape)
        if len(shape) == 3 and stop > start:
            difference = compare(others[start:stop].reshape(shape), ours[start:stop].reshape(shape), exactness)
            verdict = judge(difference, exactness)
            if verdict == "fail":
                return Gap(step, difference, verdict)
            if verdict == "ambiguous" and unclear is None:
                unclear = Gap(step, difference, verdict)
        start = stop
    return unclear


def _logits(case: Case, run: Run) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The shapes of the logits that a run kept, by step."""
    for step in run.steps:
        phase = "decode" if step.phase == "decode" else "prefill"
        port = case.contract.graph(phase).port("logits") if case.contract else None  # type: ignore[arg-type]
        if port is not None and port.name in step.returned:
            yield step.step, step.returned[port.name].shape


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def open_ends(case: Case) -> Iterator[NotChecked]:
    """What is left open of the targets: where nothing was run, and where the consumer's loop gave no clear answer."""
    stack, judged = case.stack.name if case.stack else None, case.judged
    sure = case.contract is not None and case.contract.exactness == "float"
    for stay in case.stays:
        there = stay.run(judged.experiment) if judged is not None else None
        if stay.not_run is not None:
            yield NotChecked(stack, "KV404", f"{stay.target.words}: {stay.not_run}", essential=True)
        elif there is not None and judged is not None and not stay.here:
            gap = stay.gaps.get(there.experiment)
            unclear = there.outcome in ("ambiguous", "inconclusive") and judged.outcome == "passed"
            if unclear or (gap is not None and gap.verdict == "ambiguous"):
                reason = UNDECIDED[there.outcome].format(reason=there.reason) if unclear else UNCLEAR
                yield NotChecked(stack, "KV405", f"{stay.target.words}: {there.experiment}: {reason}", essential=sure)


def elsewhere_runs(stays: Mapping[str, tuple[Stay, ...]]) -> Iterator[Run]:
    """The runs under other runtimes than the one that is here, each once."""
    for of_stack in stays.values():
        told = set()
        for stay in of_stack:
            if not stay.here and stay.target.runtime not in told:
                told.add(stay.target.runtime)
                yield from stay.runs


def target_facts(targets: tuple[Target, ...], stays: Mapping[str, tuple[Stay, ...]]) -> tuple[TargetFacts, ...]:
    """The targets as the report shows them, with what each did to every stack."""
    return tuple(_facts(target, stays) for target in targets)


def _facts(target: Target, stays: Mapping[str, tuple[Stay, ...]]) -> TargetFacts:
    mine = {name: stay for name, found in stays.items() for stay in found if stay.target == target}
    refused = {name: tuple(file for file, _, at in stay.refusals if at is None) for name, stay in mine.items()}
    apart = {name: tuple(n for n, gap in stay.gaps.items() if gap.verdict == "fail") for name, stay in mine.items()}
    limits = next((stay.target for stay in mine.values()), target).limits
    return TargetFacts(
        asked=target.asked,
        onnxruntime=target.onnxruntime,
        ir=limits.ir if limits else None,
        opset=limits.opset if limits else None,
        refused={name: files for name, files in refused.items() if files},
        other_logits={name: names for name, names in apart.items() if names},
        not_run={name: stay.not_run for name, stay in mine.items() if stay.not_run is not None},
    )
