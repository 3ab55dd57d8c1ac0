"""Twins: rounding is told from a fault, in models that compute in float16 or quantize."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import command_line
from support.rounded_models import (
    EXPORTS,
    Rounding,
    Surgery,
    as_bfloat16_weights,
    as_float,
    as_float16,
    as_fused_int8,
    as_int8,
    as_static_int8,
    healthy,
    made,
    neighbors_mixed,
    past_ignored,
    positions_restart,
)
from support.sampling import sampled

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.float32 import write_float32_copy
from kvdoctor.diagnose.float32.rounding import unround_integers
from kvdoctor.diagnose.float32.widen import widen
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import CannotCheck
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

DECODERS = ["gpt2", "llama-gqa"]
ROUNDINGS = [as_float16, as_int8, as_fused_int8, as_static_int8, as_bfloat16_weights]
EXACT = 2e-5
"""Largest difference of a right float32 copy, in standard deviations of the logits; a hundredth of that of float16."""


def run_of(report: Report, experiment: str) -> Run:
    return next(run for run in report.runs if run.experiment == experiment)


def severe(report: Report) -> list[str]:
    return [finding.name for finding in report.findings if finding.severity != "note"]


def float32_copy_of(folder: Path, target: Path) -> CacheContract:
    found = open_folder(str(folder))
    contract = read_contract(found.stacks[0], found.side_cars)
    target.mkdir()
    return write_float32_copy(found.files, contract, target)


@pytest.mark.parametrize("name", sampled(DECODERS, 2))
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda one: one.__name__)
def test_a_healthy_model_that_rounds_is_healthy(
    name: str, rounding: Rounding, tmp_path: Path, runtime: Runtime
) -> None:
    report = step_test(str(made(tmp_path / "model", name, healthy, rounding)), runtime=runtime)
    assert (report.verdict, severe(report)) == ("healthy", [])
    judged = run_of(report, "plain-loop")
    assert judged.unrounded is not None
    assert judged.unrounded.outcome == "passed"
    assert judged.unrounded.worst < EXACT
    assert not any(entry.essential for entry in report.not_checked)


@pytest.mark.parametrize("name", sampled(DECODERS, 2))
@pytest.mark.parametrize("rounding", sampled([as_float, *ROUNDINGS], 2), ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("surgery", "check"),
    [
        (positions_restart, "positions-not-offset"),
        (past_ignored, "past-ignored"),
        (neighbors_mixed, "batch-rows-interact"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_a_fault_is_named_whatever_is_rounded(  # noqa: PLR0913, PLR0917 - a table of models
    name: str, rounding: Rounding, surgery: Surgery, check: str, tmp_path: Path, runtime: Runtime
) -> None:
    report = step_test(str(made(tmp_path / "model", name, surgery, rounding)), runtime=runtime)
    assert severe(report) == [check]


@pytest.mark.parametrize("seed", sampled(range(4), 2))
def test_what_rounding_leaves_open_is_settled(seed: int, tmp_path: Path, runtime: Runtime) -> None:
    model = made(tmp_path / "model", "llama-gqa", healthy, as_int8)
    report = step_test(str(model), Options(seed=seed), runtime)
    unclear = [run for run in report.runs if run.by_rounding]
    assert report.verdict == "healthy"
    assert len([e for e in report.not_checked if "rounding alone" in e.reason]) == len(unclear)
    assert all(run.shows == "passed" for run in unclear)


def test_the_document_holds_both_figures(tmp_path: Path) -> None:
    model = made(tmp_path / "model", "gpt2", healthy, as_int8)
    _, document = command_line.report("step-test", model)
    plain = next(run for run in document["runs"] if run["experiment"] == "plain-loop")
    own = max(step["difference"]["relative"] for step in plain["steps"])
    assert own > 1e-2
    assert max(plain["unrounded"]["relative"]) < EXACT
    assert plain["unrounded"]["own"] == plain["outcome"] == "passed"
    assert "unrounded_seconds" in document["measured"]["decoder"]


@pytest.mark.parametrize("name", sampled(["marian-4.57.6", "t5", "whisper"], 3))
def test_branches_and_encoders_have_float32_copies(name: str, tmp_path: Path) -> None:
    target = tmp_path / "int8"
    target.mkdir()
    for file in (EXPORTS / name).glob("*.onnx"):
        as_int8(file, target / file.name)
    (target / "config.json").write_bytes((EXPORTS / name / "config.json").read_bytes())
    copy = float32_copy_of(target, tmp_path / "copy")
    assert copy.exactness == "float"
    for file in (tmp_path / "copy").glob("*.onnx"):
        onnx.checker.check_model(str(file))
        operators = {node.op_type for graph in _graphs(onnx.load(file).graph) for node in graph.node}
        assert not operators & {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"}


def test_user_files_are_only_read(tmp_path: Path, runtime: Runtime) -> None:
    model = made(tmp_path / "model", "gpt2", healthy, as_float16)
    onnx.save(onnx.load(model / "model.onnx"), model / "model.onnx", save_as_external_data=True, location="w.bin")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_nlink) for path in model.iterdir()}
    report = step_test(str(model), runtime=runtime)
    assert report.verdict == "healthy"
    assert run_of(report, "plain-loop").unrounded is not None
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_nlink) for path in model.iterdir()}
    assert before == after


def test_there_is_no_float32_copy_beyond_the_memory_limit(tmp_path: Path) -> None:
    model = made(tmp_path / "model", "llama-gqa", positions_restart, as_float16)
    folder = open_folder(str(model))
    data = folder.files[0].path
    big = onnx.load(data)
    big.graph.initializer.append(TensorProto(name="unused", data_type=TensorProto.FLOAT16, dims=[1 << 29]))
    big.graph.initializer[-1].data_location = TensorProto.EXTERNAL
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", str(1 << 30))):
        big.graph.initializer[-1].external_data.add(key=key, value=value)
    with (model / "w.bin").open("wb") as file:
        file.truncate(1 << 30)
    onnx.save(big, data)
    report = step_test(str(model), Options(max_memory=3000))
    assert run_of(report, "plain-loop").unrounded is None
    assert any("too much for the memory limit" in e.reason and not e.essential for e in report.not_checked)


def test_integers_that_are_no_operands_have_no_float32_copy(tmp_path: Path) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("Transpose", ["q"], ["t"]),
        helper.make_node("DequantizeLinear", ["t", "s", "z"], ["y"]),
    ]

    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:]))
    with pytest.raises(CannotCheck, match="Transpose reads the output of DynamicQuantizeLinear"):
        unround_integers(model)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize("raw", [True, False])
def test_values_survive_widening(kind: int, raw: bool) -> None:
    exact = np.array([0.0, 1.0, -2.5, 0.15625, 65280.0, 2.0**-14], np.float32)
    bits = exact.astype(np.float16).view(np.uint16) if kind == TensorProto.FLOAT16 else (exact.view(np.uint32) >> 16)
    tensor = TensorProto(name="c", data_type=kind, dims=[6])
    if raw:
        tensor.raw_data = bits.astype("<u2").tobytes()
    else:
        tensor.int32_data.extend(int(bit) for bit in bits)
    nodes = [helper.make_node("Constant", [], ["a"], value=tensor), helper.make_node("Cast", ["a"], ["y"], to=kind)]
    out = helper.make_tensor_value_info("y", kind, [6])
    model = helper.make_model(helper.make_graph(nodes, "g", [], [out], [tensor]))
    widen(model)
    assert model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert model.graph.node[1].attribute[0].i == TensorProto.FLOAT
    for widened in (model.graph.node[0].attribute[0].t, model.graph.initializer[0]):
        assert np.array_equal(numpy_helper.to_array(widened), exact)


def test_a_type_that_a_function_is_given_is_widened() -> None:
    body = helper.make_node("Cast", ["a"], ["b"])
    body.attribute.add(name="to", type=onnx.AttributeProto.INT, ref_attr_name="kind")
    opset = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", "As", ["a"], ["b"], [body], opset[:1], ["kind"])
    call = helper.make_node("As", ["x"], ["y"], domain="local", kind=TensorProto.FLOAT16)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1]) for name in ("x", "y")]
    graph = helper.make_graph([call], "g", values[:1], values[1:])
    model = helper.make_model(graph, functions=[function], opset_imports=opset)
    widen(model)
    assert model.graph.node[0].attribute[0].i == TensorProto.FLOAT


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
