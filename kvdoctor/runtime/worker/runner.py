"""Runs the calls of one stack in sessions of ONNX Runtime."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdoctor.contract import Graph
from kvdoctor.decode.calls import Answer, Call, StepFailed, Value
from kvdoctor.decode.messages import Job, PairedSide, Settled, SettleJob
from kvdoctor.decode.samples import Samples
from kvdoctor.decode.settle import settle
from kvdoctor.decode.stack_driver import Announce, Environment, Rerun, StackDriver
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.providers import load
from kvdoctor.runtime.worker.sessions import (
    HELD,
    LEVELS,
    LogitsTensor,
    OrtTensor,
    Sessions,
    close_others,
    mentioned,
    run_bound,
    run_tensors,
    runtime_version,
    to_runtime,
)

OpenSession = Callable[[str], Any]
"""Opens a session of a file."""


def run_stages(
    graph: Graph, feeds: Mapping[str, Any], run: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Run the stages of a pipeline one after the other; the outputs of the whole by their names.

    Raises:
        StepFailed: the runtime failed in a stage, which the message names.
    """
    values = dict(feeds)
    for stage in graph.stages:
        fed = {own: values[name] for own, name in stage.inputs.items() if name in values}
        try:
            made = run(stage.file, fed)
        except StepFailed as error:
            raise StepFailed(f"stage {stage.file}: {error}") from error
        values |= {stage.outputs[own]: value for own, value in made.items() if own in stage.outputs}
    return {port.name: values[port.name] for port in graph.outputs if port.name in values}


def open_stack(side: PairedSide, job: Job, announce: Announce, samples: Samples | None = None) -> "StackRunner":
    """The stack of a side, whose files are opened with the provider and the threads of a job."""
    close_others({str(side.folder / file) for graph in side.contract.graphs.values() for file in graph.files})
    sessions = Sessions(side.folder, job, announce, HELD)
    return StackRunner(side.stack, side.contract, sessions, job.seed, announce, samples or Samples())


def settle_readings(job: SettleJob, announce: Announce) -> Settled:
    """Try the readings of a contract.

    Raises:
        ProviderMissing: the runtime does not have the provider of the job.
    """
    return settle(open_stack(job.side, job, announce))


@dataclass
class StackRunner(StackDriver):
    """Runs calls of one stack in its open sessions."""

    sessions: Sessions

    @property
    def environment(self) -> Environment:
        """This runtime, and the level at which the graph that decodes was opened."""
        level = self.sessions.levels.get(self.contract.graph("decode").files[-1], "all")
        return Environment(f"onnxruntime=={runtime_version()}", load(self.sessions.job.provider).name, level)

    def run_session(self, call: Call, open_session: OpenSession | None = None) -> Answer:
        """Run a call in the session of its phase, or in the one that is opened otherwise; a pipeline stage by stage.

        Raises:
            StepFailed: the runtime failed.
            CannotCheck: the file does not open.
        """
        graph = self.contract.graph(call.phase)
        at_level = partial(self.sessions.at, level=call.via) if call.via in LEVELS else self.sessions.get
        opened = open_session or at_level
        feeds = {name: to_runtime(value) for name, value in call.feeds.items()}
        if graph.stages:
            values = run_stages(graph, feeds, lambda file, fed: self._run_file(opened(file), fed, call))
        else:
            values = self._run_file(opened(graph.file), feeds, call)
        outputs: dict[str, Value] = {name: OrtTensor(value) for name, value in values.items()}
        logits = self.logits_name(call.phase)
        if isinstance(tensor := outputs.get(logits), OrtTensor):
            outputs[logits] = LogitsTensor(tensor)
        return self.make_answer(call, outputs)

    def _run_file(self, session: Any, feeds: dict[str, Any], call: Call) -> dict[str, Any]:
        """The outputs of one file by name."""
        try:
            if call.via in ("io-binding", "one-buffer"):
                return run_bound(session, feeds, call.in_place)
            return run_tensors(session, feeds)
        except CannotCheck:
            raise
        except Exception as error:  # the bindings raise many types, and all of them are a failed step
            raise StepFailed(self.sessions.clean(error)) from error

    def rerun(self, call: Call) -> Rerun:
        """Run a failed call in other sessions: without optimization, names in the text may be those of nodes."""
        names: tuple[str, ...] | None = None
        try:
            self.run_session(call, lambda file: self.sessions.at(file, "off"))
        except StepFailed as error:
            names = mentioned(error)
        except Exception:  # the file opens at another level only: no location to name
            return Rerun()
        if names is None:
            reason = "the same call passes with graph optimization off: an optimization of the runtime is at fault"
            return Rerun(reason, "no-optimization")
        # Out of the handler, whose traceback would keep the session alive.
        try:
            self.run_session(call, self.sessions.without_reuse)
        except Exception:  # then the plan of the runtime's memory is not at fault
            return Rerun(node_names=names)
        return Rerun("the same call passes where the runtime reuses no buffers", "no-buffer-reuse", names)
