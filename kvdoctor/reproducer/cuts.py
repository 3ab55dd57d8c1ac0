"""Cuts of a graph: remove outputs with everything that only they need, and make a node an output.

These functions change the model that they are given.
"""

from collections.abc import Iterator

from kvdoctor.model.edit import keep_only, prune
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import all_nodes, graphs_in, subgraphs

PROBE = "kvdoctor_probe"
"""The output that keeps a failing node in the graph: the shape of the node's first output."""


def keep_outputs(model: ModelProto, keep: set[str]) -> None:
    """Remove all other outputs of the model, and then the nodes, constants and inputs that nothing needs any more."""
    keep_only(model.graph.output, lambda value: value.name in keep)
    prune(model)
    for graph in graphs_in(model.graph):
        graph.ClearField("value_info")  # sizes will change


def end_at_node(model: ModelProto, name: str) -> bool:
    """Add an output that depends on a node: the shape of its first output.

    A node in a branch of an `If` of the main graph needs a new output of that `If`, which is 0 in the other branch.
    False if the node is in any other subgraph.
    """
    if any(node.name == name for node in model.graph.node):
        _add_probe(model.graph, name, PROBE)
    else:
        owner = next((n for n in model.graph.node if n.op_type == "If" and _contains(n, name)), None)
        if owner is None:
            return False
        for body in subgraphs(owner):
            # A name of its own: a value of the branch must not have the name of an outer value.
            has_node = any(inner.name == name for inner in body.node)
            result = _add_probe(body, name, f"{PROBE}_shape") if has_node else _add_zero(body)
            body.output.append(_shape_output(result))
        owner.output.append(PROBE)
    model.graph.output.append(_shape_output(PROBE))
    return True


def copy_model(model: ModelProto) -> ModelProto:
    """A copy of a model, to be cut."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def layer_graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The graphs with the layers: the branches of an `If` that returns the model's outputs, or the main graph."""
    outputs = {value.name for value in model.graph.output}
    switches = [n for n in model.graph.node if n.op_type == "If" and not outputs.isdisjoint(n.output)]
    for switch in switches:
        yield from subgraphs(switch)
    if not switches:
        yield model.graph


def name_nodes(model: ModelProto) -> None:
    """Name the nodes that have no name, so that the runtime can name the one that fails."""
    known = {node.name for node in all_nodes(model)}
    for number, node in enumerate(node for graph in graphs_in(model.graph) for node in graph.node):
        if not node.name and f"{node.op_type}_{number}" not in known:
            node.name = f"{node.op_type}_{number}"


def find_operator(model: ModelProto, name: str) -> str | None:
    """The operator of a node by name; None if there is no such node or it has subgraphs."""
    found = (node for graph in graphs_in(model.graph) for node in graph.node if node.name == name)
    node = next(found, None) if name else None
    return None if node is None or any(subgraphs(node)) else str(node.op_type)


def _add_probe(graph: GraphProto, name: str, output: str) -> str:
    node = next(node for node in graph.node if node.name == name)
    result = next(value for value in node.output if value)
    graph.node.append(NodeProto(op_type="Shape", name=output, input=[result], output=[output]))
    return output


def _add_zero(graph: GraphProto) -> str:
    name = f"{PROBE}_nought"
    graph.initializer.append(TensorProto(name=name, dims=[1], data_type=TensorProto.INT64, int64_data=[0]))
    passed = f"{PROBE}_passed"
    graph.node.append(NodeProto(op_type="Identity", name=passed, input=[name], output=[passed]))
    return passed


def _shape_output(name: str) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = TensorProto.INT64
    value.type.tensor_type.shape.dim.add()
    return value


def _contains(node: NodeProto, name: str) -> bool:
    return any(inner.name == name for body in subgraphs(node) for inner in body.node)
