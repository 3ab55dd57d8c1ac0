"""Lowering a model: what it may change, what it must not, and what it names instead."""

import json
from pathlib import Path

import onnx
import psutil
import pytest
from onnx import TensorProto, helper
from support import command_line
from support.command_line import Done
from support.text_fixtures import compile_text, load_all

from kvdoctor.decode.messages import LimitsMeasured, MeasureJob
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.repair.lowering.lower import VersionLimit, find_oldest_ir, limit_for_targets, lower_model
from kvdoctor.repair.lowering.opset import CannotChangeVersion
from kvdoctor.runtime import targets
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import Limits
from kvdoctor.runtime.release_environments import measure_limits
from kvdoctor.runtime.targets import parse_targets

ROOT = Path(__file__).parent.parent

PLAIN = """
<ir_version: 10, opset_import: ["": 21]>
decoder (float[b, 8] x, bool flag) => (float[b, 1] y) <int64[1] axes = {-1}, int64[2] shape = {-1, 8}> {
    r = Reshape <allowzero = 0> (x, shape)
    m = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (r, axes)
    y = If (flag) <
        then_branch = one () => (float[b, 1] a) { a = ReduceMax (r, axes) },
        else_branch = other () => (float[b, 1] c) { c = Add (m, m) }
    >
}
"""


def opset(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


def test_nodes_that_changed_are_written_in_the_older_opset_also_in_bodies() -> None:
    model = compile_text(PLAIN)
    changes = lower_model(model, VersionLimit(ir=8, opset=13), "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, opset(model)) == (8, 13)
    nodes = {node.output[0]: node for node in model.graph.node}
    assert [attribute.name for attribute in nodes["r"].attribute] == []
    assert list(nodes["m"].input) == ["r"]
    (branch,) = (a.g for a in nodes["y"].attribute if a.name == "then_branch")
    assert {attribute.name: list(attribute.ints) for attribute in branch.node[0].attribute}["axes"] == [-1]
    assert {tensor.name for tensor in model.graph.initializer} == {"shape"}, "nothing reads the axes any more"
    assert {(change.where, change.before, change.after) for change in changes} >= {
        ("opset", "21", "13"),
        ("IR version", "10", "8"),
    }


def test_the_lowered_model_computes_the_same() -> None:
    import numpy as np
    from onnx.reference import ReferenceEvaluator

    old, new = compile_text(PLAIN), compile_text(PLAIN)
    lower_model(new, VersionLimit(opset=13), "model.onnx")
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for flag in (True, False):
        feeds = {"x": x, "flag": np.array(flag)}
        assert np.array_equal(ReferenceEvaluator(old).run(None, feeds)[0], ReferenceEvaluator(new).run(None, feeds)[0])


def test_nothing_is_changed_where_the_model_asks_for_no_more() -> None:
    model = compile_text(PLAIN)
    assert lower_model(model, VersionLimit(ir=10, opset=21), "model.onnx") == ()
    assert lower_model(model, VersionLimit(ir=13, opset=26), "model.onnx") == ()
    assert model == compile_text(PLAIN)


@pytest.mark.parametrize(
    ("line", "to", "block"),
    [
        ("y = LayerNormalization (x, w)", 16, "LayerNormalization needs opset 17 (node n)"),
        ("y = Gelu (x)", 19, "Gelu needs opset 20"),
        ("y = Swish (x)", 23, "Swish needs opset 24"),
        ("y = Shape <start = 1> (x)", 14, "Shape of opset"),
        ("y = Reshape <allowzero = 1> (x, s)", 13, "Reshape of opset"),
    ],
)
def test_what_has_no_older_form_is_named_and_nothing_is_changed(line: str, to: int, block: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 24]>
    decoder (float[b, 8] x, int64[2] s) => (y) <float[8] w = {{1, 1, 1, 1, 1, 1, 1, 1}}> {{ [n] {line} }}"""
    model, before = compile_text(text), compile_text(text)
    with pytest.raises(CannotChangeVersion) as refusal:
        lower_model(model, VersionLimit(ir=8, opset=to), "model.onnx")
    assert block in str(refusal.value)
    assert f"--opset {to}" in str(refusal.value)
    assert model == before


def test_a_type_that_the_older_operator_does_not_take_blocks_it() -> None:
    text = """<ir_version: 10, opset_import: ["": 16]>
    decoder (bfloat16[b, 8] x) => (bfloat16[b, 8] y) { c = Constant <value = bool[1] {1}> () y = Where (c, x, x) }"""
    with pytest.raises(CannotChangeVersion, match="Where of opset 16"):
        lower_model(compile_text(text), VersionLimit(opset=15), "model.onnx")


@pytest.mark.parametrize(
    ("kind", "version"),
    [("FLOAT8E4M3FN", 9), ("INT4", 10), ("UINT4", 10), ("FLOAT4E2M1", 11), ("FLOAT8E8M0", 12), ("INT2", 13)],
)
def test_an_element_type_needs_its_ir_version(kind: str, version: int) -> None:
    model = compile_text(PLAIN)
    model.ir_version = 13
    tensor = TensorProto(name="w", data_type=TensorProto.DataType.Value(kind), dims=[4], raw_data=b"\0\0\0\0")
    model.graph.initializer.append(tensor)
    assert find_oldest_ir(model) == (version, f"{kind} (weight w)")
    with pytest.raises(CannotChangeVersion, match=f"{kind}.*needs IR version {version}"):
        lower_model(model, VersionLimit(ir=version - 1), "model.onnx")
    lower_model(model, VersionLimit(ir=version), "model.onnx")
    assert model.ir_version == version


def test_functions_are_lowered_with_the_model() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18, "own": 1]>
    decoder (float[b, 8] x) => (float[b, 1] y) { y = own.mean (x) }
    <opset_import: ["": 18], domain: "own">
    mean (x) => (y) { y = Identity (x) }
    """
    model = compile_text(text)
    lower_model(model, VersionLimit(ir=8, opset=13), "model.onnx")
    assert [entry.version for entry in model.functions[0].opset_import] == [13]
    with pytest.raises(CannotChangeVersion, match="function mean needs IR version 8"):
        lower_model(model, VersionLimit(ir=7), "model.onnx")


def gqa(**attributes: object) -> onnx.ModelProto:
    names = ["q", "k", "v", "pk", "pv", "n", "t", "", "", "", "", ""]
    node = helper.make_node(
        "GroupQueryAttention", names, ["y"], "n", domain="com.microsoft", num_heads=2, kv_num_heads=1, **attributes
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names if name]
    graph = helper.make_graph([node], "decoder", inputs, [onnx.ValueInfoProto(name="y")])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def test_what_says_nothing_is_left_out_for_a_runtime_that_does_not_know_it() -> None:
    model = gqa(softcap=0.0, smooth_softmax=0, scale=0.25)
    changes = lower_model(model, limit_for_targets(parse_targets(["onnxruntime==1.18.1"])), "model.onnx")
    (node,) = model.graph.node
    assert {attribute.name for attribute in node.attribute} == {"num_heads", "kv_num_heads", "scale"}
    assert list(node.input) == ["q", "k", "v", "pk", "pv", "n", "t", "", ""]
    assert len(changes) == 3


def test_what_says_something_is_kept_and_named() -> None:
    model = gqa(softcap=30.0)
    with pytest.raises(CannotChangeVersion, match="attribute softcap of com"):
        lower_model(model, limit_for_targets(parse_targets(["onnxruntime==1.18.1"])), "model.onnx")
    assert model == gqa(softcap=30.0)


def test_the_least_of_all_targets_is_wanted() -> None:
    targets = parse_targets(["onnxruntime==1.22.1", "onnxruntime==1.16.3"])
    assert (limit_for_targets(targets).ir, limit_for_targets(targets).opset) == (9, 19)
    assert not limit_for_targets(()).is_anything


def test_weights_outside_the_file_need_not_be_there(tmp_path: Path) -> None:
    model = compile_text(PLAIN)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="not-there.bin")
    model.graph.initializer.append(weight)
    lower_model(model, VersionLimit(ir=8, opset=13), "model.onnx")
    assert [tensor for tensor in model.graph.initializer if tensor.name == "w"] == [weight]


def run(*arguments: str | Path) -> Done:
    return command_line.run(*arguments, cwd=ROOT)


def test_what_cannot_be_lowered_as_asked_is_wrong_usage_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", "fixtures/exports/gpt2", "-o", out, "--opset", "14")
    assert done.returncode == 2
    assert "LayerNormalization needs opset 17" in done.stderr
    assert "--opset 14" in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_a_lowered_copy_is_proved_and_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        "convert", "fixtures/exports/llama-gqa", "-o", out, "--opset", "14", "--ir-version", "7", "--format", "json"
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0
    model = onnx.load(out / "model.onnx")
    assert (model.ir_version, opset(model)) == (7, 14)
    claims = {entry["claim"]: entry["holds"] for entry in report["repair"]["proof"]}
    assert claims["plain-loop logits equal to the original's, bit for bit"]
    assert all(claims.values())


def test_a_model_that_is_too_new_for_the_runtime_here_is_mended(tmp_path: Path) -> None:
    model = onnx.load(ROOT / "fixtures/exports/gpt2/model.onnx")
    model.ir_version = 99
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    report = json.loads(run("step-test", folder, "--format", "json").stdout)
    assert [finding["name"] for finding in report["findings"]] == ["ir-too-new"]
    assert report["findings"][0]["confidence"] == "confirmed"
    assert run("re-export", folder, "-o", out).returncode == 0
    assert run("gate", out).returncode == 0
    assert onnx.load(out / "model.onnx").ir_version < 99


@pytest.mark.parametrize("name", ["ir-too-new", "opset-too-new"])
def test_a_runtime_that_no_table_knows_is_asked_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "limits_of", lambda _: None)
    model = load_all()[name].write(tmp_path)
    report = step_test(str(model), Options())
    assert [finding.name for finding in report.findings] == [name]
    assert report.findings[0].confidence == "confirmed"


def test_a_file_that_the_runtime_here_refuses_is_not_passed_over_for_a_target(tmp_path: Path) -> None:
    """Targets that cannot be had say nothing of the file; the runtime that is here does."""
    model = load_all()["ir-too-new"].write(tmp_path)
    report = step_test(str(model), Options(targets=parse_targets(["onnxruntime==99.0.0"]), offline=True))
    assert [finding.name for finding in report.findings] == ["session-refused"]


@pytest.mark.slow
def test_a_target_that_no_table_knows_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "limits_of", lambda _: None)
    model, asked = load_all()["ir-too-new"].write(tmp_path), parse_targets(["onnxruntime==1.16.3"])
    report = step_test(str(model), Options(targets=asked))
    if report.targets[0].not_run:
        pytest.skip(str(report.targets[0].not_run))
    assert (report.targets[0].ir, report.targets[0].opset) == (9, 19)
    (found,) = report.findings
    assert (found.name, "onnxruntime==1.16.3 supports up to 9" in found.observed) == ("ir-too-new", True)


def test_a_worker_that_dies_when_it_is_asked_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "limits_of", lambda _: None)
    with Runtime(Limits()) as runtime:
        target = targets.of_release(runtime.greet())
        psutil.Process(runtime._worker._process.pid).kill()  # no other: one of them serves the tests to come
        assert measure_limits(target, runtime).limits is None
        assert measure_limits(target, runtime).limits is not None, "the next one lives"


def test_the_largest_numbers_that_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdoctor.runtime.worker import sessions

    monkeypatch.setattr(sessions, "_opens", lambda ir, opset: ir <= 14 and opset <= 28)
    assert sessions.measure_limits() == LimitsMeasured(14, 28)
    monkeypatch.setattr(sessions, "_opens", lambda *_: False)
    assert sessions.measure_limits() == LimitsMeasured(), "something else than a version is at fault"


def test_what_the_runtime_here_takes_is_what_the_table_says() -> None:
    with Runtime(Limits()) as runtime:
        here = targets.of_release(runtime.greet())
        (measured,) = (event for event in runtime.ask(MeasureJob()) if isinstance(event, LimitsMeasured))
    in_table = here.limits
    if in_table is None:
        pytest.skip(f"{here.words} is newer than the table of limits")
    assert (measured.ir, measured.opset) == (in_table.ir, in_table.opset)
