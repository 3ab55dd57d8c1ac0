"""Calls carried out on an existing Dask cluster: an executor of the standard kind. The only door to `distributed`.

Each call is pinned to one worker, and no worker has more calls than threads. Otherwise the scheduler would hand a model
that takes its worker down to three more before it said a word (its `allowed-failures`), and would count the loss
against every call that waited there.
"""

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from kvdoctor.errors import KvdoctorError
from kvdoctor.gating.jobs import Gone, Lost
from kvdoctor.gating.keys import software
from kvdoctor.gating.there import carried_out, end_slots

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 0.5
CONNECT_SECONDS = 10
FAREWELL_SECONDS = 1.5
PATIENCE_SECONDS = 60
"""How long a cluster may be without a worker, or not answer."""
MUST_AGREE = ("kvdoctor", "source", "onnxruntime", "onnx", "numpy")

LOST = "the worker of the cluster that ran it was lost"


@dataclass(eq=False)
class _Call:
    """A call, who waits for it, and where it is."""

    function: Callable[..., Any]
    given: tuple[Any, ...]
    named: dict[str, Any]
    answer: "Future[Any]"
    worker: str = ""
    task: Any = None


class Cluster(Executor):
    """The workers of a Dask scheduler that runs already.

    Raises:
        KvdoctorError: distributed is not installed, the scheduler does not answer, or what its workers have installed
            would give other reports.
    """

    def __init__(self, address: str) -> None:
        self._client = _connected(address)
        self._address = address
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._news = threading.Condition()
        self._closed = False
        self._over: str | None = None
        self._gate = uuid4().hex
        self._thread = threading.Thread(target=self._hand_out, daemon=True)
        try:
            self._refuse_others(self._software_there())
        except BaseException:
            self._client.close(timeout=1)
            raise
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Carry out a function of a module on one of the workers."""
        answer: Future[T] = Future()
        with self._news:
            if self._over is not None:
                answer.set_exception(Gone(self._over))
                return answer
            self._waiting.append(_Call(fn, args, kwargs, answer))
            self._news.notify()
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - both are done
        """Take back what is not done, and let the cluster go. The cluster itself goes on."""
        with self._news:
            self._closed = True
            calls = [*self._waiting, *self._running]
            self._waiting, self._running = [], []
            self._news.notify()
        for call in calls:
            call.answer.cancel()
        # A cluster that is gone does not answer, and nobody waits for that.
        tasks = [call.task for call in calls if call.task is not None]
        farewell = threading.Thread(target=self._take_leave, args=(tasks,), daemon=True)
        farewell.start()
        farewell.join(FAREWELL_SECONDS)

    def _take_leave(self, tasks: list[Any]) -> None:
        with contextlib.suppress(Exception):
            self._client.cancel(tasks, force=True)
            self._client.run(end_slots, self._gate)
        self._client.close(timeout=1)

    def _hand_out(self) -> None:
        reason = f"the cluster at {self._address} has no worker any more, or does not answer"
        try:
            self._until_over()
        except Exception as error:  # whatever it is, somebody waits for the answers
            reason = f"the cluster at {self._address} cannot be used any more ({_told(error)})"
        finally:
            self._give_up(reason)

    def _until_over(self) -> None:
        """Hand out and collect until this is closed, or the cluster was silent for too long."""
        heard = time.monotonic()
        while True:
            with self._news:
                self._news.wait(POLL_SECONDS)
                if self._closed:
                    return
            try:
                workers: dict[str, int] = self._client.nthreads()
                heard = time.monotonic() if workers else heard
            except Exception:  # whatever a connection that is gone raises
                workers = {}
                if self._client.status != "running":
                    heard = min(heard, time.monotonic() - PATIENCE_SECONDS)
            if time.monotonic() - heard > PATIENCE_SECONDS:
                return
            if workers:
                self._collect(workers)
                self._fill(workers)

    def _collect(self, workers: dict[str, int]) -> None:
        """Answer what is done, and what was lost with its worker."""
        with self._news:
            running = list(self._running)
        for call in running:
            if call.worker not in workers:  # and what it kept of an answer as well
                with contextlib.suppress(Exception):  # it is lost in any case
                    call.task.cancel(force=True)
                _fail(call, Lost(LOST))
            elif call.task.done():
                _answer(call)
            else:
                continue
            with self._news, contextlib.suppress(ValueError):  # taken back in the meantime
                self._running.remove(call)

    def _fill(self, workers: dict[str, int]) -> None:
        """Give each worker as many calls as it has threads; with every round another one begins."""
        with self._news:
            busy = [call.worker for call in self._running]
            free = {worker: threads - busy.count(worker) for worker, threads in workers.items()}
            while self._waiting and max(free.values()) > 0:
                call = self._waiting.pop(0)
                if not call.answer.set_running_or_notify_cancel():
                    continue
                call.worker = max(free, key=lambda worker: free[worker])
                try:
                    self._give(call)
                except Exception as error:  # what cannot be sent costs itself only
                    _fail(call, Gone(f"the cluster at {self._address} did not take it ({_told(error)})"))
                    continue
                free[call.worker] -= 1
                self._running.append(call)

    def _give(self, call: _Call) -> None:
        # Tried here: what the client itself cannot pickle may break its connection.
        pickle.dumps((call.function, call.given, call.named))
        given = (self._gate, software_here(), call.function, call.given, call.named)
        call.task = self._client.submit(
            carried_out, *given, workers=[call.worker], allow_other_workers=False, pure=False, retries=0
        )
        call.task.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def _give_up(self, reason: str) -> None:
        with self._news:
            self._over = reason
            calls, self._waiting, self._running = [*self._waiting, *self._running], [], []
        for call in calls:
            _fail(call, Gone(reason))

    def _software_there(self) -> dict[str, dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = self._client.run(software)
        except Exception as error:  # whatever loading a package raises
            told = _told(error)
            raise KvdoctorError(f"a worker of the cluster cannot run kvdoctor ({told}); install it there") from None
        return found

    def _refuse_others(self, there: dict[str, dict[str, Any]]) -> None:
        if not there:
            raise KvdoctorError(f"the cluster at {self._address} has no workers; start some, as with `dask worker`")
        for worker, versions in there.items():
            if problem := _disagreement(versions):
                raise KvdoctorError(f"worker {worker} of the cluster {problem}")


def _connected(address: str) -> Any:
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address
    except ImportError:
        raise KvdoctorError("--cluster needs distributed: pip install 'kvdoctor[dask]'") from None
    _hush()
    try:
        resolve_address(address)
        make: Any = Client
        return make(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise KvdoctorError(f"no Dask scheduler answers at {address!r} ({told}); see that it runs") from None


def _of_others(record: logging.LogRecord) -> bool:
    """Whether a record of the log tells of anything but the connection to a cluster."""
    raised = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("distributed") or (raised and raised.__module__.startswith("distributed")))


def _hush() -> None:
    """What is lost on the way is told in reports and reasons, and not once more by the client on stderr.

    It logs through handlers of its own, and leaves exceptions of its tasks to the log of asyncio.
    """
    for told in (*logging.getLogger("distributed").handlers, logging.getLogger("asyncio")):
        told.addFilter(_of_others)  # a second time changes nothing


def _answer(call: _Call) -> None:
    from distributed import CancelledError
    from distributed.scheduler import KilledWorker

    try:
        call.answer.set_result(call.task.result(timeout=PATIENCE_SECONDS))
    except (KilledWorker, CancelledError):
        _fail(call, Lost(LOST))
    except Exception as error:  # what a call raises is its answer
        # The worker may be lost between the end of a call and the sending of its answer: then nothing comes.
        _fail(call, error if call.task.status == "error" else Lost(LOST))


def _fail(call: _Call, error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        call.answer.set_exception(error)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _disagreement(versions: dict[str, Any]) -> str | None:
    """What on a worker would make another report than here."""
    mine = software()
    for name in MUST_AGREE:
        if versions.get(name) != mine[name]:
            what = {"source": "the source of kvdoctor"}.get(name, name)
            shown = f" ({versions.get(name)} there, {mine[name]} here)" if isinstance(mine[name], str) else ""
            shown = "" if name == "source" else shown
            return f"has another version of {what}{shown}; install the same on all of them, and here"
    return None


def software_here() -> dict[str, Any]:
    """What a worker must have as well."""
    return {name: software()[name] for name in MUST_AGREE}
