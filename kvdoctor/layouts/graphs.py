"""What the conversions do to graphs: keep what is needed, give inputs and outputs other names and an order."""

from typing import Any

from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto
from kvdoctor.scoping import all_names, bodies, fresh, graphs, needed_for, own_names, rename, replace_all, step_aside


def keep_needed(model: ModelProto) -> list[str]:
    """Drop the nodes, weights, inputs and functions that no output hangs on; gives the names of the inputs dropped."""
    graph = model.graph
    needed = needed_for(graph, (value.name for value in graph.output))
    dropped = [value.name for value in graph.input if value.name not in needed]
    replace_all(graph.node, [node for node in graph.node if not needed.isdisjoint(node.output)])
    replace_all(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in needed])
    replace_all(graph.sparse_initializer, [t for t in graph.sparse_initializer if t.values.name in needed])
    replace_all(graph.input, [value for value in graph.input if value.name in needed])
    replace_all(graph.value_info, [value for value in graph.value_info if value.name in needed])
    annotations = [entry for entry in graph.quantization_annotation if entry.tensor_name in needed]
    replace_all(graph.quantization_annotation, annotations)
    keep_used_functions(model)
    return dropped


def keep_used_functions(model: ModelProto) -> None:
    """Drop the functions that no node calls, at any depth and through other functions."""
    used: set[tuple[str, str, str]] = set()
    waiting = [node for graph in graphs(model.graph) for node in graph.node]
    bodies_by_key = {_key(function): function for function in model.functions}
    while waiting:
        node = waiting.pop()
        key = (node.domain, node.op_type, getattr(node, "overload", ""))
        if key in bodies_by_key and key not in used:
            used.add(key)
            inner = list(bodies_by_key[key].node)
            waiting += inner + [n for i in inner for body in bodies(i) for g in graphs(body) for n in g.node]
    if len(used) < len(model.functions):
        replace_all(model.functions, [function for function in model.functions if _key(function) in used])


def _key(function: Any) -> tuple[str, str, str]:
    return function.domain, function.name, getattr(function, "overload", "")


def rename_ports(graph: GraphProto, inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """Give inputs and outputs other names; whatever stands in their way gets a fresh one.

    An output that is an input or a weight, or that is returned under several names, becomes an `Identity`.
    """
    outputs = {old: outputs.get(old, old) for old in (value.name for value in graph.output)}
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    given |= {sparse.values.name for sparse in graph.sparse_initializer}
    inputs = {old: new for old, new in inputs.items() if any(value.name == old for value in graph.input)}
    wanted = {*inputs.values(), *outputs.values()}
    known = all_names(graph) | wanted
    names = dict(inputs)
    for index, value in enumerate(list(graph.output)):
        new, old = outputs[value.name], value.name
        if old in given or names.get(old, new) != new:
            graph.output[index].name = _passed_on(graph, old, fresh(f"{new}.passed", known))
            old = graph.output[index].name
        names[old] = new
    names = {old: new for old, new in names.items() if old != new}
    stays = {name for name in wanted if name not in names}
    in_the_way = own_names(graph) & set(names.values()) - set(names)
    aside = {name: fresh(name, known) for name in sorted(in_the_way)}
    for node in graph.node:
        for body in bodies(node):
            step_aside(body, wanted | stays, known)
    rename(graph, {**aside, **names})


def _passed_on(graph: GraphProto, source: str, name: str) -> str:
    graph.node.append(NodeProto(op_type="Identity", name=name, input=[source], output=[name]))
    return name


def order(items: Any, names: list[str]) -> None:
    """Put inputs or outputs into the order of some names; those that are not named come last, as they stood."""
    place = {name: index for index, name in enumerate(names)}
    replace_all(items, sorted(items, key=lambda value: place.get(value.name, len(place))))
