"""Documented limits of devices: each has its source, is told where a graph touches it, and is never a finding."""

import re
import runpy
from pathlib import Path

import pytest
from onnx import TensorProto, helper, load, save
from support import text_fixtures
from support.isolated import EXPORTS

from kvdoctor import inspect
from kvdoctor.diagnose.devices import DocumentedLimit, list_limits
from kvdoctor.model.traverse import STANDARD
from kvdoctor.report.facts import DeviceLimit
from kvdoctor.report.text import render

DOCS = Path(__file__).parents[1] / "docs"


def limits(path: Path | str, stack: int = 0) -> dict[tuple[str, str], DeviceLimit]:
    report = inspect(str(path))
    return {(limit.device, limit.about): limit for limit in report.stacks[stack].devices}


def fixture(name: str, folder: Path) -> Path:
    text_fixtures.read(text_fixtures.FOLDER / f"{name}.onnxtxt").write(folder)
    return folder


@pytest.mark.parametrize("limit", list_limits(), ids=lambda limit: f"{limit.device}-{limit.when}")
def test_each_limit_has_its_sources_and_says_when_they_were_right(limit: DocumentedLimit) -> None:
    assert limit.sources
    assert all(re.fullmatch(r"https://[\w./#-]+", url) for url in limit.sources)
    assert limit.as_of
    assert (limit.when == "operators") == bool(limit.supported or limit.unsupported)
    assert not limit.supported or not limit.unsupported


def test_listed_operators_exist() -> None:
    from onnx.defs import get_all_schemas

    known = {schema.name for schema in get_all_schemas() if schema.domain in STANDARD}
    retired = {"SimplifiedLayerNormalization"}  # ONNX Runtime puts it into the standard domain by itself
    listed = {name for limit in list_limits() for name in (*limit.supported, *limit.unsupported) if "." not in name}
    assert listed <= known | retired


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_devices.py"))["page"]()
    assert (DOCS / "devices.md").read_text(encoding="utf-8") == made


def test_a_decoder_names_its_limits_and_stays_without_finding() -> None:
    report = inspect(str(EXPORTS / "gpt2"))
    found = limits(EXPORTS / "gpt2")
    assert not report.findings
    assert found["WebNN", "operators"].subject == ("ConstantOfShape", "IsNaN", "Range")
    assert "past_key_values.0.key" in found["CoreML", "empty-past"].subject
    assert ("QNN", "dynamic-axes") in found
    assert ("TensorRT", "branch-shapes") not in found
    assert "documented, not measured" in render(report)


def test_a_merged_decoder_has_branches_of_other_shapes_and_a_pair_has_none() -> None:
    merged, pair = limits(EXPORTS / "marian-4.57.6"), limits(EXPORTS / "marian-4.57.6", 1)
    assert "present.0.encoder.key" in merged["TensorRT", "branch-shapes"].subject
    assert ("QNN", "if") in merged
    assert ("TensorRT", "branch-shapes") not in pair
    assert ("QNN", "if") not in pair


def test_attention_with_a_past_is_no_attention_of_tensorrt(tmp_path: Path) -> None:
    found = limits(fixture("layout-attention-23-healthy", tmp_path))
    assert ("TensorRT", "attention-past") in found
    assert ("WebGPU", "growing-gqa") not in found


def test_a_growing_group_query_attention_is_named(tmp_path: Path) -> None:
    found = limits(fixture("layout-gqa-growing-healthy", tmp_path))
    assert ("WebGPU", "growing-gqa") in found
    assert ("TensorRT", "attention-past") not in found


def test_double_and_fixed_axes(tmp_path: Path) -> None:
    """A graph without dynamic axes touches no limit on them; a double anywhere is named."""
    file = tmp_path / "model.onnx"
    model = load(EXPORTS / "gpt2" / "model.onnx")
    for number, value in enumerate((*model.graph.input, *model.graph.output)):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.dim_value = 3 + number
    save(model, file)
    assert ("QNN", "dynamic-axes") not in limits(file)
    assert ("TensorRT", "float64") not in limits(file)
    model.graph.node.append(helper.make_node("Cast", ["logits"], ["wide"], name="to_double", to=TensorProto.DOUBLE))
    save(model, file)
    assert limits(file)["TensorRT", "float64"].subject == ("to_double",)
