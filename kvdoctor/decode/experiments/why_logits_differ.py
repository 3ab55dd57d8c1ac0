"""Why does decoding with the cache differ? Each hypothesis predicts something of the cache that no other does."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Asking, Call, Past, Scenario, as_array
from kvdoctor.decode.experiments import Decision, as_probe, ask, prefill, undecided, unjudged
from kvdoctor.decode.experiments.cache_entries import (
    Piece,
    add_loud_noise,
    add_noise,
    by_position,
    can_be_copied,
    change_token,
    crossed,
    from_empty,
    keeps_all,
    of_another,
    other_attention,
    other_position,
    other_prefill,
    pieces_of,
    read_returned,
    same_entries,
    same_for_two,
    same_logits,
    swap_entries,
    take_entries,
    where_from,
)
from kvdoctor.decode.experiments.determinism import looks_ahead
from kvdoctor.decode.experiments.long_states import find_no_states, wrong_states
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import GENERAL_CAUSES, LOOPS, Cause
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.records import record

MOST_PLACES = 8
"""Entries of a long past that are looked at one by one."""


@record
class CachedStep:
    """A decode step of one token on a past of `start` tokens that a prefill made, and its answer."""

    builder: FeedBuilder
    start: int
    past: Past
    answer: Answer

    def ignores_noise(self, places: Iterable[int], slots: Sequence[Slot] | None = None) -> Asking[bool]:
        """Whether noise in some entries, of every slot that grows or of those given, leaves the logits as they are."""
        return self.has_same_logits((yield self.on_past(add_noise(self.builder, self.past, places, slots))))

    def on_past(self, past: Past) -> Call:
        """The step over another past."""
        return as_probe(self.builder.decode(self.start, self.start + 1, past))

    def has_same_logits(self, answer: Answer) -> bool:
        """Whether another answer has the logits of the step."""
        return not answer.failed and same_logits(answer.logits, self.answer.logits, self.builder.tolerance)


def can_be_looked_into(contract: CacheContract) -> str | None:
    """Entries can be distinguished only where the cache grows, and compared only where nothing is rounded to 8 bits."""
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization rounds every entry another way"
    if contract.new_tokens is not None:
        return "no call takes several tokens without a cache"
    if any(slot.prepended for slot in contract.slots):
        return "new entries come before the past, so that an entry has another place after each call"
    return None if by_position(contract) else "no token has an entry of its own in the cache"


def has_content(contract: CacheContract) -> str | None:
    """Like `can_be_looked_into`, where states or counters can be compared as well."""
    return can_be_looked_into(contract) if contract.new_tokens is not None or find_no_states(contract) else None


@unjudged("why", "which hypothesis predicts what a decode step shows", applies=has_content, explains=LOOPS, order=40)
def why(builder: FeedBuilder) -> Decision:
    """The cache and the attention of the step after the prompt; then of the first step whose logits are wrong."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    (whole,) = yield from ask(builder.prefill(builder.scenario.total))
    cause = yield from _look_at_all(builder, start, expected, whole)
    if cause is None or cause.name in GENERAL_CAUSES:
        wrong = yield from first_wrong(builder, expected)
        # A step that leaves a wrong cache has right logits itself: the next one is the first that is wrong.
        for place in (wrong, wrong - 1) if wrong is not None else ():
            if place > start and (cause is None or cause.name in GENERAL_CAUSES):
                cause = (yield from _look_at_all(builder, place, expected, whole)) or cause
    return cause


def _look_at_all(builder: FeedBuilder, start: int, expected: Array, whole: Answer) -> Decision:
    """The states after one step on a past of `start` tokens, then the step itself."""
    state = yield from wrong_states(builder, start, start + 1)
    if not by_position(builder.contract) or (state is not None and state.name not in GENERAL_CAUSES):
        return state
    return (yield from look(builder, start, expected, whole)) or state


@unjudged(
    "why-long",
    "which hypothesis predicts what a step after 49 tokens shows",
    Scenario(prompt=49, steps=2),
    can_be_looked_into,
    explains=("long-past",),
    order=42,
)
def why_long(builder: FeedBuilder) -> Decision:
    """The same question where only the step after many tokens differs."""
    expected, total = (yield from builder.whole()), builder.scenario.total
    (whole,) = yield from ask(builder.prefill(total))
    cause = yield from why_without_cache(builder, expected, whole)
    return cause or (yield from look(builder, builder.scenario.prompt, expected, whole))


def why_without_cache(builder: FeedBuilder, expected: Array, whole: Answer) -> Decision:
    """What is wrong with many tokens even without a cache: the second answer, or earlier logits by a later token."""
    total = builder.scenario.total
    if not _repeated(whole.logits[:, -1:], expected[:, -1:], builder.tolerance):
        return Cause("nondeterministic", f"{total} tokens without a cache give different logits the second time")
    return (yield from looks_ahead(builder, expected))


@unjudged(
    "why-fed-back",
    "whether a step returns what is to be held as it was fed",
    applies=can_be_looked_into,
    explains=LOOPS[:1],
    order=40,
)
def why_fed_back(builder: FeedBuilder) -> Decision:
    """Whether a step returns what is to be held as it was fed: the plain loop rests on that."""
    start = builder.scenario.prompt
    _, past = yield from prefill(builder, start)
    (step,) = yield from ask(builder.decode(start, start + 1, past))
    for slot in builder.contract.held:
        if slot.present is None or slot.emptied:
            continue
        fed, came_back = as_array(past[slot.past]), read_returned(slot, step, False)
        if came_back.size and not same_entries(came_back, fed, builder.tolerance):
            return Cause("present-rewrites-past", f"{slot.present} is not {slot.past} as it was fed to the step")
    return None


@undecided
def look(builder: FeedBuilder, start: int, expected: Array, whole: Answer) -> Decision:
    """One decode step on a past of `start` tokens that a prefill made: its new entries, the old ones, what it sees."""
    first, past = yield from prefill(builder, start)
    if builder.past_length(past) != start or not can_be_copied(builder.contract, past):
        return None  # what the lengths say has checks of its own
    rings = [slot.size("capacity") or 0 for slot in by_position(builder.contract) if slot.growth == "ring"]
    if min(rings, default=whole.new) < whole.new:
        return None  # the oldest entries are overwritten
    if cause := (yield from _other_mathematics(builder, past, expected)):
        return cause
    step, again = yield from ask(*[builder.decode(start, start + 1, past)] * 2)
    if not _repeated(step.logits, again.logits, builder.tolerance):
        text = f"the same step on a past of {start} tokens gives different logits the second time"
        return Cause("nondeterministic", text)
    if cause := (yield from other_prefill(builder, start, first, whole)):
        return cause
    if not all(keeps_all(slot, whole) for slot in by_position(builder.contract)):
        whole = yield as_probe(builder.prefill(start + 1))  # a longer one has dropped the entry to compare
    cause = yield from _step(CachedStep(builder, start, past, step), whole)
    if cause is not None and cause.name in GENERAL_CAUSES:
        # The last tokens first: one number for a whole call may come from any of its tokens.
        backwards = replace(builder, tokens=builder.tokens[:, : builder.scenario.total][:, ::-1])
        first = yield as_probe(backwards.prefill(start))
        whole = yield as_probe(backwards.prefill(builder.scenario.total))
        if not (first.failed or whole.failed):
            return (yield from other_prefill(backwards, start, first, whole)) or cause
    return cause


def _repeated(one: Array, other: Array, limit: Tolerance) -> bool:
    """Whether the second answer is the first; numbers that are none come again as such."""
    return bool(np.array_equal(one, other, equal_nan=True)) or same_logits(one, other, limit)


def _step(step: CachedStep, whole: Answer) -> Decision:
    """What one step sees of the past, whether it keeps it, and what it adds."""
    builder, start, past, answer = step.builder, step.start, step.past, step.answer
    limit, slots = builder.tolerance, by_position(builder.contract)
    noisy = yield step.on_past(add_noise(builder, past, range(start)))
    if step.has_same_logits(noisy):
        return Cause("past-ignored", "perturbing all of the past does not change the logits of the step")
    for slot in slots:
        fed = take_entries(slot, as_array(past[slot.past]), (0, start), start)
        returned = read_returned(slot, answer, False)
        if slot.growth != "delta" and not same_entries(take_entries(slot, returned, (0, start), start + 1), fed, limit):
            broken = crossed(slot, slots, answer, past, limit) or _rewritten(slot, answer, past, limit)
            return replace(broken, read_right=_has_right_logits(start, answer, whole, limit))
    for piece in _wrong(builder, pieces_of(slots, whole), start, answer, whole):
        if noisy.failed or same_entries(piece.new_entry(noisy, start), piece.new_entry(answer, start), limit):
            # What rests on no earlier token is of the first layer, whatever its number. Of a later one, the layer
            # before it does not look at the past.
            other = yield as_probe(change_token(builder, 0).prefill(builder.scenario.total))
            right, changed = piece.right_entry(whole, start), None if other.failed else piece.right_entry(other, start)
            if changed is None or same_entries(right, changed, limit):
                return (yield from where_from(builder, start, piece, answer, whole))
    if cause := (yield from _half_blind(step, slots)):
        return cause
    return (yield from _deeper(step, whole))


def _deeper(step: CachedStep, whole: Answer) -> Decision:
    """The first layer adds the right entry, and all entries are seen: distances, slots, the first wrong layer."""
    builder, start = step.builder, step.start
    limit, slots = builder.tolerance, by_position(builder.contract)
    if cause := (yield from _no_distance(step, whole)):
        return cause
    if cause := (yield from _blind_layer(step)):
        return cause
    pieces = pieces_of(slots, whole)
    if cause := _zero_entries(pieces, whole, start):
        return cause
    for slot in slots:
        if (yield from step.ignores_noise(range(start), [slot])):
            return Cause("cache-misread", f"perturbing all of {slot.past} does not change the logits of the step")
    if wrong := _wrong(builder, pieces, start, step.answer, whole):
        if cause := of_another(builder, start, wrong[0], step.answer, whole):
            return cause
        cause = yield from other_attention(builder, start, step.past, wrong[0])
        return cause or _first_wrong(wrong, pieces)
    if (cause := same_for_two(slots, whole, limit)) or whole.logits.shape[1] <= start:
        return cause
    # Right entries in every layer: the last layer reads them wrongly, or what follows it.
    text = "all cache entries fed to the step and added by it are right, and its logits are wrong"
    return None if _has_right_logits(start, step.answer, whole, limit) else Cause("cache-misread", text)


def _zero_entries(pieces: tuple[Piece, ...], whole: Answer, start: int) -> Cause | None:
    """Keys or values of some tokens that a prefill leaves out of the cache."""
    for piece in pieces:
        entries = {place: piece.right_entry(whole, place) for place in range(start)}
        zero = [place for place, entry in entries.items() if entry.size and not entry.any()]
        if zero:
            which = "all entries" if len(zero) == start else f"entry {zero[0]}"
            text = f"a prefill returns zeros in {which} of {piece.filled_by}"
            return Cause("new-entries-wrong", text, piece.slot.past)
    return None


def _first_wrong(wrong: list[Piece], pieces: tuple[Piece, ...]) -> Cause:
    """Where keys or values of a layer alone are wrong, its input is right; where all are, the layer before is wrong.

    That some layers have other parts means that their numbers are in doubt.
    """
    first = wrong[0]
    parts = {tuple(sorted(str(p.slot.part) for p in pieces if p.layer == layer)) for layer in {p.layer for p in pieces}}
    if len(parts) == 1 and any(piece.layer == first.layer and piece not in wrong for piece in pieces):
        text = f"the new entry of {first.present} is wrong, and others of its layer are right"
        return Cause("new-entries-wrong", text)
    before = f"; those of the layers before layer {first.layer} are right" if first.layer else ""
    text = f"{first.present} is the first slot whose new entry is wrong{before}"
    return Cause("cache-misread", text)


def _has_right_logits(start: int, step: Answer, whole: Answer, limit: Tolerance) -> bool:
    """Whether a step on a past of `start` tokens has the logits of one call over the tokens."""
    return same_logits(step.logits[:, -1:], whole.logits[:, start : start + 1], limit)


def _blind_layer(step: CachedStep) -> Decision:
    """A layer that takes no part of the past, neither of its keys nor of its values, or not all of its entries."""
    slots = by_position(step.builder.contract)
    for layer in dict.fromkeys(slot.layer for slot in slots if slot.layer is not None):
        mine = [slot for slot in slots if slot.layer == layer]
        if (yield from step.ignores_noise(range(step.start), mine)):
            names = " and ".join(slot.past for slot in mine)
            return Cause("past-ignored", f"perturbing all of {names} does not change the logits of the step")
        if cause := (yield from _half_blind(step, mine, f" of layer {layer}")):
            return cause
    return None


def first_wrong(builder: FeedBuilder, expected: Array) -> Asking[int | None]:
    """The first position whose logits differ in a loop that holds."""
    start = builder.scenario.prompt
    answer = yield as_probe(builder.prefill(start))
    past: Past | None = None
    for position in range(start, builder.scenario.total):
        if answer.failed:
            break
        past = builder.carry(past, answer, "held")
        answer = yield as_probe(builder.decode(position, position + 1, past))
        right = expected[:, position : position + 1]
        if not answer.failed and not same_logits(answer.logits, right, builder.tolerance):
            return position
    return None


def _wrong(builder: FeedBuilder, pieces: Iterable[Piece], start: int, step: Answer, whole: Answer) -> list[Piece]:
    """Keys or values of a layer whose new entry is not that of the same token in a prefill of the whole sequence."""
    limit, found = builder.tolerance, ((p, p.right_entry(whole, start)) for p in pieces)
    return [p for p, right in found if right.size and not same_entries(p.new_entry(step, start), right, limit)]


def _rewritten(slot: Slot, step: Answer, past: Past, limit: Tolerance) -> Cause:
    """How a present differs from the past that was fed: it leaves out the oldest entries, or has others."""
    fed, returned, at = as_array(past[slot.past]), read_returned(slot, step, False), slot.length_axis or 0
    held, kept = min(fed.shape[at], step.past), returned.shape[at] - step.new
    if "past" in slot.axes and 0 < kept < held:
        dropped = held - kept
        left, rest = (
            take_entries(slot, returned, (0, kept), step.past),
            take_entries(slot, fed, (dropped, held), held),
        )
        if same_entries(left, rest, limit):
            which = "entry 0" if dropped == 1 else f"entries 0 to {dropped - 1}"
            text = f"{slot.present} holds the last {kept + step.new} of {held + step.new} entries, without {which} of "
            return Cause("present-rewrites-past", f"{text}{slot.past}, which a step must keep", slot.past, dropped)
    text = f"{slot.present} differs from {slot.past} in entries 0 to {held - 1}, which a step must keep"
    return Cause("present-rewrites-past", text, slot.past)


def _other_mathematics(builder: FeedBuilder, past: Past, expected: Array) -> Decision:
    """Where two graphs or branches share the work: does the cached one, from an empty past, compute the same?"""
    contract = builder.contract
    if contract.first_step == "empty-past":
        return None
    # From an empty past nothing can be wrong with the cache, its positions or its mask.
    first = yield from_empty(builder, past, 1)
    if first.failed or same_logits(first.logits, expected[:, :1], builder.tolerance):
        return None
    pieces = pieces_of(by_position(contract), first, first=False)
    for piece in (piece for piece in pieces if piece.layer == pieces[0].layer):
        if cause := (yield from other_position(builder, 0, piece, first)):
            return cause
    text = "from an empty self-attention past the cached branch gives the first token different logits than the one "
    return Cause("branches-disagree", f"{text}without a past")


def _half_blind(step: CachedStep, slots: Sequence[Slot], where: str = "") -> Decision:
    """The cause of a step that does not attend to some entries of its past, although they are within the window.

    Noise in such an entry leaves the logits as they are. Of a long past a few entries are tried: the first ones, the
    last ones, and some between. A mask that is not offset hides all entries from some place on; single ones between
    others may have little weight by chance.
    """
    start = step.start
    windows = [slot.window for slot in slots]
    begin = max(0, start + 1 - max(w for w in windows if w is not None)) if windows and None not in windows else 0
    held = max(step.past[slot.past].shape[slot.length_axis or 0] for slot in slots)  # a window holds the last ones
    places = list(range(begin, min(start, held)))
    if len(places) > 2 * MOST_PLACES:
        places = [*places[:2], *places[2 : -MOST_PLACES + 2 : len(places) // 4], *places[-MOST_PLACES + 2 :]]
    unseen = list[int]()
    for place in places:
        unseen += [place] if (yield from step.ignores_noise([place], slots)) else []
    loud = add_loud_noise(step.builder, step.past, unseen, slots)
    if not unseen or not step.has_same_logits((yield step.on_past(loud))):
        return None  # they weigh little
    names = f"{'entry' if len(unseen) == 1 else 'entries'} {', '.join(map(str, unseen))} of the past{where}"
    if 0 in unseen:
        return Cause("cache-misread", f"the step does not attend to {names}", unseen=tuple(unseen))
    if unseen != places[-len(unseen) :]:
        return None
    text = (
        f"perturbing {names} does not change the logits, perturbing entry 0 does: the mask counts the new token from "
    )
    return Cause("mask-not-offset", f"{text}the start of the cache, or ends before it")


@undecided
def _no_distance(step: CachedStep, whole: Answer) -> Decision:
    """Where keys hold no position, a step must count the distance to them."""
    builder, start = step.builder, step.start
    if any(slot.growth == "ring" for slot in by_position(builder.contract)):
        return None
    piece = pieces_of(by_position(builder.contract), whole)[0]
    (alone,) = yield from ask(replace(builder, tokens=builder.tokens[:, start:]).prefill(1))
    right = piece.right_entry(whole, start)
    if not same_entries(piece.right_entry(alone, 0), right, builder.tolerance):
        return None  # keys hold a position: that of a token is not the same at the start and later
    swapped = swap_entries(step.past, by_position(builder.contract), 0, start - 1)
    (answer,) = yield from ask(builder.decode(start, start + 1, swapped))
    if not same_logits(answer.logits, step.answer.logits, builder.tolerance):
        return None
    if not (yield from _counts_distance(builder, start)):
        return None
    text = "keys contain no position in this model, and swapping two past entries does not change the logits: the step "
    return Cause("positions-not-offset", f"{text}ignores their distance")


def _counts_distance(builder: FeedBuilder, start: int) -> Asking[bool]:
    """Whether the first attention of a call without a cache tells the order of the tokens before it.

    Some models have no positions at all. The entries of the second layer show it. The logits do so only where there is
    none: deeper layers see in what order earlier tokens saw one another.
    """
    order = np.arange(builder.tokens.shape[1])
    order[[0, start - 1]] = start - 1, 0
    calls = (one.prefill(start + 1) for one in (builder, replace(builder, tokens=builder.tokens[:, order])))
    one, other = yield from ask(*calls)
    pieces = pieces_of(by_position(builder.contract), one)
    second = [piece for piece in pieces if piece.layer not in (None, pieces[0].layer)]
    if not second:
        return not same_logits(one.logits[:, -1:], other.logits[:, -1:], builder.tolerance)
    second = [piece for piece in second if piece.layer == second[0].layer]
    return any(
        not same_entries(p.right_entry(one, start), p.right_entry(other, start), builder.tolerance) for p in second
    )
