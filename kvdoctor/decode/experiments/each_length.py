"""Every past length one by one, and the lengths around each threshold of the graph.

A fault may begin at a length, or strike at one alone: a table that ends, a mask of fixed size, a ring that is written
one entry off. The walk costs one reference run and one decode step for each length. A threshold is a number of the
graph that a length is compared with (`analysis/thresholds.py`): it costs ten calls.
"""

from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Call, NothingToRun, Past, Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, several_tokens
from kvdoctor.decode.experiments.cache_entries import as_probe, same_logits
from kvdoctor.decode.experiments.causes import can_be_looked_into, first_wrong, look, why_without_cache
from kvdoctor.decode.experiments.chunk import takes_chunks
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import GENERAL_CAUSES, REFERENCE_CHANGES

WALK = 40
"""Tokens of the walk: every past length below is visited."""
SHORT = Scenario().total
"""Tokens of a call without a cache that must give the logits of the walk's reference run."""
MOST_LENGTH, MOST_THRESHOLDS = 260, 6
"""The longest sequence around a threshold, in tokens, and the number of thresholds that are visited."""
FAR_LENGTH = 4096
"""The longest sequence where the command asks for what takes long."""
BEFORE, BEHIND, CHUNK = 2, 4, 3
"""Tokens before and behind a threshold, since a length may be counted with an offset; tokens of a chunk behind it."""


def each_length(builder: FeedBuilder) -> Calls:
    """A prompt of one token, then one token a step, up to the longest sequence that runs without a cache."""
    builder = _walker(builder)
    total = yield from longest_sequence(builder, 1, builder.scenario.total)
    expected = yield from builder.whole(total)
    if not (yield from _reference_holds(builder, min(SHORT, total), expected)):
        raise NothingToRun(REFERENCE_CHANGES)
    answer = yield builder.prefill(1, expected[:, :1])
    past = builder.carry(None, answer, "held")
    for position in range(1, total):
        if position == builder.ring and not (yield from _goes_around(builder, past, expected)):
            return
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")


def _goes_around(builder: FeedBuilder, past: Past, expected: Array) -> "Generator[Call, Answer, bool]":
    """Whether the first step on a full ring gets the logits of a call without a cache.

    Such a call forgets what the ring overwrites only where the attention has a window of that size. Where it has none,
    the two rightly differ, from this step on.
    """
    start = builder.ring or 0
    answer = yield as_probe(builder.decode(start, start + 1, past))
    return not answer.failed and same_logits(answer.logits, expected[:, start : start + 1], builder.tolerance)


def _walker(builder: FeedBuilder) -> FeedBuilder:
    """A builder of the whole walk: up to the last token of a full buffer, or around a ring."""
    steps = min(WALK, (None if builder.ring else builder.contract.usable_length) or WALK)
    return replace(builder, scenario=replace(builder.scenario, prompt=1, steps=steps), tokens=builder.tokens[:, :0])


def near_thresholds(builder: FeedBuilder) -> Calls:
    """Single steps over each threshold, and one step behind it after a prefill that goes as far."""
    yield from _step_over(builder, list(visited(builder.thresholds, builder.contract.usable_length)))


def far_thresholds(builder: FeedBuilder) -> Calls:
    """The same at thresholds that take long sequences."""
    near = set(visited(builder.thresholds, builder.contract.usable_length))
    far = visited(builder.thresholds, builder.contract.usable_length, FAR_LENGTH, len(builder.thresholds))
    yield from _step_over(builder, [length for length in far if length not in near])


def _step_over(builder: FeedBuilder, lengths: list[int]) -> Calls:
    for near, start, stop in (yield from _each_threshold(builder, lengths)):
        expected = yield from _reference_behind(near, start, stop)
        behind = max(stop - CHUNK, start)
        for begin in dict.fromkeys((start, behind) if stop > WALK or near.scenario.batch > 1 else (behind,)):
            answer = yield near.prefill(begin)
            past = near.carry(None, answer, "held")
            for position in range(begin, stop if begin == start else begin + 1):
                new = position - start
                answer = yield near.decode(position, position + 1, past, expected[:, new : new + 1])
                past = near.carry(past, answer, "held")


def chunks_near_thresholds(builder: FeedBuilder) -> Calls:
    """A chunk over each threshold, one behind it, and chunks of as many tokens; each followed by a single step."""
    lengths = list(visited(builder.thresholds, builder.contract.usable_length))
    for near, start, stop in (yield from _each_threshold(builder, lengths)):
        if stop - start < CHUNK:
            continue
        expected = yield from near.whole(stop)
        for begin in dict.fromkeys((start, max(stop - CHUNK, start))):
            answer = yield near.prefill(begin)
            yield from _chunk(near, begin, stop, near.carry(None, answer, "held"), expected)
        answer = yield near.prefill(1)
        past = near.carry(None, answer, "held")
        threshold = start + BEFORE
        for size in (threshold, threshold + 1):
            if size > 1 and size + 2 <= stop:
                yield from _chunk(near, 1, size + 2, past, expected)


def _each_threshold(
    builder: FeedBuilder, lengths: list[int]
) -> "Generator[Call, Answer, list[tuple[FeedBuilder, int, int]]]":
    """For each threshold a builder of a sequence that goes behind it, and the tokens to begin and to end at.

    Raises:
        NothingToRun: the graph has no threshold that can be visited.
    """
    found = []
    if not lengths:
        raise NothingToRun("the graph compares no length with a number in reach that was not visited")
    for length in lengths:
        start = max(length - BEFORE, 1)
        sizes = replace(builder.scenario, prompt=start, steps=length + BEHIND - start + 1)
        near = replace(builder, scenario=sizes, tokens=builder.tokens[:, :0])
        try:
            stop = yield from longest_sequence(near, start, length + BEHIND)
        except NothingToRun:
            break  # no sequence is so long, nor as long as the larger ones: the smaller ones are visited all the same
        if stop > start and (near.contract.last_logits_only or (yield from _holds_up_to(near, start, stop))):
            found.append((near, start, stop))
    if not found:
        raise NothingToRun(f"no reference run goes over the thresholds {', '.join(map(str, lengths))}")
    return found


def _holds_up_to(near: FeedBuilder, start: int, stop: int) -> "Generator[Call, Answer, bool]":
    expected = yield from near.whole(stop)
    return (yield from _reference_holds(near, start, expected))


def _reference_holds(builder: FeedBuilder, length: int, expected: Array) -> "Generator[Call, Answer, bool]":
    """Whether a shorter call without a cache gives the same logits as the longer one that others are compared with.

    Some models rotate all keys otherwise from a length on (LongRoPE): their loops fill the cache again there.
    """
    if builder.contract.last_logits_only:
        return True
    answer = yield as_probe(builder.reference(length))
    return answer.failed or same_logits(answer.logits, expected[:, :length], builder.tolerance)


def _chunk(near: FeedBuilder, start: int, stop: int, past: Past, expected: Array) -> Calls:
    """All tokens up to the last at once, then the last one on the cache that they leave."""
    answer = yield near.decode(start, stop - 1, past, expected[:, start : stop - 1])
    yield near.decode(stop - 1, stop, near.carry(past, answer, "held"), expected[:, stop - 1 : stop])


def _reference_behind(builder: FeedBuilder, start: int, stop: int) -> "Generator[Call, Answer, Array]":
    """The logits of the tokens `start` to `stop` without a cache, float[batch, stop - start, vocabulary]."""
    if not builder.contract.last_logits_only:
        logits = yield from builder.whole(stop)
        return logits[:, start:]
    found = []
    for length in range(start + 1, stop + 1):
        answer = yield builder.reference(length)
        found.append(answer.logits[:, -1:])
    return np.concatenate(found, axis=1)


def longest_sequence(builder: FeedBuilder, least: int, most: int) -> "Generator[Call, Answer, int]":
    """The tokens of the longest sequence that runs without a cache, from `least` to `most`.

    A table of positions that ends limits every call: a length beyond it is no fault of the cache.

    Raises:
        NothingToRun: not even `least` tokens run.
    """
    runs, fails, tried = least - 1, most + 1, most
    while runs + 1 < fails:
        answer = yield as_probe(builder.reference(tried))
        runs, fails = (runs, tried) if answer.failed else (tried, fails)
        tried = (runs + fails) // 2
    if runs < least:
        raise NothingToRun(f"no sequence of {least} tokens runs without a cache")
    return runs


def why_each_length(builder: FeedBuilder) -> Decision:
    """The first wrong step, looked at from within; then the last one, where more of the past is behind the fault."""
    builder = _walker(builder)
    total = yield from longest_sequence(builder, 1, builder.scenario.total)
    expected = yield from builder.whole(total)
    builder = replace(builder, scenario=replace(builder.scenario, steps=total), tokens=builder.tokens[:, :total])
    whole = yield as_probe(builder.prefill(total))
    if cause := (yield from why_without_cache(builder, expected, whole)):
        return cause
    wrong = yield from first_wrong(builder, expected)
    cause = None
    # A step that leaves a wrong cache has right logits itself: the next one is the first that is wrong.
    for past in dict.fromkeys((wrong or total - 1, max((wrong or total) - 1, 1), total - 1)):
        # Judged by a call of the same length: what a graph computes may rightly change with the length.
        same = yield as_probe(builder.prefill(past + 1))
        if cause is None or cause.name in GENERAL_CAUSES:
            cause = (yield from look(builder, past, expected, same)) or cause
    return cause


def visited(
    thresholds: tuple[int, ...], usable: int | None, longest: int = MOST_LENGTH, most: int = MOST_THRESHOLDS
) -> Iterator[int]:
    """Yield the thresholds that are visited: the smallest that fit into the longest sequence and the usable length."""
    fitting = [length for length in sorted(thresholds) if length + BEHIND <= min(longest, usable or longest)]
    yield from fitting[:most]


def has_lengths(contract: CacheContract) -> str | None:
    """A step at another length must be judged by the logits of a reference run."""
    if contract.exactness == "dynamic-quantization":
        return "the noise of dynamic quantization grows with the length"
    return several_tokens(contract)


def takes_rows(contract: CacheContract) -> str | None:
    """Several rows, each of them exact."""
    return has_lengths(contract) or has_exact_rows(contract)


def takes_long_chunks(contract: CacheContract) -> str | None:
    """Several new tokens, judged by the logits of a reference run."""
    return has_lengths(contract) or takes_chunks(contract)


EXPERIMENTS = (
    Experiment(
        "each-length",
        f"one step at each past from 1 to {WALK - 1}",
        each_length,
        Scenario(prompt=1, steps=WALK),
        has_lengths,
        use=Use(f"some past below {WALK}", "error", after=("one-token-prompt",)),
        order=31,
    ),
    Experiment(
        "near-thresholds",
        "single steps around the thresholds of the graph, the lengths that it compares with",
        near_thresholds,
        Scenario(prompt=1, steps=2),
        has_lengths,
        changes_feeds=True,
        use=Use("a length near a threshold of the graph", "error", after=("each-length",)),
        order=32,
    ),
    Experiment(
        "far-thresholds",
        f"single steps around the thresholds of the graph up to {FAR_LENGTH} tokens",
        far_thresholds,
        Scenario(prompt=1, steps=2),
        has_lengths,
        changes_feeds=True,
        thorough=True,
        use=Use("a length near a threshold of the graph", "error", after=("each-length", "near-thresholds")),
        order=32,
    ),
    Experiment(
        "chunks-near-thresholds",
        "chunks around the thresholds of the graph, and chunks of as many tokens",
        chunks_near_thresholds,
        Scenario(prompt=1, steps=2),
        takes_long_chunks,
        changes_feeds=True,
        use=Use(
            "several new tokens near a threshold of the graph",
            required="chunked-prefill",
            after=("each-length", "near-thresholds", "chunk", "second-turn"),
        ),
        order=33,
    ),
    Experiment(
        "rows-near-thresholds",
        "single steps around the thresholds of the graph with batch 3",
        near_thresholds,
        Scenario(batch=3, prompt=1, steps=2),
        takes_rows,
        changes_feeds=True,
        use=Use(
            "a batch of 3 near a threshold",
            required="batch",
            after=("each-length", "near-thresholds", "batch", "batch-rows"),
        ),
        order=33,
    ),
    Experiment(
        "why-each-length",
        "which hypothesis predicts what the first and the last wrong step show",
        why_each_length,
        Scenario(prompt=1, steps=WALK),
        can_be_looked_into,
        judged=False,
        shown=False,
        explains=("each-length",),
        order=42,
    ),
)
