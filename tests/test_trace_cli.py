"""`step-test --trace` as it is called: findings, notes, exit codes; right uses that look odd; other runtimes."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import Done, run
from support.loop_programs import program_text
from support.loops import EXPORTS, Feeds, Loop, as_lines, decoder_only, names, pair, seq2seq, taking_back
from support.sampling import sampled

from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

ROOT = Path(__file__).parent.parent
MARIAN, GPT2 = EXPORTS / "marian-4.57.6", EXPORTS / "gpt2"
CODES = ("KV208", "KV420")


def examined(loop: Loop, model: Path, tmp_path: Path, runtime: Runtime, data: int = 10**9) -> Report:
    file = tmp_path / "loop.jsonl"
    file.write_text(as_lines(loop, data), encoding="utf-8")
    report = step_test(str(model), Options(consumer="held", added=(TraceChoices(str(file)),)), runtime)
    assert not [entry for entry in report.not_checked if "crashed" in entry.reason]
    return report


def mine(report: Report) -> list[tuple[str, str, str]]:
    """Code, severity and cause of what was found in the trace."""
    return [(f.code, f.severity, f.cause) for f in report.findings if f.code in CODES]


def note(report: Report) -> str:
    (line,) = (note for note in report.notes if note.startswith("trace "))
    return line


def is_right(report: Report, said: str) -> None:
    assert mine(report) == []
    assert said in note(report)


def call(model: Path, lines: str, tmp_path: Path, *more: str) -> Done:
    (tmp_path / "loop.jsonl").write_text(lines, encoding="utf-8")
    return run("step-test", str(model), "--trace", "loop.jsonl", *more, cwd=tmp_path)


def test_the_loop_that_everyone_writes(tmp_path: Path) -> None:
    done = call(MARIAN, as_lines(seq2seq(MARIAN, hold=False)), tmp_path, "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert report["arguments"]["trace"] == "loop.jsonl"
    (finding,) = (f for f in report["findings"] if f["name"] == "loop-breaks-contract")
    assert (finding["code"], finding["severity"], finding["stack"]) == ("KV208", "error", "merged")
    assert finding["where"] == "trace step 2 (line 3), input past_key_values.0.encoder.key and 3 more"
    assert finding["declared"].endswith("float[1, 4, 7, 8]: present.0.encoder.key of step 0, held")
    assert "your loop is right up to there" in " ".join(finding["effects"])
    assert "step 2 fails as well" in " ".join(finding["effects"])
    assert finding["repair"]["kind"] == "caller"
    assert finding["repair"]["command"].startswith("kvdoctor re-export ")


def test_a_right_loop_is_one_line(tmp_path: Path) -> None:
    done = call(GPT2, as_lines(decoder_only(GPT2)), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = (line for line in done.stdout.splitlines() if "loop.jsonl" in line)
    assert "5 steps of decoder compared with the contract, none breaks it; run again locally, 5 steps run" in line
    assert "not decided by shapes: the values of past_key_values.0.key" in line


@pytest.mark.parametrize("text", ["", "no JSON", '{"fed": {"x": {"dtype": "float", "shape": [1]}}}'])
def test_a_bad_trace_is_wrong_usage(text: str, tmp_path: Path) -> None:
    done = call(GPT2, text, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvdoctor: ")
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_names_from_a_trace_are_data(tmp_path: Path) -> None:
    loop = decoder_only(GPT2, steps=1)
    loop.calls[0]["fed"]["\x1b[31m::error::\u202e"] = np.zeros(1, np.int64)
    done = call(GPT2, as_lines(loop), tmp_path, "-q")
    assert done.returncode == 1
    assert "\\x1b[31m" in done.stdout
    assert not {"\x1b", "\u202e"} & set(done.stdout)


@pytest.mark.slow
def test_the_numbers_of_the_trace_come_back(tmp_path: Path, runtime: Runtime) -> None:
    for loop, model in ((decoder_only(GPT2), GPT2), (seq2seq(MARIAN), MARIAN), (pair(MARIAN), MARIAN)):
        is_right(
            examined(loop, model, tmp_path, runtime), "run again locally, 5 of 5 steps give the logits of the trace"
        )


def test_a_loop_that_takes_tokens_back_runs_again(tmp_path: Path, runtime: Runtime) -> None:
    is_right(
        examined(decoder_only(GPT2, taking_back), GPT2, tmp_path, runtime),
        "run again locally, 5 of 5 steps give the logits of the trace",
    )
    report = examined(decoder_only(GPT2, taking_back), GPT2, tmp_path, runtime, data=0)
    is_right(report, "5 steps run")


Spoil = Callable[[Loop], object]
ELSEWHERE: dict[str, tuple[Spoil, str]] = {
    "other logits": (lambda loop: np.multiply(loop.calls[2]["got"]["logits"], -1, loop.calls[2]["got"]["logits"]),
                     "other outputs"),
    "another present": (lambda loop: loop.calls[-1]["got"]["present.1.key"].fill(0), "other outputs"),
    "another shape": (lambda loop: loop.calls[-1]["got"].update({"present.1.key": np.zeros((1, 4, 2, 8), np.float32)}),
                      "other outputs"),
    "an error": (lambda loop: loop.calls[-1].update(got={}, error="invalid"), "fails in the caller's runtime"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(ELSEWHERE, 2))
def test_what_another_runtime_does_is_named(name: str, tmp_path: Path, runtime: Runtime) -> None:
    spoil, says = ELSEWHERE[name]
    loop = decoder_only(GPT2)
    spoil(loop)
    ((code, severity, cause),) = mine(examined(loop, GPT2, tmp_path, runtime))
    assert (code, severity) == ("KV420", "error")
    assert says in cause


def test_what_changes_nothing_is_a_note(tmp_path: Path, runtime: Runtime) -> None:
    """Once the cross-attention cache is there, this graph does not read the encoder states."""

    def forget(step: int, feeds: Feeds, _: Loop) -> None:
        if step:
            feeds["encoder_hidden_states"] = feeds["encoder_hidden_states"][:, :0]

    report = examined(seq2seq(MARIAN, forget), MARIAN, tmp_path, runtime)
    ((code, severity, cause),) = mine(report)
    assert (code, severity, cause) == ("KV208", "note", "the encoder states have no elements")
    assert report.verdict == "healthy"


def test_a_silent_mistake_is_measured(tmp_path: Path, runtime: Runtime) -> None:
    def restart(step: int, feeds: Feeds, _: Loop) -> None:
        feeds["position_ids"] = feeds["position_ids"] * (step == 0)

    (finding,) = examined(decoder_only(GPT2, restart), GPT2, tmp_path, runtime).findings
    assert finding.code == "KV208"
    off = re.search(r"every step runs, and the logits of step 1 are ([\d.]+) SD off those", finding.effects[-1])
    assert off is not None
    assert float(off[1]) > 0.1


def chunks(step: int, feeds: Feeds, loop: Loop) -> None:
    """Two more tokens of the prompt at once, on a cache of three."""
    if step == 1:
        feeds.update(
            input_ids=np.array([[50, 51]]), attention_mask=np.ones((1, 5), np.int64), position_ids=np.array([[3, 4]])
        )
    elif step > 1:
        feeds.update(attention_mask=np.ones((1, step + 4), np.int64), position_ids=np.array([[step + 3]]))


def padded(step: int, feeds: Feeds, loop: Loop) -> None:
    """The second row is shorter: padded on the left, masked, and its positions start one lower."""
    feeds["attention_mask"][1, 0] = 0
    feeds["position_ids"] = np.maximum(np.cumsum(feeds["attention_mask"], -1) - 1, 0)[:, -feeds["input_ids"].shape[1] :]


def dummy(step: int, feeds: Feeds, loop: Loop) -> None:
    """A first past of length 1, masked, for bindings that make no tensor without elements."""
    if step == 0:
        feeds.update({name: np.zeros((1, 4, 1, 8), np.float32) for name in feeds if "past" in name})
    mask = np.ones((1, 1 + feeds["attention_mask"].shape[1]), np.int64)
    mask[0, 0] = 0
    feeds["attention_mask"] = mask


def beams(step: int, feeds: Feeds, loop: Loop) -> None:
    """From the second step on three beams of one sentence, later picked anew."""
    if step == 1:
        feeds.update({name: np.repeat(value, 3, 0) for name, value in feeds.items()})
    elif step > 1:
        total = feeds["attention_mask"].shape[1]
        picked = {name: value[[2, 0, 0]] for name, value in feeds.items() if "past" in name}
        feeds.update(picked, attention_mask=np.ones((3, total), np.int64), position_ids=np.full((3, 1), total - 1))


@pytest.mark.parametrize("data", sampled([0, 10**9, 16], 2))
@pytest.mark.parametrize("use", [chunks, padded, dummy, beams])
def test_a_right_use_that_looks_odd(use: Any, data: int, tmp_path: Path, runtime: Runtime) -> None:
    loop = decoder_only(GPT2, use, batch=2 if use is padded else 1)
    assert "error" not in loop.calls[-1]
    report = examined(loop, GPT2, tmp_path, runtime, data)
    assert mine(report) == []
    assert note(report).count("none breaks it") == 1


@pytest.mark.parametrize("data", [0, 16, 10**9])
def test_a_loop_without_the_cache_is_slow_and_right(data: int, tmp_path: Path, runtime: Runtime) -> None:
    def again(step: int, feeds: Feeds, loop: Loop) -> None:
        ids = feeds["input_ids"] if step == 0 else np.concatenate([loop.fed(-1)["input_ids"], feeds["input_ids"]], 1)
        empty = {name: value[:, :, :0] for name, value in feeds.items() if "past" in name}
        mask, places = np.ones_like(ids), np.arange(ids.shape[1])[None]
        feeds.update(empty, input_ids=ids, attention_mask=mask, position_ids=places)

    report = examined(decoder_only(GPT2, again), GPT2, tmp_path, runtime, data)
    is_right(report, "5 steps of decoder in 5 sequences")
    assert "no step used the cache" in note(report)


@pytest.mark.slow
def test_two_sentences_one_after_the_other(tmp_path: Path, runtime: Runtime) -> None:
    for make, model in ((decoder_only, GPT2), (seq2seq, MARIAN), (pair, MARIAN)):
        loop = make(model)
        loop.calls += make(model, steps=3).calls
        is_right(examined(loop, model, tmp_path, runtime), "in 2 sequences")


def test_all_ids_by_shapes_alone_is_suspected_at_the_last_step(tmp_path: Path, runtime: Runtime) -> None:
    """Two tokens on a cache of one may as well be a chunk: nothing that follows tells."""

    def again(step: int, feeds: Feeds, loop: Loop) -> None:
        if step == 1:
            feeds["input_ids"] = np.concatenate([loop.fed(-1)["input_ids"], feeds["input_ids"]], 1)

    report = examined(seq2seq(MARIAN, again, steps=2), MARIAN, tmp_path, runtime, 0)
    (finding,) = (f for f in report.findings if f.code == "KV208")
    assert (finding.confidence, finding.severity) == ("suspected", "warning")
    assert report.verdict == "incomplete"
    assert "give the data of input_ids to decide" in finding.effects[-1]
    assert any(entry.essential and finding.effects[-1] in entry.reason for entry in report.not_checked)


def test_a_trace_without_a_contract_is_not_silent(tmp_path: Path, runtime: Runtime) -> None:
    """A folder without a decoder: the trace is listed as not held, and nothing is called healthy."""
    shutil.copy(MARIAN / "encoder_model.onnx", tmp_path)
    (tmp_path / "loop.jsonl").write_text(as_lines(seq2seq(MARIAN, steps=1)), encoding="utf-8")
    report = step_test(str(tmp_path), Options(added=(TraceChoices(str(tmp_path / "loop.jsonl")),)), runtime)
    assert report.verdict == "not-applicable"
    assert any(entry.code == "KV208" and entry.essential for entry in report.not_checked)


def test_a_trace_of_another_model_is_wrong_usage(tmp_path: Path, runtime: Runtime) -> None:
    loop = Loop([{"file": "x.onnx", "fed": {"audio": np.zeros(3, np.float32)}, "got": {}}])
    with pytest.raises(UsageError, match="'audio' and other inputs that this model does not have"):
        examined(loop, GPT2, tmp_path, runtime)


SNIPPETS = dict(
    re.findall(r"<!-- snippet: (\w+) -->\n```\w+\n(.+?)```", (ROOT / "docs" / "trace.md").read_text("utf-8"), re.DOTALL)
)


def test_the_lines_for_python_write_a_trace(tmp_path: Path, runtime: Runtime) -> None:
    scope: dict[str, Any] = {}
    exec(SNIPPETS["python"], scope)  # noqa: S102 - our own page
    for call in decoder_only(GPT2).calls:
        scope["note"](str(tmp_path / "loop.jsonl"), call["file"], call["fed"], call["got"])
    report = step_test(str(GPT2), Options(added=(TraceChoices(str(tmp_path / "loop.jsonl")),)), runtime)
    is_right(report, "5 steps of decoder compared with the contract, none breaks it")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds onnxruntime-node."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node is not here")
    folder = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "onnxruntime-node"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"onnxruntime-node could not be installed: {done.stderr.strip()[-200:]}")
    (folder / "loop.js").write_text(
        program_text("traced.cjs").replace("// SNIPPET\n", SNIPPETS["javascript"]), encoding="utf-8"
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["hold", "plain"])
def test_the_lines_for_javascript_write_a_trace(loop: str, node: Path, tmp_path: Path, runtime: Runtime) -> None:
    assert "encoder_hidden_states" in names(MARIAN / "decoder_model_merged.onnx")
    trace = tmp_path / "loop.jsonl"
    command = ["node", str(node / "loop.js"), str(MARIAN / "decoder_model_merged.onnx"), str(trace), loop]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = step_test(str(MARIAN), Options(consumer="held", added=(TraceChoices(str(trace)),)), runtime)
    found = [cause for _, _, cause in mine(report)]
    if loop == "hold":
        assert found == []
        assert "4 steps of merged compared with the contract, none breaks it" in note(report)
    else:
        assert len(found) == 1
        assert "the placeholder without elements that step 1 returned" in found[0]
