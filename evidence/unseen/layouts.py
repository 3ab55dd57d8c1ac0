"""Tiny decoders with random weights, laid out as no exporter lays them out.

A `Layout` says how the cache is named, laid out, written and placed, and what is broken; a `Decoder` is its graph, with
the deal that a loop needs beside it, so that it can be proved right or wrong by hand before kvdoctor is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, WIDTH, HIDDEN, VOCABULARY, POSITIONS = 4, 8, 32, 50, 128
CAPACITY, WINDOW, LATENT, TAPS = 24, 5, 12, 3
FLOAT, FLOAT16, INT8, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.INT64

LETTERS: dict[str, tuple[str, int | str]] = (
    {"b": ("batch", "batch"), "n": ("kv_heads", HEADS), "p": ("past", "past"), "h": ("head_dim", WIDTH)}
    | {"L": ("layers", 2), "P": ("parts", 2), "f": ("head_dim", 2 * WIDTH), "q": ("head_dim", 1)}
    | {"c": ("capacity", CAPACITY), "r": ("capacity", WINDOW), "e": ("encoder", "source"), "x": ("past", "prefix")}
    | {"l": ("hidden", LATENT), "m": ("state", HEADS), "s": ("state", WIDTH), "k": ("state", TAPS - 1)}
    | {"t": ("channels", HIDDEN)}
)
"""What an axis of a slot counts, and its declared size."""
FIRST = {"batch": 1, "past": 0, "source": 7, "prefix": 6}
KINDS = {"e": "cross-attention", "l": "hidden-memory", "t": "conv-state", "s": "recurrent-state"}
GROWTHS = {"p": "grow", "c": "static", "r": "ring", "e": "constant", "x": "constant"}
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Layout:
    """How a decoder keeps its cache.

    `past` and `present` are named by layer, part and number of a slot. A layer of `layers` is attention, quantized
    attention (int8 with scales), latent, linear or convolution. `order` are the axes of a cache tensor. `writes` says
    for each layer how rows enter: append, trim (to the window, behind the attention), shift (out of a buffer of the
    window's size, behind the attention), or in a buffer scatter, where, one-hot, ring. `place` tells the position: the
    length of the past, or what the input `position` holds.
    """

    past: str = "past_key_values.{layer}.{part}"
    present: str = "present.{layer}.{part}"
    tokens: str = "input_ids"
    logits: str = "logits"
    layers: tuple[str, str] = ("attention", "attention")
    order: str = "bnph"
    writes: tuple[str, str] = ("append", "append")
    place: str = "length"
    position: str = "position_ids"
    dtype: int = FLOAT
    also: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    fault: str = ""


@dataclass(frozen=True)
class Kept:
    """One slot as the graph keeps it; without a present it is given once."""

    key: tuple[int, str]
    past: str
    present: str | None
    order: str
    dtype: int

    @property
    def shape(self) -> Shape:
        return tuple(LETTERS[letter][1] for letter in self.order)

    @property
    def deal(self) -> tuple[str | None, str, str, str, tuple[str, ...]]:
        """What the contract must say: present, kind, growth, carry and axes."""
        kind = next((KINDS[letter] for letter in self.order if letter in KINDS), "self-attention")
        growth = next((GROWTHS[letter] for letter in self.order if letter in GROWTHS), "replace")
        axes = tuple(LETTERS[letter][0] for letter in self.order)
        return self.present, kind, growth, "feed-back" if self.present else "hold", axes

    def first(self) -> np.ndarray:
        """What the first step is fed."""
        shape = [FIRST[size] if isinstance(size, str) else size for size in self.shape]
        made = np.random.default_rng(3).standard_normal(shape) * (self.present is None)
        return made.astype(helper.tensor_dtype_to_np_dtype(self.dtype))


class Sheet:
    """A graph in the making. A value is a name; an operand that is none becomes a constant."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes, self.constants, self.inputs, self.outputs = [], [], [], []

    def op(self, kind: str, *operands: Any, **attributes: Any) -> str:
        names = [value if isinstance(value, str) else self.constant(np.asarray(value)) for value in operands]
        self.nodes.append(helper.make_node(kind, names, [f"v{len(self.nodes)}"], f"n{len(self.nodes)}", **attributes))
        return self.nodes[-1].output[0]

    def constant(self, array: np.ndarray) -> str:
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.constants.append(numpy_helper.from_array(array, f"constant.{len(self.constants)}"))
        return self.constants[-1].name

    def times(self, value: str, *shape: int) -> str:
        return self.op("MatMul", value, self.random.standard_normal(shape) / np.sqrt(shape[0]))

    def rows(self, index: str, count: int) -> str:
        return self.op("Gather", self.random.standard_normal((count, HIDDEN)), index)

    def normed(self, value: str) -> str:
        return self.op("LayerNormalization", value, np.ones(HIDDEN), np.zeros(HIDDEN))

    def heads(self, value: str, count: int = HEADS, source: int = HIDDEN) -> str:
        """A projection, float[batch, heads, new, head_dim]."""
        split = self.op("Reshape", self.times(value, source, count * WIDTH), [0, 0, count, WIDTH])
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def joined(self, value: str) -> str:
        """A projection of all heads, float[batch, new, hidden]."""
        rows = self.op("Reshape", self.op("Transpose", value, perm=[0, 2, 1, 3]), [0, 0, HEADS * WIDTH])
        return self.times(rows, HEADS * WIDTH, HIDDEN)

    def turned(self, value: str, order: str, to: str) -> str:
        return value if order == to else self.op("Transpose", value, perm=[order.index(axis) for axis in to])

    def size(self, value: str, axis: int) -> str:
        return self.op("Gather", self.op("Shape", value), [axis])

    def count(self, length: str) -> str:
        return self.op("Range", 0, self.op("Squeeze", length, [0]), 1)

    def last(self, value: str, count: int, axis: int) -> str:
        return self.op("Slice", value, [-count], [2**60], [axis])

    def input(self, name: str, dtype: int, shape: Shape) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, value: str, dtype: int, shape: Shape) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], f"out.{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "unseen", self.inputs, self.outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Decoder(Sheet):
    """The graph of one layout, and the slots it keeps."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(seed=1)
        self.layout, self.fault, self.also = layout, layout.fault, layout.also
        self.slots, self.made, self.beside = [], {}, []
        ids = self.input(layout.tokens, INT64, ("batch", 1 if "ring" in layout.writes else "new"))
        self.new = self.size(ids, 1)
        self.position = self._position()
        x = self.op("Add", self.rows(ids, VOCABULARY), self.rows(self.position, POSITIONS))
        for layer, kind in enumerate(layout.layers):
            x = self.op("Add", x, getattr(self, f"_{kind}")(layer, self.normed(x)))
            if "cross" in self.also:
                key, value = (self._slot(layer, f"cross_{part}", "bneh", given=True) for part in ("key", "value"))
                x = self.op("Add", x, self._attend(self.heads(self.normed(x)), key, value, None))
            self.beside.append((x, ("batch", "new", HIDDEN)))
        self._hand_out(self.times(self.normed(x), HIDDEN, VOCABULARY))

    def _position(self) -> str:
        """Where the new tokens stand: int64[new], or int64[batch, new]."""
        layout, held = self.layout, {"arange": ("new",), "rows": ("batch", "new"), "number": (1,), "scalar": ()}
        if layout.place in held:
            begin = self.input(layout.position, INT64, held[layout.place])
        else:
            begin = self.size(layout.past.format(layer=0, part="key", n=0), layout.order.index("p"))
        if layout.place in ("arange", "rows"):
            return begin
        return self.op("Add", self.count(self.new), [0] if self.fault == "positions restarted" else begin)

    def _slot(self, layer: int, part: str, order: str, dtype: int = FLOAT, given: bool = False) -> str:
        """Declare a slot and give its past."""
        said = {"layer": layer, "part": part, "n": len(self.slots)}
        past = f"{part}_{layer}" if given else self.layout.past.format(**said)
        present = None if given else self.layout.present.format(**said)
        self.slots.append(Kept((layer, part), past, present, order, dtype))
        return self.input(past, dtype, self.slots[-1].shape)

    def _attention(self, layer: int, y: str) -> str:
        order = self.layout.order
        query, new = self.heads(y), {part: self.heads(y, 1 if "f" in order else HEADS) for part in ("key", "value")}
        whole = (self._fused if "f" in order else self._stacked if "L" in order else self._apart)(layer, new)
        if "prefix" in self.also:
            given = {part: self._slot(layer, f"prefix_{part}", "bnxh", given=True) for part in whole}
            whole = {part: self.op("Concat", given[part], whole[part], axis=2) for part in whole}
        return self._attend(query, whole["key"], whole["value"], self._seen(layer, whole["key"]))

    def _apart(self, layer: int, new: dict[str, str]) -> dict[str, str]:
        dtype, write, whole = self.layout.dtype, self.layout.writes[layer], {}
        order = self.layout.order.translate(str.maketrans("cr", "pp"))
        for part, value in new.items():
            past = self.turned(self._slot(layer, part, self.layout.order, dtype), order, "bnph")
            rows = value if dtype == FLOAT else self.op("Cast", value, to=dtype)
            whole[part] = kept = self._written(past, rows, write)
            if write == "trim" or self.fault == "truncated":
                kept = self.last(kept, WINDOW - 1, 2)
            elif write == "shift":
                kept = self.last(kept, WINDOW, 2)
            kept = {"new alone": rows, "new lost": past if layer else kept}.get(self.fault, kept)
            self.made[layer, part] = self.turned(kept, "bnph", order)
            whole[part] = whole[part] if dtype == FLOAT else self.op("Cast", whole[part], to=FLOAT)
        return whole

    def _written(self, past: str, rows: str, write: str) -> str:
        """Rows behind those of the past, or in a buffer at their positions: float[batch, heads, total, head_dim]."""
        if write in ("append", "trim", "shift"):
            return self.op("Concat", past, rows, axis=2)
        if write in ("scatter", "ring"):
            at = self.op("Mod", self.position, [WINDOW]) if write == "ring" else self.position
            buffer, rows = (self.op("Transpose", value, perm=[2, 0, 1, 3]) for value in (past, rows))
            done = self.op("ScatterND", buffer, self.op("Unsqueeze", at, [1]), rows)
            return self.op("Transpose", done, perm=[1, 2, 0, 3])
        here = self.op("Equal", self.op("Unsqueeze", self.position, [1]), np.arange(CAPACITY)[None])
        one_hot = self.op("Cast", here, to=FLOAT)
        placed = self.op("MatMul", self.op("Transpose", one_hot, perm=[1, 0]), rows)
        taken = self.op("Unsqueeze", self.op("ReduceMax", one_hot, axes=[0], keepdims=0), [1])
        if write == "where":
            return self.op("Where", self.op("Cast", taken, to=TensorProto.BOOL), placed, past)
        return self.op("Add", self.op("Mul", past, self.op("Sub", 1.0, taken)), placed)

    def _fused(self, layer: int, new: dict[str, str]) -> dict[str, str]:
        rows = self.op("Squeeze", self.op("Concat", *new.values(), axis=3), [1])
        self.made[layer, "key"] = self.op("Concat", self._slot(layer, "key", self.layout.order), rows, axis=1)
        both = self.op("Unsqueeze", self.made[layer, "key"], [1])
        return {part: self.op("Slice", both, [at], [at + WIDTH], [3]) for part, at in (("key", 0), ("value", WIDTH))}

    def _stacked(self, layer: int, new: dict[str, str]) -> dict[str, str]:
        past = self.slots[0].past if layer else self._slot(0, "key", self.layout.order)
        turned = "turned first" in self.also
        order = "LPbnph" if turned else self.layout.order
        inner, within = order.replace("L", ""), order.replace("L", "").replace("P", "")
        mine = self.op("Gather", self.turned(past, self.layout.order, order), layer, axis=order.index("L"))
        whole = {}
        for i, part in enumerate(new):
            pasts = self.op("Gather", mine, i, axis=inner.index("P"))
            rows = self.turned(new[part], "bnph", within)
            whole[part] = self.op("Concat", pasts, rows, axis=within.index("p"))
        parts, layers = inner.index("P"), order.index("L")
        pair = self.op("Concat", *(self.op("Unsqueeze", value, [parts]) for value in whole.values()), axis=parts)
        pair = self.op("Unsqueeze", pair, [layers])
        self.stack = self.op("Concat", self.stack, pair, axis=layers) if layer else pair
        self.made[0, "key"] = self.turned(self.stack, order, self.layout.order) if layer else pair
        return {part: self.turned(value, within, "bnph") for part, value in whole.items()}

    def _quantized(self, layer: int, y: str) -> str:
        query, whole = self.heads(y), []
        for part, scale_part in (("key", "key_scale"), ("value", "value_scale")):
            rows = self.heads(y)
            scale = self.op("Div", self.op("ReduceMax", self.op("Abs", rows), axes=[-1]), 127.0)
            code = self.op("Cast", self.op("Round", self.op("Div", rows, scale)), to=INT8)
            codes = self.op("Concat", self._slot(layer, part, "bnph", INT8), code, axis=2)
            scales = self.op("Concat", self._slot(layer, scale_part, "bnpq"), scale, axis=2)
            self.made |= {(layer, part): codes, (layer, scale_part): scales}
            whole.append(self.op("Mul", self.op("Cast", codes, to=FLOAT), scales))
        return self._attend(query, *whole, self._seen(layer, whole[0]))

    def _latent(self, layer: int, y: str) -> str:
        """Keys and values are made anew of a narrow latent; beside it lies the part of the key that all heads share."""
        for part, order, width in (("latent", "bpl", LATENT), ("shared", "bph", WIDTH)):
            rows = self.times(y, HIDDEN, width)
            self.made[layer, part] = self.op("Concat", self._slot(layer, part, order), rows, axis=1)
        key, value = (self.heads(self.made[layer, "latent"], source=LATENT) for _ in range(2))
        shared = self.op("Expand", self.op("Unsqueeze", self.made[layer, "shared"], [1]), self.op("Shape", key))
        query = self.op("Concat", self.heads(y), self.heads(y), axis=3)
        return self._attend(query, self.op("Concat", key, shared, axis=3), value, self._seen(layer, key))

    def _linear(self, layer: int, y: str) -> str:
        """Attention without a softmax: the state is the sum of the outer products of key and value."""
        past, (query, key, value) = self._slot(layer, "state", "bmss"), (self.heads(y) for _ in range(3))
        turned = self.op("Transpose", key, perm=[0, 1, 3, 2])
        seen = self.op("Cast", self._seen(layer, key), to=FLOAT)
        scores = self.op("Mul", self.op("MatMul", query, turned), seen)
        both = self.op("Add", self.op("MatMul", scores, value), self.op("MatMul", query, past))
        self.made[layer, "state"] = self.op("Add", past, self.op("MatMul", turned, value))
        return self.joined(self.op("Mul", both, 0.1))

    def _convolution(self, layer: int, y: str) -> str:
        row = self.op("Concat", self._slot(layer, "state", "btk"), self.op("Transpose", y, perm=[0, 2, 1]), axis=2)
        self.made[layer, "state"] = self.last(row, TAPS - 1, 2)
        taps = self.random.standard_normal((HIDDEN, 1, TAPS))
        return self.op("Transpose", self.op("Conv", row, taps, group=HIDDEN), perm=[0, 2, 1])

    def _seen(self, layer: int, key: str) -> str:
        """Which keys a new token may look at: bool[new, keys]."""
        write = self.layout.writes[layer]
        if write == "shift":
            begin = self.op("Sub", self.layout.position, [WINDOW])
            column = self.op("Unsqueeze", self.op("Add", self.count(self.size(key, 2)), begin), [0])
            row = self.op("Unsqueeze", self.position, [1])
            first = self.op("Max", 0, self.op("Sub", row, [WINDOW - 1]))
            return self.op("And", self.op("LessOrEqual", column, row), self.op("GreaterOrEqual", column, first))
        if write not in ("append", "trim"):
            slots = np.arange(WINDOW if write == "ring" else CAPACITY)
            return self.op("LessOrEqual", slots, self.op("Unsqueeze", self.position, [1]))
        total = self.size(key, 2)
        before = self.op("Sub", total, self.new)
        row = self.op("Add", self.count(self.new), [0] if self.fault == "mask not offset" else before)
        row, column = self.op("Unsqueeze", row, [1]), self.op("Unsqueeze", self.count(total), [0])
        seen = self.op("LessOrEqual", column, row)
        if self.fault == "past ignored":
            seen = self.op("And", seen, self.op("GreaterOrEqual", column, before))
        if write == "trim":
            seen = self.op("And", seen, self.op("Greater", column, self.op("Sub", row, [WINDOW])))
        return seen

    def _attend(self, query: str, key: str, value: str, seen: str | None) -> str:
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, 1 / np.sqrt(WIDTH))
        scores = scores if seen is None else self.op("Where", seen, scores, -1e9)
        if "softmax spelled out" in self.also:
            powers = self.op("Exp", self.op("Sub", scores, self.op("ReduceMax", scores, axes=[-1])))
            weights = self.op("Div", powers, self.op("ReduceSum", powers, [-1]))
        else:
            weights = self.op("Softmax", scores, axis=-1)
        self.beside.append((weights, ("batch", HEADS, "new", "total")))
        return self.joined(self.op("MatMul", weights, value))

    def _hand_out(self, logits: str) -> None:
        """The logits, and each present under the name of its own slot, or crossed."""
        shape = ("batch", "new", VOCABULARY)
        if "last logits only" in self.also:
            logits, shape = self.op("Squeeze", self.last(logits, 1, 1), [1]), ("batch", VOCABULARY)
        self.output(self.layout.logits, logits, FLOAT, shape)
        if "count returned" in self.also:
            self.output("present_length", self.op("Add", self.layout.position, self.new), INT64, (1,))
        for i, (value, sizes) in enumerate(self.beside if "extra outputs" in self.also else ()):
            self.output(f"beside_{i}", value, FLOAT, sizes)
        for slot in self.slots[:: -1 if "back to front" in self.also else 1]:
            (layer, part), dtype = slot.key, slot.dtype
            total = "kept" if self.layout.writes[layer] == "trim" else "total"
            if slot.present is not None:
                layer = 1 - layer if self.fault == "layers crossed" else layer
                part = {"key": "value", "value": "key"}[part] if self.fault == "parts crossed" else part
                value = self.made[layer, part]
                if self.fault == "wrong dtype" and slot.key == (0, "key"):
                    value, dtype = self.op("Cast", value, to=FLOAT16), FLOAT16
                self.output(slot.present, value, dtype, tuple(total if s == "past" else s for s in slot.shape))


def encoder(decoder: Decoder) -> Sheet:
    """The encoder that makes the keys and values of a decoder's cross-attention, one output each."""
    sheet = Sheet(seed=2)
    states = sheet.rows(sheet.input("source_ids", INT64, ("batch", "source")), VOCABULARY)
    for slot in decoder.slots:
        if "e" in slot.order:
            sheet.output(slot.past, sheet.heads(states), slot.dtype, slot.shape)
    return sheet
