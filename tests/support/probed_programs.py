"""Programs of loops, built once, with the probe that kvdoctor writes beside them."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from kvdoctor.decode.calls import MOST_DATA
from kvdoctor.loops.check import check, find_library
from kvdoctor.loops.language import CannotBuild, languages
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.loops.probe import ANY
from kvdoctor.options import Options
from support.isolated import kvdoctor
from support.loop_programs import one_at_a_time

Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class BuiltProgram:
    """A project that was built, and the model that it was written for."""

    language: str
    folder: Path
    model: Path

    def run(self, *words: str, model: Path | None = None, **variables: str) -> Done:
        command = (*languages()[self.language].run, "--model", str(model or self.model), *words)
        return self.start(*command, **variables)

    def start(self, *command: str, **variables: str) -> Done:
        environment = os.environ | dict.fromkeys(("ONNXRUNTIME_LIB", "ORT_DYLIB_PATH"), str(find_library())) | variables
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    @property
    def probe(self) -> list[str]:
        """The runs of the probe."""
        return (self.folder / "probe.txt").read_text("utf-8").splitlines()


def built(language: str, model: Path, out: Path) -> BuiltProgram:
    """Write and build a program; a skip where the tools of the language are missing."""
    made = write_loop(LoopRequest(str(model), str(out), language, probe=True), Options())
    assert made.reason is None
    with one_at_a_time(language):
        try:
            check(out, model, languages()[language], (), 60)
        except CannotBuild as reason:
            if "not found" not in str(reason) and "cannot be had" not in str(reason):
                raise
            pytest.skip(str(reason))
    return BuiltProgram(language, out, model)


def words_of(line: str, option: str) -> list[str]:
    """The values of an option in a run."""
    words = line.split(" ")
    return [value for name, value in zip(words[::2], words[1::2], strict=True) if name == option]


def assert_the_probe_is_as_expected(program: BuiltProgram) -> None:
    """Every run finds its tokens; the result has its calls in order, then its tokens."""
    result = program.folder / "result.jsonl"
    result.write_text("of an earlier probe\n")
    done = program.run("--probe", "probe.txt")
    names = [words_of(line, "--run")[0] for line in program.probe]
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"{name}: as expected" for name in names]), done.stderr

    lines = [json.loads(line) for line in result.read_text("utf-8").splitlines()]
    assert all(next(iter(line)) == "run" for line in lines)
    ends = [line for line in lines if "tokens" in line]
    assert [(end["run"], end["error"]) for end in ends] == [(name, None) for name in names]
    assert list(dict.fromkeys(line["run"] for line in lines)) == names
    for line, end in zip(program.probe, ends, strict=True):
        expected = [[int(token) for token in row.split(",")] for row in words_of(line, "--expect")]
        assert [len(row) for row in end["tokens"]] == [len(row) for row in expected]
        pairs = [pair for got, due in zip(end["tokens"], expected, strict=True) for pair in zip(got, due, strict=True)]
        assert all(due in (-1, token) for token, due in pairs)
        calls = [one for one in lines if one["run"] == end["run"] and "tokens" not in one]
        again = len(words_of(line, "--self-test"))
        decoder = [call for call in calls if "logits" in call["got"]]
        assert len(decoder) == len(expected[0]) + again
    assert_tensors_are_noted(lines)


def assert_tensors_are_noted(lines: list[dict[str, Any]]) -> None:
    """Small tensors have their data, larger ones a sample."""
    tensors = [t for line in lines if "fed" in line for t in (*line["fed"].values(), *line["got"].values())]
    sizes = {int(np.prod(tensor["shape"])) for tensor in tensors}
    assert max(sizes) > MOST_DATA >= min(sizes)
    for tensor in tensors:
        size = int(np.prod(tensor["shape"]))
        assert ("data" in tensor, "sample" in tensor) == (size <= MOST_DATA, size > MOST_DATA)
        assert len(tensor.get("data") or tensor.get("sample") or []) == min(size, MOST_DATA)


def assert_samples_are_those_of_the_model(program: BuiltProgram, prompt: list[int]) -> None:
    """The logits of a prompt, elements k * (size - 1) / 63, beside those of a call from here; for decoder-only."""
    (program.folder / "one.txt").write_text(f"--run one --prompt {','.join(map(str, prompt))} --expect -1\n")
    done = program.run("--probe", "one.txt", "--result", "one.jsonl")
    assert done.returncode == 0, done.stderr
    call, _ = map(json.loads, (program.folder / "one.jsonl").read_text("utf-8").splitlines())
    session = ort.InferenceSession(program.model / call["file"])
    feeds = {}
    for name, noted in call["fed"].items():
        kind = {"tensor(int64)": np.int64, "tensor(float)": np.float32}[
            next(one.type for one in session.get_inputs() if one.name == name)
        ]
        feeds[name] = np.array(noted["data"], kind).reshape(noted["shape"])
    names = list(call["got"])
    for name, value in zip(names, session.run(names, feeds), strict=True):
        noted, flat = call["got"][name], value.ravel()
        picked = flat if flat.size <= MOST_DATA else flat[[k * (flat.size - 1) // 63 for k in range(64)]]
        np.testing.assert_allclose(noted.get("data") or noted["sample"], picked, rtol=1e-5, atol=1e-6)
    assert "sample" in call["got"]["logits"]


def assert_a_wrong_token_is_found(program: BuiltProgram) -> None:
    """One expected token is another one, and a run cannot be decoded: both are said, and the runs after them go on."""
    good = program.probe[0]
    (row, *_) = words_of(good, "--expect")
    wrong = row.split(",")
    step = next(i for i, token in enumerate(wrong) if i and token != str(ANY))
    token = int(wrong[step])
    wrong[step] = str(token + 1)
    other = good.replace(f"--expect {row}", f"--expect {','.join(wrong)}").replace("--run ", "--run wrong-")
    (prompt, *_) = words_of(good, "--prompt")
    failing = good.replace(f"--prompt {prompt}", "--prompt 999999").replace("--run ", "--run failing-")
    (program.folder / "mixed.txt").write_text(f"\n{other}\n{failing}\r\n\n{good}\n")
    done = program.run("--probe", "mixed.txt", "--result", "mixed.jsonl")
    first, second, third = done.stdout.splitlines()
    name = words_of(good, "--run")[0]
    assert done.returncode == 1
    assert first == f"wrong-{name}: sequence 0, step {step}: token {token} in place of {token + 1}"
    assert second.startswith(f"failing-{name}: error: ")
    assert third == f"{name}: as expected"
    ends = [
        line
        for line in map(json.loads, (program.folder / "mixed.jsonl").read_text("utf-8").splitlines())
        if "tokens" in line
    ]
    assert [(bool(end["tokens"]), end["error"] is None) for end in ends] == [(True, True), (False, False), (True, True)]
    assert ends[1]["error"] == second.partition("error: ")[2]


def assert_requests_that_cannot_be_right_are_refused(program: BuiltProgram, arguments: str) -> None:
    """Each refusal ends the program with a message, before or after the model was opened."""
    words = arguments.split(" ")
    for given, said in (
        (["--follow", "5", "--self-test", "rewnd"], "rewnd"),
        (["--self-test", "rewind"], "--follow"),
        (["--top-k", "0"], "--top-k"),
        (["--most", "0"], "--most"),
        (["--temperature", "-1"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--provider", "NoSuchExecutionProvider"], "CPUExecutionProvider"),
        (["--expect", "5"], "expect"),
        (["--probe", "probe.txt"], "--probe"),
    ):
        done = program.run(*words, *given)
        assert done.returncode in (1, 2), given
        assert said in done.stderr.splitlines()[0], (given, done.stderr)
    for line, said in (
        ("--run x --prompt 5 --expect 1,2", "line 1"),
        ("--prompt 5 --expect 1", "--run"),
        ("--run x --prompt 5 --expect 1 --most 3", "most"),
        ("", "there is no run"),
    ):
        (program.folder / "bad.txt").write_text(line + "\n")
        done = program.run("--probe", "bad.txt", "--result", "bad.jsonl")
        assert done.returncode in (1, 2)
        assert said in done.stderr, (line, done.stderr)
    before = (program.folder / "probe.txt").read_bytes()
    done = program.run("--probe", "probe.txt", "--result", "./probe.txt")
    assert "--result is the file of --probe itself" in done.stderr
    assert (program.folder / "probe.txt").read_bytes() == before


def assert_the_readme_decodes(program: BuiltProgram, trace: Path) -> None:
    """The README's command decodes as it stands there, and `kvdoctor step-test` accepts its trace."""
    text = (program.folder / "README.md").read_text("utf-8")
    line = next(line for line in text.splitlines() if "--model" in line and "--prompt" in line)
    words = line.split()
    done = program.run(*words[words.index("--model") + 2 :], KVDOCTOR_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().split(",")) > 1
    lines = [json.loads(line) for line in trace.read_text("utf-8").splitlines()]
    assert not any("run" in line for line in lines)
    assert_tensors_are_noted(lines)
    assert_a_trace_is_accepted(program.model, trace)


def assert_a_trace_is_accepted(model: Path, trace: Path, steps: int | None = None) -> None:
    """`kvdoctor step-test --trace` reads it and finds no step that breaks the contract."""
    done = kvdoctor("step-test", model, "--consumer", "held", "--trace", trace, "--format", "json")
    report = json.loads(done.stdout)
    assert not [found for found in report["findings"] if found["code"] in ("KV208", "KV420")], done.stdout
    assert "none breaks it" in done.stdout
    if steps is not None:
        assert f"{steps} steps of" in done.stdout


def assert_the_judge_finds_nothing(program: BuiltProgram) -> None:
    """`kvdoctor judge` reads the result of the whole probe."""
    done = kvdoctor("judge", program.model, program.folder / "result.jsonl", "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["findings"], report["not_checked"]) == (0, [], [])


def assert_sources_of_unequal_length_are_masked(program: BuiltProgram) -> None:
    """A batch decodes the tokens that each source has by itself."""
    sources = ("5,6,7,8,9", "9,8")
    alone = [program.run("--source", one, "--prompt", "1", "--most", "6").stdout for one in sources]
    words = [word for one in sources for word in ("--source", one, "--prompt", "1")]
    together = program.run(*words, "--most", "6")
    assert together.stdout == "".join(alone), together.stderr
    assert alone[0] != alone[1]


def snippet(language: str) -> str:
    """The lines of docs/trace.md that write a trace."""
    page = (Path(__file__).parents[2] / "docs" / "trace.md").read_text("utf-8")
    found = re.search(rf"<!-- snippet: {language} -->\n```\w+\n(.+?)```", page, re.DOTALL)
    assert found is not None
    return found[1]
