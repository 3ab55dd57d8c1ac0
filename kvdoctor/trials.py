"""One call on a changed graph: what the parent asks for when it looks for the place of a fault. In the worker only.

A trial needs nothing of the examination before it: the models and the feeds (`.npz`) lie in a private folder.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from kvdoctor.calls import Array
from kvdoctor.kept_calls import load_call
from kvdoctor.sessions import OrtTensor, mentioned, session_options, to_runtime

FEW = 64
"""Elements of a tensor of integers up to which its values are told, not only its shape."""

SHOWN = 4
"""Numbers shown of a difference between integers."""

MASKING = 1e3
"""Numbers of this size are those of a mask."""

Take = Sequence[Sequence[int] | None]
"""For each axis None, or [parts, start, count]: of each of so many equal parts the entries from `start` on."""


def trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a trial: {"outputs"} or {"pairs"}, or {"error", "names"} where the runtime fails."""
    try:
        return _compare(job) if job["trial"] == "compare" else {"outputs": _facts(_run(job, job["model"]))}
    except Exception as error:  # the bindings raise many types, and all of them are a failed trial
        return {"error": " ".join(str(error).split()), "names": mentioned(error)}


def _run(job: Mapping[str, Any], side: Mapping[str, Any], more: Mapping[str, Array] | None = None) -> dict[str, Any]:
    """The outputs of a model for feeds, which may hold more than it takes."""
    session = _session(job, side)
    feeds = load_call(Path(side["feeds"])) | dict(more or {})
    wanted = {port.name for port in session.get_inputs()}
    given = {name: to_runtime(array) for name, array in feeds.items() if name in wanted}
    names = [port.name for port in session.get_outputs() if port.type.startswith("tensor(")]
    values = session.run_with_ort_values(names, given)
    return {name: OrtTensor(value) for name, value in zip(names, values, strict=True)}


def _session(job: Mapping[str, Any], side: Mapping[str, Any]) -> Any:
    options = session_options(side["level"], job["threads"])
    provider = [side.get("provider") or job["provider"]]
    if side["root"] is None:
        return ort.InferenceSession(side["path"], options, providers=provider)
    # Weights laid out anew would cost the memory and time of a second model.
    options.add_session_config_entry("session.disable_prepacking", "1")
    with open(side["path"], "rb") as file, _standing_in(side["root"]):  # noqa: PTH123
        return ort.InferenceSession(file.read(), options, providers=provider)


@contextlib.contextmanager
def _standing_in(folder: str) -> Iterator[None]:
    """From the working folder the runtime names the weights of a model that it is given as bytes."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _facts(outputs: Mapping[str, OrtTensor]) -> dict[str, Any]:
    found = {}
    for name, tensor in outputs.items():
        found[name] = {"dtype": tensor.dtype, "shape": tensor.shape}
        if np.prod(tensor.shape) <= FEW and tensor.dtype.startswith(("int", "uint", "bool")):
            found[name]["values"] = [int(number) for number in tensor.array().ravel()]
    return found


def _compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Two models on two calls: what corresponds is compared; `inject` gives values of the right one to the left."""
    right = _run(job, job["right"])
    inject = {name: _taken(right[output].array(), take) for name, output, take in job["inject"]}
    left = _run(job, job["left"], inject)
    pairs = []
    for one, other, take in job["pairs"]:
        expected, actual = _taken(right[other].array(), take), left[one].array()
        same = actual.shape == expected.shape
        pairs.append({"dtype": left[one].dtype, **_difference(actual, expected)} if same else None)
    return {"pairs": pairs}


def _taken(array: Array, take: Take) -> Array:
    """The rows of an array that a shorter call must have as well."""
    for axis, rule in enumerate(take):
        if rule is not None:
            parts, start, count = rule
            split = array.reshape(*array.shape[:axis], parts, -1, *array.shape[axis + 1 :])
            some = np.take(split, range(start, start + count), axis=axis + 1)
            array = some.reshape(*array.shape[:axis], parts * count, *array.shape[axis + 1 :])
    return np.ascontiguousarray(array)


def _difference(actual: Array, expected: Array) -> dict[str, Any]:
    """The largest difference as a fraction of the spread of what is expected; -1 where one side alone is not finite.

    What a mask adds is far larger than what it hides: numbers from `MASKING` on are held against themselves.
    """
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    both = np.isfinite(got) & np.isfinite(want)
    alike = both | (got == want) | (np.isnan(got) & np.isnan(want))
    size = np.abs(want)
    plain = both & (size < MASKING)
    scale = np.where(plain, _spread(want[plain]), np.maximum(size, 1.0))
    apart = np.abs(got[both] - want[both]) / scale[both]
    relative = float(apart.max(initial=0.0)) if alike.all() else -1.0
    facts: dict[str, Any] = {"relative": float(f"{relative:.3g}")}
    if actual.dtype.kind in "iub" and relative != 0:
        facts["got"] = [int(number) for number in actual.ravel()[:SHOWN]]
        facts["wanted"] = [int(number) for number in expected.ravel()[:SHOWN]]
    return facts


def _spread(values: Array) -> float:
    if not values.size:
        return 1.0
    return max(float(np.std(values)), 0.1 * float(np.sqrt(np.mean(values**2))), 1e-12)
