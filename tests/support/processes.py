"""Commands as processes that a test starts, watches and ends."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


@contextlib.contextmanager
def started(*arguments: str | Path, scratch: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start kvdoctor; it is killed at the end of the block if it has not ended."""
    environment = {**os.environ, **({"TMPDIR": str(scratch)} if scratch else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdoctor", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def workers(process: subprocess.Popen[str], seconds: float = 120) -> list[psutil.Process]:
    """Wait for the child processes."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if children := psutil.Process(process.pid).children(recursive=True):
            return children
        time.sleep(0.005)
    raise AssertionError("no worker was started")


def assert_gone(processes: list[psutil.Process], seconds: float = 120) -> None:
    """They end by themselves; if not, they are ended here."""
    left = psutil.wait_procs(processes, timeout=seconds)[1]
    running = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    for process in running:
        process.kill()
    assert not running, "a worker was left running"
