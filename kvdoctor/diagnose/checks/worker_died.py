"""The runtime crashed, hung, or ran out of memory.

What it means: the process that ran the model ended by a signal, gave no answer within `--timeout`, or exceeded
`--max-memory`. In your program the same call ends the whole program.

Reproduce: make the call that the finding names in a separate process.

Repair: if a limit was reached, raise it; if the runtime crashed, use another version of it or a new export.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, check

FEED_BACK = ("plain-loop", "late-cache")
"""Experiments that feed every returned slot back."""


@check("KV011", "worker-died", "runs", incomplete=True)
def worker_died(context: RunContext) -> Iterator[Fault]:
    """Runs in which the process ended, one finding for each way in which it did."""
    ended: dict[str, list[str]] = {}
    held = context.find_run("held-loop")
    # KV203 explains a crash of a loop that feeds an emptied cache back, where the held loop passes.
    explained = FEED_BACK if context.emptied_slots and held is not None and held.outcome == "passed" else ()
    for run in context.runs:
        if run.outcome == "died" and run.experiment not in explained:
            ended.setdefault(run.died_by or "?", []).append(run.experiment)
    for how, experiments in ended.items():
        first = context.find_run(experiments[0])
        limit = {"timeout": "--timeout SECONDS", "memory": "--max-memory MIB"}.get(how)
        cause, advice = "the runtime crashed on this model", "try another onnxruntime, or export again"
        if limit:
            cause = f"the runtime did not finish within the {'time' if how == 'timeout' else 'memory'} limit"
            advice = f"raise the limit: {limit}"
        fault = Fault("error", tuple(experiments), cause, Advice("caller", advice))
        fault = fault.compare("an answer from the runtime", f"the process {first.reason if first else how}")
        yield fault.also(where=f"experiment {', '.join(experiments)}")
