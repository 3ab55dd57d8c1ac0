"""Plays the runs of `vectors.json` and writes what was fed and got, for `kvdoctor step-test MODEL --trace FILE`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime as ort

from .decoder import Decoder, Tokens
from .values import Array

SCHEMA = "kvdoctor/loop-vectors/1"
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
            tokens, error = list[list[int]](), None
            try:
                if run["source"] is not None:
                    decoder.encode(*read_source(run["source"], vectors.parent))
                tokens = _follow(decoder, run["prompts"], run["follow"])
                if run["self_test"] is not None:
                    _self_test(decoder, run["self_test"], run["follow"], tokens)
            except Exception as failed:  # the next runs say more
                error = str(failed) or type(failed).__name__
            print(json.dumps({"run": run["name"], "tokens": tokens, "error": error}), file=lines, flush=True)
            problem = _difference(tokens, run["expect"]) if error is None else f"error: {error}"
            wrong += problem is not None
            say(f"{run['name']}: {problem or 'as expected'}")
    decoder.trace = None
    return wrong


def read_source(source: Any, folder: Path) -> tuple[Array, Array | None]:
    """What an encoder reads, and its mask: ids of unequal length with padding on the right, or the array of a file."""
    if isinstance(source, Mapping):
        return np.fromfile(folder / source["file"], "<f4").reshape(source["shape"]), None
    longest = max(map(len, source))
    ids = np.array([[*row, *[0] * (longest - len(row))] for row in source])
    even = all(len(row) == longest for row in source)
    return ids, None if even else np.array([[1] * len(row) + [0] * (longest - len(row)) for row in source])


def _follow(decoder: Decoder, prompts: Tokens, rows: Tokens) -> list[list[int]]:
    """The likeliest token after the prompt and after each given one, whatever was likeliest before."""
    made = [[int(row.argmax())] for row in decoder.prefill(prompts)]
    for tokens in zip(*rows, strict=True):
        for row, logits in zip(made, decoder.step([[token] for token in tokens]), strict=True):
            row.append(int(logits.argmax()))
    return made


def _self_test(decoder: Decoder, name: str, rows: Tokens, made: Tokens) -> None:
    """Take the last step again after going back, or also with other rows: the likeliest tokens must be the same.

    Raises:
        ValueError: they are not.
    """
    order = list(range(len(rows)))
    decoder.rewind(1)
    if name == "reorder":
        order = [*reversed(order), 0]  # the rows backwards, and the first one once more
        decoder.reorder(order)
    got = [int(logits.argmax()) for logits in decoder.step([[rows[row][-1]] for row in order])]
    if got != (due := [made[row][-1] for row in order]):
        raise ValueError(f"{name}: {got} in place of {due}")


def _difference(made: Tokens, expected: Tokens) -> str | None:
    for row, (tokens, due) in enumerate(zip(made, expected, strict=True)):
        for step, (token, wanted) in enumerate(zip(tokens, due, strict=True)):
            if wanted not in (ANY, token):
                return f"sequence {row}, step {step}: token {token} in place of {wanted}"
    return None


def _noted(values: Mapping[str, ort.OrtValue]) -> dict[str, dict[str, Any]]:
    noted = {}
    for name, value in values.items():
        flat = value.numpy().ravel()
        small = flat.size <= MOST_WHOLE
        numbers = flat if small else flat[[k * (flat.size - 1) // (MOST_WHOLE - 1) for k in range(MOST_WHOLE)]]
        data = [n if np.isfinite(n) else None for n in numbers.tolist()]  # JSON has no NaN and no infinity
        noted[name] = {"dtype": value.data_type(), "shape": list(value.shape()), "data" if small else "sample": data}
    return noted
