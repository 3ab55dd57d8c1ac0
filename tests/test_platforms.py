"""What differs between Linux, macOS and Windows, as far as one system can show it."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.bad_models import MARIAN
from support.sampling import sampled

from kvdoctor.addons.loops.check import find_program
from kvdoctor.cli.output import names_folder
from kvdoctor.decode.messages import MeasureJob
from kvdoctor.errors import WorkerDied, as_argument
from kvdoctor.runtime.process import Limits, Worker, describe_exit

posix = pytest.mark.skipif(os.name != "posix", reason="needs a shell script")

IMPORT_ALL = """
import builtins, importlib, pkgutil

UNIX = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
load = builtins.__import__


def load_as_on_windows(name, namespace=None, *rest, **more):
    if name in UNIX and (namespace or {}).get("__name__", "").startswith("kvdoctor"):
        raise ModuleNotFoundError(name)
    return load(name, namespace, *rest, **more)


builtins.__import__ = load_as_on_windows
import kvdoctor

names = [found.name for found in pkgutil.walk_packages(kvdoctor.__path__, "kvdoctor.")]
# The scripts of exporters need PyTorch; __main__ runs the command line; a cluster needs an extra.
left_out = ("kvdoctor.repair.export.scripts.", "kvdoctor.__main__", "kvdoctor.gating.cluster")
taken = [name for name in names if not name.startswith(left_out)]
for name in taken:
    importlib.import_module(name)
print(len(taken))
"""


def test_every_module_loads_without_the_modules_of_unix() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 350


def printed(encoding: str, *arguments: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-m", "kvdoctor", *arguments],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.mark.parametrize("format_", sampled(["html", "junit", "markdown", "json"], 3))
def test_a_document_is_the_same_bytes_in_every_encoding(format_: str) -> None:
    command = "gate" if format_ == "junit" else "inspect"
    shown = [printed(encoding, command, str(MARIAN), "--format", format_) for encoding in ("cp1252", "utf-8")]
    if format_ == "junit":  # it has the time that the run took
        assert all(text.startswith(b"<?xml") and text.decode("utf-8") for text in shown)
    else:
        assert shown[0] == shown[1]


def test_the_text_is_ascii_where_the_output_takes_no_more() -> None:
    text = printed("cp1252", "inspect", str(MARIAN))
    assert b"x error[KV203]" in text
    assert text.isascii()
    assert b"\\u" not in text
    assert "✗ error[KV203]".encode() in printed("utf-8", "inspect", str(MARIAN))


@pytest.mark.parametrize(
    ("path", "argument"),
    [
        (r"exports\marian", r"exports\marian"),
        (r"C:\Users\Ana\model.onnx", r"C:\Users\Ana\model.onnx"),
        (r"C:\my models\gpt2", r'"C:\my models\gpt2"'),
        ("C:\\my models\\", '"C:\\my models\\\\"'),
        ("a&b", '"a&b"'),
        ("", '""'),
    ],
)
def test_a_suggested_command_fits_the_shells_of_windows(path: str, argument: str) -> None:
    assert as_argument(path, windows=True) == argument


@pytest.mark.parametrize("path", [r"exports\marian", "my models", "it's", "a&b"])
def test_a_suggested_command_fits_the_shells_of_unix(path: str) -> None:
    assert shlex.split(as_argument(path, windows=False)) == [path]


@pytest.mark.parametrize("path", ["-rf", "--help", "a\nb", "it's\\a\tb", "a\u202eb", "\udcff", "\u6a21\u578b"])
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_a_name_that_is_no_plain_text_is_one_argument_of_one_line(path: str) -> None:
    argument = as_argument(path, windows=False)
    assert argument.isprintable()
    assert not argument.startswith("-")
    done = subprocess.run(["bash", "-c", f"printf %s {argument}"], capture_output=True, check=True)
    assert os.path.normpath(os.fsdecode(done.stdout)) == path


def test_a_word_with_either_separator_of_windows_names_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_folder(f"exports{os.sep}marian")
    assert not names_folder("marian")
    monkeypatch.setattr(os, "sep", "\\")
    monkeypatch.setattr(os, "altsep", "/")
    assert names_folder(r"exports\marian")
    assert names_folder("exports/marian")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "ended by signal SIGKILL"),
        (-62, "ended by signal 62"),
        (3, "ended with exit code 3"),
        (0xC0000005, "ended with exit code 0xc0000005"),
    ],
)
@posix
def test_an_end_is_told_in_the_words_of_its_system(code: int, words: str) -> None:
    assert describe_exit(code) == words


@posix
def test_the_memory_is_that_of_the_worker_behind_a_launcher(tmp_path: Path) -> None:
    """An environment of Windows has a launcher for its Python, which starts the real one as a child."""
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\n{shlex.quote(sys.executable)} "$@"\nexit $?\n', encoding="utf-8")
    launcher.chmod(0o755)
    with Worker(Limits(max_memory=16), str(launcher)) as worker:
        worker.greet()
        worker.send(MeasureJob())
        with pytest.raises(WorkerDied) as died:
            list(worker.events())
    assert died.value.limit == "memory"


@posix
def test_a_program_of_a_project_is_found_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "project" / "build" / "decode"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert Path(find_program("build/decode", Path("project"))) == program
    assert find_program("build/encode", Path("project")) == "build/encode"


LIBRARY_SPEAKS = """
import os, sys
from kvdoctor.decode.messages import take_pipes
reader, writer = take_pipes()
os.write(1, b"of a library\\n")
assert sys.stdin.read() == ""
writer.write(reader.readline().upper())
writer.flush()
"""


def test_what_a_library_prints_or_reads_is_no_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY_SPEAKS], input=b"a message\n", capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"A MESSAGE\n"), done.stderr
    assert b"of a library" in done.stderr


@posix
@pytest.mark.parametrize("command", ["env", "explain"])
def test_lists_are_wrapped_at_the_width_of_a_terminal(command: str) -> None:
    import pty  # not on Windows

    terminal, side = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen([sys.executable, "-m", "kvdoctor", command], stdout=side, env=environment) as process:
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal whose other side is closed with an error
            while part := os.read(terminal, 65536):
                shown += part
    os.close(terminal)
    lines = shown.decode().splitlines()
    assert process.returncode == 0
    assert len(lines) > 5
    assert [line for line in lines if len(line) > 80] == []


def test_text_that_is_no_path_at_all_is_quoted_as_well() -> None:
    assert as_argument("\ud800\0", windows=False) == r"$'\355\240\200\000'"
