"""What an input is fed in a step, by its role: one function for each. numpy only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvdoctor.calls import NUMPY_TYPES, Array
from kvdoctor.contract import Axis, CacheContract, PhaseName, Port
from kvdoctor.words import word_table

HIDDEN = -1e4
"""What an additive mask adds to the scores of entries that must not be seen; within the range of float16."""

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Step:
    """What all inputs of one call go by.

    `tokens` int64[batch * codebooks, new] are the new ones, `begin` tokens stand in the cache before them. `sizes` are
    the lengths of all axes, and `columns` those of a mask with a row for each query. `padding` and `encoder_padding`
    say for each row what is to be masked; `states` float[batch, encoder, hidden] are those of the encoder.
    """

    contract: CacheContract
    phase: PhaseName
    tokens: Array
    begin: int
    sizes: Mapping[Axis, int]
    columns: int
    padding: tuple[int, ...] = ()
    encoder_padding: tuple[int, ...] = ()
    states: Array | None = None

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.sizes["total"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One input of a step, in the shape that it has there."""

    port: Port
    shape: tuple[int, ...]
    step: Step


def fill(port: Port, step: Step) -> Array:
    """The value of an input.

    Raises:
        ValueError: If nothing is known that could be fed to an input of this role.
    """
    if port.role not in FILLS:
        raise ValueError(f"input {port.name!r} has role {port.role}, which no feed is known for")
    made = FILLS[port.role](Wanted(port, sized(port, step.sizes), step))
    return np.array(made, dtype=NUMPY_TYPES[port.dtype], order="C")


def sized(port: Port, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a port under the given sizes: declared numbers stay, axes get what they count."""
    return tuple(
        dim if isinstance(dim, int) else sizes.get(axis, 1)
        for dim, axis in zip(port.shape or (), port.axes, strict=True)
    )


def _token_ids(want: Wanted) -> Array:
    return want.step.tokens if len(want.shape) == 2 else want.step.tokens.reshape(-1)


def _token_and_position(want: Wanted) -> Array:
    tokens = want.step.tokens
    return np.stack([tokens[:, 0], np.full(len(tokens), want.step.begin)], axis=1)


def _embeddings(want: Wanted) -> Array:
    return word_table(want.step.contract, want.shape[-1])[want.step.tokens]


def _attention_mask(want: Wanted) -> Array:
    columns = np.arange(want.shape[-1])
    words = columns >= _by_row(want.step.padding, want.shape)
    return np.broadcast_to(words & (columns < want.step.end), want.shape)


def _encoder_mask(want: Wanted) -> Array:
    length = want.shape[-1]
    return np.broadcast_to(np.arange(length) < length - _by_row(want.step.encoder_padding, want.shape), want.shape)


def _additive_mask(want: Wanted) -> Array:
    seen = _seen(want.port, want.step)
    if want.port.dtype == "bool":
        return seen
    # Square masks of integers are those of Llama-2-Onnx: -1 where a query may look, 0 elsewhere.
    square = want.port.axes[-2] == "total"
    shown, hidden = (0.0, HIDDEN) if "float" in want.port.dtype else (-1, 0) if square else (1, 0)
    return np.asarray(np.where(seen, shown, hidden))


def _positions(want: Wanted) -> Array:
    counted = np.arange(want.step.begin, want.step.end) - _by_row(want.step.padding, want.shape)
    return np.broadcast_to(np.maximum(counted, 0), want.shape)


def _angles(want: Wanted) -> Array:
    """The angles of the new positions, float[..., new, head_dim / 2]."""
    half = want.shape[-1]
    angles = np.arange(want.step.begin, want.step.end)[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    return np.broadcast_to(angles, want.shape)


def _encoder_states(want: Wanted) -> Array:
    if want.step.states is None:
        raise ValueError(f"input {want.port.name!r} takes encoder states, and there are none")
    return want.step.states


def _branch_switch(want: Wanted) -> Array:
    return np.full(want.shape, want.step.contract.phases[want.step.phase].switch)


def _setting(want: Wanted) -> Array:
    if want.port.value is None:
        raise ValueError(f"input {want.port.name!r} is a setting, and nobody says of which value")
    return np.full(want.shape, want.port.value)


FILLS: dict[str, Callable[[Wanted], Array]] = {
    "token_ids": _token_ids,
    "token_and_position": _token_and_position,
    "embeddings": _embeddings,
    "attention_mask": _attention_mask,
    "encoder_mask": _encoder_mask,
    "additive_mask": _additive_mask,
    "position_ids": _positions,
    "cache_position": _positions,
    "rotary_cos": lambda want: np.cos(_angles(want)),
    "rotary_sin": lambda want: np.sin(_angles(want)),
    "encoder_states": _encoder_states,
    "branch_switch": _branch_switch,
    "logits_to_keep": lambda want: np.zeros(want.shape),
    "block_table": lambda want: np.zeros(want.shape),
    # One beam where their number is asked for, and no row of another beam where their origins are.
    "beam_input": lambda want: np.full(want.shape, 1 if len(want.shape) < 2 else 0),
    "scale": lambda want: np.ones(want.shape),
    "setting": _setting,
    "unused": lambda want: np.zeros(want.shape),
    "write_index": lambda want: np.full(want.shape, want.step.begin),
    "past_length": lambda want: np.full(want.shape, want.step.begin),
    "total_length": lambda want: np.full(want.shape, want.step.end),
    "last_index": lambda want: np.full(want.shape, want.step.end - 1),
    "new_length": lambda want: np.full(want.shape, want.step.sizes["new"]),
}
"""By role. The past, and what an encoder inside the graph takes, are no matter of one step: the deal has them."""


def _by_row(padding: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The padding of each row, int64[batch, 1], for an input of that shape; 0 where there is none."""
    return np.array(padding).reshape(-1, 1) if padding and len(shape) > 1 else np.zeros(1, np.int64)


def _seen(port: Port, step: Step) -> Array:
    """Which entries a query may look at, bool in the shape of a mask with a row for each query.

    Columns count from the start of the cache; from its end where the loop shifts entries in from the right. Rows are
    the new tokens, or, in a square mask, all positions.
    """
    slots, shape = step.contract.slots, sized(port, {**step.sizes, "total": step.columns})
    rows = np.arange(shape[-2]) if port.axes[-2] == "total" else np.arange(step.begin, step.end)
    columns = np.arange(shape[-1])
    moving = any(slot.carry == "shift" or slot.growth == "ring" for slot in slots)
    if moving and not any(slot.carry == "drop-oldest" for slot in slots):
        columns = columns - (shape[-1] - step.end)
    seen = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= 0)
    return np.broadcast_to(seen, shape)
