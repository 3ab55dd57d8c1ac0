"""Decodes with a merged decoder as the plainest consumer does: every `present.*` is fed back as `past_key_values.*`.

    python plain_loop.py FOLDER

Needs onnxruntime and numpy alone. Prints one JSON document: the version of onnxruntime and, for each batch size, the
steps done and the error that ended the loop early, if any. A step is the largest distance of its logits to those of
the branch without a past on the whole prefix, beside the spread of the latter.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

STEPS = 8
BATCH_SIZES = (1, 2)
ENCODER_LENGTH = 9


def encode(encoder, batch):
    """Runs the encoder on made-up input; returns what the decoder takes from it."""
    rng = np.random.default_rng(batch)
    feeds = {}
    for entry in encoder.get_inputs():
        shape = [{"batch_size": batch, "encoder_sequence_length": ENCODER_LENGTH}.get(n, n) for n in entry.shape]
        if entry.name == "attention_mask":
            feeds[entry.name] = np.ones(shape, np.int64)
        elif entry.type == "tensor(int64)":
            feeds[entry.name] = rng.integers(3, 126, shape)
        else:
            feeds[entry.name] = rng.normal(0, 1, shape).astype(np.float32)
    states = encoder.run(None, feeds)[0]
    return {"encoder_hidden_states": states, "encoder_attention_mask": np.ones(states.shape[:2], np.int64)}


def call(decoder, encoded, tokens, past):
    """Calls the decoder, without a past in its other branch; returns the last logits and the next past."""
    feeds = {**encoded, "input_ids": tokens, "use_cache_branch": np.array([past is not None])}
    for entry in decoder.get_inputs():
        if entry.name.startswith("past_key_values."):
            empty = np.zeros((len(tokens), entry.shape[1], 0, entry.shape[3]), np.float32)
            feeds[entry.name] = empty if past is None else past[entry.name]
    taken = {entry.name for entry in decoder.get_inputs()}
    results = decoder.run(None, {name: array for name, array in feeds.items() if name in taken})
    outputs = {entry.name: array for entry, array in zip(decoder.get_outputs(), results, strict=True)}
    logits = outputs.pop("logits")[:, -1]
    return logits, {name.replace("present.", "past_key_values."): array for name, array in outputs.items()}


def decode(folder, batch):
    """Decodes greedily; returns the steps done and the error."""
    encoder, decoder = (
        ort.InferenceSession(str(folder / name), providers=["CPUExecutionProvider"])
        for name in ("encoder_model.onnx", "decoder_model_merged.onnx")
    )
    encoded = encode(encoder, batch)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    prefix = np.full((batch, 1), config["decoder_start_token_id"], np.int64)
    past, steps = None, []
    for _ in range(STEPS):
        expected, _ = call(decoder, encoded, prefix, None)
        try:
            logits, past = call(decoder, encoded, prefix[:, -1:], past)
        except Exception as error:  # onnxruntime's errors have no class of their own below Exception
            return {"batch": batch, "steps": steps, "error": str(error)}
        if logits.shape != expected.shape:
            return {"batch": batch, "steps": steps, "error": f"logits of shape {logits.shape}, not {expected.shape}"}
        distance, spread = np.abs(logits - expected).max(), expected.max() - expected.min()
        steps.append({"distance": float(distance), "spread": float(spread)})
        prefix = np.concatenate([prefix, expected.argmax(-1)[:, None]], axis=1)
    return {"batch": batch, "steps": steps, "error": None}


ort.set_default_logger_severity(4)
runs = [decode(Path(sys.argv[1]), batch) for batch in BATCH_SIZES]
print(json.dumps({"onnxruntime": ort.__version__, "runs": runs}))
