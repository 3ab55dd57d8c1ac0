"""Traces as files: what can be read, what is refused with the place, and what `kvdoctor.recording` writes."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.isolated import kvdoctor
from support.loops import EXPORTS
from support.sampling import sampled

from kvdoctor.addons.traces.recorded import onnx_dtype
from kvdoctor.addons.traces.runs import read_recording
from kvdoctor.errors import UsageError

IDS = {"dtype": "int64", "shape": [1, 3], "data": [5, 6, 7]}


def line(**fields: Any) -> str:
    return json.dumps({"fed": {"input_ids": IDS}, **fields})


def of(**entry: Any) -> str:
    return json.dumps({"fed": {"input_ids": {**IDS, **entry}}})


BAD_LINES = {
    "nothing": ("", "holds no step"),
    "blank lines": ("\n \n", "holds no step"),
    "no JSON": ("step 0: ok", "line 1 is not a JSON object"),
    "no object": ("[1, 2]", "line 1 is not a JSON object"),
    "cut off": (line() + "\n" + line()[:-9] + "\n", "line 2 is not a JSON object"),
    "deep": ("[" * 100_000, "line 1 is not a JSON object"),
    "another field": (line(feeds={}), "has a field 'feeds'; known are step, run, file, fed, got, error"),
    "nothing fed": ('{"got": {}}', "does not say what was fed"),
    "fed a list": ('{"fed": [1]}', "must map up to"),
    "file a number": (line(file=3), "'file' must be a text"),
    "step a text": (line(step="one"), "'step' must be a whole number"),
    "no shape": ('{"fed": {"x": {"dtype": "int64"}}}', "must have dtype and shape"),
    "more than that": (of(device="cpu"), "must have dtype and shape, may have data or a sample, and nothing else"),
    "strange type": (of(dtype="decimal"), "'decimal' is not an element type"),
    "no type": (of(dtype=None), "'None' is not an element type"),
    "declared shape": (of(shape=["batch", 3]), "not those declared"),
    "negative shape": (of(shape=[-1, 3]), "not those declared"),
    "huge shape": (of(shape=[1 << 30, 1 << 30], data=None), "no tensor has 2 axes of such sizes"),
    "data too short": (of(data=[1]), "a flat list of 3 numbers, and is 1 numbers"),
    "data nested": (of(data=[[5, 6, 7]]), "a flat list of 3 numbers"),
    "data of texts": (of(data=["5", "6", "7"]), "must be a flat list of numbers"),
    "data of fractions": (of(data=[5, 6.5, 7]), "holds numbers that int64 does not"),
    "data too large": (of(data=[5, 6, 1 << 70]), "holds numbers that int64 does not"),
    "long number": (of(data=[5, 6, 7]).replace("7]", "7" * 5000 + "]"), "line 1 is not a JSON object"),
    "a name twice": ('{"fed": {"x": 1, "x": 2}}', "'x' occurs twice"),
}


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        read_recording(str(path))
    return str(refused.value)


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_refused(case: str, tmp_path: Path) -> None:
    text, message = BAD_LINES[case]
    file = tmp_path / "loop.jsonl"
    file.write_text(text, encoding="utf-8")
    said = refusal(file)
    assert message in said
    assert len(said) < 1500


def test_a_line_without_end_is_given_up(tmp_path: Path) -> None:
    """As long as a disk: no more of it is read than a line may have."""
    file = tmp_path / "loop.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"fed": {"x')
        stream.truncate(900 << 20)
    begin = time.process_time()
    assert "line 1 is longer than 64 MiB" in refusal(file)
    assert time.process_time() - begin < 10
    with file.open("r+b") as stream:
        stream.truncate(10 << 30)
    assert "larger than 1 GiB" in refusal(file)


@pytest.mark.parametrize(("less", "cut"), [(None, None), (-9, 2)])
def test_a_last_line_that_its_program_did_not_finish_is_left_out(
    less: int | None, cut: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "loop.jsonl"
    file.write_text(line() + "\n" + line()[:less], encoding="utf-8")
    read = read_recording(str(file))
    assert (len(read.first), read.cut) == (1 if cut else 2, cut)


def test_more_steps_than_anybody_reads(tmp_path: Path) -> None:
    file = tmp_path / "loop.jsonl"
    file.write_text((line() + "\n") * 4097, encoding="utf-8")
    assert "more than 4096 steps" in refusal(file)


def test_what_powershell_writes_is_told(tmp_path: Path) -> None:
    file = tmp_path / "loop.jsonl"
    file.write_text(line(), encoding="utf-16")
    assert "UTF-16" in refusal(file)
    file.write_text(line() + "\r\n" + line() + "\r\n", encoding="utf-8-sig")
    assert [step.place for step in read_recording(str(file)).first] == ["line 1", "line 2"]


@pytest.mark.parametrize(
    ("word", "dtype"),
    [
        *(("float32", "float"), ("f32", "float"), ("FLOAT", "float"), ("Float", "float"), ("tensor(bool)", "bool")),
        *((1, "float"), (7, "int64"), (9, "bool"), ("i64", "int64"), ("Int64", "int64"), ("BOOL", "bool")),
        *(("ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32", "int32"), ("torch.float64", "double"), ("u8", "uint8")),
        *(("complex64", None), (0, None), (True, None), (["float"], None), ("", None)),
    ],
)
def test_types_as_any_binding_writes_them(word: object, dtype: str | None) -> None:
    assert onnx_dtype(word) == dtype


@pytest.mark.parametrize("path", ["none.jsonl", "a\0b", "/dev/null" if Path("/dev/null").exists() else "none"])
def test_what_is_no_file_is_refused(path: str) -> None:
    assert refusal(Path(path))


GPT2 = EXPORTS / "gpt2" / "model.onnx"

LOOP = """
import sys
import numpy as np, onnxruntime as ort
import kvdoctor

how, model, trace, every = sys.argv[1:]
session = kvdoctor.recording(ort.InferenceSession(model), trace, every_value=every == "True")
names = [output.name for output in session.get_outputs()]
caches = [port for port in session.get_inputs() if port.name.startswith("past_key_values")]
past = {port.name: np.zeros((1, 4, 0, 8), np.float32) for port in caches}
tokens = [5, 6, 7]
for step in range(3):
    seen = 0 if not step else len(tokens) - 1
    feeds = {
        "input_ids": np.array([tokens[seen:]]),
        "attention_mask": np.ones((1, len(tokens)), np.int64),
        "position_ids": np.arange(seen, len(tokens))[None],
        **past,
    }
    if how == "run":
        got = session.run(None, feeds)
    elif how == "values":
        values = {name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for name, a in feeds.items()}
        got = [value.numpy() for value in session.run_with_ort_values(names, values)]
    else:
        binding = session.io_binding()
        for name, array in feeds.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        got = binding.copy_outputs_to_cpu()
    got = dict(zip(names, got))
    past = {name: got[name.replace("past_key_values", "present")] for name in past}
    tokens.append(int(got["logits"][0, -1].argmax()))
print(tokens)
try:
    session.run(None, {"input_ids": np.zeros((1, 1), np.int64)})
except Exception:
    print("raised")
"""
"""A loop as users write it: this file may not import onnxruntime, and a program may."""


@pytest.mark.parametrize(
    ("how", "every"),
    sampled([(how, every) for every in (False, True) for how in ("run", "values", "binding")], 2),
)
def test_a_recorded_loop_is_right_and_is_what_it_was(how: str, every: bool, tmp_path: Path) -> None:
    trace = tmp_path / "loop.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", LOOP, how, GPT2, trace, str(every)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    tokens, raised = done.stdout.splitlines()
    assert len(json.loads(tokens)) == 6
    assert raised == "raised"
    *steps, failed = map(json.loads, trace.read_text().splitlines())
    assert [step["fed"]["past_key_values.0.key"]["shape"][2] for step in steps] == [0, 3, 4]
    assert steps[0]["fed"]["input_ids"]["data"] == [5, 6, 7]
    assert steps[2]["got"]["present.1.value"]["shape"] == [1, 4, 5, 8]
    assert len(steps[2]["got"]["present.1.value"]["data" if every else "sample"]) == (160 if every else 64)
    assert "got" not in failed or not failed["got"]
    assert "error" in failed
    trace.write_text("".join(json.dumps(step) + "\n" for step in steps))
    checked = kvdoctor("step-test", GPT2.parent, "--trace", trace, "--format", "json")
    assert checked.returncode == 0, checked.stdout
    assert not json.loads(checked.stdout)["findings"]
