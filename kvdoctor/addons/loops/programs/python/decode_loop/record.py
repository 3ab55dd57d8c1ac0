"""Makes the calls of runs, and writes what was fed and got, for `kvdoctor step-test MODEL --trace FILE`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import onnxruntime as ort

from .decoder import Decoder
from .sampling import Sampling
from .values import Array

SCHEMA = "kvdoctor/loop-vectors/2"
ANY = -1
"""In place of an expected token, where several are right."""
MOST_WHOLE = 64
"""Of a tensor with more elements a sample of so many is written."""
NEEDED = {
    "encode": ("rows",),
    "encode-file": ("file", "shape"),
    "prefill": ("rows",),
    "step": ("rows",),
    "rewind": ("count",),
    "reorder": ("order",),
    "generate": ("rows",),
}
"""What each call has. It may have expected tokens too, and `generate` its end and how tokens are drawn."""
DRAWN = {one.name for one in fields(Sampling)}


def trace_to(decoder: Decoder, lines: TextIO, run: str | None = None) -> None:
    """Write each later call of a decoder as a line of JSON: types, shapes and numbers of its tensors."""

    def write(call: Mapping[str, Any]) -> None:
        noted = {**call, "fed": _noted(call["fed"]), "got": _noted(call["got"])}
        print(json.dumps(noted if run is None else {"run": run, **noted}), file=lines, flush=True)

    decoder.trace = write


def play(decoder: Decoder, vectors: Path, lines: TextIO | None = None) -> bool:
    """Play each run of a file of vectors, and say whether its tokens are the expected ones; whether all are.

    Raises:
        ValueError: the file has no runs of a schema that this program knows.
    """
    document = json.loads(vectors.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA or not document.get("runs"):
        raise ValueError(f"{vectors} has no runs of schema {SCHEMA!r}")
    good = True
    if lines is not None:  # what is due, so that a run that is missing is seen
        print(json.dumps(document), file=lines, flush=True)
    for run in document["runs"]:
        decoder.reset()
        if lines is not None:
            trace_to(decoder, lines, run["name"])
        tokens, error, problem = list[list[int]](), None, None
        try:
            for call in check_calls(run["calls"]):
                found, due = [row[0] for row in make(decoder, call, vectors.parent)], call.get("expect", ())
                if any(wanted not in (ANY, token) for wanted, token in zip(due, found, strict=bool(due))):
                    problem = problem or f"step {len(tokens)}: {found} in place of {due}"
                tokens.extend([found] if due else [])
        except Exception as failed:  # the next runs say more
            error = str(failed) or type(failed).__name__
            problem = f"error: {error}"
        if lines is not None:
            print(json.dumps({"run": run["name"], "tokens": tokens, "error": error}), file=lines, flush=True)
        print(f"{run['name']}: {problem or 'as expected'}")
        good = good and problem is None
    return good


def check_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls of a run, each of which has what it needs and nothing that is not known.

    Raises:
        ValueError: they are no list of calls; the message names the key.
    """
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError("calls must be a list of objects, each with a 'call'")
    for call in calls:
        name = call.get("call")
        if not isinstance(name, str) or name not in NEEDED:
            raise ValueError(f"there is no call {name!r}; known are {', '.join(NEEDED)}")
        if missing := [key for key in NEEDED[name] if key not in call]:
            raise ValueError(f"the call {name!r} needs {missing[0]!r}")
        known = {"call", "expect", *NEEDED[name], *({"most", "stop", *DRAWN} if name == "generate" else ())}
        if unknown := [key for key in call if key not in known]:
            raise ValueError(f"the call {name!r} takes no {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return calls


def make(decoder: Decoder, call: Mapping[str, Any], folder: Path = Path()) -> list[list[int]]:
    """Make a call that was checked: the tokens of each sequence that it generates, or the likeliest one after it."""
    match call["call"]:
        case "encode":
            decoder.encode(*pad_source(call["rows"]))
        case "encode-file":
            decoder.encode(np.fromfile(folder / call["file"], "<f4").reshape(call["shape"]))
        case "rewind":
            decoder.rewind(call["count"])
        case "reorder":
            decoder.reorder(call["order"])
        case "generate":
            sampling = Sampling(**{name: call[name] for name in DRAWN & call.keys()})
            return decoder.generate(call["rows"], call.get("most", 20), call.get("stop"), sampling.chooser())
        case "prefill" | "step" as name:
            logits: Array = getattr(decoder, name)(call["rows"])
            return [[int(row.argmax())] for row in logits]
    return []


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
