"""The repaired file on a runtime that is older than kvdoctor itself supports, with the plainest consumer there is."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from isolated import EXPORTS, MERGED, Environment, re_export

from kvdoctor.kept_calls import save_call
from kvdoctor.place.flat import flatten
from kvdoctor.place.variants import read_located, write_variant

pytestmark = pytest.mark.slow

OLD_RUNTIME = Environment("3.11", ("onnxruntime==1.16.3", "numpy==1.26.4"), ("onnxruntime",))
STEPS = 8
FIRST_FED_BACK = 2
"""Index of the first step whose past comes out of the cached branch."""


def plain_loop(folder: Path) -> list[dict[str, Any]]:
    """Returns the runs of the plain loop in batch 1 and 2, which are known to be runs of the old runtime."""
    result = OLD_RUNTIME.run("plain_loop.py", folder)
    assert result["onnxruntime"] == "1.16.3"
    assert [run["batch"] for run in result["runs"]] == [1, 2]
    runs: list[dict[str, Any]] = result["runs"]
    return runs


def assert_parity(steps: list[dict[str, float]]) -> None:
    for step in steps:
        assert step["spread"] > 1
        assert step["distance"] <= 1e-5 * step["spread"]


@pytest.mark.parametrize("name", MERGED)
def test_repaired_file_has_parity_in_the_plain_loop(name: str, tmp_path: Path) -> None:
    repaired = re_export(name, tmp_path / "repaired")
    onnx.checker.check_model(repaired / "decoder_model_merged.onnx", full_check=True)
    for run in plain_loop(repaired):
        assert run["error"] is None
        assert len(run["steps"]) == STEPS
        assert_parity(run["steps"])


@pytest.mark.parametrize("name", MERGED)
def test_original_file_fails_in_the_plain_loop(name: str) -> None:
    for run in plain_loop(EXPORTS / name):
        assert len(run["steps"]) == FIRST_FED_BACK
        assert_parity(run["steps"])
        assert "optimum::if" in run["error"]


def test_a_variant_finds_its_weights_in_the_original(tmp_path: Path) -> None:
    """The old runtime takes no folder for external data, and the newest no link out of one."""
    source = EXPORTS / "gpt2" / "model.onnx"
    flat = flatten(read_located(source), {})
    variant = write_variant(flat, source, tmp_path / "variant.onnx", values=["/transformer/wte/Gather_output_0"])
    save_call(tmp_path / "feeds.npz", {"input_ids": np.array([[3, 5]])})
    side = {"path": str(variant.path), "root": str(variant.root), "feeds": str(tmp_path / "feeds.npz"), "level": "off"}
    job = {
        "trial": "compare",
        "left": side,
        "right": side,
        "inject": [],
        "provider": "CPUExecutionProvider",
        "threads": 1,
    }
    job["pairs"] = [["kvdoctor.value.0", "kvdoctor.value.0", [None, None, None]]]
    (tmp_path / "job.json").write_text(json.dumps(job))
    result = OLD_RUNTIME.run("trial.py", tmp_path / "job.json", Path(__file__).parent.parent)
    assert result["onnxruntime"] == "1.16.3"
    assert result["pairs"] == [{"dtype": "float", "relative": 0.0}]
