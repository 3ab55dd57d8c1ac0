"""Runs the calls of one stack in sessions of ONNX Runtime."""

from dataclasses import dataclass
from typing import Any

from kvdoctor.decode.calls import Answer, Call, StepFailed, Value
from kvdoctor.decode.stack_driver import Environment, Rerun, StackDriver
from kvdoctor.runtime.worker.sessions import (
    LEVELS,
    LogitsTensor,
    OrtTensor,
    Sessions,
    mentioned,
    output_names,
    run_bound,
    runtime_version,
    to_runtime,
)


@dataclass
class StackRunner(StackDriver):
    """Runs calls of one stack in its open sessions."""

    sessions: Sessions

    @property
    def environment(self) -> Environment:
        """This runtime, and the level at which the graph that decodes was opened."""
        level = self.sessions.levels.get(self.contract.graph("decode").file, "all")
        return Environment(f"onnxruntime=={runtime_version()}", self.sessions.provider, level)

    def run_session(self, call: Call, session: Any = None) -> Answer:
        """Run a call in the session of its phase, or in the one given.

        Raises:
            StepFailed: the runtime failed.
            Refused: the file does not open.
        """
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
        logits = self.logits_name(call.phase)
        if isinstance(tensor := outputs.get(logits), OrtTensor):
            outputs[logits] = LogitsTensor(tensor)
        return Answer(outputs, logits, call.past, call.new)

    def rerun(self, call: Call) -> Rerun:
        """Run a failed call in other sessions: without optimization, names in the text may be those of nodes."""
        file = self.contract.graph(call.phase).file
        names: tuple[str, ...] | None = None
        try:
            self.run_session(call, self.sessions.at(file, "off"))
        except StepFailed as error:
            names = mentioned(error)
        except Exception:  # the file opens at another level only: no location to name
            return Rerun()
        if names is None:
            reason = "the same call passes with graph optimization off: an optimization of the runtime is at fault"
            return Rerun(reason, "no-optimization")
        # Out of the handler, whose traceback would keep the session alive.
        try:
            self.run_session(call, self.sessions.without_reuse(file))
        except Exception:  # then the plan of the runtime's memory is not at fault
            return Rerun(node_names=names)
        return Rerun("the same call passes where the runtime reuses no buffers", "no-buffer-reuse", names)
