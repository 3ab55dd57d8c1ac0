"""Masks that a graph stores as large tables: what an inspection derives from them, and which tensors it reads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, TensorProto, helper
from onnx.numpy_helper import from_array
from support.text_fixtures import load_all

from kvdoctor.analysis.abstract_run import tables
from kvdoctor.analysis.abstract_run.graph_run import may_hide
from kvdoctor.analysis.abstract_run.tables import read_tables
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.view import GraphView

LONGEST = 96
CAUSAL = np.tril(np.ones((LONGEST, LONGEST), bool))
TABLES = {
    "bool": CAUSAL,
    "bytes of four axes": CAUSAL.astype(np.uint8)[None, None],
    "float": CAUSAL.astype(np.float32),
    "float that is added": np.where(CAUSAL, np.float32(0), np.finfo(np.float32).min)[None, None],
    "half that is added": np.where(CAUSAL, np.float16(0), np.float16(-np.inf)),
}
HEALTHY = load_all()["decoder-only-healthy"]


def write(folder: Path, table: np.ndarray, rows: str = "slice", external: bool = False) -> str:
    """The healthy decoder, with its mask cut from a table: the rows of the new tokens, and a column for each token.

    `rows` says how: by a slice, by position ids, or by a slice from the first row on, whatever the past is.
    """
    HEALTHY.write(folder)
    file = folder / "model.onnx"
    model = onnx.load(file)
    graph = model.graph
    at = table.ndim - 2
    constants = {"table": table, "row_axis": np.array([at]), "column_axis": np.array([at + 1]), "first": np.array([0])}
    graph.initializer.extend([from_array(np.asarray(values), name) for name, values in constants.items()])
    taken = {
        "slice": helper.make_node("Slice", ["table", "past", "total", "row_axis"], ["rows"]),
        "slice from the first": helper.make_node("Slice", ["table", "first", "new", "row_axis"], ["rows"]),
        "positions": helper.make_node("Gather", ["table", "position_ids"], ["rows_of_each"], axis=at),
    }[rows]
    made = [taken]
    if rows == "positions":  # [batch, new, longest] -> [batch, 1, new, longest]
        made.append(helper.make_node("Unsqueeze", ["rows_of_each", "one_axis"], ["rows"]))
        graph.initializer.append(from_array(np.array([1]), "one_axis"))
        next(t for t in graph.initializer if t.name == "column_axis").CopyFrom(from_array(np.array([3]), "column_axis"))
    made.append(helper.make_node("Slice", ["rows", "first", "total", "column_axis"], ["cut"]))
    seen = "cut"
    if table.min() < 0:
        graph.initializer.append(from_array(np.array(-1, table.dtype), "minus_one"))
        made.append(helper.make_node("Greater", ["cut", "minus_one"], ["kept"]))
        seen = "kept"
    made.append(helper.make_node("Cast", [seen], ["causal"], to=TensorProto.FLOAT))
    place = next(index for index, node in enumerate(graph.node) if node.op_type == "Trilu")
    graph.node.remove(graph.node[place])
    for node in reversed(made):
        graph.node.insert(place, node)
    onnx.save(model, file, save_as_external_data=external, location="weights.bin", size_threshold=0)
    return str(folder)


def predicted(path: str) -> list[str]:
    return [finding.name for finding in inspect(path).findings if finding.predicted]


@pytest.mark.parametrize("kind", TABLES)
def test_a_mask_that_is_cut_from_its_first_row_on_is_suspected(kind: str, tmp_path: Path) -> None:
    assert predicted(write(tmp_path / "healthy", TABLES[kind])) == []
    faulty = write(tmp_path / "faulty", TABLES[kind], "slice from the first")
    assert predicted(faulty) == ["mask-not-offset"]


def test_a_run_confirms_it(tmp_path: Path) -> None:
    report = step_test(write(tmp_path / "healthy", TABLES["bool"]))
    assert (report.verdict, report.findings) == ("healthy", ())
    found = step_test(write(tmp_path / "faulty", TABLES["bool"], "slice from the first")).findings
    assert [(one.name, one.severity) for one in found if one.severity != "note"] == [("mask-not-offset", "error")]


def test_rows_are_taken_by_positions(tmp_path: Path) -> None:
    """Padding on the left moves a token to another column than its position."""
    path = write(tmp_path / "healthy", TABLES["bool"], "positions")
    found = [finding.name for finding in step_test(path).findings if finding.severity != "note"]
    assert predicted(path) == found == ["padding-changes-logits"]
    model = onnx.load(tmp_path / "healthy" / "model.onnx")
    restart(model.graph)
    onnx.save(model, tmp_path / "healthy" / "model.onnx")
    assert predicted(path) == ["mask-not-offset"]


def restart(graph: GraphProto) -> None:
    """Take the rows of the table by positions that count from 0 in each step."""
    at = next(index for index, node in enumerate(graph.node) if node.input[0] == "table")
    graph.node[at].input[1] = "restarted"
    graph.node.insert(at, helper.make_node("Sub", ["position_ids", "past"], ["restarted"]))


def test_a_table_beside_the_model_is_read(tmp_path: Path) -> None:
    assert predicted(write(tmp_path / "healthy", TABLES["bool"], external=True)) == []
    faulty = write(tmp_path / "faulty", TABLES["bool"], "slice from the first", external=True)
    assert predicted(faulty) == ["mask-not-offset"]
    (tmp_path / "faulty" / "weights.bin").unlink()
    assert predicted(faulty) == []


# --- masks whose numbers are not known -------------------------------------------------------------------------------

DISTANCE = np.arange(LONGEST)[:, None] - np.arange(LONGEST)
UNREAD = {
    "three values": np.where(DISTANCE < 0, -1e9, np.where(DISTANCE < 4, 0, -0.5)),
    "a relative bias": np.where(DISTANCE < 0, -1e9, -0.3 * np.log1p(np.maximum(DISTANCE, 0))),
    "a slope for each head": np.stack([np.where(DISTANCE < 0, -1e9, -slope * DISTANCE) for slope in (0.5, 0.1)])[None],
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_table_that_is_not_read_may_hide_later_tokens(kind: str, tmp_path: Path) -> None:
    """The number that stands for such a table hides nothing."""
    healthy = write_bias(tmp_path, UNREAD[kind])
    assert predicted(healthy) == []
    assert step_test(healthy).verdict == "healthy"


def test_a_mask_that_is_read_and_hides_no_later_token_is_found(tmp_path: Path) -> None:
    assert predicted(write_bias(tmp_path / "healthy", np.where(CAUSAL, 0, -1e9))) == []
    assert predicted(write_bias(tmp_path / "faulty", np.where(CAUSAL.T, 0, -1e9))) == ["not-causal"]


def test_a_table_of_distances_hides_no_fault_of_a_mask_beside_it(tmp_path: Path) -> None:
    table = -0.3 * np.log1p(np.abs(DISTANCE))
    assert predicted(write_bias(tmp_path / "healthy", table, ["ones", "offset"])) == []
    assert predicted(write_bias(tmp_path / "faulty", table, ["ones"])) == ["mask-not-offset"]


def write_bias(folder: Path, table: np.ndarray, masked: Sequence[str] = ()) -> str:
    """The healthy decoder, whose scores have a part of a float table added: in place of its mask, or beside Trilu."""
    path = write(folder, table.astype(np.float32))
    model = onnx.load(folder / "model.onnx")
    nodes = {node.output[0]: node for node in model.graph.node}
    mask = helper.make_node("Trilu", masked, ["causal"], upper=0)
    nodes["causal"].CopyFrom(mask if masked else helper.make_node("Identity", ["ones"], ["causal"]))
    nodes["bias"].output[0] = "padding"
    place = list(model.graph.node).index(nodes["bias"]) + 1
    model.graph.node.insert(place, helper.make_node("Add", ["padding", "cut"], ["bias"]))
    onnx.save(model, folder / "model.onnx")
    return path


def test_windows_that_differ_by_head_are_followed_by_runs_alone(tmp_path: Path) -> None:
    """One number stands for all heads: it tells masks that are the same for each."""
    windows = np.stack([CAUSAL & ~np.tril(CAUSAL, -window) for window in (3, LONGEST)])[None]
    healthy, faulty = write(tmp_path / "a", windows), write(tmp_path / "b", windows, "slice from the first")
    assert predicted(healthy) == predicted(faulty) == []
    assert step_test(healthy).verdict == "healthy"
    assert "mask-not-offset" in [one.name for one in step_test(faulty).findings]
    same = np.stack([CAUSAL, CAUSAL])[None]
    assert predicted(write(tmp_path / "c", same)) == []
    assert predicted(write(tmp_path / "d", same, "slice from the first")) == ["mask-not-offset"]


@pytest.mark.parametrize(
    ("nodes", "hides"),
    [
        ([("Add", ["x", "cut"], ["s"]), ("LogSoftmax", ["s"], ["y"])], True),
        ([("BiasSoftmax", ["x", "cut"], ["y"])], True),
        ([("Relu", ["cut"], ["s"]), ("Softmax", ["s"], ["y"])], False),
        ([("Dropout", ["cut"], ["d", ""]), ("Clip", ["x", "", "high"], ["s"]), ("Softmax", ["s"], ["y"])], False),
    ],
    ids=["logarithm", "fused", "no mask", "an output and an input left out"],
)
def test_what_reaches_the_scores_of_an_attention(nodes: list[tuple[str, list[str], list[str]]], hides: bool) -> None:
    made = [helper.make_node("Slice", ["table", "from", "to"], ["cut"])]
    made += [helper.make_node(op, inputs, outputs) for op, inputs, outputs in nodes]
    graph = helper.make_graph(made, "masks", [], [], [from_array(DISTANCE.astype(np.float32), "table")])
    assert may_hide(GraphView(helper.make_model(graph)), ["table"]) == hides


# --- which tensors are read -------------------------------------------------------------------------------------------


def read(path: Path, constants: dict[str, np.ndarray], readers: dict[str, str]) -> set[str]:
    """The names of the tables of a graph whose constants are read by an operator each."""
    nodes = [helper.make_node(op, [name, "x"], [f"{name}.{op}"]) for name, op in readers.items()]
    tensors = [from_array(values, name) for name, values in constants.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "tables", [], [], tensors)), path)
    return set(read_tables(GraphView(read_skeleton(path).model), path))


def test_weights_are_no_tables(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    square = random.standard_normal((LONGEST, LONGEST)).astype(np.float32)
    constants = {
        "weight": square,
        "mask": np.where(CAUSAL, np.float32(0), np.float32(-1e9)),
        "mask of a product": np.where(CAUSAL, np.float32(0), np.float32(-1e9)),
        "embeddings": square,
        "embeddings of two values in the first row": np.where(np.arange(LONGEST)[:, None] == 0, np.float32(1), square),
        "ints": random.integers(0, 255, (LONGEST, LONGEST)).astype(np.uint8),
        "places": np.arange(LONGEST * 4)[None],
        "small": np.ones((2, 2), bool),
    }
    readers = dict.fromkeys(constants, "Gather") | {"weight": "MatMul", "mask of a product": "MatMul", "mask": "Slice"}
    assert read(tmp_path / "model.onnx", constants, readers) == {"mask", "places"}


def test_what_is_read_is_bounded_and_equal_tables_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    layers = {f"layer {at}": CAUSAL for at in range(4)}
    readers = dict.fromkeys(layers, "Slice")
    assert read(path, layers, readers) == set(layers)
    found = read_tables(GraphView(read_skeleton(path).model), path)
    assert len({id(values) for values in found.values()}) == 1
    monkeypatch.setattr(tables, "MOST_BYTES", 2 * CAUSAL.nbytes)
    assert read(path, layers, readers) == set(layers)
    others = {name: np.roll(CAUSAL, at) for at, name in enumerate(layers)}
    assert len(read(path, others, readers)) == 2
    monkeypatch.setattr(tables, "MOST_READ", 3 * CAUSAL.nbytes)
    assert read(path, layers, readers) == set()
    monkeypatch.setattr(tables, "MOST_BYTES", CAUSAL.nbytes - 1)
    assert read(path, layers, readers) == set()
