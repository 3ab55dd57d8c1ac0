"""`step-test --reference`: logits beside those of a checkpoint; what cannot be compared is never called healthy."""

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.isolated import CONSUMERS, EXPORTS, Environment, give_up, kvdoctor
from support.text_fixtures import load_all

from kvdoctor.addons.conversions.layout_proof import NEEDS
from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop
from kvdoctor.diagnose import checkpoint as reference
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.repair.export.exporters import EXPORTERS
from kvdoctor.report.document import Report
from kvdoctor.runtime import environments
from kvdoctor.runtime.environments import (
    EnvironmentUnavailable,
    Requirements,
    ScriptFailed,
    ScriptProcess,
    find_uv,
    python_command,
    transformers_for,
)
from kvdoctor.runtime.release_environments import requirements_of
from kvdoctor.runtime.targets.limits import releases

HERE = Requirements(("numpy",), ("numpy",), "none")
NOWHERE = Requirements(("torch==2.13.0",), ("there_is_no_such_module",), "transformers")


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def held(tmp_path: Path, model: str = "layout-dynamo-anonymous-healthy", **config: Any) -> Report:
    """The report of a small model compared with a made up checkpoint."""
    path = load_all()[model].write(tmp_path / "model") if model not in ("gpt2", "t5") else EXPORTS / model
    return step_test(str(path), Options(reference=str(checkpoint(tmp_path / "checkpoint", **config))))


@pytest.fixture
def _made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that needs no PyTorch stands in for the one that does."""
    monkeypatch.setattr(reference, "SCRIPT", CONSUMERS / "made_up_checkpoint.py")
    monkeypatch.setattr(reference, "transformers_for", lambda _config: HERE)


@pytest.mark.usefixtures("_made_up")
def test_equal_logits_are_healthy_and_what_was_compared_is_said(tmp_path: Path) -> None:
    report = held(tmp_path, "gpt2")
    assert (report.verdict, report.findings, report.environment["torch"]) == ("healthy", (), "0")
    (note,) = report.notes
    assert "the whole sequence of 11 tokens, a prefill of 3 and 8 steps of the held loop" in note
    run = next(run for run in report.runs if run.experiment == "against-checkpoint")
    assert [step.new_tokens for step in run.steps] == [11, 3, *[1] * 8]
    assert all(step.difference is not None and step.difference.relative == 0 for step in run.steps)


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("config", "observed", "cause"),
    [
        ({"add": 0.5}, "first at step 0", "logits differ from the PyTorch checkpoint"),
        ({"add_to_loop": 0.5}, "first at step 9", "logits differ from the PyTorch checkpoint, with the cache only"),
        ({"width": 100}, "logits of [1, 11, 128]", "logits differ from the PyTorch checkpoint"),
    ],
)
def test_other_logits_are_an_error(tmp_path: Path, config: dict[str, Any], observed: str, cause: str) -> None:
    report = held(tmp_path, "gpt2", **config)
    (finding,) = [one for one in report.findings if one.severity != "note"]  # a busy machine adds one about its times
    assert (report.verdict, finding.name, finding.severity) == ("unhealthy", "reference-differs", "error")
    assert observed in finding.observed
    assert finding.cause == cause


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(("added", "found"), [(0.0, []), (0.5, ["KV320"])])
def test_what_begins_at_a_length_that_the_config_names_is_compared(
    added: float, found: list[str], tmp_path: Path
) -> None:
    """The graph has lost the switch of its rotary factors, so it compares no length with this number."""
    shutil.copytree(EXPORTS / "llama-gqa", tmp_path / "model")
    config = {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 20}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    report = step_test(
        str(tmp_path / "model"), Options(reference=str(checkpoint(tmp_path / "checkpoint", add_to_longer=added)))
    )
    assert [finding.code for finding in report.findings] == found
    run = next(run for run in report.runs if run.experiment == "against-checkpoint")
    assert run.steps[-1].new_tokens == 24
    assert "24 tokens in one call against" in (run.reason or "")
    assert not found or report.findings[0].cause.endswith("with 24 tokens and not with 11")


@pytest.mark.usefixtures("_made_up")
def test_a_loop_that_is_wrong_in_itself_is_named_once(tmp_path: Path) -> None:
    report = held(tmp_path, "positions-not-offset", add_to_loop=0.5)
    assert [finding.name for finding in report.findings] == ["positions-not-offset"]
    assert any(
        entry.code == "KV320" and "the loop differs from the reference run" in entry.reason
        for entry in report.not_checked
    )


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fail": "CannotRun: its weights do not fill GPT2LMHeadModel"}, "its weights do not fill"),
        ({"die": True}, "out of memory, for example"),
    ],
)
def test_what_cannot_be_run_is_incomplete(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    report = held(tmp_path, "gpt2", **config)
    assert report.verdict == "incomplete"
    (entry,) = (entry for entry in report.not_checked if entry.code == "KV320")
    assert entry.essential
    assert reason in entry.reason


@pytest.mark.usefixtures("_made_up")
def test_a_difference_that_cannot_be_placed_says_so(tmp_path: Path) -> None:
    (finding,) = held(tmp_path, "gpt2", add=0.5).findings
    words = "no node of the graph is named after a module of the checkpoint"
    assert finding.evidence == (f"the difference could not be placed in the graph: {words}",)
    (finding,) = held(tmp_path / "loop", "gpt2", add_to_loop=0.5).findings
    assert "the logits differ with the cache only" in finding.evidence[0]


def test_without_torch_and_uv_the_command_that_would_help_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "transformers_for", lambda _config: NOWHERE)
    monkeypatch.setattr(environments, "find_uv", lambda: None)
    report = held(tmp_path, "gpt2")
    assert report.verdict == "incomplete"
    (entry,) = (entry for entry in report.not_checked if entry.code == "KV320")
    assert entry.essential
    assert "pip install uv, or pip install 'kvdoctor[transformers]'" in entry.reason


@pytest.mark.parametrize("words", [("--select", "KV203"), ("--ignore", "reference-differs"), ("--select", "KV1,KV30")])
def test_a_comparison_that_nothing_judges_is_a_wrong_call(words: tuple[str, str], tmp_path: Path) -> None:
    done = kvdoctor("step-test", EXPORTS / "gpt2", "--reference", checkpoint(tmp_path / "checkpoint"), *words)
    assert done.returncode == 2
    assert "KV320 reference-differs" in done.stderr
    assert not done.stdout


def test_a_stack_that_is_not_run_is_not_held(tmp_path: Path) -> None:
    report = held(tmp_path, "past-axis-frozen")
    assert [entry.code for entry in report.not_checked if "not compared with" in entry.reason] == ["KV320"]


@pytest.mark.parametrize(
    "name", ["", "no/such/folder/here", "./missing", "{tmp}", "{tmp}/file", "a b", "--option", "http://localhost/model"]
)
def test_what_is_no_checkpoint_is_a_wrong_call(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError):
        reference.Checkpoint(name.format(tmp=tmp_path))
    done = kvdoctor("step-test", EXPORTS / "gpt2", f"--reference={name.format(tmp=tmp_path)}")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("saved_with", "taken"),
    [
        ("4.46.3", "4.46.3"),
        ("5.23.0", "5.23.0"),
        ("4.50.0", "4.50.3"),
        ("9.99.9", environments.TRANSFORMERS),
        ("4.30.2", environments.TRANSFORMERS),
        ("5.0.0.dev0", environments.TRANSFORMERS),
        ("4.57.6 --index-url http://localhost", environments.TRANSFORMERS),
        (["4.57.6"], environments.TRANSFORMERS),
        (None, environments.TRANSFORMERS),
    ],
)
def test_the_version_that_a_checkpoint_was_saved_with_is_taken(saved_with: Any, taken: str) -> None:
    assert f"transformers=={taken}" in transformers_for({"transformers_version": saved_with}).requirements


def test_offline_never_asks_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "find_uv", lambda: "/usr/bin/uv")
    assert "--offline" in python_command(NOWHERE, offline=True)
    assert "--offline" not in python_command(NOWHERE, offline=False)
    assert python_command(HERE, offline=True) == (sys.executable,)


def test_a_script_sees_no_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')", encoding="utf-8")
    (tmp_path / "script.py").write_text(
        "import json, sys, importlib.util\n"
        "print(json.dumps({}), flush=True)\n"
        "print(json.dumps({'found': str(importlib.util.find_spec('torch'))}), flush=True)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    script = ScriptProcess(tmp_path / "script.py", {}, HERE, offline=True)
    script.hello = {"said": "nothing"}
    assert script.ask({}) == {}
    assert str(tmp_path) not in script.ask({})["found"]
    with pytest.raises(ScriptFailed):
        script.ask({})
    script.stop()


def test_an_environment_that_does_not_load_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ImportError('no libtorch.so')", encoding="utf-8")
    script = ScriptProcess(tmp_path / "script.py", {}, HERE, offline=True)
    with pytest.raises(EnvironmentUnavailable, match="no libtorch"):
        script.ask({})
    script.stop()


# --- with PyTorch -------------------------------------------------------------------------------------------------

NAMES = {"4.46.3": ("marian-4.46.3",), "4.57.6": ("gpt2", "llama-gqa", "t5", "whisper")}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints that the real exports were made of, and a changed copy of each."""
    out = tmp_path_factory.mktemp("checkpoints")
    for version, names in NAMES.items():
        pins = (f"torch=={environments.TORCH}", f"transformers=={version}", "numpy")
        Environment("3.11", pins, ("torch", "transformers")).run("make_checkpoints.py", out, *names)
    return out


def against(name: str, checkpoint: Path) -> tuple[int, dict[str, Any]]:
    done = kvdoctor("step-test", EXPORTS / name, "--consumer", "held", "--reference", checkpoint, "--format", "json")
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_an_export_agrees_with_its_checkpoint(name: str, checkpoints: Path) -> None:
    code, document = against(name, checkpoints / name)
    assert (code, document["verdict"]) == (0, "healthy"), document["not_checked"]
    runs = [run for run in document["runs"] if run["experiment"] == "against-checkpoint"]
    assert len(runs) == len(document["stacks"])
    for run in runs:
        longer = name == "t5"  # its graph compares lengths with the number of its buckets
        assert (run["outcome"], len(run["steps"])) == ("passed", 10 + longer)
        assert all(step["difference"]["relative"] < 1e-4 for step in run["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_an_export_of_other_weights_does_not(name: str, checkpoints: Path) -> None:
    code, document = against(name, checkpoints / f"{name}-changed")
    assert (code, document["verdict"]) == (1, "unhealthy")
    found = [finding for finding in document["findings"] if finding["severity"] == "error"]
    assert [finding["name"] for finding in found] == ["reference-differs"] * len(document["stacks"])
    for finding in found:
        words = "transformer.h.1.attn.c_attn (Conv1D) agree" if name == "gpt2" else "the encoder differs"
        assert words in finding["evidence"][0]


@pytest.mark.usefixtures("_made_up")
@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        ({}, 0, None),
        ({"add": 50}, 1, "step 2: token 38 in place of 2"),
        ({"fail": "no memory"}, 3, "cannot be run: no memory"),
    ],
)
def test_the_program_of_a_loop_finds_the_tokens_of_its_checkpoint(
    config: dict[str, Any], code: int, said: str | None, tmp_path: Path
) -> None:
    options = Options(reference=str(checkpoint(tmp_path / "checkpoint", **config)))
    made = write_loop(LoopRequest(str(EXPORTS / "gpt2"), None, "python", check=True), options)
    problems = [result.problem for result in made.results if result.problem]
    assert made.exit_code == code, problems
    if said is None:
        assert any("by-/" in result.vector and result.tokens for result in made.results)
    else:
        assert said in " ".join([*problems, made.unchecked or ""])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("t5", 0), ("gpt2", 0), ("t5-changed", 1)])
def test_the_program_of_a_loop_finds_the_tokens_of_pytorch(name: str, code: int, checkpoints: Path) -> None:
    model = EXPORTS / name.removesuffix("-changed")
    done = kvdoctor("loop", model, "--language", "python", "--check", "--reference", checkpoints / name)
    assert done.returncode == code, done.stdout


@pytest.mark.slow
def test_a_checkpoint_runs_no_code_and_lends_no_weights(checkpoints: Path, tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    config = json.loads((checkpoints / "gpt2" / "config.json").read_text(encoding="utf-8"))
    theirs = {**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}, "architectures": ["Mine"]}
    (lacking / "config.json").write_text(json.dumps(theirs), encoding="utf-8")
    (lacking / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n", encoding="utf-8")
    code, document = against("gpt2", lacking)
    assert (code, document["verdict"]) == (3, "incomplete")
    assert not (tmp_path / "ran").exists()
    deeper = {**config, "n_layer": 3}
    (checkpoints / "gpt2-deeper").mkdir()
    (checkpoints / "gpt2-deeper" / "config.json").write_text(json.dumps(deeper), encoding="utf-8")
    weights = (checkpoints / "gpt2" / "model.safetensors").read_bytes()
    (checkpoints / "gpt2-deeper" / "model.safetensors").write_bytes(weights)
    code, document = against("gpt2", checkpoints / "gpt2-deeper")
    assert code == 3
    assert any("its weights do not fill GPT2LMHeadModel" in entry["reason"] for entry in document["not_checked"])


def make_wheel(folder: Path, content: str) -> str:
    """A wheel of `locked` 1.0 with one module; gives its SHA-256."""
    file = folder / "locked-1.0-py3-none-any.whl"
    names = ("locked.py", *(f"locked-1.0.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD")))
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("locked.py", content)
        wheel.writestr("locked-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: locked\nVersion: 1.0\n")
        wheel.writestr("locked-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("locked-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_only_the_files_of_the_lock_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_uv() is None:
        give_up("uv is neither on the path nor next to this Python")
    for name in ("locks", "wheels"):
        (tmp_path / name).mkdir()
    digest = make_wheel(tmp_path / "wheels", "right = True")
    (tmp_path / "locks" / "pins.txt").write_text("[wanted]\nlocked==1.0\nabsent==2.0 ; sys_platform == 'none'\n")
    (tmp_path / "locks" / "hashes.txt").write_text(f"absent==2.0 {'0' * 64}\nlocked==1.0 {digest} {'1' * 64}\n")
    monkeypatch.setattr(environments, "LOCKS", tmp_path / "locks")
    for name, value in {"UV_FIND_LINKS": "wheels", "UV_CACHE_DIR": "cache", "XDG_CACHE_HOME": "user"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    needs = Requirements(("wanted",), ("locked",), "none")
    (python,) = python_command(needs, offline=False)
    subprocess.run([python, "-c", "import locked; assert locked.right"], check=True)
    assert python_command(needs, offline=True) == (python,), "it is made once"
    for name in ("user", "cache"):
        shutil.rmtree(tmp_path / name)
    make_wheel(tmp_path / "wheels", "right = False")
    with pytest.raises(EnvironmentUnavailable, match="serves another file than the one whose hash kvdoctor has"):
        python_command(needs, offline=False)
    assert not list((tmp_path / "user").rglob("locked.py"))


def test_every_environment_that_is_made_has_a_lock() -> None:
    needs = [*(exporter.needs for exporter in EXPORTERS), NEEDS]
    needs += [transformers_for({"transformers_version": release}) for release in environments.RELEASES]
    for requirements in (*(one.requirements for one in needs), *map(requirements_of, releases())):
        lock = environments.read_lock(requirements) or ""
        assert all(f"\n{one.partition('<')[0]}" in f"\n{lock}" for one in requirements), requirements
        assert all(" --hash=sha256:" in one for one in lock.splitlines())
