"""Decoders whose layers run inside a Scan or Loop over a stacked cache: each is read, and its faults are found."""

from pathlib import Path

import pytest

from evidence.unseen.layer_loops import LayerLoop, divide_cache
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.json_format import render_contracts
from kvdoctor.runtime.client import Runtime

FRONT = ("layers", "batch", "kv_heads", "past", "head_dim")
BEHIND = ("batch", "layers", "kv_heads", "past", "head_dim")
PARTS = ("layers", "parts", "batch", "kv_heads", "past", "head_dim")
HEALTHY = {
    "scan": (LayerLoop("scan"), FRONT),
    "scan, opset 21": (LayerLoop("scan", opset=21), FRONT),
    "scan, last layer first": (LayerLoop("scan", reversed="both"), FRONT),
    "scan, keys and values in one tensor": (LayerLoop("scan", order="parts"), PARTS),
    "loop": (LayerLoop("loop"), FRONT),
    "loop, layers behind the batch": (LayerLoop("loop", order="behind"), BEHIND),
    "loop, slices": (LayerLoop("sliced"), FRONT),
    "loop that counts": (LayerLoop("counted"), FRONT),
    "loop that collects": (LayerLoop("collected", opset=21), FRONT),
}
FAULTY = {
    "scan, positions": (LayerLoop("scan", fault="positions"), "positions-not-offset"),
    "scan, mask": (LayerLoop("scan", fault="mask"), "mask-not-offset"),
    "scan, new entries alone": (LayerLoop("scan", fault="new"), "present-drops-past"),
    "scan, presents last layer first": (LayerLoop("scan", reversed="out"), "layers-swapped"),
    "scan, layers last first": (LayerLoop("scan", reversed="in"), "layers-swapped"),
    "loop, positions": (LayerLoop("loop", fault="positions"), "positions-not-offset"),
    "loop, mask": (LayerLoop("loop", fault="mask"), "mask-not-offset"),
    "loop, new entries alone": (LayerLoop("loop", fault="new"), "present-drops-past"),
    "loop that collects, new entries alone": (LayerLoop("collected", fault="new"), "present-drops-past"),
    "loop that does not begin": (LayerLoop("loop", started=False), "present-does-not-grow"),
    "loop that counts, mask": (LayerLoop("counted", fault="mask"), "mask-not-offset"),
}


def write(loop: LayerLoop, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(loop.model().SerializeToString())
    return str(folder)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_one_is_read_and_proved(name: str, tmp_path: Path, runtime: Runtime) -> None:
    loop, axes = HEALTHY[name]
    model = write(loop, tmp_path)
    assert inspect(model, Options()).findings == ()
    report = step_test(model, Options(), runtime)
    assert (report.verdict, report.findings, report.not_checked) == ("healthy", (), ())
    slots = report.stacks[0].contract.slots
    assert [(slot.axes, slot.growth, slot.carry) for slot in slots] == [(axes, "grow", "feed-back")] * len(slots)
    assert all(slot.present == slot.past.replace("past", "present") for slot in slots)


@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_in_one_is_named(name: str, tmp_path: Path, runtime: Runtime) -> None:
    loop, cause = FAULTY[name]
    model = write(loop, tmp_path)
    assert inspect(model, Options()).findings == ()
    report = step_test(model, Options(), runtime)
    assert [(finding.name, finding.severity) for finding in report.findings] == [(cause, "error")]


def test_a_cache_in_a_sequence_of_tensors_is_not_read_and_no_fault(tmp_path: Path, runtime: Runtime) -> None:
    model = write(LayerLoop("sequence"), tmp_path)
    for report in (inspect(model, Options()), step_test(model, Options(), runtime)):
        assert (report.findings, report.verdict) == ((), "incomplete")
        assert any('passes through Loop "x_last"' in entry.reason for entry in report.not_checked)


def test_what_a_loop_hides_can_be_said(tmp_path: Path, runtime: Runtime) -> None:
    """A contract with the slots that another form of the same decoder has."""
    (read, hidden) = (write(LayerLoop(form), tmp_path / form) for form in ("loop", "sequence"))
    (tmp_path / "contract.json").write_text(render_contracts(inspect(read, Options())), encoding="utf-8")
    report = step_test(hidden, Options(contract=str(tmp_path / "contract.json")), runtime)
    assert (report.verdict, report.findings) == ("healthy", ())


def test_a_present_that_a_loop_does_not_return_is_a_fault(tmp_path: Path, runtime: Runtime) -> None:
    for form in ("scan", "sequence"):
        model = LayerLoop(form).model()
        del model.graph.output[1:]
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        for report in (inspect(str(tmp_path), Options()), step_test(str(tmp_path), Options(), runtime)):
            refused = {entry.code for entry in report.not_checked if entry.essential}
            assert {finding.name for finding in report.findings} == {"past-without-present"} or "KV101" in refused, form


BACKWARDS = (2, 1, 0)
DIVIDED = {
    "scan": divide_cache(LayerLoop("scan").model()),
    "scan, split": divide_cache(LayerLoop("scan").model(), split=True),
    "scan, numbered": divide_cache(LayerLoop("scan").model(), named=False),
    "scan, last layer first": divide_cache(LayerLoop("scan", reversed="both").model(), named=False),
    "scan, returned last first": divide_cache(LayerLoop("scan", reversed="out").model(), BACKWARDS, named=False),
    "loop": divide_cache(LayerLoop("loop").model(), named=False),
    "loop, slices": divide_cache(LayerLoop("sliced").model()),
    "loop that counts": divide_cache(LayerLoop("counted").model()),
    "loop that collects": divide_cache(LayerLoop("collected").model()),
}
CROSSED = {
    "scan": divide_cache(LayerLoop("scan").model(), (1, 0, 2)),
    "scan, split": divide_cache(LayerLoop("scan").model(), (1, 0, 2), split=True),
    "scan, returned last first": divide_cache(LayerLoop("scan", reversed="out").model()),
    "loop": divide_cache(LayerLoop("loop").model(), (0, 2, 1)),
    "loop, slices": divide_cache(LayerLoop("sliced").model(), (0, 2, 1)),
    "loop that collects": divide_cache(LayerLoop("collected").model(), (0, 2, 1)),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_loop_over_the_stacked_caches_of_the_layers(name: str, tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "model.onnx").write_bytes(DIVIDED[name].SerializeToString())
    for report in (inspect(str(tmp_path), Options()), step_test(str(tmp_path), Options(), runtime)):
        assert report.findings == ()
        slots = report.stacks[0].contract.slots
        presents = [slot.past.replace("past_key_values", "present").replace("in_", "out_") for slot in slots]
        assert [slot.present for slot in slots] == presents
    assert report.verdict == "healthy"


@pytest.mark.parametrize("name", CROSSED)
def test_presents_of_other_layers_are_found(name: str, tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "model.onnx").write_bytes(CROSSED[name].SerializeToString())
    report = step_test(str(tmp_path), Options(), runtime)
    assert [(finding.name, finding.severity) for finding in report.findings] == [("layers-swapped", "error")]
    assert {finding.name for finding in inspect(str(tmp_path), Options()).findings} <= {"layers-swapped"}


@pytest.mark.parametrize("form", ["sliced", "counted", "collected"])
def test_without_names_a_place_that_is_not_followed_is_not_decided(form: str, tmp_path: Path, runtime: Runtime) -> None:
    for returned in (range(3), BACKWARDS):
        model = divide_cache(LayerLoop(form).model(), returned, named=False)
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        report = step_test(str(tmp_path), Options(), runtime)
        assert (report.findings, inspect(str(tmp_path), Options()).findings, report.verdict) == ((), (), "incomplete")
