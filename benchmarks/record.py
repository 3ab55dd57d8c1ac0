"""Records what a step-test asks of the runtime: `python benchmarks/record.py FOLDER PLAN`.

The worker's part is carried out in this process, with its sessions and its session calls watched. The plan holds every
session opened and every run, in order: repeated timing calls, controls and failing runs included. Integer feeds are
kept by value, since ids and positions must be valid; a float feed is an earlier output, or has its shape alone.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor import doctor, worker
from kvdoctor.feeds import Answer, Call, as_array
from kvdoctor.runtimes import Examined, Job, Limits, Runtime, thread_count

LEVEL_NUMBERS = {name: int(level.value) for name, level in worker.LEVELS.items()}


@dataclass
class Tape:
    """The steps of one stack. `alive` keeps what was returned, so that identities stay distinct."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    sessions: dict[int, int] = field(default_factory=dict)
    origins: dict[int, tuple[int, str]] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)
    failed: int = 0

    def opened(self, file: str, level: str, provider: str, threads: int) -> int:
        self.steps.append(
            {
                "do": "open",
                "file": file,
                "level": LEVEL_NUMBERS[level],
                "providers": [provider],
                "log_severity": worker.FATAL_ONLY,
                "intra_op_threads": threads,
                "inter_op_threads": 1,
            }
        )
        return len(self.steps) - 1

    def ran(self, session: Any, call: Call, answer: Answer | None) -> None:
        number = len(self.steps)
        feeds = {name: self._feed(value) for name, value in call.feeds.items()}
        self.steps.append({"do": "run", "session": self.sessions[id(session)], "feeds": feeds, "keep": [], "drop": []})
        if answer is None:
            self.failed += 1
            return
        for name, value in answer.outputs.items():
            self.alive.append(value)
            self.origins[id(value)] = (number, name)

    def _feed(self, value: Any) -> dict[str, Any]:
        if id(value) in self.origins:
            run, output = self.origins[id(value)]
            if output not in self.steps[run]["keep"]:
                self.steps[run]["keep"].append(output)
            return {"run": run, "output": output}
        array = as_array(value)
        entry = {"dtype": array.dtype.name, "shape": list(array.shape)}
        whole = array.dtype.kind in "iub"
        return entry | {"values": array.ravel().tolist()} if whole else entry

    def finished(self) -> list[dict[str, Any]]:
        """The steps, each with the runs whose outputs nobody needs after it."""
        last: dict[int, int] = {}
        for number, step in enumerate(self.steps):
            if step["do"] == "run":
                last |= {feed["run"]: number for feed in step["feeds"].values() if "run" in feed}
        for number, step in enumerate(self.steps):
            if step["do"] == "run":
                step["drop"] = [run for run, user in last.items() if user == number]
        return self.steps


class RecordingRuntime(Runtime):
    """Carries out jobs in this process, onto tapes."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.tapes: list[Tape] = []

    @property
    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def examine(self, job: Job) -> Examined:
        tape = Tape()
        self.tapes.append(tape)
        with Watch(tape):
            worker.examine(json.loads(job.line(job.experiments)), _say_nothing)
        return Examined()


@dataclass
class Watch:
    """While it is entered, the worker's sessions and session calls go onto the tape."""

    tape: Tape
    before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        tape, open_, run = self.tape, worker.Sessions._open, worker.Examination.run_session
        self.before = (open_, run)

        def watched_open(sessions: worker.Sessions, file: str, level: str) -> Any:
            number = tape.opened(file, level, sessions.provider, sessions.threads)
            session = open_(sessions, file, level)
            tape.sessions[id(session)] = number
            return session

        def watched_run(exam: worker.Examination, call: Call, session: Any = None) -> Answer:
            session = session or exam.sessions.get(exam.contract.graph(call.phase).file)
            try:
                answer = run(exam, call, session)
            except worker.StepFailed:
                tape.ran(session, call, None)
                raise
            tape.ran(session, call, answer)
            return answer

        worker.Sessions._open = watched_open  # type: ignore[method-assign]
        worker.Examination.run_session = watched_run  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        worker.Sessions._open, worker.Examination.run_session = self.before  # type: ignore[method-assign]


def _say_nothing(event: str, **facts: Any) -> None:
    if event == "crash":
        sys.exit(facts["text"])


def main() -> None:
    """Record a step-test of the model in the folder."""
    runtime = RecordingRuntime()
    doctor.step_test(sys.argv[1], doctor.Options(), runtime)
    stacks = [tape.finished() for tape in runtime.tapes]
    plan = {"threads": thread_count(), "failed": sum(tape.failed for tape in runtime.tapes), "stacks": stacks}
    Path(sys.argv[2]).write_text(json.dumps(plan), encoding="utf-8")


if __name__ == "__main__":
    main()
