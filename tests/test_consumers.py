"""Optimum decodes with the repaired export what PyTorch decodes with the checkpoint that the export was made from.

Checkpoint and export are made again by fixtures/make_exports.py, in the environment that made the fixtures.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.fixture_exports import NEW_TOKENS, environment, make_again
from support.isolated import EXPORTS, MERGED, re_export
from support.sampling import first

pytestmark = pytest.mark.slow

SOUND = ("gpt2", "llama-gqa")
"""The fixtures with nothing to repair."""


def assert_same_export(made: Path, committed: Path) -> None:
    files = json.loads((committed / "provenance.json").read_text(encoding="utf-8"))["sha256"]
    assert {path.name for path in made.iterdir()} == {*files, "provenance.json"}
    for file in files:
        assert_same_file(made / file, committed / file)


def assert_same_file(made: Path, committed: Path) -> None:
    """Holds two files to be equal byte for byte, or ONNX graphs that differ in the rounding of constants alone.

    The exporter folds constants, so another processor may give other last bits.
    """
    if made.read_bytes() == committed.read_bytes():
        return
    assert made.suffix == ".onnx", f"{made.name} differs"
    models = [onnx.load(path) for path in (made, committed)]
    floats = [list(take_floats(model.graph)) for model in models]
    assert models[0] == models[1], f"{made.name} differs in more than its float tensors"
    for found, expected in zip(*floats, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def take_floats(graph: onnx.GraphProto) -> Iterator[np.ndarray[Any, Any]]:
    """Moves the values of all float tensors out of a graph."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    for tensor in (*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            yield numpy_helper.to_array(tensor)
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
    for attribute in attributes:
        if attribute.HasField("g"):
            yield from take_floats(attribute.g)


@pytest.mark.parametrize("name", first([MERGED[-1], SOUND[-1], *MERGED[:-1], *SOUND[:-1]], 2))
def test_optimum_decodes_what_pytorch_decodes(name: str, tmp_path: Path) -> None:
    made, checkpoint = make_again(name, tmp_path)
    assert_same_export(made, EXPORTS / name)  # so the checkpoint is the one that the fixture was made from

    export, decoder = EXPORTS / name, "model.onnx"
    if name in MERGED:
        export, decoder = re_export(name, tmp_path / "repaired"), "decoder_model_merged.onnx"
        assert (export / decoder).read_bytes() != (EXPORTS / name / decoder).read_bytes()
    result = environment(name).run("generate.py", export, checkpoint)

    expected = result["pytorch"]
    prompt = 1 if name in MERGED else 4
    assert [len(row) for row in expected] == [prompt + NEW_TOKENS] * 12
    assert len({tuple(row) for row in expected}) > 6, "the inputs must matter"
    assert Path(result["decoder"]).samefile(export / decoder)
    assert [run["io_binding"] for run in result["optimum"]] == [False, True]
    for run in result["optimum"]:
        assert run["tokens"] == expected
        assert run["cache_length"] == prompt + NEW_TOKENS - 1, "all but the last token went through the cache"
        assert run["distance"] <= 1e-5 * run["spread"]
