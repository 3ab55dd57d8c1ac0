"""Records a trace from inside a program: a session of onnxruntime that notes each of its calls.

Works on the session that it is given and imports no runtime. Standard library and numpy only.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.decode.calls import MOST_DATA, take_sample


class RecordingSession:
    """A session that writes down what it is fed and what it returns; all else is the session's own.

    Calls by `run`, `run_with_ort_values` and `run_with_iobinding` are recorded; of a failed call there is what it was
    fed, and in JSON lines its error.
    """

    def __init__(self, session: Any, path: str | Path, file: str | None = None) -> None:
        """Record into `path`: JSON lines where it ends with `.jsonl`, else a folder with one .npz for each call."""
        self._session = session
        self._trace = _Lines(Path(path)) if str(path).endswith(".jsonl") else _Arrays(Path(path))
        place = getattr(session, "_model_path", None)
        self._file = file or (Path(place).name if place else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        """Run as the session does, and record it."""
        return self._noted("run", output_names, input_feed, *more, **named)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], *more: Any, **named: Any
    ) -> Any:
        """Run as the session does, and record it."""
        return self._noted("run_with_ort_values", output_names, input_dict_ort_values, *more, **named)

    def io_binding(self) -> "RecordingBinding":
        """A binding of this session that remembers what it binds."""
        return RecordingBinding(self._session.io_binding())

    def run_with_iobinding(self, iobinding: Any, *more: Any, **named: Any) -> None:
        """Run with a binding of `io_binding()`, and record it; a binding made otherwise is run and not recorded."""
        if not isinstance(iobinding, RecordingBinding):
            self._session.run_with_iobinding(iobinding, *more, **named)
            return
        fed = self._trace.keep(iobinding.fed)
        try:
            self._session.run_with_iobinding(iobinding.binding, *more, **named)
        except Exception as raised:
            self._trace.write(self._file, fed, {}, str(raised))
            raise
        got = dict(zip(iobinding.names, iobinding.binding.get_outputs(), strict=False))
        self._trace.write(self._file, fed, self._trace.keep(got), None)

    def _noted(self, how: str, names: Sequence[str] | None, feed: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        wanted = list(names) if names else [output.name for output in self._session.get_outputs()]
        fed = self._trace.keep(feed)
        try:
            values = getattr(self._session, how)(names if how == "run" else wanted, feed, *more, **named)
        except Exception as raised:
            self._trace.write(self._file, fed, {}, str(raised))
            raise
        self._trace.write(self._file, fed, self._trace.keep(dict(zip(wanted, values, strict=True))), None)
        return values


class RecordingBinding:
    """A binding that remembers its inputs and the names of its outputs; all else is the binding's own."""

    def __init__(self, binding: Any) -> None:
        """Bind what `binding` does."""
        self.binding = binding
        self.fed: dict[str, Any] = {}
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Bind an array."""
        self.fed[name] = arr_on_cpu
        self.binding.bind_cpu_input(name, arr_on_cpu)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind a value of the runtime."""
        self.fed[name] = ortvalue
        self.binding.bind_ortvalue_input(name, ortvalue)

    def bind_input(self, name: str, *more: Any, **named: Any) -> None:
        """Bind memory by its address: of such an input, element type and shape are recorded."""
        words = dict(zip(("device_type", "device_id", "element_type", "shape"), more, strict=False)) | named
        self.fed[name] = Declared(words.get("element_type"), tuple(words.get("shape") or ()))
        self.binding.bind_input(name, *more, **named)

    def bind_output(self, name: str, *more: Any, **named: Any) -> None:
        """Bind an output."""
        self._name(name)
        self.binding.bind_output(name, *more, **named)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind an output to a value of the runtime."""
        self._name(name)
        self.binding.bind_ortvalue_output(name, ortvalue)

    def clear_binding_inputs(self) -> None:
        """Forget the inputs."""
        self.fed = {}
        self.binding.clear_binding_inputs()

    def clear_binding_outputs(self) -> None:
        """Forget the outputs."""
        self.names = []
        self.binding.clear_binding_outputs()

    def _name(self, name: str) -> None:
        if name not in self.names:  # bound again in each step, it keeps its place
            self.names.append(name)


class Declared:
    """A tensor of which only element type and shape are known."""

    def __init__(self, kind: Any, shape: tuple[int, ...]) -> None:
        """Take them as the caller gave them."""
        self.kind, self.dims = kind, shape


def recording(session: Any, path: str | Path, file: str | None = None) -> RecordingSession:
    """Wrap a session of onnxruntime so that each of its calls becomes a step of a trace (docs/trace.md).

    Args:
        session: An `onnxruntime.InferenceSession`.
        path: Where to record: JSON lines where it ends with `.jsonl`, else a folder with one .npz for each call. What
            is there already is continued, so that several sessions of one loop record into the same place.
        file: The name of the model's file, where the session was made from bytes.
    """
    return RecordingSession(session, path, file)


class _Lines:
    """A trace of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """What is written of tensors, taken at once: a call may write into what it is fed."""
        return dict(_entries(tensors))

    def write(self, file: str | None, fed: dict[str, Any], got: dict[str, Any], error: str | None) -> None:
        """Add a call."""
        line = {"file": file, "fed": fed, "got": got, "error": error}
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: value for name, value in line.items() if value is not None}) + "\n")


class _Arrays:
    """A trace of one .npz for each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of the values."""
        return {name: np.array(_array(t)) for name, t in tensors.items() if not isinstance(t, Declared)}

    def write(self, file: str | None, fed: dict[str, Any], got: dict[str, Any], error: str | None) -> None:  # noqa: ARG002
        """Add a call: the arrays under `fed/NAME` and `got/NAME`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = (path.stem.removeprefix("step_") for path in self.folder.glob("step_*.npz"))
        number = max((int(one) for one in there if one.isdecimal()), default=-1) + 1
        arrays = {f"{side}/{name}": a for side, found in (("fed", fed), ("got", got)) for name, a in found.items()}
        np.savez(self.folder / f"step_{number}.npz", **arrays)


def _entries(tensors: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tensor in tensors.items():
        if isinstance(tensor, Declared):
            yield name, {"dtype": np.dtype(tensor.kind).name, "shape": list(tensor.dims)}
            continue
        shape = _shape(tensor)
        dtype = tensor.data_type() if hasattr(tensor, "data_type") else str(np.asarray(tensor).dtype)
        entry: dict[str, Any] = {"dtype": dtype, "shape": list(shape)}
        array = _array(tensor)
        small = math.prod(shape) <= MOST_DATA
        numbers = array.ravel() if small else take_sample(array)
        entry["data" if small else "sample"] = [_number(one) for one in numbers.tolist()]
        yield name, entry


def _shape(tensor: Any) -> tuple[int, ...]:
    shape = tensor.shape() if callable(getattr(tensor, "shape", None)) else np.shape(tensor)
    return tuple(int(size) for size in shape)


def _array(tensor: Any) -> "np.ndarray[Any, Any]":
    made: np.ndarray[Any, Any] = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
    return made


def _number(value: Any) -> Any:
    """What JSON can express: NaN and infinity are null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
