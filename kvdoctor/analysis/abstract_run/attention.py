"""Operators that hold a whole attention, in an abstract run: all heads are one, and so is the head width.

Sources: the ONNX operator Attention (23), RotaryEmbedding (23), and ONNX Runtime's ContribOperators.md for
GroupQueryAttention, MultiHeadAttention and Attention.
"""

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import combine
from kvdoctor.analysis.abstract_run.combining import multiply, softmax
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
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
from kvdoctor.model.operators import CONTRIB, CachePorts, ports_of

HIDDEN = -3e38
"""The score of what is not seen: finite, so that a row which sees nothing has the mean of all."""


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


def _with_past(
    r: Reading, ports: CachePorts, new: tuple[Array, Array], *outputs: Shape
) -> tuple[Shape | None, Array, Array]:
    """The shape of the past keys, if there are any, and the keys and values with the new ones.

    Raises:
        NotKnown: they are not known; then `outputs` are the shapes that are known.
    """
    pasts = [r.at(index) for index in ports.pasts if r.has(index)]
    if not pasts:
        return None, *new
    shape, data = known(pasts[0].shape, *outputs), known(pasts[0].data, *outputs)
    if not ports.keys and data.shape[0] == len(new):
        shape = shape[1:]
        pasts = [Abstract(shape, half) for half in data]
    if len(shape) != 4 or len(pasts) != len(new):
        raise NotKnown(*outputs)
    key, value = (
        np.concatenate([_rows(past, shape[2], *outputs), added], axis=2) for past, added in zip(pasts, new, strict=True)
    )
    return shape, key, value


def attend(query: Array, key: Array, value: Array, bias: Abstract | None, hidden: Array | None) -> Array | None:
    """The attention of one head, all float[batch, 1, tokens, 1]; `hidden` says which columns a row does not see."""
    transposed = np.swapaxes(key, 2, 3)
    if size_of(np.broadcast_shapes(query.shape, transposed.shape)) > MOST_ELEMENTS:
        raise ValueError("the scores are too many")
    scores = query * transposed
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
        return np.zeros(query.shape)
    found = softmax(Abstract(scores.shape, scores), -1).data
    return None if found is None else np.matmul(found, value)


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
    seen_keys, seen_values = (cache[:, :, :total] for cache in caches)
    bias = r.at(10) if r.has(10) else None
    out = attend(q, seen_keys, seen_values, bias, _hide(new, total, start, r.number("local_window_size", -1)))
    return [_joined(shapes[0], out), *(Abstract(present, cache) for cache in caches)]


def _attention(r: Reading) -> list[Abstract]:
    """Attention of ONNX; MultiHeadAttention and Attention of ONNX Runtime, the latter with packed weights and past."""
    ports, query = known(ports_of(r.node.domain, r.kind)), known(r.at(0).shape)
    if len(query) not in (3, 4) or any(map(r.has, ports.roles)):
        return []
    new, wide = query[-2], query[-1]
    if ports.keys:
        key, value = known(r.at(1).shape, query), known(r.at(2).shape, query)
        wide = value[-1] if len(query) == 4 or (r.node.domain == CONTRIB and len(value) == 3) else wide
        shape, tokens = (*query[:-1], wide), key[2 if len(key) == 4 else 1]
        q, k, v = (_rows(r.at(at), count, shape) for at, count in enumerate((new, tokens, tokens)))
        if 3 not in ports.mask and r.has(3):
            offset = number_for(r.at(3).key or "bias")
            q, k, v = q + offset, k + offset * 0.5, v + offset * 0.25
    else:
        weights = as_weight(r.at(1))
        shape, made = (*query[:-1], (weights.shape or (3 * wide,))[-1] // 3), multiply(r.at(0), weights)
        rows = _rows(combine([made, r.at(2)], np.add) if r.has(2) else made, new, shape)
        q, k, v = (rows * number_for(f"packed {n}") for n in range(3))
    *paddings, bias = ports.mask
    for mask in (r.at(at).numbers for at in paddings if r.has(at)):
        if mask is None or mask.ndim != 2 or not mask.all():
            raise NotKnown(shape)
    past, k, v = _with_past(r, ports, (k, v), shape)
    causal = r.number("is_causal", r.number("unidirectional", 0))
    hidden = _hide(new, k.shape[2], past[2] if past else 0) if causal else None
    out = attend(q, k, v, r.at(bias) if r.has(bias) else None, hidden)
    heads = r.number("kv_num_heads", r.number("num_heads", 1))
    batch, heads, _, width = past or (query[0], heads, 0, shape[-1] // max(heads, 1))
    if past is None and len(query) == 4:
        heads, width = key[1], key[-1]
    presents = [Abstract((batch, heads, k.shape[2], width), row) for row in (k, v)]
    if not ports.keys:
        presents = [Abstract((2, *(presents[0].shape or ())), np.stack([k, v]))]
    return [Abstract(shape, out) if len(query) == 4 else _joined(shape, out), *presents]


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
    "MultiHeadAttention": _attention,
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
}
