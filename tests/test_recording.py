"""`kvdoctor.recording` notes what a program's own session was fed and returned, and changes nothing of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.isolated import EXPORTS, kvdoctor

GPT2 = EXPORTS / "gpt2" / "model.onnx"

LOOP = """
import sys
import numpy as np, onnxruntime as ort
import kvdoctor

how, model, trace = sys.argv[1:]
session = kvdoctor.recording(ort.InferenceSession(model), trace)
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


@pytest.mark.parametrize("how", ["run", "values", "binding"])
@pytest.mark.parametrize("kind", ["loop.jsonl", "arrays"])
def test_a_recorded_loop_is_right_and_is_what_it_was(how: str, kind: str, tmp_path: Path) -> None:
    trace = tmp_path / kind
    done = subprocess.run([sys.executable, "-c", LOOP, how, GPT2, trace], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, raised = done.stdout.splitlines()
    assert len(json.loads(tokens)) == 6
    assert raised == "raised"
    if kind == "loop.jsonl":
        *steps, failed = map(json.loads, trace.read_text().splitlines())
        assert [step["fed"]["past_key_values.0.key"]["shape"][2] for step in steps] == [0, 3, 4]
        assert steps[0]["fed"]["input_ids"]["data"] == [5, 6, 7]
        assert steps[2]["got"]["present.1.value"]["shape"] == [1, 4, 5, 8]
        assert "got" not in failed or not failed["got"]
        assert "error" in failed
        trace.write_text("".join(json.dumps(step) + "\n" for step in steps))
    else:
        assert len(list(trace.iterdir())) == 4
        (trace / "step_3.npz").unlink()
    checked = kvdoctor("step-test", GPT2.parent, "--trace", trace, "--format", "json")
    assert checked.returncode == 0, checked.stdout
    assert not json.loads(checked.stdout)["findings"]
