"""`gate --cluster` against a real Dask scheduler and real workers on loopback, one of them killed halfway."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import bad_models as bad
from support.bad_models import call, saved
from support.command_line import run_process
from support.many_models import OPTIONS, registry
from support.processes import assert_gone, started

from kvdoctor.gating import cluster
from kvdoctor.gating.cache_key import describe_software
from kvdoctor.gating.cluster import _disagreement
from kvdoctor.gating.jobs import GateJob, GateSettings, NoWorkerLeft, ProcessLost
from kvdoctor.gating.run import gate
from kvdoctor.options import Options

pytestmark = pytest.mark.skipif(find_spec("distributed") is None, reason="Dask is not here")
slow = pytest.mark.slow


ENDED = re.compile(r"kvdoctor: \d+ of \d+: ")
"""The line that a gate prints as a model ends."""


class Loopback:
    """A scheduler, and workers of one thread each with a nanny."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.address = folder, f"tcp://127.0.0.1:{port}"
        self.scheduler = self._start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        self.nannies = [self._worker() for _ in range(workers)]
        with self.client() as client:
            client.wait_for_workers(workers, timeout=120)

    def client(self) -> Any:
        from distributed import Client

        end = time.monotonic() + 120
        while True:
            try:
                return Client(self.address, timeout=5, set_as_default=False)
            except OSError:
                if time.monotonic() > end:
                    raise

    def stop(self) -> None:
        for process in (*self.nannies, self.scheduler):
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()

    def _worker(self) -> "subprocess.Popen[bytes]":
        local = ("--local-directory", str(self.folder))
        return self._start("dask_worker", self.address, "--nthreads", "1", "--no-dashboard", *local)

    def _start(self, module: str, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Elsewhere, so that paths as the user wrote them mean nothing to the workers.
        return subprocess.Popen(command, cwd=self.folder, **quiet)


@pytest.fixture
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    started_here = Loopback(tmp_path_factory.mktemp("dask"))
    yield started_here
    started_here.stop()


def worker_of(nanny: "subprocess.Popen[bytes]") -> psutil.Process:
    """The process that a nanny watches."""
    for child in psutil.Process(nanny.pid).children():
        if any("gating.process_pool" in " ".join(below.cmdline()) for below in child.children(recursive=True)):
            return child
    raise AssertionError("this worker has nothing to do")


def busy_worker(nanny: "subprocess.Popen[bytes]", gate: "subprocess.Popen[str]") -> psutil.Process:
    """The same, as soon as one of its models runs: a slot, and below it a worker that has computed."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert gate.poll() is None, gate.communicate()
        with contextlib.suppress(AssertionError, psutil.Error):
            worker = worker_of(nanny)
            if any(below.cpu_times().user > 1 for slot in worker.children() for below in slot.children()):
                return worker
        time.sleep(0.1)
    raise AssertionError("this worker was given nothing")


def reports(output: str) -> list[str]:
    return [json.dumps({**report, "measured": None}) for report in json.loads(output)["reports"]]


@slow
def test_the_same_reports_as_locally_though_a_worker_is_killed(loopback: Loopback, tmp_path: Path) -> None:
    expected = registry(tmp_path, 300)
    command = [sys.executable, "-m", "kvdoctor", "gate", *expected, *OPTIONS]
    elsewhere = subprocess.Popen(
        [*command, "--cluster", loopback.address],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    busy_worker(loopback.nannies[0], elsewhere).kill()
    output, error = elsewhere.communicate(timeout=400)
    assert all(ENDED.match(line) for line in error.splitlines()), error
    assert elsewhere.returncode == 1
    local = subprocess.run([*command, "--jobs", "2"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert local.returncode == 1
    assert list(map(settled, reports(output))) == list(map(settled, reports(local.stdout)))
    assert len(reports(output)) == 300


def settled(report: str) -> str:
    """A report; of a model that is stopped at a limit of memory only its verdict: by then it did more or less."""
    document = json.loads(report)
    return str(document["verdict"]) if document["model"]["path"] in ("eats", "huge") else report


@slow
def test_a_model_whose_worker_is_lost_twice_is_a_finding(loopback: Loopback, tmp_path: Path) -> None:
    sick = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "sick")
    well = saved(bad.decoder(), tmp_path / "well")
    with started("gate", sick, well, "--no-cache", "--format", "json", "--cluster", loopback.address) as process:
        killed: set[int] = set()
        end = time.monotonic() + 120
        while len(killed) < 2 and time.monotonic() < end:
            time.sleep(0.2)
            for nanny in loopback.nannies:
                with contextlib.suppress(AssertionError, psutil.Error):
                    worker = worker_of(nanny)
                    below = worker.children(recursive=True)
                    if worker.pid not in killed and any(child.cpu_times().user > 3 for child in below):
                        worker.kill()
                        killed.add(worker.pid)
                        assert_gone(below, 5)
        output, error = process.communicate(timeout=120)
    assert all(ENDED.match(line) for line in error.splitlines()), error
    assert process.returncode == 3
    lost, other = json.loads(output)["reports"]
    assert other["verdict"] == "healthy"
    (finding,) = lost["findings"]
    assert finding["name"] == "worker-died"
    assert finding["observed"].endswith("lost 2 times; the last time, the worker of the cluster that ran it was lost")


@slow
def test_an_interrupted_gate_leaves_the_cluster_free(loopback: Loopback, tmp_path: Path) -> None:
    import signal

    sick = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "sick")
    with started("gate", sick, "--no-cache", "--cluster", loopback.address) as process:
        end = time.monotonic() + 120
        below: list[psutil.Process] = []
        while not any(child.cpu_times().user > 1.5 for child in below) and time.monotonic() < end:
            time.sleep(0.2)
            for nanny in loopback.nannies:
                with contextlib.suppress(AssertionError, psutil.Error):
                    below = worker_of(nanny).children(recursive=True)
        assert below
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert_gone([child for child in below if "kvdoctor" in " ".join(_command(child))], 5)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Told:
    """Is told of progress as a terminal is: with a lock, which cannot be sent."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __call__(self, *_: Any) -> None:
        raise AssertionError("what runs elsewhere is not told here")


@slow
def test_progress_is_not_sent(loopback: Loopback, tmp_path: Path) -> None:
    model = saved(bad.decoder(), tmp_path / "model")
    done = gate([GateJob(str(model), Options(progress=Told()))], GateSettings(cluster=loopback.address))
    assert done.verdict == "healthy"


class Breaking:
    """A client of a cluster whose connection breaks, and a task of it; `break_at` is the call that raises."""

    status = "running"

    def __init__(self, break_at: str) -> None:
        self.break_at, self.workers = break_at, {"one": 1}

    def _maybe(self, name: str) -> None:
        if name == self.break_at:
            raise RuntimeError(f"broken at {name}")

    def run(self, *_: Any) -> dict[str, Any]:
        return {"one": describe_software()}

    def close(self, **_: Any) -> None:
        """Nothing was opened."""

    def nthreads(self) -> Any:
        return ["no dictionary"] if self.break_at == "nthreads" else dict(self.workers)

    def submit(self, *_: Any, **__: Any) -> "Breaking":
        self._maybe("submit")
        self.workers = {"one": 1} if self.break_at in ("done", "result") else {"other": 0}
        return self

    def add_done_callback(self, _: Any) -> None:
        self._maybe("add_done_callback")

    def done(self) -> bool:
        self._maybe("done")
        return self.break_at == "result"

    def result(self, *_: Any, **__: Any) -> None:
        self._maybe("result")

    def cancel(self, *_: Any, **__: Any) -> None:
        self._maybe("cancel")


@pytest.mark.parametrize(
    ("break_at", "error"),
    [
        *(
            ("submit", NoWorkerLeft),
            ("add_done_callback", NoWorkerLeft),
            ("done", NoWorkerLeft),
            ("nthreads", NoWorkerLeft),
            ("cancel", ProcessLost),
        ),
        *(("result", ProcessLost), ("pickling", NoWorkerLeft)),
    ],
)
def test_a_client_that_breaks_keeps_nobody_waiting(
    break_at: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_connect", lambda _: Breaking(break_at))
    monkeypatch.setattr(cluster, "POLL_SECONDS", 0.05)
    with cluster.Cluster("tcp://there") as executor:
        answer = executor.submit(repr, threading.RLock() if break_at == "pickling" else 1)
        with pytest.raises(error):
            answer.result(timeout=120)
        if break_at == "done":
            with pytest.raises(NoWorkerLeft, match="broken at done"):
                executor.submit(repr, 1).result(timeout=120)


LOGGING = """
import logging, distributed
from kvdoctor.gating import cluster

cluster._silence_logs()
logging.getLogger("distributed.client").warning("Couldn't gather 1 keys")
logging.getLogger("asyncio").error("never retrieved", exc_info=distributed.client.AllExit())
logging.getLogger("asyncio").error("something else")
"""


def test_what_the_client_logs_is_not_said_twice() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGING], capture_output=True, text=True, check=True)
    assert done.stderr == "something else\n"


@slow
def test_no_cluster_is_wrong_usage(tmp_path: Path) -> None:
    model = saved(bad.decoder(), tmp_path / "model")
    for address in ("tcp://127.0.0.1:9", "nonsense://", "127.0.0.1:9"):
        result = call("gate", model, "--no-cache", "--cluster", address)
        assert result.code == 2
        assert "no Dask scheduler answers" in result.err
    both = call("gate", model, "--jobs", "2", "--cluster", "tcp://127.0.0.1:9")
    assert both.code == 2
    assert "--jobs is for this machine" in both.err


def test_other_versions_are_refused() -> None:
    mine = describe_software()
    assert _disagreement(mine) is None
    for name in ("kvdoctor", "onnx", "numpy"):
        assert f"{name} (0.0.1 there, {mine[name]} here)" in str(_disagreement({**mine, name: "0.0.1"}))
    assert "source of kvdoctor;" in str(_disagreement({**mine, "source": "0"}))
    assert "onnxruntime" in str(_disagreement({**mine, "onnxruntime": []}))


def test_what_is_lacking_is_said(tmp_path: Path) -> None:
    """Where distributed is not installed: a module of that name that cannot be loaded."""
    (tmp_path / "distributed.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    model = saved(bad.decoder(), tmp_path / "model")
    result = call(
        "gate",
        model,
        "--no-cache",
        "--cluster",
        "tcp://127.0.0.1:9",
        how=run_process,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.code == 2
    assert "pip install 'kvdoctor[dask]'" in result.err
