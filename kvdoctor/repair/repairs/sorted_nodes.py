"""Sorts the nodes of every graph topologically, and gives each a name of its own.

Requires: an order exists, and every value is computed once.
Ensures: the same nodes, inputs and outputs; only names of nodes differ, those of values stay as they are.
"""

from collections.abc import Iterator

from kvdoctor.model.edit import fresh_name, node_order, sort_nodes
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.view import GraphView
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Sort and name the nodes of all files: one runtime warns of unsorted nodes, another does not load them."""
    return tuple(change for name in context.files for change in _sort_and_name(context, name))


def _sort_and_name(context: RepairContext, file: str) -> Iterator[Change]:
    model = context.model(file)
    for scope in list(GraphView(model).scopes()):
        before = _list_titles(scope.graph)
        if node_order(scope.graph.node) is None:
            context.cannot(f"the nodes of {scope.path} form a cycle", "export again without the tool that changed it")
        if sort_nodes(scope.graph):
            moved = next(b for a, b in zip(_list_titles(scope.graph), before, strict=True) if a != b)
            yield Change(file, f"{scope.path}, order of nodes", f"{moved} before its inputs", "sorted topologically")
        if renamed := _name_uniquely(scope.graph.node):
            shown = "; ".join(renamed[:3]) + (f"; and {len(renamed) - 3} more" if len(renamed) > 3 else "")
            shared = f"{len(renamed)} nodes share the name of another"
            yield Change(file, f"{scope.path}, names of nodes", shared, shown)


def _list_titles(graph: GraphProto) -> list[str]:
    return [node.name or next(iter(node.output), node.op_type) for node in graph.node]


def _name_uniquely(nodes: "list[NodeProto]") -> list[str]:
    """Give nodes with the name of an earlier one new names."""
    known, seen = {node.name for node in nodes}, set[str]()
    renamed = []
    for node in nodes:
        if node.name and node.name in seen:
            old = node.name
            node.name = fresh_name(old, known)
            renamed.append(f"{node.op_type} {old!r} is {node.name!r}")
        seen.add(node.name)
    return renamed


REPAIR = Repair("sorted-nodes", ("graph-unsorted", "session-refused", "invalid-graph"), "file", "bits", apply)
