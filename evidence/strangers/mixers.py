"""What mixes tokens in a layer: attention in several forms, and the table of its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from .cache import Kind, extend, key_slots
from .design import Design
from .sheet import BOOL, FLOAT, HALF, INT

if TYPE_CHECKING:
    from .body import Body

GROWTH = {"grow": "grow", "cut": "grow", "sinks": "grow", "delta": "delta"}


@dataclass(frozen=True)
class Mixer:
    """What a layer keeps, and float[b, s, width] from float[b, s, width]."""

    kinds: Callable[[Design, int], list[Kind]]
    mix: Callable[[Body, str, int], str]


# Parts of attention


def rotated(body: Body, value: str, positions: str) -> str:
    """Rotary embedding of [b, h, s, d] at positions [r, s]."""
    design = body.design
    dim = design.dim if design.rotary != "partial" else design.dim // 2
    rest = body.part(value, dim, design.dim, 3) if dim < design.dim else ""
    value = body.part(value, 0, dim, 3) if rest else value
    speeds = (100.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)[None, None]
    angles = body.lift(body.mul(body.lift(body.cast(positions, FLOAT), 2), speeds), 1)  # [r, 1, s, d / 2]
    cos, sin = body.op("Cos", angles), body.op("Sin", angles)
    if design.rotary == "interleaved":
        even, odd = (body.op("Slice", value, [start], [dim], [3], [2]) for start in (0, 1))
    else:
        even, odd = body.part(value, 0, dim // 2, 3), body.part(value, dim // 2, dim, 3)
    turned = body.sub(body.mul(even, cos), body.mul(odd, sin)), body.add(body.mul(odd, cos), body.mul(even, sin))
    return body.join(*turned, *([rest] if rest else []), axis=3)


def distance_bias(body: Body, slots: str) -> str:
    """float[1 or r, h, s, t]: ALiBi, or a table by distance as in T5; empty for other positions."""
    design = body.design
    if design.positions not in ("alibi", "t5"):
        return ""
    queries = body.at("bias.query", body.query_slots, "bs")
    distance = body.sub(body.lift(queries, 2), body.lift(slots, 1))
    if design.positions == "alibi":
        slopes = (2.0 ** -np.arange(1, design.heads + 1)).astype(np.float32).reshape(1, -1, 1, 1)
        return body.mul(body.lift(body.cast(distance, FLOAT), 1), -slopes)
    bucket = body.op("Min", body.op("Max", distance, 0), 31)
    table = body.weights.weight("relative", 32, design.heads, scale=1.0)
    return body.move(body.op("Gather", table, bucket), 0, 3, 1, 2)


def projected(body: Body, states: str, weight: str, heads: int, width: int = 0) -> str:
    """float[b, heads, t, d] of states [b, t, width]."""
    dim = body.design.dim
    return body.split(body.linear(states, weight, width or body.design.width, heads * dim), heads, dim)


def spread(body: Body, value: str, layer: int) -> str:
    """Key and value heads, each as often as query heads share it."""
    design, kv = body.design, body.design.kv_of(layer)
    if kv == design.heads:
        return value
    return body.op("Gather", value, np.repeat(np.arange(kv), design.heads // kv), axis=1)


def attended(body: Body, query: str, entries: Sequence[str], *added: str) -> str:
    """float[b, h, s, d] of a query and of keys and values with as many heads; what is `added` to the scores."""
    keys, values = entries
    scores = body.mul(body.dot(query, body.move(keys, 0, 1, 3, 2)), np.float32(body.design.dim**-0.5))
    for each in filter(None, added):
        scores = body.add(scores, each)
    if sink := body.sink:
        column = body.op("Expand", sink, body.op("Shape", body.part(scores, 0, 1, 3)))
        shares = body.part(body.op("Softmax", body.join(scores, column, axis=3), axis=3), 0, -1, 3)
    else:
        shares = body.op("Softmax", scores, axis=-1)
    body.record["shares", -1] = shares
    return body.dot(shares, values)


def grown(body: Body, hidden: str, layer: int) -> tuple[str, str, str]:
    """Keys and values that attention reads, and the slot of each key; the new ones are kept."""
    design = body.design
    key = projected(body, hidden, f"wk{layer}", design.kv_of(layer))
    value = projected(body, hidden, f"wv{layer}", design.kv_of(layer))
    turns = design.positions == "rotary"
    if turns and design.rotary != "read":
        key = rotated(body, key, body.at("positions.key", body.positions, "bs"))
    if "half" in design.extras:  # attention reads what is kept
        key, value = (body.cast(body.cast(each, HALF), FLOAT) for each in (key, value))
    past = body.cache.load("k", layer), body.cache.load("v", layer)
    slots = key_slots(body, past[0], layer)
    if turns and design.rotary != "read" and body.slip("past keys rotated once more by one", "cache-misread"):
        past = rotated(body, past[0], body.weights.constant([[1]])), past[1]
    read = []
    for name, old, new in zip("kv", past, (key, value), strict=True):
        extended = extend(body, name, layer, old, new)
        body.cache.keep(name, layer, extended.kept)
        read.append(body.at(f"read.{name}", extended.read, "bhtd", layer))
    if turns and design.rotary == "read":
        read[0] = rotated(body, read[0], body.op("Max", slots, 0))
    return read[0], read[1], slots


# Mixers


def _attention(body: Body, hidden: str, layer: int, sink: bool = False, shared: bool = False) -> str:
    design = body.design
    query = projected(body, hidden, f"wq{layer}", design.heads)
    if design.positions == "rotary":
        where = body.query_slots if design.rotary == "read" else body.positions
        query = rotated(body, query, body.at("positions.query", where, "bs"))
    if shared:
        keys, values, slots = body.entries
    else:
        keys, values, slots = grown(body, hidden, layer)
        keys, values = spread(body, keys, layer), spread(body, values, layer)
        body.entries = keys, values, slots
    body.sink = body.weights.weight(f"sink{layer}", 1, design.heads, 1, 1, scale=1.0) if sink else ""
    found = attended(body, query, (keys, values), body.bias(body.seen(slots, layer)), distance_bias(body, slots))
    width = design.heads * design.dim
    return body.linear(body.at("attended", body.merged(found, width), "bsd", layer), f"wo{layer}", width, design.width)


def _differential(body: Body, hidden: str, layer: int) -> str:
    """Two attentions, one taken from the other."""
    design = body.design
    keys, values, slots = grown(body, hidden, layer)
    pair = spread(body, keys, layer), spread(body, values, layer)
    found = []
    for half in "ab":
        query = rotated(body, projected(body, hidden, f"wq{half}{layer}", design.heads), body.positions)
        found.append(attended(body, query, pair, body.bias(body.seen(slots, layer))))
    share = body.op("Sigmoid", body.weights.weight(f"lambda{layer}", 1, design.heads, 1, 1))
    if body.slip("another lambda with a past", "cache-misread", "branches-disagree"):
        share = body.where(body.lift(body.flag(), 2, 3), body.mul(share, 0.3), share)
    width = design.heads * design.dim
    merged = body.merged(body.sub(found[0], body.mul(found[1], share)), width)
    return body.linear(merged, f"wo{layer}", width, design.width)


def _latent(body: Body, hidden: str, layer: int) -> str:
    """Latent attention: a narrow latent and one rotated key for all heads are kept."""
    design, dim = body.design, body.design.dim
    latent = body.linear(hidden, f"w_latent{layer}", design.width, 12)
    key = body.lift(body.linear(hidden, f"w_rope{layer}", design.width, dim), 1)
    key = rotated(body, key, body.at("positions.key", body.positions, "bs"))
    grown = []
    for name, new in (("c", latent), ("r", body.drop(key, 1))):
        past = body.cache.load(name, layer)
        stored = body.at(f"stored.{name}", new, "bsd", layer)
        body.cache.keep(name, layer, body.join(past, stored, axis=1))
        grown.append(body.at(f"read.{name}", body.join(past, new, axis=1), "btd", layer))
    total = body.size(grown[0], 1)
    normed = body.norm(grown[0], f"norm_latent{layer}", 12)
    if body.slip("latent normed twice", "cache-misread", "new-entries-wrong"):
        body.cache.keep("c", layer, normed)
    plain, values = (projected(body, normed, f"{n}{layer}", design.heads, 12) for n in ("w_key", "w_value"))
    query = projected(body, hidden, f"wq{layer}", design.heads)
    turned = rotated(
        body, projected(body, hidden, f"wqr{layer}", design.heads), body.at("positions.query", body.positions, "bs")
    )
    scores = body.add(
        body.dot(query, body.move(plain, 0, 1, 3, 2)), body.dot(turned, body.move(body.lift(grown[1], 1), 0, 1, 3, 2))
    )
    mask = body.seen(body.lift(body.count(total), 0))
    shares = body.op("Softmax", body.add(body.mul(scores, np.float32(0.25)), body.bias(mask)), axis=-1)
    merged = body.merged(body.dot(shares, values), design.heads * dim)
    return body.linear(merged, f"wo{layer}", design.heads * dim, design.width)


def _quantized(body: Body, hidden: str, layer: int) -> str:
    """Attention on a cache of int8 with a scale for each entry."""
    design = body.design
    query = rotated(body, projected(body, hidden, f"wq{layer}", design.heads), body.positions)
    fresh = {"k": rotated(body, projected(body, hidden, f"wk{layer}", design.kv), body.positions)}
    fresh["v"] = projected(body, hidden, f"wv{layer}", design.kv)
    read = []
    for name, new in fresh.items():
        most = body.op("ReduceMax", body.op("Abs", new), [3], keepdims=1)
        scale = body.op("Div", body.op("Max", most, np.float32(1e-6)), 127.0)
        codes = body.cast(body.op("Round", body.op("Div", new, scale)), TensorProto.INT8)
        past, old = body.cache.load(name, layer), body.cache.load(f"{name}s", layer)
        codes = body.join(past, codes, axis=2)
        scales = body.join(old, scale, axis=2)
        kept = scales
        if body.slip("stored scale is that of the first entry", "new-entries-wrong", "present-rewrites-past"):
            kept = body.add(body.mul(scales, 0.0), body.part(scales, 0, 1, 2))
        if body.slip("scale stored as its reciprocal", "new-entries-wrong"):
            kept = body.join(old, body.op("Reciprocal", scale), axis=2)
        body.cache.keep(name, layer, codes)
        body.cache.keep(f"{name}s", layer, kept)
        read.append(body.mul(body.cast(codes, FLOAT), scales))
    slots = body.lift(body.count(body.size(read[0], 2)), 0)
    found = attended(body, query, [spread(body, each, layer) for each in read], body.bias(body.seen(slots, layer)))
    width = design.heads * design.dim
    return body.linear(body.merged(found, width), f"wo{layer}", width, design.width)


def _memory(body: Body, hidden: str, layer: int) -> str:
    """Transformer-XL: the hidden states before a layer are kept, and keys are made of them anew."""
    design, dim = body.design, body.design.dim
    past = body.cache.load("m", layer)
    stored = body.at("stored.m", hidden, "bsd", layer)
    body.cache.keep("m", layer, body.join(past, stored, axis=1))
    if body.slip("memory normed once more when read", "cache-misread"):
        past = body.norm(past, f"again{layer}", design.width)
    states = body.at("read.m", body.join(past, hidden, axis=1), "btd", layer)
    keys, values = (projected(body, states, f"{n}{layer}", design.heads) for n in ("wk", "wv"))
    slots = body.lift(body.count(body.size(states, 1)), 0)
    query = projected(body, hidden, f"wq{layer}", design.heads)
    found = attended(body, query, (keys, values), body.bias(body.seen(slots, layer)), distance_bias(body, slots))
    width = design.heads * dim
    return body.linear(body.merged(found, width), f"wo{layer}", width, design.width)


def _cross(body: Body, hidden: str, layer: int) -> str:
    """Attention to the states of an encoder, or to keys and values that were made of them once."""
    design, dim = body.design, body.design.dim
    query = projected(body, hidden, f"xq{layer}", design.heads)
    if design.cross == "cache" and body.cached:
        pair = [body.cache.load(name, layer) for name in ("xk", "xv")]
    else:
        states = body.encoder_states()
        pair = [projected(body, states, f"{n}{layer}", design.heads) for n in ("xk", "xv")]
    if design.cross == "cache" and (design.files == "merged" or not body.cached):
        kept = pair
        if body.slip("cross keys and values returned exchanged", "key-value-swapped", anywhere=True):
            kept = pair[::-1]
        for name, value in zip(("xk", "xv"), kept, strict=True):
            body.cache.keep(name, layer, body.op("Identity", value))
    mask = ""
    if "encoder_mask" in design.extras:
        mask = body.lift(body.cast(body.input("encoder_attention_mask", INT, "batch", "encoder"), BOOL), 1, 2)
        mask = body.bias(mask)
    found = attended(body, query, pair, mask)
    width = design.heads * dim
    return body.linear(body.merged(found, width), f"xo{layer}", width, design.width)


def cross_kinds(design: Design) -> list[Kind]:
    sizes = {"h": design.heads, "d": design.dim}
    return [Kind(name, "bhsd", sizes, "held") for name in ("xk", "xv")] if design.cross == "cache" else []


def _kv_kinds(design: Design, layer: int) -> list[Kind]:
    growth = GROWTH.get(design.store_of(layer), "replace")
    element = HALF if "half" in design.extras else FLOAT
    kind = Kind("k", "bhsd", {"h": design.kv_of(layer), "d": design.dim}, growth, design.order, element)
    return [kind, replace(kind, name="v")]


def _latent_kinds(design: Design, layer: int) -> list[Kind]:
    order = design.order if design.order != "bhsd" else ""
    return [Kind(name, "bsd", {"d": size}, "grow", order) for name, size in (("c", 12), ("r", design.dim))]


def _quantized_kinds(design: Design, layer: int) -> list[Kind]:
    codes = Kind("k", "bhsd", {"h": design.kv, "d": design.dim}, "grow", element=TensorProto.INT8)
    scales = replace(codes, name="ks", sizes={"h": design.kv, "d": 1}, element=FLOAT)
    return [codes, replace(codes, name="v"), scales, replace(scales, name="vs")]


def _memory_kinds(design: Design, layer: int) -> list[Kind]:
    return [Kind("m", "bsd", {"d": design.width}, "grow", design.order if design.order != "bhsd" else "")]


ATTENTION: dict[str, Mixer] = {
    "attention": Mixer(_kv_kinds, _attention),
    "sink": Mixer(_kv_kinds, lambda body, hidden, layer: _attention(body, hidden, layer, sink=True)),
    "shared": Mixer(lambda *_: [], lambda body, hidden, layer: _attention(body, hidden, layer, shared=True)),
    "differential": Mixer(_kv_kinds, _differential),
    "latent": Mixer(_latent_kinds, _latent),
    "quantized": Mixer(_quantized_kinds, _quantized),
    "memory": Mixer(_memory_kinds, _memory),
    "cross": Mixer(lambda design, _: cross_kinds(design), _cross),
}
