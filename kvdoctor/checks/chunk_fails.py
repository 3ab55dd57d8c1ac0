"""Several new tokens on top of a cache fail.

What it means: one token a step is right, and more than one on a cache is refused by the runtime: chunked prefill, a
second turn of a conversation and speculation cannot be used with this export.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `chunk`: 3 new tokens on a past of 5.

Repair: export again with sample inputs of several new tokens on a past; until then feed one token a step.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, decided
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="several new tokens on a cache fail",
    promised="3 new tokens on a past of 5",
    advice="export again with several new tokens on a past as sample; until then feed one token a step",
    on_graph=True,
)


@check("KV207", "chunk-fails", "runs")
def chunk_fails(case: Case) -> Iterator[Fault]:
    """Chunks that the runtime refuses, where one token a step is right."""
    run, judged = case.run("chunk"), case.judged
    if run is None or run.outcome != "failed" or judged is None or judged.outcome != "passed":
        return
    fault = decided(case, run, WORDS, "warning")
    place = f'{run.node.op} "{run.node.name}"' if run.node else fault.where
    yield replace(fault, use="chunked-prefill", where=place, observed=f"chunk, step {run.failed_step}: {run.error}")
