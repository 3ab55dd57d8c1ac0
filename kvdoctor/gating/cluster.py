"""An existing Dask cluster as a `concurrent.futures.Executor`. The only module that imports `distributed`.

Each call is pinned to one worker, and no worker has more calls than threads. Otherwise the scheduler would pass a model
that crashes its worker to three more workers before it reports that (its `allowed-failures`), and would count the loss
for every call that waited at the same worker.

`call_in_process` and `end_processes` run on the workers, in processes of their own that a model may crash.
"""

import contextlib
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from kvdoctor.errors import KvdoctorError
from kvdoctor.gating.cache_key import describe_software
from kvdoctor.gating.jobs import NoWorkerLeft, ProcessLost
from kvdoctor.gating.process_pool import ProcessPool

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS = 0.5
CONNECT_SECONDS = 10
SHUTDOWN_SECONDS = 1.5
SILENCE_SECONDS = 60
"""How long a cluster may have no worker, or not answer."""
MUST_AGREE = ("kvdoctor", "source", "onnxruntime", "onnx", "numpy")

MAX_PROCESSES = 256
"""More than a worker has threads: the client decides how many calls a worker gets."""
IDLE_SECONDS = 120
"""After this time without a call a worker ends the processes of a gate, since the gate may have been killed."""

LOST = "the worker of the cluster that ran it was lost"


@dataclass(eq=False)
class _Call:
    """A call, the future of its result, and the worker and task that run it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: "Future[Any]"
    worker: str = ""
    task: Any = None


class Cluster(Executor):
    """The workers of a running Dask scheduler.

    Raises:
        KvdoctorError: distributed is not installed, the scheduler does not answer, or its workers have other versions
            of the software.
    """

    def __init__(self, address: str) -> None:
        self._client = _connect(address)
        self._address = address
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._gate = uuid4().hex
        self._thread = threading.Thread(target=self._distribute, daemon=True)
        try:
            self._refuse_other_software()
        except BaseException:
            self._client.close(timeout=1)
            raise
        self._thread.start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Call a module-level function on one of the workers."""
        answer: Future[T] = Future()
        with self._changed:
            if self._failure is not None:
                answer.set_exception(NoWorkerLeft(self._failure))
                return answer
            self._waiting.append(_Call(fn, args, kwargs, answer))
            self._changed.notify()
        return answer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - both are done
        """Cancel unfinished calls and disconnect. The cluster keeps running."""
        with self._changed:
            self._closed = True
            calls = [*self._waiting, *self._running]
            self._waiting, self._running = [], []
            self._changed.notify()
        for call in calls:
            call.answer.cancel()
        # Do not wait for a cluster that has stopped answering.
        tasks = [call.task for call in calls if call.task is not None]
        disconnecting = threading.Thread(target=self._disconnect, args=(tasks,), daemon=True)
        disconnecting.start()
        disconnecting.join(SHUTDOWN_SECONDS)

    def _disconnect(self, tasks: list[Any]) -> None:
        with contextlib.suppress(Exception):
            self._client.cancel(tasks, force=True)
            self._client.run(end_processes, self._gate)
        self._client.close(timeout=1)

    def _distribute(self) -> None:
        reason = f"the cluster at {self._address} has no workers left, or does not answer"
        try:
            self._work_until_closed()
        except Exception as error:  # any error must reach those who wait for answers
            reason = f"the cluster at {self._address} cannot be used any more ({_describe(error)})"
        finally:
            with self._changed:
                self._failure = reason
                calls, self._waiting, self._running = [*self._waiting, *self._running], [], []
            for call in calls:
                _fail(call, NoWorkerLeft(reason))

    def _work_until_closed(self) -> None:
        """Submit and collect calls until this is closed, or the cluster was silent for too long."""
        last_answer = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(POLL_SECONDS)
                if self._closed:
                    return
            try:
                workers: dict[str, int] = self._client.nthreads()
                last_answer = time.monotonic() if workers else last_answer
            except Exception:  # a lost connection may raise anything
                workers = {}
                if self._client.status != "running":
                    last_answer = min(last_answer, time.monotonic() - SILENCE_SECONDS)
            if time.monotonic() - last_answer > SILENCE_SECONDS:
                return
            if workers:
                self._collect(workers)
                self._fill(workers)

    def _collect(self, workers: dict[str, int]) -> None:
        """Give the results of finished calls, and fail those whose worker was lost."""
        with self._changed:
            running = list(self._running)
        for call in running:
            if call.worker not in workers:  # its results are lost as well
                with contextlib.suppress(Exception):  # the call fails in any case
                    call.task.cancel(force=True)
                _fail(call, ProcessLost(LOST))
            elif call.task.done():
                _answer(call)
            else:
                continue
            with self._changed, contextlib.suppress(ValueError):  # cancelled meanwhile
                self._running.remove(call)

    def _fill(self, workers: dict[str, int]) -> None:
        """Submit as many calls to each worker as it has threads."""
        with self._changed:
            busy = [call.worker for call in self._running]
            free = {worker: threads - busy.count(worker) for worker, threads in workers.items()}
            while self._waiting and max(free.values()) > 0:
                call = self._waiting.pop(0)
                if not call.answer.set_running_or_notify_cancel():
                    continue
                call.worker = max(free, key=lambda worker: free[worker])
                try:
                    self._submit_to_worker(call)
                except Exception as error:  # a call that cannot be sent must not affect the others
                    _fail(call, NoWorkerLeft(f"the cluster at {self._address} did not take it ({_describe(error)})"))
                    continue
                free[call.worker] -= 1
                self._running.append(call)

    def _submit_to_worker(self, call: _Call) -> None:
        # Tried first: an object that the client cannot pickle may break its connection.
        pickle.dumps((call.function, call.args, call.kwargs))
        required = {name: describe_software()[name] for name in MUST_AGREE}
        payload = (self._gate, required, call.function, call.args, call.kwargs)
        how = {"workers": [call.worker], "allow_other_workers": False, "pure": False, "retries": 0}
        call.task = self._client.submit(call_in_process, *payload, **how)
        call.task.add_done_callback(self._wake)

    def _wake(self, _task: Any) -> None:
        with self._changed:
            self._changed.notify()

    def _refuse_other_software(self) -> None:
        try:
            found: dict[str, dict[str, Any]] = self._client.run(describe_software)
        except Exception as error:  # importing a package may raise anything
            reason = _describe(error)
            raise KvdoctorError(f"a worker of the cluster cannot run kvdoctor ({reason}); install it there") from None
        if not found:
            raise KvdoctorError(f"the cluster at {self._address} has no workers; start some, as with `dask worker`")
        for worker, versions in found.items():
            if problem := _disagreement(versions):
                raise KvdoctorError(f"worker {worker} of the cluster {problem}")


def _connect(address: str) -> Any:
    try:
        from distributed import Client
        from distributed.comm.addressing import resolve_address
    except ImportError:
        raise KvdoctorError("--cluster needs distributed: pip install 'kvdoctor[dask]'") from None
    _silence_logs()
    try:
        resolve_address(address)
        make: Any = Client
        return make(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise KvdoctorError(f"no Dask scheduler answers at {address!r} ({reason}); check that it runs") from None


def _silence_logs() -> None:
    """Keep the client, which logs through its own handlers and asyncio, from printing lost connections to stderr."""
    for handler in (*logging.getLogger("distributed").handlers, logging.getLogger("asyncio")):
        handler.addFilter(_is_unrelated)  # adding it again has no effect


def _is_unrelated(record: logging.LogRecord) -> bool:
    """Whether a log record is about anything but the connection to a cluster."""
    raised = record.exc_info[0] if record.exc_info else None
    return not (record.name.startswith("distributed") or (raised and raised.__module__.startswith("distributed")))


def _answer(call: _Call) -> None:
    from distributed import CancelledError
    from distributed.scheduler import KilledWorker

    try:
        call.answer.set_result(call.task.result(timeout=SILENCE_SECONDS))
    except (KilledWorker, CancelledError):
        _fail(call, ProcessLost(LOST))
    except Exception as error:  # the exception of a call is its answer
        # The worker may be lost after the call ended and before its result was sent.
        _fail(call, error if call.task.status == "error" else ProcessLost(LOST))


def _fail(call: _Call, error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        call.answer.set_exception(error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _disagreement(versions: dict[str, Any]) -> str | None:
    """The first difference in software that could change a report."""
    local = describe_software()
    for name in MUST_AGREE:
        if versions.get(name) != local[name]:
            what = {"source": "the source of kvdoctor"}.get(name, name)
            named = isinstance(local[name], str) and name != "source"
            which = f" ({versions.get(name)} there, {local[name]} here)" if named else ""
            return f"has another version of {what}{which}; install the same on all of them, and here"
    return None


@dataclass
class _GatePool:
    """The processes of a gate on a worker, and the time of their last call."""

    processes: ProcessPool
    used: float = 0.0


_POOLS: dict[str, _GatePool] = {}
_LOCK = threading.Lock()


def call_in_process(
    gate: str, required: dict[str, Any], function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """On a worker: run a call in a process of its own.

    Raises:
        KvdoctorError: this worker joined later, with other versions.
        ProcessLost: the process ended before it answered.
    """
    if any(describe_software()[name] != version for name, version in required.items()):
        raise KvdoctorError("a worker that joined the cluster has other versions; install the same on all of them")
    with _LOCK:
        pool = _POOLS.get(gate) or _POOLS.setdefault(gate, _GatePool(ProcessPool(MAX_PROCESSES)))
        pool.used = math.inf
    try:
        return pool.processes.submit(function, *args, **kwargs).result()
    finally:
        pool.used = time.monotonic()
        timer = threading.Timer(IDLE_SECONDS, _end_if_idle, [gate])
        timer.daemon = True
        timer.start()


def end_processes(gate: str) -> None:
    """On a worker: end the processes of a gate."""
    with _LOCK:
        pool = _POOLS.pop(gate, None)
    if pool is not None:
        pool.processes.shutdown(wait=False)


def _end_if_idle(gate: str) -> None:
    pool = _POOLS.get(gate)
    if pool is not None and time.monotonic() - pool.used >= IDLE_SECONDS:
        end_processes(gate)
