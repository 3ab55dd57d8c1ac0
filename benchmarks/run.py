"""Measures kvdoctor beside stated alternatives: `python benchmarks/run.py [NAME ...]`.

Prints the rows of one Markdown table as they are measured. The exit code is 1 if a figure is over its limit or a
benchmark failed. README.md describes the benchmarks.
"""

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil
from comparisons import BENCHMARKS, FULL, SMALLEST, Row, Scale

COLUMNS = ("what", "figure", "alternative", "its figure", "ratio", "limit", "")
WIDTHS = (66, 9, 32, 10, 9, 8, 6)


def measure(names: list[str], scale: Scale) -> Iterator[Row]:
    """Measure each benchmark in a scratch folder of its own; one that fails is a row with the reason."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="kvdoctor-benchmarks-") as scratch:
            try:
                yield from BENCHMARKS[name](Path(scratch), scale)
            except Exception as error:
                yield Row(name, "failed", summarize(error), over=True)


def summarize(error: Exception) -> str:
    """The kind of an error with the first and the last line of its message: a command, and why it failed."""
    lines = str(error).strip().splitlines() or [""]
    ends = lines[:1] if len(lines) == 1 else [lines[0], lines[-1]]
    return " ... ".join([type(error).__name__, *(line.strip()[:160] for line in ends)]).replace("|", "/")


def format_line(cells: tuple[str, ...]) -> str:
    """One line of the Markdown table."""
    return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))} |"


def format_row(row: Row) -> str:
    """A row with its verdict."""
    verdict = {None: "", True: "OVER", False: "ok"}[row.over]
    if row.figure == "failed":
        verdict = "FAILED"
    return format_line((row.what, row.figure, row.alternative, row.its_figure, row.ratio, row.limit, verdict))


def describe_machine(load_before: float) -> str:
    """The machine, the versions and the load: a busy machine adds to differences in seconds as much as to the runs."""
    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("kvdoctor", "onnx", "onnxruntime", "numpy"))
    system = f"{sys.platform} {platform.machine()}, Python {platform.python_version()}"
    return (
        f"{time.strftime('%Y-%m-%d')}; {cores} cores, {memory:.0f} GiB, {system}, {versions}; "
        f"load average {load_before:.1f} before, {psutil.getloadavg()[0]:.1f} after"
    )


def main() -> int:
    """Measure the named benchmarks, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all of them by default")
    parser.add_argument("--smallest", action="store_true", help="tiny models, one run each: tests the benchmarks only")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}; known are {', '.join(BENCHMARKS)}")
    over, load = False, psutil.getloadavg()[0]
    print(format_line(COLUMNS), format_line(tuple("-" * width for width in WIDTHS)), sep="\n", flush=True)
    for row in measure(given.names or list(BENCHMARKS), SMALLEST if given.smallest else FULL):
        print(format_row(row), flush=True)
        over = over or bool(row.over)
    print(f"\n{describe_machine(load)}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
