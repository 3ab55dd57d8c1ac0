"""Not a check: which check explains what the runs show, so that one fault is one finding."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor.contract import Slot
from kvdoctor.decode.runs import (
    GENERAL_CAUSES,
    HISTORY,
    OWN_SESSION,
    RING,
    WRONG,
    Cause,
    ObservedTensor,
    Run,
    Step,
)
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.errors import Explained
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Use


AT_LENGTHS = ("each-length", "near-thresholds", "far-thresholds", "rows-near-thresholds", "long-past", RING)
"""Experiments with steps of one token, at other lengths than those of the loop."""
CHUNKS = ("chunk", "second-turn", "long-chunks", "chunks-near-thresholds")
"""Experiments with steps of several tokens."""
STATES = ("recurrent-state", "conv-state", "hidden-memory")
NAMED_BY_USE = (*AT_LENGTHS, *CHUNKS)
"""Experiments whose differences have checks of their own, where they have no other cause."""


@record
class WrongLength:
    """A slot, the first step of a run after which its length is wrong, that length in tokens, and the use."""

    slot: Slot
    run: Run
    step: Step
    seen: ObservedTensor
    length: int
    use: "Use | None" = None


def leading_cause(context: ContractContext) -> tuple[str, Run] | None:
    """The check that explains why runs differ, and the run that decided: faults without a cache come first."""
    repeated = context.find_run("same-feed")
    if repeated is not None and repeated.outcome == "differs":
        return "nondeterministic", repeated
    loop = context.checked_loop
    if loop is not None and loop.repeats and loop.shows == "differs" and not loop.not_finite:
        return "nondeterministic", loop
    other = context.find_run(OWN_SESSION)
    if other is not None and other.shows == "differs" and loop is not None and loop.shows == "passed":
        return "nondeterministic", other
    experiments = [HISTORY, "later-token", "written-places"]
    if loop is not None and loop.shows == "differs":
        experiments += ["why", *(["why-fed-back"] if loop.experiment == "plain-loop" else [])]
    for run in map(context.find_run, experiments):
        if run is not None and run.cause is not None:
            place = loop.location.cause if loop is not None and loop.location is not None else ""
            # What a step makes of a state that is read wrong is wrong too.
            states = {slot.past for slot in context.contract.slots if slot.kind in STATES}
            read = run.cause.name == "new-entries-wrong" and place == "cache-misread" and run.cause.slot in states
            open_ = place and (_is_open(run.cause, place) or read)
            return (place, loop) if loop is not None and place and open_ else (run.cause.name, run)
    return None


def _is_open(cause: Cause, place: str = "cache-misread") -> bool:
    """Whether the place in the graph tells more: what all calls store wrong, or whether dropped entries are needed.

    Entries that change on the way to the attention, and come back so, are read wrong in the first place. What a graph
    chooses by a length says less than that a step does not attend to some entries.
    """
    if place == "branches-disagree" and cause.unseen:
        return False
    rewritten = cause.name == "present-rewrites-past" and place == "cache-misread" and not cause.read_right
    return cause.name == "cache-misread" or bool(cause.dropped) or rewritten


def rests_on_place(context: ContractContext) -> bool:
    """Whether the cause of what the loop shows has no name before its place in the graph is known."""
    leading = leading_cause(context)
    return leading is not None and leading[1].cause is not None and _is_open(leading[1].cause)


def cause_in_use(context: ContractContext, experiment: str) -> tuple[str, Run] | None:
    """The check that explains why another use differs, and the run: the place, where it says more, else `why`."""
    from kvdoctor.decode.experiments import find_explaining

    why, run = context.find_run(find_explaining(experiment) or ""), context.find_run(experiment)
    if run is not None and run.cause is not None:
        return run.cause.name, run
    if experiment in AT_LENGTHS and (why is None or why.cause is None):  # steps on a full ring are looked at there
        why = context.find_run(RING)
    if why is None or why.cause is None or run is None:
        return None if why is None or why.cause is None else (why.cause.name, why)
    left_out = (slot for slot in context.contract.slots if why.cause.dropped and slot.past == why.cause.slot)
    cut = next((find_wrong_length(slot, run) for slot in left_out), None)
    if cut is not None and run.failed_step is not None and run.failed_step > cut.step.step + 1:
        return None  # a step is right on a past without the entries that the cause says are left out
    place = run.location.cause if run.location is not None else ""
    # Which scores a graph chooses by a length is what its mask does.
    scores = run.location is not None and run.location.scores
    chosen = why.cause.name == "mask-not-offset" and place == "branches-disagree" and not scores
    return (place, run) if place and (why.cause.dropped or chosen) else (why.cause.name, why)


def find_named_cause(context: RunContext, other: Run) -> str | None:
    """The check that names the cause in a run of other sizes; None where none does."""
    if other.cause is not None:
        return other.cause.name
    if (name := cause_at_length(context, other)) is not None:
        return name
    cause, rows = cause_in_use(context, other.experiment), context.find_run("batch-rows")
    if cause is not None and cause[0] not in GENERAL_CAUSES:
        return cause[0]
    together = rows is not None and rows.outcome == "differs"  # rows that interact without a cache do so with one
    if other.experiment in ("batch", "beam-reorder") and (together or differs_before_reorder(other)):
        return "batch-rows-interact"
    place = other.location
    if place is not None and place.node and place.cause in GENERAL_CAUSES and other.experiment not in NAMED_BY_USE:
        return place.cause
    return "non-finite" if other.not_finite else None


def differs_before_reorder(run: Run) -> bool:
    """Whether beams are wrong in the steps before their cache is reordered: so is any batch of as many rows."""
    return run.experiment == "beam-reorder" and run.failed_step in (0, 1)


def cause_at_length(context: RunContext, run: Run) -> str | None:
    """The check that explains a run by a length from which on earlier tokens change in a call without a cache."""
    near = (one.cause for one in context.runs if one.experiment in AT_LENGTHS and one.cause is not None)
    cause, step = next((cause for cause in near if cause.from_length), None), run.wrong_step
    if cause is None or step is None or step.past_length + step.new_tokens < cause.from_length:
        return None
    return cause.name


def find_explanation(context: RunContext, name: str = "cached-differs") -> str | None:
    """Which check names the cause of what the runs show, as text; None where the check `name` has to."""
    if context.declared_faults:
        return f"explained by {', '.join(context.declared_faults)}"
    if fails_where_opened(context):
        return "the runtime refuses the file, see KV010"
    if rejects_empty_past(context):
        return "the first step already fails, see KV201"
    if next(find_wrong_lengths(context), None) is not None:
        return "the length of a present is wrong, see KV205 and KV206"
    leading = leading_cause(context)
    if leading is not None and leading[0] not in (name, "cached-differs"):
        return f"explained by {leading[0]}"
    return None


def leave_to_other(context: RunContext, name: str = "cached-differs") -> None:
    """Raise `Explained` where another check names the cause."""
    if reason := find_explanation(context, name):
        raise Explained(reason)


def find_faulty_uses(context: RunContext, outcome: str, *, coarse: bool = False) -> Iterator[tuple[Run, "Use"]]:
    """Runs of other sizes with that outcome, where the loop passes, or is proved, and no simpler use goes wrong too.

    Those that are wrong by a rounded cache alone, one fault for all uses, are left out, or are the only ones: `coarse`.
    """
    loop = context.checked_loop
    wrong = {run.experiment for run in context.runs if run.shows in ("failed", "differs")}
    right = context.is_proved if loop is None else loop.shows == "passed"
    for experiment, use in context.uses.items() if right else ():
        run = context.find_run(experiment)
        if run is not None and run.shows == outcome and not wrong.intersection(use.after) and run.too_coarse == coarse:
            yield run, use


def find_broken_uses(context: RunContext) -> Iterator[tuple[Run, "Use"]]:
    """Runs with logits or states that are not finite, where the checked loop shows no fault, whatever it left open."""
    loop = context.checked_loop
    for run in context.runs if loop is None or loop.shows not in WRONG else ():
        broken = run.not_finite or (run.cause is not None and run.cause.name == "non-finite")
        if broken and run.shows == "differs" and run.experiment in context.uses:
            yield run, context.uses[run.experiment]


def fails_where_opened(context: RunContext) -> bool:
    """Whether a file that opens at a lower level only fails there as well: the graph is broken at every level."""
    opened = any(one.opens_at is not None for one in context.refusals)
    return opened and context.checked_loop is not None and context.checked_loop.outcome == "failed"


def rejects_empty_past(context: RunContext) -> bool:
    """Whether the first step fails with a past of length 0, and runs with a dummy of length 1."""
    empty, dummy = context.find_run("empty-past"), context.find_run("dummy-past-runs")
    return empty is not None and empty.outcome == "failed" and dummy is not None and dummy.outcome == "passed"


def find_wrong_lengths(context: RunContext) -> Iterator[WrongLength]:
    """Each slot at the first step after which it has a wrong length: in the plain loop, else at other lengths."""
    run, loop = context.find_run("plain-loop"), context.checked_loop
    if context.declared_faults:
        return  # which axis is the length is then not known
    why = context.find_run("why")
    cause = why.cause if why is not None else None
    explained = cause is not None and cause.name not in GENERAL_CAUSES and not cause.dropped
    found = False
    for slot in context.contract.slots:
        wrong = find_wrong_length(slot, run)
        if wrong is None:
            continue
        # A window whose width nothing declares: the logits, or another cause, say that it is wide enough.
        before = loop is not None and loop.failed_step is not None and loop.failed_step <= wrong.step.step
        named = loop is not None and loop.location is not None and loop.location.cause
        wide = before or (loop is not None and loop.outcome == "passed") or named
        lost = drops_past(wrong) or _is_no_window(slot, context.runs)
        if not (slot.trimmed and (wide or (explained and not lost))):
            found = True
            yield wrong
    if not found:
        yield from _find_cut_lengths(context)


def _is_no_window(slot: Slot, runs: Iterable[Run]) -> bool:
    """Whether prompts of two lengths both come back shorter than they are, and by different lengths."""
    at, found = slot.length_axis or 0, set[int]()
    for step in (step for run in runs for step in run.steps if step.phase == "prefill" and step.past_length == 0):
        seen = step.returned.get(slot.filled_by or "")
        if seen is not None and len(seen.shape) == len(slot.axes) and seen.shape[at] < step.new_tokens:
            found.add(seen.shape[at])
    return len(found) > 1


def _find_cut_lengths(context: RunContext) -> Iterator[WrongLength]:
    """Slots whose presents lose entries at other lengths, by the first run that fails or differs right after it."""
    differing = [*find_faulty_uses(context, "differs")]
    causes = (cause_in_use(context, run.experiment) for run, _ in differing)
    if any(cause is not None and cause[1].cause is not None and cause[1].cause.dropped for cause in causes):
        differing = []  # which entries are left out is known, and says more than the length
    for run, use in (*find_faulty_uses(context, "failed"), *differing):
        if run.experiment not in NAMED_BY_USE:
            continue
        named = run.location is not None and run.location.cause
        slots = (slot for slot in context.contract.slots if not (named and slot.trimmed))
        cut = [wrong for slot in slots if (wrong := find_wrong_length(slot, run)) is not None]
        # The step that is fed the first cut past goes wrong: none before it was fed one.
        cut = [wrong for wrong in cut if wrong.step.step + 1 == run.failed_step]
        if cut:
            yield from (replace(wrong, use=use) for wrong in cut)
            return


def find_wrong_length(slot: Slot, run: Run | None) -> WrongLength | None:
    """The first step of a run after which a slot has a wrong length."""
    at = slot.length_axis
    if run is None or at is None or slot.growth in ("constant", "paged"):
        return None
    for step in run.steps:
        returned = step.returned.get((slot.filled_by if step.phase == "prefill" else slot.present) or "")
        if returned is None or len(returned.shape) != len(slot.axes):
            continue
        right = _list_right_lengths(slot, step, at)
        if None not in right and returned.shape[at] not in right:
            return WrongLength(slot, run, step, returned, returned.shape[at])
    return None


def drops_past(wrong: WrongLength) -> bool:
    """Whether a slot of a wrong length has the new tokens alone."""
    growing, step = wrong.slot.growth in ("grow", "shared"), wrong.step
    return growing and step.past_length > 0 and wrong.length == step.new_tokens


def _list_right_lengths(slot: Slot, step: Step, at: int) -> set[int | None]:
    """The lengths that a slot may rightly have after a step, in tokens; None where the length fed is not known."""
    shape = step.fed[slot.past].shape if slot.past in step.fed else ()
    # In the first graph of a pair another input may have the name.
    fed = shape[at] if len(shape) == len(slot.axes) else slot.size("capacity")
    total = step.past_length + step.new_tokens
    if slot.growth == "delta":
        return {step.new_tokens}
    if slot.growth in ("static", "ring"):
        return {fed + step.new_tokens if fed and slot.carry == "drop-oldest" else fed}
    # A cache with a window may drop what no later token attends to: of W positions the next one needs W - 1.
    windowed = (slot.window - 1, slot.window) if slot.window is not None else ()
    return {total, *(length for length in windowed if length < total)}
