"""Synthetic inputs: token ids, the inputs of a step by their role, and the inputs and outputs of an encoder.

One function for each role. Standard library and numpy only.
"""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Graph, PhaseName, Port
from kvdoctor.decode.calls import NUMPY_TYPES, Array, Scenario
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.decode.feeds import FeedBuilder


def plain_token_ids(contract: CacheContract) -> tuple[int, int]:
    """The ids of ordinary tokens, the middle half of the vocabulary: special tokens are at its ends.

    A padding token behaves differently: M2M100 counts positions without it, so that its cached and its uncached
    positions rightly differ from then on.
    """
    size = max(contract.vocabulary or 16, 1)
    return size // 4, size - size // 4


def random_tokens(contract: CacheContract, shape: tuple[int, ...], seed: int) -> Array:
    """Random ids of ordinary tokens, int64[batch, total]."""
    return np.random.default_rng(seed).integers(*plain_token_ids(contract), shape)


EMBEDDING_SEED = 7


def synthetic_embeddings(tokens: Array, shape: tuple[int, ...]) -> Array:
    """Embeddings in the shape of an input, by the token ids, where no graph makes any: float64[batch, new, ...].

    A token has the same row in every call, standard normal, drawn from its id alone: a table of the whole vocabulary
    would have a thousand times the numbers of a call.
    """
    width = math.prod(shape[2:])
    ids, places = np.unique(tokens.reshape(-1), return_inverse=True)
    # A seed has no sign, and a trace may hold negative ids.
    seeds = [[EMBEDDING_SEED, int(token) % (1 << 64)] for token in ids]
    rows = np.array([np.random.default_rng(seed).standard_normal(width) for seed in seeds]).reshape(len(ids), width)
    return rows[places].reshape(*tokens.shape, *shape[2:])


HIDDEN = -1e4
"""What an additive mask adds to the scores of entries that must not be seen; within the range of float16."""

ROTARY_BASE = 10_000.0


@record
class StepInputs:
    """What all inputs of one call go by.

    `tokens` int64[batch * codebooks, new] are the new ones, `begin` tokens stand in the cache before them. `sizes` are
    the lengths of all axes, and `columns` those of a mask with a row for each query. `embedded` are the embeddings of
    the tokens that a graph made, by the name of their input.
    """

    builder: "FeedBuilder"
    phase: PhaseName
    tokens: Array
    begin: int
    sizes: Mapping[Axis, int]
    columns: int
    embedded: Mapping[str, Array]

    @property
    def end(self) -> int:
        """Tokens in the cache after the step."""
        return self.sizes["total"]


@record
class InputRequest:
    """One input of a step, in the shape that it has there."""

    port: Port
    shape: tuple[int, ...]
    step: StepInputs


def fill_input(port: Port, step: StepInputs) -> Array:
    """The value of an input.

    Raises:
        ValueError: If nothing is known that could be fed to an input of this role.
    """
    if port.role not in FILLS:
        raise ValueError(f"input {port.name!r} has role {port.role}, for which there is no synthetic input")
    order = _usual_order(port)
    shape = port.shape or ()
    usual = replace(port, axes=tuple(port.axes[at] for at in order), shape=tuple(shape[at] for at in order))
    made = FILLS[port.role](InputRequest(usual, resolve_shape(usual, step.sizes), step))
    return np.array(np.transpose(made, np.argsort(order)), dtype=NUMPY_TYPES[port.dtype], order="C")


RANKS: dict[Axis, int] = {"batch": 0, "batch_codebooks": 0, "codebooks": 1, "new": 3, "total": 4, "hidden": 5}
"""The usual order of the axes of an input; those that are not here stand third."""


def _usual_order(port: Port) -> list[int]:
    """The axes of an input with the batch before tokens and entries, and codebooks next to it."""
    axes = port.axes
    late = "batch" in axes and any(axis in ("new", "total") for axis in axes[: axes.index("batch")])
    if not late and "codebooks" not in axes:
        return list(range(len(axes)))
    return sorted(range(len(axes)), key=lambda at: RANKS.get(axes[at], 2))


def resolve_shape(port: Port, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a port under the given sizes: declared numbers stay, axes get what they count."""
    return tuple(
        dim if isinstance(dim, int) else sizes.get(axis, 1)
        for dim, axis in zip(port.shape or (), port.axes, strict=True)
    )


def _embeddings(want: InputRequest) -> Array:
    made = want.step.embedded.get(want.port.name)
    return synthetic_embeddings(want.step.tokens, want.shape) if made is None else made


def _mask(want: InputRequest) -> Array:
    """Which entries of the cache may be seen: 1 or 0, its opposite where 1 hides, or what is added to the scores."""
    by_query = "new" in want.port.axes or want.port.axes.count("total") > 1
    seen = _visible_entries(want) if by_query else _filled_entries(want)
    if want.port.role != "additive_mask" or want.port.dtype == "bool":
        return ~seen if want.port.role == "padding_mask" else seen
    # Square masks of integers are those of Llama-2-Onnx: -1 where a query may look, 0 elsewhere.
    square = want.port.axes.count("total") > 1
    shown, hidden = (0.0, HIDDEN) if "float" in want.port.dtype else (-1, 0) if square else (1, 0)
    return np.asarray(np.where(seen, shown, hidden))


def _filled_entries(want: InputRequest) -> Array:
    """Which entries of the cache hold tokens after the step, bool in the shape of a mask with one row a sequence."""
    columns = np.arange(want.shape[-1])
    if fills_from_right(want.port, want.step.builder.contract):
        columns = columns - (want.shape[-1] - want.step.end)
    tokens = columns >= _by_row(want.step.builder.padding, want.shape)
    if want.step.builder.gap:
        tokens = tokens & ~_in_gap(want.step, columns, want.shape)
    return np.broadcast_to(tokens & (columns < want.step.end), want.shape)


def fills_from_right(port: Port, contract: CacheContract) -> bool:
    """Whether a mask of fixed length covers a window that entries are shifted into from the right, after padding."""
    columns = port.shape[-1] if port.shape else None
    windows = [slot for slot in contract.slots if slot.growth == "ring" and slot.carry == "feed-back"]
    sizes = [size for slot in windows if (size := slot.size("capacity")) is not None]
    return isinstance(columns, int) and any(columns > size for size in sizes)


def _positions(want: InputRequest) -> Array:
    counted = np.arange(want.step.begin, want.step.end) - _by_row(want.step.builder.padding, want.shape)
    if want.step.builder.gap:
        after = np.arange(want.step.begin, want.step.end) >= want.step.builder.gap_end
        counted = counted - _by_row(want.step.builder.gap, want.shape) * after
    return np.broadcast_to(np.maximum(counted, 0), want.shape)


def _angles(want: InputRequest) -> Array:
    """The angles of the new positions, float[..., new, head_dim / 2]."""
    half = want.shape[-1]
    angles = np.arange(want.step.begin, want.step.end)[:, None] * ROTARY_BASE ** (-np.arange(half) / half)
    return np.broadcast_to(angles, want.shape)


def _encoder_states(want: InputRequest) -> Array:
    """States of an encoder, `float[batch, encoder, hidden]`: of several encoders each input has columns of its own."""
    if (states := want.step.builder.encoded.states) is None:
        raise ValueError(f"input {want.port.name!r} takes encoder states, and there are none")
    graphs = want.step.builder.contract.graphs.values()
    listed = [[port.name for port in graph.inputs if port.role == "encoder_states"] for graph in graphs]
    names = max((names for names in listed if want.port.name in names), key=len)  # one order for all graphs
    at, width = names.index(want.port.name), want.port.size("hidden") or states.shape[-1]
    return states if len(names) == 1 else np.take(states, np.arange(at, at + width), axis=-1, mode="wrap")


def _setting(want: InputRequest) -> Array:
    if want.port.value is None:
        raise ValueError(f"input {want.port.name!r} is a setting, and its value is unknown")
    return np.full(want.shape, want.port.value)


def _adapter(want: InputRequest) -> Array:
    """A matrix of an adapter, float[in, rank] or float[rank, out]: none, or noise that leaves the size of its input."""
    if not want.step.builder.adapted:
        return np.zeros(want.shape)
    rng = np.random.default_rng(zlib.crc32(want.port.name.encode("utf-8", "surrogatepass")))
    return rng.standard_normal(want.shape) / math.sqrt(max(want.shape[0], 1))


FILLS: dict[str, Callable[[InputRequest], Array]] = {
    "token_ids": lambda want: want.step.tokens.reshape(want.shape if len(want.shape) > 1 else -1),
    "token_and_position": lambda want: np.stack(
        [want.step.tokens[:, 0], np.full(len(want.step.tokens), want.step.begin)], axis=1
    ),
    "embeddings": _embeddings,
    "attention_mask": _mask,
    "padding_mask": _mask,
    "encoder_mask": lambda want: np.broadcast_to(
        np.arange(want.shape[-1]) < want.shape[-1] - _by_row(want.step.builder.encoder_padding, want.shape), want.shape
    ),
    "additive_mask": _mask,
    "position_ids": _positions,
    "cache_position": _positions,
    "rotary_cos": lambda want: np.cos(_angles(want)),
    "rotary_sin": lambda want: np.sin(_angles(want)),
    "encoder_states": _encoder_states,
    "branch_switch": lambda want: np.full(want.shape, want.step.builder.contract.phases[want.step.phase].switch),
    "logits_to_keep": lambda want: np.zeros(want.shape),
    "block_table": lambda want: np.zeros(want.shape),
    # One beam where their number is asked for, and no row of another beam where their origins are.
    "beam_input": lambda want: np.full(want.shape, 1 if len(want.shape) < 2 else 0),
    "scale": lambda want: np.ones(want.shape),
    "setting": _setting,
    "adapter": _adapter,
    "unused": lambda want: np.zeros(want.shape),
    "write_index": lambda want: np.full(want.shape, want.step.begin),
    "past_length": lambda want: np.full(want.shape, want.step.begin),
    "total_length": lambda want: np.full(want.shape, want.step.end),
    "last_index": lambda want: np.full(want.shape, want.step.end - 1),
    "new_length": lambda want: np.full(want.shape, want.step.sizes["new"]),
    "last_new_index": lambda want: np.full(want.shape, want.step.sizes["new"] - 1),
    "batch_size": lambda want: np.full(want.shape, want.step.sizes["batch"]),
    "row_index": lambda want: np.broadcast_to(np.arange(want.step.sizes["batch"]), want.shape),
    "has_past": lambda want: np.full(want.shape, want.step.begin > 0),
    "first_call": lambda want: np.full(want.shape, want.step.begin == 0),
    "token_states": lambda want: synthetic_embeddings(
        # A row that all sequences share goes by its position.
        want.step.tokens if "batch" in want.port.axes else np.arange(want.step.begin, want.step.end)[None],
        want.shape,
    ),
}
"""By role. The feed builder makes the past and the inputs of an encoder inside the graph."""


def _by_row(padding: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The padding of each row, int64[batch, 1], for an input of that shape; 0 where there is none."""
    return np.array(padding).reshape(-1, 1) if padding and len(shape) > 1 else np.zeros(1, np.int64)


def _in_gap(step: StepInputs, columns: Array, shape: tuple[int, ...]) -> Array:
    """Which entries of each row are in its gap, bool[batch, ..., columns]."""
    sizes = np.array(step.builder.gap).reshape(-1, *[1] * (len(shape) - 1))
    return np.asarray((columns >= step.builder.gap_end - sizes) & (columns < step.builder.gap_end))


def _visible_entries(want: InputRequest) -> Array:
    """Which entries a query may look at, bool in the shape of a mask with a row for each query.

    Columns count from the start of the cache; from its end where the loop shifts entries in from the right. Rows are
    the new tokens, or, in a square mask, all positions.
    """
    port, step = want.port, want.step
    slots, shape = step.builder.contract.slots, resolve_shape(port, {**step.sizes, "total": step.columns})
    rows = np.arange(shape[-2]) if port.axes[-2] == "total" else np.arange(step.begin, step.end)
    columns = np.arange(shape[-1])
    moving = any(slot.carry == "shift" or slot.growth == "ring" for slot in slots)
    if moving and not any(slot.carry == "drop-oldest" for slot in slots):
        columns = columns - (shape[-1] - step.end)
    seen = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= 0)
    if step.builder.padding and port.axes[0] == "batch":
        # A token of padding sees itself: no row of scores is hidden whole.
        padded = columns < np.array(step.builder.padding).reshape(-1, *[1] * (len(shape) - 1))
        seen = seen & (~padded | (columns[None, :] == rows[:, None]))
    if step.builder.gap and port.axes[0] == "batch":
        seen = seen & (~_in_gap(step, columns, shape) | (columns[None, :] == rows[:, None]))
    return np.broadcast_to(seen, shape)


def embedding_feeds(graph: Graph, tokens: Array, features: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """What an embedding graph is fed for token ids: the ids, and the rows of images or audio, of which text has none.

    `features` are these rows by input, float[rows, ...].
    """
    feeds: dict[str, Array] = {}
    for port in graph.inputs:
        kind = NUMPY_TYPES[port.dtype]
        given = (features or {}).get(port.name)
        if port.role == "token_ids":
            feeds[port.name] = np.array(tokens, kind, order="C")
        elif given is not None:
            rank = len(port.shape or ())
            feeds[port.name] = given.reshape(*[1] * (rank - given.ndim), *given.shape).astype(kind)
        else:
            feeds[port.name] = np.zeros([size if isinstance(size, int) else 0 for size in port.shape or ()], kind)
    return feeds


def feature_feeds(graph: Graph, seed: int, length: int) -> dict[str, Array]:
    """What an encoder of images or audio is fed: noise, masks of ones, one image as a grid of patches.

    `length` is that of audio, in samples or frames.
    """
    rng = np.random.default_rng(seed + 3)
    feeds: dict[str, Array] = {}
    for port in graph.inputs:
        shape, kind = resolve_shape(port, {"encoder_input": length}), NUMPY_TYPES[port.dtype]
        if port.role == "setting":
            side = int(port.value or 1)
            feeds[port.name] = np.array([[1, side, side]], kind)
        elif port.role == "encoder_mask":
            feeds[port.name] = np.ones(shape, kind)
        else:
            feeds[port.name] = rng.standard_normal(shape).astype(kind)
    return feeds


def encoder_feeds(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Synthesize the inputs of the encoder graph: ids and features from the seed, masks of ones."""
    graph: Graph = contract.graph("encode")
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder_input": scenario.encoder, "fixed": scenario.encoder}
    feeds = {}
    for port in graph.inputs:
        shape = resolve_shape(port, sizes)
        if port.role == "encoder_mask":
            feeds[port.name] = np.ones(shape, NUMPY_TYPES[port.dtype])
        elif port.role == "encoder_length":
            feeds[port.name] = np.full(shape, scenario.encoder, NUMPY_TYPES[port.dtype])
        else:
            feeds[port.name] = synthetic_ids_or_features(port, shape, contract, scenario)
    return feeds


def synthetic_ids_or_features(port: Port, shape: tuple[int, ...], contract: CacheContract, scenario: Scenario) -> Array:
    """What an encoder reads: ids of ordinary tokens where it takes integers, noise elsewhere."""
    rng, kind = np.random.default_rng(scenario.seed + 1), NUMPY_TYPES[port.dtype]
    if np.issubdtype(kind, np.integer):
        return rng.integers(*plain_token_ids(contract), shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def synthetic_encoder_states(contract: CacheContract, scenario: Scenario) -> Array | None:
    """Noise in place of encoder states, float[batch, encoder, hidden]; None where the decoder takes none."""
    ports = [port for graph in contract.graphs.values() for port in graph.inputs if port.role == "encoder_states"]
    if not ports:
        return None
    # One graph of a pair may know the width that the other leaves open.
    ports.sort(key=lambda port: not isinstance((port.shape or (None,))[-1], int))
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder, "hidden": 16}
    rng = np.random.default_rng(scenario.seed + 1)
    return rng.standard_normal(resolve_shape(ports[0], sizes)).astype(NUMPY_TYPES[ports[0].dtype])


def synthetic_cross_caches(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Noise in place of the caches that an encoder would make, by the name of its output."""
    rng = np.random.default_rng(scenario.seed + 2)
    rows = scenario.batch
    sizes: dict[Axis, int] = {"batch": rows, "batch_heads": rows * (contract.heads or 1), "encoder": scenario.encoder}
    made = {}
    for slot in contract.slots:
        if slot.filled_in == "encode" and slot.filled_by is not None:
            made[slot.filled_by] = rng.standard_normal(slot.sized(sizes)).astype(NUMPY_TYPES[slot.dtype])
    return made
