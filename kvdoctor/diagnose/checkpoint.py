"""Compares the logits of a stack with those of the PyTorch checkpoint from which it was exported.

The worker leaves its feeds and logits in a private file, a process with PyTorch computes the same feeds and leaves its
logits in another, and the two are compared here. Where they differ, the feeds of a call and what the modules of the
checkpoint gave are brought together for `locate.modules`, which finds the first module that differs.
"""

import re
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.analysis.model_folder import read_object
from kvdoctor.decode.parity import Verdict, compare, correlate, judge
from kvdoctor.decode.runs import Outcome, Run, Step
from kvdoctor.decode.tolerances import ALIKE, UNLIKE, Tolerance, find_tolerance
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.locate.graph_runner import SECONDS, GraphRunner
from kvdoctor.diagnose.locate.modules import Module, ModuleCall, ModuleComparison, ModuleSearch, measure
from kvdoctor.diagnose.locate.search import LocateContext, branches_taken, file_of, guard_search
from kvdoctor.diagnose.run_checks import CheckResults, leave_open
from kvdoctor.errors import CannotCheck, UsageError
from kvdoctor.model.precision import ROUNDED
from kvdoctor.records import record
from kvdoctor.runtime.environments import EnvironmentUnavailable, ScriptFailed, ScriptProcess, transformers_for
from kvdoctor.runtime.scratch import ScratchFolder

SCRIPT = Path(__file__).parent.parent / "repair" / "export" / "scripts" / "checkpoint_logits.py"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
NAME = "against-checkpoint"
"""The experiment whose runs these are."""
ROUNDED_WEIGHTS = "rounded"


@record
class Arithmetic:
    """What the graph computes in, and its tolerance: a name of the table, or `rounded` where its weights are."""

    name: str
    tolerance: Tolerance


@dataclass
class Checkpoint:
    """A checkpoint of PyTorch, as the user named it: a folder, or a model of the hub.

    `scratch` is a private folder. The process that runs it starts when it is first needed, and ends with `close`, or
    when nothing refers to the checkpoint any more. Where it cannot be run, `logits` and `modules` raise `CannotCheck`.

    Raises:
        UsageError: what was named is no checkpoint.
    """

    name: str
    offline: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    _script: ScriptProcess | None = None
    _obstacle: str | None = None

    def __post_init__(self) -> None:
        self.is_folder = bool(self.name) and Path(self.name).is_dir()
        if self.is_folder and not (Path(self.name) / "config.json").is_file():
            raise UsageError(f"no config.json in {self.name}; a checkpoint is the folder that save_pretrained wrote")
        if self.name == "CHECKPOINT" and not self.is_folder:
            raise UsageError("CHECKPOINT is a placeholder: give the folder of a checkpoint, or a name on the hub")
        if not self.is_folder and (Path(self.name).exists() or not HUB_NAME.fullmatch(self.name)):
            raise UsageError(f"{self.name!r} is neither the folder of a checkpoint nor the name of a model on the hub")
        self._folder = ScratchFolder()

    @property
    def scratch(self) -> Path:
        """A private folder, gone when the checkpoint is closed."""
        return Path(self._folder.name)

    def close(self) -> None:
        """End the process and remove what it left."""
        if self._script is not None:
            self._script.stop()
        self._folder.cleanup()

    def logits(self, feeds: Path, out: Path) -> dict[str, Any]:
        """Let PyTorch compute the feeds of a run into another file; gives its class and the versions."""
        return self._ask({"feeds": str(feeds), "out": str(out), "prefix": f"{NAME}:"})

    def modules(self, feeds: Path, out: Path, count: int) -> dict[str, Any]:
        """Let PyTorch leave what each module does with the first `count` tokens; gives the embedding and the head."""
        return self._ask({"feeds": str(feeds), "out": str(out), "prefix": f"{NAME}:", "modules": count})

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._obstacle is not None:
            raise CannotCheck(self._obstacle)
        try:
            if self._script is None:
                given = {"checkpoint": self._path, "local": self.is_folder or self.offline}
                # What cannot be read is left to transformers to refuse.
                config = read_object(Path(self.name) / "config.json")[0] if self.is_folder else {}
                self._script = ScriptProcess(SCRIPT, given, transformers_for(config), self.offline)
                weakref.finalize(self, self._script.stop)
            answer = self._script.ask(question)
        except EnvironmentUnavailable as error:
            self._obstacle = str(error)
            raise CannotCheck(self._obstacle) from None
        except ScriptFailed as error:
            shown = str(error).replace(self._path, self.name)
            hint = "; without --offline it may be downloaded" if self.offline and not self.is_folder else ""
            raise CannotCheck(f"{self.name} cannot be run: {shown}{hint}") from None
        self.versions = {name: str(answer[name]) for name in ("torch", "transformers")}
        return answer

    @property
    def _path(self) -> str:
        return str(Path(self.name).absolute()) if self.is_folder else self.name


def compare_with_checkpoint(
    context: ContractContext, checkpoint: Checkpoint, logits: Path
) -> tuple[tuple[Run, ...], CheckResults]:
    """Compare the logits of a stack, stored in the file `logits`, with those of a checkpoint.

    Returns the runs of the stack, one of them with the result, and what is left open or agrees. The user asked for it,
    so that a comparison that cannot be made is essential.
    """
    stack = context.stack.name
    try:
        run = compare_steps(context, logits, checkpoint)
    except CannotCheck as reason:
        return context.runs, leave_open(stack, "KV320", str(reason))
    runs = tuple(run if each.experiment == NAME else each for each in context.runs)
    if run.outcome in ("passed", "differs"):
        return runs, CheckResults(notes=(f"{stack}: {run.reason}",) if run.outcome == "passed" else ())
    unclear = {
        "ambiguous": "the difference is between noise and a fault",
        "failed": f"step {run.failed_step} fails, and only the steps before it were compared with the checkpoint",
    }.get(run.outcome, f"the run is {run.outcome}")
    return runs, leave_open(stack, "KV320", f"{unclear}: {run.reason}")


def compare_steps(context: ContractContext, mine: Path, checkpoint: Checkpoint) -> Run:
    """Compare the run of a stack, whose feeds and logits lie in the file `mine`, with a checkpoint.

    The run comes back with its differences to the checkpoint, and its reason says what was compared.

    Raises:
        CannotCheck: there is nothing to compare, or nothing to compare it with.
    """
    run = context.find_run(NAME)
    if run is None or run.outcome in ("skipped", "died") or not mine.is_file():
        reason = run.reason if run is not None else "no decode step was run"
        raise CannotCheck(f"not compared with {checkpoint.name}: {reason}")
    stored = _load(mine, NAME)
    if "encoder" in stored and not {"encoder_input", "encoder_states"} & stored.keys():
        raise CannotCheck(f"not compared with {checkpoint.name}: its encoder states are synthetic; add its encoder")
    theirs = mine.with_suffix(".checkpoint.npz")
    facts = checkpoint.logits(mine, theirs)
    if "step.0" not in stored:
        raise CannotCheck(f"not compared with {checkpoint.name}: the first call fails, so there are no logits")
    found = _load(theirs)
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    name = f"{facts['model']} of {checkpoint.name} ({versions}, float32)"
    return _judge_steps(run, stored, found, name, find_arithmetic(context))


def _load(file: Path, experiment: str = "") -> dict[str, Any]:
    start = f"{experiment}:" if experiment else ""
    with np.load(file) as held:
        return {name.removeprefix(start): held[name] for name in held.files if name.startswith(start)}


def _judge_steps(run: Run, stored: dict[str, Any], found: dict[str, Any], model: str, arithmetic: Arithmetic) -> Run:
    """Each step with its difference to the checkpoint, and the verdict on all of them."""
    wholes, total, held, correlations = int(stored["wholes"]), int(stored["total"]), [], {}
    for step in run.steps:
        mine = stored.get(f"step.{step.step}")
        if mine is None:
            held.append(step)  # it failed, or was not reached
            continue
        # Where the checkpoint's loop could not be run, the logits are those of the whole sequence.
        source = found["loop"] if step.step >= wholes and "loop" in found else found["whole"]
        longer = step.new_tokens > total
        source = found["longer"] if longer else source[:, step.past_length : step.past_length + step.new_tokens]
        expected = source[:, -mine.shape[1] :]
        if mine.shape != expected.shape:
            text = f"step {step.step}: logits of {list(mine.shape)}, where {model} has {list(expected.shape)}"
            return replace(run, outcome="differs", failed_step=step.step, reason=text, steps=tuple(held))
        correlations[step.step] = correlate(*(side.reshape(-1, side.shape[-1]) for side in (mine, expected)))
        held.append(replace(step, difference=compare(mine, expected, arithmetic.tolerance)))
    if not correlations:
        raise CannotCheck(f"not compared with {model}: no step of the run has logits")
    verdicts, limit = _judge(held, correlations, arithmetic)
    at = next((number for number, verdict in verdicts.items() if verdict == "fail"), None)
    outcome: Outcome = "differs" if at is not None else run.outcome
    if outcome == "passed" and "ambiguous" in verdicts.values():
        outcome = "ambiguous"
    text = f"{_list_compared(held, wholes, total)} against {model}: {_describe_difference(held, at)}; {limit}"
    apart = _compare_states(stored, found)
    text += f"; encoder states within {apart:.1e} standard deviations" if apart is not None else ""
    failed = run.failed_step if at is None else at
    return replace(run, outcome=outcome, failed_step=failed, reason=text, steps=tuple(held))


def find_arithmetic(context: ContractContext) -> Arithmetic:
    """What a stack computes in, by its operators."""
    files = context.stack.files.values()
    operators = {name for file in files if file.view is not None for name in file.view.operators}
    if any(ROUNDED.search(name) for name in operators):
        return Arithmetic(ROUNDED_WEIGHTS, find_tolerance("float", context.tolerances))
    return Arithmetic(context.contract.exactness, context.tolerance)


def _judge(steps: list[Step], correlations: dict[int, float], arithmetic: Arithmetic) -> tuple[dict[int, Verdict], str]:
    """The verdict on each step, and why: by the tolerances of the other runs; one for all of rounded weights."""
    limit, seen = arithmetic.tolerance, {one.step: one.difference for one in steps if one.difference is not None}
    if arithmetic.name != ROUNDED_WEIGHTS:
        return {step: judge(one, limit) for step, one in seen.items()}, f"{arithmetic.name} allows {limit.passes:g}"
    mean, finite = sum(correlations.values()) / max(len(correlations), 1), all(one.finite for one in seen.values())
    verdict: Verdict = "fail" if mean < UNLIKE or not finite else "pass" if mean >= ALIKE else "ambiguous"
    text = f"their correlation is {mean:.3f}, and rounded weights allow {ALIKE:g} or more"
    return dict.fromkeys(correlations, verdict), text


def _describe_difference(steps: list[Step], failed: int | None) -> str:
    differences = [step.difference for step in steps if step.difference is not None]
    if not all(difference.finite for difference in differences):
        return "logits not finite"
    worst = max((difference.relative for difference in differences), default=0.0)
    if failed is None:
        return f"logits within {worst:.1e} standard deviations"
    return f"logits off by {worst:.2g} standard deviations, first at step {failed}"


def _list_compared(steps: list[Step], wholes: int, total: int) -> str:
    """What was compared, as text: `the whole sequence of 11 tokens, a prefill of 3 and 8 steps of the held loop`."""
    compared = [step for step in steps if step.difference is not None]
    done = [step for step in compared if step.new_tokens <= total]
    whole, loop = [s for s in done if s.step < wholes], [s for s in done if s.step >= wholes]
    parts = [f"the whole sequence of {whole[-1].new_tokens} tokens"] if whole else []
    if loop:
        parts.append(f"a prefill of {loop[0].new_tokens} and {len(loop) - 1} steps of the held loop")
    parts += [f"{step.new_tokens} tokens in one call" for step in compared if step.new_tokens > total]
    return ", ".join(parts) or "no step"


def locate_in_modules(
    run: Run, context: LocateContext, checkpoint: Checkpoint, saved: Path, arithmetic: Arithmetic
) -> Run:
    """The run that differs with its parts and its location, or why there is none; `saved` has the feeds."""

    def locate() -> Run:
        found = _compare(run, context, checkpoint, saved, arithmetic)
        missing = found.reason
        apart = _compare_states(_load(saved, NAME), _load(saved.with_suffix(".checkpoint.npz"))) if missing else None
        if apart is not None and apart > arithmetic.tolerance.passes:
            states = f"its states are off by {apart:.2g} standard deviations"
            missing = f"the encoder differs: {states}; on the same states the modules of the decoder agree"
        return replace(run, parts=found.parts, location=found.location, no_location=missing)

    return guard_search(run, locate)


def _compare(
    run: Run, context: LocateContext, checkpoint: Checkpoint, saved: Path, arithmetic: Arithmetic
) -> ModuleComparison:
    failed = run.wrong_step
    if failed is None:
        raise CannotCheck("the logits have a different shape, so intermediate values cannot be compared")
    if failed.past_length:
        raise CannotCheck("the logits differ with the cache only, and modules are compared in a call without one")
    if arithmetic.name == ROUNDED_WEIGHTS or "quantization" in arithmetic.name:
        raise CannotCheck("weights or activations are rounded to 8 bits or fewer, so every module differs")
    if context.stack.stages:
        raise CannotCheck("the decoder is a pipeline of several files, in which no node is searched for")
    runner = GraphRunner(context.runtime, context.calls, context.provider, time.monotonic() + SECONDS)
    flat = runner.flatten(file_of(context, "prefill"), branches_taken(context, "prefill"))
    call = _read_call(checkpoint, saved, runner, failed.new_tokens)
    return ModuleSearch(runner, flat, call, arithmetic.tolerance.passes).compare()


def _compare_states(stored: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """How far the states of the two encoders are apart; None where they are not both known."""
    states, expected = stored.get("states"), found.get("states")
    if states is None or expected is None or states.shape != expected.shape:
        return None
    apart = measure(states, expected)
    return apart if apart >= 0 else float("inf")


def _read_call(checkpoint: Checkpoint, saved: Path, runner: GraphRunner, failed: int) -> ModuleCall:
    """What the modules of the checkpoint do with the feeds of a call that shows the fault of `failed` tokens."""
    stored = _load(saved, NAME)
    if "called" not in stored:
        raise CannotCheck("the feeds of the call were not saved")
    if failed > int(stored["called"]):
        raise CannotCheck(f"the logits differ in a call of {failed} tokens, which is too long to compare modules in")
    feeds = {name.removeprefix("call."): held for name, held in stored.items() if name.startswith("call.")}
    theirs = saved.with_suffix(".modules.npz")
    facts = checkpoint.modules(saved, theirs, int(stored["called"]))
    found = _load(theirs)
    theirs.unlink()
    modules = []
    for index, (listed, kind) in enumerate(zip(found["names"], found["classes"], strict=True)):
        names = tuple("" if name == "." else name for name in str(listed).split())
        modules.append(Module(names, str(kind), found.get(f"in.{index}"), found.get(f"out.{index}")))
    embedding, head = (str(facts.get(name, "")) for name in ("embedding", "head"))
    return ModuleCall(tuple(modules), embedding, head, runner.feeds(feeds))
