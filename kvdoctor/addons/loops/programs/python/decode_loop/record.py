"""Plays the runs of `vectors.json` and writes what was fed and got, for `kvdoctor step-test MODEL --trace FILE`."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime as ort

from .decoder import Decoder
from .values import Array

SCHEMA = "kvdoctor/loop-vectors/2"
ANY = -1
"""In place of an expected token, where several are right."""
MOST_WHOLE = 64
"""Of a tensor with more elements a sample of so many is written."""


def trace_to(decoder: Decoder, lines: TextIO, run: str | None = None) -> None:
    """Write each later call of a decoder as a line of JSON: types, shapes and numbers of its tensors."""

    def write(call: Mapping[str, Any]) -> None:
        noted = {**call, "fed": _noted(call["fed"]), "got": _noted(call["got"])}
        print(json.dumps(noted if run is None else {"run": run, **noted}), file=lines, flush=True)

    decoder.trace = write


def play(decoder: Decoder, vectors: Path, result: Path, say: Callable[[str], None] = print) -> int:
    """Play each run of a file of vectors and write the calls to `result`; the number of runs that went wrong.

    Raises:
        ValueError: the file has no runs of a schema that this program knows, or `result` is that file.
    """
    document = json.loads(vectors.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA or not document.get("runs"):
        raise ValueError(f"{vectors} has no runs of schema {SCHEMA!r}")
    if result.resolve() == vectors.resolve():
        raise ValueError("the record is the file of the runs itself")
    wrong = 0
    with result.open("w", encoding="utf-8") as lines:
        print(json.dumps(document), file=lines, flush=True)  # what is due, so that a run that is missing is seen
        for run in document["runs"]:
            decoder.reset()
            trace_to(decoder, lines, run["name"])
            tokens, error, problem = list[list[int]](), None, None
            try:
                for call in run["calls"]:
                    if (logits := _make(decoder, call, vectors.parent)) is not None:
                        found, due = logits.argmax(-1).tolist(), call["expect"]
                        if any(wanted not in (ANY, token) for wanted, token in zip(due, found, strict=True)):
                            problem = problem or f"step {len(tokens)}: {found} in place of {due}"
                        tokens.append(found)
            except Exception as failed:  # the next runs say more
                error = str(failed) or type(failed).__name__
                problem = f"error: {error}"
            print(json.dumps({"run": run["name"], "tokens": tokens, "error": error}), file=lines, flush=True)
            wrong += problem is not None
            say(f"{run['name']}: {problem or 'as expected'}")
    decoder.trace = None
    return wrong


def _make(decoder: Decoder, call: Mapping[str, Any], folder: Path) -> Array | None:
    """Make one call of a run; the logits that it returns."""
    match call["call"]:
        case "encode":
            decoder.encode(*pad_source(call["rows"]))
        case "encode-file":
            decoder.encode(read_source(folder / call["file"], call["shape"]))
        case "rewind":
            decoder.rewind(call["count"])
        case "reorder":
            decoder.reorder(call["order"])
        case "prefill":
            return decoder.prefill(call["rows"])
        case "step":
            return decoder.step(call["rows"])
    return None


def read_source(file: Path, shape: Sequence[int]) -> Array:
    """The array of a file of float32, little endian."""
    return np.fromfile(file, "<f4").reshape(shape)


def pad_source(rows: Sequence[Sequence[int]]) -> tuple[Array, Array | None]:
    """Ids for an encoder, the shorter ones padded on the right, and their mask where some are."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max(initial=0)) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = [token for row in rows for token in row]
    return ids, None if mask.all() else mask.astype(np.int64)


def _noted(values: Mapping[str, ort.OrtValue]) -> dict[str, dict[str, Any]]:
    noted = {}
    for name, value in values.items():
        flat = value.numpy().ravel()
        small = flat.size <= MOST_WHOLE
        numbers = flat if small else flat[[k * (flat.size - 1) // (MOST_WHOLE - 1) for k in range(MOST_WHOLE)]]
        data = [n if np.isfinite(n) else None for n in numbers.tolist()]  # JSON has no NaN and no infinity
        noted[name] = {"dtype": value.data_type(), "shape": list(value.shape()), "data" if small else "sample": data}
    return noted
