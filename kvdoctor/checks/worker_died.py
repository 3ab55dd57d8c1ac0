"""The runtime crashed, hung, or ran out of memory.

What it means: the process that ran the model ended by a signal, gave no answer within `--timeout`, or grew over
`--max-memory`. In your program the same call takes the whole program with it.

Reproduce: make the call that the finding names in a process that you can afford to lose.

Repair: where a limit was reached, raise it; where the runtime crashed, another version of it or a fresh export.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.trace import Run

FEED_BACK = ("plain-loop", "late-cache")
"""Experiments that feed back every slot that is returned."""


@check("KV011", "worker-died", "runs", incomplete=True)
def worker_died(case: Case) -> Iterator[Fault]:
    """Runs that ended with the death of the process, one finding for each way of dying."""
    deaths: dict[str, list[str]] = {}
    for run in case.runs:
        if run.outcome == "died" and not _emptied_cache_explains(case, run):
            deaths.setdefault(run.died_by or "?", []).append(run.experiment)
    for how, experiments in deaths.items():
        first = case.run(experiments[0])
        limit = {"timeout": "--timeout SECONDS", "memory": "--max-memory MIB"}.get(how)
        yield Fault(
            severity="error",
            file=case.decode_file,
            subject=tuple(experiments),
            where=f"experiment {', '.join(experiments)}",
            promised="an answer from the runtime",
            observed=f"the process {first.reason if first else how}",
            cause=f"the limit was reached: {how}" if limit else "the runtime crashed on this model",
            advice=Advice("caller", f"raise it with {limit}" if limit else "try another onnxruntime, or export again"),
        )


def _emptied_cache_explains(case: Case, run: Run) -> bool:
    """A loop that feeds an emptied cache back dies of it where the held loop passes: see KV203."""
    held = case.run("held-loop")
    return bool(case.emptied) and run.experiment in FEED_BACK and held is not None and held.outcome == "passed"
