"""Measures written loops next to bare loops: the processor time of a token, and the memory of 2,000 tokens.

In each language two programs take steps in turn (`loop_programs/`), with one thread: one calls the written loop and
takes the likeliest token; the other runs the session on inputs that were made in advance. A line on standard input says
how many steps to take; the answer comes when they are taken.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from measure import Pair, kvdoctor
from models import HEAD_DIM, Sizes

from kvdoctor.addons.loops.check import find_library

PROGRAMS = Path(__file__).parent / "loop_programs"
PROMPT = 16


class NotBuilt(Exception):
    """A language whose tools are missing, or whose programs could not be built."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands of the two programs of a language; the arguments of a run follow."""

    loop: tuple[str, ...]
    bare: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def build_python(project: Path) -> Programs:
    """Nothing is built: the loop is imported from its folder."""
    loop, bare = ((sys.executable, str(PROGRAMS / "python" / f"{name}_steps.py")) for name in ("loop", "bare"))
    return Programs(loop, bare, project, {"PYTHONPATH": str(project)})


def build_javascript(project: Path) -> Programs:
    """The programs lie in the project, where they find its packages."""
    for program in (PROGRAMS / "javascript").iterdir():
        shutil.copy(program, project)
    _build(("npm", "install", "--no-audit", "--no-fund", "--loglevel=error"), project)
    return Programs(("node", "loop_steps.js"), ("node", "bare_steps.js"), project)


def build_rust(project: Path) -> Programs:
    """The programs are a package beside the project. Both use the library of the installed onnxruntime."""
    package = project.with_name("steps")
    shutil.copytree(PROGRAMS / "rust", package, dirs_exist_ok=True)
    _build(("cargo", "build", "--release", "--quiet", "--target-dir", "target"), package)
    loop, bare = ((str(package / "target" / "release" / f"{name}_steps"),) for name in ("loop", "bare"))
    return Programs(loop, bare, package, {"ORT_DYLIB_PATH": str(find_library())})


LANGUAGES: dict[str, Callable[[Path], Programs]] = {
    "python": build_python,
    "rust": build_rust,
    "javascript": build_javascript,
}


def prepare(language: str, model: Path, scratch: Path) -> Programs:
    """Write the loop for a model and build the programs.

    Raises:
        NotBuilt: the tools of the language are missing, or its build failed.
    """
    project = scratch / language / "loop"
    project.parent.mkdir(parents=True)
    kvdoctor("loop", str(model), "--language", language, "-o", str(project)).run()
    return LANGUAGES[language](project)


def _build(command: tuple[str, ...], folder: Path) -> None:
    if (tool := shutil.which(command[0])) is None:
        raise NotBuilt(f"{command[0]} not found")
    done = subprocess.run((tool, *command[1:]), cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt(f"{' '.join(command[:2])} failed: {(done.stderr.strip().splitlines() or [''])[-1]}")


class Steps(AbstractContextManager["Steps"]):
    """A running program that has read its prompt and waits to be told how many steps to take."""

    def __init__(self, programs: Programs, which: str, model: Path, prompt: int, most: int) -> None:
        self._command: tuple[str, ...] = (*getattr(programs, which), str(model), str(prompt), str(most))
        environment = {**os.environ, **programs.environment}
        self._process = subprocess.Popen(
            self._command,
            cwd=programs.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.communicate()

    def take(self, steps: int) -> float:
        """Take so many steps; the seconds of processor time that they took."""
        assert self._process.stdin is not None
        began = self._processor_time()
        print(steps, file=self._process.stdin, flush=True)
        self._answer()
        return self._processor_time() - began

    def _processor_time(self) -> float:
        """That of all threads so far, as Linux counts it in nanoseconds."""
        threads = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(one.read_text().split()[0]) for one in threads) / 1e9

    def resident(self) -> int:
        """Bytes of resident memory while the program waits."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"exit code {self._process.wait()}: {' '.join(self._command)}")


def token_times(programs: Programs, model: Path, rounds: int, blocks: int, steps: int) -> Pair:
    """Seconds of processor time of a token in the loop and in the bare program.

    They take turns, `steps` each: A B, B A, ...
    Each round is a pair of new processes, whose first turn does not count.
    """
    costs: list[tuple[float, float]] = []
    for _ in range(rounds):
        most = (blocks + 1) * steps
        with ExitStack() as stack:
            loop, bare = (stack.enter_context(Steps(programs, w, model, PROMPT, most)) for w in ("loop", "bare"))
            for number in range(blocks + 1):
                first, second = (loop, bare) if number % 2 else (bare, loop)
                times = {first: first.take(steps), second: second.take(steps)}
                if number:
                    costs.append((times[loop] / steps, times[bare] / steps))
    return Pair.of(costs)


def growth(programs: Programs, which: str, model: Path, begin: int, end: int) -> int:
    """By how many bytes a program grows from one step to a later one."""
    with Steps(programs, which, model, PROMPT, end) as program:
        program.take(begin)
        before = program.resident()
        program.take(end - begin)
        return program.resident() - before


def cache_bytes(sizes: Sizes) -> int:
    """What a token takes in the cache of a decoder: a key and a value of each head and layer, in float32."""
    return sizes.layers * 2 * sizes.heads * HEAD_DIM * 4
