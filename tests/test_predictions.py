"""What an inspection derives without a run: faults have their names, and nothing else is said."""

import re
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.sampling import sampled
from support.text_fixtures import load_all

from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget
from kvdoctor.analysis.abstract_run.shaping import reshape_value
from kvdoctor.analysis.abstract_run.values import Abstract, CannotRun, TooMuchWork, collapse, exactly, find_parts
from kvdoctor.diagnose.abstract_runs import LARGE, LARGEST, NODES
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import GraphView

FIXTURES = load_all()
PREDICTED = {
    "positions-not-offset": "positions-not-offset",
    "positions-not-offset-fused": "positions-not-offset",
    "mask-not-offset-step": "mask-not-offset",
    "past-ignored": "past-ignored",
    "not-causal": "not-causal",
    "present-rewrites-past": "present-rewrites-past",
    "present-drops-past": "present-drops-past",
    "batch-rows-interact": "batch-rows-interact",
    "step-fails": "step-fails",
    "empty-past-rejected": "empty-past-rejected",
    "nondeterministic": "nondeterministic",
}
"""A fixture for each mechanism, and what must be said; its healthy twin must bring nothing."""


@pytest.mark.parametrize(("name", "check"), PREDICTED.items())
def test_a_fault_is_suspected_and_its_twin_is_not(name: str, check: str, tmp_path: Path) -> None:
    faulty, twin = FIXTURES[name], FIXTURES[FIXTURES[name].twin or ""]
    found = [f for f in inspect(str(faulty.write(tmp_path / "faulty"))).findings if f.predicted]
    assert [(f.name, f.severity, f.confidence) for f in found] == [(check, "warning", "suspected")]
    healthy = inspect(str(twin.write(tmp_path / "healthy")))
    assert not [f.name for f in healthy.findings if f.predicted]


def test_a_run_withdraws_what_was_suspected(tmp_path: Path) -> None:
    folder = str(FIXTURES["session-refused-type"].write(tmp_path))
    assert "step-fails" in {finding.name for finding in inspect(folder).findings}
    report = step_test(folder)
    assert {finding.name for finding in report.findings} == {"session-refused"}
    assert not [finding for finding in report.findings if finding.predicted]


def make_chain(nodes: int) -> onnx.ModelProto:
    """A chain of additions on the token ids."""
    chain = [helper.make_node("Add", [f"v{at}", "one"], [f"v{at + 1}"]) for at in range(nodes)]
    graph = helper.make_graph(
        chain,
        "chain",
        [helper.make_tensor_value_info("v0", TensorProto.INT64, ["batch", "new"])],
        [helper.make_tensor_value_info(f"v{nodes}", TensorProto.INT64, None)],
        [numpy_helper.from_array(np.array([1]), "one")],
    )
    return helper.make_model(graph)


def open_abstractly(model: onnx.ModelProto, nodes: int = NODES) -> AbstractGraph:
    read = ModelProto()
    read.ParseFromString(model.SerializeToString())
    return AbstractGraph(GraphView(read), frozenset(), Budget(nodes))


def test_the_work_is_bounded() -> None:
    graph, begin = open_abstractly(make_chain(LARGEST)), time.process_time()
    fed = {"v0": exactly(np.zeros((1, 3), np.int64))}
    for _ in range(NODES // LARGEST):
        graph.run(fed)
    with pytest.raises(TooMuchWork):
        graph.run(fed)
    assert time.process_time() - begin < 10  # 100,000 nodes; one to two seconds


@pytest.mark.parametrize("name", sampled(["mask-not-offset-step", "positions-not-offset", "decoder-only-healthy"], 2))
def test_a_fault_of_a_large_graph_is_named(name: str, tmp_path: Path) -> None:
    """A loop of fewer steps comes to its end, and so does the search for the cause."""
    FIXTURES[name].write(tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    head = next(at for at, node in enumerate(model.graph.node) if "w_logits" in node.input)
    chain = [helper.make_node("Neg", [f"h{at}"], [f"h{at + 1}"]) for at in range(LARGE)]
    chain[0].input[0] = model.graph.node[head].input[0]
    model.graph.node[head].input[0] = chain[-1].output[0]
    for at, node in enumerate(chain):
        model.graph.node.insert(head + at, node)
    onnx.save(model, tmp_path / "model.onnx")
    found = [finding.name for finding in inspect(str(tmp_path)).findings if finding.predicted]
    assert found == ([] if name == "decoder-only-healthy" else [PREDICTED[name]])


@pytest.mark.parametrize(
    ("name", "limit", "reason"),
    [
        ("decoder-only-healthy", 20, r"\d\d nodes are more than the 20 that are followed without a run"),
        ("layout-function-decoder-healthy", LARGEST, "model.onnx defines functions"),
        ("layout-rwkv-healthy", LARGEST, "the logits or the cache of a plain loop cannot be computed"),
    ],
)
def test_where_nothing_was_predicted_that_is_told(
    name: str, limit: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdoctor.diagnose.abstract_runs.LARGEST", limit)
    report = inspect(str(FIXTURES[name].write(tmp_path)))
    (one,) = report.not_checked
    assert (one.code, one.essential, report.verdict) == ("KV2-KV3", False, "nothing-found")
    assert re.match(f"not predicted, use step-test: {reason}", one.reason), one.reason


def test_nodes_of_many_numbers_count_as_several() -> None:
    """A row of 1,000 numbers times its column: a million numbers for each node of small inputs."""
    nodes = [helper.make_node("MatMul", ["column", "row"], [f"v{at}"]) for at in range(1000)]
    graph = helper.make_graph(
        nodes,
        "products",
        [
            helper.make_tensor_value_info("column", TensorProto.FLOAT, [1000, 1]),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, 1000]),
        ],
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, None)],
    )
    numbers = np.arange(1000.0)
    fed = {"column": exactly(numbers[:, None]), "row": exactly(numbers[None])}
    with pytest.raises(TooMuchWork):
        open_abstractly(helper.make_model(graph), 10_000).run(fed)


def test_integers_are_exact() -> None:
    found = open_abstractly(make_chain(5)).run({"v0": exactly(np.array([[1, 2]]))})
    assert found["v5"].exact
    assert found["v5"].array().tolist() == [[6, 7]]


def test_sizes_that_cannot_agree_are_refused() -> None:
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="frozen")
    graph = helper.make_graph(
        [node],
        "frozen",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "past", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([1, 5, 4]), "shape")],
    )
    opened, keep = open_abstractly(helper.make_model(graph)), (True, True, False)
    assert opened.run({"x": collapse(np.ones((1, 5, 4)), keep)})["y"].shape == (1, 5, 4)
    with pytest.raises(CannotRun, match=r'Reshape "frozen": \[1, 6, 4\] cannot be reshaped'):
        opened.run({"x": collapse(np.ones((1, 6, 4)), keep)})


def test_an_axis_of_one_is_repeated_in_an_einsum() -> None:
    """The operands may have 1 where the other one has more; other sizes must be equal."""
    node = helper.make_node("Einsum", ["x", "y"], ["z"], equation="bi,bi->bi")
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xyz"]
    opened = open_abstractly(helper.make_model(helper.make_graph([node], "einsum", ports[:2], ports[2:])))
    for one in ((1, 3), (2, 1), (2, 3)):
        assert opened.run({"x": exactly(np.ones(one)), "y": exactly(np.ones((2, 3)))})["z"].shape == (2, 3)
    with pytest.raises(CannotRun, match="b of bi,bi->bi is 3 and 2"):
        opened.run({"x": exactly(np.ones((3, 3))), "y": exactly(np.ones((2, 3)))})


@pytest.mark.parametrize(
    ("shape", "target"),
    [((2, 3, 8), (2, 3, 4, 2)), ((2, 4, 3, 2), (8, 3, 2)), ((1, 3, 8), (3, 8)), ((2, 0, 8), (2, 0, 4, 2))],
)
def test_a_reshape_keeps_rows_apart(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    rows = np.arange(np.prod(shape[:-1]), dtype=np.float64).reshape(*shape[:-1], 1)
    found = reshape_value(Abstract(shape, rows), target)
    wanted = np.broadcast_to(rows, shape).reshape(target)
    assert np.array_equal(found.array(), wanted)


def test_what_is_joined_in_a_present_is_cut_out_of_the_past_again() -> None:
    """Key and value of 8 features each come back as one number each, also where the entries were changed between."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("past", "k", "v", "present")]
    nodes = [
        helper.make_node("Split", ["past", "halves"], ["old_k", "old_v"], axis=2),
        helper.make_node("Concat", ["old_k", "k"], ["all_k"], axis=1),
        helper.make_node("Concat", ["old_v", "v"], ["all_v"], axis=1),
        helper.make_node("Concat", ["all_k", "all_v"], ["present"], axis=2),
    ]
    outputs = [ports[3], helper.make_tensor_value_info("all_k", TensorProto.FLOAT, None)]
    halves = numpy_helper.from_array(np.array([8, 8]), "halves")
    model = ModelProto()
    model.ParseFromString(
        helper.make_model(helper.make_graph(nodes, "joined", ports[:3], outputs, [halves])).SerializeToString()
    )
    graph = AbstractGraph(GraphView(model), frozenset(), Budget(NODES), ("present",))
    new = {name: collapse(np.full((1, 2, 8), number), (True, True, False)) for name, number in (("k", 2), ("v", 3))}
    first = graph.run({"past": collapse(np.zeros((1, 0, 16)), (True, True, False)), **new})["present"]
    assert first.array()[0, 0].tolist() == [2.0] * 8 + [3.0] * 8
    parts = find_parts(first.array(), (2,))
    assert parts == {2: (8,)}
    changed = first.array() + np.random.default_rng(0).standard_normal((1, 2, 16))
    for fed in (first, collapse(changed, (True, True, False), parts)):
        second = graph.run({"past": fed, **new})
        assert second["all_k"].data is not None
        assert second["all_k"].data.shape == (1, 4, 1)
        assert second["all_k"].data[0, :2, 0].tolist() == fed.array()[0, :, 0].tolist()
        assert second["present"].array()[:, :2].tolist() == fed.array().tolist()


def test_parts_that_stand_behind_the_heads_are_no_fault(tmp_path: Path) -> None:
    """One tensor of float[layers, batch, past, kv_heads, parts, head_dim], cut by a loop that takes steps back."""
    for name, expected in {"decoder-only-healthy": [], "mask-not-offset": ["mask-not-offset"]}.items():
        load_all()[name].write(tmp_path / name)
        path = tmp_path / name / "model.onnx"
        model = onnx.load(path)
        stack_cache(model.graph)
        onnx.save(model, path)
        found = [one.name for one in inspect(str(path.parent)).findings if one.predicted]
        assert found == expected


def stack_cache(graph: onnx.GraphProto) -> None:
    """Put all keys and values of two layers into one tensor, the parts of an entry behind its heads."""
    names = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    taken, joined = [], []
    for number in (0, 1):
        graph.initializer.append(numpy_helper.from_array(np.array(number), f"number{number}"))
    for name in names:
        layer, part = name.split(".")
        past, present = f"past_key_values.{name}", f"present.{name}"
        taken += [
            helper.make_node("Gather", ["cache", f"number{layer}"], [f"{past} layer"], axis=0),
            helper.make_node("Gather", [f"{past} layer", f"number{int(part == 'value')}"], [f"{past} part"], axis=3),
            helper.make_node("Transpose", [f"{past} part"], [past], perm=[0, 2, 1, 3]),
        ]
        joined += [
            helper.make_node("Transpose", [present], [f"{present} turned"], perm=[0, 2, 1, 3]),
            helper.make_node("Unsqueeze", [f"{present} turned", "entry_axis"], [f"{present} part"]),
        ]
    graph.initializer.append(numpy_helper.from_array(np.array([0, 4]), "entry_axis"))
    layers = [f"layer {layer} joined" for layer in (0, 1)]
    for layer, output in enumerate(layers):
        parts = [f"present.{layer}.{part} part" for part in ("key", "value")]
        joined.append(helper.make_node("Concat", parts, [output], axis=4))
    joined.append(helper.make_node("Concat", layers, ["present_cache"], axis=0))
    nodes = [*taken, *graph.node, *joined]
    del graph.node[:], graph.input[3:], graph.output[1:]
    graph.node.extend(nodes)
    past, total = "past_sequence_length", "past_sequence_length + sequence_length"
    for values, name, length in ((graph.input, "cache", past), (graph.output, "present_cache", total)):
        values.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, "batch_size", length, 2, 2, 4]))
