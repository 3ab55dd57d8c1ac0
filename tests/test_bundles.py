"""Models of several files: stages of a pipeline, and encoders whose rows take the places of tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array, to_array
from support import text_fixtures
from support.command_line import kvdoctor

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.document import Report

FIXTURES = text_fixtures.load_all()
STAGES, GENAI = "layout-pipeline-two-stages-healthy", "layout-genai-pipeline-healthy"
VISION, AUDIO, MIXING = "layout-vision-bundle-healthy", "layout-audio-bundle-healthy", "layout-genai-vision-healthy"
Change = Callable[[onnx.ModelProto], object]


def contract_of(path: Path) -> CacheContract:
    folder = open_folder(str(path))
    return read_contract(folder.stacks[0], folder.side_cars)


def change(path: Path, how: Change) -> None:
    model = onnx.load(path)
    how(model)
    onnx.save(model, path)


def found(report: Report) -> set[tuple[str, str]]:
    return {(finding.name, finding.severity) for finding in report.findings}


def outcome(report: Report, experiment: str) -> str:
    return next(run.outcome for run in report.runs if run.experiment == experiment)


@pytest.mark.parametrize("name", [STAGES, GENAI])
def test_a_pipeline_is_one_decoder_whose_stages_have_caches_of_their_own(name: str, tmp_path: Path) -> None:
    contract = contract_of(FIXTURES[name].write(tmp_path))
    first, second = contract.graph("decode").stages
    assert contract.layout.endswith("pipeline")
    assert [slot.layer for slot in contract.slots] == [0, 0, 1, 1]
    assert second.inputs["hidden_states"] in first.outputs.values()
    assert first.inputs["attention_mask"] == second.inputs["attention_mask"] == "attention_mask"
    assert contract.missing == ()


def renumber(model: onnx.ModelProto) -> None:
    """The cache of the second stage has the names of the first one's."""
    for value in (*model.graph.input, *model.graph.output):
        value.name = value.name.replace(".1.", ".0.")
    for node in model.graph.node:
        node.input[:] = [name.replace(".1.", ".0.") for name in node.input]
        node.output[:] = [name.replace(".1.", ".0.") for name in node.output]


def test_stages_may_number_their_layers_from_zero_where_a_config_lists_them(tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    change(path / "second.onnx", renumber)
    listed = (path / "genai_config.json").read_text().replace("_values.1.", "_values.0.").replace("nt.1.", "nt.0.")
    (path / "genai_config.json").write_text(listed)
    contract = contract_of(path)
    assert len({slot.past for slot in contract.slots}) == 4
    assert "second/past_key_values.0.key" in {slot.past for slot in contract.slots}
    assert outcome(step_test(str(path), Options()), "plain-loop") == "passed"


def test_without_a_config_stages_of_the_same_layers_are_not_joined(tmp_path: Path) -> None:
    path = FIXTURES[STAGES].write(tmp_path)
    change(path / "decoder_stage_1.onnx", renumber)
    assert all(not stack.stages for stack in open_folder(str(path)).stacks)


def test_a_stage_in_another_opset_is_run_as_it_is(tmp_path: Path) -> None:
    path = FIXTURES[STAGES].write(tmp_path)
    onnx.save(onnx.version_converter.convert_version(onnx.load(path / "decoder_stage_0.onnx"), 19), path / "a.onnx")
    (path / "a.onnx").replace(path / "decoder_stage_0.onnx")
    assert step_test(str(path), Options()).verdict == "healthy"


@pytest.mark.parametrize("gone", ["decoder_stage_0.onnx", "decoder_stage_1.onnx"])
def test_one_stage_alone_is_never_a_healthy_decoder_of_tokens(gone: str, tmp_path: Path) -> None:
    """The first has no logits; the last takes hidden states, and says so."""
    path = FIXTURES[STAGES].write(tmp_path)
    (path / gone).unlink()
    contract = contract_of(path)
    assert contract.missing or contract.graph("decode").port("embeddings") is not None


def test_the_last_stage_alone_is_told_to_lack_the_first(tmp_path: Path) -> None:
    path = FIXTURES[STAGES].write(tmp_path)
    (path / "decoder_stage_0.onnx").unlink()
    report = step_test(str(path), Options())
    assert ("parts-do-not-fit", "error") in found(report)
    assert report.verdict != "healthy"


def test_stages_that_are_listed_in_another_order_are_told(tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    config = json.loads((path / "genai_config.json").read_text())
    config["model"]["decoder"]["pipeline"].reverse()
    (path / "genai_config.json").write_text(json.dumps(config))
    for report in (inspect(str(path)), step_test(str(path), Options())):
        assert ("parts-do-not-fit", "error") in found(report)
        assert "lists first.onnx after second.onnx" in " ".join(finding.cause for finding in report.findings)


def test_a_listed_file_may_begin_with_a_dot(tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    listed = (path / "genai_config.json").read_text()
    (path / "genai_config.json").write_text(listed.replace('"first.onnx"', '"./first.onnx"'))
    assert (path / "genai_config.json").read_text() != listed
    assert found(inspect(str(path))) == set()


def test_a_stage_that_the_runtime_fails_in_is_named(tmp_path: Path) -> None:
    path = FIXTURES[STAGES].write(tmp_path)

    def misshape(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == "w_o1":
                tensor.CopyFrom(from_array(to_array(tensor)[:, :, :5], tensor.name))

    change(path / "decoder_stage_1.onnx", misshape)
    report = step_test(str(path), Options())
    assert report.verdict == "unhealthy"
    said = " ".join(str(entry.error) for entry in report.runs) + " ".join(f.file or "" for f in report.findings)
    assert "decoder_stage_1.onnx" in said


@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": 3},
        {"pipeline": [3, {"a": 4}, {"b": {"filename": 5}}]},
        {"pipeline": [{"a": {"filename": "../../etc/passwd"}}]},
        {"pipeline": [{"a": {"filename": "first.onnx", "output_names_forwarder": 7}}]},
        {"pipeline": [{"a": {"filename": "first.onnx"}}, {"b": {"filename": "first.onnx"}}]},
        {"pipeline": [{"a": {"filename": "first.onnx", "inputs": 5, "outputs": [3, {}]}}]},
        {"pipeline": [{"a": {"filename": "second.onnx"}}, {"b": {"filename": "first.onnx"}}]},
    ],
)
def test_a_bad_list_of_stages_has_a_clear_end(config: dict[str, object], tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    (path / "genai_config.json").write_text(json.dumps({"model": {"decoder": config}}))
    for report in (inspect(str(path)), step_test(str(path), Options())):
        assert not [entry for entry in report.not_checked if "crashed" in entry.reason]


def test_a_config_of_another_pipeline_is_found(tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    right = json.loads((path / "genai_config.json").read_text())

    def found_with(change_config: Callable[[dict[str, Any]], object]) -> set[tuple[str, str]]:
        config = json.loads(json.dumps(right))
        change_config(config["model"]["decoder"])
        (path / "genai_config.json").write_text(json.dumps(config))
        return found(inspect(str(path)))

    assert found_with(lambda decoder: decoder.update(head_size=5)) == {("config-disagrees", "warning")}
    assert found_with(lambda decoder: decoder["pipeline"][1]["second"]["inputs"].append("mask")) == {
        ("parts-do-not-fit", "error")
    }
    assert found_with(lambda _: None) == set()


def test_stages_of_the_prompt_alone_are_not_run_and_not_called_healthy(tmp_path: Path) -> None:
    path = FIXTURES[GENAI].write(tmp_path)
    config = json.loads((path / "genai_config.json").read_text())
    config["model"]["decoder"]["pipeline"][0]["first"]["run_on_token_gen"] = False
    (path / "genai_config.json").write_text(json.dumps(config))
    report = step_test(str(path), Options())
    assert report.verdict == "incomplete"
    assert "on the prompt alone" in " ".join(entry.reason for entry in report.not_checked)


@pytest.mark.parametrize("command", ["re-export {} -o {}", "repro {} -o {}", "loop {} --language python -o {}"])
def test_commands_that_know_one_file_say_so(command: str, tmp_path: Path) -> None:
    path = FIXTURES["mask-not-offset-stage"].write(tmp_path / "model")
    code, said = kvdoctor(*command.format(path, tmp_path / "out").split())
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()
    assert code in (1, 3)


@pytest.mark.parametrize(("name", "kind"), [(VISION, "vision"), (AUDIO, "audio"), (MIXING, "vision")])
def test_rows_of_an_encoder_are_run_in_the_prompt(name: str, kind: str, tmp_path: Path) -> None:
    path = FIXTURES[name].write(tmp_path)
    (features,) = contract_of(path).features
    assert features.phase == kind
    assert features.token in (14, 15)
    report = step_test(str(path), Options())
    (run_of,) = [each for each in report.runs if each.experiment == "rows-in-prompt"]
    assert run_of.outcome == "passed"
    assert {control.corrupted for control in run_of.controls} >= {"rows of the encoder left out"}
    assert all(control.visible for control in run_of.controls)


def test_a_loop_that_is_wrong_with_rows_alone_is_found(tmp_path: Path) -> None:
    """Embeddings of text are below 2.5, rows above: the decoder scales the logits of a call by its largest entry."""
    path = FIXTURES[VISION].write(tmp_path)

    def loud(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Tanh":
                node.output[0] = "quiet"
        model.graph.initializer.append(from_array(np.array([4], np.float32), "four"))
        model.graph.node.append(onnx.helper.make_node("Add", ["quiet", "four"], ["image_features"]))

    def reads_first_row(model: onnx.ModelProto) -> None:
        """A step sees no row any more, a call over the whole sequence does."""
        for node in model.graph.node:
            node.output[:] = ["plain_logits" if name == "logits" else name for name in node.output]
        model.graph.initializer.append(from_array(np.array([2.5], np.float32), "bound"))
        nodes = [("ReduceMax", ["inputs_embeds"], ["most"]), ("Sub", ["most", "bound"], ["above"])]
        nodes += [("Relu", ["above"], ["over"]), ("Mul", ["plain_logits", "over"], ["more"])]
        nodes += [("Add", ["plain_logits", "more"], ["logits"])]
        model.graph.node.extend(onnx.helper.make_node(*node) for node in nodes)

    change(path / "vision_encoder.onnx", loud)
    change(path / "decoder_model_merged.onnx", reads_first_row)
    report = step_test(str(path), Options())
    assert outcome(report, "plain-loop") == "passed"
    assert outcome(report, "rows-in-prompt") == "differs"
    assert ("cached-differs", "error") in found(report)


def test_an_encoder_that_cannot_be_run_is_listed(tmp_path: Path) -> None:
    path = FIXTURES[VISION].write(tmp_path)

    def misshape(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            if tensor.name == "shape":
                tensor.CopyFrom(from_array(to_array(tensor) * 0 + 7, tensor.name))

    change(path / "vision_encoder.onnx", misshape)
    report = step_test(str(path), Options())
    reasons = " ".join(entry.reason for entry in report.not_checked)
    assert "vision_encoder.onnx could not be run on synthetic input" in reasons


def test_an_encoder_with_inputs_of_its_own_kind_is_named(tmp_path: Path) -> None:
    path = FIXTURES[MIXING].write(tmp_path)

    def add_sizes(model: onnx.ModelProto) -> None:
        sizes = onnx.helper.make_tensor_value_info("image_sizes", onnx.TensorProto.INT64, ["images", 2])
        model.graph.input.append(sizes)

    change(path / "vision.onnx", add_sizes)
    report = step_test(str(path), Options())
    assert "vision.onnx was not run: no rule says what to feed image_sizes" in report.notes
    assert not contract_of(path).features


def test_without_an_embedding_graph_the_rows_have_no_place(tmp_path: Path) -> None:
    path = FIXTURES[VISION].write(tmp_path)
    (path / "embed_tokens.onnx").unlink()
    assert ("parts-do-not-fit", "warning") in found(inspect(str(path)))


def test_rows_of_an_image_of_unknown_size_are_not_judged(tmp_path: Path) -> None:
    """Four patches of four pixels in eight by eight: with no size in a config the usual one would be a guess."""
    path = FIXTURES[VISION].write(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["vision_config"]["image_size"]
    (path / "config.json").write_text(json.dumps(config))
    assert not {name for name, _ in found(step_test(str(path), Options()))} & {"encoder-rows-differ"}


@pytest.mark.parametrize("value", [0, -1, True, "4", 10**12, [4], {"a": 1}, None])
def test_strange_numbers_in_configs_are_passed_over(value: object, tmp_path: Path) -> None:
    path = FIXTURES[VISION].write(tmp_path)
    keys = ("image_size", "patch_size", "spatial_merge_size")
    config = {"vision_config": dict.fromkeys(keys, value), "image_token_id": value, "text_config": {"hidden_size": 8}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "processor_config.json").write_text(json.dumps({"image_seq_len": value}))
    (path / "preprocessor_config.json").write_text(json.dumps({"size": value, "crop_size": {"height": value}}))
    report = inspect(str(path))
    assert not [entry for entry in report.not_checked if "crashed" in entry.reason]
    assert not [finding for finding in report.findings if finding.severity == "error"]


def test_what_feeds_what_is_shown(tmp_path: Path) -> None:
    _, shown = kvdoctor("inspect", str(FIXTURES[VISION].write(tmp_path)))
    assert "image_features -> the places of token 15 among the embeddings; 4 rows for one image" in " ".join(
        shown.split()
    )
    _, shown = kvdoctor("inspect", str(FIXTURES[GENAI].write(tmp_path / "pipeline")))
    assert "1. first.onnx: output_hidden_states -> hidden_states of second.onnx" in " ".join(shown.split())


HEADER = '<\n  ir_version: 8,\n  opset_import: ["" : 17]\n>\n'
SMOLVLM = """vision (
  float[batch_size, num_images, 3, height, width] pixel_values,
  bool[batch_size, num_images, height, width] pixel_attention_mask
) => (float[n, rows, 8] image_features)
<float[48, 8] w_rows, int64[1] channels = {2}, int64[3] shape = {-1, 4, 48}>
{
  real = Cast <to = 1> (pixel_attention_mask)
  shown = Unsqueeze (real, channels)
  seen = Mul (pixel_values, shown)
  flat = Reshape (seen, shape)
  image_features = MatMul (flat, w_rows)
}
"""
QWEN2_VL = """vision (
  float[num_patches, 24] pixel_values, int64[num_images, 3] image_grid_thw
) => (float[rows, 8] image_features)
<float[96, 8] w_rows, int64[2] shape = {-1, 96}, int64 four = {4}, int64[1] zero = {0}>
{
  merged = Reshape (pixel_values, shape)
  all = MatMul (merged, w_rows)
  patches = ReduceProd <axes = [0, 1], keepdims = 0> (image_grid_thw)
  count = Div (patches, four)
  end = Unsqueeze (count, zero)
  image_features = Slice (all, zero, end, zero)
}
"""
GEMMA3N_AUDIO = """audio (
  float[batch_size, num_frames, 16] input_features, bool[batch_size, num_frames] input_features_mask
) => (float[batch_size, rows, 8] audio_features)
<float[16, 8] w_rows, int64[1] bins = {2}>
{
  real = Cast <to = 1> (input_features_mask)
  shown = Unsqueeze (real, bins)
  heard = Mul (input_features, shown)
  audio_features = MatMul (heard, w_rows)
}
"""


@pytest.mark.parametrize(
    ("text", "config", "rows"),
    [
        (SMOLVLM, {"image_token_id": 15, "scale_factor": 1, "vision_config": {"image_size": 8, "patch_size": 4}}, 4),
        (QWEN2_VL, {"image_token_id": 15, "vision_config": {"spatial_merge_size": 2}}, 4),
        (GEMMA3N_AUDIO, {"audio_token_id": 14, "audio_config": {}}, None),
    ],
    ids=["smolvlm", "qwen2-vl", "gemma3n-audio"],
)
def test_encoders_of_published_bundles_are_fed_what_they_take(
    text: str, config: dict[str, object], rows: int | None, tmp_path: Path
) -> None:
    path = FIXTURES[VISION].write(tmp_path)
    (path / "processor_config.json").unlink()
    (path / "vision_encoder.onnx").unlink()
    name = "audio_encoder.onnx" if "audio" in text else "vision_encoder.onnx"
    onnx.save(text_fixtures.compile_text(HEADER + text), path / name)
    (path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 8}, **config}))
    (features,) = contract_of(path).features
    assert features.rows == rows
    report = step_test(str(path), Options())
    assert report.verdict == "healthy"
    assert outcome(report, "rows-in-prompt") == "passed"
    assert outcome(report, "encoder-rows") == ("passed" if rows else "skipped")
