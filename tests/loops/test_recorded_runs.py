"""`--record` of a program and `step-test --trace`: the runs of another machine, judged here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.isolated import EXPORTS, kvdoctor
from support.sampling import first
from test_loop_of_each_layout import LOOPS
from test_programs import materials, scratch

from kvdoctor.addons.loops.project import PROGRAMS
from kvdoctor.addons.traces.options import TraceChoices
from kvdoctor.addons.traces.step_test import open_part
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.context import RunContext, extend_context
from kvdoctor.diagnose.examine import build_job, settle_after, settle_unknown
from kvdoctor.diagnose.inspection import build_context
from kvdoctor.diagnose.run_checks import CheckResults
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

assert scratch  # a fixture
Line = dict[str, Any]
MARIAN = "marian-4.57.6"


@dataclass(frozen=True)
class Recorded:
    """A model, what its program printed, and the record."""

    model: Path
    said: list[str]
    record: Path

    def changed(self, change: Callable[[Line], Line | None]) -> Path:
        """The record with other lines after the first; None leaves one out."""
        first, *lines = map(json.loads, self.record.read_text("utf-8").splitlines())
        made = [first, *filter(None, map(change, lines))]
        out = self.record.with_suffix(".changed.jsonl")
        out.write_text("".join(json.dumps(line) + "\n" for line in made), "utf-8")
        return out


def play(name: str, scratch: Path, script: str = "main.py", to: str = "record.jsonl") -> Recorded:
    """What the program in Python records; `script` runs in its folder."""
    made = materials(name, scratch)
    words = ("--contract", made.folder / "contract.json", "--runs", made.folder / "vectors.json")
    record = made.folder / to
    command = [sys.executable, script, "--model", made.model, *words, "--record", record]
    done = subprocess.run(list(map(str, command)), cwd=PROGRAMS / "python", capture_output=True, text=True, check=False)
    assert record.is_file(), done.stderr
    return Recorded(made.model, done.stdout.splitlines(), record)


@cache
def recorded(name: str, scratch: Path) -> Recorded:
    return play(name, scratch)


def judged(model: Path, record: Path) -> CheckResults:
    """What a step-test says of a trace, with one of its own experiments."""
    options = Options(added=(TraceChoices(trace=str(record)),))
    folder = open_folder(str(model))
    contracts = {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}
    part = open_part(options, contracts)
    assert part is not None
    assert part.stack is not None
    stack = next(stack for stack in folder.stacks if stack.name == part.stack)
    added = part.list_experiments(stack.name)
    with Runtime(options.limits) as runtime:
        settled, _ = settle_unknown(build_context(folder, stack, contracts[stack.name], options), options, runtime)
        context = build_context(folder, stack, settled, options)
        plain = runtime.examine(replace(build_job(context, options), experiments=("plain-loop",)), options.progress)
        again = settle_after(context, tuple(plain.runs), False, options, runtime)
        context = replace(context, contract=again or settled, added=added)
        job = replace(build_job(context, options), experiments=tuple(one.name for one in added))
        results = runtime.examine(job, options.progress)
    assert not results.crashes
    return part.results + part.judge(extend_context(context, RunContext, runs=results.runs), options)


def essential(found: CheckResults) -> list[str]:
    return [one.reason for one in found.not_checked if one.essential]


@pytest.mark.parametrize("name", [MARIAN, "llama-gqa", "whisper"])
def test_the_same_runtime_gives_the_same(name: str, scratch: Path) -> None:
    made = recorded(name, scratch)
    found = judged(made.model, made.record)
    assert all(line.endswith(": as expected") for line in made.said)
    assert (found.findings, found.not_checked) == ((), ())
    assert f"all {len(made.said)} runs (" in found.notes[0]
    assert "follow the contract, and give the same here" in found.notes[0]


def test_a_step_test_judges_the_record_and_the_model(scratch: Path) -> None:
    made = recorded("llama-gqa", scratch)
    done = kvdoctor("step-test", made.model, "--trace", made.record, "--format", "json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["findings"]) == (0, "healthy", [])
    replays = [run for run in report["runs"] if run["experiment"].startswith("caller-replay")]
    assert len(replays) == len(made.said)
    assert all(step["difference"] is not None for run in replays for step in run["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS[::4], *first([name for name in LOOPS if name not in LOOPS[::4]], 0)])
def test_no_layout_gives_a_false_alarm(name: str, scratch: Path) -> None:
    made = recorded(name, scratch)
    found = judged(made.model, made.record)
    assert (found.findings, found.not_checked) == ((), ())


WRONG = '''
"""A runtime that loses the newest entry of one key, in every call that returns some."""
import runpy, sys
import onnxruntime as ort

def wrong(name, value):
    if name != {name!r} or value.shape()[2] < 2:
        return value
    array = value.numpy().copy()
    array[:, :, -1:] = 0
    return ort.OrtValue.ortvalue_from_numpy(array)

class Session(ort.InferenceSession):
    def run_with_ort_values(self, names, *more):
        outputs = super().run_with_ort_values(names, *more)
        return [wrong(name, value) for name, value in zip(names, outputs)]

    def run_with_iobinding(self, binding, *more):
        raise NotImplementedError("the program does not bind")

ort.InferenceSession = Session
sys.path.insert(0, ".")
runpy.run_path("main.py", run_name="__main__")
'''


@pytest.mark.parametrize(
    ("name", "key"), [(MARIAN, "present.1.decoder.key"), ("llama-gqa", "present.1.key")], ids=["marian", "llama"]
)
def test_a_wrong_provider_is_found_with_its_first_step_and_tensor(
    name: str, key: str, scratch: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG.format(name=key))
    made = play(name, scratch, str(tmp_path / "wrong.py"), "wrong.jsonl")
    assert made.said[0].startswith("one-sequence: step")
    (finding,) = judged(made.model, made.record).findings
    assert (finding.code, finding.severity) == ("KV420", "error")
    assert finding.observed.startswith("step 0 (line ")
    assert f"{key} is off by" in finding.observed
    assert finding.where.startswith("run one-sequence, ")
    assert any("the same in run 2-sequences" in effect for effect in finding.effects)


def test_rounding_alone_is_a_warning(scratch: Path) -> None:
    """Another arithmetic moves the numbers by some thousandths and no likeliest token."""

    def rounded(line: Line) -> Line:
        for side, names in (("got", ("present", "logits")), ("fed", ("past",))):
            for name, entry in line.get(side, {}).items():
                if "sample" in entry and name.startswith(names):
                    entry["sample"] = [value * 1.004 for value in entry["sample"]]
        return line

    made = recorded(MARIAN, scratch)
    (finding,) = judged(made.model, made.changed(rounded)).findings
    assert finding.severity == "warning"
    assert "rounds more" in finding.cause


@pytest.mark.parametrize("error", [1e-5, 1e-4, 1e-3])
def test_noise_as_of_another_arithmetic_is_a_warning(error: float, scratch: Path) -> None:
    random = np.random.default_rng(0)

    def noisy(line: Line) -> Line:
        entry = line.get("got", {}).get("logits", {})
        for part in ("data", "sample"):
            if part in entry:
                entry[part] = [v * (1 + error * random.standard_normal()) for v in entry[part]]
        return line

    made = recorded(MARIAN, scratch)
    found = judged(made.model, made.changed(noisy))
    assert not essential(found)
    assert {finding.severity for finding in found.findings} <= {"warning"}
    assert bool(found.findings) == (error > 1e-5)


def other_token(line: Line) -> Line:
    if line.get("tokens") and line["run"] == "one-sequence":
        line["tokens"][2][0] += 1
    return line


def failed(line: Line) -> Line:
    return line if "tokens" not in line else line | {"tokens": [], "error": "reorder: [1] in place of [2]"}


def one_row(line: Line) -> Line:
    return line | {"tokens": [found[:1] for found in line["tokens"]]} if "tokens" in line else line


def half_logits(line: Line) -> Line:
    line.get("got", {}).get("logits", {}).update(dtype="float16")
    return line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_token, "as the likeliest, and locally"),
        (failed, "reorder: [1] in place of [2]"),
        (one_row, "for 2 sequences"),
        (half_logits, "declared as float"),
    ],
)
def test_what_came_back_otherwise_is_an_error(change: Callable[[Line], Line], said: str, scratch: Path) -> None:
    made = recorded(MARIAN, scratch)
    found = judged(made.model, made.changed(change)).findings
    assert found[0].code == "KV420"
    assert said in found[0].observed


def test_a_cache_that_comes_back_cut_is_named(scratch: Path) -> None:
    """The next step fails there, and here too from what came back there."""
    steps: dict[str, int] = {}

    def cut(line: Line) -> Line | None:
        if "tokens" in line:
            return line | {"tokens": [], "error": "a node failed"}
        number = steps[line["run"]] = steps.get(line["run"], -1) + 1
        side, name = ("got", "present") if number == 1 else ("fed", "past_key_values")
        entry = line[side].get(f"{name}.0.decoder.key") if number in (1, 2) else None
        if entry is not None:
            entry["shape"][2] -= 1
            line[side][f"{name}.0.decoder.key"] = {"dtype": entry["dtype"], "shape": entry["shape"]}
        return None if number > 2 else line | {"got": {}, "error": "a node failed"} if number == 2 else line

    made = recorded(MARIAN, scratch)
    found = judged(made.model, made.changed(cut)).findings
    assert "present.0.decoder.key was returned as" in found[0].observed


def no_tokens(line: Line) -> Line:
    return line | {"tokens": []} if "tokens" in line else line


def only_one(line: Line) -> Line | None:
    return line if line["run"] == "one-sequence" else None


def other_id(line: Line) -> Line:
    """The program fed another token in one step, and went on rightly from there."""
    fed = line.get("fed", {}).get("input_ids", {})
    if line["run"] == "one-sequence" and fed.get("shape") == [1, 1]:
        fed["data"] = [5]
    return line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_tokens, "the program found no tokens"),
        (only_one, "the trace has no run 2-sequences: the program ended before it"),
        (other_id, "the program did not feed what the run asks: sequence 0: token 5 in place of"),
    ],
)
def test_what_does_not_show_all_runs_is_no_pass(
    change: Callable[[Line], Line | None], said: str, scratch: Path
) -> None:
    made = recorded(MARIAN, scratch)
    assert any(said in reason for reason in essential(judged(made.model, made.changed(change))))


@pytest.mark.parametrize("bytes_left_out", [20, 4000])
def test_a_program_that_ended_too_early_is_not_judged_healthy(bytes_left_out: int, scratch: Path) -> None:
    made = recorded(MARIAN, scratch)
    cut = made.record.with_name("cut.jsonl")
    cut.write_bytes(made.record.read_bytes()[:-bytes_left_out])
    reasons = essential(judged(made.model, cut))
    assert any("the program ended before it did" in reason for reason in reasons)


def test_expected_tokens_of_another_model_are_no_pass(scratch: Path) -> None:
    """The calls give the same here: what is wrong is what was expected."""
    made = recorded(MARIAN, scratch)
    first, *lines = made.record.read_text("utf-8").splitlines()
    document = json.loads(first)
    for call in (call for call in document["runs"][0]["calls"] if "expect" in call):
        call["expect"] = [token + 1 for token in call["expect"]]
    other = made.record.with_name("other.jsonl")
    other.write_text("\n".join([json.dumps(document), *lines]) + "\n", "utf-8")
    (reason,) = essential(judged(made.model, other))
    assert "the runs are those of another model" in reason


def test_runs_of_a_program_of_your_own_need_no_ends(scratch: Path) -> None:
    made = recorded("llama-gqa", scratch)
    plain = made.record.with_name("plain.jsonl")
    lines = [line for line in made.record.read_text("utf-8").splitlines() if '"fed"' in line and '"rewind"' not in line]
    plain.write_text("\n".join(lines) + "\n", "utf-8")
    found = judged(made.model, plain)
    assert (found.findings, found.not_checked) == ((), ())


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (('{"run": "a", "tokens": [[1], [1, 2]], "error": null}',), "a list of ids for each call"),
        (('{"run": "a", "tokens": [["x"]], "error": null}',), "a list of ids for each call"),
        (('{"run": "a", "tokens": [], "error": "no such file"}',), "has no call of the model: no such file"),
        (('{"runs": [{"name": 3}]}',), "'runs' must be those of vectors.json"),
        (('{"run": "a", "tokens": [[1]], "error": null}', '{"fed": {}}'), "names no run, as other lines do"),
        (('{"run": "a", "tokens": [[1]]}', '{"run": "a", "tokens": [[1]]}'), "has ended before"),
    ],
)
def test_what_is_no_record_is_refused(lines: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError) as refused:
        judged(EXPORTS / "gpt2", tmp_path / "record.jsonl")
    assert said in str(refused.value)


def huge(line: Line) -> Line:
    for name in line.get("fed", {}):
        if name.startswith("past"):
            line["fed"][name] = {"dtype": "float", "shape": [1048576, 262144, 1, 1]}
    return line


def test_the_record_of_another_model_is_refused(scratch: Path) -> None:
    made = recorded(MARIAN, scratch)
    with pytest.raises(UsageError, match="which this model does not have"):
        judged(EXPORTS / "gpt2", made.record)
    with pytest.raises(UsageError, match=r"past_key_values\.0\.decoder\.key was fed with 262144 kv_heads"):
        judged(made.model, made.changed(huge))


BEAMS = """
import sys
from decode_loop import Decoder
from decode_loop.record import trace_to

decoder = Decoder(sys.argv[1], sys.argv[2])
trace_to(decoder, open(sys.argv[3], "w"))
decoder.prefill([[5, 6, 7], [8, 9, 10]])
for token in range(20, 24):
    decoder.step([[token], [token + 1]])
    decoder.reorder([1, 0])
decoder.reorder([1, 1])
decoder.step([[30], [31]])
"""


def test_a_beam_search_is_no_fault_of_the_runtime(scratch: Path, tmp_path: Path) -> None:
    made, trace = materials("llama-gqa", scratch), tmp_path / "trace.jsonl"
    words = map(str, (made.model, made.folder / "contract.json", trace))
    environment = os.environ | {"PYTHONPATH": str(PROGRAMS / "python")}
    subprocess.run([sys.executable, "-c", BEAMS, *words], env=environment, check=True)
    found = judged(made.model, trace)
    assert (found.findings, found.not_checked) == ((), ())
    assert "6 of 6 steps give the logits of the trace" in found.notes[0]
