"""Makes the large decoders of the benchmarks: GPT-2-like, named as Optimum names them, random weights.

`python benchmarks/models.py NAME FOLDER` writes one of `MODELS`. Weights are made tensor by tensor and streamed to the
disk, so that a file of 1.8 GB takes the memory of its largest tensor.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from onnx import GraphProto, ModelProto, StringStringEntryProto, TensorProto, ValueInfoProto, helper

OPSET, IR_VERSION = 18, 8
HEAD_DIM = 64
POSITIONS = 1024
GRAPH_FIELD, INITIALIZER_FIELD, RAW_DATA_FIELD = 7, 5, 9  # of ModelProto, GraphProto and TensorProto in onnx.proto
LEN = 2  # the wire type of a message or of bytes
DATA_FILE = "model.onnx_data"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder, whether its weights are in the `.onnx` file or beside it, and its fault.

    fault: `fails`, the past of a layer in the middle has a constant length of 3; `differs`, the new tokens attend only
    to as many of the first entries of that layer's cache as there are new tokens; `crossed`, the key and the value of
    that layer are returned under each other's names.

    embedded: the decoder takes embeddings, and no file makes them of token ids.
    """

    layers: int
    heads: int
    vocabulary: int
    inside: bool
    fault: str = ""
    positions: int = POSITIONS
    embedded: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def fed(self) -> str:
        """The input that has the tokens."""
        return "inputs_embeds" if self.embedded else "input_ids"


MODELS = {
    # 100 million parameters are 400 MB.
    "100m-beside": Sizes(layers=12, heads=11, vocabulary=20_000, inside=False),
    "100m-inside": Sizes(layers=12, heads=11, vocabulary=20_000, inside=True),
    "100m-fails": Sizes(layers=12, heads=11, vocabulary=20_000, inside=True, fault="fails"),
    "100m-differs": Sizes(layers=12, heads=11, vocabulary=20_000, inside=True, fault="differs"),
    # For loops of more than 2,000 tokens.
    "100m-long": Sizes(layers=12, heads=11, vocabulary=20_000, inside=True, positions=4096),
    # As many layers and next to no weights: for the memory of many steps.
    "thin-long": Sizes(layers=12, heads=2, vocabulary=1_000, inside=True, positions=4096),
    # 1.8 GB in one file: just under the 2 GiB that protobuf can hold.
    "1.8gb-inside": Sizes(layers=14, heads=24, vocabulary=20_000, inside=True),
    "1.8gb-beside": Sizes(layers=14, heads=24, vocabulary=20_000, inside=False),
    # The same graph, as deep, and next to no weights.
    "1.8gb-narrow": Sizes(layers=14, heads=2, vocabulary=1_000, inside=True),
    "1.8gb-crossed": Sizes(layers=14, heads=24, vocabulary=20_000, inside=True, fault="crossed"),
    # Large in one way: in words, and fed by embeddings; in words; in slots; in parameters.
    "embeds-262k": Sizes(layers=1, heads=40, vocabulary=262_144, inside=False, embedded=True),
    "words-262k": Sizes(layers=1, heads=8, vocabulary=262_144, inside=False),
    "slots-400": Sizes(layers=200, heads=4, vocabulary=20_000, inside=False),
    "1.2b-beside": Sizes(layers=22, heads=32, vocabulary=20_000, inside=False),
    # Twice and four times as large in one way.
    **{f"layers-{n}": Sizes(layers=25 * n, heads=2, vocabulary=1_000, inside=True) for n in (1, 2, 4, 8, 16)},
    **{f"words-{n}": Sizes(layers=2, heads=2, vocabulary=65_536 * n, inside=True) for n in (1, 2, 4)},
    **{f"steps-{n}": Sizes(layers=2, heads=2, vocabulary=1_000, inside=True, positions=256 * n) for n in (1, 2, 4)},
    # For the test of the benchmarks: 2 layers of 128, in files of 2 MB.
    "tiny-beside": Sizes(layers=2, heads=2, vocabulary=100, inside=False),
    "tiny-inside": Sizes(layers=2, heads=2, vocabulary=100, inside=True),
    "tiny-fails": Sizes(layers=2, heads=2, vocabulary=100, inside=True, fault="fails"),
    "tiny-differs": Sizes(layers=2, heads=2, vocabulary=100, inside=True, fault="differs"),
    "tiny-narrow": Sizes(layers=2, heads=2, vocabulary=50, inside=True),
    "tiny-crossed": Sizes(layers=2, heads=2, vocabulary=100, inside=True, fault="crossed"),
    "tiny-embeds": Sizes(layers=2, heads=2, vocabulary=100, inside=True, positions=64, embedded=True),
    "tiny-long": Sizes(layers=2, heads=2, vocabulary=100, inside=True, positions=4096),
}


@dataclass
class _Builder:
    """Collects nodes, and the names and shapes of the weights, which are written later."""

    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        name = to or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"/{name}", **attributes))
        return name

    def cast_to_bool(self, x: str) -> str:
        name = f"{x}_bool"
        self.nodes.append(helper.make_node("Cast", [x], [name], name=f"/{name}", to=TensorProto.BOOL))
        return name

    def weight(self, name: str, *shape: int) -> str:
        self.weights[name] = shape
        return name

    def ints(self, *values: int) -> str:
        name = "ints_" + "_".join(map(str, values))
        self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def number(self, value: float) -> str:
        name = f"number_{value:g}"
        self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, [], [value])
        return name

    def scalar(self, value: int) -> str:
        name = f"scalar_{value}"
        self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [], [value])
        return name

    def linear(self, x: str, name: str, inner: int, outer: int) -> str:
        product = self.op("MatMul", x, self.weight(f"{name}.weight", inner, outer))
        return self.op("Add", product, self.weight(f"{name}.bias", outer))

    def norm(self, x: str, name: str, hidden: int) -> str:
        scale, bias = self.weight(f"{name}.scale", hidden), self.weight(f"{name}.bias", hidden)
        return self.op("LayerNormalization", x, scale, bias, axis=-1)


def _graph(sizes: Sizes) -> tuple[GraphProto, dict[str, tuple[int, ...]]]:
    """The graph without its weights, and their shapes."""
    b = _Builder()
    x = sizes.fed
    if not sizes.embedded:
        x = b.op("Gather", b.weight("wte.weight", sizes.vocabulary, sizes.hidden), x)
    positions = b.op("Gather", b.weight("wpe.weight", sizes.positions, sizes.hidden), "position_ids")
    x, mask = b.op("Add", x, positions), _mask(b, sizes)
    for layer in range(sizes.layers):
        x = _layer(b, x, mask, layer, sizes)
    x = b.norm(x, "ln_f", sizes.hidden)
    b.op("MatMul", x, b.weight("lm_head.weight", sizes.hidden, sizes.vocabulary), to="logits")
    inputs, outputs = _ports(sizes)
    return helper.make_graph(b.nodes, "decoder", inputs, outputs, list(b.constants.values())), b.weights


def _ports(sizes: Sizes) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
    total = "past_sequence_length + sequence_length"
    tokens = ["batch_size", "sequence_length"]
    ids = helper.make_tensor_value_info(sizes.fed, TensorProto.INT64, tokens)
    embeddings = helper.make_tensor_value_info(sizes.fed, TensorProto.FLOAT, [*tokens, sizes.hidden])
    inputs = [
        embeddings if sizes.embedded else ids,
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", total]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, tokens),
    ]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*tokens, sizes.vocabulary])]
    for name in (f"{layer}.{part}" for layer in range(sizes.layers) for part in ("key", "value")):
        for ports, prefix, length in ((inputs, "past_key_values", "past_sequence_length"), (outputs, "present", total)):
            shape: list[int | str | None] = ["batch_size", sizes.heads, length, HEAD_DIM]
            ports.append(helper.make_tensor_value_info(f"{prefix}.{name}", TensorProto.FLOAT, shape))
    return inputs, outputs


def _mask(b: _Builder, sizes: Sizes) -> str:
    """What is added to the scores, float[batch, 1, new, total]: causal, and nothing that attention_mask hides."""
    new = b.op("Gather", b.op("Shape", sizes.fed), b.scalar(1))
    total = b.op("Gather", b.op("Shape", "attention_mask"), b.scalar(1))
    rows = b.op("Range", b.op("Sub", total, new), total, b.scalar(1))
    columns = b.op("Range", b.scalar(0), total, b.scalar(1))
    causal = b.op("LessOrEqual", columns, b.op("Unsqueeze", rows, b.ints(1)))
    given = b.op("Unsqueeze", b.cast_to_bool("attention_mask"), b.ints(1, 2))
    return b.op("Where", b.op("And", causal, given), b.number(0.0), b.number(-3e38))


def _from_the_start(b: _Builder, sizes: Sizes) -> str:
    """The fault: what hides all but as many of the first entries as there are new tokens, float[total]."""
    new = b.op("Gather", b.op("Shape", sizes.fed), b.scalar(1))
    total = b.op("Gather", b.op("Shape", "attention_mask"), b.scalar(1))
    columns = b.op("Range", b.scalar(0), total, b.scalar(1))
    return b.op("Where", b.op("Less", columns, new), b.number(0.0), b.number(-1e4))


def _layer(b: _Builder, x: str, mask: str, layer: int, sizes: Sizes) -> str:
    name, hidden = f"h.{layer}", sizes.hidden
    mixed = b.linear(b.norm(x, f"{name}.ln_1", hidden), f"{name}.attn.c_attn", hidden, 3 * hidden)
    heads = b.op("Reshape", mixed, b.ints(0, 0, 3 * sizes.heads, HEAD_DIM))
    turned = b.op("Transpose", heads, perm=[0, 2, 1, 3])
    query, key, value = (
        b.op("Slice", turned, b.ints(part * sizes.heads), b.ints((part + 1) * sizes.heads), b.ints(1))
        for part in range(3)
    )
    past, fault = f"past_key_values.{layer}.key", sizes.fault if layer == sizes.layers // 2 else ""
    if fault == "fails":
        past = b.op("Expand", past, b.op("Min", b.op("Shape", past), b.ints(1, sizes.heads, 3, HEAD_DIM)))
    key_name, value_name = f"present.{layer}.key", f"present.{layer}.value"
    if fault == "crossed":
        key_name, value_name = value_name, key_name
    key = b.op("Concat", past, key, to=key_name, axis=2)
    value = b.op("Concat", f"past_key_values.{layer}.value", value, to=value_name, axis=2)
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[0, 1, 3, 2]))
    if fault == "differs":
        mask = b.op("Add", mask, _from_the_start(b, sizes))
    scores = b.op("Add", b.op("Mul", scores, b.number(1 / math.sqrt(HEAD_DIM))), mask)
    context = b.op("Transpose", b.op("MatMul", b.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
    flat = b.op("Reshape", context, b.ints(0, 0, hidden))
    x = b.op("Add", x, b.linear(flat, f"{name}.attn.c_proj", hidden, hidden))
    wide = b.linear(b.norm(x, f"{name}.ln_2", hidden), f"{name}.mlp.c_fc", hidden, 4 * hidden)
    bent = b.op("Add", b.op("Erf", b.op("Div", wide, b.number(math.sqrt(2)))), b.number(1.0))
    gelu = b.op("Mul", b.op("Mul", wide, bent), b.number(0.5))
    return b.op("Add", x, b.linear(gelu, f"{name}.mlp.c_proj", 4 * hidden, hidden))


def _values(weights: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """The weights one at a time: noise, and ones where a LayerNormalization scales."""
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        values = rng.standard_normal(shape, np.float32) * np.float32(0.05)
        if name.endswith(".scale"):
            values += 1
        yield name, shape, values.tobytes()


def write(sizes: Sizes, folder: Path) -> Path:
    """Write `model.onnx` and `config.json` into a folder, which must exist."""
    graph, weights = _graph(sizes)
    model = ModelProto(ir_version=IR_VERSION, producer_name="kvdoctor-benchmarks")
    model.opset_import.append(helper.make_opsetid("", OPSET))
    path = folder / "model.onnx"
    with path.open("wb") as file:
        file.write(model.SerializeToString())
        (_write_inside if sizes.inside else _write_beside)(file, graph, weights)
    config = {"model_type": "gpt2", "n_positions": sizes.positions, "vocab_size": sizes.vocabulary}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def _write_inside(file: BinaryIO, graph: GraphProto, weights: dict[str, tuple[int, ...]]) -> None:
    """Append the graph to a model, its weights as raw_data; the lengths are known before the weights are."""
    body = graph.SerializeToString()
    heads = {}
    for name, shape in weights.items():
        size = 4 * math.prod(shape)
        head = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT).SerializeToString()
        head += _key(RAW_DATA_FIELD, size)
        heads[name] = _key(INITIALIZER_FIELD, len(head) + size) + head
    file.write(_key(GRAPH_FIELD, len(body) + sum(len(heads[n]) + 4 * math.prod(s) for n, s in weights.items())) + body)
    for name, _, content in _values(weights):
        file.write(heads[name])
        file.write(content)


def _write_beside(file: BinaryIO, graph: GraphProto, weights: dict[str, tuple[int, ...]]) -> None:
    """Append the graph to a model, its weights in a file beside it."""
    with Path(file.name).with_name(DATA_FILE).open("wb") as data:
        for name, shape, content in _values(weights):
            data.write(bytes(-data.tell() % 4096))
            facts = {"location": DATA_FILE, "offset": data.tell(), "length": len(content)}
            tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.extend(StringStringEntryProto(key=key, value=str(v)) for key, v in facts.items())
            graph.initializer.append(tensor)
            data.write(content)
    body = graph.SerializeToString()
    file.write(_key(GRAPH_FIELD, len(body)) + body)


def _key(number: int, length: int) -> bytes:
    return _varint(number << 3 | LEN) + _varint(length)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))


if __name__ == "__main__":
    write(MODELS[sys.argv[1]], Path(sys.argv[2]))
