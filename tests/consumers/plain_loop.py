"""Decodes with a merged decoder as the plainest consumer does: every `present.*` is fed back as `past_key_values.*`.

    python plain_loop.py FOLDER

Needs onnxruntime and numpy alone. Prints one JSON document: the version of onnxruntime and, for each batch size, the
steps done and the error that ended the loop early, if any. A step holds the distance of its logits to those of the
branch without a past on the whole prefix, and the spread of the latter.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

STEPS = 8
BATCH_SIZES = (1, 2)
START_LENGTHS = {"batch_size": 1, "encoder_sequence_length": 9}
VOCABULARY = 128


def encode(encoder, batch, rng):
    """Runs the encoder on made-up input; returns what the decoder takes from it."""
    feeds = {}
    for put in encoder.get_inputs():
        shape = [{"batch_size": batch, "encoder_sequence_length": 9}.get(size, size) for size in put.shape]
        if put.name == "attention_mask":
            feeds[put.name] = np.ones(shape, np.int64)
        elif put.type == "tensor(int64)":
            feeds[put.name] = rng.integers(3, 126, shape)
        else:
            feeds[put.name] = rng.normal(0, 1, shape).astype(np.float32)
    states = encoder.run(None, feeds)[0]
    return {"encoder_hidden_states": states, "encoder_attention_mask": np.ones(states.shape[:2], np.int64)}


def empty_past(decoder, batch):
    """Returns the past of a decode that has not begun."""
    pasts = [put for put in decoder.get_inputs() if put.name.startswith("past_key_values.")]
    return {put.name: np.zeros((batch, put.shape[1], 0, put.shape[3]), np.float32) for put in pasts}


def call(decoder, encoded, tokens, past):
    """Calls the decoder, with its cached branch if there is a past; returns the last logits and the next past."""
    cached = any(array.size for array in past.values())
    feeds = {**encoded, **past, "input_ids": tokens, "use_cache_branch": np.array([cached])}
    names = [put.name for put in decoder.get_outputs()]
    known = {put.name for put in decoder.get_inputs()}
    outputs = dict(zip(names, decoder.run(names, {name: feeds[name] for name in feeds if name in known})))
    logits = outputs.pop("logits")[:, -1]
    return logits, {name.replace("present", "past_key_values"): array for name, array in outputs.items()}


def decode(folder, batch):
    """Decodes greedily; returns the steps done and the error."""
    encoder, decoder = (
        ort.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
        for name in ("encoder_model.onnx", "decoder_model_merged.onnx")
    )
    encoded = encode(encoder, batch, np.random.default_rng(batch))
    prefix = np.full((batch, 1), json.loads((folder / "config.json").read_text())["decoder_start_token_id"], np.int64)
    past = nothing = empty_past(decoder, batch)
    steps = []
    for _ in range(STEPS):
        expected, _ = call(decoder, encoded, prefix, nothing)
        try:
            logits, past = call(decoder, encoded, prefix[:, -1:], past)
        except Exception as error:  # onnxruntime has no common class of errors
            return {"batch": batch, "steps": steps, "error": str(error)}
        same_shape = logits.shape == expected.shape
        distance = float(np.abs(logits - expected).max()) if same_shape else None
        steps.append({"distance": distance, "spread": float(np.ptp(expected))})
        prefix = np.concatenate([prefix, expected.argmax(-1)[:, None]], 1)
    return {"batch": batch, "steps": steps, "error": None}


ort.set_default_logger_severity(4)
runs = [decode(Path(sys.argv[1]), batch) for batch in BATCH_SIZES]
print(json.dumps({"onnxruntime": ort.__version__, "runs": runs}))
