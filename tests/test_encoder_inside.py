"""A first step that holds the encoder: what `input_ids` are there is said by the `decoder_input_ids` beside them."""

import shutil
from pathlib import Path

import onnx
import pytest
from onnx import compose
from support.isolated import EXPORTS

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
