"""One worker process for many runtimes: what ends leaves it, ready, to what begins."""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from unittest.mock import patch

import psutil

from kvdoctor.choices import CPU
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.process import Limits, Worker
from kvdoctor.runtime.scratch import ScratchFolder

MOST_BYTES = 300 << 20
"""A worker that has grown beyond this size is ended all the same."""


@contextlib.contextmanager
def lent_workers() -> Iterator[None]:
    """Within the block, the worker of a runtime that ended without an error serves the next runtime.

    Its sandbox reads all models and writes the private folder of this process, which stays the same.
    """
    idle: list[Worker] = []
    folders = [ScratchFolder()]
    begin, end = Runtime.__init__, Runtime.__exit__

    def take(
        runtime: Runtime, limits: Limits, python: str | None = None, provider: str = CPU, reads: Collection[str] = ()
    ) -> None:
        usual = (python, provider, limits.sandbox) == (None, CPU, True)
        if not usual or not idle or not _is_ready(worker := idle.pop()):
            begin(runtime, limits, python, provider, ("/", *reads) if usual else reads)
            return
        worker.limits, worker.peak_bytes, worker._memory_limit = limits, 0, None
        vars(runtime).update(limits=limits, python=None, _worker=worker, _beside={}, _unopened={})
        vars(runtime).update(_diagnosis=time.monotonic_ns(), _lost=0, provider=CPU, _environment={})
        vars(runtime).update(_scratch=ScratchFolder(), _reads=frozenset("/"), _writes=frozenset("/"))

    def give_back(runtime: Runtime, *problem: object) -> None:
        # A worker ends with the thread that started it (PR_SET_PDEATHSIG): those of other threads are not lent.
        own = threading.current_thread() is threading.main_thread()
        lent = own and (runtime.python, runtime.provider, runtime.limits.sandbox) == (None, CPU, True)
        if lent and not idle and not any(problem) and _is_ready(runtime._worker):
            idle.append(runtime._worker)
            for other in runtime._beside.values():
                other.__exit__()
            folders.append(runtime._scratch)  # the worker has it as its temporary folder
        else:
            end(runtime, *problem)

    with patch.object(Runtime, "__init__", take), patch.object(Runtime, "__exit__", give_back):
        try:
            yield
        finally:
            for worker in idle:
                worker.stop()
            for folder in folders:
                folder.cleanup()


def _is_ready(worker: Worker) -> bool:
    """Whether a worker has done all its jobs and has room for more."""
    if worker.hello is None or worker._process.poll() is not None or not worker.is_idle:
        return False
    return psutil.Process(worker._process.pid).memory_info().rss < MOST_BYTES
