"""Inputs beside the cache: counters, positions, masks, extras; and the forms of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .cache import Kind
from .design import Design
from .sheet import BOOL, FAR, FLOAT, INT, INT32

if TYPE_CHECKING:
    from .body import Body


GROWING = ("k", "c", "m")
"""Parts whose length is the number of past tokens."""


def ids_kind(design: Design) -> int:
    return int(INT32 if "int32" in design.extras else INT)


def kept(design: Design) -> list[Kind]:
    """Parts of the cache that count or remember tokens."""
    found = []
    if design.counted == "counter":
        found.append(Kind("length", "", {}, order="1", element=INT))
    if "bigram" in design.extras:
        found.append(Kind("last_token", "b", {}, order="b1", element=INT))
    return found


def counted(body: Body) -> tuple[str, str]:
    """int64[r, 1], the tokens of the past, and int64[r, s], the slots of the new tokens; r is 1 or the batch."""
    past, slots = _counted(body)
    body.past = past
    past = body.at("past", past, "b1")
    return past, slots or body.add(past, body.lift(body.count(body.new), 0))


def _counted(body: Body) -> tuple[str, str]:
    design, how = body.design, body.design.counted
    nothing = body.weights.constant([[0]])
    if how == "none" or not body.cached:
        body.length = body.weights.constant(0)
        return nothing, ""
    grows = design.store in ("grow", "delta", "mixed")
    whole = [each for each in body.cache.kinds if grows and each[0] in GROWING and design.store_of(each[1]) != "cut"]
    if how in COUNTS and not (whole and how in ("position_ids", "mask")):
        return COUNTS[how](body)
    if not whole:
        return nothing, ""
    name, layer = whole[0]
    return body.lift(body.size(body.cache.load(name, layer, plain=True), 2 if name == "k" else 1), 0), ""


def _scalar(body: Body) -> tuple[str, str]:
    how, extras = body.design.counted, body.design.extras
    shape = () if "scalars" in extras else (1,)
    given = body.cast(body.input(how, FLOAT if "float_offset" in extras else INT, *shape), INT)
    past = body.reshape(given, 1, 1)
    return past if how == "past_length" else body.sub(past, body.new), ""


def _by_row(body: Body) -> tuple[str, str]:
    how = body.design.counted
    rows = body.lift(body.cast(body.input(how, INT32, "batch"), INT), 1)
    past = rows if how == "past_lengths" else body.sub(rows, body.new)
    return body.add(past, 1) if how == "lasts" else past, ""


def _from_counter(body: Body) -> tuple[str, str]:
    body.length = body.cache.load("length", 0)
    return body.reshape(body.length, -1, 1), ""


def _from_slots(body: Body) -> tuple[str, str]:
    if body.design.counted == "cache_position":
        slots = body.lift(body.input("cache_position", INT, "new"), 0)
    else:
        slots = body.input("position_ids", INT, "batch", "new")
    return body.part(slots, 0, 1, 1), slots


def _from_mask(body: Body) -> tuple[str, str]:
    """In a fixed cache, the last token is the last one that is kept: pads are in front."""
    fixed = body.design.fixed
    keep = body.input("attention_mask", INT, "batch", fixed or "total")
    if body.design.store == "static":
        ends = body.mul(keep, np.arange(1, fixed + 1)[None])
        return body.sub(body.op("ReduceMax", ends, [1], keepdims=1), body.new), ""
    return body.sub(body.sum(keep, 1), body.new), ""


COUNTS: dict[str, Callable[[Body], tuple[str, str]]] = {
    **dict.fromkeys(("past_length", "total_length"), _scalar),
    **dict.fromkeys(("past_lengths", "lengths", "lasts"), _by_row),
    "counter": _from_counter,
    **dict.fromkeys(("cache_position", "position_ids"), _from_slots),
    "mask": _from_mask,
}
"""How the number of past tokens is known: [r, 1], and the slots of the new tokens, where they are given."""


def positions(body: Body) -> str:
    """int64[r, s]: the position of each new token in its row."""
    how = body.design.counted
    if how == "position_ids":
        if "mrope" in body.design.extras:
            return body.op("Gather", body.input("position_ids", INT, 3, "batch", "new"), 0, axis=0)
        return body.input("position_ids", INT, "batch", "new")
    if how == "mask" and body.design.store != "static":
        keep = body.input("attention_mask", INT, "batch", "total")
        counted = body.op("Max", body.sub(body.op("CumSum", keep, 1), 1), 0)
        return body.part(counted, body.sub(0, body.new), FAR, 1)
    return body.query_slots


def mask(body: Body) -> str:
    """bool[b, 1, s or 1, t]: what the mask of the caller lets through; empty without one."""
    design = body.design
    keys: str | int = design.fixed if design.store == "static" else "total"
    if design.mask == "none":
        return ""
    form, _, sense = design.mask.partition("_")
    kind = {"int": INT, "bool": BOOL, "float": FLOAT, "add": FLOAT, "int32": INT32}[form]
    shapes: dict[str, tuple[str | int, ...]] = {
        "": ("batch", keys),
        "hide": ("batch", keys),
        "row": ("batch", "new", keys),
        "4d": ("batch", 1, "new", keys),
    }
    name = "key_padding_mask" if sense == "hide" else ""
    value = body.input("attention_mask", kind, *shapes[sense], name=name)
    read = {"add": lambda: body.op("Greater", value, -1.0), "bool": lambda: value}
    keep = read.get(form, lambda: body.cast(value, BOOL))()
    keep = body.op("Not", keep) if sense == "hide" else keep
    lifts: dict[str, tuple[int, ...]] = {"": (1, 2), "hide": (1, 2), "row": (1,), "4d": ()}
    return body.at("mask", body.lift(keep, *lifts[sense]) if lifts[sense] else keep, "bhst")


def keep(body: Body) -> None:
    """Return counters and remembered tokens."""
    if body.design.counted == "counter":
        new = body.drop(body.new, 0)
        if body.slip("counter not incremented", "present-does-not-grow"):
            body.cache.keep("length", 0, body.op("Identity", body.length))
        elif body.slip("counter incremented by one", "present-does-not-grow", "chunk-differs", "present-drops-past"):
            body.cache.keep("length", 0, body.add(body.length, 1))
        elif body.slip("counter set to the new tokens", "present-drops-past", "present-does-not-grow"):
            body.cache.keep("length", 0, body.sub(body.add(body.length, new), body.length))
        else:
            body.cache.keep("length", 0, body.add(body.length, new))
    if "bigram" in body.design.extras:
        wrong = body.slip("first token of the chunk remembered", "new-entries-wrong", "chunk-differs", "cached-differs")
        ends = (0, 1) if wrong else (-1, FAR)
        last = body.drop(body.part(body.ids, *ends, 1), 1)
        if body.slip("remembered token not renewed", "present-does-not-grow", "past-ignored"):
            last = body.op("Identity", body.cache.load("last_token", 0))
        body.cache.keep("last_token", 0, last)


# Extras at the embedding


def _bigram(body: Body, hidden: str) -> str:
    """The token before each, hashed with it, has an embedding of its own."""
    before = body.lift(body.cache.load("last_token", 0), 1)
    previous = body.part(body.join(before, body.ids, axis=1), 0, -1, 1)
    code = body.op("Mod", body.add(body.mul(previous, 31), body.ids), 53)
    return body.add(hidden, body.op("Gather", body.weights.weight("bigrams", 53, body.design.width, scale=1.0), code))


def _types(body: Body, hidden: str) -> str:
    types = body.input("token_type_ids", INT, "batch", "new")
    return body.add(hidden, body.op("Gather", body.weights.weight("types", 2, body.design.width, scale=1.0), types))


def _speaker(body: Body, hidden: str) -> str:
    row = body.lift(body.input("speaker_id", INT, "batch"), 1)
    return body.add(hidden, body.op("Gather", body.weights.weight("speakers", 5, body.design.width, scale=1.0), row))


def _style(body: Body, hidden: str) -> str:
    return body.add(hidden, body.lift(body.input("style", FLOAT, "batch", body.design.width), 1))


def _training(body: Body, hidden: str) -> str:
    return body.where(body.input("training", BOOL), body.mul(hidden, 0.9), hidden)


def _drafted(body: Body, hidden: str) -> str:
    """A draft head: the hidden state of the main model joins each token."""
    width = body.design.width
    states = body.at("drafted", body.input("hidden_states", FLOAT, "batch", "new", width), "bsd")
    if body.slip("hidden state of the first token for the whole chunk", "chunk-differs", "cached-differs"):
        states = body.add(body.mul(states, 0.0), body.part(states, 0, 1, 1))
    return body.linear(body.join(hidden, states, axis=2), "draft", 2 * width, width)


EMBEDDED: dict[str, Callable[[Body, str], str]] = {
    "bigram": _bigram,
    "types": _types,
    "speaker": _speaker,
    "style": _style,
    "training": _training,
    "drafted": _drafted,
}

# Extras at the logits


def _temperature(body: Body, logits: str) -> str:
    return body.op("Div", logits, body.input("temperature", FLOAT, *(() if "scalars" in body.design.extras else (1,))))


def _lora(body: Body, logits: str) -> str:
    width, vocab = body.design.width, body.design.vocab
    down, up = body.input("lora_a", FLOAT, width, 4), body.input("lora_b", FLOAT, 4, vocab)
    scale = body.input("lora_scale", FLOAT)
    return body.add(logits, body.mul(body.dot(body.dot(body.hidden, down), up), scale))


def _bias(body: Body, logits: str) -> str:
    return body.add(logits, body.input("logit_bias", FLOAT, body.design.vocab))


def _keep(body: Body, logits: str) -> str:
    """Only so many of the last logits; 0 means all."""
    number = body.reshape(body.input("num_logits_to_keep", INT), 1)
    return body.part(logits, body.sub(0, number), FAR, 1)


SCORED: dict[str, Callable[[Body, str], str]] = {
    "temperature": _temperature,
    "lora": _lora,
    "logit_bias": _bias,
    "keep_logits": _keep,
}

# Forms of the logits


def _last(body: Body, logits: str) -> str:
    return body.part(logits, -1, FAR, 1)


def _heads(body: Body, logits: str) -> tuple[str, str]:
    extra = body.linear(body.hidden, "head_b", body.design.width, body.design.vocab)
    return logits, body.add(logits, extra)


def _books(body: Body, logits: str) -> str:
    scale = np.linspace(0.8, 1.2, 3, dtype=np.float32).reshape(1, 1, 3, 1)
    return body.mul(body.lift(logits, 2), scale)


LOGITS: dict[str, Callable[[Body, str], str | tuple[str, ...]]] = {
    "bsv": lambda _, value: value,
    "bvs": lambda body, value: body.move(value, 0, 2, 1),
    "sbv": lambda body, value: body.move(value, 1, 0, 2),
    "flat": lambda body, value: body.reshape(value, -1, body.design.vocab),
    "last": lambda body, value: body.drop(_last(body, value), 1),
    "last_one": _last,
    "argmax": lambda body, value: body.op("ArgMax", value, axis=2, keepdims=0),
    "argmax_last": lambda body, value: body.op("ArgMax", _last(body, value), axis=2, keepdims=0),
    "log": lambda body, value: body.op("LogSoftmax", value, axis=2),
    "probabilities": lambda body, value: body.op("Softmax", value, axis=2),
    "heads": _heads,
    "books": _books,
    "topk": lambda body, value: tuple(body.ops(2, "TopK", value, [5], axis=2)[:1]),
}
