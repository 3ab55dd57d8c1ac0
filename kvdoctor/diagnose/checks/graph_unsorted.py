"""Nodes are not in the order of their computation, or share a name.

What it means: ONNX requires that each node comes after the nodes whose outputs it reads, and onnx.checker refuses other
graphs. ONNX Runtime sorts the nodes itself and runs the graph; other tools may not. If nodes share a name, an error
message of the runtime does not identify one of them.

Reproduce: `python -c "import onnx; onnx.checker.check_model('MODEL')"`.

Repair: sort the nodes (`onnx_graphsurgeon`, `onnxscript` and others do), or export again without the tool that changed
the graph afterwards. Source: ONNX, docs/IR.md, "Graphs".
"""

from collections import Counter
from collections.abc import Iterator

from kvdoctor.diagnose.context import FileContext
from kvdoctor.diagnose.node_source import name_of
from kvdoctor.findings import Fault, check
from kvdoctor.model.edit import node_order
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import values_read


@check("KV005", "graph-unsorted", "file")
def graph_unsorted(context: FileContext) -> Iterator[Fault]:
    """One fault for each file: the first node that reads a later one, or the first name that nodes share."""
    view = context.file.view
    if view is None:
        return
    bodies = [(scope.path, list(scope.graph.node)) for scope in view.scopes()]
    bodies += [(f"function {function.name}", list(function.node)) for function in view.model.functions]
    for path, nodes in bodies:
        early, names = needs_later(nodes), Counter(node.name for node in nodes if node.name)
        shared = next((name for name, count in names.items() if count > 1), None)
        if early is None and shared is None:
            continue
        if early is not None:
            title, observed = early[0].name or early[0].op_type, f"reads {early[1]}, the output of a later node"
            cause, advice = "the nodes are not sorted", "sort the nodes"
        else:
            title, observed = str(shared), f"is the name of {names[str(shared)]} nodes"
            cause = "nodes share a name"
            advice = "give each node a unique name; until then an error message does not identify the node"
        advice = f"or {advice}, or export again without the tool that changed the graph"
        fault = Fault("note", (title,), cause, context.advise_graph_repair(advice))
        fault = fault.compare("nodes in the order of their computation, with unique names", f"{title} {observed}")
        named = (str(shared) if early is None else name_of(early[0]),)
        yield fault.also(where=f"{path} of {context.file.name}", nodes=named)
        return


def needs_later(nodes: list[NodeProto]) -> tuple[NodeProto, str] | None:
    """The first node that needs a value of a later one, where an order exists: a circle is another fault."""
    made_at = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    early = ((node, name) for at, node in enumerate(nodes) for name in values_read(node) if made_at.get(name, -1) >= at)
    found = next(early, None)
    made_once = len(made_at) == sum(bool(name) for node in nodes for name in node.output)
    return found if found is not None and made_once and node_order(nodes) is not None else None
