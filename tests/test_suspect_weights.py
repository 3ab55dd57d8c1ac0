"""`inspect --weights` names weights that are damaged; a healthy export, new biases and norms are silent."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, helper
from onnx.numpy_helper import from_array, to_array
from support.graph_faults import EXPORTS, broken
from support.isolated import kvdoctor
from support.sampling import sampled

WEIGHT, BIAS = "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.bias"


def suspects(model: Path, *options: str) -> list[dict[str, Any]]:
    done = kvdoctor("inspect", model, "--format", "json", *options)
    assert "Traceback" not in done.stderr
    return [one for one in json.loads(done.stdout)["findings"] if one["name"] == "suspect-weights"]


def damaged(name: str, value: float, everywhere: bool) -> Callable[[GraphProto], None]:
    def operate(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        values = to_array(tensor).copy()
        values[...] = value if everywhere else values
        values.flat[0] = value
        tensor.CopyFrom(from_array(values, name))

    return operate


DAMAGES = {
    "zero": (0.0, True, "warning", "all zeros"),
    "constant": (0.5, True, "warning", "repeats one number"),
    "NaN": (np.nan, False, "error", "NaN"),
    "Inf": (np.inf, False, "error", "Inf"),
    "large": (1e6, False, "warning", "larger than 10,000"),
}


@pytest.mark.parametrize("kind", sampled(DAMAGES, 2))
def test_damaged_weights_are_named_with_layer_and_role(kind: str, tmp_path: Path) -> None:
    value, everywhere, severity, words = DAMAGES[kind]
    model = broken("gpt2", "model.onnx", damaged(WEIGHT, value, everywhere), tmp_path)
    assert suspects(model) == []
    (finding,) = suspects(model, "--weights")
    assert (finding["severity"], finding["subject"]) == (severity, [WEIGHT])
    assert words in finding["cause"]
    assert f"{WEIGHT} (layer 1, float32[32, 128], input 1 of Gemm)" in finding["observed"]


@pytest.mark.parametrize("value", sampled([0.0, 1.0, -1e9], 3))
def test_new_biases_and_those_that_close_tokens_are_silent(value: float, tmp_path: Path) -> None:
    assert suspects(broken("gpt2", "model.onnx", damaged(BIAS, value, True), tmp_path), "--weights") == []


def test_a_tied_table_counts_where_it_is_multiplied(tmp_path: Path) -> None:
    """The embedding table is the head as well: Inf in it reaches the logits."""

    def tie(graph: GraphProto) -> None:
        damaged("transformer.wte.weight", np.inf, False)(graph)
        head = next(node for node in graph.node if node.output[0] == "logits")
        graph.node.insert(0, helper.make_node("Transpose", ["transformer.wte.weight"], ["turned"], perm=[1, 0]))
        head.input[1] = "turned"

    (finding,) = suspects(broken("gpt2", "model.onnx", tie, tmp_path), "--weights")
    assert (finding["severity"], finding["subject"]) == ("error", ["transformer.wte.weight"])


def test_the_scale_of_a_rounded_weight_counts(tmp_path: Path) -> None:
    def round_weight(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == WEIGHT)
        values = to_array(tensor)
        graph.initializer.remove(tensor)
        parts = {"q": np.ones(values.shape, np.int8), "q_scale": np.array(np.nan, np.float32)}
        graph.initializer.extend(from_array(value, name) for name, value in parts.items())
        graph.node.insert(0, helper.make_node("DequantizeLinear", ["q", "q_scale"], [WEIGHT]))

    found = suspects(broken("gpt2", "model.onnx", round_weight, tmp_path), "--weights")
    assert {(one["severity"], *one["subject"]) for one in found} == {("error", "q_scale"), ("warning", "q")}


@pytest.mark.parametrize("rows", sampled([2, 64], 2))
def test_a_small_table_of_zeros_is_silent(rows: int, tmp_path: Path) -> None:
    """As that of the types of tokens, which RoBERTa does not use."""

    def add_table(graph: GraphProto) -> None:
        graph.initializer.append(from_array(np.zeros((rows, 32), np.float32), "types"))
        graph.initializer.append(from_array(np.array([0]), "type"))
        graph.node.append(helper.make_node("Gather", ["types", "type"], ["type_row"]))

    assert len(suspects(broken("gpt2", "model.onnx", add_table, tmp_path), "--weights")) == (rows > 16)


@pytest.mark.parametrize("name", sampled(["gpt2", "llama-gqa", "t5", "whisper", "marian-4.46.3"], 3))
def test_healthy_exports_are_silent(name: str) -> None:
    assert suspects(EXPORTS / name, "--weights") == []


def test_copies_are_named_by_an_inspection_that_may_read_weights(tmp_path: Path) -> None:
    def twice(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == WEIGHT)
        other = next(t for t in graph.initializer if t.name == "transformer.h.0.mlp.c_fc.weight")
        other.CopyFrom(from_array(to_array(tensor), other.name))

    model = broken("gpt2", "model.onnx", twice, tmp_path)
    for options, expected in (((), False), (("--weights",), True)):
        done = kvdoctor("inspect", model, "--format", "json", *options)
        names = [one["name"] for one in json.loads(done.stdout)["findings"]]
        assert ("duplicate-weights" in names) == expected
