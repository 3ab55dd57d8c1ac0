"""Raising a model: every node in the newer opset, its numbers kept, its weights unread, or the reason why not."""

import json
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper
from onnxruntime import InferenceSession
from support.command_line import kvdoctor
from support.isolated import EXPORTS
from support.text_fixtures import compile_text, load_all

from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.repair.lowering.lower import change_versions
from kvdoctor.repair.lowering.opset import CannotChangeVersion

FILES = sorted(path.relative_to(EXPORTS).as_posix() for path in EXPORTS.glob("*/*.onnx"))

OLD = """
<ir_version: 4, opset_import: ["": 11, "com.microsoft": 1]>
decoder (float[b, 2, 8] x, bool flag) => (float[b, n, m] y) {
    s = Softmax <axis = 2> (x)
    t = Softmax <axis = 1> (x)
    u = ReduceSum <axes = [1], keepdims = 0> (s)
    v = Unsqueeze <axes = [1]> (u)
    w = Squeeze <axes = [1]> (v)
    w1 = Unsqueeze <axes = [1]> (w)
    l, r = Split <axis = 2> (t)
    k = ReduceMean <axes = [-1]> (l)
    j = Add (k, r)
    i = ReduceMax <axes = [-1]> (j)
    y = If (flag) <
        then_branch = one () => (float[b, n, m] a) { a0 = ReduceMean <axes = [2]> (w1) a = Add (a0, i) },
        else_branch = other () => (float[b, n, m] c) { c = Add (w1, i) }
    >
}
"""
FUNCTION = """
<ir_version: 8, opset_import: ["": 17, "own": 1]>
decoder (float[b, 8] x) => (float[b, 1] y) { y = own.mean (x) }
<opset_import: ["": 17], domain: "own">
mean (x) => (y) { y = ReduceMean <axes = [-1]> (x) }
"""
LOOP = """
<ir_version: 8, opset_import: ["": 17]>
decoder (float[b, 8] x, int64 n, bool go) => (float[b, 8] y) {
    y = Loop (n, go, x) <body = step (int64 i, bool on, float[b, 8] h) => (bool on2, float[b, 8] h2) {
        on2 = Identity (on)
        m = ReduceMean <axes = [-1]> (h)
        h2 = Add (h, m)
    }>
}
"""


def opset(model: onnx.ModelProto) -> int:
    return next(entry.version for entry in model.opset_import if entry.domain == "")


def values(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """What the runtime computes; the reference evaluator of onnx does not know the older meaning of Softmax."""
    return np.asarray(InferenceSession(model.SerializeToString()).run(None, feeds)[0])


@pytest.mark.parametrize("to", [13, 18, 21, 24])
@pytest.mark.parametrize("flag", [True, False])
def test_a_raised_model_computes_the_same(to: int, flag: bool) -> None:
    old, new = compile_text(OLD), compile_text(OLD)
    changes = change_versions(new, None, to, "model.onnx")
    onnx.checker.check_model(new, full_check=True)
    assert opset(new) == to
    assert {entry.domain: entry.version for entry in new.opset_import}["com.microsoft"] == 1
    assert ("opset", "11", str(to)) in {(change.where, change.before, change.after) for change in changes}
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32), "flag": np.array(flag)}
    np.testing.assert_allclose(values(new, feeds), values(old, feeds), rtol=1e-6)


def test_a_split_into_equal_parts_says_how_many() -> None:
    model = compile_text(OLD)
    change_versions(model, None, 21, "model.onnx")
    split = next(node for node in model.graph.node if node.op_type == "Split")
    assert {attribute.name: attribute.i for attribute in split.attribute} == {"axis": 2, "num_outputs": 2}


def test_functions_are_raised_with_the_model() -> None:
    old, new = compile_text(FUNCTION), compile_text(FUNCTION)
    change_versions(new, None, 21, "model.onnx")
    assert [entry.version for entry in new.functions[0].opset_import if entry.domain == ""] == [21]
    assert [node.op_type for node in new.functions[0].node] == ["Constant", "ReduceMean"]
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)}
    np.testing.assert_allclose(values(new, feeds), values(old, feeds), rtol=1e-6)


def test_the_body_of_a_loop_is_raised_with_the_model() -> None:
    old, new = compile_text(LOOP), compile_text(LOOP)
    change_versions(new, None, 21, "model.onnx")
    onnx.checker.check_model(new, full_check=True)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    feeds = {"x": x, "n": np.array(3), "go": np.array(True)}
    np.testing.assert_allclose(values(new, feeds), values(old, feeds), rtol=1e-6)


def test_what_the_exporter_left_at_a_node_stays_there() -> None:
    model = compile_text(OLD)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"['', '{node.output[0]}', 'op']")
    change_versions(model, None, 21, "model.onnx")
    scopes = {node.output[0]: [entry.value for entry in node.metadata_props] for node in model.graph.node}
    assert scopes["k"] == ["['', 'k', 'op']"], "a node that was rewritten"
    assert scopes["j"] == ["['', 'j', 'op']"], "a node that stays as it is"


def test_the_ir_version_follows_the_opset_unless_it_is_asked_for() -> None:
    model = compile_text(FUNCTION)
    change_versions(model, None, 21, "model.onnx")
    assert model.ir_version == helper.find_min_ir_version_for([helper.make_opsetid("", 21)])
    model = compile_text(FUNCTION)
    change_versions(model, 8, 21, "model.onnx")
    assert (model.ir_version, opset(model)) == (8, 21)
    change_versions(model, 11, None, "model.onnx")
    assert (model.ir_version, opset(model)) == (11, 21)
    change_versions(model, None, 19, "model.onnx")
    assert (model.ir_version, opset(model)) == (11, 19)
    assert change_versions(model, 11, 19, "model.onnx") == ()


def test_weights_that_an_old_file_lists_as_inputs_stay_constants() -> None:
    model = compile_text(
        '<ir_version: 3, opset_import: ["": 9]> g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}> '
        "{ y = Add (x, w) }"
    )
    change_versions(model, None, 17, "model.onnx")
    assert model.ir_version >= 4
    assert [value.name for value in model.graph.input] == ["x"]


@pytest.mark.parametrize(
    ("line", "own", "to", "block"),
    [
        ("y = Resize (x, e, s)", 17, 18, "Resize of opset 13 means something else in 18"),
        ("y = LayerNormalization <axis = -1> (x, x)", 15, 17, "LayerNormalization of opset 15 is the runtime's own"),
        ("y = Upsample (x, s)", 9, 13, "Upsample was removed before opset 13"),
    ],
)
def test_what_has_no_newer_form_is_named_and_nothing_is_changed(line: str, own: int, to: int, block: str) -> None:
    head = f'<ir_version: 8, opset_import: ["": {own}]> g (float[1, 1, 2, 2] x, float[4] s, float[0] e)'
    text = f"{head} => (float[a, b, c, d] y) {{ [n] {line} }}"
    model = compile_text(text)
    with pytest.raises(CannotChangeVersion, match="cannot be raised") as refusal:
        change_versions(model, None, to, "model.onnx")
    assert block in str(refusal.value)
    assert model == compile_text(text)


@pytest.mark.parametrize(("ir", "to"), [(None, 40), (99, None), (6, 21)])
def test_a_version_that_nothing_knows_or_that_cannot_hold_the_model_is_refused(ir: int | None, to: int | None) -> None:
    model = compile_text(FUNCTION)
    with pytest.raises(CannotChangeVersion, match=r"newer than onnx|needs IR version 8"):
        change_versions(model, ir, to, "model.onnx")
    assert model == compile_text(FUNCTION)


@pytest.mark.parametrize("file", FILES)
def test_a_real_export_is_raised_and_valid(file: str) -> None:
    model = onnx.load(EXPORTS / file)
    change_versions(model, None, 23, file)
    onnx.checker.check_model(model, full_check="merged" not in file)  # shape inference refuses healthy merged decoders
    assert opset(model) == 23


def test_weights_of_three_gigabytes_are_not_read(tmp_path: Path) -> None:
    model = onnx.load(EXPORTS / "t5" / "decoder_model_merged.onnx")
    size = 3 << 30
    with (tmp_path / "weights.bin").open("wb") as weights:
        weights.truncate(size)
    large = TensorProto(name="large", data_type=TensorProto.UINT8, dims=[size], data_location=TensorProto.EXTERNAL)
    large.external_data.add(key="location", value="weights.bin")
    large.external_data.add(key="length", value=str(size))
    model.graph.initializer.append(large)
    onnx.save(model, tmp_path / "model.onnx")
    before = psutil.Process().memory_info().rss
    raised = read_skeleton(tmp_path / "model.onnx", located=True).model
    changes = change_versions(raised, None, 21, "model.onnx")
    assert psutil.Process().memory_info().rss - before < 512 << 20
    assert ("opset", "18", "21") in {(change.where, change.before, change.after) for change in changes}
    kept = next(tensor for tensor in raised.graph.initializer if tensor.name == "large")
    assert {entry.key: entry.value for entry in kept.external_data}["location"] == "weights.bin"


def raised(model: Path, out: Path, *more: str) -> tuple[int, dict[str, bool]]:
    """The exit code, and the claims of the proof, after a model was raised."""
    done = kvdoctor("convert", model, "-o", out, *more, "--format", "json")
    report = json.loads(done[1])
    return done[0], {entry["claim"]: entry["holds"] for entry in report["repair"]["proof"]}


RUN = [
    *(("gpt2", "21"), ("llama-gqa", "23"), ("t5", "21"), ("marian-4.57.6", "22"), ("whisper", "21")),
    *(("marian-4.46.3", "20"),),
]


@pytest.mark.parametrize(("name", "to"), [RUN[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in RUN[1:])])
def test_a_raised_export_is_proved_and_written(name: str, to: str, tmp_path: Path) -> None:
    code, claims = raised(EXPORTS / name, tmp_path / "out", "--opset", to)
    assert code == 0
    assert all(claims.values())
    assert any("equal to the original's" in claim for claim in claims)
    for file in (tmp_path / "out").glob("*.onnx"):
        assert opset(onnx.load(file, load_external_data=False)) == int(to)


@pytest.mark.parametrize(
    "name",
    [
        "merged-healthy",
        pytest.param("layout-function-decoder-healthy", marks=pytest.mark.slow),
        pytest.param("layout-gqa-growing-healthy", marks=pytest.mark.slow),
        pytest.param("layout-attention-23-healthy", marks=pytest.mark.slow),
        pytest.param("pair-healthy", marks=pytest.mark.slow),
    ],
)
def test_other_domains_functions_and_branches_are_proved(name: str, tmp_path: Path) -> None:
    model = load_all()[name].write(tmp_path / "model")
    code, claims = raised(model, tmp_path / "out", "--opset", "24")
    assert code == 0
    assert all(claims.values())


@pytest.mark.slow
def test_a_model_that_was_lowered_is_raised_again(tmp_path: Path) -> None:
    code, claims = raised(EXPORTS / "llama-gqa", tmp_path / "low", "--opset", "14", "--ir-version", "7")
    assert (code, all(claims.values())) == (0, True)
    code, claims = raised(tmp_path / "low", tmp_path / "high", "--opset", "21")
    assert (code, all(claims.values())) == (0, True)
    low, high = (onnx.load(tmp_path / name / "model.onnx") for name in ("low", "high"))
    axes = [[len(node.input) for node in one.graph.node if node.op_type == "ReduceMean"] for one in (low, high)]
    assert set(axes[0]) == {1}
    assert set(axes[1]) == {2}


def test_an_opset_that_cannot_be_had_is_wrong_usage_and_leaves_nothing(tmp_path: Path) -> None:
    assert kvdoctor("convert", EXPORTS / "gpt2", "-o", tmp_path / "out", "--opset", "40")[0] == 2
    assert not (tmp_path / "out").exists()
