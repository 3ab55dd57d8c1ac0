"""Runs the model and the candidates in the worker, and tells whether they show the same failure.

Two failures are the same if the same call ends in the same way at the same node. The runtime's message is not read for
a cause; it is only compared: without numbers and names, the messages of the candidate and the model must be equal,
since a wrong cut makes other nodes fail.
"""

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import (
    CallPlaying,
    CallScripted,
    ExperimentJob,
    PlayJob,
    RecordJob,
    RunDone,
    ScriptPlayed,
    WorkerError,
)
from kvdoctor.decode.runs import Run
from kvdoctor.decode.script import CallScript, Comparison, ScriptCall
from kvdoctor.errors import WorkerDied
from kvdoctor.records import record
from kvdoctor.reproducer.candidate import Candidate
from kvdoctor.runtime.client import Runtime

CAUSES = ("same-feed", "later-token", "why", "why-chunk")
"""Experiments that identify a cause."""


@record
class ScriptOutcome:
    """How a script ended.

    Attributes:
        outcome: failed, died, refused, ran, crashed or nothing.
        title: the title of the last call.
        node: the innermost node that the error names.
        pattern: the error text without names, numbers and shapes; or the signal.
        text: the error text.
        differences: of each comparison, in standard deviations of the logits, and whether it is finite.
    """

    outcome: str
    title: str = ""
    node: str = ""
    pattern: str = ""
    text: str = ""
    differences: tuple[tuple[float, bool], ...] = ()

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """Equal for equal failures."""
        return (self.outcome, self.title, self.node, self.pattern)


@record
class OutcomeDifference:
    """How logits differ: the outcome of the experiment, whether they are finite, and the causes."""

    outcome: str
    finite: bool
    causes: tuple[tuple[str, str], ...]


@dataclass
class Oracle:
    """Runs scripts and experiments of one stack in the worker. `thresholds` and `ring` are those of its diagnosis."""

    runtime: Runtime
    stack: str
    provider: str
    seed: int
    scratch: Path
    thresholds: tuple[int, ...] = ()
    ring: int | None = None

    def record(self, folder: Path, contract: CacheContract, experiment: str, exact: bool = False) -> CallScript:
        """Run an experiment and record its calls, up to its failure."""
        job = RecordJob(
            stack=self.stack,
            folder=folder.absolute(),
            contract=contract,
            experiment=experiment,
            exact=exact,
            seed=self.seed,
            provider=self.provider,
            thresholds=self.thresholds,
            ring=self.ring,
        )
        calls: list[ScriptCall] = []
        level = "all"
        comparisons: list[Comparison] = []
        with contextlib.suppress(WorkerDied):  # the script is what it reported until then
            for event in self.runtime.ask(job):
                if isinstance(event, CallScripted):
                    calls.append(event.call)
                    comparisons += [event.compared] if event.compared else []
                elif isinstance(event, RunDone):
                    level = event.run.level
        return CallScript("differs", tuple(calls), tuple(comparisons), level=level)

    def play(self, folder: Path, script: CallScript) -> ScriptOutcome:
        """Run a script with the files of a folder."""
        call, outcome = -1, ScriptOutcome("nothing")
        try:
            # Read all events: unread ones would be taken for the answer to the next job.
            for event in self.runtime.ask(PlayJob(folder.absolute(), script, self.provider)):
                if isinstance(event, CallPlaying):
                    call = event.call
                elif isinstance(event, ScriptPlayed):
                    outcome = _describe_end(event, script)
                elif isinstance(event, WorkerError):
                    outcome = ScriptOutcome("crashed", text=event.text)
        except WorkerDied as death:
            title = script.calls[call].title if call >= 0 else "opening"
            return ScriptOutcome("died", title, pattern=death.limit or death.how, text=death.how)
        return outcome

    def examine(self, folder: Path, contract: CacheContract, experiment: str) -> OutcomeDifference:
        """Run an experiment, and those that look for causes, with the files of a folder."""
        names = tuple(dict.fromkeys((experiment, "plain-loop", "chunk", *CAUSES)))
        job = ExperimentJob(self.stack, folder.absolute(), contract, names, self.seed, self.provider)
        runs = {run.experiment: run for run in self.runtime.examine(job).runs}
        return summarize_difference(runs, experiment)

    def shows_failure(
        self, candidate: Candidate, failure: "ScriptOutcome | OutcomeDifference", experiment: str
    ) -> bool:
        """Whether a candidate shows the failure of the model."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            if isinstance(failure, ScriptOutcome):
                return self.run_candidate(candidate, Path(folder)).signature == failure.signature
            candidate.write(Path(folder), self.seed)
            return self.examine(Path(folder), candidate.fitted_contract(), experiment) == failure

    def run_candidate(self, candidate: Candidate, folder: Path) -> ScriptOutcome:
        """Write the files of a candidate into a folder, and run its script."""
        candidate.write(folder, self.seed)
        return self.play(folder, candidate.resized_script())


def _describe_end(event: ScriptPlayed, script: CallScript) -> ScriptOutcome:
    if event.outcome != "failed" or event.call is None:
        found = tuple((each.relative, each.finite) for each in event.differences)
        return ScriptOutcome(event.outcome, pattern=_remove_names(event.text), text=event.text, differences=found)
    text = event.unoptimized or event.text
    pattern = _remove_names(text) + ("" if event.unoptimized is not None else ", with optimizations only")
    title = script.calls[event.call].title
    return ScriptOutcome("failed", title, event.names[-1] if event.names else "", pattern, text)


def summarize_difference(runs: dict[str, Run], experiment: str) -> OutcomeDifference:
    """How the logits of an experiment differ, from its runs."""
    run = runs.get(experiment)
    finite = all(step.difference.finite for step in (run.steps if run else ()) if step.difference)
    causes = tuple(
        (name, found.name if found else runs[name].outcome)
        for name in CAUSES
        if name in runs and ((found := runs[name].cause) or runs[name].outcome == "differs")
    )
    return OutcomeDifference(run.outcome if run else "skipped", finite, causes)


def _remove_names(text: str) -> str:
    """The innermost error message without names, numbers and shapes."""
    inner = re.sub(r"Load model from .*? failed:", "", text.rpartition("Status Message:")[2])
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)", " ", inner)
    bare = re.sub(r"\S*[/\\_.]\S*|[0-9a-fx]*\d[0-9a-fx]*", " ", quoted)
    return " ".join(bare.split())
