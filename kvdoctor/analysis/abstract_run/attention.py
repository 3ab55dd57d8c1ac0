"""Operators that hold a whole attention, in an abstract run: all heads are one, and so is the head width.

Sources: the ONNX operator Attention (23), RotaryEmbedding (23), and ONNX Runtime's ContribOperators.md for
GroupQueryAttention, MultiHeadAttention and Attention.
"""

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import combine
from kvdoctor.analysis.abstract_run.combining import multiply, softmax
from kvdoctor.analysis.abstract_run.shaping import join
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    NotKnown,
    Reading,
    Rule,
    Shape,
    as_weight,
    known,
    number_for,
    size_of,
)
from kvdoctor.decode.calls import Array
from kvdoctor.model.operators import CONTRIB
from kvdoctor.records import record

HIDDEN = -3e38
"""The score of what is not seen: finite, so that a row which sees nothing has the mean of all."""


@record
class Heads:
    """Queries, keys and values of one head, float[batch, 1, tokens, 1]."""

    query: Array
    key: Array
    value: Array


def _rows(value: Abstract, tokens: int, *outputs: Shape) -> Array:
    """The numbers of [batch, tokens, hidden] or [batch, heads, tokens, width] as float[batch, 1, tokens, 1].

    Raises:
        NotKnown: there are no such numbers; then `outputs` are the shapes that are known.
    """
    shape, data = known(value.shape, *outputs), known(value.data, *outputs)
    if data.ndim not in (3, 4):
        raise NotKnown(*outputs)
    if data.ndim == 4:
        data = data.mean(axis=1)
    wide = np.broadcast_to(data.mean(axis=-1), (shape[0], tokens))
    found: Array = np.asarray(wide, np.float64)[:, None, :, None]
    return found


def _with_past(r: Reading, at: int, new: tuple[Array, Array], *outputs: Shape) -> tuple[int, Array, Array]:
    """The length of the past whose keys and values are at two inputs, if there is one, and both with the new ones.

    Raises:
        NotKnown: it is not known; then `outputs` are the shapes that are known.
    """
    if not r.has(at):
        return 0, *new
    past = known(r.at(at).shape, *outputs)
    if len(past) != 4:
        raise NotKnown(*outputs)
    key, value = (
        np.concatenate([_rows(r.at(at + part), past[2], *outputs), added], axis=2) for part, added in enumerate(new)
    )
    return past[2], key, value


def attend(heads: Heads, bias: Abstract | None, hidden: Array | None) -> Array | None:
    """The attention of one head, float[batch, 1, new, 1]; `hidden` says which columns a row does not see."""
    transposed = np.swapaxes(heads.key, 2, 3)
    if size_of(np.broadcast_shapes(heads.query.shape, transposed.shape)) > MOST_ELEMENTS:
        raise ValueError("the scores are too many")
    scores = heads.query * transposed
    if bias is not None:
        if bias.data is None or bias.shape is None:
            return None
        data: Array = np.where(bias.data, 0.0, HIDDEN) if bias.data.dtype == bool else bias.data
        data = data.reshape((1,) * (4 - data.ndim) + data.shape)
        if data.shape[1] > 1:
            data = data.mean(axis=1, keepdims=True)
        columns = scores.shape[-1]
        if data.shape[-1] not in (1, columns):
            data = data[..., :columns]
        scores = scores + data
    if hidden is not None:
        scores = np.where(hidden, HIDDEN, scores)
    if 0 in scores.shape:
        return np.zeros(heads.query.shape)
    found = softmax(Abstract(scores.shape, scores), -1).data
    return None if found is None else np.matmul(found, heads.value)


def _hide(rows: int, columns: int, start: int, window: int = -1) -> Array:
    """Which columns the rows of a causal attention do not see, whose first row stands at `start`."""
    row, column = start + np.arange(rows)[:, None], np.arange(columns)[None, :]
    hidden = column > row
    return hidden | (column <= row - window) if window > 0 else hidden


def _rotate(rows: Array, positions: Array) -> Array:
    """Numbers rotated by their position, as a rotary embedding does."""
    found: Array = rows * (np.cos(0.7 * positions) + 0.6 * np.sin(0.7 * positions))
    return found


def _joined(shape: Shape, out: Array | None) -> Abstract:
    """The result of an attention, float[batch, 1, new, 1], with the heads in one row."""
    return Abstract(shape, None if out is None else out[:, 0])


def _group_query(r: Reading) -> list[Abstract]:
    query, past = r.at(0), r.at(3)
    lengths = r.at(5).numbers
    if query.shape is None or past.shape is None or lengths is None or len(query.shape) != 3 or len(past.shape) != 4:
        return []
    packed = not r.has(1)
    batch, new, width = query.shape
    heads, groups = r.number("num_heads", 1), r.number("kv_num_heads", 1)
    out_width = width * heads // (heads + 2 * groups) if packed else width
    totals = np.broadcast_to(lengths.ravel() + 1, (batch,)) if lengths.size in (1, batch) else None
    if totals is None or len(set(totals.tolist())) > 1 or batch == 0:
        return [Abstract((batch, new, out_width))]
    total, buffer = int(totals[0]), past.shape[2]
    start = total - new
    sized = max(buffer, total)
    present = (batch, past.shape[1], sized, past.shape[3])
    shapes = (batch, new, out_width), present, present
    parts = [query, query, query] if packed else [query, r.at(1), r.at(2)]
    rows = [_rows(part, new, *shapes) for part in parts]
    if start < 0 or start > buffer:
        raise NotKnown(*shapes)
    q, k, v = (row * (number_for(f"packed {n}") if packed else 1) for n, row in enumerate(rows))
    if r.number("do_rotary", 0):
        at = r.at(9).numbers if r.has(9) else None
        positions = np.broadcast_to(at if at is not None else start + np.arange(new), (batch, new))
        positions = positions.astype(np.float64)[:, None, :, None]
        q, k = _rotate(q, positions), _rotate(k, positions)
    caches = []
    for value, added in ((past, k), (r.at(4), v)):
        before = _rows(value, buffer, *shapes)
        caches.append(np.concatenate([before[:, :, :start], added, before[:, :, total:]], axis=2))
    seen = [cache[:, :, :total] for cache in caches]
    bias = r.at(10) if r.has(10) else None
    out = attend(Heads(q, *seen), bias, _hide(new, total, start, r.number("local_window_size", -1)))
    return [_joined(shapes[0], out), *(Abstract(present, cache) for cache in caches)]


def _multi_head(r: Reading) -> list[Abstract]:
    query, key, value = r.at(0), r.at(1), r.at(2)
    if query.shape is None or len(query.shape) != 3:
        return []
    shape = query.shape
    if r.has(4) or not r.has(1) or key.shape is None or value.shape is None:
        raise NotKnown(shape)
    tokens = key.shape[2] if len(key.shape) == 4 else key.shape[1]
    q, k, v = _rows(query, shape[1], shape), _rows(key, tokens, shape), _rows(value, tokens, shape)
    if r.has(3):
        offset = number_for(r.at(3).key or "bias")
        q, k, v = q + offset, k + offset * 0.5, v + offset * 0.25
    start, k, v = _with_past(r, 6, (k, v), shape)
    hidden = _hide(shape[1], k.shape[2], start) if r.number("unidirectional", 0) else None
    out = attend(Heads(q, k, v), r.at(5) if r.has(5) else None, hidden)
    heads = r.number("num_heads", 1)
    present = (shape[0], heads, k.shape[2], shape[2] // max(heads, 1))
    if out is not None:
        shape = (*shape[:2], value.shape[-1] if len(value.shape) == 3 else shape[2])
    return [_joined(shape, out), Abstract(present, k), Abstract(present, v)]


def _contrib_attention(r: Reading) -> list[Abstract]:
    value, past = r.at(0), r.at(4)
    if value.shape is None or len(value.shape) != 3:
        return []
    weights = as_weight(r.at(1))
    width = (weights.shape or (0, 3 * value.shape[2]))[-1] // 3
    batch, new = value.shape[:2]
    shape, made = (batch, new, width), multiply(value, weights)
    rows = _rows(combine([made, r.at(2)], np.add) if r.has(2) else made, new, shape)
    mask = r.at(3).numbers if r.has(3) else None
    if r.has(3) and (mask is None or mask.ndim != 2 or not mask.all()):
        raise NotKnown(shape)
    q, k, v = (rows * number_for(f"packed {n}") for n in range(3))
    start = 0
    if r.has(4):
        if past.shape is None or past.data is None or len(past.shape) != 5 or past.data.shape[0] != 2:
            raise NotKnown(shape)
        start = past.shape[3]
        halves = [_rows(Abstract(past.shape[1:], past.data[at]), start, shape) for at in range(2)]
        k, v = (np.concatenate([one, two], axis=2) for one, two in zip(halves, (k, v), strict=True))
    hidden = _hide(new, k.shape[2], start) if r.number("unidirectional", 0) else None
    out = attend(Heads(q, k, v), r.at(5) if r.has(5) else None, hidden)
    heads = r.number("num_heads", 1)
    present = (2, batch, heads, k.shape[2], width // max(heads, 1))
    return [_joined(shape, out), Abstract(present, np.stack([k, v]))]


def _standard_attention(r: Reading) -> list[Abstract]:
    query, key, value = r.at(0), r.at(1), r.at(2)
    if query.shape is None or key.shape is None or value.shape is None or len(query.shape) not in (3, 4) or r.has(6):
        return []
    four = len(query.shape) == 4
    axis = 2 if four else 1
    new = query.shape[axis]
    shape = (*query.shape[:-1], value.shape[-1]) if four else query.shape
    q, k, v = (_rows(one, known(one.shape)[axis], shape) for one in (query, key, value))
    start, k, v = _with_past(r, 4, (k, v))
    presents, past = [key, value] if four else [UNKNOWN, UNKNOWN], r.at(4).shape
    if past is not None and four:
        presents = [join([r.at(4), key], 2), join([r.at(5), value], 2)]
    elif past is not None:
        presents = [Abstract((*past[:2], row.shape[2], past[3]), row) for row in (k, v)]
    hidden = _hide(new, k.shape[2], start) if r.number("is_causal", 0) else None
    out = attend(Heads(q, k, v), r.at(3) if r.has(3) else None, hidden)
    return [Abstract(shape, out) if four else _joined(shape, out), *presents]


def _rotary(r: Reading) -> Abstract:
    """RotaryEmbedding of both domains: the numbers rotated by the exact positions."""
    shape = known(r.at(0).shape)
    data, positions = known(r.at(0).data, shape), known(r.at(1 if r.node.domain == CONTRIB else 3).numbers, shape)
    if len(shape) not in (3, 4):
        return Abstract(shape)
    four = len(shape) == 4
    new = shape[2 if four else 1]
    at = positions if positions.ndim == 2 and positions.size > 1 else positions.ravel()[:1, None] + np.arange(new)
    transposed = at[:, None, :, None] if four else at[:, :, None]
    if at.shape[-1] != new or size_of(np.broadcast_shapes(data.shape, transposed.shape)) > MOST_ELEMENTS:
        return Abstract(shape)
    return Abstract(shape, _rotate(data, transposed))


ATTENTIONS: dict[str, Rule] = {
    "GroupQueryAttention": _group_query,
    "MultiHeadAttention": _multi_head,
    "Attention": lambda r: _contrib_attention(r) if r.node.domain == CONTRIB else _standard_attention(r),
    "RotaryEmbedding": _rotary,
}
