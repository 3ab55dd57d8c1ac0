"""Nodes do not stand in the order in which they are computed, or share a name.

What it means: ONNX asks for nodes sorted by what they need, and onnx.checker refuses a graph that is not. ONNX Runtime
sorts by itself and runs it; other tools may not. Nodes of one name cannot be told apart in an error of the runtime.

Reproduce: `python -c "import onnx; onnx.checker.check_model('MODEL')"`.

Repair: sort the nodes (`onnx_graphsurgeon`, `onnxscript` and others do), or export again without the tool that changed
the graph afterwards. Source: ONNX, docs/IR.md, "Graphs".
"""

from collections import Counter
from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Fault, check
from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import NodeProto


@check("KV005", "graph-unsorted", "file")
def graph_unsorted(case: Case) -> Iterator[Fault]:
    """One fault for each file: the first node that needs a later one, or the first name that two nodes have."""
    file = case.file
    if file is None or file.view is None:
        return
    view = file.view
    bodies = [(scope.path, list(scope.graph.node)) for scope in view.scopes()]
    bodies += [(f"function {function.name}", list(function.node)) for function in view.model.functions]
    for path, nodes in bodies:
        early, names = needs_later(nodes), Counter(node.name for node in nodes if node.name)
        shared = next((name for name, count in names.items() if count > 1), None)
        if early is None and shared is None:
            continue
        if early is not None:
            title, observed = early[0].name or early[0].op_type, f"needs {early[1]}, which a later node makes"
            cause, advice = "the nodes are not sorted", "sort the nodes"
        else:
            title, observed = str(shared), f"is the name of {names[str(shared)]} nodes"
            cause = "nodes share a name"
            advice = "give each node a name of its own; until then an error names no one node"
        yield Fault(
            severity="note",
            file=file.name,
            subject=(title,),
            where=f"{path} of {file.name}",
            promised="nodes in the order of their computation, each with a name of its own",
            observed=f"{title} {observed}",
            cause=cause,
            advice=case.re_export(f"or {advice}, or export again without the tool that changed the graph"),
        )
        return


def needs_later(nodes: list[NodeProto]) -> tuple[NodeProto, str] | None:
    """The first node that needs a value of a later one, where an order exists: a circle is another fault."""
    made_at = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needs = [{made_at[name] for name in _read(node) if name in made_at} for node in nodes]
    found = next(((index, at) for index, wanted in enumerate(needs) for at in wanted if at >= index), None)
    made_once = len(made_at) == sum(bool(name) for node in nodes for name in node.output)
    if found is None or not made_once or not _has_order(needs):
        return None
    node, later = nodes[found[0]], nodes[found[1]]
    return node, next(name for name in _read(node) if name in later.output)


def _read(node: NodeProto) -> Iterator[str]:
    """What a node reads, with what the bodies in it take from around them."""
    yield from node.input
    for attribute in node.attribute:
        for body in bodies_of(attribute):
            for inner in body.node:
                yield from _read(inner)


def _has_order(needs: list[set[int]]) -> bool:
    """Whether the nodes can be sorted at all."""
    waiting = [len(wanted) for wanted in needs]
    readers: dict[int, list[int]] = {}
    for index, wanted in enumerate(needs):
        for at in wanted:
            readers.setdefault(at, []).append(index)
    free = [index for index, count in enumerate(waiting) if not count]
    done = 0
    while free:
        done += 1
        for reader in readers.get(free.pop(), ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                free.append(reader)
    return done == len(needs)
