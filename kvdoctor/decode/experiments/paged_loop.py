"""The loop of a paged cache: its inputs, an allocator of blocks, and the experiment.

The pool of each layer is [blocks, block, kv_heads, head_dim]; a table lists the blocks of each sequence, and a slot is
a place in the pool, counted from its start: block * block size + offset. Sources: vLLM (`slot_mapping`, `block_tables`,
`context_lens`), onnxruntime-genai and the schema of com.microsoft PagedAttention. Standard library and numpy only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Port
from kvdoctor.decode.calls import NUMPY_TYPES, Answer, Array, Asking, Call, Past, Value
from kvdoctor.decode.experiments import Calls, Experiment
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import random_tokens
from kvdoctor.decode.runs import PAGED_LOOP
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

LENGTHS = r"(?:_?seq(?:uence)?)?_?len(?:gth)?s?"
KINDS = {
    "slots": re.compile(r"(?:kv_)?slots?(?:_mapping|_ids|_indices)?"),
    "table": re.compile(r"(?:kv_)?(?:block|page)_(?:tables?|indices|ids|map)"),
    "cumulative": re.compile(rf"(?:cumulative|cum|cu){LENGTHS}(?:_q)?|query_start_loc"),
    "pasts": re.compile(rf"past{LENGTHS}|num_computed_tokens"),
    "totals": re.compile(rf"(?:seq|sequence|total|kv){LENGTHS}"),
    "rows": re.compile(r"logits_ind(?:ices|exes)|selected_token_ind(?:ices|exes)"),
}
"""What an input of integers means, by its whole name. `context_lens` is not among them: it counts the tokens of the
cache in one engine, and all tokens in another."""
ONE_SEQUENCE = {"table": 1, "totals": 1, "pasts": 1, "cumulative": 2}
"""The first size of an input where a graph takes one sequence only."""
NO_KERNEL = "PagedAttention"
"""The operator of com.microsoft for such a cache. ONNX Runtime 1.32 has no kernel of it for the CPU."""


@record
class PagedInputs:
    """The inputs of a step that the graph has, by meaning; `unknown` says why it cannot be called.

    tokens, positions, slots: one number for each new token. table [sequences, blocks]. totals, pasts: tokens with and
    without the new ones, by sequence. cumulative: where the new tokens of each sequence begin. rows: the tokens whose
    logits are wanted.
    """

    ports: dict[str, Port] = field(default_factory=dict)
    unknown: str = ""

    @property
    def takes_several(self) -> bool:
        """Whether it can tell the tokens of several sequences in one call apart."""
        sizes = [(port.shape or (None,))[0] for kind, port in self.ports.items() if kind in ONE_SEQUENCE]
        return "cumulative" in self.ports and not any(isinstance(size, int) for size in sizes)

    @property
    def most_blocks(self) -> int | None:
        """The width of its table, where that is a number."""
        width = (self.ports["table"].shape or (None,))[-1]
        return width if isinstance(width, int) else None


def read_paged_inputs(contract: CacheContract) -> PagedInputs:
    """Tell the inputs of a paged decoder apart, by role, name and rank."""
    found: dict[str, Port] = {}
    for port in contract.graph("decode").inputs:
        if port.role == "past":
            continue
        kind = _kind_of(port)
        if kind is None or kind in found:
            return PagedInputs(unknown=f"nothing shows what its input {port.name!r} is to be fed")
        size = (port.shape or (None,))[0]
        if isinstance(size, int) and ONE_SEQUENCE.get(kind) != size:
            return PagedInputs(unknown=f"its input {port.name!r} has a fixed size")
        found[kind] = port
    lacking = [kind for kind in ("tokens", "slots", "table") if kind not in found]
    if lacking:
        return PagedInputs(found, f"no input of it tells the {lacking[0]} of a step")
    if any(slot.growth != "paged" for slot in contract.slots):
        return PagedInputs(found, "some of its caches are paged and others are not")
    if contract.graph("decode").port("logits") is None:
        return PagedInputs(found, "it returns no logits")
    return PagedInputs(found)


def _kind_of(port: Port) -> str | None:
    """The meaning of an input, by its role or else by its name; None where its rank is another one."""
    if port.role == "token_ids":
        kind: str | None = "tokens"
    elif port.role in ("position_ids", "cache_position"):
        kind = "positions"
    else:
        kind = next((kind for kind, name in KINDS.items() if name.fullmatch(port.name.lower())), None)
    fits = "int" in port.dtype and len(port.shape or ()) == (2 if kind == "table" else 1)
    return kind if fits else None


@record
class NewTokens:
    """The new tokens of one sequence: its blocks in order, how many tokens it has already, and the tokens."""

    blocks: tuple[int, ...]
    past: int
    tokens: tuple[int, ...]


@dataclass(eq=False, repr=False)
class BlockPool:
    """Hands out blocks of a pool, in an order that has nothing to do with that of the tokens."""

    size: int
    count: int
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        order = np.random.default_rng(self.count).permutation(self.count)
        self.free = [int(block) for block in order]

    def take(self, tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Blocks for so many tokens; the first of them are those of another sequence with the same tokens."""
        needed = -(-tokens // self.size) - len(shared)
        taken, self.free = self.free[:needed], self.free[needed:]
        return (*shared, *taken)


def feed_paged(inputs: PagedInputs, steps: Sequence[NewTokens], size: int) -> dict[str, Array]:
    """The inputs of one call without its pools; the tokens of several sequences are concatenated."""
    positions = [range(step.past, step.past + len(step.tokens)) for step in steps]
    placed = [(step.blocks, at) for step, places in zip(steps, positions, strict=True) for at in places]
    width = inputs.most_blocks or max(len(step.blocks) for step in steps)
    counts = [len(step.tokens) for step in steps]
    made = {
        "tokens": [token for step in steps for token in step.tokens],
        "positions": [at for _, at in placed],
        "slots": [blocks[at // size] * size + at % size for blocks, at in placed],
        "table": [[*step.blocks, *[step.blocks[-1]] * (width - len(step.blocks))] for step in steps],
        "totals": [step.past + len(step.tokens) for step in steps],
        "pasts": [step.past for step in steps],
        "cumulative": [0, *np.cumsum(counts).tolist()],
        "rows": range(sum(counts)),
    }
    return {port.name: np.array(made[kind], NUMPY_TYPES[port.dtype]) for kind, port in inputs.ports.items()}


SIZE, BLOCKS = 4, 12
"""Tokens of a block and blocks of a pool, where the graph leaves them open."""
LEFT_OVER = 3.0
"""What an earlier sequence left in the blocks: it must not be seen."""
MOST_NUMBERS, LONGEST = 1 << 28, 4096
"""Numbers in all pools, a gigabyte of float32, and tokens of two blocks, up to which the loop is run."""


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

    def reference(self, tokens: Array) -> Asking[Array]:
        """The logits of a whole sequence in one call, its blocks in order in empty pools: float[tokens, vocabulary]."""
        blocks = tuple(range(-(-len(tokens) // self.size)))
        step = NewTokens(blocks, 0, tuple(map(int, tokens)))
        answer = yield self.call([step], self.pool(0.0), kind="probe")
        if answer.failed:
            raise CannotCheck("a whole sequence in one call fails")
        found: Array = answer.logits.reshape(len(tokens), -1)
        return found


def is_paged(contract: CacheContract) -> str | None:
    """Every cache of it must be one of blocks."""
    if not any(slot.growth == "paged" for slot in contract.slots):
        return "the cache has no blocks"
    return read_paged_inputs(contract).unknown or None


@Experiment(
    PAGED_LOOP,
    "scattered blocks with the content of an earlier sequence, and a block that two sequences share",
    applies=is_paged,
    changes_feeds=True,
    order=1,
)
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
        raise CannotCheck(inputs.unknown)
    size = next((found for slot in slots if (found := slot.size("block"))), SIZE)
    count = next((found for slot in slots if (found := slot.size("blocks"))), BLOCKS)
    if count < 6 or 2 * size + 3 > min(builder.contract.context_limit or LONGEST, LONGEST):
        raise CannotCheck(f"{count} blocks of {size} tokens do not hold the sequences of the loop")
    if (inputs.most_blocks or BLOCKS) < -(-(2 * size + 3) // size):
        raise CannotCheck(f"its block table has {inputs.most_blocks} columns, too few for the sequences of the loop")
    entries = sum(prod(d for d in slot.shape if isinstance(d, int)) for slot in slots)
    if entries * (1 if any(slot.size("blocks") for slot in slots) else count) > MOST_NUMBERS:
        raise CannotCheck("its pools are too large to be filled")
    return PagedLoop(builder, inputs, size, count)
