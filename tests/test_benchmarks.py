"""The benchmarks run: each at its smallest, and one that fails costs its own row alone. Figures are not checked."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NAMES = [
    *("start", "inspect", "contract", "step-test", "extremes", "locate", "polygraphy", "fixture"),
    *("processor", "re-export", "unmerge", "gate", "loop"),
]
FAILING = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import comparisons, run
def fail(scratch, scale):
    yield comparisons.Row("a first figure", "1 s")
    raise TypeError("no | such\\nthing")
def sound(scratch, scale):
    yield comparisons.Row("a second figure", "2 s", limit="1 s", over=False)
comparisons.BENCHMARKS.clear()
comparisons.BENCHMARKS.update({"bad": fail, "good": sound})
sys.exit(run.main())
"""


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=300)


def rows(result: subprocess.CompletedProcess[str]) -> list[list[str]]:
    lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


QUICK = ("start",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_each_benchmark_runs_at_its_smallest(name: str, tmp_path: Path) -> None:
    result = run(BENCHMARKS / "run.py", "--smallest", name, folder=tmp_path)
    found = rows(result)
    assert found, result.stderr
    assert not [row for row in found if "FAILED" in row], found
    assert all(len(row) == 7 for row in found)
    assert result.returncode == int(any("OVER" in row for row in found))
    assert "load average" in result.stdout


def test_these_are_all_benchmarks(tmp_path: Path) -> None:
    result = run(BENCHMARKS / "run.py", "--help", folder=tmp_path)
    assert f"of {', '.join(NAMES)};" in " ".join(result.stdout.split())
    assert run(BENCHMARKS / "run.py", "nothing", folder=tmp_path).returncode == 2


def test_a_benchmark_that_fails_is_a_row_with_its_reason(tmp_path: Path) -> None:
    result = run("-c", FAILING, BENCHMARKS, folder=tmp_path)
    assert [row[0] for row in rows(result)] == ["a first figure", "bad", "a second figure"]
    assert [row[-1] for row in rows(result)] == ["", "FAILED", "ok"]
    assert "TypeError ... no / such ... thing" in result.stdout
    assert result.returncode == 1
