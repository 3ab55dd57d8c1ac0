"""Real exports whose outputs bear each other's names: found by inspection alone, and only there."""

import shutil
from pathlib import Path

import onnx
import pytest
from onnx.helper import make_node
from support.isolated import EXPORTS
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options

CROSSED = {"present_key_self_0": "present_value_self_0", "present_value_self_0": "present_key_self_0"}
NAMES = sorted(path.name for path in EXPORTS.iterdir() if path.is_dir())


def crossed(name: str, out: Path, one: str, other: str) -> Path:
    """A copy of an export in which two outputs of every decoder have changed names."""
    shutil.copytree(EXPORTS / name, out)
    for path in out.glob("*.onnx"):
        model = onnx.load(str(path))
        made = {output.name for output in model.graph.output}
        if {one, other} <= made:
            change = {one: f"{one}/made", other: f"{other}/made"}
            for node in model.graph.node:
                node.input[:] = [change.get(value, value) for value in node.input]
                node.output[:] = [change.get(value, value) for value in node.output]
            model.graph.node.append(make_node("Identity", [change[one]], [other]))
            model.graph.node.append(make_node("Identity", [change[other]], [one]))
            onnx.save(model, str(path))
    return out


def presents(name: str, kind: str) -> tuple[str, str, str]:
    """Key and value of layer 0, and the key of layer 1, as an export calls them."""
    infix = f".{kind}" if (EXPORTS / name / "encoder_model.onnx").exists() else ""
    return f"present.0{infix}.key", f"present.0{infix}.value", f"present.1{infix}.key"


def errors(folder: Path) -> set[str]:
    return {finding.name for finding in inspect(str(folder)).findings if finding.name.endswith("-swapped")}


@pytest.mark.parametrize("name", sampled(NAMES, 2))
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_crossed_outputs_are_found_without_a_run(name: str, kind: str, tmp_path: Path) -> None:
    key, value, other_key = presents(name, kind)
    if kind == "encoder" and ".encoder." not in key:
        pytest.skip("a decoder-only export has no cross-attention cache")
    assert errors(EXPORTS / name) == set()
    assert errors(crossed(name, tmp_path / "parts", key, value)) == {"key-value-swapped"}
    assert errors(crossed(name, tmp_path / "layers", key, other_key)) == {"layers-swapped"}


def test_a_run_without_anything_to_compare_overrules_nothing(tmp_path: Path) -> None:
    """One token a step: the loop runs, and no call without the cache says whether it is right."""
    folder = load_all()["layout-ort-t5-init-healthy"].write(tmp_path)
    path = folder / "t5-small_decoder.onnx"
    model = onnx.load(str(path))
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [CROSSED.get(name, name) for name in names]
    onnx.save(model, str(path))
    report = step_test(str(folder))
    assert "key-value-swapped" in {finding.name for finding in report.findings if finding.severity == "error"}


@pytest.mark.parametrize("name", ["gpt2", "marian-4.57.6"])
def test_a_run_confirms_it_and_nothing_is_found_beside_it(name: str, tmp_path: Path) -> None:
    key, value, _ = presents(name, "decoder")
    report = step_test(str(crossed(name, tmp_path / "copy", key, value)), Options(consumer="held"))
    found = [finding for finding in report.findings if finding.severity == "error"]
    assert {finding.name for finding in found} == {"key-value-swapped"}
    assert all(finding.confidence == "confirmed" for finding in found)
    assert all(any("differs at step" in line for line in finding.effects) for finding in found)
