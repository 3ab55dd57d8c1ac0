"""Holds what a stack computed against the PyTorch checkpoint it was exported from.

The worker leaves its feeds and logits in a private file, a process with PyTorch computes the same feeds and leaves its
logits in another, and here the two are compared.
"""

import json
import re
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.export.environments import Script, ScriptFailed, Unavailable, transformers_for
from kvdoctor.stacks import StackFiles
from kvdoctor.trace import Outcome, Run, Step

if TYPE_CHECKING:
    from kvdoctor.parity import Verdict

SCRIPT = Path(__file__).parent / "export" / "scripts" / "checkpoint_logits.py"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
NAME = "against-checkpoint"
"""The experiment whose runs these are."""
GREEDY = "greedy-against-checkpoint"
"""The one whose words are held."""

ROUNDED = re.compile(r"quantize|QLinear|Integer|NBits|QAttention|QGemm", re.IGNORECASE)
"""Operators that compute with weights rounded to 8 bits or fewer."""
ALIKE, UNLIKE = 0.8, 0.5
"""Such logits are held by their correlation over the vocabulary: the worst of 15 tiny models rounded to 8 and 4 bits
kept 0.91 as a mean over the steps, and those of two different models have none. A single logit may be off by more than
the spread.
"""


class CannotCompare(Exception):
    """A stack cannot be held against the checkpoint; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on each step, and by what in words."""

    verdicts: dict[int, "Verdict"]
    words: str


@dataclass
class Checkpoint:
    """A checkpoint of PyTorch, as the user named it: a folder, or a model of the hub.

    `scratch` is a private folder, `held` says in words what agreed with the checkpoint. The process that runs it is
    started when it is first needed and kept; it ends with `close`, or when nothing refers to the checkpoint any more.

    Raises:
        UsageError: what was named is no checkpoint.
    """

    name: str
    offline: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    _script: Script | None = None
    _obstacle: str | None = None

    def __post_init__(self) -> None:
        self.is_folder = bool(self.name) and Path(self.name).is_dir()
        if self.is_folder and not (Path(self.name) / "config.json").is_file():
            raise UsageError(f"no config.json in {self.name}; a checkpoint is the folder that save_pretrained wrote")
        if not self.is_folder and (Path(self.name).exists() or not HUB_NAME.fullmatch(self.name)):
            raise UsageError(f"{self.name!r} is no folder of a checkpoint, and no name of a model on the hub")
        self._folder = tempfile.TemporaryDirectory(prefix="kvdoctor-")

    @property
    def scratch(self) -> Path:
        """A private folder, gone when the checkpoint is closed."""
        return Path(self._folder.name)

    def close(self) -> None:
        """End the process and remove what it left."""
        if self._script is not None:
            self._script.stop()
        self._folder.cleanup()

    def logits(self, feeds: Path, out: Path, experiment: str = NAME) -> dict[str, Any]:
        """Let PyTorch compute the feeds of an experiment into another file; gives the model's class and the versions.

        Raises:
            CannotCompare: there is no environment for it, or the checkpoint cannot be run.
        """
        if self._obstacle is not None:
            raise CannotCompare(self._obstacle)
        try:
            if self._script is None:
                given = {"checkpoint": self._path, "local": self.is_folder or self.offline}
                self._script = Script(SCRIPT, given, transformers_for(self._config()), self.offline)
                weakref.finalize(self, self._script.stop)
            answer = self._script.ask({"feeds": str(feeds), "out": str(out), "prefix": f"{experiment}:"})
        except Unavailable as error:
            self._obstacle = str(error)
            raise CannotCompare(self._obstacle) from None
        except ScriptFailed as error:
            shown = str(error).replace(self._path, self.name)
            hint = "; without --offline it may be downloaded" if self.offline and not self.is_folder else ""
            raise CannotCompare(f"{self.name} cannot be run: {shown}{hint}") from None
        self.versions = {name: str(answer[name]) for name in ("torch", "transformers")}
        return answer

    @property
    def _path(self) -> str:
        return str(Path(self.name).absolute()) if self.is_folder else self.name

    def _config(self) -> dict[str, Any]:
        """The config of a folder; what cannot be read is left to transformers to refuse."""
        if not self.is_folder:
            return {}
        try:
            read = json.loads((Path(self.name) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return read if isinstance(read, dict) else {}


def hold(stack: StackFiles, contract: CacheContract, runs: tuple[Run, ...], mine: Path, checkpoint: Checkpoint) -> Run:
    """Hold the run of a stack, whose feeds and logits lie in the file `mine`, against a checkpoint.

    The run comes back with its differences to the checkpoint, and its reason says what was compared.

    Raises:
        CannotCompare: there is nothing to compare, or nothing to compare it with.
    """
    import numpy as np  # not for inspections

    run = next((run for run in runs if run.experiment == NAME), None)
    if run is None or run.outcome in ("skipped", "died") or not mine.is_file():
        reason = run.reason if run is not None else "no decode step was run"
        raise CannotCompare(f"not held against {checkpoint.name}: {reason}")
    with np.load(mine) as file:
        kept = {name.removeprefix(f"{NAME}:"): file[name] for name in file.files if name.startswith(f"{NAME}:")}
    if "encoder" in kept and not {"encoder_input", "encoder_states"} & kept.keys():
        raise CannotCompare(
            f"not held against {checkpoint.name}: what its encoder gives is made up; bring the encoder's file"
        )
    theirs = mine.with_suffix(".checkpoint.npz")
    facts = checkpoint.logits(mine, theirs)
    with np.load(theirs) as file:
        found = {name: file[name] for name in file.files}
    if "step.0" not in kept:
        raise CannotCompare(f"not held against {checkpoint.name}: the first call fails, so there are no logits")
    run = _judged(run, kept, found, _words(facts, checkpoint), _arithmetic(stack, contract))
    if run.outcome == "passed":
        checkpoint.held.append(f"{stack.name}: {run.reason}")
    return run


def hold_greedy(contract: CacheContract, runs: tuple[Run, ...], mine: Path, checkpoint: Checkpoint) -> Run | None:
    """Hold the words that the held loop decoded against the checkpoint; None where it did not come that far.

    That the checkpoint finds each of them the likeliest after those before it says that it decodes the same ones.

    Raises:
        CannotCompare: the checkpoint cannot be run.
    """
    import numpy as np

    run = next((run for run in runs if run.experiment == GREEDY), None)
    if run is None or run.outcome in ("skipped", "died", "failed") or not mine.is_file():
        return run
    with np.load(mine) as file:
        kept = {name.removeprefix(f"{GREEDY}:"): file[name] for name in file.files if name.startswith(f"{GREEDY}:")}
    if "step.0" not in kept or ("encoder" in kept and not {"encoder_input", "encoder_states"} & kept.keys()):
        return run
    theirs = mine.with_suffix(".greedy.npz")
    facts = checkpoint.logits(mine, theirs, GREEDY)
    with np.load(theirs) as file:
        found = file["loop"] if "loop" in file.files else file["whole"]
    prompt, steps = int(kept["prompt"]), sum(name.startswith("step.") for name in kept)
    logits = np.stack([kept[f"step.{number}"][:, -1] for number in range(steps)], axis=1)
    expected = found[:, prompt - 1 : prompt - 1 + steps]
    words, model = logits.argmax(-1), _words(facts, checkpoint)
    if logits.shape != expected.shape:
        text = f"logits of {list(logits.shape)}, where {model} has {list(expected.shape)}"
        return replace(run, outcome="differs", failed_step=0, reason=text)
    same = words == expected.argmax(-1)
    if same.all():
        return replace(run, outcome="passed", reason=f"{steps} greedy tokens are those of {model}")
    at = int(np.argmin(same.all(axis=0)))
    row = int(np.argmin(same[:, at]))
    lead = float(expected[row, at].max() - expected[row, at, words[row, at]]) / max(float(expected.std()), 1e-12)
    text = f"greedy token {at}: {model} has another one, whose logit leads by {lead:.1e} of their spread"
    from kvdoctor.tolerances import tolerance

    close = lead <= tolerance(contract.exactness).passes
    return replace(run, outcome="ambiguous" if close else "differs", failed_step=at, reason=text)


def _words(facts: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    return f"{facts['model']} of {checkpoint.name} ({versions}, float32)"


def _judged(run: Run, kept: dict[str, Any], found: dict[str, Any], model: str, exactness: str) -> Run:
    """Each step with its difference to the checkpoint, and the verdict on all of them."""
    from kvdoctor.parity import compare

    wholes, held, alike = int(kept["wholes"]), [], {}
    for step in run.steps:
        mine, expected = kept.get(f"step.{step.step}"), _theirs(step, found, step.step >= wholes)
        if mine is None:
            held.append(step)  # it failed, or was not reached
            continue
        expected = expected[:, -mine.shape[1] :]
        if mine.shape != expected.shape:
            words = f"step {step.step}: logits of {list(mine.shape)}, where {model} has {list(expected.shape)}"
            return replace(run, outcome="differs", failed_step=step.step, reason=words, steps=tuple(held))
        alike[step.step] = _correlation(mine, expected)
        held.append(replace(step, difference=compare(mine, expected, exactness if exactness != "rounded" else "float")))
    rounded = exactness == "rounded"
    judged = _judged_by_correlation(held, alike) if rounded else _judged_by_tolerance(held, exactness)
    at = next((number for number, verdict in judged.verdicts.items() if verdict == "fail"), None)
    outcome: Outcome = "differs" if at is not None else run.outcome
    if outcome == "passed" and "ambiguous" in judged.verdicts.values():
        outcome = "ambiguous"
    words = (
        f"{_compared(held, wholes)} against {model}: {_apart(held, at)}; {judged.words}{_encoder_words(kept, found)}"
    )
    return replace(
        run, outcome=outcome, failed_step=run.failed_step if at is None else at, reason=words, steps=tuple(held)
    )


def _theirs(step: Step, found: dict[str, Any], in_loop: bool) -> Any:
    """The checkpoint's logits of the same positions; where its loop could not be run, those of the whole sequence."""
    source = found["loop"] if in_loop and "loop" in found else found["whole"]
    return source[:, step.past_length : step.past_length + step.new_tokens]


def _arithmetic(stack: StackFiles, contract: CacheContract) -> str:
    """What the graph computes in: a row of the tolerances, or `rounded` where its weights are."""
    operators = {name for file in stack.files.values() if file.view is not None for name in file.view.operators}
    return "rounded" if any(ROUNDED.search(name) for name in operators) else contract.exactness


def _judged_by_tolerance(steps: list[Step], exactness: str) -> Judged:
    """By the table that the other runs are judged by."""
    from kvdoctor.parity import judge
    from kvdoctor.tolerances import tolerance

    verdicts = {step.step: judge(step.difference, exactness) for step in steps if step.difference is not None}
    return Judged(verdicts, f"{exactness} allows {tolerance(exactness).passes:g}")


def _judged_by_correlation(steps: list[Step], alike: dict[int, float]) -> Judged:
    """Weights that were rounded: all positions together, and no finer than that."""
    mean = sum(alike.values()) / max(len(alike), 1)
    finite = all(step.difference.finite for step in steps if step.difference is not None)
    verdict: Verdict = "fail" if mean < UNLIKE or not finite else "pass" if mean >= ALIKE else "ambiguous"
    words = f"their correlation is {mean:.3f}, and rounded weights leave {ALIKE:g} or more"
    return Judged(dict.fromkeys(alike, verdict), words)


def _correlation(mine: Any, theirs: Any) -> float:
    """Of two arrays of logits over the vocabulary, as a mean over the positions; 0 where they are not finite."""
    import numpy as np

    one, other = (array.astype(np.float64) - array.mean(-1, keepdims=True) for array in (mine, theirs))
    with np.errstate(all="ignore"):
        found = (one * other).sum(-1) / np.sqrt((one**2).sum(-1) * (other**2).sum(-1))
    return float(np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0).mean())


def _apart(steps: list[Step], failed: int | None) -> str:
    differences = [step.difference for step in steps if step.difference is not None]
    if not all(difference.finite for difference in differences):
        return "logits not finite"
    worst = max((difference.relative for difference in differences), default=0.0)
    if failed is None:
        return f"logits within {worst:.1e} of their spread"
    return f"logits off by {worst:.2g} of their spread, first at step {failed}"


def _compared(steps: list[Step], wholes: int) -> str:
    """What was compared, in words: `the whole sequence of 11 tokens, a prefill of 3 and 8 steps of the held loop`."""
    done = [step for step in steps if step.difference is not None]
    whole, loop = [s for s in done if s.step < wholes], [s for s in done if s.step >= wholes]
    parts = [f"the whole sequence of {whole[-1].new_tokens} tokens"] if whole else []
    if loop:
        parts.append(f"a prefill of {loop[0].new_tokens} and {len(loop) - 1} steps of the held loop")
    return ", ".join(parts) or "no step"


def _encoder_words(kept: dict[str, Any], found: dict[str, Any]) -> str:
    """How far the states of the two encoders are apart, where both are known."""
    import numpy as np

    mine, theirs = kept.get("states"), found.get("states")
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return ""
    width = max(float(np.std(theirs.astype(np.float64))), 1e-12)
    apart = float(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max(initial=0.0)) / width
    return f"; states of the encoder within {apart:.1e}"
