"""Every past length one by one, and the lengths around each threshold of the graph.

A fault may begin at a length, or strike at one alone: a table that ends, a mask of fixed size, a ring that is written
one entry off. The walk costs one reference run and one decode step for each length. A threshold is a number of the
graph that a length is compared with (`analysis/thresholds.py`): it costs ten calls.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Asking, Past, Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, as_probe, several_tokens, unjudged
from kvdoctor.decode.experiments.cache_entries import change_token, compare_prefills, same_logits
from kvdoctor.decode.experiments.determinism import looks_ahead
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.experiments.multi_turn import BEFORE as BEFORE_CHUNKS
from kvdoctor.decode.experiments.multi_turn import LAST_ONLY, takes_chunks
from kvdoctor.decode.experiments.why_logits_differ import can_be_looked_into, first_wrong, look, why_without_cache
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import GENERAL_CAUSES, KEYS_CHANGE, REFERENCE_CHANGES, Cause
from kvdoctor.errors import CannotCheck

WALK, LONG_CHUNK = 40, 7
"""Tokens of the walk: every past length below is visited; tokens of each chunk where it is done in chunks."""
SHORT = Scenario().total
"""Tokens of a call without a cache that must give the logits of the walk's reference run."""
MOST_LENGTH, MOST_THRESHOLDS, MOST_PAIRS = 260, 6, 2
"""The longest sequence around a threshold, in tokens; the thresholds that are visited, and the pairs of neighbors."""
FAR_LENGTH, MOST_LOGITS = 4096, 1 << 22
"""The longest sequence with --thorough; numbers in the logits of a call that is small: such run by default too."""
BEFORE, AFTER, CHUNK = 2, 4, 3
"""Tokens before and after a threshold, since a length may be counted with an offset; tokens of a chunk after it."""


Visit = tuple[FeedBuilder, int, int]
"""A sequence that goes over a threshold: its builder, and the tokens to begin and to end at."""


def has_lengths(contract: CacheContract) -> str | None:
    """A step at another length must be judged by the logits of a reference run."""
    if contract.exactness == "dynamic-quantization":
        return "the noise of dynamic quantization grows with the length"
    return several_tokens(contract)


def takes_long_chunks(contract: CacheContract) -> str | None:
    """Several new tokens, judged by a reference run."""
    return has_lengths(contract) or takes_chunks(contract)


@Experiment(
    "each-length",
    "one step at each past",
    Scenario(prompt=1, steps=WALK),
    has_lengths,
    lengths=True,
    use=Use(f"some past below {WALK}", "error", after=("one-token-prompt",)),
    order=31,
)
def each_length(builder: FeedBuilder) -> Calls:
    """A prompt of one token, then one token a step, up to the longest sequence that runs without a cache."""
    builder = _walker(builder)
    expected = yield from _reference(builder, 1)
    past = yield from builder.begin(expected, 1)
    for position in range(1, expected.shape[1]):
        if position == builder.contract.ring and not (yield from _goes_on(builder, past, expected)):
            return
        _, past = yield from builder.go_on(past, position, position + 1, expected)


def _reference(builder: FeedBuilder, least: int) -> Asking[Array]:
    """The logits of the longest sequence that runs without a cache, where a shorter one has the same at first."""
    total = yield from longest_sequence(builder, least, builder.scenario.total)
    if builder.contract.last_logits_only:
        return (yield from builder.whole(total))
    short = yield as_probe(builder.reference(min(SHORT, total)))
    for longest in (total, min(total, builder.contract.ring or total)):  # later tokens may overwrite those of a ring
        expected, count = (yield from builder.whole(longest)), min(SHORT, longest)
        if short.failed or same_logits(short.logits[:, :count], expected[:, :count], builder.tolerance):
            return expected
    raise CannotCheck(REFERENCE_CHANGES)  # some models rotate all keys otherwise from a length on


def _goes_on(builder: FeedBuilder, past: Past, expected: Array) -> Asking[bool]:
    """Whether steps on full buffers are to get the logits of a call without a cache: where such a call forgets as well.

    One whose attention has no window does not forget what a buffer drops. Where it has none, the two rightly differ.
    """
    start, total = builder.contract.ring or 0, expected.shape[1]
    answer = yield as_probe(builder.decode(start, start + 1, past))
    if not answer.failed and same_logits(answer.logits, expected[:, start : start + 1], builder.tolerance):
        return True
    other = yield as_probe(change_token(builder, 0).reference(total))
    return not other.failed and same_logits(other.logits[:, -1:], expected[:, -1:], builder.tolerance)


def _walker(builder: FeedBuilder) -> FeedBuilder:
    """A builder of the whole walk: up to the last token of a full buffer, or beyond it where the graph may go on."""
    contract = builder.contract
    limit = contract.context_limit if contract.ring else contract.usable_length
    return builder.resized(1, min(WALK, limit or WALK))


@Experiment(
    "near-thresholds",
    "single steps around the thresholds of the graph, the lengths that it compares with",
    Scenario(prompt=1, steps=2),
    has_lengths,
    lengths=True,
    changes_feeds=True,
    use=Use("a length near a threshold of the graph", "error", after=("each-length",)),
    order=32,
)
@Experiment(
    "rows-near-thresholds",
    "single steps around the thresholds of the graph with batch 3",
    Scenario(batch=3, prompt=1, steps=2),
    has_exact_rows,
    lengths=True,
    changes_feeds=True,
    use=Use(
        "a batch of 3 near a threshold",
        required="batch",
        after=("each-length", "near-thresholds", "batch", "batch-rows"),
    ),
    order=33,
)
def near_thresholds(builder: FeedBuilder) -> Decision:
    """Single steps over each threshold, and one step after it on a prefill that ends there."""
    return (yield from _step_over(builder, _near(builder)))


@Experiment(
    "far-thresholds",
    f"single steps around the thresholds of the graph up to {FAR_LENGTH} tokens",
    Scenario(prompt=1, steps=2),
    has_lengths,
    changes_feeds=True,
    thorough=True,
    use=Use("a length near a threshold of the graph", "error", after=("each-length", "near-thresholds")),
    order=32,
)
def far_thresholds(builder: FeedBuilder) -> Decision:
    """The same at thresholds that take long sequences."""
    near = set(_near(builder))
    far = visited(builder.thresholds, builder.contract.usable_length, FAR_LENGTH, len(builder.thresholds))
    return (yield from _step_over(builder, [length for length in far if length not in near]))


def _near(builder: FeedBuilder) -> list[int]:
    """The thresholds of the default run: those of short sequences, and of long ones where a call is small."""
    longest = max(MOST_LENGTH, min(FAR_LENGTH + AFTER, MOST_LOGITS // (builder.contract.vocabulary or MOST_LOGITS)))
    return list(visited(builder.thresholds, builder.contract.usable_length, longest))


def _step_over(builder: FeedBuilder, lengths: list[int]) -> Decision:
    found, changed = yield from _each_threshold(builder, lengths)
    for near, start, stop in found:
        expected = yield from near.whole(stop, start)
        late = max(stop - CHUNK, start)
        for begin in dict.fromkeys((start, late) if stop > WALK or near.scenario.batch > 1 else (late,)):
            past = yield from near.begin(stop=begin)
            yield from near.go_on(past, begin, stop if begin == start else begin + 1, expected)
    for near, start, stop in changed:
        if cause := (yield from _why_changed(near, start, stop)):
            return cause
    if not found:
        raise CannotCheck(f"{REFERENCE_CHANGES} at the thresholds {', '.join(map(str, lengths))}")
    return None


def _why_changed(near: FeedBuilder, start: int, stop: int) -> Decision:
    """What is wrong after a threshold beyond which a call without a cache computes earlier tokens otherwise.

    Of two sets of rotary factors (LongRoPE), the second rotates all keys from a length on; those in the cache stay as
    they are. Where the rotary base depends on the length (dynamic NTK), each token changes the keys. No mask changes
    those of the first layer: where they are the same, tokens of a long call may see later ones.
    """
    short, last, first = (yield near.reference(start)), start, stop
    whole, before = (yield near.reference(stop)), short
    while first - last > 1:
        made = yield near.reference(length := (first + last) // 2)
        same = _same_before(near, short, made, start)
        last, first, before = (length, first, made) if same else (last, length, before)
    kept = _compare_first_layer(near, short, whole, start)
    if has_same_keys := bool(kept) and all(kept):
        longest = replace(near, scenario=replace(near.scenario, steps=stop - start + 1), tokens=near.tokens[:, :stop])
        if cause := (yield from looks_ahead(longest, whole.logits)):
            return replace(cause, from_length=first)
    past = yield from near.begin(stop=start)
    for length in range(start + 1, stop + 1):
        answer = yield as_probe(near.decode(length - 1, length, past))
        if answer.failed or (length == last and not _same_last(near, answer, before)):
            return None  # another fault
        past = near.carry(past, answer, "held")
    if _same_last(near, answer, whole):
        return None
    again = yield as_probe(near.decode(stop - 1, stop, (yield from near.begin(stop=stop - 1))))
    refilled = not again.failed and _same_last(near, again, whole)
    made, changes = (yield near.reference(first)), [str(first)]
    for length in range(first + 1, stop + 1):
        before, made = made, (yield near.reference(length))
        changes += [] if _same_before(near, before, made, start) else [str(length)]
    call = f"a cache filled by one longer call is {'right' if refilled else 'wrong as well'}"
    call = call if first < stop else "no longer sequence was run"
    what = "keys" if near.contract.last_logits_only else "logits"
    lengths = " or ".join((", ".join(changes[:-1]), changes[-1])) if len(changes) > 1 else changes[0]
    seen = f"a call of {lengths} tokens without a cache gives earlier tokens other {what} than a shorter call"
    name = "wrong-at-lengths" if has_same_keys else KEYS_CHANGE
    evidence = f"{seen}; with a cache, steps differ from there on; {call}"
    return Cause(name, evidence, from_length=first, again=len(changes) > 1)


def _same_before(near: FeedBuilder, one: Answer, other: Answer, count: int) -> bool:
    """Whether two calls without a cache give the first tokens the same logits, or else the same keys at first."""
    if not near.contract.last_logits_only:
        return same_logits(other.logits[:, :count], one.logits[:, :count], near.tolerance)
    return all(_compare_first_layer(near, one, other, count))


def _compare_first_layer(near: FeedBuilder, one: Answer, other: Answer, count: int) -> list[bool]:
    """Whether two calls without a cache return the same keys, and values, of the first tokens in the first layer."""
    found = list(compare_prefills(near, count, one, other))
    return [same for piece, same in found if piece.layer == found[0][0].layer]


def _same_last(near: FeedBuilder, one: Answer, other: Answer) -> bool:
    return same_logits(one.logits[:, -1:], other.logits[:, -1:], near.tolerance)


@Experiment(
    "long-chunks",
    f"chunks of {LONG_CHUNK} tokens",
    Scenario(prompt=1, steps=WALK),
    takes_long_chunks,
    lengths=True,
    use=Use(
        "several new tokens on a longer past",
        required="chunked-prefill",
        after=("each-length", "chunk", "second-turn"),
    ),
    order=32,
)
def long_chunks(builder: FeedBuilder) -> Calls:
    """A fault may need a long past and several tokens at once, without a number in the graph that says of how many."""
    expected = yield from _reference(builder, BEFORE_CHUNKS + 1)
    past = yield from builder.begin(expected, BEFORE_CHUNKS)
    yield from builder.go_on(past, BEFORE_CHUNKS, expected.shape[1], expected, size=LONG_CHUNK)


@Experiment(
    "chunks-near-thresholds",
    "chunks around the thresholds of the graph, and chunks of as many tokens",
    Scenario(prompt=1, steps=2),
    takes_long_chunks,
    lengths=True,
    changes_feeds=True,
    use=Use(
        "several new tokens near a threshold of the graph",
        required="chunked-prefill",
        after=("each-length", "near-thresholds", "chunk", "second-turn", "long-chunks"),
    ),
    order=33,
)
def chunks_near_thresholds(builder: FeedBuilder) -> Calls:
    """A chunk over each threshold, one after it, chunks of as many tokens, and beyond two; a single step after each."""
    if builder.contract.last_logits_only:
        raise CannotCheck(LAST_ONLY)
    lengths = list(visited(builder.thresholds, builder.contract.usable_length))
    found, _ = yield from _each_threshold(builder, lengths)
    if not found:
        raise CannotCheck(f"{REFERENCE_CHANGES} at the thresholds {', '.join(map(str, lengths))}")
    for near, start, stop in found:
        if stop - start < CHUNK:
            continue
        expected = yield from near.whole(stop)
        for begin in dict.fromkeys((start, max(stop - CHUNK, start))):
            past = yield from near.begin(stop=begin)
            yield from _chunk(near, begin, stop, past, expected)
        past = yield from near.begin(stop=1)
        threshold = start + BEFORE
        for size in (threshold, threshold + 1):
            if size > 1 and size + 2 <= stop:
                yield from _chunk(near, 1, size + 2, past, expected)
    usable = builder.contract.usable_length
    pairs = [pair for pair in pairwise(sorted(lengths)) if any(visited((sum(pair),), usable))]
    for pair in pairs[-MOST_PAIRS:]:
        yield from _past_two(builder, pair)


def _past_two(builder: FeedBuilder, lengths: tuple[int, int]) -> Calls:
    """A chunk longer than one threshold on a past longer than the other: a fault may need both at once."""
    with suppress(CannotCheck):  # no sequence is so long
        found, _ = yield from _each_threshold(builder, [sum(lengths)])
        for near, _, stop in found:
            expected = yield from near.whole(stop)
            for begin in (length + 1 for length in lengths):
                past = yield from near.begin(stop=begin)
                yield from _chunk(near, begin, stop, past, expected)


def _each_threshold(builder: FeedBuilder, lengths: list[int]) -> Asking[tuple[list[Visit], list[Visit]]]:
    """For each threshold a visit: where a longer call without a cache agrees with a shorter one, and where it does not.

    Raises:
        CannotCheck: the graph has no threshold that can be visited.
    """
    found: list[Visit] = []
    changed: list[Visit] = []
    if not lengths:
        raise CannotCheck("the graph compares no length with a number in reach that was not visited")
    for length in lengths:
        start = max(length - BEFORE, 1)
        near = builder.resized(start, length + AFTER)
        try:
            stop = yield from longest_sequence(near, start, length + AFTER)
        except CannotCheck:
            break  # no sequence is so long, nor as long as the larger ones: the smaller ones are visited all the same
        if stop == start:
            continue
        whole, short = (yield near.reference(stop)), (yield as_probe(near.reference(start)))
        holds = short.failed or _same_before(near, short, whole, start)
        (found if holds else changed).append((near, start, stop))
    if not found and not changed:
        raise CannotCheck(f"no reference run goes over the thresholds {', '.join(map(str, lengths))}")
    return found, changed


def _chunk(near: FeedBuilder, start: int, stop: int, past: Past, expected: Array) -> Calls:
    """All tokens up to the last at once, then the last one on the cache that they leave."""
    _, past = yield from near.go_on(past, start, stop - 1, expected, size=stop - 1 - start)
    yield near.decode(stop - 1, stop, past, expected[:, stop - 1 : stop])


def longest_sequence(builder: FeedBuilder, least: int, most: int) -> Asking[int]:
    """The tokens of the longest sequence that runs without a cache, from `least` to `most`.

    A table of positions that ends limits every call: a length beyond it is no fault of the cache.

    Raises:
        CannotCheck: not even `least` tokens run.
    """
    runs, fails, tried = least - 1, most + 1, most
    while runs + 1 < fails:
        answer = yield as_probe(builder.reference(tried))
        runs, fails = (runs, tried) if answer.failed else (tried, fails)
        tried = (runs + fails) // 2
    if runs < least:
        raise CannotCheck(f"no sequence of {least} tokens runs without a cache")
    return runs


@unjudged(
    "why-each-length",
    "which hypothesis predicts what the first and the last wrong step show",
    Scenario(prompt=1, steps=WALK),
    can_be_looked_into,
    explains=("each-length",),
    order=42,
)
def why_each_length(builder: FeedBuilder) -> Decision:
    """The cache and the attention of the first wrong step; then of the last one, where more of the past is affected."""
    builder = _walker(builder)
    total = yield from longest_sequence(builder, 1, builder.scenario.total)
    expected = yield from builder.whole(total)
    builder = replace(builder, scenario=replace(builder.scenario, steps=total), tokens=builder.tokens[:, :total])
    whole = yield as_probe(builder.prefill(total))
    if cause := (yield from why_without_cache(builder, expected, whole)):
        return cause
    wrong, ring = (yield from first_wrong(builder, expected)), builder.contract.ring
    if wrong is not None and ring and wrong >= ring:
        return None  # a step on a full ring rightly replaces an entry: see the experiment `ring`
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
    fitting = [length for length in sorted(thresholds) if length + AFTER <= min(longest, usable or longest)]
    yield from fitting[:most]
