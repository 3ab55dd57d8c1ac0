"""Makes the decoders of many nodes of the benchmarks: small weights, every layer written out as torch.onnx does.

`python benchmarks/graphs.py KIND LAYERS FOLDER` writes one: `plain`; `merged`, an If with a branch for each of the two
uses, as Optimum merges them; `functions`, each layer a call of a local function, which calls another; or `numbered`, a
pair of graphs in which no name tells a thing. A layer has 497 nodes: attention taken apart, rotary positions, heads
that share keys, a mask of its own, four experts, and for each Reshape and Expand the sizes gathered one by one; each
constant is a node.
"""

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

OPSET, IR_VERSION = 17, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN, INNER, EXPERTS, VOCABULARY, POSITIONS = HEADS * HEAD_DIM, 16, 4, 64, 256
LOCAL = "local"
FAR = 2**62
WINDOW, SCORES = 128, 50.0
MATRICES: dict[str, tuple[int, ...]] = {
    "norm_in": (HIDDEN,),
    "q": (HIDDEN, HIDDEN),
    "k": (HIDDEN, KV_HEADS * HEAD_DIM),
    "v": (HIDDEN, KV_HEADS * HEAD_DIM),
    "norm_q": (HEAD_DIM,),
    "norm_k": (HEAD_DIM,),
    "o": (HIDDEN, HIDDEN),
    "norm_mixed": (HIDDEN,),
    "norm_mlp": (HIDDEN,),
    "router": (HIDDEN, EXPERTS),
    **{f"gate_{number}": (HIDDEN, INNER) for number in range(EXPERTS)},
    **{f"up_{number}": (HIDDEN, INNER) for number in range(EXPERTS)},
    **{f"down_{number}": (INNER, HIDDEN) for number in range(EXPERTS)},
    "norm_out": (HIDDEN,),
}
"""The weights of a layer, with their shapes."""


@dataclass
class Nodes:
    """Collects nodes. Values are called by the prefix and their number; `calls` leaves each norm to a function."""

    prefix: str
    nodes: list[NodeProto] = field(default_factory=list)
    calls: bool = False

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"{self.prefix}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"/{name}", **attributes))
        return name

    def ints(self, *values: int) -> str:
        return self.op("Constant", value=helper.make_tensor("", TensorProto.INT64, [len(values)], values))

    def scalar(self, value: float) -> str:
        kind = TensorProto.INT64 if isinstance(value, int) else TensorProto.FLOAT
        return self.op("Constant", value=helper.make_tensor("", kind, [], [value]))

    def size(self, x: str, axis: int) -> str:
        """One size of a tensor, as torch asks for it."""
        return self.op("Gather", self.op("Shape", x), self.scalar(axis), axis=0)

    def sizes(self, *parts: str | int) -> str:
        """A shape out of numbers and sizes."""
        rows = [self.ints(p) if isinstance(p, int) else self.op("Unsqueeze", p, self.ints(0)) for p in parts]
        return self.op("Concat", *rows, axis=0)

    def slice(self, x: str, begin: str, end: str, axis: int) -> str:
        return self.op("Slice", x, begin, end, self.ints(axis), self.ints(1))

    def expand(self, x: str, *parts: str | int) -> str:
        """torch's `expand`: a size of -1 keeps what is there, which is found out when the graph runs."""
        wanted = self.sizes(*parts)
        one = numpy_helper.from_array(np.array([1], np.int64))
        ones = self.op("ConstantOfShape", self.op("Shape", wanted), value=one)
        kept = self.op("Equal", wanted, self.op("Mul", ones, self.scalar(-1)))
        return self.op("Expand", x, self.op("Where", kept, ones, wanted))


@dataclass(frozen=True)
class Layer:
    """What a layer takes: its weights, what all layers share, and its past, which the first step has not."""

    weights: dict[str, str]
    cos: str
    sin: str
    position_ids: str
    causal: str
    mask: str
    past: tuple[str, ...] | None
    present: tuple[str, ...]


def norm(b: Nodes, x: str, weight: str) -> str:
    """RMS normalization, in float whatever the element type is."""
    if b.calls:
        return b.op("Norm", x, weight, domain=LOCAL)
    wide = b.op("Cast", x, to=TensorProto.FLOAT)
    squares = b.op("ReduceMean", b.op("Pow", wide, b.scalar(2.0)), axes=[-1])
    width = b.op("Sqrt", b.op("Add", squares, b.scalar(1e-6)))
    return b.op("Mul", weight, b.op("Cast", b.op("Mul", wide, b.op("Div", b.scalar(1.0), width)), to=TensorProto.FLOAT))


def heads(b: Nodes, x: str, weight: str, count: int) -> str:
    """float[batch, count, new, head_dim]."""
    batch, new = b.size(x, 0), b.size(x, 1)
    apart = b.op("Reshape", b.op("MatMul", x, weight), b.sizes(batch, new, count, HEAD_DIM))
    return b.op("Transpose", apart, perm=[0, 2, 1, 3])


def rotated(b: Nodes, x: str, cos: str, sin: str) -> str:
    """Rotary positions by halves; the width is read off the tensor twice, as torch traces it."""
    halves = []
    for from_start in (True, False):
        half = b.op("Div", b.size(x, 3), b.scalar(2))
        half = b.op("Cast", b.op("Cast", half, to=TensorProto.INT64), to=TensorProto.INT64)
        place = b.op("Unsqueeze", half, b.ints(0))
        halves.append(b.slice(x, *((b.ints(0), place) if from_start else (place, b.ints(FAR))), axis=3))
    turned = b.op("Concat", b.op("Neg", halves[1]), halves[0], axis=-1)
    return b.op("Add", b.op("Mul", x, cos), b.op("Mul", turned, sin))


def angles(b: Nodes, table: str, position_ids: str, total: str) -> str:
    """float[batch, 1, new, head_dim]: the rows of a table, cut to the length first."""
    rows = b.slice(table, b.ints(0), b.op("Unsqueeze", total, b.ints(0)), axis=0)
    rows = b.op("Gather", b.op("Cast", rows, to=TensorProto.FLOAT), position_ids)
    sizes = [b.size(position_ids, axis) for axis in range(2)]
    return b.expand(b.op("Unsqueeze", rows, b.ints(1)), sizes[0], 1, sizes[1], HEAD_DIM)


def repeated(b: Nodes, x: str) -> str:
    """Keys or values for every head, out of those that several share."""
    sizes = [b.size(x, axis) for axis in range(4)]
    groups = HEADS // KV_HEADS
    wide = b.expand(b.op("Unsqueeze", x, b.ints(2)), sizes[0], sizes[1], groups, sizes[2], sizes[3])
    count = b.op("Mul", sizes[1], b.scalar(groups))
    return b.op("Reshape", wide, b.sizes(sizes[0], count, sizes[2], sizes[3]))


def bias(b: Nodes, like: str, new: str, total: str, given: Layer) -> str:
    """What is added to the scores, float[batch, 1, new, total]: causal, within the window, and nothing masked."""
    batch = b.size(like, 0)
    begin, end = (b.op("Unsqueeze", size, b.ints(0)) for size in (b.op("Sub", total, new), total))
    rows = b.slice(b.slice(given.causal, begin, end, axis=2), b.ints(0), end, axis=3)
    seen = b.op("Cast", b.expand(rows, batch, 1, new, total), to=TensorProto.BOOL)
    real = b.op("Unsqueeze", b.op("Unsqueeze", given.mask, b.ints(1)), b.ints(2))
    real = b.op("Cast", b.expand(real, batch, 1, new, total), to=TensorProto.BOOL)
    places = [b.op("Range", begin, total, b.scalar(1)) for begin in (b.op("Sub", total, new), b.scalar(0))]
    distance = b.op("Sub", b.op("Unsqueeze", places[0], b.ints(1)), b.op("Unsqueeze", places[1], b.ints(0)))
    near = b.op("Less", distance, b.scalar(WINDOW))
    near = b.op("Unsqueeze", b.op("Unsqueeze", near, b.ints(0)), b.ints(1))
    return b.op("Where", b.op("And", b.op("And", seen, real), near), b.scalar(0.0), b.scalar(-1e9))


def attended(b: Nodes, query: str, keys: str, values: str, added: str) -> str:
    """float[batch, new, heads, head_dim], with scores held below a limit."""
    scores = b.op("MatMul", query, b.op("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = b.op("Div", scores, b.scalar(math.sqrt(HEAD_DIM)))
    scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, b.scalar(SCORES))), b.scalar(SCORES))
    wide = b.op("Cast", b.op("Add", scores, added), to=TensorProto.FLOAT)
    shares = b.op("Cast", b.op("Softmax", wide, axis=-1), to=TensorProto.FLOAT)
    return b.op("Transpose", b.op("MatMul", shares, values), perm=[0, 2, 1, 3])


def layer(b: Nodes, x: str, given: Layer) -> str:
    """One layer. Its past is joined where the branch has one."""
    w = given.weights
    inner = norm(b, x, w["norm_in"])
    query = norm(b, heads(b, inner, w["q"], HEADS), w["norm_q"])
    key, value = norm(b, heads(b, inner, w["k"], KV_HEADS), w["norm_k"]), heads(b, inner, w["v"], KV_HEADS)
    new = b.size(query, 2)
    total = b.op("Add", new, b.size(given.past[0], 2)) if given.past else new
    cos, sin = (angles(b, table, given.position_ids, total) for table in (given.cos, given.sin))
    query, key = rotated(b, query, cos, sin), rotated(b, key, cos, sin)
    if given.past:
        key = b.op("Concat", given.past[0], key, out=given.present[0], axis=2)
        value = b.op("Concat", given.past[1], value, out=given.present[1], axis=2)
    else:
        key, value = (b.op("Identity", part, out=out) for part, out in zip((key, value), given.present, strict=True))
    added = bias(b, query, new, b.size(key, 2), given)
    mixed = attended(b, query, repeated(b, key), repeated(b, value), added)
    flat = b.op("Reshape", mixed, b.sizes(b.size(inner, 0), b.size(inner, 1), HIDDEN))
    x = b.op("Add", x, norm(b, b.op("MatMul", flat, w["o"]), w["norm_mixed"]))
    mixed = experts(b, norm(b, x, w["norm_mlp"]), w)
    return b.op("Add", x, norm(b, mixed, w["norm_out"]))


def experts(b: Nodes, x: str, w: dict[str, str]) -> str:
    """Several perceptrons, each weighed by the share that a router gives it."""
    shares = b.op("Softmax", b.op("MatMul", x, w["router"]), axis=-1)
    total = ""
    for number in range(EXPERTS):
        gate = b.op("MatMul", x, w[f"gate_{number}"])
        opened = b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), b.op("MatMul", x, w[f"up_{number}"]))
        share = b.slice(shares, b.ints(number), b.ints(number + 1), axis=2)
        part = b.op("Mul", b.op("MatMul", opened, w[f"down_{number}"]), share)
        total = b.op("Add", total, part) if total else part
    return total


# --- whole graphs ---

Files = dict[str, ModelProto]
SHARED = ("cos", "sin", "position_ids", "causal", "attention_mask")
PARTS = ("key", "value")


def decoder(b: Nodes, layers: int, with_past: bool, names: str = "") -> None:
    """Token ids to logits, written into `b`; `names` goes before the names of what it gives."""
    x = b.op("Gather", "embedding", "input_ids")
    for number in range(layers):
        past = tuple(f"past_key_values.{number}.{part}" for part in PARTS) if with_past else None
        present = tuple(f"{names}present.{number}.{part}" for part in PARTS)
        b.prefix = f"{names}layers.{number}"
        x = layer(b, x, Layer({name: f"layers.{number}.{name}" for name in MATRICES}, *SHARED, past, present))
    b.prefix = f"{names}model"
    b.op("MatMul", norm(b, x, "norm"), "head", out=f"{names}logits")


def plain(layers: int) -> Files:
    """One graph for the first step and all others."""
    b = Nodes("model")
    decoder(b, layers, True)
    return {"model.onnx": _model(b.nodes, layers)}


def merged(layers: int) -> Files:
    """An If on `use_cache_branch`; half of the nodes are in each branch."""
    branches = {}
    for branch, with_past, names in (("then_branch", True, "cached."), ("else_branch", False, "first.")):
        b = Nodes(names)
        decoder(b, layers, with_past, names)
        outputs = [helper.make_empty_tensor_value_info(names + port.name) for port in _outputs(layers)]
        branches[branch] = helper.make_graph(b.nodes, branch, [], outputs)
    given = [port.name for port in _outputs(layers)]
    model = _model([helper.make_node("If", ["use_cache_branch"], given, name="optimum::if", **branches)], layers)
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    return {"decoder_model_merged.onnx": model}


def functions(layers: int) -> Files:
    """Each layer is a call of one local function, in which each norm is a call of another."""
    b, body, inner = Nodes("model"), Nodes("layer", calls=True), Nodes("norm")
    result = layer(body, "x", Layer({name: name for name in MATRICES}, *SHARED, ("past_key", "past_value"), PARTS))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(LOCAL, 1)]
    inputs = ["x", *SHARED, "past_key", "past_value", *MATRICES]
    bodies = [helper.make_function(LOCAL, "Layer", inputs, [result, *PARTS], body.nodes, opsets)]
    result = norm(inner, "x", "weight")
    bodies.append(helper.make_function(LOCAL, "Norm", ["x", "weight"], [result], inner.nodes, opsets))
    x = b.op("Gather", "embedding", "input_ids")
    for number in range(layers):
        past = [f"past_key_values.{number}.{part}" for part in PARTS]
        weights = [f"layers.{number}.{name}" for name in MATRICES]
        outputs = [f"x_{number}", *(f"present.{number}.{part}" for part in PARTS)]
        b.nodes.append(helper.make_node("Layer", [x, *SHARED, *past, *weights], outputs, domain=LOCAL))
        x = outputs[0]
    b.op("MatMul", norm(b, x, "norm"), "head", out="logits")
    model = _model(b.nodes, layers)
    model.functions.extend(bodies)
    model.opset_import.append(helper.make_opsetid(LOCAL, 1))
    return {"model.onnx": model}


def numbered(layers: int) -> Files:
    """A graph that makes the cache and one that takes it, their tensors called t0, t1, ...: no name tells a thing."""
    b = Nodes("first")
    decoder(b, layers, False)
    first = _model(b.nodes, layers)
    inputs = [port for port in first.graph.input if not port.name.startswith("past_key_values")]
    del first.graph.input[:]
    first.graph.input.extend(inputs)
    return {
        "decoder_model.onnx": _renamed(first),
        "decoder_with_past_model.onnx": _renamed(plain(layers)["model.onnx"]),
    }


def _renamed(model: ModelProto) -> ModelProto:
    names: dict[str, str] = {}
    for thing in (*model.graph.input, *model.graph.initializer, *model.graph.output):
        thing.name = names.setdefault(thing.name, f"t{len(names)}")
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [names.setdefault(name, f"t{len(names)}") for name in side]
    return model


def _outputs(layers: int) -> list[ValueInfoProto]:
    total = "past_sequence_length + sequence_length"
    ports = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", VOCABULARY])]
    return ports + [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch_size", KV_HEADS, total, HEAD_DIM])
        for name in (f"present.{number}.{part}" for number in range(layers) for part in PARTS)
    ]


def _model(nodes: list[NodeProto], layers: int) -> ModelProto:
    """A model around some nodes, with all inputs, outputs and weights."""
    tokens, total = ["batch_size", "sequence_length"], "past_sequence_length + sequence_length"
    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, tokens),
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", total]),
        helper.make_tensor_value_info("position_ids", TensorProto.INT64, tokens),
    ]
    for name in (f"past_key_values.{number}.{part}" for number in range(layers) for part in PARTS):
        shape: list[str | int | None] = ["batch_size", KV_HEADS, "past_sequence_length", HEAD_DIM]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    tensors = [numpy_helper.from_array(array, name) for name, array in _weights(layers).items()]
    graph = helper.make_graph(nodes, "decoder", inputs, _outputs(layers), tensors)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="kvdoctor-benchmarks")


def _weights(layers: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, HIDDEN), "head": (HIDDEN, VOCABULARY)}
    shapes |= {f"layers.{number}.{name}": shape for number in range(layers) for name, shape in MATRICES.items()}
    shapes["norm"] = (HIDDEN,)
    weights = {name: rng.standard_normal(shape, np.float32) * np.float32(0.3) for name, shape in shapes.items()}
    turns = 10_000.0 ** (-np.arange(HEAD_DIM) % (HEAD_DIM // 2) * 2 / HEAD_DIM)
    angle = np.arange(POSITIONS)[:, None] * turns
    weights |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    weights["causal"] = np.tril(np.ones((1, 1, POSITIONS, POSITIONS), np.uint8))
    return weights


KINDS = {"plain": plain, "merged": merged, "functions": functions, "numbered": numbered}


if __name__ == "__main__":
    kind, count, folder = sys.argv[1:]
    for name, model in KINDS[kind](int(count)).items():
        Path(folder, name).write_bytes(model.SerializeToString())
