"""The loop of a paged cache: an allocator of ours gives out the blocks, as a serving engine does."""

from collections.abc import Generator
from itertools import pairwise
from math import prod

import numpy as np

from kvdoctor.contract import Axis, CacheContract
from kvdoctor.decode.calls import NUMPY_TYPES, Answer, Array, Call, NothingToRun, Past, Scenario, Value
from kvdoctor.decode.experiments import Calls, Experiment
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import random_tokens
from kvdoctor.decode.paged import BlockPool, NewTokens, PagedInputs, feed_paged, read_paged_inputs
from kvdoctor.decode.runs import PAGED_LOOP
from kvdoctor.records import record

SIZE, BLOCKS = 4, 12
"""Tokens of a block and blocks of a pool, where the graph leaves them open."""
LEFT_OVER = 3.0
"""What an earlier sequence left in the blocks: it must not be seen."""
MOST_NUMBERS = 1 << 28
"""Numbers in all pools up to which the loop is run: a gigabyte of float32."""
LONGEST = 4096
"""Tokens of two blocks up to which the loop is run."""


@record(slots=False)
class PagedLoop:
    """A decoder with a paged cache, and the sizes of its pools."""

    builder: FeedBuilder
    inputs: PagedInputs
    size: int
    count: int

    def pool(self, content: float) -> Past:
        """Pools of all layers with the same number everywhere."""
        sizes: dict[Axis, int] = {"blocks": self.count, "block": self.size}
        past = Past()
        for slot in self.builder.contract.slots:
            past[slot.past] = np.full(slot.sized(sizes), content, NUMPY_TYPES[slot.dtype])
        return past

    def call(self, steps: list[NewTokens], past: Past, expected: Array | None = None, kind: str = "step") -> Call:
        """One call for the new tokens of some sequences; `expected` are their logits, float[tokens, vocabulary]."""
        feeds: dict[str, Value | Array] = {**past, **feed_paged(self.inputs, steps, self.size)}
        phase, new = "decode" if steps[0].past else "prefill", sum(len(step.tokens) for step in steps)
        rows = None if expected is None else expected[:, None]
        named = {"label": "block table with a block of no sequence"} if kind == "control" else {}
        return Call(phase, feeds, steps[0].past, new, expected=rows, kind=kind, **named)  # type: ignore[arg-type]

    def carry(self, past: Past, answer: Answer) -> Past:
        """The pools that a call returned."""
        return Past(
            {slot.past: answer.outputs.get(slot.present or "", past[slot.past]) for slot in self.builder.contract.slots}
        )

    def reference(self, tokens: Array) -> Generator[Call, Answer, Array]:
        """The logits of a whole sequence in one call, its blocks in order in empty pools: float[tokens, vocabulary]."""
        blocks = tuple(range(-(-len(tokens) // self.size)))
        step = NewTokens(blocks, 0, tuple(map(int, tokens)))
        answer = yield self.call([step], self.pool(0.0), kind="probe")
        if answer.failed:
            raise NothingToRun("a whole sequence in one call fails")
        found: Array = answer.logits.reshape(len(tokens), -1)
        return found


def paged_loop(builder: FeedBuilder) -> Calls:
    """One sequence over scattered blocks, then two more that share its first block, then the first one again."""
    loop = _open(builder)
    size, length = loop.size, 2 * loop.size + 3
    first, second = random_tokens(builder.contract, (2, length), builder.scenario.seed)
    second[:size] = first[:size]
    expected = yield from loop.reference(first)
    pool, past = BlockPool(size, loop.count), loop.pool(LEFT_OVER)
    blocks = pool.take(length)
    # A prompt, single tokens into the second block, then several at once into the third.
    prompt = min(3, size)
    cuts = {0, prompt, max(prompt, size - 1), size, size + 1, 2 * size - 1, 2 * size + 1, length}
    for start, stop in pairwise(sorted(cuts)):
        before = past
        step = NewTokens(blocks[: -(-stop // size)], start, tuple(map(int, first[start:stop])))
        answer = yield loop.call([step], past, expected[start:stop])
        past = loop.carry(past, answer)
    other = yield from loop.reference(second)
    shared = NewTokens(pool.take(length, blocks[:1]), size, tuple(map(int, second[size:])))
    answer = yield loop.call([shared], past, other[size:])
    past = loop.carry(past, answer)
    # The first sequence still has what it had: its last tokens once more.
    yield loop.call([step], past, expected[start:stop])
    if loop.inputs.takes_several:
        yield from _several(loop, (first, expected), (second, other))
    wrong = NewTokens((*pool.take(1), *blocks[1:]), step.past, step.tokens)
    yield loop.call([wrong], before, expected[start:stop], kind="control")


def _several(loop: PagedLoop, *sequences: tuple[Array, Array]) -> Calls:
    """Sequences of two lengths in the same calls: their prompts, then one token of each."""
    pool, past, at = BlockPool(loop.size, loop.count), loop.pool(LEFT_OVER), [loop.size + 1, 2]
    blocks = [pool.take(len(tokens)) for tokens, _ in sequences]
    begun = [0] * len(sequences)
    for _ in range(3):
        steps = [
            NewTokens(held, start, tuple(map(int, tokens[start:stop])))
            for held, start, stop, (tokens, _) in zip(blocks, begun, at, sequences, strict=True)
        ]
        expected = [logits[start:stop] for start, stop, (_, logits) in zip(begun, at, sequences, strict=True)]
        answer = yield loop.call(steps, past, np.concatenate(expected))
        past, begun, at = loop.carry(past, answer), at, [stop + 1 for stop in at]


def _open(builder: FeedBuilder) -> PagedLoop:
    """The loop in the sizes that the graph declares."""
    inputs, slots = read_paged_inputs(builder.contract), builder.contract.slots
    if inputs.unknown:
        raise NothingToRun(inputs.unknown)
    size = next((found for slot in slots if (found := slot.size("block"))), SIZE)
    count = next((found for slot in slots if (found := slot.size("blocks"))), BLOCKS)
    if count < 6 or 2 * size + 3 > min(builder.contract.context_limit or LONGEST, LONGEST):
        raise NothingToRun(f"{count} blocks of {size} tokens do not hold the sequences of the loop")
    if (inputs.most_blocks or BLOCKS) < -(-(2 * size + 3) // size):
        raise NothingToRun(f"its block table has {inputs.most_blocks} columns, too few for the sequences of the loop")
    entries = sum(prod(d for d in slot.shape if isinstance(d, int)) for slot in slots)
    if entries * (1 if any(slot.size("blocks") for slot in slots) else count) > MOST_NUMBERS:
        raise NothingToRun("its pools are too large to be filled")
    return PagedLoop(builder, inputs, size, count)


def is_paged(contract: CacheContract) -> str | None:
    """Every cache of it must be one of blocks."""
    if not any(slot.growth == "paged" for slot in contract.slots):
        return "the cache has no blocks"
    return read_paged_inputs(contract).unknown or None


EXPERIMENTS = (
    Experiment(
        PAGED_LOOP,
        "scattered blocks with the content of an earlier sequence, and a block that two sequences share",
        paged_loop,
        Scenario(),
        is_paged,
        changes_feeds=True,
        order=1,
    ),
)
