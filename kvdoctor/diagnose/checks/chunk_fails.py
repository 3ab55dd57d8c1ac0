"""Several new tokens on top of a cache fail.

What it means: one token per step works, but the runtime refuses more than one new token with a past. Chunked prefill, a
second turn of a conversation and speculative decoding cannot be used with this export.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `chunk`: 3 new tokens on a past of 5.

Repair: export again with sample inputs of several new tokens on a past; until then feed one token per step.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.checks._faults import CauseText, build_fault, list_nodes
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, check

WORDS = CauseText(
    cause="several new tokens on top of a cache fail",
    declared="3 new tokens on a past of 5",
    advice="export again with sample inputs of several new tokens on a past; until then feed one token per step",
    on_graph=True,
)


@check("KV207", "chunk-fails", "runs")
def chunk_fails(context: RunContext) -> Iterator[Fault]:
    """Chunks that the runtime refuses, where one token per step works."""
    run, judged = context.find_run("chunk"), context.checked_loop
    if run is None or run.outcome != "failed" or judged is None or judged.outcome != "passed":
        return
    fault = build_fault(context, run, WORDS, "warning").also(use="chunked-prefill", error=run.error)
    place, nodes = run.node.shown if run.node else fault.where, list_nodes(run) or fault.nodes
    yield fault.also(where=place, observed=f"chunk, step {run.failed_step}: {run.error}", nodes=nodes)
