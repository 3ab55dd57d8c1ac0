"""Decoders beside an embedding graph, for the tests of loops in all languages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx.numpy_helper import from_array, to_array

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import LoopPlan
from support import text_fixtures

TWO_KINDS = "layout-per-layer-embeddings-healthy"
LAYOUTS = ("layout-embed-tokens-healthy", "layout-embedding-image-healthy", TWO_KINDS)
"""Token ids alone; ids and features of images, of which there are none; two kinds of embeddings of a token."""


def plan_of_layout(name: str, folder: Path) -> LoopPlan:
    """The plan of a text fixture, which is written into a folder."""
    opened = open_folder(text_fixtures.load_all()[name].write(folder))
    return make_plan(read_contract(opened.stacks[0], opened.side_cars), name)


def pair_of_graphs(folder: Path) -> LoopPlan:
    """The plan of two kinds of embeddings with a graph of its own for the first call, which takes one of them only."""
    plan = plan_of_layout(TWO_KINDS, folder)
    inputs = tuple(one for one in plan.prefill.inputs if one.made != "per_layer_inputs")
    assert len(inputs) == len(plan.prefill.inputs) - 1
    return replace(plan, prefill=replace(plan.prefill, file="decoder_model.onnx", inputs=inputs, pasts=()))


def write_half(folder: Path) -> Path:
    """A model with two kinds of embeddings of float16, which the decoder takes under other names."""
    path = text_fixtures.load_all()[TWO_KINDS].write(folder)
    maker, taker = onnx.load(path / "embed_tokens.onnx"), onnx.load(path / "decoder_model_merged.onnx")
    for table in maker.graph.initializer:
        table.CopyFrom(from_array(to_array(table).astype(np.float16), table.name))
    for node, output in zip(maker.graph.node, maker.graph.output, strict=True):
        assert node.output[0] == output.name
        node.output[0] = output.name = f"made_{output.name}"
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    taken = {output.name.removeprefix("made_") for output in maker.graph.output}
    for node in taker.graph.node:
        node.input[:] = [f"{name}_full" if name in taken else name for name in node.input]
    for one in taker.graph.input:
        if one.name in taken:
            one.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
            widened = onnx.helper.make_node("Cast", [one.name], [f"{one.name}_full"], to=onnx.TensorProto.FLOAT)
            taker.graph.node.insert(0, widened)
    onnx.save(maker, path / "embed_tokens.onnx")
    onnx.save(taker, path / "decoder_model_merged.onnx")
    return path
