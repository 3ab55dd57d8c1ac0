"""Why does decoding with the cache differ? Each hypothesis predicts something of the cache that no other does."""

from collections.abc import Generator
from dataclasses import replace

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.experiments import Decision, Experiment
from kvdoctor.experiments.rows import alike, disturbed, growing, returned, rows, same_logits, swapped
from kvdoctor.feeds import Answer, Array, Call, Deal, Past, Scenario, as_array
from kvdoctor.trace import Cause

LOOPS = ("plain-loop", "held-loop")


def why(deal: Deal) -> Decision:
    """One decode step, looked at from within: its new entries, the old ones, and what it attends to."""
    start = deal.scenario.prompt
    expected = yield from deal.whole()
    whole = yield probe(deal.prefill(deal.scenario.total))
    first = yield probe(deal.prefill(start))
    past = deal.carry(None, first, "held") if not first.failed else Past()
    if whole.failed or first.failed:
        return None
    if deal.past_length(past) != start:
        return None  # what the lengths say has checks of its own
    if cause := (yield from _other_mathematics(deal, past, expected)):
        return cause
    step = yield probe(deal.decode(start, start + 1, past))
    return None if step.failed else (yield from _step(deal, past, step, whole))


def _step(deal: Deal, past: Past, step: Answer, whole: Answer) -> Decision:
    """What one step sees of the past, whether it keeps it, and what it adds."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    unseen = yield from _unseen(deal, past, step)
    if len(unseen) == start:
        return Cause("past-ignored", "noise in any entry of the past changes no logit of the step")
    slots = growing(deal.contract)
    changed = [slot for slot in slots if not _keeps(slot, step, past, exactness)]
    if changed:
        return Cause(
            "present-rewrites-past",
            f"{changed[0].present} differs from {changed[0].past} in entries 0 to {start - 1}, which a step must keep",
        )
    wrong = [slot for slot in slots if not alike(_new(slot, step, start), _right(slot, whole, start), exactness)]
    if wrong and wrong[0].layer == slots[0].layer:
        return (yield from _wrong_entry(deal, wrong[0], step, whole))
    if unseen:
        return _half_blind(unseen)
    return (yield from _deeper(deal, past, step, whole))


def _deeper(deal: Deal, past: Past, step: Answer, whole: Answer) -> Decision:
    """The first layer adds the right entry, and all entries are seen: distances, slots, the first wrong layer."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    if cause := (yield from _no_distance(deal, past, step, whole)):
        return cause
    slots = growing(deal.contract)
    for slot in slots:
        if not returned(slot, whole, True).any():
            return Cause("cached-differs", f"{slot.filled_by} holds nothing but zeros")
        answer = yield probe(deal.decode(start, start + 1, disturbed(deal, past, range(start), [slot])))
        if not answer.failed and same_logits(answer.logits, step.logits, exactness):
            return Cause("cached-differs", f"noise in all of {slot.past} changes no logit of the step")
    wrong = [slot for slot in slots if not alike(_new(slot, step, start), _right(slot, whole, start), exactness)]
    return Cause("cached-differs", f"{wrong[0].present} is the first slot whose new entry is wrong") if wrong else None


def probe(call: Call) -> Call:
    """The call as one that may fail."""
    return replace(call, kind="probe", expected=None)


def _new(slot: Slot, step: Answer, start: int) -> Array:
    """The entry that a step added."""
    return rows(slot, returned(slot, step, False), start, start + 1)


def _right(slot: Slot, whole: Answer, start: int) -> Array:
    """The entry of the same token in a prefill of the whole sequence."""
    return rows(slot, returned(slot, whole, True), start, start + 1)


def _keeps(slot: Slot, step: Answer, past: Past, exactness: str) -> bool:
    """Whether a present begins with the past that was fed."""
    fed = as_array(past[slot.past])
    return alike(rows(slot, returned(slot, step, False), 0, fed.shape[slot.axes.index("past")]), fed, exactness)


def _other_mathematics(deal: Deal, past: Past, expected: Array) -> Decision:
    """Where two graphs or branches share the work: does the cached one, from an empty past, compute the same?"""
    contract = deal.contract
    if contract.first_step == "empty-past":
        return None
    emptied = {s.past: deal.placeholder(s, 0) for s in contract.slots if s.growth != "constant"}
    answer = yield probe(deal.decode(0, deal.scenario.total, Past({**past, **emptied})))
    if answer.failed or same_logits(answer.logits, expected, contract.exactness):
        return None
    # From an empty past nothing can be wrong with the cache, its positions or its mask.
    first = yield probe(deal.decode(0, 1, Past({**past, **emptied})))
    if first.failed or same_logits(first.logits, expected[:, :1], contract.exactness):
        return None
    return Cause(
        "branches-disagree",
        "from an empty self-attention past the cached branch gives the first token other logits than the one without "
        "a past",
    )


def _wrong_entry(deal: Deal, slot: Slot, step: Answer, whole: Answer) -> Decision:
    """The first layer's new entry is wrong, which depends on the token and its position alone."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    alone = yield probe(replace(deal, tokens=deal.tokens[:, start:]).prefill(1))
    new = _new(slot, step, start)
    if not alone.failed and alike(new, rows(slot, returned(slot, alone, True), 0, 1), exactness):
        return Cause(
            "positions-not-offset",
            f"the new entry of {slot.present} at position {start} is that of the same token at position 0",
        )
    for other in growing(deal.contract):
        if other is not slot and alike(new, _right(other, whole, start), exactness):
            name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
            return Cause(name, f"the new entry of {slot.present} is what a prefill returns as {other.filled_by}")
    return Cause("cached-differs", f"the new entry of {slot.present} is wrong already, in the first layer")


def _unseen(deal: Deal, past: Past, step: Answer) -> "Generator[Call, Answer, list[int]]":
    """Entries of the past in which noise changes no logit of the step."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    unseen = []
    for place in range(start):
        answer = yield probe(deal.decode(start, start + 1, disturbed(deal, past, [place])))
        if not answer.failed and same_logits(answer.logits, step.logits, exactness):
            unseen.append(place)
    return unseen


def _half_blind(unseen: list[int]) -> Cause:
    """What it means that a step does not see some of the entries."""
    places = ", ".join(map(str, unseen))
    if 0 in unseen:
        return Cause("cached-differs", f"the step does not attend to entries {places} of the past")
    return Cause(
        "mask-not-offset",
        f"noise in entries {places} of the past changes nothing, in entry 0 it does: the mask counts the new token "
        "from the start of the cache",
    )


def _no_distance(deal: Deal, past: Past, step: Answer, whole: Answer) -> Decision:
    """Where keys hold no position, a step must count the distance to them."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    if not (yield from _has_free_keys(deal, whole)):
        return None
    answer = yield probe(deal.decode(start, start + 1, swapped(deal, past, 0, start - 1)))
    if answer.failed or not same_logits(answer.logits, step.logits, exactness):
        return None
    return Cause(
        "positions-not-offset",
        "keys hold no position here, and two entries of the past in each other's place change nothing: the step counts "
        "no distance to them",
    )


def _has_free_keys(deal: Deal, whole: Answer) -> "Generator[Call, Answer, bool]":
    """Whether keys hold no position: that of a token is the same at the start and later."""
    start, slot = deal.scenario.prompt, growing(deal.contract)[0]
    alone = yield probe(replace(deal, tokens=deal.tokens[:, start:]).prefill(1))
    if alone.failed:
        return False
    there = rows(slot, returned(slot, whole, True), start, start + 1)
    return alike(rows(slot, returned(slot, alone, True), 0, 1), there, deal.contract.exactness)


def can_be_looked_into(contract: CacheContract) -> str | None:
    """Entries can be told apart only where the cache grows, and compared only where nothing is rounded to 8 bits."""
    if contract.exactness == "dynamic-quantisation":
        return "dynamic quantisation rounds every entry another way"
    if contract.new_tokens is not None or contract.last_logits_only:
        return "no call gives the logits of several tokens"
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
)
