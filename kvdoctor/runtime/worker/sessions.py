"""Sessions and tensors of ONNX Runtime, and the versions that a runtime opens. Only the worker process imports it.

The largest IR version and opset are measured by opening models of one node, for releases beyond the table of
`targets/limits.json`, newer than this kvdoctor. The models are written as protobuf by hand: the worker has no onnx.
Fields by onnx.proto of ONNX.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnxruntime as ort

from kvdoctor.choices import CPU
from kvdoctor.decode.calls import NUMPY_TYPES, Array, Value, as_array
from kvdoctor.decode.messages import SPINNING, FileOpened, FileOpening, FileRefused, Job, LimitsMeasured
from kvdoctor.decode.runs import ObservedTensor
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.providers import count_nodes, load, open_session

LEVELS = {
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
TRIED = ("all", "basic", "off")
"""The levels at which a file is opened, until one takes it."""
FATAL_ONLY = 4


class ProviderMissing(Exception):
    """The runtime does not have the requested execution provider."""


@dataclass(eq=False)
class OrtTensor:
    """A tensor in the runtime's memory. `dtype` as ONNX spells it; `made`: see `StackDriver.run_once`."""

    ort_value: Any
    made: tuple[int, bytes] | None = None

    @cached_property
    def observed(self) -> ObservedTensor:
        """What a step records of it. Cached, since a present is fed again, and a model may have hundreds of them."""
        return ObservedTensor(self.dtype, tuple(self.ort_value.shape()), self.null)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""
        return self.observed.shape

    @property
    def dtype(self) -> str:
        """Element type as ONNX spells it."""
        return str(self.ort_value.data_type()).removeprefix("tensor(").removesuffix(")")

    @property
    def null(self) -> bool:
        """Whether its data pointer is null."""
        return bool(self.ort_value.data_ptr() == 0)

    def array(self) -> Array:
        """A numpy copy; nothing is read from a tensor without elements."""
        return np.zeros(self.shape, NUMPY_TYPES.get(self.dtype)) if 0 in self.shape else self.ort_value.numpy()


@dataclass
class LogitsTensor:
    """Logits: copied out of the runtime once, at the first request, and then no longer held there.

    Nothing feeds them, many look at them, and with a wide vocabulary no other tensor of a call is as large.
    """

    tensor: OrtTensor | None
    copy: Array | None = None

    @cached_property
    def observed(self) -> ObservedTensor:
        """What a step records of them."""
        assert self.tensor is not None  # noqa: S101 - asked for before they are copied
        return self.tensor.observed

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of their axes."""
        return self.observed.shape

    def array(self) -> Array:
        """The copy, which is not to be written to."""
        if self.copy is None:
            assert self.tensor is not None  # noqa: S101 - it is there until it is copied
            self.copy, self.observed = self.tensor.array(), self.tensor.observed
            self.copy.flags.writeable = False
            self.tensor = None
        return self.copy


Held = tuple[str, int, tuple[Any, ...]]
"""The path of a file, the diagnosis, and what else a session depends on."""
HELD: dict[Held, Any] = {}
"""The sessions of the last stack."""


def close_others(files: Collection[str] = ()) -> None:
    """Close the sessions of other files: together they could take the memory of several models."""
    for key in [key for key in HELD if key[0] not in files]:
        del HELD[key]


@dataclass
class Sessions:
    """The open files of one stack: each is opened once, at the highest optimization level that takes it.

    `held` are sessions of an earlier job on the same model, which are not opened again.
    """

    folder: Path
    job: Job
    announce: Announce
    held: dict[Held, Any] = field(default_factory=dict)
    opened: dict[tuple[str, str], Any] = field(default_factory=dict)
    levels: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    tried: set[str] = field(default_factory=set)

    def get(self, file: str) -> Any:
        """Give the session of a file.

        Raises:
            CannotCheck: no level opens it.
        """
        if file in self.refused:
            raise CannotCheck(f"ONNX Runtime cannot load {file}")
        if file not in self.levels:
            self._open_highest(file)
        return self.opened[file, self.levels[file]]

    def at(self, file: str, level: str) -> Any:
        """Give a session of a file at a level of optimization; at `off` its nodes are those of the file."""
        if (file, level) not in self.opened:
            self.opened[file, level] = self._open(file, level)
        return self.opened[file, level]

    def refusal(self, file: str, level: str) -> str | None:
        """The runtime's error for a file at that level; None where it opens it."""
        try:
            self._open(file, level)
        except (ProviderMissing, CannotCheck):
            raise
        except Exception as error:  # the bindings raise many types, and all of them are a refusal
            return self.clean(error)
        return None

    def without_reuse(self, file: str) -> Any:
        """Give a session in which no two values share a buffer: wrong declared shapes do no harm there.

        The unoptimized session is closed first: three sessions at once would hold three times the weights.
        """
        if self.levels.get(file) != "off":
            unoptimized = self.opened.pop((file, "off"), None)
            for key in [key for key, session in self.held.items() if session is unoptimized]:
                del self.held[key]
            del unoptimized
        return self._open(file, self.levels.get(file, "all"), reuse=False)

    def _open_highest(self, file: str) -> None:
        refusals = {}
        self.tried.add(file)
        for level in TRIED:
            try:
                self.opened[file, level] = self._open(file, level)
            except (ProviderMissing, CannotCheck):
                raise
            except Exception as error:  # the bindings raise many types, and all of them are a refusal
                refusals[level] = self.clean(error)
                continue
            self.levels[file] = level
            break
        if refusals:
            self.announce(FileRefused(file, refusals, self.levels.get(file)))
        if file not in self.levels:
            self.refused.add(file)
            raise CannotCheck(f"ONNX Runtime cannot load {file}")

    def _open(self, file: str, level: str, reuse: bool = True) -> Any:
        job, whole = self.job, str(self.folder / file)
        found = Path(whole).stat()
        state = (level, job.provider, job.threads, *job.settings.items(), found.st_ino, found.st_mtime_ns)
        if reuse and (held := self.held.get((whole, job.diagnosis, state))) is not None:
            return held
        options = session_options(level, job.threads)
        options.enable_mem_reuse = reuse
        for key, value in job.settings.items():
            options.add_session_config_entry(key, value)
        if (whole, level) in job.unopened:
            raise CannotCheck(f"{file} is not opened again: a worker process ended while it opened it")
        if reuse:  # it says nothing of the usual session if the other one does not open
            self.announce(FileOpening(file, level, whole))
        with _openable(whole) as path:
            session = open_session(path, options, job.provider)
        self.announce(FileOpened())
        if job.provider != CPU and (placed := count_nodes(session, file, job.provider)) is not None:
            self.announce(placed)
        if load(job.provider).name not in session.get_providers():
            # The runtime falls back to the CPU silently.
            raise ProviderMissing(f"{job.provider} cannot be used here; the runtime has {session.get_providers()}")
        if reuse:
            self.held[whole, job.diagnosis, state] = session
        return session

    def clean(self, error: Exception) -> str:
        """The runtime's text on one line, without the folder of this machine."""
        text = str(error)
        # A file may be named by its whole path: the model around the graphs of a private folder.
        folders = {str(Path(file).parent) for file in (*self.levels, *self.tried) if Path(file).is_absolute()}
        for folder in (str(self.folder), *sorted(folders)):
            text = text.replace(folder + os.sep, "").replace(folder, ".")
        return " ".join(text.split())


@contextmanager
def _openable(path: str) -> Iterator[str]:
    """The path of a file as the runtime takes it: a path that is no valid text is replaced by a link."""
    try:
        path.encode()
    except UnicodeEncodeError:
        with TemporaryDirectory(prefix="kvdoctor-") as scratch:
            link = Path(scratch, "model")
            link.symlink_to(Path(path).parent.absolute(), target_is_directory=True)
            yield str(link / Path(path).name)
        return
    yield path


def session_options(level: str, threads: int) -> Any:
    """The options of every session: quiet, with bounded threads, at an optimization level."""
    options = ort.SessionOptions()
    options.graph_optimization_level = LEVELS[level]
    options.log_severity_level = FATAL_ONLY
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry(SPINNING, "0")
    return options


@dataclass
class _Ports:
    """The names of a session's inputs and outputs: tensors, and sequences of tensors."""

    tensors: list[str]
    taken: list[str]
    returned: list[str]


def _ports(session: Any) -> _Ports:
    """The ports of a session; cached, since the runtime builds the lists at each request."""
    if session not in _PORTS:
        inputs, outputs = session.get_inputs(), session.get_outputs()
        tensors = [port.name for port in outputs if port.type.startswith("tensor(")]
        taken, returned = ([port.name for port in ports if port.type.startswith("seq(")] for ports in (inputs, outputs))
        _PORTS[session] = _Ports(tensors, taken, returned)
    return _PORTS[session]


_PORTS: WeakKeyDictionary[Any, _Ports] = WeakKeyDictionary()


def run_tensors(session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs of a session by name, for inputs by name, as tensors of the runtime.

    The element at index 3 of a sequence has the name `past[3]`, as in the graph that is read
    (`model/sequence_ports.py`). The binding takes and gives sequences as lists of numpy arrays only.
    """
    ports = _ports(session)
    if not ports.taken and not ports.returned:
        return dict(zip(ports.tensors, session.run_with_ort_values(ports.tensors, dict(feeds)), strict=True))
    elements = {name: _list_elements(name, feeds) for name in ports.taken}
    inside = {element for names in elements.values() for element in names}
    given: dict[str, Any] = {name: value.numpy() for name, value in feeds.items() if name not in inside}
    given |= {name: [feeds[element].numpy() for element in names] for name, names in elements.items()}
    values = session.run([*ports.tensors, *ports.returned], given)
    made = dict(zip(ports.tensors, values, strict=False))
    for name, arrays in zip(ports.returned, values[len(made) :], strict=True):
        made |= {f"{name}[{at}]": array for at, array in enumerate(arrays)}
    return {name: _own(array) for name, array in made.items()}


def _own(array: Array) -> Any:
    """A tensor of the runtime with a copy of an array; one that refers to an array is invalid once that is freed."""
    value = ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)
    value.update_inplace(np.ascontiguousarray(array))
    return value


def _list_elements(name: str, feeds: Mapping[str, Any]) -> list[str]:
    """The names of what is fed for the elements of a sequence, in order."""
    names = (f"{name}[{at}]" for at in range(len(feeds)))
    return [element for element in names if element in feeds]


def mentioned(error: Exception) -> tuple[str, ...]:
    """Names in the runtime's text that may be those of nodes: candidates for a fault location, and nothing more."""
    return tuple(re.findall(r"[Nn]ame:\s?'([^']*)'", str(error)))


def to_runtime(value: Value | Array) -> Any:
    """The value as a tensor of the runtime; its own tensors are not copied."""
    if isinstance(value, OrtTensor):
        return value.ort_value
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(as_array(value), order="C"))


def run_bound(session: Any, feeds: Mapping[str, Any], pasts: Mapping[str, str]) -> dict[str, Any]:
    """The outputs of a session by name, run with bound inputs and outputs, which keeps a cache on its device.

    Some outputs are bound to the memory of an input: `pasts` has the input by the name of the output.

    Raises:
        CannotCheck: an input or output is a sequence of tensors.
    """
    ports, binding = _ports(session), session.io_binding()
    if ports.taken or ports.returned:
        raise CannotCheck("ONNX Runtime binds no sequences of tensors in Python")
    names = ports.tensors
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, value)
    for name in names:
        if pasts.get(name) in feeds:
            binding.bind_ortvalue_output(name, feeds[pasts[name]])
        else:
            binding.bind_output(name)
    session.run_with_iobinding(binding)
    return dict(zip(names, binding.get_outputs(), strict=True))


def runtime_version() -> str:
    """The version of this process's onnxruntime."""
    return str(ort.__version__)


LEAST_IR, LEAST_OPSET = 8, 13
"""What every release takes that kvdoctor runs under."""
MOST = 127
"""One byte of protobuf holds no more; no version is near it."""


def measure_limits(*_: object) -> LimitsMeasured:
    """The largest IR version and the largest opset, each measured with the smallest of the other.

    Neither where not even the oldest model opens: then the fault is not a version.
    """
    if not _opens(LEAST_IR, LEAST_OPSET):
        return LimitsMeasured()
    ir = next(n for n in range(LEAST_IR, MOST) if n + 1 == MOST or not _opens(n + 1, LEAST_OPSET))
    opset = next(n for n in range(LEAST_OPSET, MOST) if n + 1 == MOST or not _opens(LEAST_IR, n + 1))
    return LimitsMeasured(ir, opset)


def _opens(ir: int, opset: int) -> bool:
    try:
        ort.InferenceSession(identity(ir, opset), session_options("off", 1), providers=[CPU])
    except Exception:  # the bindings raise many types, and all of them are a refusal
        return False
    return True


def identity(ir: int, opset: int) -> bytes:
    """`y = Identity(x)` with x and y float[1]."""
    one = _part(2, _part(1, _number(1, 1)))
    kind = _part(2, _part(1, _number(1, 1) + one))
    node = _part(1, b"x") + _part(2, b"y") + _part(4, b"Identity")
    graph = _part(1, node) + _part(2, b"g") + _part(11, _part(1, b"x") + kind) + _part(12, _part(1, b"y") + kind)
    return _number(1, ir) + _part(7, graph) + _part(8, _number(2, opset))


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3, value])


def _part(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2, len(content)]) + content
