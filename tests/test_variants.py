"""Variants of one model in a folder: each is graded by the most exact one, and that decides nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.isolated import EXPORTS, kvdoctor
from support.text_fixtures import load_all

from kvdoctor.decode.parity import divergences
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options


def rounded(source: Path, target: Path, bits: int, weights: str = "") -> None:
    """A copy whose matrices have the values that so many bits can hold; `weights` is a part of their names."""
    model = onnx.load(str(source))
    for tensor in model.graph.initializer:
        if len(tensor.dims) == 2 and tensor.data_type == onnx.TensorProto.FLOAT and weights in tensor.name:
            values = numpy_helper.to_array(tensor)
            unit = np.abs(values).max() / (2 ** (bits - 1) - 1)
            tensor.CopyFrom(numpy_helper.from_array((np.round(values / unit) * unit).astype(np.float32), tensor.name))
    onnx.save(model, str(target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 in four variants, of which one is the same model."""
    made = tmp_path_factory.mktemp("variants") / "gpt2"
    shutil.copytree(EXPORTS / "gpt2", made)
    for bits in (4, 8):
        rounded(made / "model.onnx", made / f"model_q{bits}.onnx", bits)
    shutil.copy(made / "model.onnx", made / "model_O2.onnx")
    return made


def test_each_variant_is_graded(folder: Path) -> None:
    done = kvdoctor("step-test", folder, "--format", "json")
    assert done.returncode == 0, done.stderr
    found = {one["stack"]: one for one in json.loads(done.stdout)["variants"]}
    assert {one["base"] for one in found.values()} == {"decoder"}
    assert sorted(found) == ["decoder-O2", "decoder-q4", "decoder-q8"]
    same, coarse, fine = (found[f"decoder-{name}"] for name in ("O2", "q4", "q8"))
    assert (same["divergence"], same["same_top1"], same["first_other"]) == (0, 1, None)
    assert set(same["layers"].values()) == {0}
    assert 0 < fine["divergence"] < coarse["divergence"] / 10
    assert coarse["same_top1"] < 1
    assert coarse["first_other"] is not None
    assert all(one["tokens"] == 33 and one["reason"] is None for one in found.values())


@pytest.mark.slow
def test_the_table_is_on_the_first_screen(folder: Path) -> None:
    done = kvdoctor(folder)
    lines = done.stdout.splitlines()
    title = next(number for number, line in enumerate(lines) if line.startswith("variants of decoder"))
    assert [line.split()[0] for line in lines[title + 1 : title + 5]] == [
        "variant",
        "decoder-O2",
        "decoder-q4",
        "decoder-q8",
    ]
    for format_name in ("markdown", "html"):
        assert "decoder-q4" in kvdoctor("step-test", folder, "--format", format_name).stdout


@pytest.mark.slow
def test_the_layer_that_costs_most_is_named(tmp_path: Path) -> None:
    shutil.copytree(EXPORTS / "gpt2", tmp_path / "model")
    source = tmp_path / "model" / "model.onnx"
    rounded(source, tmp_path / "model" / "model_q3.onnx", 3, "h.1.attn")
    (found,) = step_test(str(tmp_path / "model")).variants
    assert found.stack == "decoder-q3"
    assert found.layers["0"] == 0
    assert found.layers["1"] > 0.05


def test_a_variant_that_does_not_run_says_so(tmp_path: Path) -> None:
    model = load_all()["merged-healthy"].write(tmp_path / "model")
    (name,) = [file.name for file in model.glob("*.onnx") if "decoder" in file.name]
    broken = onnx.load(str(model / name))
    for tensor in broken.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            nan = np.full(tuple(tensor.dims), np.nan, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(nan, tensor.name))
    onnx.save(broken, str(model / name.replace(".onnx", "_fp16.onnx")))
    (found,) = step_test(str(model)).variants
    assert found.divergence is None
    assert found.reason == "logits are not finite"


def test_models_that_only_lie_together_are_no_variants(tmp_path: Path) -> None:
    """Other layers, or other words in the name."""
    shutil.copytree(EXPORTS / "t5", tmp_path / "t5")
    assert step_test(str(tmp_path / "t5")).variants == ()
    shutil.copytree(EXPORTS / "gpt2", tmp_path / "both")
    shutil.copy(EXPORTS / "gpt2" / "model.onnx", tmp_path / "both" / "other.onnx")
    assert step_test(str(tmp_path / "both")).variants == ()


def test_a_part_of_the_checks_compares_no_variants(folder: Path) -> None:
    assert step_test(str(folder), Options(select=("KV2",))).variants == ()


def test_tokens_that_both_mask_do_not_count() -> None:
    random = np.random.default_rng(0)
    one, other = random.standard_normal((2, 5, 32))
    plain = divergences(one[:, :20], other[:, :20])
    one[:, 20:] = other[:, 20:] = -np.inf
    masked = divergences(one, other)
    assert plain is not None
    assert masked is not None
    np.testing.assert_allclose(masked, plain, rtol=1e-6)
    exact = np.exp(other[:, :20]) / np.exp(other[:, :20]).sum(-1, keepdims=True)
    logs = [np.log(np.exp(x[:, :20]) / np.exp(x[:, :20]).sum(-1, keepdims=True)) for x in (one, other)]
    np.testing.assert_allclose(plain, (exact * (logs[1] - logs[0])).sum(-1), rtol=1e-9)
    other[0, 0] = np.nan
    assert divergences(one, other) is None
