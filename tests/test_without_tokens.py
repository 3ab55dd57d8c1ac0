"""Models whose logits, or one layer of whose cache, do not depend on the tokens: nothing that is run could fail."""

import json
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper
from support.isolated import FIXTURES, kvdoctor

RIGHT = FIXTURES / "from_scratch" / "right.onnx"
TOKENS, POSITIONS = "wte.weight", "wpe.weight"
QUERIES_KEYS_VALUES = "onnx::MatMul_336"
"""float[32, 96] of layer 1: the columns are queries, keys and values."""


def write(path: Path, weight: str, change: str) -> Path:
    """Write a copy of the healthy decoder with some columns or rows of a weight changed."""
    model = onnx.load(RIGHT)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == weight)
    values = numpy_helper.to_array(tensor).copy()
    if change == "zeros":
        values[:] = 0
    elif change == "no values":
        values[:, 64:] = 0
    elif change == "pairs of equal rows":
        values[1::2] = values[::2]
    tensor.CopyFrom(numpy_helper.from_array(values, weight))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (TOKENS, "no token changes the logits: "),
        (QUERIES_KEYS_VALUES, "no token changes layer 1 of the cache: "),
    ],
)
def test_what_no_token_changes_is_not_healthy(weight: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", weight, "zeros")
    done = kvdoctor("step-test", path, "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["findings"]) == (3, "incomplete", [])
    (why,) = (each["reason"] for each in document["not_checked"] if each["essential"])
    assert reason in why
    golden = tmp_path / "golden.npz"
    assert kvdoctor("record", path, "-o", golden).returncode == 3
    assert not golden.exists()


def test_a_comparison_with_such_a_model_is_no_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", TOKENS, "zeros")
    done = kvdoctor("diff", RIGHT, path)
    assert done.returncode == 3
    assert "no token changes the logits" in done.stdout


@pytest.mark.parametrize(
    ("weight", "change"),
    [(QUERIES_KEYS_VALUES, "no values"), (TOKENS, "pairs of equal rows"), (POSITIONS, "zeros"), (TOKENS, "")],
)
def test_constant_values_equal_rows_and_missing_positions_are_healthy(weight: str, change: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", weight, change)
    document = json.loads(kvdoctor("step-test", path, "--format", "json").stdout)
    assert document["verdict"] == "healthy", document["not_checked"]
