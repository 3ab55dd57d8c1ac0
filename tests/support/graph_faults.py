"""Faults put into real exports: one node of one layer, the rest as the exporter wrote it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper
from onnx.numpy_helper import from_array

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"
Surgery = Callable[[GraphProto], None]


def broken(name: str, file: str, surgery: Surgery, folder: Path) -> Path:
    """A copy of an export with a fault in one of its files."""
    shutil.copytree(EXPORTS / name, folder, dirs_exist_ok=True)
    model = onnx.load(folder / file)
    surgery(model.graph)
    onnx.save(model, folder / file)
    return folder


def cached_branch(graph: GraphProto) -> GraphProto:
    """The body that a merged decoder runs over a cache."""
    chosen = next(node for node in graph.node if node.op_type == "If")
    found: GraphProto = next(a.g for a in chosen.attribute if a.g.name == "with_past")
    return found


def node(graph: GraphProto, name: str) -> NodeProto:
    """The node of that name."""
    return next(node for node in graph.node if node.name == name)


def before(graph: GraphProto, name: str, *nodes: NodeProto) -> None:
    """Put nodes in front of another one."""
    place = next(index for index, node in enumerate(graph.node) if node.name == name)
    kept = list(graph.node)
    del graph.node[:]
    graph.node.extend([*kept[:place], *nodes, *kept[place:]])


def numbers(graph: GraphProto, name: str, values: "list[int] | list[float]") -> str:
    """A constant in the graph."""
    kind = np.float32 if isinstance(values[0], float) else np.int64
    graph.initializer.append(from_array(np.array(values, kind), name))
    return name


def baked_reshape(layer: str, past: str, sizes: list[int]) -> Surgery:
    """The past of one layer goes through a Reshape to the sizes of a sample."""

    def operate(graph: GraphProto) -> None:
        graph = cached_branch(graph) if any(n.op_type == "If" for n in graph.node) else graph
        joined = next(n for n in graph.node if past in n.input and n.op_type == "Concat")
        target = numbers(graph, "sample_sizes", sizes)
        joined.input[list(joined.input).index(past)] = "baked"
        before(graph, joined.name, helper.make_node("Reshape", [past, target], ["baked"], f"{layer}/Reshape_baked"))

    return operate


def mask_from_the_start(scores: str, name: str) -> Surgery:
    """In one layer the new tokens see as many of the first entries of the cache as there are new tokens."""

    def operate(graph: GraphProto) -> None:
        added = node(graph, scores)
        given, added.input[0] = added.input[0], "hidden_scores"
        minus, nought = numbers(graph, "hide", [-1e4]), numbers(graph, "no_bias", [0.0])
        begin, step = "begin_scalar", "step_scalar"
        graph.initializer.extend([from_array(np.array(0), begin), from_array(np.array(1), step)])
        before(
            graph,
            scores,
            helper.make_node("Shape", [given], ["scores_total"], start=3),
            helper.make_node("Squeeze", ["scores_total"], ["scores_end"]),
            helper.make_node("Range", [begin, "scores_end", step], ["columns"]),
            helper.make_node("Shape", ["input_ids"], ["new_tokens"], start=1),
            helper.make_node("Less", ["columns", "new_tokens"], ["seen_from_start"]),
            helper.make_node("Where", ["seen_from_start", nought, minus], ["bias_from_start"]),
            helper.make_node("Add", [given, "bias_from_start"], ["hidden_scores"], name),
        )

    return operate


def positions_from_zero(graph: GraphProto) -> None:
    """Positions are counted from 0 in every call."""
    takers = [n for n in graph.node if "position_ids" in n.input]
    for taker in takers:
        taker.input[list(taker.input).index("position_ids")] = "restarted"
    before(
        graph,
        takers[0].name,
        helper.make_node("ReduceMin", ["position_ids"], ["first_position"], keepdims=1),
        helper.make_node("Sub", ["position_ids", "first_position"], ["restarted"], "/restarted/Sub"),
    )


def other_scale(name: str) -> Surgery:
    """In the cached branch alone, one layer multiplies with twice the number."""

    def operate(graph: GraphProto) -> None:
        body = cached_branch(graph)
        mul = node(body, name)
        scale, mul.input[1] = mul.input[1], "doubled"
        before(body, name, helper.make_node("Add", [scale, scale], ["doubled"], "/doubled"))

    return operate
