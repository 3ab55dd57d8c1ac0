"""Drives experiments on one stack: answers their calls, records the steps, and judges what came back."""

import time
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.decode.calls import (
    TOO_SHORT,
    Answer,
    Array,
    Call,
    Conditions,
    ControlFailed,
    Scenario,
    StepFailed,
    Unanswered,
    Value,
    as_array,
    save_call,
    take_sample,
)
from kvdoctor.decode.experiments import Experiment
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import CallStarting, CallTimed, StepDone
from kvdoctor.decode.parity import compare, judge, measurable, slot_difference
from kvdoctor.decode.runs import (
    LOOPS,
    Cause,
    Control,
    LogitsDifference,
    ObservedTensor,
    Outcome,
    Run,
    Step,
)
from kvdoctor.decode.speed import middle
from kvdoctor.decode.stack_driver import Rerun, StackDriver, UnusableLogits
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.errors import CannotCheck

TIMING_REPEATS = 5
TIMING_SECONDS = 0.1


@dataclass
class ExperimentRunner:
    """Runs experiments one after the other.

    Attributes:
        keep_logits: Keep the logits of each experiment in `logits`.
        keep_calls: A folder for the feeds of the first bad call of each judged experiment.
        keep_step: The step whose calls that folder receives before they run.
        timed: Repeat the calls whose time is measured.
    """

    stack: StackDriver
    conditions: Conditions = field(default_factory=Conditions)
    keep_logits: bool = False
    keep_calls: Path | None = None
    keep_step: int | None = None
    timed: bool = True
    logits: dict[str, Array] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, experiment: Experiment) -> Run:
        """Put one experiment to the model."""
        scenario = self.stack.fit_scenario(experiment.scenario)
        if (reason := self._find_skip_reason(experiment, scenario)) is not None:
            return self.make_run(experiment, "skipped", reason=reason)
        run = _ExperimentRun(self, experiment, scenario).perform()
        if isinstance(run, UnusableLogits):
            before = self.stack.contract
            self.stack.correct_logits()
            if self.stack.contract == before:
                return self.make_run(experiment, "inconclusive", reason=run.reason)
            return self.run(experiment)
        self.outcomes[experiment.name] = run.outcome
        return run

    def _find_skip_reason(self, experiment: Experiment, scenario: Scenario) -> str | None:
        if experiment.unless_passed and self.outcomes.get(experiment.unless_passed) == "passed":
            return f"{experiment.unless_passed} passed"
        if experiment.explains and "differs" not in map(self.outcomes.get, experiment.explains):
            return "no run that it would explain has wrong logits"
        if (reason := experiment.applies(self.stack.contract)) is not None:
            return reason
        return TOO_SHORT if scenario.steps < 2 else None

    def make_run(self, experiment: Experiment, outcome: Outcome, **more: Any) -> Run:
        """A run as it is sent: its steps were sent before it."""
        where = self.stack.environment
        return Run(
            stack=self.stack.stack,
            experiment=experiment.name,
            target=where.target,
            provider=where.provider,
            level=where.level,
            outcome=outcome,
            **more,
        )


class _ExperimentRun:
    """One experiment in progress."""

    def __init__(self, runner: ExperimentRunner, experiment: Experiment, scenario: Scenario) -> None:
        self.runner, self.stack, self.contract = runner, runner.stack, runner.stack.contract
        self.experiment, self.scenario = experiment, scenario
        self.tolerance = find_tolerance(self.contract.exactness, runner.conditions.tolerances)
        self.steps: list[Step] = []
        self.controls: list[Control] = []
        self.logits: list[Array] = []
        self.used: set[bytes] = set()
        self.noise = 0.0
        self.call_kept = self.undefined = False
        self.broken: Call | None = None
        self.builder: FeedBuilder | None = None

    def perform(self) -> Run | UnusableLogits:
        """Drive the generator to its end or to the first failure.

        Returns:
            The run; or logits by which the contract has to be corrected before the experiment is run.
        """
        run = self._drive()
        keeps, name, kept = self.experiment.keeps, self.experiment.name, self.runner.logits
        if isinstance(run, UnusableLogits):
            return run
        if self.runner.keep_logits and keeps is not None and self.builder is not None:  # also where it ended early
            kept |= {f"{name}:{key}": array for key, array in keeps(self.builder, self.logits).items()}
        elif self.logits and name not in kept:
            kept[name] = np.concatenate([part.ravel() for part in self.logits])
        return run

    def _drive(self) -> Run | UnusableLogits:
        call = None
        try:
            conditions = {one.name: getattr(self.runner.conditions, one.name) for one in fields(Conditions)}
            self.builder = self.stack.build(self.scenario, **conditions)
            calls = self.experiment.calls(self.builder)
            call = next(calls)
            while True:
                answer = self._answer(call)
                if isinstance(answer, UnusableLogits):
                    if answer.undeclared:
                        return answer
                    return self._make_run("differs", failed_step=max(len(self.steps) - 1, 0), reason=answer.reason)
                call = calls.send(answer)
        except StopIteration as end:
            return self._finish(end.value)
        except Unanswered:
            return self._finish(None)
        except ControlFailed as reason:
            return self._leave_open("inconclusive", str(reason))
        except CannotCheck as reason:
            return self._leave_open("skipped", str(reason))
        except StepFailed as error:
            return self._fail(call, str(error))

    def _answer(self, call: Call) -> Answer | UnusableLogits:
        self.stack.announce(CallStarting(self.experiment.name, len(self.steps), call.kind))
        if self.runner.keep_calls is not None and self.runner.keep_step == len(self.steps):
            save_call(self.runner.keep_calls / f"{self.experiment.name}-last-{call.phase}.npz", call.feeds)
        if call.kind == "timing":
            return self._run_timed(call)
        if call.kind == "control":
            return self._run_control(call)
        if call.kind == "noise":
            return self._measure_noise(call)
        if call.kind in ("probe", "trial"):
            return self._probe(call)
        answer = self._run(call)
        if isinstance(answer, UnusableLogits):
            return answer
        self._check_finite(answer, call)
        unusable = self._record_step(call, answer) if call.kind == "step" else None
        return unusable or answer

    def _run(self, call: Call) -> Answer | UnusableLogits:
        """Run a call. Nothing is reused after an equal call had another answer."""
        used = self.used
        if self.runner.outcomes.get("same-feed", "passed") != "passed":
            self.stack.known.clear()
        if call.kind in ("reference", "trial"):
            return self.stack.run_reference(call, used)
        return self.stack.run_once(call, used)

    def _record_step(self, call: Call, answer: Answer | None) -> UnusableLogits | None:
        """Record a step, and send it at once, since a crash may follow.

        Returns:
            Its logits, if their shape is wrong.
        """
        step, unusable = self._make_step(call, answer), None
        if answer is not None and self.stack.logits_name(call.phase) in answer.outputs:
            difference = self._compare(call, answer)
            if isinstance(difference, UnusableLogits):
                unusable = difference
            else:
                step = replace(step, difference=difference, slots=_compare_slots(call, answer))
                if difference and judge(difference, self.tolerance, self.noise) == "fail":
                    self._keep_call(call, reference=True)
                if self.runner.keep_logits:
                    self.logits.append(answer.logits)
        self.steps.append(step)
        self.stack.announce(StepDone(step))
        return unusable

    def _make_step(self, call: Call, answer: Answer | None) -> Step:
        fed = {name: _describe(value) for name, value in call.feeds.items()}
        returned = {} if answer is None else {name: _describe(value) for name, value in answer.outputs.items()}
        return Step(
            step=len(self.steps),
            phase=call.phase if call.kind != "reference" else "reference",
            past_length=call.past,
            new_tokens=call.new,
            fed=fed,
            returned=returned,
            empty=tuple(name for name, tensor in returned.items() if tensor.empty),
            null_pointer=tuple(name for name, tensor in returned.items() if tensor.null),
        )

    def _compare(self, call: Call, answer: Answer) -> LogitsDifference | UnusableLogits | None:
        """Compare the logits of the last positions with those that the call expects, if it expects any."""
        if call.expected is None:
            return None
        if call.sampled:
            return compare(take_sample(answer.logits).reshape(1, 1, -1), call.expected, self.tolerance)
        logits, returned = answer.logits, 1 if self.contract.last_logits_only else call.new
        expected = (call.expected.shape[0], returned, call.expected.shape[2])
        if logits.shape not in (expected, call.expected.shape):
            return UnusableLogits(f"logits have shape {list(logits.shape)}, not {list(expected)}")
        count = min(logits.shape[1], call.expected.shape[1])
        return compare(logits[:, -count:], call.expected[:, -count:], self.tolerance)

    def _run_control(self, call: Call) -> Answer:
        """A corrupted call must change the logits; a call that fails is visible as well."""
        try:
            answer = self.stack.run_once(call, self.used)
            difference = self._compare(call, answer)
        except StepFailed:
            answer, difference = Answer({}, ""), UnusableLogits("the call fails")
        if isinstance(difference, UnusableLogits):
            self.controls.append(Control(call.label, visible=True, difference=None))
            return Answer({}, "")
        visible = difference is None or judge(difference, self.tolerance, self.noise) == "fail"
        self.controls.append(Control(call.label, visible, difference))
        return answer

    def _measure_noise(self, call: Call) -> Answer | UnusableLogits:
        """Keep the largest difference that splitting a sequence makes without a cache."""
        answer = self.stack.run_once(call, self.used)
        difference = self._compare(call, answer)
        if isinstance(difference, UnusableLogits):
            return difference
        if difference is not None and difference.finite:
            self.noise = max(self.noise, difference.relative)
        return answer

    def _probe(self, call: Call) -> Answer | UnusableLogits:
        """A call that may fail: a reference call (a trial), whose answer is reused, or any other."""
        try:
            answer = self._run(call)
        except StepFailed:
            return Answer({}, "")
        if not isinstance(answer, UnusableLogits):
            self._check_finite(answer, call)
        return answer

    def _check_finite(self, answer: Answer, call: Call) -> None:
        """Remember whether any logits cannot be compared, and the first right call with such logits.

        Where logits are expected, comparing them says more: those of padding count for nothing.
        """
        if answer.logits_name in answer.outputs and not measurable(answer.logits):
            self.undefined = True
            right = call.kind in ("step", "reference") and call.expected is None
            if right and (self.experiment.use or self.experiment.name in LOOPS):
                self.broken = self.broken or call

    def _leave_open(self, outcome: Outcome, reason: str | None) -> Run:
        """A run that shows no fault, unless a right call gave logits that are not finite."""
        if self.broken is None:
            return self._make_run(outcome, reason=reason)
        seen = f"the logits of {self.broken.new} new tokens after {self.broken.past} are not finite"
        return self._make_run("differs", reason=seen, cause=Cause("non-finite", seen))

    def _run_timed(self, call: Call) -> Answer:
        """Median seconds of up to five runs within a tenth of a second; the same call was run before."""
        if not self.runner.timed:
            return self.stack.run_session(call)
        seconds: list[float] = []
        while len(seconds) < TIMING_REPEATS and (not seconds or sum(seconds) < TIMING_SECONDS):
            begin = time.perf_counter()
            answer = self.stack.run_session(call)
            seconds.append(time.perf_counter() - begin)
        self.stack.announce(CallTimed(call.label, middle(seconds)))
        return answer

    def _finish(self, cause: Cause | None) -> Run:
        if self.undefined and (cause.name != "non-finite" if cause is not None else not self.steps):
            return self._leave_open("inconclusive", "logits are not finite: no cause can be decided")
        if cause is not None:
            return self._make_run("differs", reason=cause.evidence, cause=cause)
        if self.experiment.explains:
            return self._make_run("inconclusive", reason="no hypothesis predicts what was observed")
        exactness, noise = self.contract.exactness, self.noise
        effects = [control.difference.relative for control in self.controls if control.difference]
        if exactness == "dynamic-quantization" and effects:
            # It rounds the cached values differently at every split, and the error grows with the steps: only a
            # difference near the effect of a corrupted cache counts as a fault.
            noise = max(noise, min(effects) / 8)
        verdicts = [judge(step.difference, self.tolerance, noise) if step.difference else "pass" for step in self.steps]
        cached = any(step.phase == "decode" for step in self.steps)
        if exactness.endswith("quantization") and cached and 2 * verdicts.count("fail") <= len(verdicts):
            # Its noise has a heavy tail: one step may be far off, and the next, on the same cache, right again.
            verdicts = ["ambiguous" if verdict == "fail" else verdict for verdict in verdicts]
        seen = {control.corrupted for control in self.controls if control.visible}
        unseen = list(dict.fromkeys(control.corrupted for control in self.controls if control.corrupted not in seen))
        if "fail" in verdicts:
            return self._make_run("differs", failed_step=verdicts.index("fail"))
        if unseen:
            verb = "does" if len(unseen) == 1 else "do"
            reason = f"control failed: {' and '.join(unseen)} {verb} not change the logits more than their noise"
            return self._leave_open("inconclusive", reason)
        return self._leave_open("ambiguous" if "ambiguous" in verdicts else "passed", None)

    def _fail(self, call: Call | None, error: str) -> Run:
        if call is None:
            return self._make_run("failed", error=error, failed_step=0)
        self._record_step(call, None)
        self._keep_call(call)
        rerun = self.stack.rerun(call) if self.experiment.judged else Rerun()
        return self._make_run(
            "failed",
            failed_step=len(self.steps) - 1,
            error=error,
            reason=rerun.reason,
            passes_with=rerun.passes_with,
            node_names=rerun.node_names,
        )

    def _keep_call(self, call: Call, reference: bool = False) -> None:
        """Save the feeds of the first bad call, and of the call without a cache that ends with the same token."""
        folder = self.runner.keep_calls
        if folder is None or self.call_kept or not self.experiment.judged:
            return
        self.call_kept = True
        save_call(folder / f"{self.experiment.name}.npz", call.feeds)
        stop = call.new + (call.past if call.phase == "decode" else 0)
        reference = reference and not self.experiment.changes_feeds and self.contract.new_tokens is None
        if reference and self.builder is not None and stop <= self.builder.scenario.total:
            save_call(folder / f"{self.experiment.name}-reference.npz", self.builder.reference(stop).feeds)

    def _make_run(self, outcome: Outcome, **more: Any) -> Run:
        return self.runner.make_run(self.experiment, outcome, controls=tuple(self.controls), **more)


def _compare_slots(call: Call, answer: Answer) -> dict[str, float]:
    """How far presents are from the slots that the call expects."""
    gaps = {
        name: slot_difference(answer.outputs[name].array(), as_array(expected))
        for name, expected in call.slots.items()
        if name in answer.outputs and answer.outputs[name].shape == expected.shape
    }
    return {name: gap for name, gap in gaps.items() if gap is not None}


def _describe(value: Value | Array) -> ObservedTensor:
    observed = getattr(value, "observed", None)
    if isinstance(observed, ObservedTensor):
        return observed
    array = as_array(value)
    return ObservedTensor(_name_dtype(array.dtype), tuple(array.shape))


@lru_cache
def _name_dtype(dtype: np.dtype[Any]) -> str:
    """ONNX's name of a numpy type. Cached, since numpy builds its own name each time it is asked."""
    return {"float32": "float", "float64": "double"}.get(dtype.name, str(dtype.name))
