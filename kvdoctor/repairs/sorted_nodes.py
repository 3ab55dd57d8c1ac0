"""Puts the nodes of every graph in the order of their computation, and gives each a name of its own.

Requires: an order exists, and every value is made once.
Ensures: the same nodes, inputs and outputs; names of nodes differ, those of values stand as they were.
"""

from collections import Counter
from collections.abc import Iterator

from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import GraphProto, NodeProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import order_of, sort_nodes


def apply(patient: Patient) -> tuple[Change, ...]:
    """Sort and name the nodes of all files: what is a note for one runtime keeps another from opening the file."""
    return tuple(change for name in patient.files for change in _mend(patient, name))


def _mend(patient: Patient, file: str) -> Iterator[Change]:
    model = patient.model(file)
    for scope in list(GraphView(model).scopes()):
        before = _titles(scope.graph)
        if order_of(scope.graph.node) is None:
            patient.cannot(
                f"the nodes of {scope.path} run in a circle", "export again without the tool that changed it"
            )
        if sort_nodes(scope.graph):
            moved = next(b for a, b in zip(_titles(scope.graph), before, strict=True) if a != b)
            yield Change(
                file, f"{scope.path}, order of nodes", f"{moved} before what it needs", "sorted by what they need"
            )
        if renamed := _name_apart(scope.graph.node):
            shown = "; ".join(renamed[:3]) + (f"; and {len(renamed) - 3} more" if len(renamed) > 3 else "")
            yield Change(
                file, f"{scope.path}, names of nodes", f"{len(renamed)} nodes share the name of another", shown
            )


def _titles(graph: GraphProto) -> list[str]:
    return [node.name or next(iter(node.output), node.op_type) for node in graph.node]


def _name_apart(nodes: "list[NodeProto]") -> list[str]:
    """Give every later node of a name another one."""
    counts, seen = Counter(node.name for node in nodes), set[str]()
    renamed = []
    for node in nodes:
        if node.name and node.name in seen:
            number, old = 1, node.name
            while f"{old}_{number}" in counts or f"{old}_{number}" in seen:
                number += 1
            node.name = f"{old}_{number}"
            renamed.append(f"{node.op_type} {old!r} is {node.name!r}")
        seen.add(node.name)
    return renamed


REPAIR = Repair(
    name="sorted-nodes",
    mends=("graph-unsorted", "session-refused", "invalid-graph"),
    stage="file",
    keeps="bits",
    apply=apply,
)
