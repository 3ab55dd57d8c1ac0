"""Records the sessions and runs of a step-test: `python benchmarks/record.py FOLDER PLAN [--three-loops]`.

The worker's code runs in this process, with onnxruntime's session class replaced by one that records. The plan has
every session and every run in order: repeated timing calls, controls and failing runs included. Integer feeds are
recorded by value, since ids and positions must be valid; float feeds by their shape, or by the run that returned them.

With `--three-loops` the plan is a test that a team would write by hand: the plain loop, the held loop, and a loop
without a cache, for the 8 steps of a step-test's own loops.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnxruntime as ort

from kvdoctor.decode.experiments import Calls, Experiment
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.diagnose import pipeline
from kvdoctor.options import Options
from kvdoctor.runtime.client import Progress, Runtime, StackResults
from kvdoctor.runtime.process import Limits
from kvdoctor.runtime.worker import main as worker

NUMPY_NAMES = {"float": "float32", "double": "float64"}
BY_VALUE = {"int64", "int32", "int8", "uint8", "bool"}


@dataclass
class Tape:
    """The steps of one stack. `alive` keeps returned values from being freed, so that no `id()` is used twice."""

    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[int, tuple[int, str]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    failed: int = 0

    def open(self, path: str, options: Any, providers: list[str]) -> int:
        entry = {
            "do": "open",
            "file": Path(path).relative_to(self.folder).as_posix(),
            "level": int(options.graph_optimization_level.value),
            "log_severity": options.log_severity_level,
            "intra_op_threads": options.intra_op_num_threads,
            "inter_op_threads": options.inter_op_num_threads,
            "providers": providers,
        }
        self.steps.append(entry)
        return len(self.steps) - 1

    def run(self, session: int, feeds: dict[str, Any]) -> int:
        entry = {"do": "run", "session": session, "feeds": {n: self._feed(v) for n, v in feeds.items()}, "keep": []}
        self.steps.append(entry)
        return len(self.steps) - 1

    def returned(self, number: int, names: list[str], values: list[Any]) -> None:
        self.alive += values
        self.origins |= {id(value): (number, name) for name, value in zip(names, values, strict=True)}

    def _feed(self, value: Any) -> dict[str, Any]:
        if id(value) in self.origins:
            run, output = self.origins[id(value)]
            if output not in self.steps[run]["keep"]:
                self.steps[run]["keep"].append(output)
            return {"run": run, "output": output}
        kind = value.data_type().removeprefix("tensor(").removesuffix(")")
        entry = {"dtype": NUMPY_NAMES.get(kind, kind), "shape": list(value.shape())}
        return entry | {"values": value.numpy().ravel().tolist()} if kind in BY_VALUE else entry

    def add_drops(self) -> list[dict[str, Any]]:
        """The steps, each run with the earlier runs whose outputs it is the last to use."""
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            last |= {feed["run"]: number for feed in step.get("feeds", {}).values() if "run" in feed}
        for number, step in enumerate(self.steps):
            if step["do"] == "run":
                step["drop"] = [run for run, user in last.items() if user == number]
        return self.steps


def recording_session(tape: Tape) -> type:
    """The runtime's session class, recording onto a tape."""

    class Session(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, path: str, options: Any, providers: list[str]) -> None:
            self.number = tape.open(path, options, providers)
            super().__init__(path, options, providers=providers)

        def run_with_ort_values(self, names: list[str], feeds: dict[str, Any], run_options: Any = None) -> list[Any]:
            number = tape.run(self.number, feeds)
            try:
                values: list[Any] = super().run_with_ort_values(names, feeds, run_options)
            except Exception:
                tape.failed += 1
                raise
            tape.returned(number, names, values)
            return values

    return Session


class RecordingRuntime(Runtime):
    """Runs jobs in this process, each recorded onto a tape of its own."""

    def __init__(self, by_hand: bool) -> None:
        self.limits = Limits()
        self.by_hand = by_hand
        self.tapes: list[Tape] = []

    @property
    def versions(self) -> dict[str, str]:
        return {}

    def examine(self, job: ExperimentJob, _progress: Progress | None = None) -> StackResults:
        self.tapes.append(Tape(job.folder))
        loops = (Experiment("three-loops", "", calls=three_loops),)
        chosen = tuple(experiment.name for experiment in loops) if self.by_hand else job.experiments
        with ExitStack() as patches:
            patches.enter_context(patch.object(ort, "InferenceSession", recording_session(self.tapes[-1])))
            if self.by_hand:
                patches.enter_context(patch.object(worker, "load", lambda: loops))
            worker.run_experiments(replace(job, experiments=chosen), lambda _: None)
        return StackResults()


def three_loops(builder: FeedBuilder) -> Calls:
    """The plain loop, the held loop, and for each of their steps the whole sequence without a cache."""
    scenario = builder.scenario
    for rule in ("plain", "held"):
        answer = yield builder.prefill(scenario.prompt)
        past = builder.carry(None, answer, rule)
        for position in range(scenario.prompt, scenario.total):
            answer = yield builder.decode(position, position + 1, past)
            past = builder.carry(past, answer, rule)
    for stop in range(scenario.prompt, scenario.total + 1):
        yield builder.reference(stop)


def main() -> None:
    """Record a step-test of the model in a folder, or the three loops."""
    runtime = RecordingRuntime(sys.argv[3:] == ["--three-loops"])
    pipeline.step_test(sys.argv[1], Options(), runtime)
    plan = {
        "failed": sum(tape.failed for tape in runtime.tapes),
        "stacks": [tape.add_drops() for tape in runtime.tapes],
    }
    Path(sys.argv[2]).write_text(json.dumps(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
