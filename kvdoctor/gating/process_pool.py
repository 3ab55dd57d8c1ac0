"""A process pool that survives the crash of a process, as a `concurrent.futures.Executor`.

`ProcessPoolExecutor` does not: the crash of one process fails every call. Its processes also import the caller's main
module again, which breaks a script that calls `gate` without an `if __name__` guard. (loky avoids only the second.)
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvdoctor.decode.messages import read_until_gone, take_pipes
from kvdoctor.gating.jobs import ProcessLost
from kvdoctor.runtime.process import LOAD, describe_exit
from kvdoctor.runtime.scratch import ScratchFolder

P = ParamSpec("P")
T = TypeVar("T")

BOOT = f"{LOAD}from kvdoctor.gating.process_pool import serve\nserve()\n"


class PoolProcess:
    """One process of the pool. It ends when its standard input closes, hence also if this process crashes."""

    def __init__(self, scratch: Path) -> None:
        environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        command = [sys.executable, "-c", BOOT, str(Path(__file__).parent.parent)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, env=environment)

    def call(self, pickled: bytes) -> tuple[Any, Exception | None]:
        """Run a pickled call (function, arguments, keyword arguments); gives its result and its exception.

        After this raises anything itself, do not use the process again: an answer may still be in the pipe.

        Raises:
            ProcessLost: the process ended before it answered.
        """
        assert self._process.stdin is not None  # noqa: S101 - opened with pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(pickled)
            self._process.stdin.flush()
            outcome, error = pickle.load(self._process.stdout)  # noqa: S301 - from our own process
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            how = "it no longer answered"
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = f"it {describe_exit(self._process.wait(5))}"
            self._process.kill()
            raise ProcessLost(how) from None
        return outcome, error

    def stop(self) -> None:
        """End the process; its worker ends with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()  # type: ignore[union-attr]


class ProcessPool(Executor):
    """Up to `count` processes, each started when it is first needed and replaced when it is lost."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="process")
        self._scratch = ScratchFolder()
        self._idle: list[PoolProcess] = []
        self._all: set[PoolProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a module-level function with picklable arguments in one of the processes."""
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, including those in the middle of a call."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.stop()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._scratch.cleanup()

    def _call(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        pickled = pickle.dumps((function, args, kwargs))  # complete, before any of it is sent
        with self._lock:
            if self._closed:
                raise ProcessLost("the gate was closed")
            process = self._idle.pop() if self._idle else PoolProcess(Path(self._scratch.name))
            self._all.add(process)
        try:
            result, error = process.call(pickled)
        except BaseException:
            with self._lock:
                self._all.discard(process)
            process.stop()
            raise
        with self._lock:
            self._idle.append(process)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]


def serve() -> None:
    """Answer calls until standard input closes; then end, even in the middle of a call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the parent decides
    calls, answers = take_pipes()
    for function, args, kwargs in read_until_gone(lambda: pickle.load(calls)):  # noqa: S301 - from the process that started this one
        try:
            answer = pickle.dumps((function(*args, **kwargs), None))
        except Exception as error:  # the exception of a call is its answer
            answer = pickle.dumps((None, _picklable(error)))
        answers.write(answer)
        answers.flush()


def _picklable(error: Exception) -> Exception:
    """The error, or one with the same text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301 - our own
    except Exception:  # copying an error may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
