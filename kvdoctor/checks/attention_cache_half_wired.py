"""An attention operator has a past and no present, or counts its cache wrongly.

What it means: an operator that takes a past key and value must also return them as present, else the runtime refuses
the step, even where the graph makes its present outputs in another way. `GroupQueryAttention` takes `seqlens_k`, which
is the total length less one: given the sum of the mask itself, older runtimes read beyond the cache without an error,
and new ones refuse.

Reproduce: `kvdoctor step-test MODEL -v`. Where a step runs right all the same, the finding is a note.

Repair: name the present outputs of the node, they need no reader; subtract one before `seqlens_k`. Sources: ONNX,
operator Attention 23; ONNX Runtime, docs/ContribOperators.md, GroupQueryAttention.
"""

from collections.abc import Iterator, Sequence

from kvdoctor.cache_operators import CachePorts, ports_of
from kvdoctor.case import Case
from kvdoctor.findings import Fault, Severity, check
from kvdoctor.graph import GraphView, Scope
from kvdoctor.onnx_schema import NodeProto

SAME_NUMBER = {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"}


@check("KV108", "attention-cache-half-wired", "contract")
def attention_cache_half_wired(case: Case) -> Iterator[Fault]:
    """One fault for all nodes of a file that lack the same."""
    assert case.stack is not None  # noqa: S101 - asked only where there is a stack
    run = case.judged
    severity: Severity = "note" if run is not None and run.outcome == "passed" else "error"
    fails = run is not None and run.outcome in ("failed", "differs")
    follows = (f"{run.experiment}: step {run.failed_step} {run.outcome}",) if run is not None and fails else ()
    for file in case.stack.files.values():
        for wrong, promised, advice in _faults(file.view) if file.view is not None else ():
            node = wrong[0]
            yield Fault(
                severity=severity,
                file=file.name,
                subject=tuple(node.name or node.output[0] for node in wrong),
                where=f'{node.op_type} "{node.name or node.output[0]}"'
                + (f" and {len(wrong) - 1} more" * (len(wrong) > 1)),
                promised=promised,
                observed="a past goes in, and no present comes out" if "present" in promised else "the sum of the mask",
                cause=f"{node.op_type} is wired to its cache by half",
                advice=case.re_export(f"or {advice}"),
                follows=follows,
            )


def _faults(view: GraphView) -> Iterator[tuple[list[NodeProto], str, str]]:
    silent, off = [], []
    for scope in view.scopes():
        for node in scope.graph.node:
            ports = ports_of(node.domain if node.domain != "ai.onnx" else "", node.op_type)
            if ports is None:
                continue
            if any(given(node.input, at) and not given(node.output, out) for at, (_, out) in ports.pasts.items()):
                silent.append(node)
            elif counts_whole(node, ports, scope):
                off.append(node)
    if silent:
        yield silent, "present outputs for the past that it takes", "name the present outputs of the node"
    if off:
        yield off, "seqlens_k = total length - 1", "subtract one from the sum of the mask"


def given(names: Sequence[str], at: int) -> bool:
    """Whether an optional input or output is there."""
    return at < len(names) and bool(names[at])


def counts_whole(node: NodeProto, ports: CachePorts, scope: Scope) -> bool:
    """Whether `seqlens_k` is the sum of a mask with nothing subtracted."""
    at = next((index for index, role in ports.roles.items() if role == "last_index"), None)
    if at is None or not given(node.input, at):
        return False
    source = scope.producers.get(scope.through(node.input[at], SAME_NUMBER))
    return source is not None and source.op_type == "ReduceSum"
