"""Why does decoding with the cache differ? Each hypothesis predicts something of the cache that no other does."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Past, Scenario, as_array
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.experiments import Decision, Experiment
from kvdoctor.experiments.origins import crossed, new_entry, other_attention, right_entry, same_for_two, where_from
from kvdoctor.experiments.premises import looks_ahead
from kvdoctor.experiments.rows import alike, disturbed, growing, probe, returned, rows, same_logits, swapped
from kvdoctor.feeds import Deal
from kvdoctor.trace import Cause

LOOPS = ("plain-loop", "held-loop")
MOST_PLACES = 8
"""Entries of a long past that are looked at one by one."""


def why(deal: Deal) -> Decision:
    """One decode step behind the prompt, looked at from within; then the first one whose logits are wrong."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    whole = yield probe(deal.prefill(deal.scenario.total))
    if whole.failed:
        return None
    cause = yield from look(deal, start, expected, whole)
    if cause is None or cause.name == "cached-differs":
        wrong = yield from _first_wrong(deal, expected)
        if wrong is not None and wrong != start:
            cause = (yield from look(deal, wrong, expected, whole)) or cause
    return cause


def why_long(deal: Deal) -> Decision:
    """The same question where only the step behind many tokens differs."""
    expected, total = (yield from deal.whole()), deal.scenario.total
    whole = yield probe(deal.prefill(total))
    if whole.failed:
        return None
    if not _repeated(whole.logits[:, -1:], expected[:, -1:], deal.contract.exactness):
        return Cause("nondeterministic", f"{total} tokens without a cache give other logits the second time")
    cause = yield from looks_ahead(deal, expected)
    return cause or (yield from look(deal, deal.scenario.prompt, expected, whole))


def why_fed_back(deal: Deal) -> Decision:
    """Whether a step returns what is to be held as it was fed: the plain loop rests on that."""
    start = deal.scenario.prompt
    first = yield probe(deal.prefill(start))
    if first.failed:
        return None
    past = deal.carry(None, first, "held")
    step = yield probe(deal.decode(start, start + 1, past))
    for slot in () if step.failed else deal.contract.held:
        if slot.present is None or slot.emptied:
            continue
        fed, came_back = as_array(past[slot.past]), returned(slot, step, False)
        if came_back.size and not alike(came_back, fed, deal.contract.exactness):
            return Cause("present-rewrites-past", f"{slot.present} is not {slot.past} as it was fed to the step")
    return None


def look(deal: Deal, start: int, expected: Array, whole: Answer) -> Decision:
    """One decode step on a past of `start` tokens that a prefill made: its new entries, the old ones, what it sees."""
    first = yield probe(deal.prefill(start))
    if first.failed:
        return None
    past = deal.carry(None, first, "held")
    if deal.past_length(past) != start:
        return None  # what the lengths say has checks of its own
    if cause := (yield from _other_mathematics(deal, past, expected)):
        return cause
    step = yield probe(deal.decode(start, start + 1, past))
    again = yield probe(deal.decode(start, start + 1, past))
    if step.failed or again.failed:
        return None
    if not _repeated(step.logits, again.logits, deal.contract.exactness):
        return Cause(
            "nondeterministic", f"the same step on a past of {start} tokens gives other logits the second time"
        )
    return (yield from _step(deal, start, past, step, whole))


def _repeated(one: Array, other: Array, exactness: str) -> bool:
    """Whether the second answer is the first; numbers that are none come again as such."""
    return bool(np.array_equal(one, other, equal_nan=True)) or same_logits(one, other, exactness)


def _step(deal: Deal, start: int, past: Past, step: Answer, whole: Answer) -> Decision:
    """What one step sees of the past, whether it keeps it, and what it adds."""
    exactness, slots = deal.contract.exactness, growing(deal.contract)
    everything = yield probe(deal.decode(start, start + 1, disturbed(deal, past, range(start))))
    if not everything.failed and same_logits(everything.logits, step.logits, exactness):
        return Cause("past-ignored", "noise in all of the past changes no logit of the step")
    for slot in slots:
        if not _keeps(slot, step, past, exactness):
            return crossed(slot, slots, step, past, exactness) or Cause(
                "present-rewrites-past",
                f"{slot.present} differs from {slot.past} in entries 0 to {start - 1}, which a step must keep",
            )
    wrong = _wrong(deal, slots, start, step, whole)
    if wrong and wrong[0].layer == slots[0].layer:
        return (yield from where_from(deal, start, wrong[0], step, whole))
    if unseen := (yield from _unseen(deal, start, past, step, slots)):
        return _half_blind(unseen)
    return (yield from _deeper(deal, start, past, step, whole))


def _deeper(deal: Deal, start: int, past: Past, step: Answer, whole: Answer) -> Decision:
    """The first layer adds the right entry, and all entries are seen: distances, slots, the first wrong layer."""
    exactness, slots = deal.contract.exactness, growing(deal.contract)
    if cause := (yield from _no_distance(deal, start, past, step, whole)):
        return cause
    if cause := (yield from _blind_layer(deal, start, past, step)):
        return cause
    for slot in slots:
        if not returned(slot, whole, True).any():
            return Cause("cached-differs", f"{slot.filled_by} holds nothing but zeros")
        answer = yield probe(deal.decode(start, start + 1, disturbed(deal, past, range(start), [slot])))
        if not answer.failed and same_logits(answer.logits, step.logits, exactness):
            return Cause("cached-differs", f"noise in all of {slot.past} changes no logit of the step")
    if wrong := _wrong(deal, slots, start, step, whole):
        return (yield from other_attention(deal, start, past, wrong[0])) or Cause(
            "cached-differs", f"{wrong[0].present} is the first slot whose new entry is wrong"
        )
    return same_for_two(slots, whole, exactness)


def _blind_layer(deal: Deal, start: int, past: Past, step: Answer) -> Decision:
    """A layer that takes no part of the past, neither of its keys nor of its values, or not all of its entries."""
    slots = growing(deal.contract)
    for layer in dict.fromkeys(slot.layer for slot in slots if slot.layer is not None):
        mine = [slot for slot in slots if slot.layer == layer]
        answer = yield probe(deal.decode(start, start + 1, disturbed(deal, past, range(start), mine)))
        if not answer.failed and same_logits(answer.logits, step.logits, deal.contract.exactness):
            names = " and ".join(slot.past for slot in mine)
            return Cause("past-ignored", f"noise in all of {names} changes no logit of the step")
        if unseen := (yield from _unseen(deal, start, past, step, mine)):
            return _half_blind(unseen, f" of layer {layer}")
    return None


def _first_wrong(deal: Deal, expected: Array) -> "Generator[Call, Answer, int | None]":
    """The first position whose logits differ in a loop that holds."""
    start = deal.scenario.prompt
    answer = yield probe(deal.prefill(start))
    past: Past | None = None
    for position in range(start, deal.scenario.total):
        if answer.failed:
            return None
        past = deal.carry(past, answer, "held")
        answer = yield probe(deal.decode(position, position + 1, past))
        right = expected[:, position : position + 1]
        if not answer.failed and not same_logits(answer.logits, right, deal.contract.exactness):
            return position
    return None


def _wrong(deal: Deal, slots: Iterable[Slot], start: int, step: Answer, whole: Answer) -> list[Slot]:
    """Slots whose new entry is not that of the same token in a prefill of the whole sequence."""
    exactness = deal.contract.exactness
    return [s for s in slots if not alike(new_entry(s, step, start), right_entry(s, whole, start), exactness)]


def _keeps(slot: Slot, step: Answer, past: Past, exactness: str) -> bool:
    """Whether a present begins with the past that was fed."""
    fed = as_array(past[slot.past])
    return alike(rows(slot, returned(slot, step, False), 0, fed.shape[slot.axes.index("past")]), fed, exactness)


def _other_mathematics(deal: Deal, past: Past, expected: Array) -> Decision:
    """Where two graphs or branches share the work: does the cached one, from an empty past, compute the same?"""
    contract = deal.contract
    if contract.first_step == "empty-past":
        return None
    # From an empty past nothing can be wrong with the cache, its positions or its mask.
    emptied = {s.past: deal.placeholder(s, 0) for s in contract.slots if s.growth != "constant"}
    first = yield probe(deal.decode(0, 1, Past({**past, **emptied})))
    if first.failed or same_logits(first.logits, expected[:, :1], contract.exactness):
        return None
    return Cause(
        "branches-disagree",
        "from an empty self-attention past the cached branch gives the first token other logits than the one without "
        "a past",
    )


def _unseen(
    deal: Deal, start: int, past: Past, step: Answer, slots: Sequence[Slot]
) -> "Generator[Call, Answer, list[int]]":
    """Entries of some slots in which noise changes no logit of the step, but for those that a window leaves out.

    Of a long past a few are looked at: the first, the last, and some between.
    """
    windows = [slot.window for slot in slots]
    begin = max(0, start + 1 - max(w for w in windows if w is not None)) if windows and None not in windows else 0
    places = list(range(begin, start))
    if len(places) > 2 * MOST_PLACES:
        places = [*places[:2], *places[2 : -MOST_PLACES + 2 : len(places) // 4], *places[-MOST_PLACES + 2 :]]
    unseen = []
    for place in places:
        answer = yield probe(deal.decode(start, start + 1, disturbed(deal, past, [place], slots)))
        if not answer.failed and same_logits(answer.logits, step.logits, deal.contract.exactness):
            unseen.append(place)
    return unseen


def _half_blind(unseen: list[int], where: str = "") -> Cause:
    """What it means that a step does not see some of the entries."""
    places = ", ".join(map(str, unseen))
    if 0 in unseen:
        return Cause("cached-differs", f"the step does not attend to entries {places} of the past{where}")
    return Cause(
        "mask-not-offset",
        f"noise in entries {places} of the past{where} changes nothing, in entry 0 it does: the mask counts the new "
        "token from the start of the cache, or ends before it",
    )


def _no_distance(deal: Deal, start: int, past: Past, step: Answer, whole: Answer) -> Decision:
    """Where keys hold no position, a step must count the distance to them."""
    if not (yield from _has_free_keys(deal, start, whole)):
        return None
    answer = yield probe(deal.decode(start, start + 1, swapped(deal, past, 0, start - 1)))
    if answer.failed or not same_logits(answer.logits, step.logits, deal.contract.exactness):
        return None
    return Cause(
        "positions-not-offset",
        "keys hold no position here, and two entries of the past in each other's place change nothing: the step counts "
        "no distance to them",
    )


def _has_free_keys(deal: Deal, start: int, whole: Answer) -> "Generator[Call, Answer, bool]":
    """Whether keys hold no position: that of a token is the same at the start and later."""
    slot = growing(deal.contract)[0]
    alone = yield probe(replace(deal, tokens=deal.tokens[:, start:]).prefill(1))
    if alone.failed:
        return False
    there = right_entry(slot, whole, start)
    return alike(rows(slot, returned(slot, alone, True), 0, 1), there, deal.contract.exactness)


def can_be_looked_into(contract: CacheContract) -> str | None:
    """Entries can be told apart only where the cache grows, and compared only where nothing is rounded to 8 bits."""
    if contract.exactness == "dynamic-quantisation":
        return "dynamic quantisation rounds every entry another way"
    if contract.new_tokens is not None:
        return "no call takes several tokens without a cache"
    return None if growing(contract) else "no past grows entry by entry"


EXPERIMENTS = (
    Experiment(
        "why",
        "which hypothesis predicts what a decode step shows",
        why,
        Scenario(),
        can_be_looked_into,
        judged=False,
        shown=False,
        asks_why=LOOPS,
        order=40,
    ),
    Experiment(
        "why-fed-back",
        "whether a step returns what is to be held as it was fed",
        why_fed_back,
        Scenario(),
        can_be_looked_into,
        judged=False,
        shown=False,
        asks_why=LOOPS[:1],
        order=40,
    ),
    Experiment(
        "why-long",
        "which hypothesis predicts what a step after 49 tokens shows",
        why_long,
        Scenario(prompt=49, steps=2),
        can_be_looked_into,
        judged=False,
        shown=False,
        asks_why=("long-past",),
        order=42,
    ),
)
