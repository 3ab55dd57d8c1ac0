"""Where a graph first differs from its checkpoint: feeds and modules are brought together for `locate.modules`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.checkpoint import NAME, ROUNDED_WEIGHTS, Arithmetic, CannotCompare, Checkpoint
from kvdoctor.diagnose.locate.graph_runner import SECONDS, CannotLocate, GraphRunner, TrialFailed
from kvdoctor.diagnose.locate.module_call import Module, ModuleCall
from kvdoctor.diagnose.locate.modules import ModuleComparison, ModuleSearch, measure
from kvdoctor.diagnose.locate.search import LocateContext, branches_taken, file_of


def locate_in_modules(
    run: Run, context: LocateContext, checkpoint: Checkpoint, kept: Path, arithmetic: Arithmetic
) -> Run:
    """The run that differs from a checkpoint with its parts and the location, or the reason why there is none.

    `kept` is the file with the feeds that the worker left.
    """
    try:
        found = _compare(run, context, checkpoint, kept, arithmetic)
    except (CannotLocate, CannotCompare) as reason:
        return replace(run, no_location=str(reason))
    except TrialFailed:
        return replace(run, no_location="the runtime does not run the instrumented graph")
    except Exception as error:  # a fault of ours must not hide what the run showed
        return replace(run, no_location=f"the search crashed ({type(error).__name__}: {error}); please report it")
    missing = found.reason
    if missing is not None and (apart := _compare_states(kept)) is not None and apart > arithmetic.tolerance.passes:
        missing = f"the encoder differs: its states are off by {apart:.2g} standard deviations; on the same states the "
        missing += "modules of the decoder agree"
    return replace(run, parts=found.parts, location=found.location, no_location=missing)


def _compare(
    run: Run, context: LocateContext, checkpoint: Checkpoint, kept: Path, arithmetic: Arithmetic
) -> ModuleComparison:
    failed = next((step for step in run.steps if step.step == run.failed_step), None)
    if failed is None:
        raise CannotLocate("the logits have a different shape, so intermediate values cannot be compared")
    if failed.past_length:
        raise CannotLocate("the logits differ with the cache only, and modules are compared in a call without one")
    if arithmetic.name == ROUNDED_WEIGHTS or "quantization" in arithmetic.name:
        raise CannotLocate("weights or activations are rounded to 8 bits or fewer, so every module differs")
    if context.stack.stages:
        raise CannotLocate("the decoder is a pipeline of several files, in which no node is searched for")
    runner = GraphRunner(context.runtime, context.calls, context.provider, time.monotonic() + SECONDS)
    source = file_of(context, "prefill")
    flat = runner.flatten(source, branches_taken(context, "prefill"))
    call = _read_call(checkpoint, kept, runner)
    return ModuleSearch(runner, source, flat, call, arithmetic.tolerance.passes).compare()


def _compare_states(kept: Path) -> float | None:
    """How far the states of the two encoders are apart; None where they are not both known."""
    import numpy as np

    with np.load(kept) as mine, np.load(kept.with_suffix(".checkpoint.npz")) as theirs:
        if f"{NAME}:states" not in mine.files or "states" not in theirs.files:
            return None
        states, expected = mine[f"{NAME}:states"], theirs["states"]
    if states.shape != expected.shape:
        return None
    apart = measure(states, expected)
    return apart if apart >= 0 else float("inf")


def _read_call(checkpoint: Checkpoint, kept: Path, runner: GraphRunner) -> ModuleCall:
    """What the modules of the checkpoint do with the feeds of the longest call without a cache."""
    import numpy as np

    prefix = f"{NAME}:call."
    with np.load(kept) as file:
        if f"{NAME}:called" not in file.files:
            raise CannotLocate("the feeds of the call were not saved")
        count = int(file[f"{NAME}:called"])
        feeds = {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}
    theirs = kept.with_suffix(".modules.npz")
    facts = checkpoint.modules(kept, theirs, count)
    with np.load(theirs) as found:
        modules = tuple(
            _read_module(found, index, str(names), str(kind))
            for index, (names, kind) in enumerate(zip(found["names"], found["classes"], strict=True))
        )
    theirs.unlink()
    return ModuleCall(modules, str(facts.get("embedding", "")), str(facts.get("head", "")), runner.feeds(feeds))


def _read_module(found: Any, index: int, names: str, kind: str) -> Module:
    given, gave = (found[key] if (key := f"{side}.{index}") in found.files else None for side in ("in", "out"))
    return Module(tuple("" if name == "." else name for name in names.split()), kind, given, gave)
