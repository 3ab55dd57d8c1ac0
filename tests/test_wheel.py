"""What is installed from a wheel works without the repository: in an empty environment, on a copied export."""

import json
import shutil
from pathlib import Path

import pytest
from support.isolated import EXPORTS, call, find_uv, give_up

ROOT = Path(__file__).parents[1]
SMALL = 250_000_000
"""Bytes of all that is installed: onnx and onnxruntime are most of it."""
EXPORTERS = {"torch", "transformers", "optimum"}
"""Packages that only the environments of exporters hold."""


def run(*command: str | Path, code: int = 0) -> str:
    done = call(command)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_does_all_that_the_readme_shows(tmp_path: Path) -> None:
    uv = find_uv() or give_up("uv is not installed")
    run(uv, "build", "--wheel", "--out-dir", tmp_path / "dist", ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(uv, "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "pip", "install", "--python", python, wheel)
    installed = [path for path in (tmp_path / "venv" / "lib").rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in installed) < SMALL
    assert not {path.name for path in (tmp_path / "venv" / "lib").glob("*/site-packages/*")} & EXPORTERS
    command = python.with_name("kvdoctor")
    model, fixed, page = tmp_path / "marian", tmp_path / "fixed", tmp_path / "report.html"
    shutil.copytree(EXPORTS / "marian-4.46.3", model)

    assert "cross-cache-emptied" in run(command, model, "--output", page, code=1)
    assert "cross-cache-emptied" in page.read_text(encoding="utf-8")
    run(command, "re-export", model, "-o", fixed)
    assert json.loads(run(command, "gate", fixed, "--format", "json"))["verdict"] == "healthy"
    assert "KV203" in run(command, "explain", "cross-cache-emptied")
    assert "first_step" in run(command, "contract", fixed, "--format", "json")
    message = "The dimension with value zero exceeds the dimension size of the input tensor"
    assert "re-export" in run(command, "explain", message)
    assert "$schema" in run(command, "schema", "report")
