"""The repaired file on a runtime that is older than kvdoctor itself supports, with the plainest consumer there is."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.isolated import EXPORTS, MERGED, Environment, find_uv, give_up, kvdoctor, re_export
from support.text_fixtures import compile_text, load_all

from kvdoctor.decode.calls import save_call
from kvdoctor.decode.messages import CompareJob, TrialModel, ValuePair, write_message
from kvdoctor.diagnose.locate.runnable import flatten, read_located, write_variant
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.environments import EnvironmentUnavailable
from kvdoctor.runtime.process import Limits
from kvdoctor.runtime.release_environments import prepare_environment
from kvdoctor.runtime.targets.limits import Meaning, meanings, releases

pytestmark = pytest.mark.slow

OLD_RUNTIME = Environment("3.11", ("onnxruntime==1.16.3", "numpy==1.26.4"), ("onnxruntime",))
STEPS = 8
FIRST_FED_BACK = 2
"""Index of the first step whose past comes out of the cached branch."""


def plain_loop(folder: Path) -> list[dict[str, Any]]:
    """Returns the runs of the plain loop in batch 1 and 2, which are known to be runs of the old runtime."""
    result = OLD_RUNTIME.run("plain_loop.py", folder)
    assert result["onnxruntime"] == "1.16.3"
    assert [run["batch"] for run in result["runs"]] == [1, 2]
    runs: list[dict[str, Any]] = result["runs"]
    return runs


def assert_parity(steps: list[dict[str, float]]) -> None:
    for step in steps:
        assert step["spread"] > 1
        assert step["distance"] <= 1e-5 * step["spread"]


@pytest.mark.parametrize("name", MERGED)
def test_repaired_file_has_parity_in_the_plain_loop(name: str, tmp_path: Path) -> None:
    repaired = re_export(name, tmp_path / "repaired")
    onnx.checker.check_model(repaired / "decoder_model_merged.onnx", full_check=True)
    for run in plain_loop(repaired):
        assert run["error"] is None
        assert len(run["steps"]) == STEPS
        assert_parity(run["steps"])


@pytest.mark.parametrize("name", MERGED)
def test_original_file_fails_in_the_plain_loop(name: str) -> None:
    for run in plain_loop(EXPORTS / name):
        assert len(run["steps"]) == FIRST_FED_BACK
        assert_parity(run["steps"])
        assert "optimum::if" in run["error"]


def test_a_variant_finds_its_weights_in_the_original(tmp_path: Path) -> None:
    """The old runtime takes no folder for external data, and the newest no link out of one."""
    source = EXPORTS / "gpt2" / "model.onnx"
    flat = flatten(read_located(source), {}, source)
    variant = write_variant(flat, tmp_path / "variant.onnx", values=["/transformer/wte/Gather_output_0"])
    save_call(tmp_path / "feeds.npz", {"input_ids": np.array([[3, 5]])})
    model = TrialModel(variant.path, variant.root, tmp_path / "feeds.npz")
    pair = ValuePair("kvdoctor.value.0", "kvdoctor.value.0", (None, None, None))
    (tmp_path / "job.json").write_text(write_message(CompareJob(model, model, (pair,), threads=1)))
    result = OLD_RUNTIME.run("trial.py", tmp_path / "job.json", Path(__file__).parent.parent)
    assert result["onnxruntime"] == "1.16.3"
    (difference,) = result["differences"]
    assert (difference["dtype"], difference["relative"]) == ("float", 0.0)


MATRIX = ("1.16.3", "1.18.1", "1.20.1", "1.22.1")
NEWEST = releases()[-1]


def environment_of(release: str) -> Path:
    """The Python of an environment with that release, which is made where it can be had."""
    try:
        return prepare_environment(release, offline=False)
    except EnvironmentUnavailable as reason:
        give_up(str(reason))


def under(targets: tuple[str, ...], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of a command with targets, made in environments where they can be had."""
    for release in targets:
        environment_of(release)
    options = [word for release in targets for word in ("--target", f"onnxruntime=={release}")]
    done = kvdoctor(*arguments, *options, "--format", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def cells(report: dict[str, Any], stack: str, experiment: str) -> dict[str, str]:
    """The outcome of an experiment under each runtime."""
    runs = [run for run in report["runs"] if (run["stack"], run["experiment"]) == (stack, experiment)]
    return {run["target"].partition("==")[2]: run["outcome"] for run in runs}


def test_the_matrix_of_the_repaired_marian_is_green(tmp_path: Path) -> None:
    targets = (*MATRIX, NEWEST)
    code, report = under(targets, "re-export", EXPORTS / "marian-4.46.3", "-o", tmp_path / "fixed")
    assert code == 0
    assert report["verdict"] == "healthy"
    assert {target["onnxruntime"] for target in report["targets"]} == set(targets)
    for experiment in ("plain-loop", "held-loop"):
        assert {release: cells(report, "merged", experiment)[release] for release in targets} == dict.fromkeys(
            targets, "passed"
        )
    assert not any(target["other_logits"] or target["refused"] or target["not_run"] for target in report["targets"])
    claims = {entry["claim"]: entry["holds"] for entry in report["repair"]["proof"]}
    assert all(claims.values())
    assert {f"plain-loop passes under onnxruntime=={release}" for release in targets} <= set(claims)
    page = (tmp_path / "fixed" / "kvdoctor-report.md").read_text(encoding="utf-8")
    assert " | ".join(MATRIX) in page


def test_the_matrix_of_the_original_marian_is_red() -> None:
    model = EXPORTS / "marian-4.57.6" / "decoder_model_merged.onnx"
    code, report = under(MATRIX, "step-test", model)
    assert code == 1
    (stack,) = (stack["name"] for stack in report["stacks"])
    assert {cells(report, stack, "plain-loop")[release] for release in MATRIX} == {"failed"}
    assert {cells(report, stack, "held-loop")[release] for release in MATRIX} == {"passed"}
    names = [finding["name"] for finding in report["findings"]]
    assert "cross-cache-emptied" in names
    assert not {"target-fails", "target-differs"} & set(names), "what fails here as well is no fault of a target's"


def test_a_model_that_is_too_new_for_a_target_is_lowered_for_it(tmp_path: Path) -> None:
    model = onnx.load(EXPORTS / "gpt2" / "model.onnx")
    model.ir_version = 11
    model.opset_import[0].version = 21
    (tmp_path / "new").mkdir()
    onnx.save(model, tmp_path / "new" / "model.onnx")
    code, report = under(("1.16.3",), "step-test", tmp_path / "new")
    found = {finding["name"]: finding for finding in report["findings"]}
    assert code == 1
    assert set(found) == {"ir-too-new", "opset-too-new"}
    assert found["ir-too-new"]["effects"], "the target was asked, and refused it"
    code, report = under(("1.16.3",), "re-export", tmp_path / "new", "-o", tmp_path / "out")
    assert code == 0
    assert report["verdict"] == "healthy"
    lowered = onnx.load(tmp_path / "out" / "model.onnx")
    assert (lowered.ir_version, lowered.opset_import[0].version) == (9, 19)


@pytest.mark.parametrize(
    ("name", "release", "expected"),
    [
        ("layout-multihead-attention-healthy", "1.16.3", ("target-fails", "error", "plain-loop")),
        ("operator-unsupported", "1.18.1", ("target-differs", "warning", "chunk")),
        ("layout-rwkv-healthy", "1.18.1", ("target-fails", "error", "plain-loop")),
    ],
)
def test_what_is_right_here_and_not_there_is_found(
    name: str, release: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    """An old kernel that takes no past, one with another mask, a file that ends the process when it is opened."""
    _, report = under((release,), "step-test", load_all()[name].write(tmp_path))
    (finding,) = (finding for finding in report["findings"] if finding["code"].startswith("KV40"))
    assert (finding["name"], finding["severity"], finding["subject"][0]) == expected
    assert f"onnxruntime=={release}" in finding["where"]


GROUPED = (
    "y, k, v = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1, {}> "
    "(w_q, w_k, w_k, w_past, w_past, last, total)"
)
ATTENTION = "y, k, v = Attention <is_causal = 1, softcap = 0.5> (w_n, w_n, w_n, , w_p, w_p)"
HIDDEN = "no = ConstantOfShape <value = bool[1] {0}> (rows) y, k, v = Attention (w_n, w_n, w_n, no, w_p, w_p)"
BUFFER = "y = Attention <is_causal = {}> (w_n, w_b, w_b, , , , filled)"
ALONE = "y = Attention <is_causal = 1> (w_one, w_b, w_b)"
MULTIHEAD = "y, k, v = com.microsoft.MultiHeadAttention <num_heads = 2> (w_m, w_m, w_m, , , w_bias, w_p, w_p)"
NODES = (GROUPED.format("local_window_size = 3"), ATTENTION, BUFFER.format(0), BUFFER.format(1), ALONE, HIDDEN)
NODES += (GROUPED.format("do_rotary = 0"), MULTIHEAD)
"""A node for each row of the table of changed meanings, in its order."""
WEIGHTS = """float[1, 3, 32] w_q, float[1, 3, 16] w_k, float[1, 1, 6, 16] w_past, int32[1] last = {8},
int32 total = {9}, float[2, 2, 2, 4] w_n, float[2, 2, 4, 4] w_p, float[2, 2, 6, 4] w_b, float[2, 2, 1, 4] w_one,
int64[2] filled = {3, 5}, int64[2] rows = {2, 6}, float[2, 2, 8] w_m, float[2, 1, 2, 6] w_bias"""
COMPUTE = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level, options.graph_optimization_level = 4, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
print(onnxruntime.InferenceSession(sys.argv[1], options).run(["y"], {})[0].round(4).tolist())
"""


@pytest.mark.parametrize(("change", "node"), list(zip(meanings(), NODES, strict=True)))
def test_each_change_of_meaning_is_one(change: Meaning, node: str, tmp_path: Path) -> None:
    ir, opset = (8, 17) if ":" in change.operator else (10, 24)
    head = f"<ir_version: {ir}, opset_import: ['': {opset}, 'com.microsoft': 1]>"
    text = f"{head} g () => (float[a, b, c] y) <{WEIGHTS}> {{ {node} }}".replace("'", '"')
    model = compile_text(text)
    assert change.operator.rpartition(":")[2] in node
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    computed = []
    for release in (change.last, change.since, NEWEST):
        python = environment_of(release)
        done = subprocess.run([python, "-I", "-c", COMPUTE, path], capture_output=True, text=True, check=True)
        computed.append(done.stdout)
    assert computed[0] != computed[1]
    assert computed[1] == computed[2]


@pytest.mark.parametrize(
    ("name", "release", "subject", "row"),
    [
        ("meaning-changed-window", "1.23.2", "plain-loop", 0),
        ("meaning-changed-softcap", "1.26.0", "plain-loop", 1),
        ("layout-tensor-scatter-heads-healthy", "1.27.0", "chunk", 3),
        ("layout-multihead-attention-healthy", "1.21.0", "batch-rows", 7),
    ],
)
def test_a_difference_names_what_changed_its_meaning(
    name: str, release: str, subject: str, row: int, tmp_path: Path
) -> None:
    _, report = under((release,), "step-test", load_all()[name].write(tmp_path))
    (finding,) = report["findings"]
    assert (finding["name"], subject in finding["subject"]) == ("target-differs", True)
    assert [one for one in finding["evidence"] if "github.com" in one] == [str(meanings()[row])]


def test_logits_of_padding_are_not_compared_with_a_target(tmp_path: Path) -> None:
    """Rows that a mask hides whole are computed otherwise since 1.28, and nobody reads them."""
    model = load_all()["layout-attention-23-masked-healthy"].write(tmp_path)
    assert under(("1.27.0",), "step-test", model)[1]["verdict"] == "healthy"


def test_the_node_that_computes_otherwise_is_named(tmp_path: Path) -> None:
    model = load_all()["operator-unsupported"].write(tmp_path)
    _, report = under(("1.18.1",), "step-test", model)
    (finding,) = report["findings"]
    assert 'GroupQueryAttention "mixed0"' in finding["where"]
    assert any(reason.startswith("its inputs ") and reason.endswith(" are right") for reason in finding["evidence"])


def test_a_healthy_model_is_healthy_under_every_release() -> None:
    code, report = under((releases()[0], *MATRIX), "step-test", EXPORTS / "llama-gqa")
    assert (code, report["findings"]) == (0, [])
    assert set(cells(report, "decoder", "plain-loop").values()) == {"passed"}


def test_a_binding_that_cannot_read_what_is_empty_makes_the_hazard_an_error(tmp_path: Path) -> None:
    spec = "ort-crate==2.0.0-rc.10"
    before = json.loads(kvdoctor("step-test", EXPORTS / "t5", "--target", spec, "--format", "json").stdout)
    if any(target["not_run"] for target in before["targets"]):
        give_up(str(before["targets"]))
    hazards = [finding for finding in before["findings"] if finding["name"] == "empty-tensor-hazard"]
    assert [finding["severity"] for finding in hazards] == ["error", "warning"]
    assert "fixed in 2.0.0-rc.11" in hazards[0]["effects"][0]
    done = kvdoctor("re-export", EXPORTS / "t5", "-o", tmp_path / "out", "--target", spec, "--format", "json")
    after = [f for f in json.loads(done.stdout)["findings"] if f["name"] == "empty-tensor-hazard"]
    assert [finding["severity"] for finding in after] == ["warning"], "the past of the first step stays empty"


def test_the_gate_holds_every_model_against_the_targets() -> None:
    code, report = under(("1.18.1",), "gate", EXPORTS / "gpt2", EXPORTS / "llama-gqa")
    assert code == 0
    assert report["verdict"] == "healthy"
    for each in report["reports"]:
        assert cells(each, "decoder", "plain-loop")["1.18.1"] == "passed"


def test_nothing_of_the_working_folder_passes_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "onnxruntime", "kvdoctor", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')", encoding="utf-8")
    python = environment_of("1.18.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Runtime(Limits(timeout=120), str(python)) as runtime:
        assert runtime.greet() == "1.18.1"


def test_an_environment_is_made_once_and_starts_again_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache with blanks"))
    if find_uv() is None:
        give_up("uv is neither on the path nor beside this Python")
    python = environment_of("1.22.1")
    assert prepare_environment("1.22.1", offline=True) == python
    left = [path.name for path in python.parents[2].iterdir()]
    assert len(left) == 1, "nothing unfinished is left beside it"
    begin = time.monotonic()
    with Runtime(Limits(timeout=120), str(python)) as runtime:
        assert runtime.greet() == "1.22.1"
    assert time.monotonic() - begin < 120


def test_an_environment_that_does_not_start_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = environment_of("1.22.1")
    (core,) = python.parents[1].rglob("onnxruntime/__init__.py")
    core.write_text("raise ImportError('damaged')", encoding="utf-8")
    done = kvdoctor("step-test", EXPORTS / "gpt2", "--target", "onnxruntime==1.22.1", "--format", "json")
    assert done.returncode == 3
    (entry,) = (entry for entry in json.loads(done.stdout)["not_checked"] if entry["code"] == "KV404")
    assert "does not start on this machine; remove" in entry["reason"]
