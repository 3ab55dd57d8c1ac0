"""Lengths: a past that is too short to grow, a sweep, 5 and 50 tokens with their times, and the whole context."""

import time
from collections.abc import Generator
from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Call, NothingToRun, Scenario
from kvdoctor.decode.experiments import Calls, Experiment, Use, several_tokens
from kvdoctor.decode.experiments.cache_entries import as_probe
from kvdoctor.decode.experiments.chunk import takes_chunks
from kvdoctor.decode.feeds import FeedBuilder

STEP_LENGTHS = (5, 50)
"""Tokens so far, the new one included."""


def long_past(builder: FeedBuilder) -> Calls:
    """Judge and time the last token of each length both ways; the noise of dynamic quantization leaves no judgment."""
    for length in STEP_LENGTHS:
        if length > builder.scenario.total:
            return
        expected = yield from builder.whole(length)
        exact = builder.contract.exactness != "dynamic-quantization"
        answer = yield builder.prefill(length - 1, expected[:, :-1] if exact else None)
        past = builder.carry(None, answer, "held")
        step = builder.decode(length - 1, length, past, expected[:, -1:] if exact else None)
        yield step
        yield replace(step, kind="timing", label=f"cached:{length}")
        yield replace(builder.prefill(length), kind="timing", label=f"uncached:{length}")


FROZEN_PAST = "frozen-past"


def beyond(builder: FeedBuilder) -> Calls:
    """A prefill of as many tokens as the past is long, one step that takes them, and the step after it."""
    fits = builder.contract.frozen_past or 0
    answer = yield builder.prefill(fits)
    past = builder.carry(None, answer, "held")
    for position in (fits, fits + 1):
        answer = yield builder.decode(position, position + 1, past)
        past = builder.carry(past, answer, "held")


def can_be_filled(contract: CacheContract) -> str | None:
    """The first step must take no past, and as many tokens as the past of the next one has places."""
    fits = contract.frozen_past
    if fits is None:
        return "the past length is not a fixed number"
    if contract.first_step == "empty-past" or contract.new_tokens not in (None, fits):
        return f"the past length is fixed at {fits}, and no first step fills it"
    return None


LONGEST = 4096
"""Tokens; a reference run of more takes minutes and gigabytes on models that people really use."""
SCORES = 1 << 21
"""New tokens of a chunk times tokens in all: the scores of one head of a layer."""
MOST_BYTES = 1 << 30
"""Of a cache that is filled: past, present and what the runtime keeps are three of it."""
MOST_SECONDS = 30.0
"""After which a context is not filled further."""
BEFORE_LIMIT = 3
PROMPTS, CHUNKS = (1, 2, 4, 9, 16), (1, 2, 7)


def at_limit(builder: FeedBuilder) -> Calls:
    """A prefill of nearly the whole context, and single tokens until it is full."""
    limit = builder.contract.usable_length or 0
    if limit > LONGEST:
        yield from _in_chunks(builder, limit)
        return
    sizes = replace(builder.scenario, prompt=limit - BEFORE_LIMIT, steps=BEFORE_LIMIT + 1)
    full = replace(builder, scenario=sizes, tokens=builder.tokens[:, :0])
    expected = yield from full.whole()
    start = sizes.prompt
    answer = yield full.prefill(start, expected[:, :start])
    past = full.carry(None, answer, "held")
    for position in range(start, sizes.total):
        answer = yield full.decode(position, position + 1, past, expected[:, position : position + 1])
        past = full.carry(past, answer, "held")


def _in_chunks(builder: FeedBuilder, limit: int) -> Calls:
    """The context filled by chunks; its last tokens, one by one, must give what they give in one call.

    Raises:
        NothingToRun: it takes too long.
    """
    start, size, began = limit - BEFORE_LIMIT, max(SCORES // limit, 1), time.monotonic()
    sizes = replace(builder.scenario, prompt=start, steps=BEFORE_LIMIT + 1)
    full = replace(builder, scenario=sizes, tokens=builder.tokens[:, :0])
    first = min(size, start)
    past = full.carry(None, (yield from _shown_if_it_fails(full.prefill(first))), "held")
    for done in range(first, start, size):
        stop = min(done + size, start)
        past = full.carry(past, (yield from _shown_if_it_fails(full.decode(done, stop, past))), "held")
        if (elapsed := time.monotonic() - began) > MOST_SECONDS:
            raise NothingToRun(f"{stop} of {limit} declared tokens took {elapsed:.0f} s; the others were not tried")
    expected = (yield from _shown_if_it_fails(full.decode(start, limit, past))).logits
    for position in range(start, limit):
        wanted = expected[:, position - start : position - start + 1]
        answer = yield full.decode(position, position + 1, past, wanted)
        past = full.carry(past, answer, "held")


def _shown_if_it_fails(call: Call) -> Generator[Call, Answer, Answer]:
    """The answer of one call of many: only one that fails is listed as a step."""
    answer = yield as_probe(call)
    return (yield call) if answer.failed else answer


def sweep(builder: FeedBuilder) -> Calls:
    """Every pair of a prompt and a number of new tokens on top of it."""
    expected = yield from builder.whole()
    for prompt in PROMPTS:
        answer = yield builder.prefill(prompt, expected[:, :prompt])
        past = builder.carry(None, answer, "held")
        for new in CHUNKS:
            yield builder.decode(prompt, prompt + new, past, expected[:, prompt : prompt + new])


def has_limit(contract: CacheContract) -> str | None:
    """There must be a promise, and one that can be tried."""
    limit = contract.usable_length
    if limit is None:
        return "neither a config nor a buffer limits the length of a sequence"
    if limit <= BEFORE_LIMIT:
        return f"{limit} tokens are declared"
    if limit <= LONGEST:
        return several_tokens(contract)
    sizes = [slot.bytes_per_position() for slot in contract.slots]
    if 3 * limit * sum(size or 0 for size in sizes) > MOST_BYTES:
        return f"{limit} tokens are declared, whose cache takes too much memory; lengths up to {LONGEST} are tried"
    return takes_chunks(contract)


EXPERIMENTS = (
    Experiment(
        "full-context",
        "the held loop until the context is full",
        at_limit,
        applies=has_limit,
        changes_feeds=True,
        thorough=True,
        use=Use("as many tokens as are declared", required="full-context", after=("long-past",)),
        order=36,
    ),
    Experiment(
        "sweep",
        "prompts of 1 to 16 tokens, each followed by 1, 2 and 7 new tokens",
        sweep,
        Scenario(prompt=max(PROMPTS), steps=max(CHUNKS) + 1),
        takes_chunks,
        thorough=True,
        use=Use("other lengths", after=("chunk", "second-turn", "one-token-prompt", "long-past")),
        order=35,
    ),
    Experiment(
        FROZEN_PAST,
        "the loop until the past is longer than declared",
        beyond,
        Scenario(steps=3),
        can_be_filled,
        order=1,
    ),
    Experiment(
        "long-past",
        "one step after 4 and after 49 tokens",
        long_past,
        Scenario(prompt=1, steps=50),
        use=Use("up to 50 tokens", "error", after=("each-length",)),
        order=30,
    ),
)
