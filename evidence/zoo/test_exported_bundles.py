"""Bundles of real models: each is driven whole and healthy, and each has a faulty twin that is found and named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from support.isolated import Environment, call

from evidence.zoo import bundle_exports
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.document import Report

pytestmark = [pytest.mark.zoo, pytest.mark.slow]

ENVIRONMENT = Environment(bundle_exports.PYTHON, bundle_exports.REQUIREMENTS, ("torch", "transformers", "onnxscript"))
MOST_SECONDS = 1800
Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All bundles, made once."""
    ENVIRONMENT.require()
    out = tmp_path_factory.mktemp("bundles")
    script = Path(bundle_exports.__file__)
    done = call([*ENVIRONMENT.command(), script, out], MOST_SECONDS)
    failed = {path.parent.name: path.read_text(encoding="utf-8")[-600:] for path in out.glob("*/failed.txt")}
    assert (done.returncode, failed) == (0, {})
    return out


def copy(bundle: Path, target: Path) -> Path:
    target.mkdir()
    for path in bundle.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def outcomes(report: Report) -> dict[str, str]:
    return {run.experiment: run.outcome for run in report.runs}


@pytest.mark.parametrize("name", list(bundle_exports.RECIPES))
def test_a_bundle_is_driven_whole(name: str, bundles: Path) -> None:
    report = step_test(str(bundles / name), Options())
    assert report.verdict == "healthy", report.findings
    assert outcomes(report)["plain-loop"] == "passed"
    assert {finding.severity for finding in report.findings} <= {"note"}
    if name in ("llava", "qwen2-audio"):
        assert outcomes(report)["rows-in-prompt"] == "passed"
    if name == "llava":
        assert outcomes(report)["encoder-rows"] == "passed"


def test_stages_are_found_without_a_config(bundles: Path, tmp_path: Path) -> None:
    folder = copy(bundles / "llama-stages", tmp_path / "model")
    (folder / "genai_config.json").unlink()
    report = step_test(str(folder), Options())
    assert report.verdict == "healthy"
    assert [stack.name for stack in report.stacks] == ["pipeline"]


def shorten(file: str, output: str, axis: int, most: int) -> Spoil:
    """Cuts entries off an output."""

    def spoil(folder: Path) -> None:
        model = onnx.load(folder / file)
        for node in model.graph.node:
            node.output[:] = ["whole" if name == output else name for name in node.output]
        ends = {"from": [0], "to": [most], "axis": [axis]}
        model.graph.initializer.extend(from_array(np.array(ends[name]), f"cut_{name}") for name in ends)
        model.graph.node.append(make_node("Slice", ["whole", *(f"cut_{name}" for name in ends)], [output]))
        port = next(port for port in model.graph.output if port.name == output)
        port.type.tensor_type.shape.dim[axis].dim_value = most
        onnx.save(model, folder / file)

    return spoil


def restart_positions(folder: Path) -> None:
    """Positions are counted from the first one of each call."""
    file = folder / "decoder_model_merged.onnx"
    model = onnx.load(file)
    for node in model.graph.node:
        node.input[:] = ["own_positions" if name == "position_ids" else name for name in node.input]
    model.graph.initializer.extend(from_array(np.array([n]), f"number_{n}") for n in (0, 1, 2))
    cut = make_node("Slice", ["position_ids", "number_0", "number_1", "number_2"], ["first_position"])
    model.graph.node.insert(0, make_node("Sub", ["position_ids", "first_position"], ["own_positions"]))
    model.graph.node.insert(0, cut)
    onnx.save(model, file)


def lose_last_stage(folder: Path) -> None:
    (folder / "second.onnx").unlink()


@pytest.mark.parametrize(
    ("name", "spoil", "found"),
    [
        ("llava", shorten("vision_encoder.onnx", "image_features", 1, 8), "parts-do-not-fit vision_encoder.onnx"),
        (
            "qwen2-audio",
            shorten("audio_encoder.onnx", "audio_features", 2, 24),
            "parts-do-not-fit audio_encoder.onnx",
        ),
        ("gemma3n", shorten("embed_tokens.onnx", "per_layer_inputs", 2, 3), "parts-do-not-fit embed_tokens.onnx"),
        ("qwen2-vl", restart_positions, "positions-not-offset logits"),
        ("llama-stages", lose_last_stage, "parts-do-not-fit second.onnx"),
    ],
)
def test_a_faulty_twin_is_found_and_named(name: str, spoil: Spoil, found: str, bundles: Path, tmp_path: Path) -> None:
    folder = copy(bundles / name, tmp_path / "model")
    spoil(folder)
    report = step_test(str(folder), Options())
    assert report.verdict == "unhealthy"
    assert found in {f"{f.name} {f.subject[0]}" for f in report.findings if f.severity == "error"}
