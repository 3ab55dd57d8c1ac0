"""Faults that are notes, or need no fault of the mathematics: done to exports only to see them repaired."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from evidence.faults.base_models import MERGED, SPLIT, Export
from evidence.faults.registry import Fault

LARGE = 1024
"""Elements of a weight that is worth a copy."""
HIDDEN = 8
"""The least of either size of a matrix that is quantized."""


def weights_stored_twice(export: Export) -> None:
    """Every other reader of a large weight gets a copy of its own; in a merged decoder the branches hold the copies."""
    for body in export.bodies:
        graph = body.model.graph
        for tensor in [
            t for t in graph.initializer if np.prod(t.dims) >= LARGE and t.data_type == onnx.TensorProto.FLOAT
        ]:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = f"{tensor.name}.copy"
            readers = body.readers(tensor.name)
            if readers:
                body.graph.initializer.append(copy)
            for node in readers[:1]:
                for index, name in enumerate(node.input):
                    if name == tensor.name:
                        node.input[index] = copy.name


def scales_outside_the_branch(export: Export) -> None:
    """Weights of the branches are quantized to 8 bits, the scales left in the graph around them."""
    model = export.later.model
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    done: dict[str, str] = {}
    for body in export.bodies:
        for node in [node for node in body.graph.node if node.op_type == "MatMul" and node.input[1] in held]:
            weight = numpy_helper.to_array(held[node.input[1]])
            if weight.ndim != 2 or min(weight.shape) < HIDDEN:
                continue
            if node.input[1] not in done:
                done[node.input[1]] = node.input[1]
                scale = np.float32(np.abs(weight).max() / 127)
                quantized = np.clip(np.round(weight / scale), -127, 127).astype(np.int8)
                model.graph.initializer.append(numpy_helper.from_array(quantized, f"{node.input[1]}_quantized"))
                model.graph.initializer.append(numpy_helper.from_array(scale, f"{node.input[1]}_scale"))
            given = [f"{node.input[1]}_quantized", f"{node.input[1]}_scale"]
            made = body.name("dequantized")
            body.graph.node.append(helper.make_node("DequantizeLinear", given, [made], name=made))
            node.input[1] = made


def nodes_of_one_name(export: Export) -> None:
    """Three nodes bear the name of the first one."""
    for body in export.bodies:
        for node in body.graph.node[:3]:
            node.name = body.graph.node[0].name or "one"


def load() -> dict[str, Fault]:
    """All of them by name."""
    found = (
        Fault(
            "weights-stored-twice",
            "duplicate-weights",
            "large weights have a copy in the body that reads them",
            ("gpt2", "llama-gqa", "marian", "t5", "whisper", "marian-pair"),
            weights_stored_twice,
            severity="note",
        ),
        Fault(
            "scales-outside-the-branch",
            "session-refused",
            "scales of 8-bit weights stand outside the branch that uses them",
            MERGED,
            scales_outside_the_branch,
        ),
        Fault(
            "nodes-of-one-name",
            "session-refused",
            "three nodes of each body bear one name",
            ("gpt2", "llama-gqa", *SPLIT),
            nodes_of_one_name,
        ),
    )
    return {fault.name: fault for fault in found}
