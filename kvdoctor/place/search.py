"""The search for the place of one bad run: a short table of contents."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.place.bench import SECONDS, Bench, NoPlace, TrialFailed
from kvdoctor.place.differing import Differing, Phase
from kvdoctor.place.failing import Failing
from kvdoctor.place.sizes import Sizes
from kvdoctor.place.words import layers
from kvdoctor.runtimes import Runtime
from kvdoctor.stacks import StackFiles
from kvdoctor.trace import Place, Run, Step

LEVELS = ("off", "basic", "extended", "all")


@dataclass(frozen=True)
class Scene:
    """What a search needs: the stack and its contract, the door to the runtime, and the folder of the kept calls."""

    stack: StackFiles
    contract: CacheContract
    runtime: Runtime
    provider: str
    calls: Path


def with_place(run: Run, scene: Scene) -> Run:
    """The run with the place of its fault, or with the reason why that was not found."""
    bench = Bench(scene.runtime, scene.calls, scene.provider, time.monotonic() + SECONDS)
    try:
        return replace(run, place=_found(run, scene, bench))
    except NoPlace as reason:
        return replace(run, no_place=str(reason))
    except TrialFailed:
        return replace(run, no_place="the runtime does not run the changed graph that would show it")
    except Exception as error:  # a fault of ours must not hide what the run showed
        return replace(run, no_place=f"the search crashed ({type(error).__name__}: {error}); please report it")


def _found(run: Run, scene: Scene, bench: Bench) -> Place:
    feeds = scene.calls / f"{run.experiment}.npz"
    if run.outcome == "differs" and not feeds.is_file():
        raise NoPlace("the logits come in another shape, so that values cannot be held against one another")
    if not feeds.is_file():
        raise NoPlace("the feeds of the call were not kept")
    if run.outcome == "failed":
        return _failed(run, scene, bench, feeds)
    return _differs(run, scene, bench, feeds)


def _failed(run: Run, scene: Scene, bench: Bench, feeds: Path) -> Place:
    from kvdoctor.kept_calls import load_call

    step = run.steps[-1]
    phase: PhaseName = "decode" if step.phase == "decode" else "prefill"
    file = file_of(scene, phase)
    if run.passes_with == "no-buffer-reuse":
        return _elsewhere("buffer-reuse", "the same call passes where the runtime reuses no buffers")
    if run.passes_with == "no-optimisation":
        return _elsewhere("optimisation", f"the call fails from optimisation level {_lowest(bench, file, feeds)!r} on")
    flat, node = Failing(bench, file, feeds, branches_taken(scene, phase)).node()
    axes = {port.name: port.axes for port in scene.contract.graph(phase).inputs}
    carried = _carried(run, scene.contract)
    sizes = Sizes(bench, flat, file, node, load_call(feeds), axes, carried, layers(scene.contract))
    place = sizes.place(feeds)
    if scene.provider != "CPUExecutionProvider" and _runs(bench, file, feeds, run.level, "CPUExecutionProvider"):
        return replace(place, blame="kernel", words=f"the same call passes on the CPU, not on {scene.provider}")
    return place


def _differs(run: Run, scene: Scene, bench: Bench, feeds: Path) -> Place:
    reference = scene.calls / f"{run.experiment}-reference.npz"
    index = next((i for i, step in enumerate(run.steps) if step.step == run.failed_step), None)
    if index is None or not reference.is_file():
        raise NoPlace("there is no run without a cache that ends with the same token")
    step = run.steps[index]
    left, right = (
        Phase(name, file_of(scene, name), branches_taken(scene, name))
        for name in (("decode" if step.phase == "decode" else "prefill"), "prefill")
    )
    return Differing(
        bench=bench,
        contract=scene.contract,
        step=step,
        before=run.steps[index - 1] if index else None,
        total=step.new_tokens + (step.past_length if step.phase == "decode" else 0),
        left=left,
        right=right,
        feeds=(feeds, reference),
        provider=scene.provider,
    ).place()


def _elsewhere(blame: str, words: str) -> Place:
    """No node of the graph is at fault."""
    return Place(None, "", None, {}, (), None, blame, words)  # type: ignore[arg-type]


def _lowest(bench: Bench, file: Path, feeds: Path) -> str:
    """The lowest level of optimisation at which a call fails."""
    return next((level for level in LEVELS if not _runs(bench, file, feeds, level)), "all")


def _runs(bench: Bench, file: Path, feeds: Path, level: str, provider: str | None = None) -> bool:
    try:
        bench.run_file(file, feeds, level, provider)
    except TrialFailed:
        return False
    return True


def file_of(scene: Scene, phase: PhaseName) -> Path:
    """Where the graph of a phase lies."""
    name = scene.contract.graph(phase).file
    return next(file.path for file in scene.stack.files.values() if file.name == name)


def branches_taken(scene: Scene, phase: PhaseName) -> dict[str, bool]:
    """The branch that a merged decoder takes in a phase, by the first value that its `If` makes."""
    name, switch = scene.contract.graph(phase).file, scene.contract.phases[phase].switch
    view = next((file.view for file in scene.stack.files.values() if file.name == name), None)
    if view is None or view.branches is None or switch is None:
        return {}
    branches = view.branches[1]
    cached_is_then = branches.cached.path.endswith("then_branch")
    first = next(filter(None, branches.node.output), None)
    return {} if first is None else {first: (switch == branches.on) == cached_is_then}


def _carried(run: Run, contract: CacheContract) -> Mapping[str, str]:
    """For each past fed in the last step that is a present of the step before: which step returned it."""
    if len(run.steps) < 2:
        return {}
    before, last = run.steps[-2], run.steps[-1]
    return {
        slot.past: f"step {before.step} returned it as {name}"
        for slot in contract.slots
        if (name := _filled(before, slot.filled_by, slot.present)) is not None
        and slot.past in last.fed
        and last.fed[slot.past] == before.returned[name]
    }


def _filled(before: Step, filled_by: str | None, present: str | None) -> str | None:
    name = present if before.phase == "decode" else filled_by
    return name if name in before.returned else None
