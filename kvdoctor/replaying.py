"""Plays scripts and writes them down: the worker's side of `repro`. numpy and onnxruntime only."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Value, as_array
from kvdoctor.contract import CacheContract, Port
from kvdoctor.examination import Examination
from kvdoctor.experiments import load
from kvdoctor.parity import compare
from kvdoctor.plain import from_plain, to_plain
from kvdoctor.script import Comparison, Given, Returned, Script, ScriptCall, made
from kvdoctor.sessions import OrtTensor, Refused, Sessions, StepFailed, to_runtime

MADE_UP = {"encoder_states", "encoder_input", "past"}
"""Inputs whose floats stand for what weights would have given: noise is put in their place."""


@dataclass
class Recording(Examination):
    """An examination that tells each call before it is made, as the call of a script.

    With `exact` the floats that a loop computed from what was returned are told as they are, else as noise.
    """

    exact: bool = False
    noises: dict[bytes, int] = field(default_factory=dict)
    calls: list[ScriptCall] = field(default_factory=list)
    answers: list[tuple[Call, Answer]] = field(default_factory=list)

    def run_session(self, call: Call, session: Any = None) -> Answer:
        """Run a call, and write it down unless it is one of the encoder or a repetition elsewhere."""
        if session is not None or call.phase == "encode":
            return super().run_session(call, session)
        told = self._told(call)
        self.calls.append(told)
        self.announce("scripted", call=to_plain(told), kind=call.kind, compared=self._compared(call))
        answer = super().run_session(call)
        self.answers.append((call, answer))
        return answer

    def _told(self, call: Call) -> ScriptCall:
        graph = self.contract.graph(call.phase)
        ports = {port.name: port for port in graph.inputs}
        feeds = {name: self._source(value, ports[name]) for name, value in call.feeds.items()}
        number = sum(earlier.kind == "step" for earlier, _ in self.answers)
        title = {"step": f"step {number}", "reference": "reference run"}.get(call.kind, call.kind)
        return ScriptCall(title, graph.file, feeds, self.logits_name(call.phase))

    def _source(self, value: Value | Array, port: Port) -> Given | Returned:
        for index, (_, answer) in enumerate(self.answers):
            for name, output in answer.outputs.items():
                if output is value:
                    return Returned(index, name)
        return self._given(as_array(value), port)

    def _given(self, array: Array, port: Port) -> Given:
        """The rule that makes an array; the same noise for the same array, wherever it is fed."""
        shape = tuple(array.shape)
        if array.size == 0 or (array == array.flat[0]).all():
            return Given(port.dtype, shape, fill=float(array.flat[0]) if array.size else 0.0)
        if array.dtype.kind == "f" and port.role in MADE_UP and not (self.exact and port.role == "past"):
            seed = self.noises.setdefault(np.ascontiguousarray(array).tobytes(), len(self.noises) + 1)
            return Given(port.dtype, shape, seed=seed)
        return Given(port.dtype, shape, numbers=tuple(array.ravel().astype(np.float64).tolist()))

    def _compared(self, call: Call) -> dict[str, Any] | None:
        """Where the logits that a call is held against come from."""
        if call.expected is None or call.kind != "step":
            return None
        wanted = call.expected
        for index, (_, answer) in enumerate(self.answers):
            logits = answer.logits if self.calls[index].logits in answer.outputs else np.zeros((0, 0, 0))
            for row in range(logits.shape[0] - wanted.shape[0] + 1):
                for start in range(logits.shape[1] - wanted.shape[1] + 1):
                    part = logits[row : row + wanted.shape[0], start : start + wanted.shape[1]]
                    if np.array_equal(part, wanted, equal_nan=True):
                        found = Comparison(len(self.calls) - 1, index, row, start, wanted.shape[1])
                        return dict(to_plain(found))
        return None


def record(job: dict[str, Any], announce: Callable[..., None]) -> None:
    """Run one experiment and tell its calls."""
    sessions = Sessions(Path(job["folder"]), job["provider"], job["threads"], announce)
    contract = from_plain(CacheContract, job["contract"])
    experiment = next(e for e in load() if e.name == job["record"])
    exam = Recording(job["stack"], contract, sessions, job["seed"], announce, exact=job["exact"])
    announce("start", experiment=experiment.name)
    run = exam.run(experiment)
    announce("run", run=to_plain(run), seconds=0.0)


def replay(job: dict[str, Any], announce: Callable[..., None]) -> None:
    """Play a script on the files of a folder, and tell how it ended."""
    script = from_plain(Script, job["script"])
    sessions = Sessions(Path(job["folder"]), job["provider"], job["threads"], announce)
    announce("played", **_Play(script, sessions, announce).through())


@dataclass
class _Play:
    script: Script
    sessions: Sessions
    announce: Callable[..., None]
    returned: list[dict[str, Any]] = field(default_factory=list)

    def through(self) -> dict[str, Any]:
        """Play it to its end or to the first failure."""
        for file in self.script.files:
            if (text := self.sessions.refusal(file, self.script.level)) is not None:
                return {"outcome": "refused", "text": text}
        for index, call in enumerate(self.script.calls):
            self.announce("playing", call=index)
            feeds = {name: self._fed(value) for name, value in call.feeds.items()}
            try:
                session = self.sessions.get(call.file)
                self.returned.append(_outputs(session, feeds))
            except Refused as refused:
                return {"outcome": "refused", "text": str(refused)}
            except StepFailed as error:
                text = self.sessions.clean(error)
                return {"outcome": "failed", "call": index, "text": text, **self._place(call, feeds)}
        return {"outcome": "ran", "differences": [self._difference(c) for c in self.script.comparisons]}

    def _fed(self, value: Given | Returned) -> Any:
        if isinstance(value, Returned):
            return self.returned[value.call][value.output]
        return to_runtime(made(value))

    def _place(self, call: ScriptCall, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """What the same call says where the nodes are those of the file; whether it fails there at all."""
        try:
            _outputs(self.sessions.at(call.file, "off"), feeds)
        except StepFailed as error:
            text = self.sessions.clean(error)
            return {"unoptimised": text, "names": re.findall(r"[Nn]ame:\s?'([^']*)'", text)}
        except Exception:  # the file opens at another level only: there is nothing to compare
            return {}
        return {}

    def _difference(self, comparison: Comparison) -> dict[str, Any]:
        got = self._logits(comparison.call)
        want = self._logits(comparison.reference)
        rows = slice(comparison.row, comparison.row + got.shape[0])
        want = want[rows, comparison.start : comparison.start + comparison.count]
        difference = compare(got[:, -want.shape[1] :], want)
        return {"relative": difference.relative, "finite": difference.finite}

    def _logits(self, index: int) -> Array:
        outputs = {name: OrtTensor(value) for name, value in self.returned[index].items()}
        return Answer(outputs, self.script.calls[index].logits).logits


def _outputs(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    names = [output.name for output in session.get_outputs() if output.type.startswith("tensor(")]
    try:
        values = session.run_with_ort_values(names, dict(feeds))
    except Exception as error:  # the bindings raise many types, and all of them are a failed call
        raise StepFailed(str(error)) from error
    return dict(zip(names, values, strict=True))
