"""What a set of files shows: asked of the worker, for the model itself and for every candidate.

Two failures are the same when the same call ends in the same way at the same node. The runtime's words are compared
with themselves, never read for a cause: of a candidate that fails, they must be those of the model, numbers and names
left out, since a cut in the wrong place makes nodes fail that were sound.
"""

import re
import tempfile
from dataclasses import dataclass, field, replace
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
    """How a script ended: the title of the call, the innermost node, the words left of the text, the signal."""

    outcome: str
    title: str = ""
    node: str = ""
    words: str = ""
    text: str = ""

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
    reasons: list[str] = field(default_factory=list)

    def record(self, folder: Path, contract: CacheContract, run: Run, exact: bool = False) -> Script:
        """Run one experiment and write its calls down, up to its failure."""
        job = self._job(folder) | {"record": run.experiment, "contract": to_plain(contract), "exact": exact}
        calls: list[ScriptCall] = []
        comparisons: list[Comparison] = []
        with _deaths_counted():
            for event in self.runtime.ask({**job, "stack": self.stack, "seed": self.seed}):
                if event["event"] == "scripted":
                    calls.append(from_plain(ScriptCall, event["call"]))
                    compared = event["compared"]
                    comparisons += [from_plain(Comparison, compared)] if compared else []
        return Script("differs", tuple(calls), tuple(comparisons), level=run.level)

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
            candidate.write(Path(folder), self.seed)
            if isinstance(yardstick, Difference):
                return self.differs(Path(folder), candidate.fitted_contract(), experiment) == yardstick
            return self.play(Path(folder), candidate.resized_script()).essence == yardstick.essence

    def _shown(self, event: dict[str, Any], script: Script) -> Shown:
        if event["outcome"] != "failed":
            text = event.get("text", "")
            return Shown(event["outcome"], words=_words(text), text=text)
        text = event.get("unoptimised") or event["text"]
        names = event.get("names") or []
        essence = _words(text) + ("" if "unoptimised" in event else ", with optimisations only")
        return Shown("failed", script.calls[event["call"]].title, names[-1] if names else "", essence, text)

    def _job(self, folder: Path) -> dict[str, Any]:
        return {"folder": str(folder.absolute()), "provider": self.provider}


class _deaths_counted:  # noqa: N801 - used like a function
    """A recording ends where the worker does: what it told until then is the script."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: "type[BaseException] | None", *_: object) -> bool:
        return kind is not None and issubclass(kind, WorkerDied)


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
    inner = text.rpartition("Status Message:")[2]
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|\S*[/\\]\S*|[0-9a-fx]*\d[0-9a-fx]*", " ", inner)
    return " ".join(bare.split())


def of_kind(script: Script, kind: str, **more: Any) -> Script:
    """The script as one of another kind."""
    return replace(script, kind=kind, **more).trimmed()  # type: ignore[arg-type]
