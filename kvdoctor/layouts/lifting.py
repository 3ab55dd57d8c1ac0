"""Weights of two branches, taken out of both and put into the graph around them: those of equal content once.

What stays in its branch: scalars and vectors of integers, where shape inference looks for them (as with Optimum), and
what a DequantizeLinear in front of a MatMul takes: ONNX Runtime 1.24 to 1.31 fuses the two and looks for scale and
weight in the branch alone (microsoft/onnxruntime issue 28306: "Missing required scale").
"""

from pathlib import Path

from kvdoctor.layouts.weights import Sameness
from kvdoctor.onnx_schema import GraphProto, TensorProto
from kvdoctor.scoping import all_names, fresh, own_names, rename, replace_all

INTEGERS = (TensorProto.INT32, TensorProto.INT64)
PRODUCTS = ("MatMul", "Gemm")


def lift(graphs: tuple[GraphProto, GraphProto], outer: set[str], root: Path) -> tuple[list[TensorProto], int]:
    """Take the weights out of two graphs, under names that mean nothing else in either and are not `outer` ones.

    Gives them, and how many stand for weights of both graphs. Changes the graphs; bytes are read below `root`.
    """
    mine = [_weights(graph) for graph in graphs]
    sameness = Sameness(root, (tensor for weights in mine for tensor in weights.values()))
    keys = [{name: sameness.key(tensor) for name, tensor in weights.items()} for weights in mine]
    locals_ = [own_names(graph) for graph in graphs]
    known, used = outer | {name for graph in graphs for name in all_names(graph)}, set(outer)
    lifted: dict[object, TensorProto] = {}
    for index, graph in enumerate(graphs):
        names: dict[str, str] = {}
        for name, tensor in mine[index].items():
            key = keys[index][name]
            if key not in lifted:
                # The other graph may mean something else by the name.
                theirs = name in locals_[1 - index] and keys[1 - index].get(name) != key
                lifted[key] = TensorProto()
                lifted[key].CopyFrom(tensor)
                lifted[key].name = fresh(f"{name}_merged", known) if theirs or name in used else name
                used.add(lifted[key].name)
            names[name] = lifted[key].name
        replace_all(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in names])
        _lead_to(graph, names)
    return list(lifted.values()), len(set(keys[0].values()) & set(keys[1].values()))


def _weights(graph: GraphProto) -> dict[str, TensorProto]:
    """The initializers of a graph that are to be taken out of it, by name."""
    stay = _fused(graph)
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in stay and _is_weight(tensor)}


def _is_weight(tensor: TensorProto) -> bool:
    return len(tensor.dims) > 1 or (len(tensor.dims) == 1 and tensor.data_type not in INTEGERS)


def _fused(graph: GraphProto) -> set[str]:
    """What a DequantizeLinear in front of a product takes; of one that stands elsewhere, the scale and zero point."""
    multiplied = {name for node in graph.node if node.op_type in PRODUCTS for name in node.input}
    found = set[str]()
    for node in graph.node:
        if node.op_type == "DequantizeLinear":
            found |= set(node.input[0 if node.output[0] in multiplied else 1 :])
    return found


def _lead_to(graph: GraphProto, names: dict[str, str]) -> None:
    """Let what takes a weight take it by its outer name; what a graph makes itself under such a name steps aside."""
    others = {old: new for old, new in names.items() if old != new}
    known = all_names(graph) | set(others.values())
    rename(graph, {name: fresh(name, known) for name in sorted(own_names(graph) & set(others.values()))})
    rename(graph, others)
