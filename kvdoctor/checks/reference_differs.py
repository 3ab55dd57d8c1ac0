"""Logits differ from the PyTorch checkpoint.

What it means: the same tokens, and the same input of the encoder, give other logits in the checkpoint that the model is
said to be exported from. Another checkpoint or revision, weights that were changed or lost on the way, an exporter that
traced the wrong thing, or an optimisation that is none. A loop with a cache may be right in itself and still wrong so.

How it is decided: `--reference CHECKPOINT` runs the checkpoint in float32, in a process of its own: the whole sequence
without a cache, then a prefill and one token a step. The difference of logits is held against what the arithmetic of
the graph allows; where weights are rounded to 8 bits or fewer it is their correlation that counts.

Reproduce: `kvdoctor step-test MODEL --reference CHECKPOINT -v`, experiment `against-checkpoint`.

Repair: export again from that checkpoint with a current exporter; if the checkpoint is another one, name the right one.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, CannotCheck, Fault, check
from kvdoctor.trace import Run

EXPORT_AGAIN = Advice("re-export", "export again from this checkpoint, or hold it against the one it was exported from")


@check("KV320", "reference-differs", "runs", needs=("against-checkpoint",))
def reference_differs(case: Case) -> Iterator[Fault]:
    """Logits of the whole sequence, or of a loop that is right in itself, that are not those of the checkpoint."""
    run, judged = case.run("against-checkpoint"), case.judged
    if run is None or run.outcome != "differs":
        return
    if _with_cache(run) and judged is not None and judged.outcome in ("differs", "failed", "died"):
        raise CannotCheck(
            "without a cache the logits are those of the checkpoint; the loop differs by itself, see above"
        )
    logits = case.contract.graph("decode").port("logits") if case.contract else None
    name = logits.name if logits else "logits"
    yield Fault(
        severity="error",
        file=case.decode_file,
        subject=(name,),
        where=f"output {name}, against-checkpoint",
        promised="the logits of the PyTorch checkpoint",
        observed=run.reason or "other logits",
        cause="logits differ from the PyTorch checkpoint" + (", with the cache only" if _with_cache(run) else ""),
        advice=EXPORT_AGAIN,
    )


def _with_cache(run: Run) -> bool:
    """Whether the steps without a cache, which come before the prefill, agree."""
    failed = next((step for step in run.steps if step.step == run.failed_step), None)
    uncached = sum(step.past_length == 0 for step in run.steps)
    return failed is not None and failed.past_length > 0 and uncached > 1
