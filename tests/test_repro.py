"""`kvdoctor repro`: what is handed over shows the failure by itself, holds no weights, and is written whole."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.bad_models import EXPORTS, UNSAFE, Result, as_json, call, snapshot, unchanged
from support.famous_error import FIRST_TO_FAIL, nodes_that_fail
from support.isolated import Environment
from support.isolated import call as run_command
from support.processes import started
from support.sampling import sampled
from support.text_fixtures import compile_text, load_all

from kvdoctor.api import schemas

SHOWN = {
    "cross-cache-emptied": "step 2 fails in MatMul",
    "cross-cache-emptied-pair": "step 2 fails in MatMul",
    "cross-cache-emptied-silent": "the logits differ",
    "two-faults": "step 2 fails in MatMul",
    "step-fails": "step 2 fails in Reshape",
    "empty-past-rejected": "a call without a cache fails in Reshape",
    "cache-shape-mismatch": "step 1 fails",
    "past-axis-frozen": "step 0 fails",
    "past-axis-frozen-pair": "step 2 fails",
    "positions-not-offset": "the logits differ",
    "cache-misread": "the logits differ",
    "new-entries-wrong": "the logits differ",
    "wrong-at-lengths": "the logits differ",
    "branches-disagree": "the logits differ",
    "key-value-swapped-pair": "the logits differ",
    "layers-swapped": "the logits differ",
    "past-ignored": "the logits differ",
    "not-causal": "the logits differ",
    "nondeterministic": "the logits differ",
    "present-does-not-grow-static": "the logits differ",
    "session-refused": "the runtime refuses the file",
}
"""Text fixtures with an error, and what their reproducers show."""

QUICK = ("cross-cache-emptied", "step-fails", "session-refused")
OTHER_KINDS = ("worker-died", "chunk-fails", "mask-not-offset", "batch-axis-frozen", "step-fails-encoder-length")
FOUND_BY_THE_SAME_CHECK = (
    "positions-not-offset",
    "past-ignored",
    "key-value-swapped",
    "cross-cache-emptied",
    "layers-swapped",
)
OLD_RUNTIME = Environment("3.11", ("onnxruntime==1.16.3", "numpy==1.26.4"), ("onnxruntime",))


def repro(model: Path, out: Path, *more: str) -> Result:
    return as_json("repro", model, "-o", out, *more)


def played(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what was handed over, by itself."""
    return subprocess.run(
        [sys.executable, "-I", "reproduce.py"], cwd=folder, capture_output=True, text=True, check=False
    )


def plays(folder: Path, code: int = 1) -> str:
    """What it prints; 1 where it shows the failure."""
    done = played(folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def change(path: Path, operate: Callable[[onnx.ModelProto], Any]) -> None:
    model = onnx.load(path)
    operate(model)
    onnx.save(model, path)


def written(name: str, folder: Path) -> Path:
    """A text fixture as files."""
    folder.mkdir()
    return load_all()[name].write(folder)


def floats(model: onnx.ModelProto) -> list[np.ndarray[Any, Any]]:
    """All float tensors with more than 8 elements, at any depth."""
    found, graphs = [], [model.graph]
    while graphs:
        graph = graphs.pop()
        tensors = [*graph.initializer]
        for node in graph.node:
            for attribute in node.attribute:
                tensors += [attribute.t] if attribute.HasField("t") else []
                graphs += [attribute.g] if attribute.HasField("g") else []
        found += [numpy_helper.to_array(tensor) for tensor in tensors]
    return [array for array in found if array.dtype.kind == "f" and array.size > 8]


@pytest.mark.parametrize("name", sampled(FIRST_TO_FAIL, 4))
def test_the_loop_of_a_merged_decoder(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with unchanged(EXPORTS / name):
        result = repro(EXPORTS / name, out)
    assert result.code == 1
    made = result.report["reproducer"]
    operator, node = FIRST_TO_FAIL[name]
    assert made["shows"] == f"step 2 fails in {operator}"
    assert json.loads((out / "reproducer.json").read_text())["node"] == node
    assert made["finding"] == result.findings["cross-cache-emptied"]["fingerprint"]
    assert sum(path.stat().st_size for path in out.iterdir()) == made["bytes"] < (250_000 if name == "t5" else 100_000)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "model.onnx", "reproduce.py", "reproducer.json"]
    printed = plays(out)
    assert "step 2 fails: " in printed
    assert node in printed.splitlines()[-1]
    jsonschema.validate(result.report, schemas()["report"])


def some(names: Iterable[str], quick: tuple[str, ...]) -> list[Any]:
    """Parameters of which only some are quick."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some(SHOWN, QUICK))
def test_a_text_fixture(name: str, tmp_path: Path) -> None:
    model, out = written(name, tmp_path / "model"), tmp_path / "out"
    result = repro(model, out)
    assert result.code == 1
    made = result.report["reproducer"]
    assert made["reason"] is None
    assert made["shows"].startswith(SHOWN[name])
    plays(out)
    source = [array.tobytes() for path in model.glob("*.onnx") for array in floats(onnx.load(path))]
    assert not [1 for path in out.glob("*.onnx") for array in floats(onnx.load(path)) if array.tobytes() in source]


@pytest.mark.parametrize("name", some(OTHER_KINDS, ("chunk-fails",)))
def test_other_kinds(name: str, tmp_path: Path) -> None:
    model, out = written(name, tmp_path / "model"), tmp_path / "out"
    result = repro(model, out, "--fail-on", "warning")
    assert result.code == (3 if name == "worker-died" else 1)
    assert result.report["reproducer"]["out"] == str(out)
    plays(out)


@pytest.mark.parametrize("name", some(FOUND_BY_THE_SAME_CHECK, ("cross-cache-emptied",)))
def test_the_diagnosis_of_a_reproducer_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    """What is sent away has the same disease, by the checks and not by our word: where enough is left to diagnose."""
    model, out = written(name, tmp_path / "model"), tmp_path / "out"
    finding = repro(model, out).report["reproducer"]["finding"]
    names = {f["fingerprint"]: f["name"] for f in as_json("step-test", model).report["findings"]}
    if "logits" in {value.name for value in onnx.load(out / "model.onnx").graph.output}:
        assert names[finding] in as_json("step-test", out).findings
    else:
        assert names[finding] == "cross-cache-emptied"


def pass_through(model: onnx.ModelProto) -> None:
    (switch,) = [node for node in model.graph.node if node.op_type == "If"]
    cached = next(a.g for a in switch.attribute if a.name == "then_branch")
    for node in [n for n in cached.node if n.op_type == "Constant" and ".encoder." in n.output[0]]:
        past = f"past_key_values{node.output[0][len('present') :]}"
        node.CopyFrom(onnx.helper.make_node("Identity", [past], node.output))


def go_on(model: onnx.ModelProto) -> None:
    (restart,) = [node for node in model.graph.node if node.output[0] == "restarted"]
    restart.CopyFrom(onnx.helper.make_node("Identity", ["position_ids"], ["restarted"]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mend"), [("t5", pass_through), ("positions-not-offset", go_on)])
def test_a_mended_reproducer_runs(name: str, mend: Callable[[onnx.ModelProto], None], tmp_path: Path) -> None:
    """Exit code 0: with the fault repaired, the same calls run."""
    repro(EXPORTS / name if (EXPORTS / name).exists() else written(name, tmp_path / "model"), tmp_path / "out")
    change(tmp_path / "out" / "model.onnx", mend)
    assert "not reproduced" in plays(tmp_path / "out", 0)


@pytest.mark.slow
def test_an_error_of_another_kind_is_no_reproduction(tmp_path: Path) -> None:
    repro(EXPORTS / "t5", tmp_path / "out")
    (tmp_path / "out" / "model.onnx").write_bytes(b"torn")
    assert played(tmp_path / "out").returncode == 2


@pytest.mark.parametrize("name", sampled(["gpt2", "llama-gqa"], 2))
def test_nothing_to_reproduce(name: str, tmp_path: Path) -> None:
    result = call("repro", EXPORTS / name, "-o", tmp_path / "out")
    assert result.code == 0
    assert "nothing to reproduce" in result.out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_note_is_nothing_to_reproduce(tmp_path: Path) -> None:
    """Whose loop holds the cache is not hurt by an emptied one, and asks for it by name to see it."""
    model, out = written("cross-cache-emptied", tmp_path / "model"), tmp_path / "out"
    assert repro(model, out, "--consumer", "held").code == 0
    assert not out.exists()
    assert repro(model, out, "--consumer", "held", "--select", "KV203", "--fail-on", "note").code == 1
    plays(out)


def test_what_no_run_shows_is_said(tmp_path: Path) -> None:
    result = repro(written("past-without-present", tmp_path / "model"), tmp_path / "out")
    assert result.code == 3
    assert "no run of the model shows it" in result.report["reproducer"]["reason"]
    assert not (tmp_path / "out").exists()


def test_what_hangs_on_the_weights_is_said(tmp_path: Path) -> None:
    """Weights so large that logits overflow: with noise in their place nothing does."""
    fixture = load_all()["decoder-only-healthy"]
    model = compile_text(fixture.files["model.onnx"])
    for tensor in model.graph.initializer:
        if tensor.name == "w_logits":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1e38), tensor.name))
    (tmp_path / "model").mkdir()
    onnx.save(model, tmp_path / "model" / "model.onnx")
    result = repro(tmp_path / "model", tmp_path / "out")
    assert result.code == 3
    assert "depends on the weights" in result.report["reproducer"]["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_nothing_private_is_handed_over(tmp_path: Path) -> None:
    """Doc strings, metadata, producers, and the values of all weights."""
    model = onnx.load(EXPORTS / "t5" / "decoder_model_merged.onnx")
    secret = "proprietary"  # noqa: S105 - a word to look for
    model.doc_string = model.producer_name = model.producer_version = model.domain = secret
    graphs = [model.graph]
    while graphs:
        graph = graphs.pop()
        graph.doc_string = secret
        graph.metadata_props.add(key=secret, value=secret)
        for part in (*graph.input, *graph.output, *graph.initializer):
            part.doc_string = secret
        for node in graph.node:
            node.doc_string = secret
            node.metadata_props.add(key="stack_trace", value=secret)
            for attribute in node.attribute:
                attribute.doc_string = secret
                graphs += [attribute.g] if attribute.HasField("g") else []
    model.metadata_props.add(key=secret, value=secret)
    (tmp_path / "model").mkdir()
    onnx.save(model, tmp_path / "model" / "decoder_model_merged.onnx")
    out = tmp_path / "out"
    assert repro(tmp_path / "model", out).code == 1
    # A producer is named in the README, where people look for it, and nowhere else.
    assert [path.name for path in sorted(out.iterdir()) if secret.encode() in path.read_bytes()] == ["README.md"]
    source = {array.tobytes() for array in floats(model)}
    kept = floats(onnx.load(out / "model.onnx"))
    assert kept
    assert not [array.shape for array in kept if array.tobytes() in source]


@pytest.mark.slow
def test_large_weights_become_small_ones(tmp_path: Path) -> None:
    """A vocabulary of 50,000 in a file beside the model: 32 words show the failure as well."""
    text = load_all()["positions-not-offset"].files["model.onnx"]
    text = text.replace("[16, 8] w_tokens", "[50000, 8] w_tokens").replace("[8, 16] w_logits", "[8, 50000] w_logits")
    model = compile_text(text.replace("sequence_length, 16] logits", "sequence_length, 50000] logits"))
    (tmp_path / "model").mkdir()
    place = tmp_path / "model" / "model.onnx"
    onnx.save_model(model, place, save_as_external_data=True, location="model.data", size_threshold=64)
    assert (tmp_path / "model" / "model.data").stat().st_size > 3_000_000
    made = repro(tmp_path / "model", tmp_path / "out").report["reproducer"]
    assert made["bytes"] < 30_000
    plays(tmp_path / "out")


@pytest.mark.parametrize("name", sampled(["positions-not-offset", "marian-4.57.6", "branches-disagree"], 3))
def test_two_runs_write_the_same_bytes(name: str, tmp_path: Path) -> None:
    model = EXPORTS / name if (EXPORTS / name).exists() else written(name, tmp_path / "model")
    folders = [tmp_path / "one" / "out", tmp_path / "other" / "out"]
    for folder in folders:
        folder.parent.mkdir()
        assert repro(model, folder).code == 1
    one, other = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert one == other


@pytest.mark.slow
def test_another_seed_gives_other_noise(tmp_path: Path) -> None:
    model = written("cross-cache-emptied", tmp_path / "model")
    for seed in ("0", "1"):
        assert repro(model, tmp_path / seed, "--seed", seed).code == 1
        plays(tmp_path / seed)
    assert (tmp_path / "0" / "model.onnx").read_bytes() != (tmp_path / "1" / "model.onnx").read_bytes()


HOSTILE = (
    'a"""\nimport os; os.abort()\n"""',
    "b'); raise SystemExit(0) #",
    "c`</code><img src=x>\u202e",
    "\x1b[2J::error::d",
    "{e} %s \\",
)


@pytest.mark.parametrize("name", sampled(["step-fails", "positions-not-offset"], 2))
def test_hostile_names(name: str, tmp_path: Path) -> None:
    """Names of inputs are data in the program, in the README and on the terminal."""
    model = written(name, tmp_path / "model")

    def rename(loaded: onnx.ModelProto) -> None:
        pasts = [value.name for value in loaded.graph.input if value.name.startswith("past")]
        names = {past: f"{past}{HOSTILE[number % len(HOSTILE)]}" for number, past in enumerate(pasts)}
        for value in loaded.graph.input:
            value.name = names.get(value.name, value.name)
        for node in loaded.graph.node:
            node.input[:] = [names.get(one, one) for one in node.input]

    for path in model.glob("*.onnx"):
        change(path, rename)
    out = tmp_path / "out"
    assert call("repro", model, "-o", out).code == 1
    for text in (plays(out), (out / "README.md").read_text(), (out / "reproduce.py").read_text()):
        assert not UNSAFE.search(text), UNSAFE.search(text)
    assert "<img" not in (out / "README.md").read_text()


@pytest.mark.slow
def test_where_it_may_be_written(tmp_path: Path) -> None:
    model = written("step-fails", tmp_path / "model")
    out, others = tmp_path / "out", tmp_path / "others"
    others.mkdir()
    with unchanged(model):
        for place in (model / "out", model, others, tmp_path / "no" / "out"):
            assert call("repro", model, "-o", place).code == 2
        assert call("repro", model, "-o", others, "--force").code == 2
        assert call("repro", model).code == 2
        assert call("repro", tmp_path / "nothing", "-o", out).code == 2
        assert repro(model, out).code == 1
        before = snapshot(out)
        assert call("repro", model, "-o", out).code == 2
        assert snapshot(out) == before
        assert repro(model, out, "--force").code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "others", "out"]


@pytest.mark.parametrize("moment", [*sampled([1.3, 0.3], 2), pytest.param(None, marks=pytest.mark.slow)])
def test_killed_at_any_moment(moment: float | None, tmp_path: Path) -> None:
    """Without a number: from the moment on when something stands where OUT is to be."""
    model, out = written("step-fails", tmp_path / "model"), tmp_path / "out"
    with (
        unchanged(model),
        started("repro", model, "-o", out) as process,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        while moment is None and process.poll() is None and len(list(tmp_path.iterdir())) == 1:
            pass
        process.wait(moment or 0)
    assert_a_later_run_cleans_up(model, out)


def assert_a_later_run_cleans_up(model: Path, out: Path) -> None:
    if out.exists():
        plays(out)
    assert repro(model, out, *(["--force"] if out.exists() else [])).code == 1
    assert sorted(path.name for path in out.parent.iterdir()) == ["model", "out"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian-4.46.3", "marian-4.57.6"])
def test_old_and_new_runtimes_fail_at_the_same_step(name: str, tmp_path: Path) -> None:
    """The reproducer of the Marian failure is under 100 KB, and fails at the same step everywhere."""
    out = tmp_path / "out"
    assert repro(EXPORTS / name, out).code == 1
    assert sum(path.stat().st_size for path in out.iterdir()) < 100_000
    OLD_RUNTIME.require()
    old, new = run_command([*OLD_RUNTIME.command(), out / "reproduce.py"]), played(out)
    assert "onnxruntime 1.16.3" in old.stdout
    here, elsewhere = FIRST_TO_FAIL[name][1], nodes_that_fail(empty_batch_fails=True)[name][1]
    for done, node in ((old, elsewhere), (new, here)):
        assert done.returncode == 1, done.stdout + done.stderr
        (failed,) = (line for line in done.stdout.splitlines() if line.startswith("step 2 fails: "))
        assert f"'{node}'" in failed
        assert (f"the error does not name the node {here}" in done.stdout) == (node != here)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["positions-not-offset", "past-ignored", "step-fails", "session-refused"])
def test_other_reproducers_in_an_old_runtime(name: str, tmp_path: Path) -> None:
    repro(written(name, tmp_path / "model"), tmp_path / "out")
    OLD_RUNTIME.require()
    done = run_command([*OLD_RUNTIME.command(), tmp_path / "out" / "reproduce.py"])
    assert done.returncode == 1, done.stdout + done.stderr
