"""The calls by which a converted model is compared with its original: prompts, chunks, steps, batches. numpy only.

Each side is driven by its own contract and carries its own cache. The sizes are those that both sides take.
"""

from collections.abc import Iterator
from typing import Literal

from kvdoctor.contract import CacheContract
from kvdoctor.records import record

PROMPTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)
"""Tokens of the prompts that are compared, each followed by two single steps."""
LONG, PIECE = 40, 512
"""Tokens of the sequence whose every past is visited; new tokens of calls that fill a buffer, and rows of scores."""

Rows = Literal["all", "last"]
"""The rows of logits that a call of the converted model returns: of every new token, or of the last one."""


@record
class Walk:
    """A prompt for a batch, and the number of new tokens of each later call."""

    batch: int
    prompt: int
    pieces: tuple[int, ...]

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return self.prompt + sum(self.pieces)

    def calls(self) -> Iterator[tuple[int, int]]:
        """The first token of each call, and the one after its last."""
        start = 0
        for count in (self.prompt, *self.pieces):
            yield start, start + count
            start += count

    def describe(self, start: int, stop: int) -> str:
        """One call, for a message."""
        batch = f"batch {self.batch}, "
        if start == 0:
            return f"{batch}prompt of {stop} token{'s' * (stop > 1)}"
        new = stop - start
        step = "one token" if new == 1 else f"a chunk of {new} tokens"
        return f"{batch}prompt of {self.prompt}, {step} on a past of {start}"


def plan_walks(
    original: CacheContract, converted: CacheContract, capacity: int | None, window: int = 0
) -> tuple[Walk, ...]:
    """The walks in sizes that both contracts take.

    A buffer of `capacity` tokens is filled to its end: by single steps at its last two tokens, and in one call where it
    is short. Past a window of an attention one sequence goes on.
    """
    contracts = (original, converted)
    most = _limit(LONG, contracts)
    planned = [
        *(Walk(1, prompt, (1, 1)) for prompt in PROMPTS),
        *(Walk(1, prompt, pieces) for prompt, pieces in ((3, (2, 1, 3, 1)), (1, (5, 2, 1)))),
        Walk(1, 1, (1,) * (LONG - 1)),
        *(Walk(batch, prompt, (1, 2, 1)) for batch in (2, 3) for prompt in (1, 3)),
    ]
    fits = [_fit(walk, contracts, most) for walk in planned]
    if capacity is not None:
        fits += [_fit(walk, contracts, capacity) for walk in _fill(capacity)]
    if window:
        fits.append(_fit(next(_fill(window + 3)), contracts, _limit(window + 3, contracts)))
    fitted = list(dict.fromkeys(filter(None, fits)))
    calls = [(walk.batch, walk.prompt, *walk.pieces) for walk in fitted]
    longer = ([one for one in calls if one != mine and one[: len(mine)] == mine] for mine in calls)
    return tuple(walk for walk, others in zip(fitted, longer, strict=True) if not others)  # one begins with another


def plan_decoding(one: CacheContract, other: CacheContract, prompt: int, steps: int) -> Walk | None:
    """A prompt and single steps in sizes that both contracts take; None where not even a prompt fits."""
    return _fit(Walk(1, prompt, (1,) * steps), (one, other), _limit(prompt + steps, (one, other)))


def fit_walk(walk: Walk, contract: CacheContract) -> Walk | None:
    """A walk in the sizes of one contract; None where not even its prompt fits."""
    return _fit(walk, (contract,), _limit(walk.total, (contract,)))


def _limit(most: int, contracts: tuple[CacheContract, ...]) -> int:
    """The tokens that a sequence may have, `most` and no more than any contract says."""
    return min([most, *(one.usable_length for one in contracts if one.usable_length is not None)])


def _fill(capacity: int) -> Iterator[Walk]:
    """Sequences as long as a buffer."""
    first = (capacity - 2) % PIECE or PIECE
    yield Walk(1, first, (*(PIECE,) * ((capacity - 2 - first) // PIECE), 1, 1))
    if capacity <= PIECE:
        yield Walk(1, capacity, ())


def _fit(walk: Walk, contracts: tuple[CacheContract, ...], most: int) -> Walk | None:
    """The walk in the sizes that contracts fix, up to `most` tokens; None where not even its prompt fits."""
    rows = next((size for one in contracts if (size := one.fixed_batch) is not None), walk.batch)
    prompt = next((size for one in contracts if (size := one.new_tokens) is not None), walk.prompt)
    later = next((size for one in contracts if (size := one.step_tokens) is not None), None)
    pieces = (later,) * ((walk.total - prompt) // later) if later is not None else walk.pieces
    taken, total = [], prompt
    for piece in pieces:
        total += piece
        if total > most:
            break
        taken.append(piece)
    return Walk(rows or walk.batch, prompt, tuple(taken)) if prompt <= most else None
