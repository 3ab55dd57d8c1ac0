"""Calls carried out side by side, each in a process of its own that is kept warm: an executor of the standard kind.

Not `ProcessPoolExecutor`: there the death of one process fails every call, and its processes load the caller's main
module again, which a script that calls `gate` without an `if __name__` would not live through. (loky mends the second
and not the first.)
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from kvdoctor.child import LOAD
from kvdoctor.gating.jobs import Lost

P = ParamSpec("P")
T = TypeVar("T")

BOOT = f"{LOAD}from kvdoctor.gating.slots import serve\nserve()\n"
ASIDE = "KVDOCTOR_SIDE_BY_SIDE"
"""What `sessions` is told by: others compute on the same cores."""


class Slot:
    """One process. It ends with this one, whichever way this one ends: the end of its standard input tells it."""

    def __init__(self, scratch: Path, alone: bool) -> None:
        environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
        if not alone:
            environment[ASIDE] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(Path(__file__).parent.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def call(self, pickled: bytes) -> tuple[Any, Exception | None]:
        """Carry out a pickled call: a function of a module, its arguments and its named ones. What it gave, or raised.

        After whatever this itself raises, the process is not to be asked again: an answer may still be on its way.

        Raises:
            Lost: the process ended before it answered.
        """
        assert self._process.stdin is not None  # noqa: S101 - opened with pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(pickled)
            self._process.stdin.flush()
            outcome, error = pickle.load(self._process.stdout)  # noqa: S301 - from our own process
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):
            raise Lost(self._how_it_ended()) from None
        return outcome, error

    def stop(self) -> None:
        """End the process; the worker that it keeps ends with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                pipe.close()  # type: ignore[union-attr]

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "it no longer answered"
        return f"signal {signal.Signals(-code).name} ended it" if code < 0 else f"it ended with exit code {code}"


class Slots(Executor):
    """As many processes as `count`, each started when it is first needed and replaced when it is lost."""

    def __init__(self, count: int) -> None:
        self._alone = count == 1
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="slot")
        self._scratch = tempfile.TemporaryDirectory(prefix="kvdoctor-gate-", ignore_cleanup_errors=True)
        self._idle: list[Slot] = []
        self._all: set[Slot] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Carry out a function of a module, on values that can be pickled, in one of the processes."""
        return self._threads.submit(self._carry_out, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes, also those in the middle of a call."""
        with self._lock:
            self._closed = True
            slots = list(self._all)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for slot in slots:
            slot.stop()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        self._scratch.cleanup()

    def _carry_out(self, function: Callable[..., T], given: tuple[Any, ...], named: dict[str, Any]) -> T:
        pickled = pickle.dumps((function, given, named))  # whole, before any of it is on its way
        with self._lock:
            if self._closed:
                raise Lost("the gate was closed")
            slot = self._idle.pop() if self._idle else Slot(Path(self._scratch.name), self._alone)
            self._all.add(slot)
        try:
            outcome, error = slot.call(pickled)
        except BaseException:
            self._drop(slot)
            raise
        self._keep(slot)
        if error is not None:
            raise error
        return outcome  # type: ignore[no-any-return]

    def _keep(self, slot: Slot) -> None:
        with self._lock:
            self._idle.append(slot)

    def _drop(self, slot: Slot) -> None:
        with self._lock:
            self._all.discard(slot)
        slot.stop()


def serve() -> None:
    """Carry out calls until standard input ends, and then end in the middle of one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches all; the process that was called decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    calls = _calls(os.fdopen(os.dup(0), "rb"))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for function, given, named in calls:
        try:
            answer = pickle.dumps((function(*given, **named), None))
        except Exception as error:  # what a call raises is its answer
            answer = pickle.dumps((None, _that_travels(error)))
        answers.write(answer)
        answers.flush()


def _that_travels(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301 - our own
    except Exception:  # whatever an error does when it is copied
        return RuntimeError(f"{type(error).__name__}: {error}")


def _calls(stream: BinaryIO) -> Iterator[Any]:
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                waiting.put(pickle.load(stream))  # noqa: S301 - from the process that started this one
        finally:  # also where a call names what is not here: who waits for its answer is told by the end
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()
