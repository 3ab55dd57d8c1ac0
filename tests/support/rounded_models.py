"""Makes faulty decoders, and decoders that round, of the committed exports: by graph surgery and by common tools."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto, helper

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"


def healthy(model: onnx.ModelProto) -> None:
    """Leaves the graph as it is."""


def positions_restart(model: onnx.ModelProto) -> None:
    """Counts the positions of every call from 0: they are fed right, less the first of them."""
    _replaced(model, "position_ids", "Sub", ["position_ids", "first_position"])
    zero = helper.make_tensor("no_position", TensorProto.INT64, [1], [0])
    model.graph.initializer.append(zero)
    model.graph.node.insert(0, helper.make_node("Gather", ["position_ids", "no_position"], ["first_position"], axis=1))


def past_ignored(model: onnx.ModelProto) -> None:
    """Multiplies every past by zero."""
    kind = next(value for value in model.graph.input if value.name.startswith("past")).type.tensor_type.elem_type
    model.graph.initializer.append(helper.make_tensor("nothing", kind, [1], [0.0]))
    for value in list(model.graph.input):
        if value.name.startswith("past"):
            _replaced(model, value.name, "Mul", [value.name, "nothing"])


def neighbors_mixed(model: onnx.ModelProto) -> None:
    """Adds a twentieth of the highest logits in the batch to those of each row."""
    logits = model.graph.output[0]
    for node in model.graph.node:
        for index, name in enumerate(node.output):
            if name == logits.name:
                node.output[index] = "own_logits"
    model.graph.initializer.append(helper.make_tensor("rows", TensorProto.INT64, [1], [0]))
    model.graph.initializer.append(helper.make_tensor("twentieth", TensorProto.FLOAT, [1], [0.05]))
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["own_logits", "rows"], ["highest"], keepdims=1),
            helper.make_node("Mul", ["highest", "twentieth"], ["share"]),
            helper.make_node("Add", ["own_logits", "share"], [logits.name]),
        ]
    )


def _replaced(model: onnx.ModelProto, name: str, operator: str, inputs: list[str]) -> None:
    """Puts an operator between an input and all that take it."""
    for node in model.graph.node:
        for index, given in enumerate(node.input):
            if given == name:
                node.input[index] = f"{name}_changed"
    model.graph.node.insert(0, helper.make_node(operator, inputs, [f"{name}_changed"]))


def as_float(source: Path, target: Path) -> None:
    """Rounds nothing."""
    target.write_bytes(source.read_bytes())


def as_int8(source: Path, target: Path) -> None:
    """Quantizes dynamically, inside branches as well."""
    from onnxruntime.quantization import quantize_dynamic

    # It writes beside what it reads, where another test may be reading too.
    with tempfile.TemporaryDirectory() as scratch:
        alone = shutil.copy(source, scratch)
        quantize_dynamic(Path(alone), target, extra_options={"EnableSubgraph": True})


def as_fused_int8(source: Path, target: Path) -> None:
    """Quantizes dynamically, and saves what ONNX Runtime makes of it."""
    import onnxruntime

    as_int8(source, target)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(target.with_suffix(".fused"))
    onnxruntime.InferenceSession(target, options, providers=["CPUExecutionProvider"])
    target.with_suffix(".fused").replace(target)


def as_float16(source: Path, target: Path) -> None:
    """Turns every float32 into float16, inputs and outputs included."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(source), keep_io_types=False, disable_shape_infer=True)
    onnx.save(model, target)


def as_static_int8(source: Path, target: Path) -> None:
    """Rounds what every MatMul with weights takes to 8 bits, by a scale that the graph holds."""
    model = onnx.load(source)
    weights = {tensor.name for tensor in model.graph.initializer}
    scale, zero = (
        helper.make_tensor("step", TensorProto.FLOAT, [], [0.05]),
        helper.make_tensor("middle", TensorProto.UINT8, [], [128]),
    )
    model.graph.initializer.extend([scale, zero])
    nodes = []
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights:
            rounded = [f"{node.output[0]}_{word}" for word in ("whole", "back")]
            nodes.append(helper.make_node("QuantizeLinear", [node.input[0], "step", "middle"], rounded[:1]))
            nodes.append(helper.make_node("DequantizeLinear", [rounded[0], "step", "middle"], rounded[1:]))
            node.input[0] = rounded[1]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target)


def as_bfloat16_weights(source: Path, target: Path) -> None:
    """Stores large weights as bfloat16, which a Cast widens: what a graph computes in stays float32."""
    import numpy as np
    from onnx import numpy_helper

    model = onnx.load(source)
    for tensor in [t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2]:
        halves = (numpy_helper.to_array(tensor).view(np.uint32) >> 16).astype(np.uint16)
        name = f"{tensor.name}_stored"
        model.graph.initializer.append(
            TensorProto(name=name, data_type=TensorProto.BFLOAT16, dims=tensor.dims, raw_data=halves.tobytes())
        )
        model.graph.node.insert(0, helper.make_node("Cast", [name], [tensor.name], to=TensorProto.FLOAT))
        model.graph.initializer.remove(tensor)
    onnx.save(model, target)


Surgery = Callable[[onnx.ModelProto], None]
Rounding = Callable[[Path, Path], None]


def made(folder: Path, name: str, surgery: Surgery, rounding: Rounding) -> Path:
    """Writes a changed and rounded copy of a committed export with one file, and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((EXPORTS / name / "config.json").read_bytes())
    model = onnx.load(EXPORTS / name / "model.onnx")
    surgery(model)
    changed = folder / "changed.tmp"
    onnx.save(model, changed)
    rounding(changed, folder / "model.onnx")
    changed.unlink()
    return folder
