"""An attention operator takes a past and returns no present, or its cache length is one too large.

What it means: an operator that takes a past key and value must also return them as its present outputs, else the
runtime refuses the step, even where the graph computes its present outputs in another way. `GroupQueryAttention` takes
`seqlens_k`, the total length minus 1. Given the plain sum of the attention mask, older runtimes read beyond the cache
without an error, and newer ones refuse.

Reproduce: `kvdoctor step-test MODEL -v`. If the steps pass anyway, the finding is a note.

Repair: name the present outputs of the node, which need no consumer; subtract 1 before `seqlens_k`. Sources: ONNX,
operator Attention 23; ONNX Runtime, docs/ContribOperators.md, GroupQueryAttention.
"""

from collections.abc import Sequence

from kvdoctor.diagnose.context import ContractContext
from kvdoctor.diagnose.node_source import name_of
from kvdoctor.findings import Fault, Faults, Severity, check
from kvdoctor.model.operators import CachePorts, has, operators_with, ports_of
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import describe_node, name_node
from kvdoctor.model.view import Scope

SAME_NUMBER = operators_with("copy", "cast", "view")
SILENT = (
    "present outputs for the past inputs",
    "a past input, and no present output",
    "name the present outputs of the node",
    "takes a past and returns no present",
)
OFF = (
    "seqlens_k = total length - 1",
    "seqlens_k = sum of the mask",
    "subtract one from the sum of the mask",
    "is given a length of the cache that is one too large",
)
"""For each defect what is to be, what is, the advice, and the cause."""


@check("KV108", "attention-cache-half-wired", "contract")
def attention_cache_half_wired(context: ContractContext) -> Faults:
    """One fault for all nodes of a file with the same defect."""
    run = context.checked_loop
    severity: Severity = "note" if run is not None and run.outcome == "passed" else "error"
    fails = run is not None and run.outcome in ("failed", "differs")
    follows = (f"{run.experiment}: step {run.failed_step} {run.outcome}",) if run is not None and fails else ()
    for file in context.stack.members:
        found: dict[tuple[str, ...], list[NodeProto]] = {SILENT: [], OFF: []}
        for scope in file.view.scopes() if file.view is not None else ():
            for node in scope.graph.node:
                ports = ports_of(node.domain, node.op_type)
                if ports is None:
                    continue
                if any(given(node.input, at) and not given(node.output, out) for at, (_, out) in ports.pasts.items()):
                    found[SILENT].append(node)
                elif counts_whole(node, ports, scope):
                    found[OFF].append(node)
        for (declared, observed, advice, what), nodes in found.items():
            if nodes:
                cause = f"{nodes[0].op_type} {what}"
                repair = context.advise_graph_repair(f"or {advice}")
                more = f" and {len(nodes) - 1} more" * (len(nodes) > 1)
                fault = Fault(severity, tuple(map(name_node, nodes)), cause, repair).compare(declared, observed)
                fault = fault.also(file=file.name, where=describe_node(nodes[0]) + more, effects=follows)
                yield fault.also(nodes=tuple(map(name_of, nodes)))


def given(names: Sequence[str], at: int) -> bool:
    """Whether an optional input or output is there."""
    return at < len(names) and bool(names[at])


def counts_whole(node: NodeProto, ports: CachePorts, scope: Scope) -> bool:
    """Whether `seqlens_k` is the sum of a mask with nothing subtracted."""
    at = next((index for index, role in ports.roles.items() if role == "last_index"), None)
    if at is None or not given(node.input, at):
        return False
    source = scope.producers.get(scope.through(node.input[at], SAME_NUMBER))
    return source is not None and has(source.op_type, "sum")
