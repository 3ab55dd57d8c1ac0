"""One stack under examination: drives experiments in the worker process and notes what came back."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Encoded, Scenario, TooShort, Value, as_array
from kvdoctor.contract import CacheContract, with_last_logits_only
from kvdoctor.encoding import encoder_feeds, synthetic_cross_caches, synthetic_encoder_states
from kvdoctor.experiments import Experiment
from kvdoctor.experiments.rows import growing
from kvdoctor.feeds import Deal
from kvdoctor.kept_calls import save_call
from kvdoctor.parity import compare, error_growth, judge, measurable, slot_difference
from kvdoctor.plain import to_plain
from kvdoctor.samples import Samples
from kvdoctor.sessions import (
    LEVELS,
    Announce,
    OrtTensor,
    Refused,
    Sessions,
    StepFailed,
    mentioned,
    output_names,
    run_bound,
    runtime_version,
    to_runtime,
)
from kvdoctor.trace import Cause, Control, Difference, ErrorGrowth, Outcome, Run, Seen, Step

TIMING_REPEATS = 5
TIMING_SECONDS = 0.1
ENCODER_FACTORS = (1, 40, 400)
"""Longer inputs are tried where an encoder refuses a short one: speech is sampled many times for each state."""


SHORT = "the context is too short for it"


class LastLogitsOnly(Exception):
    """A reference run gave the logits of the last token alone: what was begun must begin anew."""


class WrongLogits(Exception):
    """The logits came back in a shape that the reference run does not have."""


@dataclass
class Examination:
    """All experiments on one stack: sessions, encoder states and reference runs are shared between them."""

    stack: str
    contract: CacheContract
    sessions: Sessions
    seed: int
    announce: Announce
    keep_logits: bool = False
    samples: Samples = field(default_factory=Samples)
    timed: bool = True
    references: dict[bytes, Answer] = field(default_factory=dict)
    encoded: dict[Scenario, Encoded] = field(default_factory=dict)
    logits: dict[str, Array] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    kept_calls: Path | None = None

    def run(self, experiment: Experiment) -> Run:
        """Put one experiment to the model."""
        reason = experiment.applies(self.contract)
        scenario = self._fitted(replace(experiment.scenario, seed=self.seed))
        if reason is None and scenario.steps < 2:
            reason = SHORT
        if experiment.asks_why and "differs" not in map(self.outcomes.get, experiment.asks_why):
            reason = "nothing differs"
        if experiment.unless_passed and self.outcomes.get(experiment.unless_passed) == "passed":
            reason = f"{experiment.unless_passed} passed"
        if reason is not None:
            return self.result(experiment, "skipped", reason=reason)
        run = _Performance(self, experiment, scenario).perform()
        self.outcomes[experiment.name] = run.outcome
        return run

    def call(self, call: Call) -> Answer:
        """Run a call; the answer to an equal reference call is reused.

        Raises:
            StepFailed: the runtime failed.
            Refused: the file does not open.
            WrongLogits: a reference run gives logits of another rank than 3.
            LastLogitsOnly: it gives those of the last token, where the contract says all; the contract is put right.
        """
        if call.kind != "reference":
            return self.run_session(call)
        key = _digest(call.feeds)
        if key not in self.references:
            answer = self.run_session(call)
            shape = answer.outputs[self.logits_name("prefill")].shape
            if len(shape) == 0 or len(answer.logits.shape) != 3:
                raise WrongLogits(f"logits have shape {list(shape)}, not [batch, new, vocabulary]")
            if call.new > 1 and answer.logits.shape[1] == 1 and not self.contract.last_logits_only:
                self.contract = with_last_logits_only(self.contract)
                text = "only the last token's logits are returned, where the graph declares those of every new token"
                self.announce("note", text=text)
                raise LastLogitsOnly
            names = {self.logits_name("prefill"), *(slot.filled_by for slot in growing(self.contract))}
            kept = {name: value for name, value in answer.outputs.items() if name in names}
            self.references[key] = replace(answer, outputs=kept)
        return self.references[key]

    def run_session(self, call: Call, session: Any = None) -> Answer:
        """Run a call in the session of its phase, or in the one given."""
        file = self.contract.graph(call.phase).file
        session = session or (self.sessions.at(file, call.via) if call.via in LEVELS else self.sessions.get(file))
        names = output_names(session)
        feeds = {name: to_runtime(value) for name, value in call.feeds.items()}
        try:
            run = run_bound if call.via == "io-binding" else session.__class__.run_with_ort_values
            values = run(session, names, feeds)
        except Exception as error:  # the bindings raise many types, and all of them are a failed step
            raise StepFailed(self.sessions.clean(error)) from error
        outputs: dict[str, Value] = {name: OrtTensor(v) for name, v in zip(names, values, strict=True)}
        return Answer(outputs, self.logits_name(call.phase), call.past, call.new)

    def logits_name(self, phase: str) -> str:
        """The name of the logits output; an encoder has none."""
        port = self.contract.graph(phase).port("logits")  # type: ignore[arg-type]
        return port.name if port else ""

    def encode(self, scenario: Scenario) -> Encoded:
        """What the encoder gives for a scenario: by the encoder file, else made up."""
        key = Scenario(batch=scenario.batch, encoder=scenario.encoder, seed=scenario.seed)
        if key not in self.encoded:
            self.encoded[key] = self._encode(key)
        return self.encoded[key]

    def _encode(self, scenario: Scenario) -> Encoded:
        made_up = Encoded(self._states(scenario), synthetic_cross_caches(self.contract, scenario))
        if "encode" not in self.contract.phases:
            return made_up
        answer, error = None, ""
        for factor in ENCODER_FACTORS:
            longer = replace(scenario, encoder=scenario.encoder * factor)
            made = encoder_feeds(self.contract, longer)
            fed = {name: self.samples.laid_over(name, array) for name, array in made.items()}
            try:
                answer = self.run_session(Call("encode", fed, 0, longer.encoder))
                break
            except (StepFailed, Refused) as refusal:
                error = error or str(refusal)
        if answer is None:
            self.announce("note", text=f"the encoder file could not be fed ({error}); what it gives is made up")
            return made_up
        port = self.contract.graph("encode").port("encoder_states")
        states = answer.outputs[port.name].array() if port else None
        if made_up.states is not None and (states is None or states.ndim != 3):
            self.announce("note", text="the encoder file returns no states of rank 3; its states are made up")
            states = made_up.states
        kept = {name: answer.outputs[name].array() for name in made_up.outputs if name in answer.outputs}
        if made_up.states is None:
            return Encoded(None, kept, fed)
        return Encoded(states, kept, fed if states is not made_up.states else {})

    def _states(self, scenario: Scenario) -> Array | None:
        """Encoder states that no encoder file makes."""
        made = synthetic_encoder_states(self.contract, scenario)
        ports = (port for graph in self.contract.graphs.values() for port in graph.inputs)
        port = next((port for port in ports if port.role == "encoder_states"), None)
        return made if made is None or port is None else self.samples.laid_over(port.name, made)

    def _sized_as_given(self, scenario: Scenario) -> Scenario:
        """The usual sizes are those of what the user gives; other sizes are asked for on purpose."""
        usual, prompt, encoder = Scenario(), len(self.samples.prompt), None
        for graph in self.contract.graphs.values():
            for port in graph.inputs:
                axis = next((axis for axis in ("encoder_input", "encoder") if axis in port.axes), None)
                if axis is not None and port.role in ("encoder_input", "encoder_states"):
                    encoder = encoder or self.samples.length(port.name, port.axes.index(axis))
        return replace(
            scenario,
            prompt=prompt if prompt and scenario.prompt == usual.prompt else scenario.prompt,
            encoder=encoder if encoder and scenario.encoder == usual.encoder else scenario.encoder,
        )

    def _fitted(self, scenario: Scenario) -> Scenario:
        contract, scenario = self.contract, self._sized_as_given(scenario)
        scenario = replace(
            scenario,
            batch=contract.fixed_batch or scenario.batch,
            encoder=contract.encoder_length or scenario.encoder,
            prompt=contract.frozen_past or scenario.prompt,
        )
        if self.contract.new_tokens is not None:
            scenario = replace(scenario, prompt=min(scenario.prompt, self.contract.new_tokens))
        limit = self.contract.usable_length
        steps = scenario.steps if limit is None else min(scenario.steps, limit - scenario.prompt)
        return replace(scenario, steps=steps)

    def result(self, experiment: Experiment, outcome: Outcome, **more: Any) -> Run:
        """A run as it is sent: its steps have gone ahead of it."""
        file = self.contract.graph("decode").file
        return Run(
            stack=self.stack,
            experiment=experiment.name,
            target=f"onnxruntime=={runtime_version()}",
            provider=self.sessions.provider,
            level=self.sessions.levels.get(file, "all"),
            outcome=outcome,
            **more,
        )


class _Performance:
    """One experiment under way."""

    def __init__(self, exam: Examination, experiment: Experiment, scenario: Scenario) -> None:
        self.exam, self.experiment, self.scenario = exam, experiment, scenario
        self.steps: list[Step] = []
        self.controls: list[Control] = []
        self.logits: list[Array] = []
        self.noise = 0.0
        self.kept = self.undefined = False
        self.deal: Deal | None = None

    def perform(self) -> Run:
        """Drive the generator to its end or to the first failure."""
        call = None
        try:
            encoded = self.exam.encode(self.scenario)
            deal = self.deal = Deal(self.exam.contract, self.scenario, encoded, samples=self.exam.samples)
            calls = self.experiment.calls(deal)
            call = next(calls)
            while True:
                call = calls.send(self._answer(call))
        except StopIteration as end:
            return self._finish(end.value)
        except LastLogitsOnly:
            return self.exam.run(self.experiment)
        except TooShort:
            return self._result("skipped", reason=SHORT)
        except Refused as error:
            return self._result("skipped", reason=f"the runtime does not open {error}")
        except StepFailed as error:
            return self._failed(call, str(error))
        except WrongLogits as error:
            return self._result("differs", failed_step=max(len(self.steps) - 1, 0), reason=str(error))
        finally:
            self._leave()

    def _leave(self) -> None:
        """Leave in the scratch file what the experiment keeps, as far as it came."""
        keeps, name = self.experiment.keeps, self.experiment.name
        if self.exam.keep_logits and keeps is not None and self.deal is not None:
            self.exam.logits |= {f"{name}:{key}": array for key, array in keeps(self.deal, self.logits).items()}
        elif self.logits and name not in self.exam.logits:
            self.exam.logits[name] = np.concatenate([part.ravel() for part in self.logits])

    def _answer(self, call: Call) -> Answer:
        exam = self.exam
        exam.announce("step", experiment=self.experiment.name, step=len(self.steps), call=call.kind)
        if call.kind == "timing":
            return self._timed(call)
        if call.kind == "control":
            return self._control(call)
        if call.kind == "noise":
            return self._noise(call)
        if call.kind == "probe":
            return self._probe(call)
        answer = exam.call(call)
        self._look_at(answer)
        if call.kind == "step":
            self._note(call, answer)
        return answer

    def _note(self, call: Call, answer: Answer | None) -> None:
        """Put a step on record, and tell the parent at once: what is known must outlive this process."""
        step = self._step(call, answer)
        try:
            if answer is not None and self.exam.logits_name(call.phase) in answer.outputs:
                step = replace(step, difference=self._difference(call, answer), slots=_slots(call, answer))
                if step.difference and judge(step.difference, self.exam.contract.exactness, self.noise) == "fail":
                    self._keep(call, reference=True)
                if self.exam.keep_logits:
                    self.logits.append(answer.logits)
        finally:
            self.steps.append(step)
            self.exam.announce("stepped", step=to_plain(step))

    def _step(self, call: Call, answer: Answer | None) -> Step:
        fed = {name: _seen(value) for name, value in call.feeds.items()}
        returned = {} if answer is None else {name: _seen(value) for name, value in answer.outputs.items()}
        return Step(
            step=len(self.steps),
            phase=call.phase if call.kind != "reference" else "reference",
            past_length=call.past,
            new_tokens=call.new,
            fed=fed,
            returned=returned,
            empty=tuple(name for name, seen in returned.items() if seen.empty),
            null_pointer=tuple(name for name, seen in returned.items() if seen.null),
        )

    def _difference(self, call: Call, answer: Answer) -> Difference | None:
        """Hold the logits of the last positions against what the call expects.

        Raises:
            WrongLogits: their shape differs.
        """
        if call.expected is None:
            return None
        logits, given = answer.logits, 1 if self.exam.contract.last_logits_only else call.new
        wanted = (call.expected.shape[0], given, call.expected.shape[2])
        if logits.shape != wanted:
            raise WrongLogits(f"logits have shape {list(logits.shape)}, not {list(wanted)}")
        count = min(given, call.expected.shape[1])
        return compare(logits[:, -count:], call.expected[:, -count:], self.exam.contract.exactness)

    def _control(self, call: Call) -> Answer:
        """A spoilt call must move the logits. One that fails is seen as well."""
        try:
            answer = self.exam.run_session(call)
            difference = self._difference(call, answer)
        except (StepFailed, WrongLogits):
            self.controls.append(Control(call.label, visible=True, difference=None))
            return Answer({}, "")
        visible = difference is None or judge(difference, self.exam.contract.exactness, self.noise) == "fail"
        self.controls.append(Control(call.label, visible, difference))
        return answer

    def _noise(self, call: Call) -> Answer:
        """Remember the largest difference that splitting a sequence makes without a cache."""
        answer = self.exam.run_session(call)
        difference = self._difference(call, answer)
        if difference is not None and difference.finite:
            self.noise = max(self.noise, difference.relative)
        return answer

    def _probe(self, call: Call) -> Answer:
        try:
            answer = self.exam.run_session(call)
        except StepFailed:
            return Answer({}, "")
        self._look_at(answer)
        return answer

    def _look_at(self, answer: Answer) -> None:
        """Remember whether any logits had no distance to others: then nothing that rests on them is decided."""
        if answer.logits_name in answer.outputs:
            self.undefined = self.undefined or not measurable(answer.logits)

    def _timed(self, call: Call) -> Answer:
        """Median seconds of up to five runs within a tenth of a second; the same call was run before."""
        if not self.exam.timed:
            return self.exam.run_session(call)
        seconds: list[float] = []
        while len(seconds) < TIMING_REPEATS and (not seconds or sum(seconds) < TIMING_SECONDS):
            begin = time.perf_counter()
            answer = self.exam.run_session(call)
            seconds.append(time.perf_counter() - begin)
        self.exam.announce("timing", stack=self.exam.stack, label=call.label, seconds=statistics.median(seconds))
        return answer

    def _finish(self, cause: Cause | None) -> Run:
        if self.undefined and (cause is not None or not self.steps):
            return self._result("inconclusive", reason="logits are not finite: what changes them cannot be told")
        if cause is not None:
            return self._result("differs", reason=cause.evidence, cause=cause)
        if self.experiment.asks_why:
            return self._result("inconclusive", reason="no hypothesis predicts what was seen")
        exactness, noise = self.exam.contract.exactness, self._noise_floor()
        verdicts = [judge(step.difference, exactness, noise) if step.difference else "pass" for step in self.steps]
        if exactness.endswith("quantisation") and 2 * verdicts.count("fail") <= len(verdicts):
            # Its noise has a heavy tail: one step may be far off, and the next, on the same cache, right again.
            verdicts = ["ambiguous" if verdict == "fail" else verdict for verdict in verdicts]
        unseen = [control.spoilt for control in self.controls if not control.visible]
        if "fail" in verdicts:
            return self._result("differs", failed_step=verdicts.index("fail"))
        if unseen:
            reason = f"no power: {' and '.join(unseen)} does not change the logits more than their noise"
            return self._result("inconclusive", reason=reason)
        return self._result("ambiguous" if "ambiguous" in verdicts else "passed")

    def _noise_floor(self) -> float:
        """What differences without a fault may grow to, as a fraction of the spread.

        Dynamic quantisation rounds what is kept in the cache another way at every split, and the error grows with the
        steps: there only what comes near to the effect of a spoilt cache counts as a fault.
        """
        effects = [control.difference.relative for control in self.controls if control.difference]
        if self.exam.contract.exactness != "dynamic-quantisation" or not effects:
            return self.noise
        return max(self.noise, min(effects) / 8)

    def _failed(self, call: Call | None, error: str) -> Run:
        if call is None:
            return self._result("failed", error=error, failed_step=0)
        self._note(call, None)
        self._keep(call)
        located = self._locate(call) if self.experiment.judged else {}
        return self._result("failed", failed_step=len(self.steps) - 1, error=error, **located)

    def _keep(self, call: Call, reference: bool = False) -> None:
        """Leave the feeds of the first bad call, and of the call without a cache that ends with the same token."""
        folder = self.exam.kept_calls
        if folder is None or self.kept or not self.experiment.judged:
            return
        self.kept = True
        save_call(folder / f"{self.experiment.name}.npz", call.feeds)
        stop = call.new + (call.past if call.phase == "decode" else 0)
        reference = reference and not self.experiment.changes_deal
        if reference and self.deal is not None and stop <= self.deal.scenario.total:
            save_call(folder / f"{self.experiment.name}-reference.npz", self.deal.reference(stop).feeds)

    def _locate(self, call: Call) -> dict[str, Any]:
        """What the same call shows in other sessions: unoptimised, names in the text are candidates for a place."""
        file = self.exam.contract.graph(call.phase).file
        names: tuple[str, ...] | None = None
        try:
            self.exam.run_session(call, self.exam.sessions.at(file, "off"))
        except StepFailed as error:
            names = mentioned(error)
        except Exception:  # the file opens at another level only: no place to name
            return {}
        if names is not None:  # out of the handler, whose traceback would keep the session alive
            return {"node_names": names, **self._without_reuse(call, file)}
        reason = "the same call passes with graph optimisation off: an optimisation of the runtime is at fault"
        return {"reason": reason, "passes_with": "no-optimisation"}

    def _without_reuse(self, call: Call, file: str) -> dict[str, Any]:
        try:
            self.exam.run_session(call, self.exam.sessions.without_reuse(file))
        except Exception:  # then the plan of the runtime's memory is not at fault
            return {}
        return {"reason": "the same call passes where the runtime reuses no buffers", "passes_with": "no-buffer-reuse"}

    def _result(self, outcome: Outcome, **more: Any) -> Run:
        more |= {"controls": tuple(self.controls), "growth": self._growth()}
        return self.exam.result(self.experiment, outcome, **more)

    def _growth(self) -> ErrorGrowth | None:
        """How the difference goes over the steps of a loop that decodes one token a step from its prefill on."""
        decoded = self.steps[1:]
        if any(step.phase != "decode" or step.new_tokens != 1 or step.difference is None for step in decoded):
            return None
        found = [step.difference for step in self.steps if step.difference is not None and step.difference.finite]
        if len(found) != len(self.steps):
            return None
        return error_growth([difference.relative for difference in found], self.exam.contract.exactness)


def _slots(call: Call, answer: Answer) -> dict[str, float]:
    """How far presents are from the slots that the call expects."""
    gaps = {
        name: slot_difference(answer.outputs[name].array(), as_array(expected))
        for name, expected in call.slots.items()
        if name in answer.outputs and answer.outputs[name].shape == expected.shape
    }
    return {name: gap for name, gap in gaps.items() if gap is not None}


def _seen(value: Value | Array) -> Seen:
    if isinstance(value, OrtTensor):
        return Seen(value.dtype, value.shape, value.null)
    array = as_array(value)
    return Seen(_onnx_word(array.dtype), tuple(array.shape))


@lru_cache
def _onnx_word(dtype: np.dtype[Any]) -> str:
    """The word of ONNX for a type of numpy. Kept, since numpy makes the name anew each time it is asked."""
    return {"float32": "float", "float64": "double"}.get(dtype.name, str(dtype.name))


def _digest(feeds: Mapping[str, Value | Array]) -> bytes:
    digest = blake2b()
    for name, value in sorted(feeds.items()):
        array = as_array(value)
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()
