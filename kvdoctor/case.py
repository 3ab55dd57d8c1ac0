"""The case: all that is known of one file or one stack, as checks are asked about it."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.findings import Advice
from kvdoctor.graph import Declared, GraphView
from kvdoctor.model_folder import ModelFolder
from kvdoctor.stacks import OnnxFile, StackFiles
from kvdoctor.trace import Run, Seen, Step

if TYPE_CHECKING:
    from kvdoctor.caller.holding import Held

Consumer = Literal["plain", "held"]

UNDECIDED = {
    "skipped": "{reason}",
    "died": "{reason}",
    "inconclusive": "{reason}",
    "ambiguous": "the difference to the reference run lies between noise and fault",
}
"""Outcomes of the judged loop that leave open whether the model is healthy, and what is said of them."""


@dataclass(frozen=True)
class Case:
    """What a check may ask about.

    Checks that ask about a file get `file`; those that ask about the contract get `stack` and `contract`; those that
    ask about runs get `runs` as well, and `declared_faults`, the names of the errors found in the contract, which are
    None until then. `refusals` are files that the runtime did not open: (file, its text by level, the level that opens
    it). `caller` is what holding the caller's own steps against the contract brought, where a trace was given.
    """

    folder: ModelFolder
    consumer: Consumer = "plain"
    file: OnnxFile | None = None
    stack: StackFiles | None = None
    contract: CacheContract | None = None
    runs: tuple[Run, ...] = ()
    declared_faults: tuple[str, ...] | None = None
    refusals: tuple[tuple[str, dict[str, str], str | None], ...] = ()
    crashes: tuple[str, ...] = ()
    caller: "Held | None" = None

    def run(self, experiment: str) -> Run | None:
        """The run of that experiment, if there was one."""
        return next((run for run in self.runs if run.experiment == experiment), None)

    @property
    def judged(self) -> Run | None:
        """The run of the loop that the consumer uses: plain, or held where that is a loop of its own.

        Where a decode step returns an emptied cache, that is what the plain loop suffers from, and that has a check of
        its own: any other fault is looked for in the held loop.
        """
        held = self.run("held-loop")
        if held is not None and held.outcome != "skipped" and (self.consumer == "held" or self.emptied):
            return held
        return self.run("plain-loop")

    @property
    def emptied(self) -> tuple[Slot, ...]:
        """Slots that a decode step returns without elements, by the graph or by what the runs showed."""
        return tuple(slot for slot in (self.contract.slots if self.contract else ()) if slot.emptied)

    @property
    def main(self) -> GraphView:
        """The graph that decodes with the cache."""
        assert self.stack is not None  # noqa: S101 - asked only where there is a stack
        assert self.stack.main.view is not None  # noqa: S101 - stacks hold files that were read
        return self.stack.main.view

    @property
    def decode_file(self) -> str:
        """The name of the file that decodes with the cache."""
        assert self.stack is not None  # noqa: S101 - asked only where there is a stack
        return self.stack.main.name

    def pairs(self) -> Iterator[tuple[Slot, Declared, Declared]]:
        """Every slot with its past and its present, as declared by the graph that decodes."""
        for slot in self.contract.slots if self.contract else ():
            if slot.present is not None and slot.past in self.main.inputs and slot.present in self.main.outputs:
                yield slot, self.main.inputs[slot.past], self.main.outputs[slot.present]

    def re_export(self, text: str) -> Advice:
        """Advice to let kvdoctor repair the graph."""
        return Advice("graph", text, f"kvdoctor re-export {shlex.quote(self.folder.shown)} -o FIXED")

    def returned(self, slot: Slot) -> Iterator[tuple[Step, Seen]]:
        """What decode steps of the plain loop returned for a slot."""
        run = self.run("plain-loop")
        for step in run.steps if run else ():
            if step.phase == "decode" and slot.present in step.returned:
                yield step, step.returned[slot.present]


def leading_cause(case: Case) -> tuple[str, Run] | None:
    """What explains that runs differ, and the run that decided: what a cache rests on before what a cache does."""
    repeated = case.run("same-feed")
    if repeated is not None and repeated.outcome == "differs":
        return "nondeterministic", repeated
    ahead, why, judged = case.run("later-token"), case.run("why"), case.judged
    if ahead is not None and ahead.cause is not None:
        return ahead.cause.name, ahead
    if why is not None and why.cause is not None and judged is not None and judged.outcome == "differs":
        return why.cause.name, why
    return None


def broken_promise(case: Case, run: Run) -> str | None:
    """The first slot that a run got in another size than the graph declares as a number, in words."""
    for step in run.steps if case.contract is not None else ():
        graph = case.contract.graph("decode" if step.phase == "decode" else "prefill") if case.contract else None
        for port in graph.outputs if graph else ():
            seen = step.returned.get(port.name)
            if port.role != "present" or seen is None or port.shape is None or len(seen.shape) != len(port.shape):
                continue
            if any(isinstance(size, int) and size != got for size, got in zip(port.shape, seen.shape, strict=True)):
                promised, got = describe(port.dtype, port.shape), describe(seen.dtype, seen.shape)
                return f"step {step.step} returns {port.name} as {got}, declared as {promised}"
    return None


def first_and_count(names: tuple[str, ...]) -> str:
    """Name one of many: `present.0.encoder.key and 3 more`."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
