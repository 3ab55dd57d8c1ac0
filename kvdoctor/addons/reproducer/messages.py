"""What the reproducer asks of the worker: to write a script, the calls that show a failure, and to play it.

An input of a call is made from a rule (`MadeArray`) or is what an earlier call returned (`PriorOutput`). Standard
library and numpy only: the worker plays scripts, and the reproducer makes the same arrays in the same way.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from kvdoctor.decode.calls import NUMPY_TYPES, Array, Conditions
from kvdoctor.decode.messages import Event, Job, PairedSide
from kvdoctor.records import record

Kind = Literal["fails", "differs", "refused", "dies"]


@record
class MadeArray:
    """A synthetic array: from `numbers` row by row, as noise from a `seed`, else `fill` everywhere."""

    dtype: str
    shape: tuple[int, ...]
    fill: float = 0.0
    seed: int | None = None
    numbers: tuple[float, ...] | None = None


@record
class PriorOutput:
    """What an earlier call returned: its index in the script, and the name of the output."""

    call: int
    output: str


@record
class ScriptCall:
    """One call: the file it goes to, and its feeds by input. `title` is its name for people: `step 2`."""

    title: str
    file: str
    feeds: dict[str, MadeArray | PriorOutput]
    logits: str


@record
class Comparison:
    """Logits that must be the same: the last positions of `call`, and those of `reference` from `start` on.

    `row` is the row of the reference's batch that the first row of the call stands for.
    """

    call: int
    reference: int
    row: int
    start: int
    count: int


@record
class CallScript:
    """Calls in order. The last one fails (`fails`, `dies`), or some `comparisons` do not hold (`differs`).

    `refused` scripts make no call: opening `files` is what fails. `level` is the optimization level to open them at.
    """

    kind: Kind
    calls: tuple[ScriptCall, ...]
    comparisons: tuple[Comparison, ...] = ()
    files: tuple[str, ...] = ()
    level: str = "all"

    def inputs(self) -> Iterator[tuple[ScriptCall, str, MadeArray | PriorOutput]]:
        """Every input of every call."""
        for call in self.calls:
            for name, value in call.feeds.items():
                yield call, name, value

    def trimmed(self) -> "CallScript":
        """Only the calls that the end of the script hangs on, counted anew.

        Calls that are fed nothing that was returned stay: they are there to run.
        """
        needed = {len(self.calls) - 1} if self.kind in ("fails", "dies") else set()
        if needed and not any(isinstance(value, PriorOutput) for _, _, value in self.inputs()):
            return self
        needed |= {index for c in self.comparisons for index in (c.call, c.reference)}
        for index in range(len(self.calls) - 1, -1, -1):
            if index in needed:
                needed |= {v.call for v in self.calls[index].feeds.values() if isinstance(v, PriorOutput)}
        place = {old: new for new, old in enumerate(sorted(needed))}
        calls = []
        for call in (self.calls[index] for index in sorted(needed)):
            feeds = {
                n: replace(v, call=place[v.call]) if isinstance(v, PriorOutput) else v for n, v in call.feeds.items()
            }
            calls.append(replace(call, feeds=feeds))
        comparisons = tuple(
            replace(c, call=place[c.call], reference=place[c.reference]) for c in self.comparisons if c.call in place
        )
        return replace(self, calls=tuple(calls), comparisons=comparisons)

    def fitting(self, inputs: dict[str, set[str]]) -> "CallScript":
        """The script without feeds for inputs that the files no longer have; `inputs` by file."""
        calls = tuple(
            replace(call, feeds={name: value for name, value in call.feeds.items() if name in inputs[call.file]})
            for call in self.calls
        )
        return replace(self, calls=calls).trimmed()


def make_array(given: MadeArray) -> Array:
    """Make the array of a rule."""
    kind = NUMPY_TYPES[given.dtype]
    if given.numbers is not None:
        return np.array(given.numbers).astype(kind).reshape(given.shape)
    if given.seed is not None:
        return np.random.default_rng(given.seed).standard_normal(given.shape).astype(kind)
    return np.full(given.shape, given.fill, kind)


@record
class RecordJob(Conditions, PairedSide, Job):
    """Run one experiment and write its calls down as a script; `exact` keeps the floats that the loop computed."""

    experiment: str
    exact: bool = False


@record
class PlayJob(Job):
    """Play a script on the files of a folder."""

    folder: Path
    script: CallScript


@record
class CallScripted(Event):
    """A call of a script that is being recorded, before it runs; `compared` says where its expected logits are."""

    call: ScriptCall
    compared: Comparison | None = None


@record
class CallPlaying(Event):
    """A call of a script is about to run."""

    call: int


@record
class ScriptPlayed(Event):
    """How a script ended: all calls ran, one failed, or a file was refused.

    `unoptimized` is the text of the same call without graph optimization, and `names` are those that it mentions.
    `differences` has for each comparison the fraction of the logits' standard deviation; None where it is not finite.
    """

    outcome: Literal["ran", "failed", "refused"]
    text: str = ""
    call: int | None = None
    unoptimized: str | None = None
    names: tuple[str, ...] = ()
    differences: tuple[float | None, ...] = ()


WORK = {
    RecordJob: ("addons.reproducer.worker.replay", "record_experiment"),
    PlayJob: ("addons.reproducer.worker.replay", "replay_script"),
}
"""The module and function of the worker for each job."""
