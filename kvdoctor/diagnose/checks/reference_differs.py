"""Logits differ from the PyTorch checkpoint.

What it means: the same tokens, and the same encoder input, give other logits than the checkpoint from which the model
is said to be exported: it was another checkpoint or revision, weights were changed or lost, the exporter traced the
wrong function, or an optimization is wrong. A loop with a cache can be consistent and still compute these wrong logits.

How it is decided: `--reference CHECKPOINT` runs the checkpoint in float32, in a separate process: the whole sequence
without a cache, then a prefill and one token per step. The difference of the logits is compared with the tolerance for
the arithmetic of the graph; for weights rounded to 8 bits or fewer, the correlation of the logits decides.

Reproduce: `kvdoctor step-test MODEL --reference CHECKPOINT -v`, experiment `against-checkpoint`.

Repair: export again from that checkpoint with a current exporter; if it is the wrong checkpoint, name the right one.
"""

from collections.abc import Iterator

from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, CannotCheck, Fault, check

EXPORT_AGAIN = Advice(
    "re-export", "export again from this checkpoint, or compare with the one from which it was exported"
)


@check("KV320", "reference-differs", "runs", needs=("against-checkpoint",))
def reference_differs(context: RunContext) -> Iterator[Fault]:
    """Logits of the whole sequence, or of a loop that agrees with it, that differ from the checkpoint."""
    run, judged = context.find_run("against-checkpoint"), context.checked_loop
    if run is None or run.outcome != "differs":
        return
    if _differs_with_cache_only(run) and judged is not None and judged.outcome in ("differs", "failed", "died"):
        raise CannotCheck(
            "without a cache the logits match the checkpoint; the loop differs from the reference run, see above"
        )
    yield Fault(
        severity="error",
        file=context.decode_file,
        subject=(context.logits_name,),
        where=f"output {context.logits_name}, against-checkpoint",
        declared="the logits of the PyTorch checkpoint",
        observed=run.reason or "the logits differ",
        cause="logits differ from the PyTorch checkpoint"
        + (", with the cache only" if _differs_with_cache_only(run) else ""),
        repair=EXPORT_AGAIN,
    )


def _differs_with_cache_only(run: Run) -> bool:
    """Whether the steps without a cache, which come before the prefill, agree."""
    failed = next((step for step in run.steps if step.step == run.failed_step), None)
    uncached = sum(step.past_length == 0 for step in run.steps)
    return failed is not None and failed.past_length > 0 and uncached > 1
