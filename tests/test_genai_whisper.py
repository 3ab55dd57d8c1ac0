"""`--layout genai` of a Whisper: where its cross-attention cache is computed, what is refused, and the proof."""

import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import compose, helper, numpy_helper
from support.genai_folders import GENAI, config_of, convert, named, ports, re_export, require_runtime
from support.isolated import EXPORTS, kvdoctor
from support.proofs import failed

from kvdoctor.addons.conversions.convert_layout import refuse_impossible_layout
from kvdoctor.addons.conversions.layouts import genai_whisper
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, LayoutSource
from kvdoctor.errors import UsageError

FILES = {"merged": ("decoder_model_merged.onnx",), "pair": ("decoder_model.onnx", "decoder_with_past_model.onnx")}
SELF = {f"past_{part}_self_{layer}" for part in ("key", "value") for layer in (0, 1)}
PRESENT = "present.0.encoder.key"
CROSS = {f"past_{part}_cross_{layer}" for part in ("key", "value") for layer in (0, 1)}


def write(folder: Path, form: str = "merged", frames: int = 3000) -> Path:
    """The committed Whisper with an encoder of other length: only its table of positions has one."""
    folder.mkdir()
    source = EXPORTS / "whisper"
    for name in ("config.json", "generation_config.json", *FILES[form]):
        shutil.copy(source / name, folder / name)
    encoder = onnx.load(source / "encoder_model.onnx")
    (table,) = (tensor for tensor in encoder.graph.initializer if list(tensor.dims) == [30, 32])
    rows = np.random.default_rng(5).normal(0, 0.5, (frames // 2, 32)).astype(np.float32)
    table.CopyFrom(numpy_helper.from_array(rows, table.name))
    encoder.graph.input[0].type.tensor_type.shape.dim[2].dim_value = frames
    encoder.graph.output[0].type.tensor_type.shape.dim[1].dim_value = frames // 2
    del encoder.graph.value_info[:]
    onnx.save(encoder, folder / "encoder_model.onnx")
    return folder


def change(file: Path, spoil: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(file)
    spoil(model.graph)
    onnx.save(model, file)


@pytest.mark.parametrize("form", FILES)
def test_the_encoder_returns_the_cross_attention_cache_and_the_decoder_takes_it(form: str, tmp_path: Path) -> None:
    made = convert(write(tmp_path / "m", form))
    encoder, decoder = made.models["encoder.onnx"], made.models["decoder.onnx"]
    present = {name.replace("past", "present") for name in SELF | CROSS}
    crossed = {name for name in present if "cross" in name}
    assert ports(encoder) == ({"audio_features"}, {"hidden_states"} | crossed)
    assert ports(decoder) == ({"input_ids"} | SELF | CROSS, {"logits"} | present - crossed)
    assert set(made.replaces) == {"encoder_model.onnx", *FILES[form]}
    lengths = {value.name: value.type.tensor_type.shape.dim[-2].dim_value for value in encoder.graph.output}
    assert set(lengths.values()) == {1500}
    for model in (encoder, decoder):
        onnx.checker.check_model(stripped(model))


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose weights are empty, for the checker: they still lie in the files of the source."""
    copy = deepcopy(model)
    for tensor in copy.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            zeros = np.zeros(tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    return copy


def test_the_configuration_has_the_sizes_of_the_graph(tmp_path: Path) -> None:
    made = convert(write(tmp_path / "m"))
    model = config_of(made)["model"]
    wanted = {"type": "whisper", "vocab_size": 128, "context_length": 64, "eos_token_id": 2, "bos_token_id": 1}
    assert wanted.items() <= model.items()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_size": 8}
    assert ({"filename": "decoder.onnx"} | sizes).items() <= model["decoder"].items()
    assert {"filename": "encoder.onnx", "hidden_size": 32}.items() <= model["encoder"].items()
    for part in ("encoder", "decoder"):
        mine = ports(made.models[f"{part}.onnx"])
        assert (named(model[part]["inputs"], 2), named(model[part]["outputs"], 2)) == mine
    assert any("no audio_processor_config.json" in note for note in made.notes)


def test_what_another_value_of_the_encoder_is_called_does_not_matter(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")

    def rename(graph: onnx.GraphProto) -> None:
        old = graph.node[3].output[0]
        for node in graph.node:
            node.input[:] = ["present_key_cross_0" if name == old else name for name in node.input]
            node.output[:] = ["present_key_cross_0" if name == old else name for name in node.output]

    change(folder / "encoder_model.onnx", rename)
    onnx.checker.check_model(stripped(convert(folder).models["encoder.onnx"]))


def test_axes_get_readable_names_where_they_are_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "pair")

    def blur(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param and "+" not in dim.dim_param:
                    dim.dim_param = f"s{len(dim.dim_param)}"

    for file in FILES["pair"]:
        change(folder / file, blur)
    decoder = convert(folder, replace(GENAI, axes="readable")).models["decoder.onnx"]
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in decoder.graph.input}
    assert shapes["input_ids"] == ["batch_size", "decoder_sequence_length"]
    assert shapes["past_key_self_0"] == ["batch_size", 4, "past_decoder_sequence_length", 8]
    assert shapes["past_value_cross_1"] == ["batch_size", 4, "encoder_sequence_length", 8]


@pytest.mark.parametrize("frames", [60, 2998])
def test_an_encoder_of_another_length_is_refused(frames: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", frames=frames)
    with pytest.raises(UsageError, match=f"takes {frames} frames, and onnxruntime-genai pads and cuts .* 3000 frames"):
        refuse_impossible_layout(str(folder), GENAI)


def _open_frames(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim[2].dim_param = "frames"


def _add_mask(graph: onnx.GraphProto) -> None:
    """One more input, the mask of an encoder or a decoder, whose sum is added to the first output."""
    graph.input.append(helper.make_tensor_value_info("attention_mask", onnx.TensorProto.FLOAT, ["batch_size", "total"]))
    _add(graph, helper.make_node("ReduceSum", ["attention_mask"], ["mask.sum"], keepdims=0))


def _add(graph: onnx.GraphProto, *nodes: onnx.NodeProto) -> None:
    """Add what the last of some nodes gives to the first output."""
    name = graph.output[0].name
    for node in graph.node:
        node.output[:] = [f"{name}.before" if output == name else output for output in node.output]
    graph.node.extend([*nodes, helper.make_node("Add", [f"{name}.before", nodes[-1].output[0]], [name])])


def test_a_decoder_without_a_file_of_its_encoder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "pair")
    encoder, first = (onnx.load(folder / f"{name}_model.onnx") for name in ("encoder", "decoder"))
    encoder = compose.add_prefix(encoder, "encoder.", rename_inputs=False)
    whole = compose.merge_models(encoder, first, io_map=[(encoder.graph.output[0].name, "encoder_hidden_states")])
    (folder / "encoder_model.onnx").unlink()
    with pytest.raises(UsageError, match="has an encoder, whose file is not next to the decoder"):
        convert(folder)
    onnx.save(whole, folder / "decoder_model.onnx")
    with pytest.raises(UsageError, match=r"inside the graph of the first step: cut it out first, .* --layout optimum"):
        convert(folder)


def _take_second_size(graph: onnx.GraphProto) -> None:
    """Take the number of tokens in place of the batch size, for the cross-attention cache of layer 0."""
    graph.node.insert(0, helper.make_node("Constant", [], ["second"], value=numpy_helper.from_array(np.array(1))))
    (node,) = (node for node in graph.node if node.name == "/model/decoder/layers.0/encoder_attn/Gather")
    node.input[1] = "second"


def _take_states(graph: onnx.GraphProto) -> None:
    """Add the mean of the encoder states to the logits."""
    _add(graph, helper.make_node("ReduceMean", ["encoder_hidden_states"], ["mean"], keepdims=0))


@pytest.mark.parametrize(
    ("file", "spoil", "reason"),
    [
        ("encoder_model.onnx", _open_frames, "does not declare how many frames 'input_features' has"),
        ("encoder_model.onnx", _add_mask, "its encoder takes 'attention_mask' as well"),
        ("decoder_with_past_model.onnx", _add_mask, "'attention_mask' .*, which onnxruntime-genai does not feed"),
        ("decoder_model.onnx", _take_second_size, "reads a length from input_ids"),
        ("decoder_model.onnx", _take_states, "takes more of the encoder states"),
    ],
)
def test_what_is_not_fed_or_not_computed_by_the_encoder_is_refused(
    file: str, spoil: Callable[[onnx.GraphProto], None], reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m", "pair")
    convert(folder)
    change(folder / file, spoil)
    with pytest.raises(UsageError, match=reason):
        convert(folder)


def _round_keys(graph: onnx.GraphProto) -> None:
    """Compute the keys of the cross-attention of layer 0 in float16; their present is a cast of them."""
    nodes = {node.name.removeprefix("/model/decoder/layers.0/encoder_attn/"): node for node in graph.node}
    reshape, product = nodes["Reshape_1"], nodes["k_proj/MatMul"]
    (read,) = (node for node in graph.node if reshape.output[0] in node.input and node.output[0] != PRESENT)
    (transpose,) = (node for node in graph.node if PRESENT in node.output)
    casts = [
        helper.make_node("Cast", [product.output[0]], ["half"], to=onnx.TensorProto.FLOAT16),
        helper.make_node("Cast", ["half.transposed"], [PRESENT], to=onnx.TensorProto.FLOAT),
        helper.make_node("Cast", [reshape.output[0]], ["wide"], to=onnx.TensorProto.FLOAT),
    ]
    reshape.input[0], transpose.output[0], read.input[0] = "half", "half.transposed", "wide"
    for before, cast in zip((reshape, None, read), casts, strict=True):
        graph.node.insert(len(graph.node) if before is None else [*graph.node].index(before), cast)
    del graph.value_info[:]


def test_a_cast_between_the_cache_and_the_attention_is_undone(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "pair")
    change(folder / "decoder_model.onnx", _round_keys)
    onnx.checker.check_model(stripped(convert(folder).models["decoder.onnx"]))


@pytest.fixture(scope="module")
def _runtime() -> None:
    require_runtime()


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
def test_a_merged_decoder_generates_the_same_tokens_and_is_healthy(tmp_path: Path) -> None:
    folder, out = write(tmp_path / "m"), tmp_path / "out"
    (folder / "audio_processor_config.json").write_text("{}")
    file = folder / "decoder_model_merged.onnx"
    done = kvdoctor("convert", file, "--layout", "genai", "-o", out, "-v")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "36 tokens from prompts of 1, 3, 8" in done.stdout
    assert sorted(path.name for path in out.glob("*.onnx")) == ["decoder.onnx", "encoder.onnx"]
    assert (out / "audio_processor_config.json").is_file()
    tested = kvdoctor("step-test", out)
    assert tested.returncode == 0, tested.stdout
    assert re.search(r"healthy · (\d+) of \1 uses work", tested.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
def test_a_pair_generates_the_same_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "pair")
    change(folder / "decoder_model.onnx", _round_keys)
    report = re_export(folder, tmp_path / "out")
    assert failed(report) == []
    assert (tmp_path / "out" / "genai_config.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
def test_another_cross_attention_cache_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is healthy by itself, and its encoder returns something else: nothing is written."""

    def spoil(source: LayoutSource) -> ConvertedModels:
        made = genai_whisper.make(source)
        graph = made.models["encoder.onnx"].graph
        for node in graph.node:
            node.output[:] = ["value.before" if name == "present_value_cross_1" else name for name in node.output]
        graph.node.append(helper.make_node("Neg", ["value.before"], ["present_value_cross_1"]))
        return made

    monkeypatch.setattr(
        "kvdoctor.addons.conversions.convert_layout.load", lambda: (replace(genai_whisper.LAYOUT, make=spoil),)
    )
    report = re_export(write(tmp_path / "m", "pair"), tmp_path / "out")
    assert any("onnxruntime-genai generates the tokens" in text for text in failed(report)), failed(report)
    assert not (tmp_path / "out").exists()
