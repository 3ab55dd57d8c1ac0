"""Cuts in a graph: outputs dropped with all that only they need, values led past nodes, a node made an end.

Everything here changes the model it is given.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.scoping import bodies, graphs, needed_for, replace_all, taken

PROBE = "kvdoctor_probe"
"""The output that keeps a failing node alive: the shape of what the node returns."""


def keep_outputs(model: ModelProto, keep: set[str]) -> None:
    """Drop all other outputs of the model, and then nodes, constants and inputs that nothing needs any more."""
    graph = model.graph
    _keep_only(graph.output, lambda value: value.name in keep)
    _prune(graph, {value.name for value in graph.output})
    wanted = _wanted(graph)
    _keep_only(graph.input, lambda value: value.name in wanted)
    used = {(node.domain, node.op_type) for node in _all_nodes(model)}
    _keep_only(model.functions, lambda function: (function.domain, function.name) in used)


def lead_past(graph: GraphProto, source: str, target: str) -> None:
    """Let everything that takes `target` take `source` instead, in this graph and in subgraphs."""
    for node in graph.node:
        node.input[:] = [source if name == target else name for name in node.input]
        for body in bodies(node):
            lead_past(body, source, target)


def end_at(model: ModelProto, name: str) -> bool:
    """Give the model an output that needs the node of that name: the shape of the first thing it returns.

    A node in a branch of an `If` of the main graph is reached through a new output of that `If`; the other branch gives
    0. False where the node stands elsewhere.
    """
    if any(node.name == name for node in model.graph.node):
        _probe(model.graph, name, PROBE)
    else:
        owner = next((n for n in model.graph.node if n.op_type == "If" and _holds(n, name)), None)
        if owner is None:
            return False
        for body in bodies(owner):
            # Another name inside: the branch's and the outer value of one name would be taken for one another.
            here = any(inner.name == name for inner in body.node)
            result = _probe(body, name, f"{PROBE}_shape") if here else _nought(body)
            body.output.append(_shape_of(result))
        owner.output.append(PROBE)
    model.graph.output.append(_shape_of(PROBE))
    return True


def copied(model: ModelProto) -> ModelProto:
    """A model to cut, where another is to stay as it is."""
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def scopes(model: ModelProto) -> Iterator[GraphProto]:
    """The graphs that hold the layers: the branches of an `If` that returns the model's outputs, or the main graph."""
    outputs = {value.name for value in model.graph.output}
    switches = [n for n in model.graph.node if n.op_type == "If" and not outputs.isdisjoint(n.output)]
    for switch in switches:
        yield from bodies(switch)
    if not switches:
        yield model.graph


def name_nodes(model: ModelProto) -> None:
    """Number the nodes that have no name: the runtime names the node that fails, and cannot name those."""
    known = {node.name for node in _all_nodes(model)}
    for number, node in enumerate(node for graph in graphs(model.graph) for node in graph.node):
        if not node.name and f"{node.op_type}_{number}" not in known:
            node.name = f"{node.op_type}_{number}"


def operator_of(model: ModelProto, name: str) -> str | None:
    """The operator of the node of that name, where one stands in a graph and holds no graphs itself."""
    found = (node for graph in graphs(model.graph) for node in graph.node if node.name == name)
    node = next(found, None) if name else None
    return None if node is None or any(bodies(node)) else str(node.op_type)


def _probe(graph: GraphProto, name: str, made: str) -> str:
    node = next(node for node in graph.node if node.name == name)
    result = next(output for output in node.output if output)
    graph.node.append(NodeProto(op_type="Shape", name=made, input=[result], output=[made]))
    return made


def _nought(graph: GraphProto) -> str:
    name = f"{PROBE}_nought"
    graph.initializer.append(TensorProto(name=name, dims=[1], data_type=TensorProto.INT64, int64_data=[0]))
    passed = f"{PROBE}_passed"
    graph.node.append(NodeProto(op_type="Identity", name=passed, input=[name], output=[passed]))
    return passed


def _shape_of(name: str) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = TensorProto.INT64
    value.type.tensor_type.shape.dim.add()
    return value


def _holds(node: NodeProto, name: str) -> bool:
    return any(inner.name == name for body in bodies(node) for inner in body.node)


def _prune(graph: GraphProto, wanted: set[str]) -> None:
    """Keep what some values hang on; an `If` loses the outputs that nobody takes, in both branches."""
    needed = needed_for(graph, wanted)
    _keep_only(graph.node, lambda node: any(name in needed for name in node.output))
    for node in graph.node:
        if node.op_type == "If":
            kept = [index for index, name in enumerate(node.output) if name in needed]
            node.output[:] = [node.output[index] for index in kept]
            for body in bodies(node):
                outputs = [body.output[index] for index in kept]
                names = {value.name for value in outputs}
                replace_all(body.output, outputs)
                _prune(body, names)
    # Branches may have lost what they took from here.
    still = {name for node in graph.node for name in taken(node)} | wanted
    if needed_for(graph, wanted) != needed:
        _prune(graph, wanted)
        return
    _keep_only(graph.initializer, lambda tensor: tensor.name in still)
    _keep_only(graph.sparse_initializer, lambda sparse: sparse.values.name in still)
    graph.ClearField("value_info")


def _wanted(graph: GraphProto) -> set[str]:
    return {name for node in graph.node for name in taken(node)} | {value.name for value in graph.output}


def _keep_only(items: Any, keep: Any) -> None:
    kept = [item for item in items if keep(item)]
    if len(kept) < len(items):
        replace_all(items, kept)


def _all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    for graph in graphs(model.graph):
        yield from graph.node
    for function in model.functions:
        for node in function.node:
            yield node
            for body in bodies(node):
                for graph in graphs(body):
                    yield from graph.node
