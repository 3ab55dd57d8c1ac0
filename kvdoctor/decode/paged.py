"""The inputs of a decoder with a paged cache, and an allocator of blocks for our own loop.

The pool of each layer is [blocks, block, kv_heads, head_dim]; a table lists the blocks of each sequence, and a slot is
a place in the pool, counted from its start: block * block size + offset. Sources: vLLM (`slot_mapping`, `block_tables`,
`context_lens`), onnxruntime-genai and the schema of com.microsoft PagedAttention. Standard library and numpy only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdoctor.contract import CacheContract, Port
from kvdoctor.decode.calls import NUMPY_TYPES, Array
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
    """The inputs of a step by meaning, as far as the graph has them; `unknown` says why it cannot be called.

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


@dataclass
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
    """The inputs of one call without its pools; the tokens of several sequences stand one behind the other."""
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
