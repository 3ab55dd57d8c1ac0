"""Measures processes from outside: wall time, and resident memory summed over a process and its children."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

MIB = 1 << 20
POLL_SECONDS = 0.003
BYTECODE = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": tempfile.mkdtemp(prefix="kvdoctor-bytecode-")}
"""Every command has its bytecode, as installed packages do: without it half of a short command's time is compiling.

The run that does not count writes it.
"""
atexit.register(shutil.rmtree, BYTECODE["PYTHONPYCACHEPREFIX"], ignore_errors=True)

RESCAN_SECONDS = 0.05  # looking for new children walks over all processes of the machine


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, the exit code that it must have, additions to its environment, and its working folder."""

    line: tuple[str, ...]
    code: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def run(self, watch: Callable[[int], None] | None = None) -> str:
        """Run to the end and return standard error.

        Raises:
            RuntimeError: the exit code is another one.
        """
        with tempfile.TemporaryFile("w+") as errors:
            environment = os.environ | BYTECODE | self.environment
            process = subprocess.Popen(
                self.line, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=self.folder
            )
            if watch:
                watch(process.pid)
            code = process.wait()
            errors.seek(0)
            if code != self.code:
                raise RuntimeError(f"exit code {code}, not {self.code}: {' '.join(self.line)}\n{errors.read()}")
            return errors.read()


def python(*arguments: str) -> Command:
    """This Python."""
    return Command((sys.executable, *arguments))


def kvdoctor(*arguments: str, code: int = 0) -> Command:
    """The installed `kvdoctor` command of this Python."""
    return Command((str(Path(sys.executable).with_name("kvdoctor")), *arguments), code)


def seconds(command: Command) -> float:
    """Wall time of one run."""
    begin = time.perf_counter()
    command.run()
    return time.perf_counter() - begin


def processor_seconds(command: Command) -> float:
    """Processor time of one run, user and system, with its children: a busy machine adds little to it."""
    before = _children_seconds()
    command.run()
    return _children_seconds() - before


def _children_seconds() -> float:
    if sys.platform == "win32":
        return os.times().children_user + os.times().children_system
    import resource

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def peak_mib(command: Command) -> float:
    """Peak resident memory of one run, in MiB: the process and its children, summed at the same moment."""
    return _peak_mib(command, with_children=True)


def peak_alone_mib(command: Command) -> float:
    """Peak resident memory of the process alone: of kvdoctor without its worker, where the runtime has the model."""
    return _peak_mib(command, with_children=False)


def _peak_mib(command: Command, with_children: bool) -> float:
    peak = 0

    def watch(pid: int) -> None:
        nonlocal peak
        family, scanned = [psutil.Process(pid)], 0.0
        while True:
            if time.monotonic() - scanned > RESCAN_SECONDS:
                family, scanned = _family(pid), time.monotonic()
            sizes = [_resident(process) for process in family]
            if not sizes or sizes[0] == 0:
                return
            peak = max(peak, sum(sizes) if with_children else sizes[0])
            time.sleep(POLL_SECONDS)

    command.run(watch)
    return peak / MIB


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(process: psutil.Process) -> int:
    """Bytes; 0 for a process that has ended, as a zombie has no memory."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The costs of two commands over interleaved repeats: medians, and medians of ratio and difference by repeat."""

    ours: float
    theirs: float
    ratio: float
    more: float

    @classmethod
    def of(cls, costs: Sequence[tuple[float, float]]) -> "Pair":
        """Summarize the repeats, each as (ours, theirs)."""
        return cls(
            ours=median([ours for ours, _ in costs]),
            theirs=median([theirs for _, theirs in costs]),
            ratio=median([ours / theirs for ours, theirs in costs]),
            more=median([ours - theirs for ours, theirs in costs]),
        )


def interleaved(
    ours: Command, theirs: Command, repeats: int, cost: Callable[[Command], float] = seconds, *, warm: bool = True
) -> Pair:
    """Measure A B, B A, A B, ...; with `warm` after one run of each that does not count."""
    if warm:
        ours.run()
        theirs.run()
    costs: list[tuple[float, float]] = []
    for number in range(repeats):
        if number % 2:
            other = cost(theirs)
            costs.append((cost(ours), other))
        else:
            mine = cost(ours)
            costs.append((mine, cost(theirs)))
    return Pair.of(costs)


def median_cost(command: Command, repeats: int, cost: Callable[[Command], float] = seconds) -> float:
    """The median cost of a command on its own."""
    return median([cost(command) for _ in range(repeats)])
