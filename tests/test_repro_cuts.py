"""The cuts that make a reproducer small, one by one: the spine, dropped outputs, smaller sizes, noise for weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper, parser
from support.isolated import EXPORTS
from support.text_fixtures import compile_text, load_all

from kvdoctor.addons.reproducer.layers import (
    PROBE,
    end_at_node,
    find_operator,
    find_spine,
    keep_outputs,
    last_dependency,
    name_nodes,
)
from kvdoctor.addons.reproducer.messages import CallScript, MadeArray, PriorOutput, ScriptCall, make_array
from kvdoctor.addons.reproducer.weights import INTEGERS, SizeMap, WeightReplacer, store_digests
from kvdoctor.model.edit import rename_reads
from kvdoctor.model.skeleton import payload_left_out, read_skeleton


def fixture(name: str, file: str = "model.onnx") -> onnx.ModelProto:
    return compile_text(load_all()[name].files[file])


def test_the_spine_is_the_residual_stream() -> None:
    graph = fixture("decoder-only-healthy").graph
    way = find_spine(graph, {"input_ids"}, "logits")
    assert way == ["input_ids", "tokens", "x0", "x1", "x2", "logits"]
    assert way[last_dependency(graph, way, "present.0.key") or 0] == "x0"
    assert way[last_dependency(graph, way, "present.1.key") or 0] == "x1"


def test_where_two_ways_do_not_meet_there_is_no_spine() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] a, float[n] b) => (float[n] c)'
        "{ x = Neg (a) y = Neg (b) c = Add (x, y) }"
    )
    assert find_spine(model.graph, {"a", "b"}, "c") == ["c"]
    assert find_spine(model.graph, {"a"}, "c") == ["a", "x", "c"]


def test_an_if_loses_outputs_in_both_branches() -> None:
    model = onnx.load(EXPORTS / "t5" / "decoder_model_merged.onnx")
    keep_outputs(model, {"present.1.decoder.key"})
    (switch,) = [node for node in model.graph.node if node.op_type == "If"]
    assert list(switch.output) == ["present.1.decoder.key"]
    assert [len(attribute.g.output) for attribute in switch.attribute] == [1, 1]
    names = {value.name for value in model.graph.input}
    assert "past_key_values.1.decoder.key" in names
    assert "past_key_values.1.decoder.value" not in names
    onnx.checker.check_model(model, full_check=True)


def test_a_layer_led_past_is_not_needed() -> None:
    model = fixture("decoder-only-healthy")
    rename_reads(model.graph, {"x1": "x0"})
    keep_outputs(model, {"logits"})
    left = {tensor.name for tensor in model.graph.initializer}
    assert {"w_q1", "w_tokens"} <= left
    assert not {"w_q0", "w_k0", "w_v0", "w_o0"} & left
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("name", ["step-fails", "cross-cache-emptied"])
def test_a_node_is_made_an_end(name: str) -> None:
    """In the main graph and in a branch."""
    merged = name == "cross-cache-emptied"
    file = "decoder_model_merged.onnx" if merged else "decoder_with_past_model.onnx"
    node = "/decoder/layers.0/encoder_attn/MatMul" if merged else "/decoder/layers.0/self_attn/Reshape"
    model = fixture(name, file)
    assert find_operator(model, node) == node.rpartition("/")[2]
    assert end_at_node(model, node)
    keep_outputs(model, {PROBE})
    assert [value.name for value in model.graph.output] == [PROBE]
    assert find_operator(model, node) is not None
    onnx.checker.check_model(model)
    assert not end_at_node(model, "no such node")


def test_nodes_without_names_are_numbered() -> None:
    model = fixture("decoder-only-healthy")
    name_nodes(model)
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


def test_sizes_by_their_number() -> None:
    sizes = SizeMap({58101: 32}, unit=32, factor=8)
    assert [sizes.of(number) for number in (58101, 512, 64, 32, 2048)] == [32, 64, 8, 4, 256]
    assert [sizes.of(number) for number in (-1, 0, 1, 8, 16, 33, 100)] == [-1, 0, 1, 8, 16, 33, 100]
    table = TensorProto(dims=[512, 512])
    assert sizes.dims(table, table=True) == [512, 64]
    assert sizes.dims(TensorProto(dims=[58101, 512]), table=True) == [32, 64]


def test_sizes_in_shape_constants() -> None:
    shape = numpy_helper.from_array(np.array([1, -1, 8, 64], np.int64))
    SizeMap(unit=32, factor=8).constant(shape)
    assert numpy_helper.to_array(shape).tolist() == [1, -1, 8, 8]


UNSEEN = {TensorProto.UNDEFINED, TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128}
KINDS = sorted(set(TensorProto.DataType.values()) - UNSEEN - {TensorProto.BOOL})


@pytest.mark.parametrize("kind", KINDS, ids=TensorProto.DataType.Name)
def test_noise_of_every_element_type(kind: int, tmp_path: Path) -> None:
    """As many bytes as the type asks for, and nothing of what stood there. (Booleans are masks, and are kept.)"""
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    model.graph.initializer.add(name="w", data_type=kind, dims=[99, 97], raw_data=b"\xff" * 2**18)
    cleaned = WeightReplacer(tmp_path, 0, SizeMap()).clean(model).graph.initializer[0]
    array = numpy_helper.to_array(cleaned)
    assert array.shape == (99, 97)
    if array.dtype.kind == "f":
        assert np.isfinite(array).all()
    assert b"\xff" * 32 not in cleaned.raw_data


def test_one_weight_stays_one_weight(tmp_path: Path) -> None:
    """Under two names, in a file and beside it."""
    weight = np.arange(2000, dtype=np.float32).reshape(40, 50)
    one = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [numpy_helper.from_array(weight, "a")]))
    other = onnx.helper.make_model(
        onnx.helper.make_graph([], "g", [], [], [numpy_helper.from_array(weight, n) for n in ("b", "c")])
    )
    numpy_helper.to_array(other.graph.initializer[1])
    other.graph.initializer[1].CopyFrom(numpy_helper.from_array(weight + 1, "c"))
    onnx.save(one, tmp_path / "one.onnx")
    onnx.save(other, tmp_path / "other.onnx")
    origins: dict[str, str] = {}
    noise = {}
    for name in ("one.onnx", "other.onnx"):
        skeleton = read_skeleton(tmp_path / name, INTEGERS, digests=True).model
        store_digests(skeleton, tmp_path)
        cleaned = WeightReplacer(tmp_path, 0, SizeMap(), origins=origins).clean(skeleton)
        noise |= {tensor.name: tensor.raw_data for tensor in cleaned.graph.initializer}
        assert not any(tensor.doc_string for tensor in cleaned.graph.initializer)
    assert noise["a"] == noise["b"] != noise["c"]


@pytest.mark.parametrize("whole", [False, True])
def test_integers_are_read_whole_on_request(whole: bool, tmp_path: Path) -> None:
    arrays = [np.arange(2000), np.arange(2000, dtype=np.float32), np.zeros((50, 50), np.bool_)]
    tensors = [numpy_helper.from_array(array, f"t{number}") for number, array in enumerate(arrays)]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], tensors)), tmp_path / "m.onnx")
    skeleton = read_skeleton(tmp_path / "m.onnx", INTEGERS if whole else frozenset())
    assert [payload_left_out(tensor) for tensor in skeleton.model.graph.initializer] == [not whole, True, not whole]


def test_a_script_is_trimmed_to_what_its_end_hangs_on() -> None:
    calls = (
        ScriptCall("reference run", "m", {"a": MadeArray("float", (1,))}, "logits"),
        ScriptCall("step 0", "m", {"a": MadeArray("float", (1,))}, "logits"),
        ScriptCall("step 1", "m", {"a": PriorOutput(1, "b")}, "logits"),
        ScriptCall("step 2", "m", {"a": PriorOutput(2, "b")}, "logits"),
    )
    script = CallScript("fails", calls).trimmed()
    assert [call.title for call in script.calls] == ["step 0", "step 1", "step 2"]
    assert [call.feeds["a"] for call in script.calls[1:]] == [PriorOutput(0, "b"), PriorOutput(1, "b")]


@given(
    st.sampled_from(["float", "float16", "double", "int64", "int32", "bool"]), st.lists(st.integers(0, 4), max_size=3)
)
def test_rules_make_arrays(dtype: str, shape: list[int]) -> None:
    size = int(np.prod(shape))
    for rule in (
        MadeArray(dtype, tuple(shape), fill=1.0),
        MadeArray(dtype, tuple(shape), seed=3),
        MadeArray(dtype, tuple(shape), numbers=(1.0,) * size),
    ):
        array = make_array(rule)
        assert array.shape == tuple(shape)
        assert array.dtype.name.removesuffix("_") in (dtype, f"{dtype}32", "float64")
        assert np.array_equal(array, make_array(rule))
