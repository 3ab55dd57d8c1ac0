"""The calls of that loop without a loop: `python bare_steps.py MODEL PROMPT STEPS`.

All inputs but the cache are made in advance.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

model, prompt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(str(Path(model, "model.onnx")), options, providers=["CPUExecutionProvider"])
names = [one.name for one in session.get_outputs()]
pasts = {one.name: one.shape for one in session.get_inputs() if one.name.startswith("past")}
presents = [name.replace("past_key_values", "present") for name in pasts]


def value(array: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(array)


def made(past: int, new: int) -> dict[str, ort.OrtValue]:
    return {
        "input_ids": value(np.arange(1, new + 1)[None]),
        "attention_mask": value(np.ones((1, past + new), np.int64)),
        "position_ids": value(np.arange(past, past + new)[None]),
    }


def call(inputs: dict[str, ort.OrtValue], cache: dict[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
    """The next cache."""
    outputs = dict(zip(names, session.run_with_ort_values(names, {**inputs, **cache}), strict=True))
    return {past: outputs[present] for past, present in zip(pasts, presents, strict=True)}


prepared = [made(prompt + step, 1) for step in range(steps)]  # kept to the end: what is measured is the cache
inputs = iter(prepared)
cache = {name: value(np.zeros((1, shape[1], 0, shape[3]), np.float32)) for name, shape in pasts.items()}
cache = call(made(0, prompt), cache)
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        cache = call(next(inputs), cache)
    print("done", flush=True)
