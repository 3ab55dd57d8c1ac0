"""Trials: single calls of changed graphs, by which the parent locates a fault.

A trial needs nothing of the experiments before it: the models and the feeds (`.npz`) are in a private folder.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from kvdoctor.decode import messages
from kvdoctor.decode.calls import Array, load_call, save_call
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.providers import load, name_adapter, one_line, open_session
from kvdoctor.runtime.worker.sessions import (
    LEAST_IR,
    LEAST_OPSET,
    OrtTensor,
    close_others,
    identity,
    mentioned,
    session_options,
    to_runtime,
)

FEW = 64
"""Elements of a tensor of integers up to which its values are sent, not only its shape."""

SHOWN = 4
"""Numbers sent of a difference between integers."""

LARGE, SAME, MOST_COMPARED = 1e-2, 1e-4, 1 << 22  # differences of values and of equal entries; numbers
MASKING = 1e3
"""Numbers of this size are those of a mask."""


def run_trial(job: messages.TrialJob | messages.CompareJob, _: object = None) -> messages.TrialDone:
    """Carry out a trial, in the memory that the sessions of the stack took."""
    close_others()
    try:
        if isinstance(job, messages.CompareJob):
            return _compare(job)
        outputs = _run(job, job.model)
        if job.keep is not None:
            save_call(job.keep, outputs)
        return messages.TrialDone(outputs=_describe(outputs))
    except Exception as error:  # the bindings raise many types, and all of them are a failed trial
        return messages.TrialDone(error=" ".join(str(error).split()), names=mentioned(error))


def _run(
    job: messages.TrialJob | messages.CompareJob, model: messages.TrialModel, more: Mapping[str, Array] | None = None
) -> dict[str, OrtTensor]:
    """The outputs of a model for its feeds and `more`, which may hold more than it takes."""
    session = _open(job, model)
    feeds = load_call(model.feeds) | dict(more or {})
    wanted = {port.name for port in session.get_inputs()}
    given = {name: to_runtime(array) for name, array in feeds.items() if name in wanted}
    names = [port.name for port in session.get_outputs() if port.type.startswith("tensor(")]
    values = session.run_with_ort_values(names, given)
    return {name: OrtTensor(value) for name, value in zip(names, values, strict=True)}


def _open(job: messages.TrialJob | messages.CompareJob, model: messages.TrialModel) -> Any:
    options = session_options(model.level, job.threads)
    provider = model.provider or job.provider
    if model.root is None:
        more = {"disabled_optimizers": {*model.disabled}} if model.disabled else {}
        return open_session(str(model.path), options, provider, **more)
    # Packed weights would cost the memory and time of a second model.
    options.add_session_config_entry("session.disable_prepacking", "1")
    with model.path.open("rb") as file, _working_in(model.root):
        return open_session(file.read(), options, provider)


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """The runtime resolves the weights of a model that is given as bytes from the working folder."""
    before = os.getcwd()  # noqa: PTH109
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _describe(outputs: Mapping[str, OrtTensor]) -> dict[str, messages.TrialValue]:
    found = {}
    for name, tensor in outputs.items():
        short = np.prod(tensor.shape) <= FEW and tensor.dtype.startswith(("int", "uint", "bool"))
        numbers = tuple(int(number) for number in tensor.array().ravel()) if short else None
        found[name] = messages.TrialValue(tensor.dtype, tensor.shape, numbers)
    return found


def _compare(job: messages.CompareJob) -> messages.TrialDone:
    right = _run(job, job.right)
    inject = {pair.left: _take(right[pair.right].array(), pair.take) for pair in job.inject}
    left = _run(job, job.left, inject)
    return messages.TrialDone(differences=tuple(_compare_pair(pair, left, right) for pair in job.pairs))


def _compare_pair(
    pair: messages.ValuePair, left: Mapping[str, OrtTensor], right: Mapping[str, OrtTensor]
) -> messages.ValueDifference | None:
    expected, actual = _take(right[pair.right].array(), pair.take), left[pair.left].array()
    if actual.shape != expected.shape:
        return None
    relative = _measure_difference(actual, expected)
    if actual.dtype.kind not in "iub" or relative == 0:
        order = _find_order(actual, expected) if relative > LARGE else ()
        return messages.ValueDifference(left[pair.left].dtype, relative, order=order)
    first = (tuple(int(number) for number in array.ravel()[:SHOWN]) for array in (actual, expected))
    return messages.ValueDifference(left[pair.left].dtype, relative, *first)


def _find_order(actual: Array, expected: Array) -> tuple[int, ...]:
    """An axis along which all entries are expected ones in another order, then which ones; () where there is none."""
    for axis, count in enumerate(actual.shape if actual.size * FEW < MOST_COMPARED else ()):
        got, want = (np.moveaxis(one.astype(np.float64), axis, 0).reshape(count, -1) for one in (actual, expected))
        apart = np.abs(got[:, None] - want).max(axis=2) if 1 < count <= FEW else np.ones((1, 1))
        if apart.size > 1 and (apart.min(axis=1) <= SAME * expected.std()).all():
            return axis, *map(int, apart.argmin(axis=1))
    return ()


def _take(array: Array, take: messages.Take) -> Array:
    """The entries of an array that a shorter call must have as well."""
    for axis, rule in enumerate(take):
        if rule is not None:
            parts, start, count = rule
            split = array.reshape(*array.shape[:axis], parts, -1, *array.shape[axis + 1 :])
            some = np.take(split, range(start, start + count), axis=axis + 1)
            array = some.reshape(*array.shape[:axis], parts * count, *array.shape[axis + 1 :])
    return np.ascontiguousarray(array) if take else array  # which would give a scalar an axis


def _measure_difference(actual: Array, expected: Array) -> float:
    """The largest difference as a fraction of the expected standard deviation; -1 where one side alone is not finite.

    A mask's numbers are far larger than those that it hides: numbers from `MASKING` on are measured by their own size.
    """
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    both = np.isfinite(got) & np.isfinite(want)
    same = both | (got == want) | (np.isnan(got) & np.isnan(want))
    size = np.abs(want)
    plain = both & (size < MASKING)
    scale = np.where(plain, _scale(want[plain]), np.maximum(size, 1.0))
    apart = np.abs(got[both] - want[both]) / scale[both]
    relative = float(apart.max(initial=0.0)) if same.all() else -1.0
    return float(f"{relative:.3g}")


def _scale(values: Array) -> float:
    if not values.size:
        return 1.0
    return max(float(np.std(values)), 0.1 * float(np.sqrt(np.mean(values**2))), 1e-12)


def find_provider(job: messages.FindProviderJob, *_: object) -> messages.ProviderFound:
    """Open the smallest model on the provider: which adapter it runs on, or why it does not."""
    try:
        found = load(job.provider)
        if not found.devices and found.name not in ort.get_available_providers():
            return messages.ProviderFound(error=f"onnxruntime {ort.__version__} does not have it")
        session = open_session(identity(LEAST_IR, LEAST_OPSET), session_options("off", 1), job.provider)
    except CannotCheck as error:
        return messages.ProviderFound(error=str(error))
    except Exception as error:  # the bindings raise many types, and all of them are a refusal
        return messages.ProviderFound(error=one_line(error), no_adapter=True)
    if found.name not in session.get_providers():
        return messages.ProviderFound(error=f"it was refused here; the session has {session.get_providers()}")
    return messages.ProviderFound(found.name, found.version, *name_adapter(found))
