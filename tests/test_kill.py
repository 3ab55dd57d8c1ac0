"""Killed or interrupted at any moment: OUT is whole or absent, the source is unchanged, and nothing is left running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import bad_models as bad
from support.bad_models import GPT2, MARIAN, call, copied, saved, unchanged
from support.command_line import run_process
from support.processes import assert_gone, started, workers
from support.sampling import sampled

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs the signals of POSIX")

SECONDS = 1.6  # how long `re-export` takes on this model, more or less
MOMENTS = [float(moment) for moment in np.round(np.sort(np.random.default_rng(0).uniform(0.05, SECONDS, 15)), 3)]


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    return copied(MARIAN, tmp_path / "marian")


def assert_whole_or_absent(out: Path) -> None:
    if out.exists():
        assert (out / "kvdoctor-report.json").is_file()
        assert (out / "kvdoctor-report.md").is_file()
        assert call("inspect", out).code == 0


def assert_a_later_run_cleans_up(marian: Path, out: Path) -> None:
    force = ["--force"] if out.exists() else []
    assert call("re-export", marian, "-o", out, *force).code == 0
    assert_whole_or_absent(out)
    assert sorted(path.name for path in out.parent.iterdir()) == sorted([marian.name, out.name])


@pytest.mark.parametrize("moment", sampled(MOMENTS, 20))
def test_killed_at_any_moment(moment: float, marian: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with unchanged(marian):
        with started("re-export", marian, "-o", out) as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        assert_whole_or_absent(out)
        assert_a_later_run_cleans_up(marian, out)


@pytest.mark.slow
@pytest.mark.parametrize("delay", sampled([0.01, 0.0, 0.1, 0.3], 4))
def test_killed_while_writing(delay: float, marian: Path, tmp_path: Path) -> None:
    """From the moment on when something stands beside the model."""
    out = tmp_path / "out"
    with unchanged(marian):
        with started("re-export", marian, "-o", out) as process:
            while process.poll() is None and len(list(tmp_path.iterdir())) == 1:
                time.sleep(0.001)
            time.sleep(delay)
        assert_whole_or_absent(out)
        assert_a_later_run_cleans_up(marian, out)


@pytest.mark.slow
@pytest.mark.parametrize("delay", sampled([0.0, 0.1], 2))
def test_killed_while_replacing(delay: float, marian: Path, tmp_path: Path) -> None:
    """With --force the old folder stands until the new one is whole."""
    out = tmp_path / "out"
    assert call("re-export", marian, "-o", out).code == 0
    with unchanged(marian):
        with started("re-export", marian, "-o", out, "--force") as process:
            while process.poll() is None and len(list(tmp_path.iterdir())) == 2:
                time.sleep(0.001)
            time.sleep(delay)
        assert out.exists()
        assert_whole_or_absent(out)
        assert_a_later_run_cleans_up(marian, out)


@pytest.mark.parametrize("suffix", sampled(["partial", "old"], 2))
def test_what_a_killed_run_left_is_swept(suffix: str, marian: Path, tmp_path: Path) -> None:
    """A run killed between its two renames leaves the old folder beside OUT."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = saved(b"half", tmp_path / f".out.kvdoctor-{ended.pid}.{suffix}")
    assert call("re-export", marian, "-o", tmp_path / "out").code == 0
    assert not left.exists()


@pytest.mark.slow
def test_the_folder_of_a_run_that_goes_on_is_left_alone(marian: Path, tmp_path: Path) -> None:
    other = saved(b"half", tmp_path / f".out.kvdoctor-{os.getppid()}.partial")
    assert call("re-export", marian, "-o", tmp_path / "out").code == 0
    assert other.exists()


@pytest.mark.slow
def test_two_runs_at_once_for_one_out(marian: Path, tmp_path: Path) -> None:
    """One of them may be refused; OUT is that of the other."""
    out = tmp_path / "out"
    with started("re-export", marian, "-o", out) as one, started("re-export", marian, "-o", out) as other:
        codes = []
        for process in (one, other):
            error = process.communicate(timeout=120)[1]
            assert "Traceback" not in error
            codes.append(process.returncode)
    assert 0 in codes
    assert set(codes) <= {0, 2}
    assert_whole_or_absent(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marian", "out"]


@pytest.mark.parametrize("delay", sampled([0.0, 0.05, 0.5, 0.2, 0.9], 2))
def test_interrupted(delay: float, marian: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    with unchanged(marian), started("re-export", marian, "-o", out, scratch=scratch) as process:
        children = workers(process)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in output + error
    assert "interrupted" in error
    assert not out.exists()
    assert not list(scratch.glob("kvdoctor*"))
    assert_gone(children)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["marian", "scratch"]


@pytest.mark.parametrize(
    ("number", "busy"),
    sampled(
        [(number, busy) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL) for busy in (True, False)], 3
    ),
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "busy" if value else "starting",
)
def test_no_worker_outlives_the_command(number: signal.Signals, busy: bool, tmp_path: Path) -> None:
    """A model that never answers must not keep a core for ever, whichever way the command ends."""
    folder = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "model")
    with started("step-test", folder) as process:
        children = workers(process)
        time.sleep(2 if busy else 0)
        process.send_signal(number)
        process.communicate(timeout=120)
        assert_gone(children)


@pytest.mark.parametrize("lives", [False, True])
def test_scratch_folders_of_killed_runs_are_swept(lives: bool, tmp_path: Path) -> None:
    """A folder of a run that goes on is left alone however old it is, and so is a folder of the user."""
    scratch, mine = tmp_path / "scratch", tmp_path / "scratch" / "kvdoctor-repaired"
    mine.mkdir(parents=True)
    folder = saved(bad.decoder(*bad.looping_for_ever()), tmp_path / "model")
    with started("step-test", folder, scratch=scratch) as process:
        while not (found := list(scratch.glob("kvdoctor-*.scratch"))):
            assert process.poll() is None
            time.sleep(0.01)
        if not lives:
            process.kill()
            process.wait()
        for path in (mine, *found):
            os.utime(path, (0, 0))
        assert run_process("step-test", GPT2, env={**os.environ, "TMPDIR": str(scratch)}).returncode == 0
        assert sorted(scratch.iterdir()) == sorted([mine, *(found if lives else ())])


def test_interrupted_while_python_loads_it(tmp_path: Path) -> None:
    """Where it meets a callback of the import, Python would print that it ignores it, and go on."""
    interrupts = "import os, weakref\nclass One: pass\none = One()\n"
    interrupts += "weakref.finalize(one, lambda: os.kill(os.getpid(), 2))\ndel one\n"
    (tmp_path / "click.py").write_text(interrupts, encoding="utf-8")
    done = run_process("inspect", GPT2, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (130, "kvdoctor: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of the address space")
@pytest.mark.parametrize(
    ("mebibytes", "command"),
    [
        *((one, "inspect IN") for one in (60, 110, 120)),
        *(
            (120, f"{one} IN -o OUT")
            for one in ("re-export", "convert --logits last", "loop --language python", "repro")
        ),
        *((120, f"{one} IN") for one in ("diff IN", "gate")),
    ],
)
def test_too_little_memory_is_no_finding(mebibytes: int, command: str, tmp_path: Path) -> None:
    import resource

    places = {"IN": GPT2, "OUT": tmp_path / "out"}
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))
    done = run_process(*(places.get(word, word) for word in command.split()), preexec_fn=limit)
    assert (done.returncode, done.stdout) == (3, "")
    known = ("kvdoctor: there is not enough memory", "kvdoctor: the worker process could not start")
    assert done.stderr.startswith(known)
    assert done.stderr.count("\n") == 1


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "numpy").mkdir()
    broken = tmp_path / "numpy" / "__init__.py"
    broken.write_text("raise ImportError('no library for this machine')", encoding="utf-8")
    done = run_process("step-test", GPT2, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 3
    assert "ImportError: no library for this machine; `kvdoctor env`" in done.stderr
