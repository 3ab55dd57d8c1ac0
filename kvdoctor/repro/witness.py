"""What a set of files shows: asked of the worker, for the model itself and for every candidate.

Two failures are the same when the same call ends in the same way at the same node. The runtime's words are compared
with themselves, never read for a cause: of a candidate that fails, they must be those of the model, numbers and names
left out, since a cut in the wrong place makes nodes fail that were sound.
"""

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract
from kvdoctor.errors import WorkerDied
from kvdoctor.plain import from_plain, to_plain
from kvdoctor.repro.candidate import Candidate
from kvdoctor.runtimes import Job, Runtime
from kvdoctor.script import Comparison, Script, ScriptCall
from kvdoctor.trace import Run

CAUSES = ("same-feed", "later-token", "why", "why-chunk")
"""Experiments that name a cause."""


@dataclass(frozen=True, slots=True)
class Shown:
    """How a script ended: the title of the call, the innermost node, the words left of the text or the signal.

    `differences` are those of its comparisons: as a fraction of the spread, and whether all are numbers.
    """

    outcome: str
    title: str = ""
    node: str = ""
    words: str = ""
    text: str = ""
    differences: tuple[tuple[float, bool], ...] = ()

    @property
    def essence(self) -> tuple[str, str, str, str]:
        """What must be the same for a failure to be the same."""
        return (self.outcome, self.title, self.node, self.words)


@dataclass(frozen=True, slots=True)
class Difference:
    """What the experiments say of logits that differ: the outcome, whether they are numbers, and the causes named."""

    outcome: str
    finite: bool
    causes: tuple[tuple[str, str], ...]


@dataclass
class Witness:
    """Asks the worker about one stack. `asked` counts the candidates."""

    runtime: Runtime
    stack: str
    provider: str
    seed: int
    scratch: Path
    asked: int = 0

    def record(self, folder: Path, contract: CacheContract, experiment: str, exact: bool = False) -> Script:
        """Run one experiment and write its calls down, up to its failure."""
        job = self._job(folder) | {"record": experiment, "contract": to_plain(contract), "exact": exact}
        calls: list[ScriptCall] = []
        level = "all"
        comparisons: list[Comparison] = []
        with contextlib.suppress(WorkerDied):  # what it told until then is the script
            for event in self.runtime.ask({**job, "stack": self.stack, "seed": self.seed}):
                if event["event"] == "scripted":
                    calls.append(from_plain(ScriptCall, event["call"]))
                    compared = event["compared"]
                    comparisons += [from_plain(Comparison, compared)] if compared else []
                elif event["event"] == "run":
                    level = event["run"]["level"]
        return Script("differs", tuple(calls), tuple(comparisons), level=level)

    def play(self, folder: Path, script: Script) -> Shown:
        """Play a script on the files of a folder."""
        call, shown = -1, Shown("nothing")
        try:
            # To its last event: what is left unread would be taken for the answer to the next job.
            for event in self.runtime.ask(self._job(folder) | {"script": to_plain(script)}):
                if event["event"] == "playing":
                    call = event["call"]
                elif event["event"] == "played":
                    shown = self._shown(event, script)
                elif event["event"] == "crash":
                    shown = Shown("crashed", text=event["text"])
        except WorkerDied as death:
            title = script.calls[call].title if call >= 0 else "opening"
            return Shown("died", title, words=death.limit or death.how, text=death.how)
        return shown

    def differs(self, folder: Path, contract: CacheContract, experiment: str) -> Difference:
        """Put an experiment, and those that look for causes, to the files of a folder."""
        names = tuple(dict.fromkeys((experiment, "plain-loop", "chunk", *CAUSES)))
        job = Job(self.stack, folder.absolute(), contract, names, self.seed, self.provider)
        runs = {run.experiment: run for run in self.runtime.examine(job).runs}
        return difference(runs, experiment)

    def sees(self, candidate: Candidate, yardstick: "Shown | Difference", experiment: str) -> bool:
        """Whether a candidate shows the failure."""
        self.asked += 1
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            if isinstance(yardstick, Shown):
                return self.look_at(candidate, Path(folder)).essence == yardstick.essence
            candidate.write(Path(folder), self.seed)
            return self.differs(Path(folder), candidate.fitted_contract(), experiment) == yardstick

    def look_at(self, candidate: Candidate, folder: Path) -> Shown:
        """Play the script of a candidate on its files, which are written into a folder."""
        candidate.write(folder, self.seed)
        return self.play(folder, candidate.resized_script())

    def _shown(self, event: dict[str, Any], script: Script) -> Shown:
        if event["outcome"] != "failed":
            text = event.get("text", "")
            found = tuple((each["relative"], each["finite"]) for each in event.get("differences", ()))
            return Shown(event["outcome"], words=_words(text), text=text, differences=found)
        text = event.get("unoptimised") or event["text"]
        names = event.get("names") or []
        essence = _words(text) + ("" if "unoptimised" in event else ", with optimisations only")
        return Shown("failed", script.calls[event["call"]].title, names[-1] if names else "", essence, text)

    def _job(self, folder: Path) -> dict[str, Any]:
        return {"folder": str(folder.absolute()), "provider": self.provider}


def difference(runs: dict[str, Run], experiment: str) -> Difference:
    """What runs say of logits that differ."""
    run = runs.get(experiment)
    finite = all(step.difference.finite for step in (run.steps if run else ()) if step.difference)
    causes = tuple(
        (name, found.name if found else runs[name].outcome)
        for name in CAUSES
        if name in runs and ((found := runs[name].cause) or runs[name].outcome == "differs")
    )
    return Difference(run.outcome if run else "skipped", finite, causes)


def _words(text: str) -> str:
    """The innermost message without names, numbers and shapes."""
    inner = re.sub(r"Load model from .*? failed:", "", text.rpartition("Status Message:")[2])
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)", " ", inner)
    bare = re.sub(r"\S*[/\\_.]\S*|[0-9a-fx]*\d[0-9a-fx]*", " ", quoted)
    return " ".join(bare.split())
