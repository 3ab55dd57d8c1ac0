"""Graphs that take a fixed number of several tokens a call are compared with their own first call; faults are found."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, helper, numpy_helper
from support.graph_faults import EXPORTS
from support.proofs import repair_of

from kvdoctor import api
from kvdoctor.addons.conversions import api as conversions
from kvdoctor.report.document import Report, exit_code

WINDOW, OPEN = ("batch=1", "new=4", "past=32"), ("new=4",)
Surgery = Callable[[GraphProto], None]


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """GPT-2 with four tokens a call: over a window of 32 rows, and over a past of any length."""
    made = {}
    for sizes in (WINDOW, OPEN):
        made[sizes] = tmp_path_factory.mktemp("fixed") / "model"
        report = conversions.convert(EXPORTS / "gpt2", made[sizes], sizes=sizes)
        assert (exit_code(report, "error"), report.verdict) == (0, "healthy")
    return made


def steps(report: Report) -> list[tuple[int, int]]:
    (loop,) = [run for run in report.runs if run.experiment == "plain-loop"]
    return [(step.past_length, step.new_tokens) for step in loop.steps]


@pytest.mark.parametrize("sizes", [WINDOW, OPEN], ids=["window", "open"])
def test_the_first_call_is_computed_again_over_a_cut_cache(
    sizes: tuple[str, ...], fixed: dict[tuple[str, ...], Path]
) -> None:
    report = api.step_test(fixed[sizes])
    assert report.verdict == "healthy"
    assert not [finding for finding in report.findings if finding.severity == "error"]
    assert steps(report) == [(0, 4), (3, 4), (2, 4), (1, 4), (7, 4), (11, 4), (15, 4)]


def test_a_window_that_is_filled_from_the_right_is_padded_on_the_left_in_every_run(
    fixed: dict[tuple[str, ...], Path],
) -> None:
    (run,) = [run for run in api.step_test(fixed[WINDOW]).runs if run.experiment == "left-padding"]
    assert run.outcome == "skipped"
    assert run.reason == (
        "every run has it: the mask hides the entries of the window, on the left, that hold no token yet"
    )


def same_positions(graph: GraphProto) -> None:
    """Positions count from 0 in every call."""
    graph.initializer.append(numpy_helper.from_array(np.arange(4, dtype=np.int64)[None], "from_zero"))
    for node in graph.node:
        if node.op_type == "Gather" and node.input[0] == "transformer.wpe.weight":
            node.input[1] = "from_zero"


def unread_past(graph: GraphProto) -> None:
    """The last layer attends to zeros in place of its past."""
    joined = next(n for n in graph.node if n.op_type == "Concat" and "past_key_values.1.key" in n.input)
    graph.node.insert(0, helper.make_node("Sub", [joined.input[0]] * 2, ["zeros"]))
    joined.input[0] = "zeros"


def late_rows(graph: GraphProto) -> None:
    """The window keeps the rows in front of the newest one."""
    starts, ends = -33, -1
    for name, value in (("fixed_past.starts", starts), ("fixed_past.ends", ends)):
        tensor = next(one for one in graph.initializer if one.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.array([value], np.int64), name))


def broken(model: Path, surgery: Surgery, folder: Path) -> Path:
    shutil.copytree(model, folder)
    shutil.rmtree(folder / "kvdoctor-report", ignore_errors=True)
    graph = onnx.load(folder / "model.onnx")
    surgery(graph.graph)
    onnx.save(graph, folder / "model.onnx")
    return folder


@pytest.mark.parametrize(
    ("sizes", "surgery"), [(WINDOW, same_positions), (WINDOW, unread_past), (OPEN, same_positions), (OPEN, unread_past)]
)
def test_a_fault_is_found(
    sizes: tuple[str, ...], surgery: Surgery, fixed: dict[tuple[str, ...], Path], tmp_path: Path
) -> None:
    report = api.step_test(broken(fixed[sizes], surgery, tmp_path / "model"))
    assert report.verdict == "unhealthy"
    assert [finding for finding in report.findings if finding.severity == "error" and finding.name.startswith("cach")]


def test_a_window_whose_rows_are_not_found_is_not_called_healthy(
    fixed: dict[tuple[str, ...], Path], tmp_path: Path
) -> None:
    report = api.step_test(broken(fixed[WINDOW], late_rows, tmp_path / "model"))
    assert report.verdict == "incomplete"
    assert any("where 'past_key_values.0.key' has the rows" in entry.reason for entry in report.not_checked)


def test_a_first_graph_of_a_fixed_size_is_held_against_the_steps_behind_it(tmp_path: Path) -> None:
    """Compilers for phones make one graph of a prompt's size and one of single tokens."""
    folder = tmp_path / "pair"
    conversions.convert(EXPORTS / "gpt2", folder, layout="pair")
    for file, name, size in (("decoder_model.onnx", "sequence_length", 8), ("decoder_with_past_model.onnx", "", 1)):
        graph = onnx.load(folder / file, load_external_data=False)
        for value in (*graph.graph.input, *graph.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == (name or "sequence_length"):
                    dim.dim_value = size
        onnx.save(graph, folder / file)
    report = api.step_test(folder)
    assert report.verdict == "healthy"
    assert steps(report)[:9] == [(0, 8), *((past, 1) for past in range(7, 0, -1)), (8, 1)]


def test_a_buffer_without_room_for_a_second_call_is_not_written(tmp_path: Path) -> None:
    report = conversions.convert(EXPORTS / "gpt2", tmp_path / "out", sizes=("batch=1", "new=4", "past=5"))
    assert not repair_of(report).proved
    assert not (tmp_path / "out").exists()
