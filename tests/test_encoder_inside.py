"""A first step that holds the encoder: what `input_ids` are there is said by the `decoder_input_ids` beside them."""

import shutil
from pathlib import Path

import onnx
import pytest
from onnx import compose
from support.isolated import EXPORTS
from support.proofs import claims

from kvdoctor.addons.conversions import api as conversions
from kvdoctor.diagnose.pipeline import step_test


def with_encoder_inside(source: Path, folder: Path) -> Path:
    """An Optimum pair whose first step takes the encoder's inputs, as forward() of the whole model does."""
    folder.mkdir()
    encoder, decoder = (onnx.load(source / f"{name}_model.onnx") for name in ("encoder", "decoder"))
    decoder.ir_version = encoder.ir_version
    encoder = compose.add_prefix(encoder, "encoder.", rename_inputs=False, rename_outputs=False)
    ports = {"input_ids": "decoder_input_ids", "encoder_attention_mask": "mask_of_encoder"}
    for node in decoder.graph.node:
        node.input[:] = [ports.get(name, name) for name in node.input]
    for value in decoder.graph.input:
        value.name = ports.get(value.name, value.name)
    states = encoder.graph.output[0].name
    decoder = compose.add_prefix(decoder, "decoder.", rename_inputs=False, rename_outputs=False)
    whole = compose.merge_models(encoder, decoder, io_map=[(states, "encoder_hidden_states")])
    mask = next(value for value in whole.graph.input if value.name == "mask_of_encoder")
    whole.graph.input.remove(mask)
    whole.graph.node.insert(0, onnx.helper.make_node("Identity", ["attention_mask"], ["mask_of_encoder"]))
    onnx.save(whole, folder / "decoder_model.onnx")
    for name in ("decoder_with_past_model.onnx", "config.json"):
        shutil.copy(source / name, folder / name)
    return folder


@pytest.mark.parametrize("name", ["t5", "marian-4.57.6"])
def test_a_sound_pair_is_healthy(name: str, tmp_path: Path) -> None:
    report = step_test(str(with_encoder_inside(EXPORTS / name, tmp_path / name)))
    assert report.verdict == "healthy", [(f.name, f.observed) for f in report.findings]
    contract = report.stacks[0].contract
    assert contract is not None
    roles = {port.name: port.role for port in contract.graph("prefill").inputs}
    assert roles == {"input_ids": "encoder_input", "attention_mask": "encoder_mask", "decoder_input_ids": "token_ids"}
    assert not [f for f in report.findings if f.severity != "note"]


def test_the_encoder_is_cut_out_and_the_loop_stays_the_same(tmp_path: Path) -> None:
    """The graph reads the number of sequences from the ids, as exports of whole models do, and not from embeddings."""
    source = with_encoder_inside(EXPORTS / "t5", tmp_path / "t5")
    model = onnx.load(source / "decoder_model.onnx")
    constants = {one.name: one for one in model.graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"}
    shapes = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Shape"}
    added = []
    for node in [node for node in model.graph.node if node.op_type == "Gather" and node.input[0] in shapes]:
        read, at = shapes[node.input[0]], int(onnx.numpy_helper.to_array(constants[node.input[1]]))
        if at < 2 and read.startswith("decoder") and "Expand" not in read and "ConstantOfShape" not in read:
            one = f"{node.output[0]}.one"
            model.graph.node.insert(
                0, onnx.helper.make_node("Shape", ["decoder_input_ids"], [one], start=at, end=at + 1)
            )
            node.CopyFrom(onnx.helper.make_node("Squeeze", [one], [node.output[0]]))
    for node in added:
        model.graph.node.insert(0, node)
    onnx.save(model, source / "decoder_model.onnx")
    report = conversions.convert(source, tmp_path / "out", layout="optimum")
    assert {p.name for p in (tmp_path / "out").glob("*.onnx")} == {"encoder_model.onnx", "decoder_model_merged.onnx"}
    assert claims(report)["the loop's logits are those of the source, bit for bit"]
