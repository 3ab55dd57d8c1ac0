"""The case: all that is known of one file or one stack, as checks are asked about it."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdoctor.choices import Consumer, Required
from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.findings import Advice
from kvdoctor.graph import Declared, GraphView
from kvdoctor.model_folder import ModelFolder
from kvdoctor.stacks import OnnxFile, StackFiles
from kvdoctor.targets import Target
from kvdoctor.targets.stay import Stay
from kvdoctor.trace import Run, Seen, Step

if TYPE_CHECKING:
    from kvdoctor.caller.holding import Held

CAUSE_OF = {"chunk": "why-chunk", "batch": "why-batch", "long-past": "why-long"}
"""Experiments with other sizes than the judged loop, and what looks for the cause of their differences."""

UNDECIDED = {
    "skipped": "{reason}",
    "died": "{reason}",
    "inconclusive": "{reason}",
    "ambiguous": "the difference of the logits lies between noise and fault",
}
"""Outcomes of the judged loop that leave open whether the model is healthy, and what is said of them."""


@dataclass(frozen=True)
class Case:
    """What a check may ask about.

    Checks that ask about a file get `file`; those that ask about the contract get `stack` and `contract`; those that
    ask about runs get `runs` as well, and `declared_faults`, the names of the errors found in the contract, which are
    None until then. `refusals` are files that the runtime did not open: (file, its text by level, the level that opens
    it). `required` are the uses that must work, `thorough` says that all is to be tried; `timings` are seconds by
    label. `caller` is what holding the caller's own steps against the contract brought, where a trace was given.
    `targets` are the runtimes that the model must live in, `stays` what it showed under each of them, and `here` is
    the runtime that `runs` are from, None where nothing is run.
    """

    folder: ModelFolder
    consumer: Consumer = "plain"
    file: OnnxFile | None = None
    stack: StackFiles | None = None
    contract: CacheContract | None = None
    runs: tuple[Run, ...] = ()
    declared_faults: tuple[str, ...] | None = None
    refusals: tuple[tuple[str, dict[str, str], str | None], ...] = ()
    required: tuple[Required, ...] = ()
    thorough: bool = False
    timings: Mapping[str, float] = field(default_factory=dict)
    caller: "Held | None" = None
    targets: tuple[Target, ...] = ()
    stays: tuple[Stay, ...] = ()
    here: Target | None = None

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

    @property
    def proved_right(self) -> bool:
        """Whether the judged loop was held against a run without a cache, and agreed."""
        one_token = self.contract is not None and self.contract.new_tokens is not None
        return self.judged is not None and self.judged.outcome == "passed" and not one_token

    def re_export(self, text: str) -> Advice:
        """Advice to let kvdoctor repair the graph."""
        targets = "".join(f" --target {target.asked}" for target in self.targets)
        return Advice("graph", text, f"kvdoctor re-export {shlex.quote(self.folder.shown)} -o FIXED{targets}")

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
    if judged is not None and judged.repeats and judged.shows == "differs":
        return "nondeterministic", judged
    if ahead is not None and ahead.cause is not None:
        return ahead.cause.name, ahead
    places = case.run("written-places")
    if places is not None and places.cause is not None:
        return places.cause.name, places
    if judged is None or judged.shows != "differs":
        return None
    if why is not None and why.cause is not None:
        return why.cause.name, why
    fed_back = case.run("why-fed-back") if judged.experiment == "plain-loop" else None
    return (fed_back.cause.name, fed_back) if fed_back is not None and fed_back.cause is not None else None


def cause_in_use(case: Case, experiment: str) -> tuple[str, Run] | None:
    """What explains that a run of other sizes differs, and the run that decided."""
    why = case.run(CAUSE_OF.get(experiment, ""))
    return (why.cause.name, why) if why is not None and why.cause is not None else None


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


def growth_words(run: Run) -> str | None:
    """How the difference goes over the steps; None where too few of them tell."""
    if run.growth is None:
        return None
    found = {step.step: step.difference.relative for step in run.steps if step.difference is not None}
    match run.growth.shape:
        case "flat":
            return "is no more in later steps than in the first"
        case "linear":
            return f"grows with the steps, from {found[min(found) + 1]:.1e} to {found[max(found)]:.1e}"
        case _:
            return f"sets in at step {run.growth.step}"


def rounding_words(run: Run) -> str:
    """What the same experiment shows where nothing is rounded: both figures."""
    twin = run.unrounded
    if twin is None:
        return ""
    if twin.outcome not in ("passed", "differs"):
        return f"without what it rounds, the same graph gives no clearer answer ({twin.outcome})"
    if twin.outcome == "passed":
        return (
            f"without what it rounds, the same graph is within {twin.worst:.1e} of the spread: rounding alone moves "
            f"the logits, by up to {_worst(run):.1e}"
        )
    return (
        f"without what it rounds, the same graph is off by {twin.worst:.2g} of the spread: more than rounding, which "
        "alone would leave 2e-4"
    )


def off_by(run: Run, step: Step | None) -> str | None:
    """How far the logits of a step are off, and how far where nothing is rounded; None where neither is known."""
    here = step.difference if step is not None else None
    if here is not None and not here.finite:
        return "not finite"
    words = [f"off by {here.relative:g} of their spread"] if here is not None else []
    if run.hidden and run.unrounded is not None:
        words.append(f"off by {run.unrounded.at(step):g} where nothing is rounded")
    return ", ".join(words) or None


def _worst(run: Run) -> float:
    return max((s.difference.relative for s in run.steps if s.difference is not None), default=0.0)


def first_and_count(names: tuple[str, ...]) -> str:
    """Name one of many: `present.0.encoder.key and 3 more`."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
