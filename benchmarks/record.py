"""Records what a step-test asks of the runtime: `python benchmarks/record.py FOLDER PLAN [--three-loops]`.

The worker's part is carried out in this process, with onnxruntime's own session class watched. The plan holds every
session opened and every run, in order: repeated timing calls, controls and failing runs included. Feeds of integers are
kept by value, since ids and positions must be valid; of a float feed only the shape, or which run returned it.

With `--three-loops` the plan is what a team would write by hand: the plain loop, the held loop, and a loop without a
cache, for the 8 steps of a step-test's own loops.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime as ort

from kvdoctor import doctor, worker
from kvdoctor.child import Limits
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal
from kvdoctor.runtimes import Examined, Job, Runtime

NUMPY_NAMES = {"float": "float32", "double": "float64"}
BY_VALUE = {"int64", "int32", "int8", "uint8", "bool"}


@dataclass
class Tape:
    """The steps of one stack. `alive` keeps what the runtime returned, so that no identity is given out twice."""

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

    def finished(self) -> list[dict[str, Any]]:
        """The steps; each run with the earlier runs whose outputs it is the last to take."""
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            last |= {feed["run"]: number for feed in step.get("feeds", {}).values() if "run" in feed}
        for number, step in enumerate(self.steps):
            if step["do"] == "run":
                step["drop"] = [run for run, user in last.items() if user == number]
        return self.steps


def watched(tape: Tape) -> type:
    """The runtime's session class, writing onto a tape."""

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
    """Carries out jobs in this process, each onto a tape of its own."""

    def __init__(self, by_hand: bool) -> None:
        self.limits = Limits()
        self.by_hand = by_hand
        self.tapes: list[Tape] = []

    @property
    def versions(self) -> dict[str, str]:
        return {}

    def examine(self, job: Job) -> Examined:
        self.tapes.append(Tape(job.folder))
        unwatched, ort.InferenceSession = ort.InferenceSession, watched(self.tapes[-1])
        every, loops = worker.load, (Experiment("three-loops", "", three_loops),)
        try:
            worker.load = (lambda: loops) if self.by_hand else every
            chosen = tuple(experiment.name for experiment in loops) if self.by_hand else job.experiments
            worker.examine(json.loads(job.line(chosen)), lambda *_, **__: None)
        finally:
            ort.InferenceSession, worker.load = unwatched, every
        return Examined()


def three_loops(deal: Deal) -> Calls:
    """The plain loop, the held loop, and for each of their steps the whole sequence so far without a cache."""
    scenario = deal.scenario
    for rule in ("plain", "held"):
        answer = yield deal.prefill(scenario.prompt)
        past = deal.carry(None, answer, rule)
        for position in range(scenario.prompt, scenario.total):
            answer = yield deal.decode(position, position + 1, past)
            past = deal.carry(past, answer, rule)
    for stop in range(scenario.prompt, scenario.total + 1):
        yield deal.reference(stop)


def main() -> None:
    """Record a step-test of the model in a folder, or the three loops."""
    runtime = RecordingRuntime(sys.argv[3:] == ["--three-loops"])
    doctor.step_test(sys.argv[1], doctor.Options(), runtime)
    plan = {"failed": sum(tape.failed for tape in runtime.tapes), "stacks": [tape.finished() for tape in runtime.tapes]}
    Path(sys.argv[2]).write_text(json.dumps(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
