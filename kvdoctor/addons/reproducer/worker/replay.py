"""Records the calls of an experiment as a script, and plays scripts: the worker's side of `repro`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvdoctor.addons.reproducer.messages import (
    CallPlaying,
    CallScript,
    CallScripted,
    Comparison,
    MadeArray,
    PlayJob,
    PriorOutput,
    RecordJob,
    ScriptCall,
    ScriptPlayed,
    make_array,
)
from kvdoctor.contract import DECODING, Port
from kvdoctor.decode.calls import Answer, Array, Call, StepFailed, Value, as_array
from kvdoctor.decode.experiment_run import ExperimentRunner
from kvdoctor.decode.experiments import by_name
from kvdoctor.decode.messages import Event, ExperimentStarted, RunDone
from kvdoctor.decode.parity import compare
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.runner import OpenSession, StackRunner
from kvdoctor.runtime.worker.sessions import OrtTensor, Sessions, mentioned, run_tensors, to_runtime

FROM_WEIGHTS = {"encoder_states", "encoder_input", "past"}
"""Inputs whose floats stand for values computed from weights: noise replaces them."""


@dataclass
class RecordingStack(StackRunner):
    """A stack whose calls are announced before they run, as the calls of a script.

    With `exact` the floats that a loop computed from outputs are written as numbers, else as noise.
    """

    reuses: ClassVar[bool] = False
    exact: bool = False
    noises: dict[bytes, int] = field(default_factory=dict)
    calls: list[ScriptCall] = field(default_factory=list)
    answers: list[tuple[Call, Answer]] = field(default_factory=list)

    def run_session(self, call: Call, open_session: OpenSession | None = None) -> Answer:
        """Run a call; write it down unless it is none of the decoder, or repeats one in another session."""
        if open_session is not None or call.phase not in DECODING:
            return super().run_session(call, open_session)
        scripted = self._script(call)
        self.calls.append(scripted)
        self.announce(CallScripted(scripted, self._find_expected(call)))
        answer = super().run_session(call)
        self.answers.append((call, answer))
        return answer

    def _script(self, call: Call) -> ScriptCall:
        graph = self.contract.graph(call.phase)
        ports = {port.name: port for port in graph.inputs}
        feeds = {name: self._source(value, ports[name]) for name, value in call.feeds.items()}
        number = sum(earlier.kind == "step" for earlier, _ in self.answers)
        title = {"step": f"step {number}", "reference": "reference run"}.get(call.kind, call.kind)
        return ScriptCall(title, graph.file, feeds, self.logits_name(call.phase))

    def _source(self, value: Value | Array, port: Port) -> MadeArray | PriorOutput:
        for index, (_, answer) in enumerate(self.answers):
            for name, output in answer.outputs.items():
                if output is value:
                    return PriorOutput(index, name)
        return self._make_rule(as_array(value), port)

    def _make_rule(self, array: Array, port: Port) -> MadeArray:
        shape = tuple(array.shape)
        if array.size == 0 or (array == array.flat[0]).all():
            return MadeArray(port.dtype, shape, fill=float(array.flat[0]) if array.size else 0.0)
        if array.dtype.kind == "f" and port.role in FROM_WEIGHTS and not (self.exact and port.role == "past"):
            seed = self.noises.setdefault(np.ascontiguousarray(array).tobytes(), len(self.noises) + 1)
            return MadeArray(port.dtype, shape, seed=seed)
        return MadeArray(port.dtype, shape, numbers=tuple(array.ravel().astype(np.float64).tolist()))

    def _find_expected(self, call: Call) -> Comparison | None:
        if call.expected is None or call.sampled or call.kind != "step":
            return None
        wanted = call.expected
        for index, (_, answer) in enumerate(self.answers):
            logits = answer.logits if self.calls[index].logits in answer.outputs else np.zeros((0, 0, 0))
            for row in range(logits.shape[0] - wanted.shape[0] + 1):
                for start in range(logits.shape[1] - wanted.shape[1] + 1):
                    part = logits[row : row + wanted.shape[0], start : start + wanted.shape[1]]
                    if np.array_equal(part, wanted, equal_nan=True):
                        return Comparison(len(self.calls) - 1, index, row, start, wanted.shape[1])
        return None


def record_experiment(job: RecordJob, announce: Announce) -> Iterator[Event]:
    """Run one experiment and announce its calls."""
    sessions = Sessions(job.folder, job, announce)
    experiment = by_name()[job.experiment]
    stack = RecordingStack(job.stack, job.contract, sessions, job.seed, announce, exact=job.exact)
    yield ExperimentStarted(experiment.name)
    runner = ExperimentRunner(stack, job)
    yield RunDone(runner.run(experiment), seconds=0.0)


def replay_script(job: PlayJob, announce: Announce) -> ScriptPlayed:
    """Play a script on the files of a folder."""
    return _Play(job.script, Sessions(job.folder, job, announce), announce).play()


@dataclass
class _Play:
    script: CallScript
    sessions: Sessions
    announce: Announce
    returned: list[dict[str, Any]] = field(default_factory=list)

    def play(self) -> ScriptPlayed:
        """Play it to its end or to the first failure."""
        for file in self.script.files:
            if (text := self.sessions.refusal(file, self.script.level)) is not None:
                return ScriptPlayed("refused", text)
        for index, call in enumerate(self.script.calls):
            self.announce(CallPlaying(index))
            feeds = {name: self._make_feed(value) for name, value in call.feeds.items()}
            try:
                session = self.sessions.get(call.file)
                self.returned.append(_run(session, feeds))
            except CannotCheck as refused:
                return ScriptPlayed("refused", str(refused))
            except StepFailed as error:
                unoptimized, names = self._run_unoptimized(call, feeds)
                return ScriptPlayed("failed", self.sessions.clean(error), index, unoptimized, names)
        return ScriptPlayed("ran", differences=tuple(map(self._compare, self.script.comparisons)))

    def _make_feed(self, value: MadeArray | PriorOutput) -> Any:
        if isinstance(value, PriorOutput):
            return self.returned[value.call][value.output]
        return to_runtime(make_array(value))

    def _run_unoptimized(self, call: ScriptCall, feeds: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]]:
        """The error of the same call where the nodes are those of the file, and the names in it; None if it runs."""
        try:
            _run(self.sessions.at(call.file, "off"), feeds)
        except StepFailed as error:
            return self.sessions.clean(error), mentioned(error)
        except Exception:  # the file opens at another level only: there is nothing to compare
            return None, ()
        return None, ()

    def _compare(self, comparison: Comparison) -> float | None:
        got = self._logits(comparison.call)
        want = self._logits(comparison.reference)
        rows = slice(comparison.row, comparison.row + got.shape[0])
        want = want[rows, comparison.start : comparison.start + comparison.count]
        difference = compare(got[:, -want.shape[1] :], want)
        return difference.relative if difference.finite else None

    def _logits(self, index: int) -> Array:
        outputs = {name: OrtTensor(value) for name, value in self.returned[index].items()}
        return Answer(outputs, self.script.calls[index].logits).logits


def _run(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return run_tensors(session, feeds)
    except Exception as error:  # the bindings raise many types, and all of them are a failed call
        raise StepFailed(str(error)) from error
