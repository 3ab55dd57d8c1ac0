"""One worker process as its parent sees it: its pipes, its limits of time and memory, and what it may read."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract
from kvdoctor.decode import messages
from kvdoctor.decode.messages import Event, Hello, Job, JobDone, Sandbox, read_message, write_message
from kvdoctor.errors import KvdoctorError, RuntimeUnavailable, WorkerDied
from kvdoctor.model.files import MODEL_SUFFIXES
from kvdoctor.records import record

POLL_SECONDS = 0.02
END_SECONDS = 10.0
"""A worker that has closed its output may write a core dump for so long."""
MIB = 1 << 20

NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
"""For every process that may load onnxruntime or onnxruntime-genai: from release 1.31 on they would send their own."""

# The package is loaded from its folder, so that another environment sees nothing else of this one.
LOAD = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.util
spec = importlib.util.spec_from_file_location("kvdoctor", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
package = importlib.util.module_from_spec(spec)
sys.modules["kvdoctor"] = package
spec.loader.exec_module(package)
"""
# What imports make stays: it is no garbage, and no search for garbage need look at it.
BOOT = (
    f"import gc\ngc.disable()\n{LOAD}from kvdoctor.runtime.worker.main import main\ngc.freeze()\ngc.enable()\nmain()\n"
)


@record
class Limits:
    """`timeout` in seconds for one answer (a file opened, a step run), `max_memory` in MiB of resident memory.

    `sandbox` takes from the worker what its jobs do not need, where the system can.
    """

    timeout: float = 300.0
    max_memory: int | None = None
    sandbox: bool = True

    def memory_limit(self) -> int:
        """Bytes: as asked, else nine tenths of the machine's memory."""
        if self.max_memory is not None:
            return self.max_memory * MIB
        if sys.platform == "linux":
            return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.9)
        import psutil

        return int(psutil.virtual_memory().total * 0.9)


class Worker:
    """One worker process. Starting it returns at once: it loads the runtime while the parent reads the graph.

    It `is_idle` unless it works on a job, or somebody has left events of one unread. `python` is the interpreter of an
    isolated environment with another onnxruntime; the default is this interpreter. `environment` are more variables.
    """

    def __init__(self, limits: Limits, python: str | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.limits = limits
        self.hello: Hello | None = None
        self.peak_bytes = 0
        self.is_idle = True
        self.granted: Sandbox | None = None
        self._next_look = 0.0
        self._memory_limit: int | None = None
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        # One thread: numpy multiplies nothing here.
        self._variables = os.environ | NO_TELEMETRY | {"OPENBLAS_NUM_THREADS": "1"} | dict(environment or {})
        self._process = subprocess.Popen(
            [*([sys.executable] if python is None else [python, "-I"]), "-c", BOOT, str(Path(__file__).parent.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=self._variables,
        )
        free_memory_limit(self._process)
        self._number = self._process.pid
        threading.Thread(target=self._pump, daemon=True).start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, job: Job) -> None:
        """Hand over a job; a worker that is gone shows when its events are read."""
        self.is_idle = False
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.write(write_message(job))
            self._process.stdin.flush()

    def events(self) -> Iterator[Event]:
        """Yield the events of a job up to its end.

        Raises:
            WorkerDied: the process ended, did not answer within the time limit, or exceeded its memory limit.
        """
        while True:
            event = read_message(self._next_line())
            if isinstance(event, Hello):
                self._meet(event)
            elif isinstance(event, JobDone):
                self.is_idle = True
                return
            else:
                yield event

    def greet(self) -> Hello:
        """Wait for the worker's first event: its versions and execution providers.

        Raises:
            KvdoctorError: it cannot start ONNX Runtime.
            WorkerDied: it does not answer within the time limit.
        """
        if self.hello is None:
            event = read_message(self._next_line())
            if not isinstance(event, Hello):
                raise KvdoctorError(f"the worker process begins with {type(event).__name__}, not with its versions")
            self._meet(event)
            return event
        return self.hello

    def _meet(self, hello: Hello) -> None:
        self.hello = hello
        self._number, self._next_look = hello.process, 0.0

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _pump(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                self._events.put(line)
        self._events.put("")

    def _next_line(self) -> str:
        deadline = time.monotonic() + self.limits.timeout
        while True:
            line = None
            with contextlib.suppress(queue.Empty):
                line = self._events.get(timeout=min(POLL_SECONDS, self.limits.timeout))
            if line is not None and not line.endswith("\n"):
                raise WorkerDied(self._how_it_ended())
            # Also where events come without a pause: the memory of a leak grows in quick steps too.
            if time.monotonic() >= self._next_look:
                self._watch_memory()
                self._next_look = time.monotonic() + POLL_SECONDS
            if line is not None:
                return line
            if time.monotonic() > deadline:
                self.stop()
                raise WorkerDied(f"stopped at the time limit of {self.limits.timeout:g} s (--timeout)", "timeout")

    def _watch_memory(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self._number))
        limit = self._memory_limit = self._memory_limit or self.limits.memory_limit()
        if self.peak_bytes > limit:
            self.stop()
            raise WorkerDied(f"stopped at the memory limit of {limit // MIB} MiB (--max-memory)", "memory")

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its output and lives on
            self.stop()
            return f"stopped: it closed its output and did not end within {END_SECONDS:g} s"
        if self.hello is None:
            said = self._ask_why()
            why = f": {said.replace(str(Path.home()), '~')[:300]}" if said else ""
            text = f"the worker process could not start ONNX Runtime{why}; `kvdoctor env` says what is missing"
            raise RuntimeUnavailable(text)
        return describe_exit(code)

    def _ask_why(self) -> str:
        """The last line that a process says which cannot start; empty where it says none in time."""
        quiet: dict[str, Any] = {"input": b"", "capture_output": True, "env": self._variables}
        with contextlib.suppress(subprocess.TimeoutExpired):
            again = subprocess.run(self._process.args, timeout=END_SECONDS, check=False, **quiet)
            said = again.stderr.decode("utf-8", "replace").split("\n")
            return next(filter(None, map(str.strip, reversed(said))), "")
        return ""


def resident_bytes(process: int) -> int:
    """The resident memory of a process, 0 where it has ended; on Linux without psutil, which takes 15 ms to load."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(process).memory_info().rss)
    return 0


def free_memory_limit(process: "subprocess.Popen[Any]") -> None:
    """Lift for a child the limit that its parent has for itself: it is watched, or another program."""
    if sys.platform == "linux":
        import resource

        with contextlib.suppress(OSError):  # it has ended
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.prlimit(process.pid, resource.RLIMIT_DATA, (hard, hard))


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code: negative for a signal, from 2**31 on for a crash on Windows."""
    if code < 0:
        known = -code in {*signal.Signals}  # a real-time signal has no name
        return f"ended by signal {signal.Signals(-code).name if known else -code}"
    return f"ended with exit code {code if code < 2**31 else hex(code)}"


DEVICES = ("/dev/dri", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/shm")  # noqa: S108 - of drivers
"""The device files of graphics cards and accelerators: Linux names them by driver."""

MOST_DEPTH, MOST_INSIDE = 3, 4096
WRITTEN = ("keep", "keep_logits", "keep_calls", "scratch")
"""The fields of jobs that name files or folders for what the worker leaves."""


def device_files(job: Job) -> tuple[str, ...]:
    """Patterns of the device files that a job needs: with each provider but that of the CPU, those of all drivers."""
    models = (getattr(job, name, None) for name in ("model", "left", "right"))
    providers = {job.provider, *(getattr(model, "provider", None) for model in models)}
    return () if providers <= {CPU, None} else DEVICES


def readable(job: Job) -> frozenset[str]:
    """The files and folders that a job has to read, with the targets of the links in its folders."""
    return frozenset(found for path in _paths(job) for found in _resolve(path))


def writable(job: Job) -> frozenset[str]:
    """The folders in which a job has to write: those of the private files that it names."""
    paths = [path for name in WRITTEN if isinstance(path := getattr(job, name, None), Path)]
    return frozenset(os.path.realpath(path if path.is_dir() else path.parent) for path in paths)


def lie_within(paths: Collection[str], granted: Collection[str]) -> bool:
    """Whether each path is one of those granted, or lies in a folder among them."""
    return all(path in granted or any(os.fspath(one) in granted for one in Path(path).parents) for path in paths)


def _paths(value: Any) -> Iterator[Path]:
    """The paths in a message: the values of that type, not the names in a model that look like some."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, messages.AddedExperiment):
        yield from (Path(text) for name, text in value.data.items() if name == "path")
    elif isinstance(value, (tuple, list)):
        yield from (path for one in value for path in _paths(one))
    elif is_dataclass(value) and not isinstance(value, CacheContract):
        yield from (path for one in fields(value) for path in _paths(getattr(value, one.name)))
    if isinstance(value, messages.PairedSide):
        files = (file for graph in value.contract.graphs.values() for file in graph.files)
        yield from {(value.folder / file).parent for file in files}


def _resolve(path: Path, depth: int = MOST_DEPTH) -> Iterator[str]:
    """A path and what it leads to. A model is read with its folder, and next to the target of a link."""
    real = os.path.realpath(path)
    if depth < MOST_DEPTH and path.parent.is_relative_to(real):
        return  # a link to a folder around the model, which is no part of it
    if os.path.isdir(real):  # noqa: PTH112
        yield real
        if depth:
            for found in _list_inside(real, os.stat(real).st_mtime_ns):  # noqa: PTH116
                yield from _resolve(found, depth - 1)
    elif os.path.exists(real):  # noqa: PTH110
        yield os.path.dirname(real) if path.suffix in MODEL_SUFFIXES else real  # noqa: PTH120


@lru_cache(maxsize=256)
def _list_inside(folder: str, changed: int) -> tuple[Path, ...]:  # noqa: ARG001 - when it was changed
    """The links and the folders in a folder, of those that a model has: weights may lie in a folder of their own."""
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_symlink() or entry.is_dir()]
    return tuple(found[:MOST_INSIDE])
