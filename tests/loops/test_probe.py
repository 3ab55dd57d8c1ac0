"""`kvdoctor probe` and `kvdoctor judge`: the calls of another machine, judged here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import text_fixtures
from support.isolated import EXPORTS, kvdoctor
from support.sampling import first
from test_loop_of_each_layout import FIXTURES, LOOPS

from kvdoctor.loops.judge import judge
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

Line = dict[str, Any]


@pytest.fixture(scope="module", params=["marian-4.57.6", "llama-gqa", "whisper"])
def probed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its probe in Python."""
    model, out = EXPORTS / request.param, tmp_path_factory.mktemp("probe") / "probe"
    done = kvdoctor("probe", model, "-l", "python", "-o", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return model, out


def run(probe: Path, model: Path, result: Path, script: str = "main.py") -> "subprocess.CompletedProcess[str]":
    """Run a program of a probe as its README says."""
    words = ["--model", str(model), "--probe", "probe.txt", "--result", str(result)]
    return subprocess.run([sys.executable, script, *words], cwd=probe, capture_output=True, text=True, check=False)


def judged(model: Path, result: Path) -> tuple[int, Line]:
    done = kvdoctor("judge", model, result, "--format", "json")
    return done.returncode, json.loads(done.stdout)


def changed(result: Path, out: Path, change: Callable[[Line], Line | None]) -> Path:
    """A result with other lines; None leaves one out."""
    lines = [change(json.loads(line)) for line in result.read_text().splitlines()]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return out


def test_the_same_runtime_gives_the_same(probed: tuple[Path, Path], tmp_path: Path) -> None:
    model, probe = probed
    ran = run(probe, model, tmp_path / "result.jsonl")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    names = [line.split()[1] for line in (probe / "probe.txt").read_text().splitlines()]
    assert ran.stdout.splitlines() == [f"{name}: as expected" for name in names]
    code, report = judged(model, tmp_path / "result.jsonl")
    assert (code, report["verdict"], report["findings"], report["not_checked"]) == (0, "nothing-found", [], [])
    for run_ in report["runs"]:
        assert run_["outcome"] == "passed"
        assert all(step["difference"] is not None for step in run_["steps"]), "every step is compared"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS[::4], *first([name for name in LOOPS if name not in LOOPS[::4]], 0)])
def test_no_layout_gives_a_false_alarm(name: str, tmp_path: Path) -> None:
    model, probe = FIXTURES[name].write(tmp_path / "model"), tmp_path / "probe"
    assert write_loop(LoopRequest(str(model), str(probe), "python", probe=True), Options()).out is not None
    ran = run(probe, model, tmp_path / "result.jsonl")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with Runtime(Options().limits) as runtime:
        report = judge(str(model), str(tmp_path / "result.jsonl"), Options(), runtime)
    assert (report.verdict, report.findings, report.not_checked) == ("nothing-found", (), ())


WRONG = '''
"""A runtime that loses the newest entry of one key, in every call that returns some."""
import runpy, sys
import onnxruntime as ort

real = ort.InferenceSession.run_with_ort_values

def wrong(session, names, feeds, *more):
    outputs = real(session, names, feeds, *more)
    for at, name in enumerate(names):
        if name == {name!r} and outputs[at].shape()[2] > 1:
            value = outputs[at].numpy().copy()
            value[:, :, -1:] = 0
            outputs[at] = ort.OrtValue.ortvalue_from_numpy(value)
    return outputs

ort.InferenceSession.run_with_ort_values = wrong
sys.path.insert(0, ".")
runpy.run_path("main.py", run_name="__main__")
'''


def test_a_wrong_provider_is_found_with_its_first_step_and_tensor(probed: tuple[Path, Path], tmp_path: Path) -> None:
    model, probe = probed
    name = {"llama-gqa": "present.1.key"}.get(model.name, "present.1.decoder.key")
    (tmp_path / "wrong.py").write_text(WRONG.format(name=name))
    ran = run(probe, model, tmp_path / "result.jsonl", str(tmp_path / "wrong.py"))
    assert ran.returncode == 1
    assert "one-sequence: sequence 0, step" in ran.stdout
    code, report = judged(model, tmp_path / "result.jsonl")
    (finding,) = report["findings"]
    assert (code, finding["code"], finding["severity"]) == (1, "KV420", "error")
    assert finding["observed"].startswith("step 0 (line ")
    assert f"{name} is off by" in finding["observed"]
    assert finding["where"].startswith("run one-sequence")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and the result of its probe."""
    model, out = EXPORTS / "marian-4.57.6", tmp_path_factory.mktemp("probe")
    assert kvdoctor("probe", model, "-l", "python", "-o", out / "probe").returncode == 0
    assert run(out / "probe", model, out / "result.jsonl").returncode == 0
    return model, out / "result.jsonl"


def test_rounding_alone_is_a_warning(marian: tuple[Path, Path], tmp_path: Path) -> None:
    """Another arithmetic moves the numbers by some thousandths and no likeliest token."""
    model, result = marian

    def rounded(line: Line) -> Line:
        for name, entry in line.get("got", {}).items():
            if "sample" in entry and name.startswith(("present", "logits")):
                entry["sample"] = [value * 1.004 for value in entry["sample"]]
        for name, entry in line.get("fed", {}).items():
            if "sample" in entry and name.startswith("past"):
                entry["sample"] = [value * 1.004 for value in entry["sample"]]
        return line

    code, report = judged(model, changed(result, tmp_path / "rounded.jsonl", rounded))
    (finding,) = report["findings"]
    assert (code, finding["severity"]) == (0, "warning")
    assert "rounds more" in finding["cause"]


def test_another_likeliest_token_is_found(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian

    def other(line: Line) -> Line:
        if line.get("tokens") and line["run"] == "one-sequence":
            line["tokens"][0][2] += 1
        return line

    code, report = judged(model, changed(result, tmp_path / "other.jsonl", other))
    (finding,) = report["findings"]
    assert (code, finding["code"]) == (1, "KV420")
    assert "step 2" in finding["observed"]
    assert "as the likeliest" in finding["observed"]


def test_a_run_that_failed_there_is_an_error(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian

    def failed(line: Line) -> Line:
        return line if "tokens" not in line else line | {"tokens": [], "error": "reorder: [1] in place of [2]"}

    code, report = judged(model, changed(result, tmp_path / "failed.jsonl", failed))
    assert code == 1
    assert report["findings"][0]["observed"] == "reorder: [1] in place of [2]"


def test_a_program_that_ended_too_early_is_not_judged_healthy(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian
    half = tmp_path / "half.jsonl"
    half.write_text("".join(line + "\n" for line in result.read_text().splitlines()[:4]))
    code, report = judged(model, half)
    assert (code, report["verdict"]) == (3, "incomplete")
    reasons = [entry["reason"] for entry in report["not_checked"]]
    assert any("the program ended before it did" in reason for reason in reasons)
    assert "the result has no run 2-sequences" in reasons[0]


def test_a_last_line_that_was_cut_is_of_a_run_that_did_not_end(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(result.read_bytes()[:-20])
    code, report = judged(model, cut)
    assert (code, report["verdict"]) == (3, "incomplete")
    assert ["the program ended before it did" in entry["reason"] for entry in report["not_checked"]] == [True]


def test_another_token_than_that_of_the_probe_is_said(tmp_path: Path) -> None:
    """The program feeds it and goes on rightly from there: only the probe tells that it is another one."""
    model, probe = EXPORTS / "llama-gqa", tmp_path / "probe"
    assert kvdoctor("probe", model, "-l", "python", "-o", probe).returncode == 0
    source = (probe / "main.py").read_text()
    assert source.count("decoder.step([[token] for token in step])") == 1
    wrong = source.replace("[[token] for token in step]", "[[5] for token in step]")
    (probe / "wrong.py").write_text(wrong)
    assert run(probe, model, tmp_path / "result.jsonl", "wrong.py").returncode == 1
    done = kvdoctor("judge", model, tmp_path / "result.jsonl")
    assert done.returncode == 2
    assert "token 5 in place of" in done.stderr
    once = wrong.replace(
        "[[5] for token in step]", "[[5 if (decoder.length, len(step)) == (6, 1) else token] for token in step]"
    )
    (probe / "wrong.py").write_text(once)
    assert run(probe, model, tmp_path / "result.jsonl", "wrong.py").returncode == 1
    code, report = judged(model, tmp_path / "result.jsonl")
    assert code == 3
    assert "token 5 in place of" in report["not_checked"][0]["reason"]


@pytest.mark.parametrize("error", [1e-5, 1e-4, 1e-3])
def test_noise_as_of_another_arithmetic_is_a_warning(error: float, marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian
    random = np.random.default_rng(0)

    def noisy(line: Line) -> Line:
        for name, entry in line.get("got", {}).items():
            if name == "logits":
                for part in ("data", "sample"):
                    if part in entry:
                        entry[part] = [v * (1 + error * random.standard_normal()) for v in entry[part]]
        return line

    code, report = judged(model, changed(result, tmp_path / "noisy.jsonl", noisy))
    assert (code, [entry for entry in report["not_checked"] if entry["essential"]]) == (0, [])
    assert {finding["severity"] for finding in report["findings"]} <= {"warning"}
    assert bool(report["findings"]) == (error > 1e-5)


BEAMS = """
import sys
from loop import Decoder

decoder = Decoder(sys.argv[1])
decoder.prefill([[5, 6, 7], [8, 9, 10]])
for token in range(20, 24):
    decoder.step([[token], [token + 1]])
    decoder.reorder([1, 0])
decoder.reorder([1, 1])
decoder.step([[30], [31]])
"""


def test_a_beam_search_is_no_fault_of_the_runtime(tmp_path: Path) -> None:
    model, loop = EXPORTS / "llama-gqa", tmp_path / "loop"
    assert kvdoctor("loop", model, "-l", "python", "-o", loop).returncode == 0
    (loop / "beams.py").write_text(BEAMS)
    environment = os.environ | {"KVDOCTOR_TRACE": str(tmp_path / "trace.jsonl")}
    subprocess.run([sys.executable, "beams.py", str(model)], cwd=loop, env=environment, check=True)
    done = kvdoctor("step-test", model, "--trace", tmp_path / "trace.jsonl", "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["findings"]) == (0, [])
    (replayed,) = [one for one in report["runs"] if one["experiment"] == "caller-replay"]
    assert replayed["outcome"] == "passed"
    assert all(step["difference"] is not None for step in replayed["steps"])


def test_runs_that_are_not_there_are_no_pass(marian: tuple[Path, Path], tmp_path: Path) -> None:
    """The program ended, for example in the provider, before it began them."""
    model, result = marian
    done = changed(result, tmp_path / "one.jsonl", lambda line: line if line["run"] == "one-sequence" else None)
    code, report = judged(model, done)
    assert code == 3
    assert "the result has no run" in report["not_checked"][0]["reason"]


def test_a_cache_that_comes_back_cut_is_named(marian: tuple[Path, Path], tmp_path: Path) -> None:
    """The next step fails there, and here too from what came back there."""
    model, result = marian
    steps: dict[str, int] = {}

    def cut(line: Line) -> Line | None:
        if "tokens" in line:
            return line | {"tokens": [], "error": "a node failed"}
        number = steps[line["run"]] = steps.get(line["run"], -1) + 1
        if number > 2:
            return None
        if number == 1 and "got" in line:
            entry = line["got"]["present.0.decoder.key"]
            entry["shape"][2] -= 1
            entry.pop("data", None)
            entry.pop("sample", None)
        if number == 2:
            entry = line["fed"]["past_key_values.0.decoder.key"]
            entry["shape"][2] -= 1
            entry.pop("data", None)
            entry.pop("sample", None)
            return line | {"got": {}, "error": "a node failed"}
        return line

    code, report = judged(model, changed(result, tmp_path / "cut.jsonl", cut))
    assert code == 1
    assert "present.0.decoder.key was returned as" in report["findings"][0]["observed"]


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (lambda line: line | {"tokens": []} if "tokens" in line else line, 3, "the program found no tokens"),
        (lambda line: line | {"tokens": line["tokens"][:1]} if "tokens" in line else line, 1, "for 2 sequences"),
    ],
)
def test_tokens_that_are_missing_are_no_pass(
    change: Callable[[Line], Line], code: int, said: str, marian: tuple[Path, Path], tmp_path: Path
) -> None:
    model, result = marian
    found, report = judged(model, changed(result, tmp_path / "missing.jsonl", change))
    assert found == code
    assert said in json.dumps([report["findings"], report["not_checked"]])


def test_another_element_type_is_found(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian

    def half(line: Line) -> Line:
        for name, entry in line.get("got", {}).items():
            if name == "logits":
                entry["dtype"] = "float16"
        return line

    code, report = judged(model, changed(result, tmp_path / "half.jsonl", half))
    assert (code, report["findings"][0]["code"]) == (1, "KV420")
    assert "declared as float" in report["findings"][0]["observed"]


def test_a_tensor_that_no_machine_has_is_not_made(marian: tuple[Path, Path], tmp_path: Path) -> None:
    model, result = marian

    def huge(line: Line) -> Line:
        for name, entry in line.get("fed", {}).items():
            if name.startswith("past"):
                entry["shape"] = [1048576, 262144, 1, 1]
                entry.pop("data", None)
                entry.pop("sample", None)
        return line

    done = kvdoctor("judge", model, changed(result, tmp_path / "huge.jsonl", huge))
    assert done.returncode == 2
    assert "is of another model: past_key_values.0.decoder.key was fed with 262144 kv_heads" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no run"),
        ('{"run": "a", "tokens": [[1], [1, 2]], "error": null}\n', "a list of ids for each sequence"),
        ('{"run": "a", "tokens": [["x"]], "error": null}\n', "a list of ids for each sequence"),
        ('{"fed": {}}\n', "names no run"),
        ('{"run": "a", "tokens": [], "error": "no such file"}\n', "has no call of the model: no such file"),
        ("[1]\n", "is not a JSON object"),
    ],
)
def test_what_is_no_result_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "result.jsonl").write_text(text)
    done = kvdoctor("judge", EXPORTS / "gpt2", tmp_path / "result.jsonl")
    assert done.returncode == 2
    assert said in done.stderr


def test_the_result_of_another_model_is_refused(marian: tuple[Path, Path]) -> None:
    done = kvdoctor("judge", EXPORTS / "gpt2", marian[1])
    assert done.returncode == 2
    assert "which this model does not have" in done.stderr


def test_a_trace_with_several_runs_belongs_to_judge(marian: tuple[Path, Path]) -> None:
    done = kvdoctor("step-test", marian[0], "--trace", marian[1])
    assert done.returncode == 2
    assert "kvdoctor judge MODEL" in done.stderr


def test_a_model_without_a_loop_has_no_probe(tmp_path: Path) -> None:
    folder = text_fixtures.load_all()["past-ignored"].write(tmp_path / "model")
    done = kvdoctor("probe", folder, "-l", "python", "-o", tmp_path / "probe")
    assert done.returncode == 1
    assert not (tmp_path / "probe").exists()
