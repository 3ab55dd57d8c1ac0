"""Changes of a healthy decoder after which it is still healthy."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from .designs import Design
from .exports import build
from .loops import Loop, differences, walks_of
from .strikes import Fits

Files = dict[str, onnx.ModelProto]


def _all(_: Design) -> bool:
    return True


def _single(design: Design) -> bool:
    return not design.branched


def _optimized(level: onnxruntime.GraphOptimizationLevel) -> Callable[[Files], Files]:
    """Constants folded, and nodes fused, by the runtime's own optimization."""

    def change(files: Files) -> Files:
        found = {}
        for name, proto in files.items():
            with tempfile.TemporaryDirectory() as folder:
                options = onnxruntime.SessionOptions()
                options.graph_optimization_level = level
                options.optimized_model_filepath = str(Path(folder) / name)
                options.log_severity_level = 4
                onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
                found[name] = onnx.load(Path(folder) / name)
        return found

    return change


def _reordered(files: Files) -> Files:
    """Nodes in another topological order: as late as possible."""
    for proto in files.values():
        nodes = list(proto.graph.node)
        placed: list[onnx.NodeProto] = []
        waiting = {id(node): node for node in reversed(nodes)}
        needed: dict[str, int] = {}
        for node in nodes:
            for name in _reads(node):
                needed[name] = needed.get(name, 0) + 1
        while waiting:
            node = next(n for n in waiting.values() if all(not needed.get(output) for output in n.output))
            del waiting[id(node)]
            placed.append(node)
            for name in _reads(node):
                needed[name] -= 1
        del proto.graph.node[:]
        proto.graph.node.extend(reversed(placed))
    return files


def _reads(node: onnx.NodeProto) -> set[str]:
    inner = [name for a in node.attribute for child in a.g.node for name in _reads(child)]
    return {*node.input, *inner}


def _half_weights(files: Files) -> Files:
    """Weights stored in float16, and cast up."""
    for proto in files.values():
        graph, casts = proto.graph, []
        for tensor in graph.initializer:
            if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2 and "constant" not in tensor.name:
                half = numpy_helper.to_array(tensor).astype(np.float16)
                casts.append(
                    helper.make_node("Cast", [f"{tensor.name}.half"], [tensor.name], f"cast.{tensor.name}", to=1)
                )
                tensor.CopyFrom(numpy_helper.from_array(half, f"{tensor.name}.half"))
        nodes = [*casts, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
    return files


def _renamed_inside(files: Files) -> Files:
    """Other names of nodes and inner values."""
    for proto in files.values():
        kept = {value.name for value in (*proto.graph.input, *proto.graph.output)}
        _rename(proto.graph, kept, {}, count())
    return files


def _rename(graph: onnx.GraphProto, kept: set[str], names: dict[str, str], numbers: Iterator[int]) -> None:
    names = dict(names)
    for tensor in graph.initializer:
        names[tensor.name] = f"weight_{next(numbers)}"
        tensor.name = names[tensor.name]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, kept, names, numbers)
        node.name = f"op{next(numbers)}"
        node.input[:] = [names.get(name, name) for name in node.input]
        for i, name in enumerate(node.output):
            if name not in kept:
                names[name] = f"t{next(numbers)}_{node.op_type.lower()}"
                node.output[i] = names[name]
    for value in graph.output:
        value.name = names.get(value.name, value.name)


def _unused_inputs(files: Files) -> Files:
    """An input that nothing reads."""
    for name, proto in files.items():
        if name != "encoder_model.onnx":
            proto.graph.input.append(
                helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ("batch_size", "sequence_length"))
            )
    return files


def _extra_outputs(files: Files) -> Files:
    """The inner states of each layer handed out as well."""
    for name, proto in files.items():
        if name != "encoder_model.onnx":
            made = [node.output[0] for node in proto.graph.node if node.op_type == "Sigmoid"]
            shape = ("batch_size", "sequence_length", "inner")
            proto.graph.output.extend(helper.make_tensor_value_info(value, TensorProto.FLOAT, shape) for value in made)
    return files


def _functions(files: Files) -> Files:
    """A value times its Sigmoid as a local function."""
    for proto in files.values():
        nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])]
        made = helper.make_function("local", "Swish", ["x"], ["y"], nodes, [helper.make_opsetid("", 17)])
        if _call_swish(proto.graph):
            proto.functions.append(made)
            proto.opset_import.append(helper.make_opsetid("local", 1))
    return files


def _call_swish(graph: onnx.GraphProto) -> int:
    inner = sum(_call_swish(a.g) for node in graph.node for a in node.attribute if a.HasField("g"))
    gates = {node.output[0]: node for node in graph.node if node.op_type == "Sigmoid"}
    products = [node for node in graph.node if node.op_type == "Mul" and node.input[1] in gates]
    for node in products:
        node.CopyFrom(helper.make_node("Swish", [node.input[0]], list(node.output), node.name, domain="local"))
    kept = [node for node in graph.node if node.op_type != "Sigmoid"]
    del graph.node[:]
    graph.node.extend(kept)
    return inner + len(products)


def _same(files: Files) -> Files:
    return files


LEVELS = onnxruntime.GraphOptimizationLevel
EDITS: dict[str, Callable[[Files], Files]] = {
    "as it is": _same,
    "optimized, basic": _optimized(LEVELS.ORT_ENABLE_BASIC),
    "optimized, extended": _optimized(LEVELS.ORT_ENABLE_EXTENDED),
    "other node order": _reordered,
    "float16 weights cast up": _half_weights,
    "other names inside": _renamed_inside,
    "unused input": _unused_inputs,
    "extra outputs": _extra_outputs,
    "local functions": _functions,
    "external data": _same,
}
DESIGNS: dict[str, Callable[[Design], Design]] = {
    "own names": lambda d: replace(d, names="own"),
    "numbered names": lambda d: replace(d, names="numbered"),
    "other weights": lambda d: replace(d, seed=d.seed + 100),
    "8 layers": lambda d: replace(d, layers=8),
    "grouped heads": lambda d: replace(d, heads=4, kv_heads=2, width=64),
    "one key head": lambda d: replace(d, kv_heads=1, seed=d.seed + 200),
    "no positions": lambda d: replace(d, position="none"),
    "alibi": lambda d: replace(d, position="alibi", counted="past"),
    "other norm": lambda d: replace(d, norm={"layer": "rms", "rms": "spelled", "spelled": "layer"}[d.norm]),
}
HARMLESS: dict[str, Fits] = dict.fromkeys((*EDITS, *DESIGNS), _all) | {"extra outputs": _single}


def design_of(kind: str, design: Design) -> Design:
    """The design that a harmless change makes of another."""
    return DESIGNS[kind](design) if kind in DESIGNS else design


def changed(kind: str, design: Design, folder: Path) -> None:
    """Write the files of a design after a harmless change."""
    files = build(design_of(kind, design))
    for name, proto in EDITS.get(kind, _same)(files).items():
        if kind == "external data":
            data = f"{name}.data"
            onnx.save(proto, folder / name, save_as_external_data=True, location=data, size_threshold=256)
        else:
            onnx.save(proto, folder / name)


def off(kind: str, design: Design) -> float:
    """How far a changed decoder's walks lie from its own calls without a cache, in standard deviations."""
    with tempfile.TemporaryDirectory() as folder:
        changed(kind, design, Path(folder))
        files = {path.name: onnx.load(path) for path in Path(folder).glob("*.onnx")}
    loop = Loop(design_of(kind, design), files)
    return max(float(differences(loop, loop, walk).max()) for walk in walks_of(design))
