"""The command line as a user calls it: in this process, which has its imports, or in one of its own."""

import contextlib
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from kvdoctor.cli.main import main

if sys.platform == "linux":
    import resource

ROOT = Path(__file__).parents[2]
SECONDS = 300.0
"""The most processor time of a command in this process, without that of its worker."""
Done = subprocess.CompletedProcess[str]


def run(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, seconds: float = SECONDS
) -> Done:
    """Run a command in this process: with the streams and the exit code of a process; an error that escapes is raised.

    Working folder, environment, streams, signal handlers and what else a command sets for its process are reset.
    """
    words = [str(argument) for argument in arguments]
    with _own_process(words) as (out, err), _processor_time(seconds):
        os.chdir(cwd or ".")
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        sys.stderr.flush()
        assert isinstance(code, int)
        return Done(["kvdoctor", *words], code, out.getvalue().decode(), err.getvalue().decode())


@contextlib.contextmanager
def _own_process(words: list[str]) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Reset afterwards what a command sets for its process; gives what it writes to its streams."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    folder, threshold = Path.cwd(), gc.get_threshold()
    out, err = io.BytesIO(), io.BytesIO()
    data = resource.getrlimit(resource.RLIMIT_DATA) if sys.platform == "linux" else (-1, -1)
    with (
        patch.object(sys, "argv", [str(ROOT / "kvdoctor" / "__main__.py"), *words]),
        patch.object(sys.modules["__main__"], "__package__", "kvdoctor", create=True),
        patch.object(sys, "stdin", io.StringIO()),
        patch.object(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8")),
        patch.object(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8")),
        patch.dict(os.environ),
    ):
        try:
            yield out, err
        finally:
            os.chdir(folder)
            if sys.platform == "linux":
                resource.setrlimit(resource.RLIMIT_DATA, data)
            gc.set_threshold(*threshold)
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Interrupt what takes more processor time: that of a busy machine is not counted."""

    def end(*_: object) -> NoReturn:
        raise AssertionError(f"the command took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_process(*arguments: str | Path, **more: Any) -> Done:
    """Run a command in a process of its own: for what concerns processes, streams and imports."""
    command = [sys.executable, "-m", "kvdoctor", *map(str, arguments)]
    return subprocess.run(command, check=False, **{"capture_output": True, "text": True, "cwd": ROOT, **more})


def kvdoctor(*arguments: str | Path) -> tuple[int, str]:
    done = run(*arguments, cwd=ROOT)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout


def report(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code, text = kvdoctor(*arguments, "--format", "json")
    document: dict[str, Any] = json.loads(text)
    return code, document


report_once = cache(report)
"""The report of a model that stays as it is: of the same call, once in a session. It must not be changed."""
