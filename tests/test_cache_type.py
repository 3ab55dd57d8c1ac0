"""Caches in a narrower type: what they cost, converted and proved, refused by node, and faulty ones not proved."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.isolated import EXPORTS
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor import api
from kvdoctor.addons.conversions import api as conversions
from kvdoctor.addons.conversions import pipeline
from kvdoctor.addons.conversions.graphs.registry import Asked, Converted, read_asked
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.addons.conversions.pipeline import ConvertRequest
from kvdoctor.contract import SCALE_SUFFIX
from kvdoctor.decode.stored_cache import measure_drift, read_stored, round_values, row_scales
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report import formats
from kvdoctor.report.document import Report, exit_code

FIXTURES = load_all()
DECODER = "decoder-only-healthy"
STORED = {"float16": "float16", "int8": "int8", "int4": "uint8"}


def write(folder: Path, name: str = DECODER) -> Path:
    folder.mkdir()
    FIXTURES[name].write(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def failed(report: Report) -> list[str]:
    assert report.repair is not None
    return [f"{entry.claim}: {entry.detail}" for entry in report.repair.proof if not entry.holds]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (DECODER, "int4"),
        ("merged-healthy", "int8"),
        *(pytest.param(DECODER, kind, marks=SLOW) for kind in ("float16", "int8")),
        *(pytest.param("merged-healthy", kind, marks=SLOW) for kind in ("float16", "int4")),
        *(pytest.param("pair-healthy", kind, marks=SLOW) for kind in ("float16", "int8", "int4")),
    ],
)
def test_a_cache_is_stored_in_another_type(name: str, kind: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", name), tmp_path / "out"
    before = contents(source)
    report = conversions.convert(source, out, cache_type=kind)
    assert not failed(report)
    assert contents(source) == before
    assert (exit_code(report, "error"), report.verdict) == (0, "healthy")
    for stack in report.stacks:
        assert stack.contract is not None
        values = [slot for slot in stack.contract.slots if slot.part in ("key", "value")]
        scales = {slot.past: slot for slot in stack.contract.slots if slot.part.endswith("-scale")}
        assert {slot.dtype for slot in values} == {STORED[kind]}
        assert set(scales) == (set() if kind == "float16" else {f"{slot.past}{SCALE_SUFFIX}" for slot in values})
        for slot in values if scales else ():
            scale = scales[f"{slot.past}{SCALE_SUFFIX}"]
            same = (scale.kind, scale.layer, scale.growth, scale.carry, scale.axes)
            assert same == (slot.kind, slot.layer, slot.growth, slot.carry, slot.axes)
            assert scale.size("head_dim") == 1
    for path in out.glob("*.onnx"):
        onnx.checker.check_model(onnx.load(str(path)), full_check=True)


@SLOW
@pytest.mark.parametrize(
    "name",
    [
        "layout-bloom-transposed-healthy",
        "layout-tensor-scatter-healthy",
        "layout-dynamo-anonymous-healthy",
        "layout-ort-gpt2-stacked-healthy",
        "decoder-only-padded-head-healthy",
    ],
)
def test_other_layouts_are_stored_in_8_bits(name: str, tmp_path: Path) -> None:
    report = conversions.convert(write(tmp_path / "model", name), tmp_path / "out", cache_type="int8")
    assert not failed(report)
    assert (tmp_path / "out").is_dir()
    assert exit_code(api.step_test(tmp_path / "out"), "error") == 0


@pytest.mark.parametrize(
    ("name", "kind"), [(DECODER, "int4"), pytest.param("decoder-only-padded-head-healthy", "float16", marks=SLOW)]
)
def test_exact_layers_stay_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    """The first layer is rounded and the last one is not, although its rows are computed from rounded ones."""
    report = conversions.convert(write(tmp_path / "model", name), tmp_path / "out", cache_type=kind, exact_layers="1")
    assert not failed(report)
    assert (exit_code(report, "error"), report.verdict) == (0, "healthy")
    (stack,) = report.stacks
    assert stack.contract is not None
    types = {(slot.layer, slot.dtype) for slot in stack.contract.slots if slot.part in ("key", "value")}
    assert types == {(0, STORED[kind]), (1, "float")}
    scaled = {slot.layer for slot in stack.contract.slots if slot.part.endswith("-scale")}
    assert scaled == (set() if kind == "float16" else {0})
    assert report.repair is not None
    (costs,) = report.repair.cache_costs
    assert costs.exact_layers == (1,)
    assert costs.bytes_before is not None
    assert costs.bytes_after is not None
    assert costs.bytes_before / 2 < costs.bytes_after < costs.bytes_before


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"exact_layers": "0"}, "give --cache-type too"),
        ({"cache_type": "int8", "exact_layers": "2"}, "it has no layer 2; its cache has layers 0, 1"),
        ({"cache_type": "int8", "exact_layers": "0,1"}, "leaves no layer to convert"),
        ({"cache_type": "int8", "exact_layers": "-1"}, "it has no layer -1"),
    ],
)
def test_exact_layers_that_make_no_sense_are_refused(choices: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        conversions.convert(write(tmp_path / "model"), tmp_path / "out", **choices)


@SLOW
def test_a_real_export_is_stored_in_8_bits(tmp_path: Path) -> None:
    """Keys of its first step are transposed for the product and for the present apart: both are rounded."""
    report = conversions.convert(EXPORTS / "marian-4.46.3", tmp_path / "out", cache_type="int8")
    assert not failed(report)
    assert exit_code(report, "error") == 0


@SLOW
def test_a_static_cache_is_stored_in_8_bits(tmp_path: Path) -> None:
    report = conversions.convert(EXPORTS / "gpt2", tmp_path / "out", cache="static=24", cache_type="int8")
    assert not failed(report)
    (stack,) = report.stacks
    assert stack.contract is not None
    assert {slot.growth for slot in stack.contract.slots} == {"static"}
    assert {slot.dtype for slot in stack.contract.slots} == {"int8", "float16"}


def test_a_dry_run_shows_what_it_costs_and_writes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    report = conversions.convert(source, cache_type="int8")
    assert report.repair is not None
    assert not list(tmp_path.glob("out*"))
    (costs,) = report.repair.cache_costs
    assert (costs.bytes_before, costs.bytes_after) == (128, 48)
    plans = [(one.keys, one.values, one.layer) for one in costs.costs]
    shared = [(one, None, None) for one in ("token", "channel", "head", "tensor")]
    shared += [(None, one, None) for one in ("token", "channel", "head", "tensor")]
    assert sorted(plans, key=str) == sorted(
        [("token", "token", None), *shared, *(("token", "token", n) for n in (0, 1))], key=str
    )
    assert all(one.divergence is not None and one.divergence > 0 for one in costs.costs)
    document = json.loads(formats.render(report, "json"))
    assert document["repair"]["cache_costs"][0]["cache_type"] == "int8"
    for name in ("text", "markdown", "html"):
        assert "128 -> 48 bytes for each token" in formats.render(report, name).replace("\\>", ">").replace("&gt;", ">")


@SLOW
def test_fewer_bits_cost_more(tmp_path: Path) -> None:
    source, found = write(tmp_path / "model"), []
    for kind in ("float16", "int8", "int4"):
        report = conversions.convert(source, cache_type=kind)
        assert report.repair is not None
        found.append(report.repair.cache_costs[0].costs[0].divergence or 0.0)
    assert found[0] < found[1] / 10 < found[2] / 100


def test_the_copy_stores_what_the_arithmetic_says(tmp_path: Path) -> None:
    """The nodes of the graph and the numpy code that proofs read caches with agree to the last bit."""
    for kind in ("int8", "int4"):
        out = tmp_path / kind
        conversions.convert(write(tmp_path / f"model-{kind}"), out, cache_type=kind)
        session = ort.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
        original = ort.InferenceSession(
            str(tmp_path / f"model-{kind}" / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        tokens = np.arange(4, dtype=np.int64).reshape(1, -1)
        feeds: dict[str, Any] = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": tokens}
        empty = {
            port.name: np.zeros((1, 2, 0, 4), np.float32) for port in original.get_inputs() if port.name not in feeds
        }
        stored = {
            port.name: np.zeros(
                (1, 2, 0, port.shape[-1]),
                {"tensor(float16)": np.float16, "tensor(int8)": np.int8}.get(port.type, np.uint8),
            )
            for port in session.get_inputs()
            if port.name not in feeds
        }
        (exact,) = original.run(["present.0.value"], {**feeds, **empty})
        values, scales = session.run(["present.0.value", "present.0.value_scale"], {**feeds, **stored})
        read = read_stored(values, scales, kind, 3)
        assert np.array_equal(scales, row_scales(exact, kind, (3,)))
        assert np.array_equal(read, round_values(exact, kind, scales))
        assert measure_drift((read, exact), scales, 2, float(exact.std())) == 0
        assert measure_drift((np.roll(read, 1, axis=2), exact), scales, 2, float(exact.std())) > 0.1


def test_rows_of_zeros_and_large_numbers_survive() -> None:
    rows = np.array([[0, 0, 0, 0], [1e-9, 0, 0, 0], [6e4, -6e4, 3, 0]], np.float32)
    for kind in ("int8", "int4"):
        scales = row_scales(rows, kind, (1,))
        read = round_values(rows, kind, scales)
        assert np.isfinite(read).all()
        assert np.abs(read - rows).max() <= np.abs(scales.astype(np.float32)).max()
        again = round_values(read, kind, row_scales(read, kind, (1,)))
        assert np.array_equal(again, read), "a row that is rounded again stays"


@pytest.mark.parametrize(
    ("name", "kind", "named"),
    [
        (
            "layout-gqa-growing-healthy",
            "int8",
            "the node com.microsoft.GroupQueryAttention .* takes 'past_key_values.0.key'",
        ),
        ("layout-attention-23-healthy", "int8", "the node Attention .* takes"),
        ("decoder-only-half-cache-healthy", "float16", "is stored as float16 already"),
        ("layout-delta-healthy", "int8", "the loop changes the cache of .* itself"),
        ("layout-scatter-static-healthy", "int8", "the node Transpose .* new rows do not meet that past"),
        ("layout-cross-given-healthy", "int8", "is made by the encoder graph"),
        ("layout-mamba-states-healthy", "int8", "it has no cache of keys and values"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_node(name: str, kind: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        conversions.convert(write(tmp_path / "model", name), tmp_path / "out", cache_type=kind)
    assert not (tmp_path / "out").exists()


def test_a_stored_cache_is_not_stored_again(tmp_path: Path) -> None:
    conversions.convert(write(tmp_path / "model"), tmp_path / "out", cache_type="int8")
    with pytest.raises(UsageError, match="is stored as int8 already"):
        conversions.convert(tmp_path / "out", tmp_path / "again", cache_type="int4")


Spoil = Callable[[onnx.GraphProto], None]


def faulty(spoil: Spoil, **choices: Any) -> Asked:
    """A conversion with a mistake."""
    (asked,) = read_asked(ConvertChoices(**choices))

    def convert(context: RepairContext, choice: Any) -> Converted:
        made = asked.conversion.convert(context, choice)
        spoil(context.model("model.onnx").graph)
        return made

    return Asked(replace(asked.conversion, convert=convert), asked.choice)


def node_of(graph: onnx.GraphProto, output: str) -> onnx.NodeProto:
    return next(node for node in graph.node if output in node.output)


def wrong_scale(graph: onnx.GraphProto) -> None:
    """Values are stored by a scale that is a third smaller than the one that is returned."""
    for node in [one for one in graph.node if one.op_type == "Div" and one.output[0].startswith("cache_type.share")]:
        name = f"{node.output[0]}.wrong"
        factor = onnx.numpy_helper.from_array(np.array(1.5, np.float32), f"{name}.factor")
        graph.initializer.append(factor)
        place = list(graph.node).index(node) + 1
        graph.node.insert(place, onnx.helper.make_node("Mul", [node.output[0], factor.name], [name]))
        for other in graph.node:
            if other.op_type == "Round" and other.input[0] == node.output[0]:
                other.input[0] = name


def scales_of_another_head(graph: onnx.GraphProto) -> None:
    """The scales of new rows are those of the other head."""
    order = onnx.numpy_helper.from_array(np.array([1, 0], np.int64), "other_heads")
    graph.initializer.append(order)
    node = node_of(graph, "present.0.value_scale")
    graph.node.insert(
        list(graph.node).index(node), onnx.helper.make_node("Gather", [node.input[1], order.name], ["turned"], axis=1)
    )
    node_of(graph, "present.0.value_scale").input[1] = "turned"


def values_for_keys(graph: onnx.GraphProto) -> None:
    """Stored keys and values of a layer are joined to each other's past."""
    for suffix in ("", "_scale"):
        key, value = (node_of(graph, f"present.0.{part}{suffix}") for part in ("key", "value"))
        key.input[1], value.input[1] = value.input[1], key.input[1]
    names = [node for node in graph.node if node.op_type == "Concat" and node.output[0].startswith("present.0")]
    onnx_order = sorted(names, key=lambda node: node.output[0])
    assert len(onnx_order) == 4
    for node in onnx_order:  # the new rows of both must be there
        graph.node.remove(node)
    last = max(
        i
        for i, node in enumerate(graph.node)
        if {"present.0.key", "present.0.value"}.isdisjoint(node.input)
        and any(name in node.output for one in onnx_order for name in one.input)
    )
    for at, node in enumerate(onnx_order):
        graph.node.insert(last + 1 + at, node)


def new_rows_in_front(graph: onnx.GraphProto) -> None:
    """New rows stand in front of the past, so every row is at another place."""
    for node in graph.node:
        if node.op_type == "Concat" and node.output[0].startswith("present."):
            node.input[:] = [node.input[1], node.input[0]]


def scales_of_the_last_row(graph: onnx.GraphProto) -> None:
    """All scales come in the order of the past turned by one row: values and scales no longer belong together."""
    for node in graph.node:
        if node.op_type == "Concat" and node.output[0].endswith("_scale"):
            node.input[:] = [node.input[1], node.input[0]]


@pytest.mark.parametrize(
    "spoil",
    sampled([wrong_scale, scales_of_another_head, values_for_keys, new_rows_in_front, scales_of_the_last_row], 2),
)
@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=SLOW)])
def test_a_copy_with_a_mistake_is_not_written(spoil: Spoil, kind: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "model"), tmp_path / "out"
    asked = faulty(spoil, cache_type=kind)
    report = pipeline.convert(ConvertRequest(str(source), str(out), ConvertChoices(), (asked,)), Options())
    assert any("but for the rounding" in text and "first difference" in text for text in failed(report)), failed(report)
    assert not out.exists()
    assert exit_code(report, "error") == 1


def rounded_again(graph: onnx.GraphProto) -> None:
    """The keys of the last layer, which stays as it is, are returned a hundredth larger than they are attended to."""
    node_of(graph, "present.1.key").output[0] = "attended"
    for node in graph.node:
        node.input[:] = ["attended" if name == "present.1.key" else name for name in node.input]
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1.01, np.float32), "larger"))
    graph.node.append(onnx.helper.make_node("Mul", ["attended", "larger"], ["present.1.key"]))


def test_a_copy_that_rounds_exact_layers_is_not_written(tmp_path: Path) -> None:
    source, out = write(tmp_path / "model"), tmp_path / "out"
    asked = faulty(rounded_again, cache_type="int8", exact_layers=(1,))
    report = pipeline.convert(ConvertRequest(str(source), str(out), ConvertChoices(), (asked,)), Options())
    assert any("present.1.key, as it is read, is off by" in text for text in failed(report)), failed(report)
    assert not out.exists()


def test_a_pair_of_one_stack_is_left_whole(tmp_path: Path) -> None:
    """All decoders of a folder are converted, or none: one that cannot be is named."""
    source = write(tmp_path / "model")
    shutil.copy(write(tmp_path / "other", "layout-gqa-growing-healthy") / "model.onnx", source / "model_gqa.onnx")
    with pytest.raises(UsageError, match="GroupQueryAttention"):
        conversions.convert(source, tmp_path / "out", cache_type="int8")
    assert not (tmp_path / "out").exists()
