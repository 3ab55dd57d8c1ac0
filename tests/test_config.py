"""Side-car configs against the graph: every number that is compared is missed when it is wrong, and nothing else is."""

import copy
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.text_fixtures import FOLDER, compile_text, load_all

from kvdoctor.analysis.configs import SideCars
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.diagnose.checks.config_disagrees import config_disagrees
from kvdoctor.diagnose.checks.side_cars.numbers import claims
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.findings import Fault
from kvdoctor.options import Options

FIXTURES = load_all()
EXPORTS = sorted(path for path in (FOLDER.parent / "exports").iterdir() if path.is_dir())
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_attention_heads": 2,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 128,
}
"""What is right of the fixture decoder-only-healthy."""
FALCON = {"model_type": "falcon", "new_decoder_architecture": True}


SHELF = TemporaryDirectory(prefix="kvdoctor-test-")


@cache
def folder_of(fixture: str) -> ModelFolder:
    """A fixture on the disk, which is read once."""
    return open_folder(str(FIXTURES[fixture].write(Path(SHELF.name) / fixture)))


def faults(folder: ModelFolder, side_cars: SideCars) -> list[Fault]:
    """The findings of all stacks of a folder with these side-car files instead of its own."""
    folder = replace(folder, side_cars=side_cars)
    contexts = [
        ContractContext(folder=folder, stack=stack, contract=read_contract(stack, side_cars)) for stack in folder.stacks
    ]
    return [fault for context in contexts for fault in config_disagrees(context)]


def missed(folder: ModelFolder, **side_cars: Any) -> set[str]:
    """The keys that disagree."""
    return {key for fault in faults(folder, SideCars(**side_cars)) for key in fault.subject}


def others(number: int) -> list[int]:
    return [n for n in (number + 1, number - 1, number * 2, number // 2, number + 1000) if n not in (0, number)]


# Real exports: take each number of config.json that is compared, and change it.


def changes(export: Path) -> Iterator[tuple[Path, str, str, list[int]]]:
    """(export, what is promised, the key, numbers that are wrong there)."""
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    for claim in claims(config):
        for key in claim.key.split(" / "):
            right = config[key]
            if claim.what == "context" or key != claim.key:
                yield export, claim.what, key, [right * 2]
            elif claim.what == "vocabulary":
                yield export, claim.what, key, [right + 1, right * 2, right // 2]
            else:
                yield export, claim.what, key, others(right)


CHANGES = [change for export in EXPORTS for change in changes(export)]


@pytest.mark.parametrize(
    ("export", "what", "key", "wrong"), CHANGES, ids=lambda value: getattr(value, "name", str(value))
)
def test_each_number_of_a_real_config_counts(export: Path, what: str, key: str, wrong: list[int]) -> None:
    folder = open_folder(str(export))
    config = folder.side_cars.config
    assert missed(folder, config=config) == set()
    for number in wrong:
        found = missed(folder, config={**config, key: number})
        if what == "context" and export.name == "llama-gqa":
            assert found == set()  # its rotation is computed, so there is no table to end
        else:
            assert any(key in one.split(" / ") for one in found), (number, found)


def test_the_real_exports_claim_all_that_is_compared() -> None:
    assert {what for _, what, *_ in CHANGES} == {"layers", "kv_heads", "head_dim", "vocabulary", "context"}


def test_both_stacks_of_a_folder_have_one_finding() -> None:
    folder = open_folder(str(FOLDER.parent / "exports" / "marian-4.57.6"))
    assert len(folder.stacks) == 2
    config = {**folder.side_cars.config, "decoder_layers": 6, "decoder_attention_heads": 8}
    (fault,) = faults(folder, SideCars(config=config))
    assert fault.subject == ("decoder_layers", "decoder_attention_heads", "d_model / decoder_attention_heads")
    assert fault.file == "config.json"
    assert "decoder_layers 6" in fault.declared
    assert "caches of layers 0 to 1" in fault.observed
    assert "decoder_layers 2" in fault.repair.text


# genai_config.json: take each number and name, and change it.

GENAI = ["layout-genai-kv-cache-dim-healthy", "layout-gqa-growing-healthy", "layout-ort-whisper-shared-healthy"]
GENAI += ["layout-paged-healthy"]
NUMBERS = ("num_hidden_layers", "num_key_value_heads", "head_size", "vocab_size")


def leaves(part: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield from leaves(value, (*path, key))
    else:
        yield path, part


def changed_at(config: dict[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    config = copy.deepcopy(config)
    part = config
    for key in path[:-1]:
        part = part.setdefault(key, {})
    part[path[-1]] = value
    return config


@pytest.mark.parametrize("fixture", GENAI)
def test_each_number_and_name_of_a_genai_config_counts(fixture: str) -> None:
    folder = folder_of(fixture)
    genai = folder.side_cars.genai
    assert missed(folder, genai=genai) == set()
    tried = 0
    for path, right in leaves(genai):
        key, wrong = ".".join(path), []
        if path[-1] in NUMBERS and "encoder" not in path:
            wrong = [number for number in others(right) if number > 0]
        if "inputs" in path or "outputs" in path:
            wrong = ["elsewhere_%d" if "%d" in right else "elsewhere"]
        for value in wrong:
            assert missed(folder, genai=changed_at(genai, path, value)) == {key}, (key, value)
        tried += bool(wrong)
    assert tried >= 10


@pytest.mark.parametrize("part", ["decoder", "encoder"])
def test_a_file_that_is_not_there_counts(part: str, tmp_path: Path) -> None:
    FIXTURES["layout-ort-whisper-shared-healthy"].write(tmp_path)
    folder = open_folder(str(tmp_path))
    genai, path = folder.side_cars.genai, ("model", part, "filename")
    assert missed(folder, genai=changed_at(genai, path, "lost.onnx")) == {f"model.{part}.filename"}
    # A file that is there and that another config speaks of is no fault of this stack.
    (tmp_path / "other.onnx").write_bytes((tmp_path / genai["model"]["decoder"]["filename"]).read_bytes())
    assert missed(folder, genai=changed_at(genai, path, "other.onnx")) == set()


@pytest.mark.parametrize("value", ["", "\0", "a" * 5000, "../../..", "\ud800.onnx", 7, None, ["model.onnx"]])
def test_a_file_name_may_be_anything(value: object) -> None:
    folder = folder_of("layout-paged-healthy")
    for fault in faults(
        folder, SideCars(genai=changed_at(folder.side_cars.genai, ("model", "decoder", "filename"), value))
    ):
        assert fault.subject == ("model.decoder.filename",)
        assert fault.declared.isascii()
        assert len(fault.declared) < 600


def test_names_of_what_the_graph_does_not_have_are_idle() -> None:
    folder = folder_of("layout-genai-kv-cache-dim-healthy")
    genai = folder.side_cars.genai
    for path, value in (
        (("inputs", "position_ids"), "position_ids"),
        (("inputs", "cache_indirection"), "cache_indirection"),
        (("inputs", "cross_past_key_names"), "cross_%d"),
        (("inputs", "past_names"), "past_%d"),
        (("outputs", "output_cross_qk_names"), "qk_%d"),
    ):
        assert missed(folder, genai=changed_at(genai, ("model", "decoder", *path), value)) == set()


def test_tokens_where_the_graph_takes_embeddings(tmp_path: Path) -> None:
    text = FIXTURES["layout-gqa-growing-healthy"].files["model.onnx"]
    text = text.replace(
        "int64[batch_size, sequence_length] input_ids", "float[batch_size, sequence_length, 8] inputs_embeds"
    )
    text = text.replace("x0 = Gather (w_tokens, input_ids)", "x0 = Identity (inputs_embeds)")
    (tmp_path / "model.onnx").write_bytes(compile_text(text).SerializeToString())
    genai = json.loads(FIXTURES["layout-gqa-growing-healthy"].files["genai_config.json"])
    folder = open_folder(str(tmp_path))
    assert missed(folder, genai=genai) == {"model.decoder.inputs.input_ids"}
    embedded = changed_at(genai, ("model", "embedding"), {"inputs": {}})
    assert missed(folder, genai=embedded) == set()


WINDOW = ("model", "decoder", "sliding_window")


def windowed(folder: Path, window: str, extra: str = "") -> tuple[ModelFolder, dict[str, Any]]:
    """A fixture with that window in its first layer, and its genai_config.json."""
    files = FIXTURES["layout-gqa-growing-healthy"].files
    text = files["model.onnx"].replace("kv_num_heads = 1", f"kv_num_heads = 1, local_window_size = {window}", 1)
    text = text.replace("cos_cache, sin_cache\n", f"cos_cache, sin_cache{extra}\n", 1)
    (folder / "model.onnx").write_bytes(compile_text(text).SerializeToString())
    return open_folder(str(folder)), json.loads(files["genai_config.json"])


@pytest.mark.parametrize(
    ("window", "says"),
    [
        ({"window_size": 4, "slide_key_value_cache": False, "layers": [0]}, False),
        ({"window_size": 4, "slide_key_value_cache": False}, False),
        ({"window_size": 4, "slide_key_value_cache": False, "layers": []}, False),
        ({"window_size": 8, "slide_key_value_cache": False, "layers": [0]}, True),
        ({"window_size": 8, "slide_key_value_cache": False, "layers": []}, True),
        ({"window_size": 4, "slide_key_value_cache": False, "layers": [0, 1]}, True),
        ({"window_size": 4, "slide_key_value_cache": False, "layers": [1]}, True),
        ({"window_size": 4, "slide_key_value_cache": False, "layers": [7, "0", None, True]}, False),
        ({"window_size": 8, "slide_key_value_cache": True}, False),
        ({"window_size": 8}, False),
        ({"window_size": "8", "slide_key_value_cache": False}, False),
    ],
)
def test_windows(window: dict[str, Any], says: bool, tmp_path: Path) -> None:
    folder, genai = windowed(tmp_path, "4")
    expected = {"model.decoder.sliding_window.window_size"} if says else set()
    assert missed(folder, genai=changed_at(genai, WINDOW, window)) == expected


def test_a_bias_may_hold_the_window(tmp_path: Path) -> None:
    window = {"window_size": 8, "slide_key_value_cache": False, "layers": [0]}
    for extra, says in (("", True), (", , cos_cache", False)):
        folder, genai = windowed(tmp_path, "-1", extra)
        assert bool(missed(folder, genai=changed_at(genai, WINDOW, window))) is says


def test_a_shared_buffer_for_a_graph_that_joins_past_and_new_entries() -> None:
    folder = folder_of("decoder-only-healthy")
    genai = {"model": {"decoder": {"filename": "model.onnx"}}, "search": {"past_present_share_buffer": True}}
    assert missed(folder, genai=genai) == {"search.past_present_share_buffer"}
    assert missed(folder, genai=changed_at(genai, ("search", "num_beams"), 4)) == set()
    assert missed(folder, genai=changed_at(genai, ("search", "past_present_share_buffer"), False)) == set()
    shared = folder_of("layout-gqa-growing-healthy")
    genai = changed_at(shared.side_cars.genai, ("search", "past_present_share_buffer"), True)
    assert missed(shared, genai=genai) == set()


@pytest.mark.parametrize(("rows", "says"), [(64, True), (127, True), (128, False), (4096, False)])
def test_the_table_of_cosines(rows: int, says: bool, tmp_path: Path) -> None:
    text = FIXTURES["layout-gqa-growing-healthy"].files["model.onnx"]
    text = text.replace(
        "float[24, 8] w_tokens", f"float[24, 8] w_tokens, float[{rows}, 8] w_cos, float[{rows}, 8] w_sin"
    )
    text = text.replace("Cos (angles)", "Identity (w_cos)").replace("Sin (angles)", "Identity (w_sin)")
    assert text.count("w_cos") == 2
    (tmp_path / "model.onnx").write_bytes(compile_text(text).SerializeToString())
    genai = json.loads(FIXTURES["layout-gqa-growing-healthy"].files["genai_config.json"])
    assert genai["model"]["context_length"] == 128
    assert missed(open_folder(str(tmp_path)), genai=genai) == ({"model.context_length"} if says else set())


# export.json


def test_each_traced_input_counts() -> None:
    folder = folder_of("config-agrees-healthy")
    export, at = folder.side_cars.export, ("components", "model", "metadata", "kwargs")
    kwargs = export["components"]["model"]["metadata"]["kwargs"]
    assert missed(folder, export=export) == set()
    tensor = {"rank": 2, "shape": [2, 7], "dtype": "int64"}
    for name in ("input_ids", "attention_mask", "position_ids"):
        for spec in ({**tensor, "dtype": "int32"}, {"rank": 3}, {"shape": [2, 7, 1]}, {**tensor, "dtype": "bool"}):
            key = f"components.model.metadata.kwargs.{name}"
            assert missed(folder, export=changed_at(export, (*at, name), spec)) == {key}
        for spec in (tensor, {}, {"rank": "2"}, {"shape": "2"}, {"dtype": 7}, None, {"shape": [None, 7], "rank": None}):
            assert missed(folder, export=changed_at(export, (*at, name), spec)) == set()
    for name in kwargs:
        fewer = {key: spec for key, spec in kwargs.items() if key != name}
        assert missed(folder, export=changed_at(export, at, fewer)) == {"components.model.metadata.kwargs"}
    more = {**kwargs, "token_type_ids": tensor}
    assert missed(folder, export=changed_at(export, at, more)) == set()


def test_a_component_without_its_file_counts(tmp_path: Path) -> None:
    FIXTURES["config-agrees-healthy"].write(tmp_path)
    folder = open_folder(str(tmp_path))
    export = changed_at(folder.side_cars.export, ("components", "decode", "file"), "decode.onnx")
    assert missed(folder, export=export) == {"components.decode.file"}
    (tmp_path / "decode.onnx").write_bytes(b"")
    assert missed(folder, export=export) == set()


# The arithmetic: each value that the graph computes with.

VALUES: list[tuple[str, Any, str]] = [
    ("sliding_window", 4, "a window of 6 in layer 0"),
    ("sliding_window", None, "a window of 6 in layer 0"),
    ("layer_types", ["full_attention", "sliding_attention"], "a window of 6 in layer 0"),
    ("rope_theta", 500000.0, "base 10000"),
    ("rope_scaling", {"rope_type": "linear", "factor": 4.0}, "base 10000 without scaling"),
    ("partial_rotary_factor", 0.5, "4 rotated numbers of each head, not 2"),
    ("rms_norm_eps", 0.001, "epsilon 1e-05"),
    ("hidden_activation", "silu", "gelu by tanh"),
    ("query_pre_attn_scalar", 64, "a scale of scores of 0.25, of 16"),
    ("attn_logit_softcapping", 50.0, "scores capped at 20"),
    ("attn_logit_softcapping", None, "scores capped at 20"),
    ("final_logit_softcapping", 30.0, "logits capped at 10"),
    ("tie_word_embeddings", False, "logits by the table of the tokens"),
    ("intermediate_size", 16, "feed-forward layers of width 12"),
    ("num_attention_heads", 4, "queries of 2 heads"),
    ("attention_bias", True, "queries without a bias"),
]


@pytest.mark.parametrize(("key", "wrong", "shown"), VALUES)
def test_each_value_of_the_arithmetic_counts(key: str, wrong: Any, shown: str) -> None:
    folder = folder_of("config-values-healthy")
    config = folder.side_cars.config
    (fault,) = faults(folder, SideCars(config={**config, key: wrong}))
    assert fault.subject == (key,)
    assert fault.declared.startswith(f"{key} ")
    assert fault.observed.startswith(shown)
    assert fault.repair.kind == "re-export"  # neither side is right beyond doubt: nothing is corrected
    graph = FIXTURES["config-values-healthy"].files["model.onnx"]
    assert not fault.nodes or fault.nodes[0] in graph


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('Gelu <approximate = "tanh"> (gate0)', "Softplus (gate0)"),  # an activation that is not known
        ("Greater (keys, farthest)", "Not (real4)"),  # a mask of another form
        ("Mul (places4, frequencies)", "Add (places4, frequencies)"),
    ],
)
def test_a_form_that_is_not_known_is_no_difference(one: str, other: str, tmp_path: Path) -> None:
    text = FIXTURES["config-values-healthy"].files["model.onnx"]
    config = folder_of("config-values-healthy").side_cars.config
    assert one in text
    (tmp_path / "model.onnx").write_bytes(compile_text(text.replace(one, other)).SerializeToString())
    found = missed(open_folder(str(tmp_path)), config=config)
    assert found <= {"sliding_window"} if "keys" in one else found == set()


def test_a_table_of_sines_shows_the_base(tmp_path: Path) -> None:
    text = FIXTURES["config-values-healthy"].files["model.onnx"]
    config = folder_of("config-values-healthy").side_cars.config
    text = text.replace("float[16, 8] w_tokens,", "float[16, 8] w_tokens, float[64, 4] w_cos, float[64, 4] w_sin,")
    for wave, table in (("cosines = Cos", "w_cos"), ("sines = Sin", "w_sin")):
        name = wave.partition(" ")[0]
        looked_up = f"{name}_flat = Gather ({table}, position_ids)\n  {name} = Unsqueeze ({name}_flat, column)"
        text = text.replace(f"{wave} (angles_twice)", looked_up)
    model = compile_text(text)
    angles = np.tile(np.outer(np.arange(64), [1, 0.01]), 2).astype(np.float32)
    for tensor in model.graph.initializer:
        if tensor.name in ("w_cos", "w_sin"):
            tensor.raw_data = (np.cos if tensor.name == "w_cos" else np.sin)(angles).tobytes()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    folder = open_folder(str(tmp_path))
    assert missed(folder, config=config) == set()
    assert missed(folder, config={**config, "rope_theta": 500000.0}) == {"rope_theta"}


def test_a_window_on_which_two_configs_agree_is_lost_in_the_graph(tmp_path: Path) -> None:
    folder, genai = windowed(tmp_path, "-1")
    genai = changed_at(genai, WINDOW, {"window_size": 8, "slide_key_value_cache": False})
    (alone,) = faults(folder, SideCars(genai=genai))
    both = faults(
        folder, SideCars(genai=genai, config={"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 8})
    )
    assert alone.repair.kind == "graph"
    assert {fault.repair.kind for fault in both} == {"re-export"}
    assert {fault.file for fault in both} == {"config.json", "genai_config.json"}


# The tokens that end a sequence.


@pytest.mark.parametrize(
    ("name", "tokens", "says"),
    [
        ("generation", {"eos_token_id": [3, 2]}, set()),
        ("generation", {"eos_token_id": 2}, {"eos_token_id"}),
        ("generation", {"pad_token_id": 1}, {"eos_token_id"}),
        ("generation", {}, set()),
        ("genai", {"eos_token_id": [3], "pad_token_id": 2}, set()),
        ("genai", {"eos_token_id": 3, "pad_token_id": [2, 3]}, {"model.pad_token_id"}),
        ("genai", {"eos_token_id": 2}, {"model.eos_token_id"}),
        ("genai", {"pad_token_id": 2}, {"model.eos_token_id"}),
        ("genai", {"eos_token_id": [3, 99]}, {"model.eos_token_id"}),
    ],
)
def test_end_tokens(name: str, tokens: dict[str, Any], says: set[str], tmp_path: Path) -> None:
    FIXTURES["layout-gqa-growing-healthy"].write(tmp_path)
    added = {"added_tokens": [{"id": 3, "content": "<end>"}, {"id": 2, "content": "<pad>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(added), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}), encoding="utf-8")
    folder = open_folder(str(tmp_path))
    right = folder.side_cars.genai
    genai = {**right, "model": {**right["model"], "eos_token_id": 3, **(tokens if name == "genai" else {})}}
    if name == "genai" and "eos_token_id" not in tokens:
        del genai["model"]["eos_token_id"]
    assert missed(folder, genai=genai, generation=tokens if name == "generation" else {}) == says


# What may look wrong and is not.


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, set()),
        ({"max_position_embeddings": 64}, set()),
        ({"max_position_embeddings": 129}, {"max_position_embeddings"}),
        ({"n_positions": 4096}, set()),  # the first of its kind is meant
        ({"vocab_size": 15}, {"vocab_size"}),
        ({"vocab_size": 17}, {"vocab_size"}),
        ({"decoder_vocab_size": 16, "vocab_size": 60}, set()),
        ({"decoder_vocab_size": 60}, {"decoder_vocab_size"}),
        ({"vocab_size": 14, "additional_vocab_size": 2}, set()),
        ({"num_hidden_layers": 1}, {"num_hidden_layers"}),
        ({"num_hidden_layers": 3}, {"num_hidden_layers"}),
        ({"num_hidden_layers": 3, "model_type": "gemma3n"}, set()),
        ({"num_hidden_layers": 1, "model_type": "gemma3n"}, {"num_hidden_layers"}),
        ({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}, set()),
        ({"num_hidden_layers": 12, "decoder_layers": 2}, set()),
        ({"num_hidden_layers": 12, "is_encoder_decoder": True}, set()),
        ({"num_layers": 12, "num_hidden_layers": None, "num_decoder_layers": 2}, set()),
        ({"num_key_value_heads": 1}, {"num_key_value_heads"}),
        ({"num_key_value_heads": 1, "num_global_key_value_heads": 2}, set()),
        ({"num_key_value_heads": None, "num_attention_heads": 8}, set()),
        ({"num_key_value_heads": None, "num_attention_heads": 8, "model_type": "gpt2"}, {"num_attention_heads"}),
        ({"head_dim": 8}, {"head_dim"}),
        ({"head_dim": None, "hidden_size": 64}, {"hidden_size / num_attention_heads"}),
        ({"head_dim": None, "hidden_size": 64, "model_type": "gemma2"}, set()),
        ({"head_dim": [8], "hidden_size": 64}, set()),
        ({"head_dim": 8, "global_head_dim": 4}, set()),
        ({"head_dim": 2, "qk_nope_head_dim": 3, "qk_rope_head_dim": 1, "v_head_dim": 4}, set()),
        ({"qk_nope_head_dim": 4, "qk_rope_head_dim": 1}, {"qk_nope_head_dim + qk_rope_head_dim"}),
        ({"qk_nope_head_dim": 3, "qk_rope_head_dim": 1, "v_head_dim": 5}, {"v_head_dim"}),
        ({"model_type": "falcon", "multi_query": True}, {"multi_query"}),
        ({"model_type": "falcon", "multi_query": False}, set()),
        ({**FALCON, "num_kv_heads": 1}, set()),
        ({**FALCON, "num_kv_heads": 2, "num_attention_heads": 8}, set()),
        ({**FALCON, "num_kv_heads": 4, "num_attention_heads": 8}, {"num_kv_heads"}),
        ({"model_type": "gpt_bigcode", "multi_query": True, "n_head": 2}, {"multi_query"}),
        ({"model_type": "t5", "num_key_value_heads": None, "num_attention_heads": 2, "d_kv": 4}, set()),
        ({"model_type": "t5", "d_kv": 8, "head_dim": None}, {"d_kv"}),
    ],
)
def test_what_counts_of_a_config(changed: dict[str, Any], says: set[str]) -> None:
    assert missed(folder_of("decoder-only-healthy"), config={**LLAMA, **changed}) == says


@pytest.mark.parametrize("nested", ["decoder", "text_config"])
def test_a_nested_config_is_that_of_the_decoder(nested: str) -> None:
    folder, around = folder_of("decoder-only-healthy"), {"num_hidden_layers": 9, "head_dim": 99, "vocab_size": 999}
    assert missed(folder, config={**around, nested: LLAMA}) == set()
    assert missed(folder, config={**LLAMA, nested: {**LLAMA, "head_dim": 99}}) == {"head_dim"}


def test_layers_without_a_cache_of_keys_are_layers() -> None:
    folder = folder_of("layout-hybrid-conv-healthy")  # a convolution, then attention
    for layers, says in ((1, {"num_hidden_layers"}), (2, set()), (16, set())):
        assert missed(folder, config={"model_type": "lfm2", "num_hidden_layers": layers}) == says


@pytest.mark.parametrize(("layers", "says"), [(2, set()), (3, {"n_layer"}), (1, {"n_layer"})])
def test_layers_of_a_stacked_cache(layers: int, says: set[str]) -> None:
    folder = folder_of("layout-sherpa-whisper-healthy")
    assert missed(replace(folder, files=folder.files), config={"n_layer": layers}) == says


def test_keys_and_values_behind_one_another_are_not_counted_as_layers() -> None:
    assert missed(folder_of("layout-pinto-whisper-healthy"), config={"n_layer": 2}) == set()


def test_the_width_of_all_heads_in_a_row_is_no_head_dim() -> None:
    assert missed(folder_of("layout-tensor-scatter-healthy"), config={"head_dim": 2, "num_key_value_heads": 2}) == set()


def test_a_packed_cache_is_narrower_than_its_heads(tmp_path: Path) -> None:
    text = FIXTURES["layout-gqa-growing-healthy"].files["model.onnx"]
    folders = []
    for dtype in ("float", "uint8"):
        typed = re.sub(r"float(\[[^]]*\] \"(?:past_key_values|present))", rf"{dtype}\1", text)
        (tmp_path / "model.onnx").write_bytes(compile_text(typed).SerializeToString())
        folders.append(open_folder(str(tmp_path)))
    wide, packed = folders
    assert missed(wide, config={"head_dim": 32}) == {"head_dim"}
    assert missed(packed, config={"head_dim": 32, "num_key_value_heads": 4}) == {"num_key_value_heads"}


def test_a_config_of_another_model_in_the_folder(tmp_path: Path) -> None:
    small, large = FIXTURES["decoder-only-healthy"], FIXTURES["layout-hybrid-conv-healthy"]
    (tmp_path / "talker.onnx").write_bytes(compile_text(small.files["model.onnx"]).SerializeToString())
    (tmp_path / "thinker.onnx").write_bytes(compile_text(large.files["model.onnx"]).SerializeToString())
    folder = open_folder(str(tmp_path))
    assert [stack.name for stack in folder.stacks] == ["talker", "thinker"]
    assert missed(folder, config=LLAMA) == set()
    assert missed(folder, config={**LLAMA, "head_dim": 5}) == {"head_dim", "num_key_value_heads"}
    # By its path alone, a file does not show whose config it is.
    assert missed(open_folder(str(tmp_path / "thinker.onnx")), config=LLAMA) == set()


def test_a_folder_is_inspected_with_its_config(tmp_path: Path) -> None:
    FIXTURES["decoder-only-healthy"].write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 50257}), encoding="utf-8")
    (finding,) = inspect(str(tmp_path)).findings
    assert (finding.code, finding.severity, finding.file) == ("KV020", "warning", "config.json")
    assert (finding.declared, finding.observed) == ("vocab_size 50257", "logits of width 16")


# Configs hold anything.

KEYS = sorted({*LLAMA, "decoder", "text_config", "num_heads", "multi_query", "d_kv", "qk_nope_head_dim", "model"})
KEYS += ["decoder_layers", "n_layer", "search", "components", "file", "metadata", "kwargs", "leaves", "inputs"]
KEYS += ["outputs", "past_key_names", "present_key_names", "sliding_window", "window_size", "layers", "filename"]
KEYS += ["encoder", "shape", "eos_token_id", "forced_decoder_ids", "max_length", *(key for key, *_ in VALUES)]
KEYS += ["rope_parameters", "rope_type", "factor", "pad_token_id"]
NO_NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.floats(),
    st.just(0),
    st.integers(-9, -1),
    st.integers(2**31, 2**70),
)
ANYTHING = st.recursive(
    NO_NUMBERS | st.integers(0, 20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=6)
    ),
    max_leaves=25,
)
RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("fixture", ["config-values-healthy", "layout-genai-kv-cache-dim-healthy", "merged-healthy"])
@RELAXED
@given(data=st.data())
def test_any_json_is_read(fixture: str, data: st.DataObject) -> None:
    folder = folder_of(fixture)
    own = folder.side_cars
    cars = []
    for right in (own.config, own.genai, own.export, own.generation):
        paths = [path for path, _ in leaves(right)]
        wrong = right
        for path in data.draw(st.lists(st.sampled_from(paths), max_size=4)) if paths else ():
            cut = path[: data.draw(st.integers(1, len(path)))]
            with suppress(AttributeError, TypeError):  # where an outer part was replaced before
                wrong = changed_at(wrong, cut, data.draw(ANYTHING))
        drawn = data.draw(ANYTHING)
        cars.append({**wrong, **drawn} if isinstance(drawn, dict) else wrong)
    for fault in faults(folder, SideCars(*cars)):
        assert fault.severity == "warning"
        assert fault.subject
        assert (fault.declared + fault.observed).isascii()


@RELAXED
@given(st.fixed_dictionaries({}, optional={key: st.just(right) | NO_NUMBERS for key, right in LLAMA.items()}))
def test_only_a_number_can_be_wrong(config: dict[str, Any]) -> None:
    if config.get("model_type") not in ("llama", None):
        del config["model_type"]
    assert missed(folder_of("decoder-only-healthy"), config=config) == set()


@RELAXED
@given(st.sampled_from(sorted(LLAMA)[1:]), st.integers(1, 2**31 - 1))
def test_a_number_is_wrong_or_right(key: str, number: int) -> None:
    right = LLAMA[key]
    found = missed(folder_of("decoder-only-healthy"), config={**LLAMA, key: number})
    silent = number == right or key in ("num_attention_heads", "model_type")
    silent |= key == "max_position_embeddings" and number < 128
    assert found == (set() if silent else {key})


# generation_config.json.


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("eos_token_id", 15, 16),
        ("eos_token_id", [2, 15], [2, 16]),
        ("bos_token_id", 15, 16),
        ("forced_bos_token_id", None, 99),
        ("suppress_tokens", [-1], [3, 50257]),
        ("begin_suppress_tokens", [1, 2], [16]),
        ("forced_decoder_ids", [[1, None], [2, 15]], [[1, 16]]),
        ("lang_to_id", {"<|en|>": 15}, {"<|en|>": 15, "<|de|>": 16}),
        ("no_timestamps_token_id", 0, 16),
        ("eos_token_id", {"a": "b"}, 1 << 80),
        ("bos_token_id", True, 17),
    ],
)
def test_ids_that_the_graph_does_not_have(key: str, right: Any, wrong: Any) -> None:
    folder = folder_of("decoder-only-healthy")
    assert missed(folder, generation={key: right}) == set()
    (fault,) = faults(folder, SideCars(generation={key: wrong}))
    assert (fault.file, fault.subject, fault.severity) == ("generation_config.json", (key,), "warning")
    assert fault.effects


def test_the_start_of_a_decoder_with_an_encoder_is_its_own() -> None:
    """`bos_token_id` may be that of the encoder."""
    folder = open_folder(str(FOLDER.parent / "exports" / "marian-4.57.6"))
    assert missed(folder, generation={"decoder_start_token_id": 127, "bos_token_id": 60000}) == set()
    assert missed(folder, generation={"decoder_start_token_id": 128}) == {"decoder_start_token_id"}


def test_a_longest_sequence_has_positions() -> None:
    folder = open_folder(str(FOLDER.parent / "exports" / "gpt2"))
    (rows,) = {claim.value for claim in claims(folder.side_cars.config) if claim.what == "context"}
    assert missed(folder, generation={"max_length": rows}) == set()
    assert missed(folder, generation={"max_length": rows + 1}) == {"max_length"}
    assert missed(folder, generation={"max_length": "many"}) == set()


def test_a_wrong_id_is_found_in_a_folder(tmp_path: Path) -> None:
    folder = FIXTURES["decoder-only-healthy"].write(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 50256]}', encoding="utf-8")
    (finding,) = inspect(str(folder), Options()).findings
    assert (finding.code, finding.declared) == ("KV020", "eos_token_id 50256")
    assert finding.observed == "logits of width 16"
