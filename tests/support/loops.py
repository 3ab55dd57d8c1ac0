"""Decode loops as people write them by hand, over real exports, with a place to make a mistake in; each call noted.

Nothing of kvdoctor is used here: names and rules are those that the exports' users know.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
MERGED = "decoder_model_merged.onnx"
Feeds = dict[str, np.ndarray[Any, Any]]
Change = Callable[[int, Feeds, "Loop"], object]
"""Called before each step with its number, its feeds, which may be changed, and the loop so far."""


@cache
def session(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@dataclass
class Loop:
    """One program: the calls that it made."""

    calls: list[dict[str, Any]] = field(default_factory=list)

    def call(self, file: Path, feeds: Feeds) -> Feeds | None:
        """Run a graph and note what went in and out, or the error."""
        call: dict[str, Any] = {"file": file.name, "fed": dict(feeds), "got": {}}
        self.calls.append(call)
        try:
            outputs = session(file).run(None, feeds)
        except Exception as error:
            call["error"] = str(error)
            return None
        call["got"] = dict(zip((o.name for o in session(file).get_outputs()), outputs, strict=True))
        return dict(call["got"])

    def fed(self, step: int) -> Feeds:
        """What a step was fed; -1 is the step before."""
        return dict(self.calls[step]["fed"])

    def got(self, step: int) -> Feeds:
        return dict(self.calls[step]["got"])


def encode(folder: Path, length: int = 7, batch: int = 1) -> Feeds:
    """The encoder's output, and what the decoder takes of its input."""
    file = session(folder / "encoder_model.onnx")
    rng, feeds = np.random.default_rng(5), {}
    for port in file.get_inputs():
        if port.name == "attention_mask":
            feeds[port.name] = np.ones((batch, length), np.int64)
        elif "int" in port.type:
            feeds[port.name] = rng.integers(30, 90, (batch, length))
        else:
            shape = [d if isinstance(d, int) else batch if i == 0 else length for i, d in enumerate(port.shape)]
            feeds[port.name] = rng.standard_normal(shape).astype(np.float32)
    states = file.run(None, feeds)[0]
    return {"encoder_hidden_states": states, "encoder_attention_mask": np.ones(states.shape[:2], np.int64)}


def names(file: Path) -> list[str]:
    return [port.name for port in session(file).get_inputs()]


def widths(file: Path, name: str) -> tuple[int, int]:
    shape = next(port.shape for port in session(file).get_inputs() if port.name == name)
    return shape[1], shape[3]


def seq2seq(folder: Path, change: Change | None = None, steps: int = 5, hold: bool = True, batch: int = 1) -> Loop:
    """A merged encoder-decoder: greedy, one token a step, the cross-attention cache of the first step held."""
    loop, file = Loop(), folder / MERGED
    encoded = {name: value for name, value in encode(folder, batch=batch).items() if name in names(file)}
    pasts = {
        n: np.zeros((batch, widths(file, n)[0], 0, widths(file, n)[1]), np.float32) for n in names(file) if "past" in n
    }
    ids = np.full((batch, 1), 40)
    for step in range(steps):
        feeds = {**encoded, **pasts, "input_ids": ids, "use_cache_branch": np.array([step > 0])}
        if change is not None:
            change(step, feeds, loop)
        got = loop.call(file, feeds)
        if got is None:
            break
        ids = got["logits"][:, -1:].argmax(-1)
        for name, value in got.items():
            if name.startswith("present") and not (hold and step and ".encoder." in name):
                pasts[name.replace("present", "past_key_values")] = value
    return loop


def pair(folder: Path, change: Change | None = None, steps: int = 5) -> Loop:
    """Two files: decoder_model first, decoder_with_past_model from then on."""
    loop, files = Loop(), [folder / "decoder_model.onnx", folder / "decoder_with_past_model.onnx"]
    encoded, pasts, ids = encode(folder), {}, np.full((1, 1), 40)
    for step in range(steps):
        file = files[min(step, 1)]
        feeds = {name: value for name, value in {**encoded, **pasts, "input_ids": ids}.items() if name in names(file)}
        if change is not None:
            change(step, feeds, loop)
        got = loop.call(file, feeds)
        if got is None:
            break
        ids = got["logits"][:, -1:].argmax(-1)
        pasts |= {n.replace("present", "past_key_values"): v for n, v in got.items() if n.startswith("present")}
    return loop


def decoder_only(folder: Path, change: Change | None = None, steps: int = 5, batch: int = 1) -> Loop:
    """A decoder alone: a prompt of three tokens, then one at a time."""
    loop, file = Loop(), folder / "model.onnx"
    pasts = {
        n: np.zeros((batch, widths(file, n)[0], 0, widths(file, n)[1]), np.float32) for n in names(file) if "past" in n
    }
    ids, length = np.tile([[40, 41, 42]], (batch, 1)), 0
    for step in range(steps):
        total = length + ids.shape[1]
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, total), np.int64),
            "position_ids": np.tile(np.arange(length, total), (batch, 1)),
            **pasts,
        }
        if change is not None:
            change(step, feeds, loop)
        got = loop.call(file, feeds)
        if got is None:
            break
        length, ids = total, got["logits"][:, -1:].argmax(-1)
        pasts = {n.replace("present", "past_key_values"): v for n, v in got.items() if n.startswith("present")}
    return loop


def taking_back(number: int, feeds: Feeds, loop: Loop) -> None:
    """From step 2 on several tokens are tried, and all but the first are taken back before the next step."""
    if number < 2:
        return
    tried = np.tile(feeds["input_ids"], (1, 3))
    pasts = {name: value for name, value in feeds.items() if "past" in name and ".encoder." not in name}
    if number > 2:
        pasts = {name: value[:, :, :-2] for name, value in pasts.items()}
    length = next(iter(pasts.values())).shape[2]
    feeds.update({"input_ids": tried, **pasts})
    if "attention_mask" in feeds:
        feeds["attention_mask"] = np.ones((len(tried), length + 3), np.int64)
        feeds["position_ids"] = np.tile(np.arange(length, length + 3), (len(tried), 1))


def as_lines(loop: Loop, data: int = 64) -> str:
    """The loop as JSON lines, with the values of tensors up to `data` elements."""
    lines = []
    for call in loop.calls:
        line: dict[str, Any] = {"file": call["file"]}
        for side in ("fed", "got"):
            line[side] = {}
            for name, value in call[side].items():
                entry: dict[str, Any] = {"dtype": str(value.dtype), "shape": list(value.shape)}
                if value.size <= data:
                    entry["data"] = value.ravel().tolist()
                line[side][name] = entry
        if "error" in call:
            line["error"] = call["error"]
        lines.append(json.dumps(line))
    return "\n".join(lines) + "\n"
