"""One stack under test: the experiments, the second look where it rounds, the checkpoint, the place of a fault."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.case import Case
from kvdoctor.contract import CacheContract
from kvdoctor.findings import NotChecked, Verdicts
from kvdoctor.obstacles import obstacles
from kvdoctor.options import Options
from kvdoctor.reading import with_observed
from kvdoctor.runtimes import Examined, Job, Runtime
from kvdoctor.second_look import second_look
from kvdoctor.trace import REPLAY, Node, Run
from kvdoctor.uses import USES

if TYPE_CHECKING:
    from kvdoctor.experiments import Experiment
    from kvdoctor.reference import Checkpoint


@dataclass(frozen=True, slots=True)
class Left:
    """Where the worker leaves what is too large for the pipe: a file for logits, if wanted, and a folder for calls."""

    logits: Path | None
    calls: Path


def examine(case: Case, options: Options, verdicts: Verdicts, runtime: Runtime, left: Left) -> tuple[Case, Examined]:
    """Put all experiments to one stack, if it can be driven."""
    assert case.stack is not None  # noqa: S101 - made with both by step_test
    assert case.contract is not None  # noqa: S101
    from kvdoctor.experiments import load

    obstacle = next(obstacles(case.stack, case.contract), None)
    frozen = _is_frozen(case.contract)
    if obstacle or frozen:
        reason = (
            f"not run: {obstacle}"
            if obstacle
            else f"run only to a past of the fixed length {case.contract.frozen_past}"
        )
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", reason, essential=True))
    if obstacle:
        return case, Examined()

    job = replace(made_job(case, options), keep_logits=left.logits, keep_calls=left.calls)
    examined = runtime.examine(job)
    for crash in dict.fromkeys(crash.strip().splitlines()[-1] for crash in examined.crashes):
        reason = f"an experiment crashed ({crash}); please report it"
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", reason, essential=True))
    for note in dict.fromkeys(examined.notes):
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", note))
    for text in examined.obstacles:
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", text, essential=True))
    runs = tuple(located(run, case) for run in examined.runs)
    runs += tuple(_left_out(case.stack.name, e, options, runtime) for e in load() if not _is_asked(e, options))
    refusals = tuple((refusal.file, refusal.errors, refusal.opens_at) for refusal in examined.refusals)
    contract = with_observed(case.contract, runs)
    case = replace(case, contract=contract, runs=runs, refusals=refusals, timings=examined.timings)
    look = second_look(case, runtime, options.limits, job, options.thorough)
    verdicts.not_checked += look.notes
    examined.unrounded_seconds = look.examined.seconds
    examined.peak_bytes = max(examined.peak_bytes, look.examined.peak_bytes)
    return look.case, examined


def made_job(case: Case, options: Options) -> Job:
    """All experiments that are asked for, on one stack."""
    assert case.stack is not None  # noqa: S101 - asked only where there is a stack
    assert case.contract is not None  # noqa: S101
    from kvdoctor.experiments import frozen_past, load

    frozen = _is_frozen(case.contract)
    chosen = [e.name for e in load() if (e.name == frozen_past.NAME) == frozen and _is_asked(e, options)]
    traced = case.caller is not None and options.trace is not None
    return Job(
        stack=case.stack.name,
        folder=case.folder.root.absolute(),
        contract=case.contract,
        experiments=(*chosen, *((REPLAY,) if traced else ())),
        seed=options.seed,
        provider=options.provider,
        prompt=options.prompt,
        inputs=Path(options.inputs).absolute() if options.inputs is not None else None,
        seen=options.progress,
        trace=Path(options.trace).absolute() if traced and options.trace is not None else None,
    )


def _is_frozen(contract: CacheContract) -> bool:
    """Whether the past has one length only, and can be driven up to it."""
    from kvdoctor.experiments import frozen_past

    return contract.frozen_past is not None and frozen_past.can_be_filled(contract) is None


def _is_asked(experiment: "Experiment", options: Options) -> bool:
    """A thorough experiment is run where all are, or where a use that must work rests on it."""
    if experiment.on_request:
        return options.reference is not None
    use = USES.get(experiment.name)
    return not experiment.thorough or options.thorough or (use is not None and use.required in options.required)


def _left_out(stack: str, experiment: "Experiment", options: Options, runtime: Runtime) -> Run:
    """An experiment that nobody asked for, as it stands in the list of runs."""
    target = f"onnxruntime=={runtime.versions.get('onnxruntime', '?')}"
    reason = f"only with --{'reference' if experiment.on_request else 'thorough'}"
    return Run(stack, experiment.name, target, options.provider, "all", "skipped", reason=reason)


def held_against(case: Case, checkpoint: "Checkpoint | None", logits: Path | None, verdicts: Verdicts) -> Case:
    """Hold what the stack computed against the checkpoint, where there is one: it was asked for, so it must be done."""
    if checkpoint is None or logits is None or case.stack is None or case.contract is None:
        return case
    from kvdoctor.reference import CannotCompare, hold, hold_greedy

    try:
        run = hold(case.stack, case.contract, case.runs, logits, checkpoint)
        words = hold_greedy(case.contract, case.runs, logits, checkpoint)
    except CannotCompare as reason:
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV320", str(reason), essential=True))
        return case
    open_end = {
        "ambiguous": "the difference lies between noise and fault",
        "failed": f"step {run.failed_step} fails, and only what came before was held against the checkpoint",
    }.get(run.outcome)
    if open_end is not None:
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV320", f"{open_end}: {run.reason}", essential=True))
    held = {each.experiment: each for each in (run, words) if each is not None}
    return replace(case, runs=tuple(held.get(each.experiment, each) for each in case.runs))


def placed(case: Case, options: Options, runtime: Runtime, calls: Path) -> Case:
    """The case with the places of what its findings rest on: the judged loop, else other sizes that alone go wrong."""
    judged, bad = case.judged, [run for run in case.runs if run.shows in ("failed", "differs")]
    if judged is None or case.contract is None or case.stack is None:
        return case
    meant = [judged] if judged in bad else [run for run in bad if run.experiment in USES]
    if not meant:
        return case
    from kvdoctor.place.search import Scene, with_place

    scene = Scene(case.stack, case.contract, runtime, options.provider, calls)
    return replace(case, runs=tuple(with_place(run, scene) if run in meant else run for run in case.runs))


def located(run: Run, case: Case) -> Run:
    """Turn names that the runtime mentioned into a place, if the graph holds a node of that name."""
    view = case.main
    if run.steps and case.contract and case.stack:
        phase = run.steps[-1].phase if run.steps[-1].phase != "reference" else "prefill"
        file = case.contract.graphs[case.contract.phases[phase].graph].file
        view = next((f.view for f in case.stack.files.values() if f.name == file and f.view), view)
    for name in reversed(run.node_names):
        node = view.node(name)
        if node is not None and node.op_type not in ("If", "Loop", "Scan"):
            return replace(run, node=Node(name, node.op_type), node_names=())
    return replace(run, node_names=())
