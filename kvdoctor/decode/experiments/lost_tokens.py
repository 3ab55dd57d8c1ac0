"""Tokens without influence on later logits: a loss, unless the attention has a sliding window that leaves them out.

A sliding window shows in three ways together: at every step the same number of latest tokens counts, the cache still
has the entries of the others, and the graph compares a length with the width of the window. Attention with a window
of W tokens in L layers reaches L * (W - 1) tokens back: each layer sees what the layer below has gathered.
"""

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, as_array
from kvdoctor.decode.experiments import Decision
from kvdoctor.decode.experiments.cache_entries import OTHER_TOKENS, as_probe, change_token, one_step
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.records import record


@record
class Influence:
    """The steps whose logits change with a token, and whether the cache of the last step does."""

    steps: frozenset[int]
    is_kept: bool


def lost_tokens(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """Earlier tokens that have no influence on the last logits, as far back as the slots keep them.

    `pasts` and `answers` are those of a loop of one token a step, with its past before each step.
    """
    last, found = builder.scenario.total - 1, {}
    for place in range(max(last - _reach(builder.contract, last), 0), last):
        found[place] = yield from _follow(builder, place, pasts, answers)
    lost = [place for place, influence in found.items() if last not in influence.steps]
    if not lost or _is_window(builder, found):
        return None
    places = ", ".join(map(str, lost))
    return Cause("present-drops-past", f"another token at position {places} changes no logit at position {last}")


def _follow(
    builder: FeedBuilder, place: int, pasts: Sequence[Past | None], answers: Sequence[Answer]
) -> "Generator[Call, Answer, Influence]":
    """Decode with other tokens at a position. A step that fails with one of them counts as one that changes."""
    last, steps, kept, other = builder.scenario.total - 1, set[int](), False, builder
    for _ in OTHER_TOKENS:
        other, past = change_token(other, place), pasts[place]
        for position in range(place, last + 1):
            kept = kept or (position == last and _first_layer_differs(builder.contract, past, pasts[last]))
            answer = yield as_probe(one_step(other, position, past))
            if answer.failed:
                return Influence(frozenset({*steps, *range(position, last + 1)}), kept)
            if not np.array_equal(answer.logits, answers[position].logits, equal_nan=True):
                steps.add(position)
            past = other.carry(past, answer, "plain")
        if last in steps:
            break
    return Influence(frozenset(steps), kept)


def _first_layer_differs(contract: CacheContract, one: Past | None, other: Past | None) -> bool:
    """Whether the entries of the first layer differ, of which each rests on its own token alone."""
    if one is None or other is None:
        return False
    slots = contract.of_kind("self-attention")
    first = min((slot.layer for slot in slots if slot.layer is not None), default=None)
    return any(
        not np.array_equal(_first_layer(slot, one), _first_layer(slot, other)) for slot in slots if slot.layer == first
    )


def _first_layer(slot: Slot, past: Past) -> Array:
    """The entries of the first layer in a slot, which may be one layer's or have all layers on one axis."""
    tensor = as_array(past[slot.past])
    return np.take(tensor, 0, axis=slot.axes.index("layers")) if "layers" in slot.axes else tensor


def _reach(contract: CacheContract, most: int) -> int:
    """How many tokens back must count: a state forgets, an attention does not within its window and its buffer."""
    found = [1]
    for slot in contract.of_kind("self-attention"):
        if slot.trimmed:
            continue
        limits = [most, *(n - 1 for n in (slot.window, slot.size("capacity")) if n is not None)]
        found.append(min(limits))
    return max(found)


def _is_window(builder: FeedBuilder, found: Mapping[int, Influence]) -> bool:
    """Whether the tokens that do not count are those that a sliding window of the graph leaves out."""
    last = builder.scenario.total - 1
    reach = max((last - place for place, one in found.items() if last in one.steps), default=0)
    slides = all(
        one.is_kept and one.steps - {place} == set(range(place + 1, min(place + reach, last) + 1))
        for place, one in found.items()
    )
    layers = _count_layers(builder.contract)
    # A length is compared with the width as `distance < W`, or as `distance <= W - 1`.
    return slides and any(layers * (number - 1) == reach or layers * number == reach for number in builder.thresholds)


def _count_layers(contract: CacheContract) -> int:
    """The number of layers with self-attention."""
    slots = contract.of_kind("self-attention")
    return max((slot.size("layers") or 0 for slot in slots), default=0) or len({slot.layer for slot in slots})
