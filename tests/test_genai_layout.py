"""`--layout genai`: the configuration and its origins, what is refused, and the proof by onnxruntime-genai itself."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.genai_folders import GENAI, config_of, convert, named, ports, re_export, require_runtime
from support.isolated import EXPORTS, give_up, kvdoctor
from support.proofs import failed
from support.text_fixtures import load_all

from kvdoctor.addons.conversions import pipeline
from kvdoctor.addons.conversions.convert_layout import refuse_impossible_layout
from kvdoctor.addons.conversions.layout_proof import NEEDS
from kvdoctor.addons.conversions.layouts import genai, genai_whisper
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, LayoutSource
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.report.document import exit_code

FIXTURES = load_all()
CONTEXT = {"max_position_embeddings": 40}


def write(folder: Path, name: str, config: Any = CONTEXT, generation: Any = {"eos_token_id": 0}) -> Path:  # noqa: B006
    """A fixture with the configs that onnxruntime-genai's configuration needs."""
    FIXTURES[name].write(folder)
    (folder / "genai_config.json").unlink(missing_ok=True)
    for file, content in (("config.json", config), ("generation_config.json", generation)):
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(("name", "kv_heads"), [("gpt2", 4), ("llama-gqa", 2)])
def test_the_values_are_those_of_the_contract_and_of_the_configs(name: str, kv_heads: int) -> None:
    made = convert(EXPORTS / name)
    config, (file, model) = config_of(made), next(iter(made.models.items()))
    wanted = {"type": "decoder", "vocab_size": 128, "context_length": 64, "eos_token_id": 2, "pad_token_id": 0}
    assert wanted.items() <= config["model"].items()
    decoder = config["model"]["decoder"]
    sizes = {"num_key_value_heads": kv_heads, "head_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert ({"filename": file, "hidden_size": 32} | sizes).items() <= decoder.items()
    assert (named(decoder["inputs"], 2), named(decoder["outputs"], 2)) == ports(model)
    assert config["search"] == {
        "max_length": 64,
        "do_sample": False,
        "num_beams": 1,
        "past_present_share_buffer": False,
    }
    reasons = {change.where: change.after for change in made.changes}
    assert {"model.eos_token_id": "2 (generation_config.json)"}.items() <= reasons.items()
    assert reasons["model.decoder.head_size"] == "8 (the graph)"


def test_what_is_not_known_is_left_out_or_has_a_stated_reason(tmp_path: Path) -> None:
    made = convert(write(tmp_path / "m", "decoder-only-healthy"))
    config, reasons = config_of(made), {change.where: change.after for change in made.changes}
    assert not {"hidden_size", "num_attention_heads"} & config["model"]["decoder"].keys()
    assert "bos_token_id" not in config["model"]
    assert config["model"]["pad_token_id"] == 0
    assert "no pad_token_id" in reasons["model.pad_token_id"]
    assert any("no tokenizer" in note for note in made.notes)


def test_several_ends_of_a_text_and_one_buffer_are_declared(tmp_path: Path) -> None:
    ends = CONTEXT | {"eos_token_id": 7}, {"eos_token_id": [5, 3]}
    assert config_of(convert(write(tmp_path / "m", "decoder-only-healthy", *ends)))["model"]["eos_token_id"] == [5, 3]
    made = convert(write(tmp_path / "buffer", "layout-genai-kv-cache-dim-healthy"))
    assert config_of(made)["search"]["past_present_share_buffer"] is True


def test_names_stay_where_a_pattern_has_them_all(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "layout-renamed-cache-healthy")
    made, before = convert(folder), onnx.load(folder / "model.onnx")
    (model,) = made.models.values()
    decoder = config_of(made)["model"]["decoder"]
    assert ports(model) == ports(before)
    assert (named(decoder["inputs"], 2), named(decoder["outputs"], 2)) == ports(model)
    assert decoder["inputs"]["past_key_names"] == "cache_k_%d"


@pytest.mark.parametrize("name", ["layout-dynamo-anonymous-healthy", "percent"])
def test_names_without_a_pattern_become_the_usual_ones(name: str, tmp_path: Path) -> None:
    """Two layers without numbers in their names; and a name that printf would read as more than a pattern."""
    if name == "percent":
        folder = write(tmp_path / "m", "decoder-only-healthy")
        model = onnx.load(folder / "model.onnx")
        rename(model, "past_key_values.0.key", "%s.0.key")
        onnx.save(model, folder / "model.onnx")
    else:
        folder = write(tmp_path / "m", name)
    made = convert(folder)
    (model,) = made.models.values()
    decoder = config_of(made)["model"]["decoder"]
    layers = decoder["num_hidden_layers"]
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert (named(decoder["inputs"], layers), named(decoder["outputs"], layers)) == ports(model)


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    for value in model.graph.input:
        value.name = new if value.name == old else value.name
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def write_pair(folder: Path) -> Path:
    """A decoder as a pair: the graph of the first step has an empty past inside."""
    model = onnx.load(EXPORTS / "gpt2" / "model.onnx")
    folder.mkdir()
    onnx.save(model, folder / "decoder_with_past_model.onnx")
    for value in [value for value in model.graph.input if value.name.startswith("past")]:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((1, 4, 0, 8), np.float32), value.name))
        model.graph.input.remove(value)
    onnx.save(model, folder / "decoder_model.onnx")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(EXPORTS / "gpt2" / name, folder)
    return folder


def test_of_a_pair_the_later_graph_serves_all_steps(tmp_path: Path) -> None:
    made = convert(write_pair(tmp_path / "pair"))
    (file, model), decoder = next(iter(made.models.items())), config_of(made)["model"]["decoder"]
    assert (file, len(made.models)) == ("model.onnx", 1)
    assert set(made.replaces) == {"decoder_model.onnx", "decoder_with_past_model.onnx"}
    assert (named(decoder["inputs"], 2), named(decoder["outputs"], 2)) == ports(model)


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["past.0.key", "past.1.key"], "past.%d.key"),
        (["v0.layer0", "v0.layer1"], "v0.layer%d"),
        (["k10", "k11"], "k1%d"),
        (["k1", "k2"], None),
        (["k%0", "k%1"], None),
        (["k0" + "x" * 62], None),
        (["k0" + "x" * 61], "k%d" + "x" * 61),
    ],
)
def test_patterns(names: list[str], pattern: str | None) -> None:
    assert genai.find_pattern(names) == pattern


DECODER = "decoder-only-healthy"


@pytest.mark.parametrize(
    ("name", "configs", "reason"),
    [
        ("pair-healthy", (), "has an encoder"),
        ("layout-scatter-static-healthy", (), "neither grows with each step nor is one buffer"),
        ("layout-delta-optimum-healthy", (), "neither grows with each step nor is one buffer"),
        ("layout-hybrid-conv-healthy", (), "'past_conv.0' is a conv-state"),
        ("layout-fused-key-value-healthy", (), "is a key-value of layer 0"),
        ("layout-heads-first-healthy", (), "the axes of 'past_key_values.0.key' are kv_heads, batch"),
        ("layout-embed-tokens-healthy", (), "it takes 'inputs_embeds' (embeddings)"),
        ("layout-cut-positions-healthy", (), "it takes 'start' (past length)"),
        ("layout-ort-gpt2-attention-healthy", (), "'attention_mask' is float[batch, total]"),
        ("layout-lstm-plain-healthy", (), "1 new token at a time"),
        ("layout-greedy-search-healthy", (), "operator"),
        (DECODER, ({}, {"eos_token_id": 0}), "max_position_embeddings"),
        (DECODER, (CONTEXT, {}), "eos_token_id from 0 to 15"),
        (DECODER, (CONTEXT, {"eos_token_id": 16}), "eos_token_id"),
        (DECODER, (CONTEXT, {"eos_token_id": True}), "eos_token_id"),
        (DECODER, (CONTEXT, {"eos_token_id": []}), "eos_token_id"),
        (DECODER, (CONTEXT, {"eos_token_id": ["0"]}), "eos_token_id"),
        (DECODER, (CONTEXT, "[0"), "eos_token_id"),
        (DECODER, (CONTEXT, "[" * 5000), "eos_token_id"),
        (DECODER, ("null", {"eos_token_id": 0}), "max_position_embeddings"),
    ],
)
def test_what_it_does_not_run_or_does_not_know_is_named(
    name: str, configs: tuple[Any, ...], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refusal:
        refuse_impossible_layout(str(write(tmp_path / "m", name, *configs)), GENAI)
    assert reason in str(refusal.value)


def test_a_folder_holds_one_decoder_and_no_configuration_yet(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", "decoder-only-healthy")
    shutil.copy(folder / "model.onnx", folder / "model_q4.onnx")
    with pytest.raises(UsageError, match="holds 2 decoders"):
        refuse_impossible_layout(str(folder), GENAI)
    refuse_impossible_layout(str(folder / "model.onnx"), GENAI)
    (folder / "genai_config.json").write_text("{}")
    with pytest.raises(UsageError, match="already has a genai_config"):
        refuse_impossible_layout(str(folder / "model.onnx"), GENAI)


def test_it_is_not_changed_after_its_proof(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m", "decoder-only-healthy"))
    with pytest.raises(UsageError, match="change the versions first"):
        refuse_impossible_layout(folder, replace(GENAI, opset=17))


def test_without_onnxruntime_genai_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if NEEDS.are_installed:
        give_up("onnxruntime-genai is installed in this Python")
    for name in ("UV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "empty"))
    folder = write(tmp_path / "m", "decoder-only-healthy")
    report = re_export(folder, tmp_path / "out", offline=True)
    (reason,) = failed(report)
    assert "could not be proved, onnxruntime-genai is not available" in reason
    assert exit_code(report, "error") == 1
    assert not (tmp_path / "out").exists()
    assert not any("--keep-unproved" in note for note in report.notes)


@pytest.fixture(scope="module")
def _runtime() -> None:
    require_runtime()


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_exports_generate_the_same_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer beside the model is copied, also where the path is the file of the model. Telemetry leaves `.ses`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    shutil.copytree(EXPORTS / name, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    out = tmp_path / "out"
    done = kvdoctor("convert", tmp_path / "m" / "model.onnx", "--layout", "genai", "-o", out, "-v")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "36 tokens from prompts of 1, 3, 8" in done.stdout
    assert {"model.onnx", "genai_config.json", "tokenizer.json", "config.json"} <= {p.name for p in out.iterdir()}
    assert kvdoctor("step-test", out).returncode == 0
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize(
    "name",
    [
        "layout-renamed-cache-healthy",
        "layout-dynamo-anonymous-healthy",
        "layout-genai-kv-cache-dim-healthy",
        "decoder-only-half-cache-healthy",
        "decoder-only-padded-head-healthy",
    ],
)
def test_other_names_and_caches_generate_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Names of its own, names without a pattern, one buffer for past and present, float16, a padded vocabulary."""
    report = re_export(write(tmp_path / "m", name), tmp_path / "out")
    assert failed(report) == []
    assert (tmp_path / "out" / "genai_config.json").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize("form", ["pair", "merged"])
def test_one_graph_of_two_generates_the_same_tokens(form: str, tmp_path: Path) -> None:
    folder = write_pair(tmp_path / "pair")
    if form == "merged":
        pipeline.convert(
            pipeline.ConvertRequest(str(folder), str(tmp_path / "merged"), ConvertChoices(layout="merged"), ()),
            Options(),
        )
    report = re_export(tmp_path / form, tmp_path / "out")
    assert failed(report) == []
    assert [path.name for path in (tmp_path / "out").glob("*.onnx")] == ["model.onnx"]


def configure(section: str, key: str, value: Any) -> Callable[[ConvertedModels], None]:
    """Another value in the configuration."""

    def spoil(made: ConvertedModels) -> None:
        config = config_of(made)
        decoder = config["model"]["decoder"]
        {"decoder": decoder, "search": config["search"], **decoder}[section][key] = value
        made.texts["genai_config.json"] = json.dumps(config)

    return spoil


def negate(made: ConvertedModels) -> None:
    """The copy is healthy by itself, and generates something else."""
    (model,) = made.models.values()
    (negated,) = (node for node in model.graph.node if "logits" in node.output)
    negated.output[:] = ["logits.before"]
    model.graph.node.append(onnx.helper.make_node("Neg", ["logits.before"], ["logits"]))


@pytest.mark.slow
@pytest.mark.usefixtures("_runtime")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (configure("inputs", "past_key_names", "past_key_values.%d.value"), "onnxruntime-genai"),
        (configure("search", "past_present_share_buffer", True), "onnxruntime-genai"),
        (negate, "prompt of 1, step 0: it generates token"),
    ],
)
def test_a_wrong_copy_is_not_proved(
    spoil: Callable[[ConvertedModels], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(source: LayoutSource) -> ConvertedModels:
        made = genai.make(source)
        spoil(made)
        return made

    monkeypatch.setattr(
        "kvdoctor.addons.conversions.convert_layout.load", lambda: (replace(genai_whisper.LAYOUT, make=make),)
    )
    report = re_export(EXPORTS / "gpt2", tmp_path / "out")
    assert any(said in text for text in failed(report)), failed(report)
    assert not (tmp_path / "out").exists()
