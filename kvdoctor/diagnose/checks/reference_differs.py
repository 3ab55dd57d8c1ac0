"""Logits differ from the PyTorch checkpoint.

What it means: the same tokens, and the same encoder input, give other logits than the checkpoint `--reference`: the
model was exported from a different checkpoint or revision, weights were changed or lost, the exporter traced the wrong
function, or an optimization is wrong. A loop with a cache can be consistent and still compute these wrong logits.

How it is decided: `--reference CHECKPOINT` runs the checkpoint in float32, in a separate process: the whole sequence
without a cache, a prefill and one token per step, and one call over the lengths that the graph and config.json name
(windows, a second set of rotary factors), up to 4,096 tokens. The difference of the logits is compared with the
tolerance for the arithmetic of the graph; for weights rounded to 8 bits or fewer, the correlation of the logits
decides. Where they differ without a cache, the outputs of the checkpoint's modules are compared with values of the
graph, by the names that the exporter gave the nodes. The first module whose inputs agree and whose output does not is
named, with the nodes between; where no name tells, the difference is not placed.

Reproduce: `kvdoctor step-test MODEL --reference CHECKPOINT -v`, experiment `against-checkpoint`.

Repair: export again from that checkpoint; if it is the wrong checkpoint, name the right one.
"""

from collections.abc import Iterator

from kvdoctor.decode.runs import WRONG, Run
from kvdoctor.diagnose.checks._faults import list_nodes, name_node
from kvdoctor.diagnose.context import RunContext
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording.runs import describe_parts

EXPORT_AGAIN = Advice(
    "re-export", "export again from this checkpoint, or compare with the one from which it was exported"
)


@check("KV320", "reference-differs", "runs", needs=("against-checkpoint",))
def reference_differs(context: RunContext) -> Faults:
    """Logits of the whole sequence, or of a loop that agrees with it, that differ from the checkpoint."""
    run, judged = context.find_run("against-checkpoint"), context.checked_loop
    if run is None or run.outcome != "differs":
        return
    # The steps without a cache, which come before the prefill, agree.
    failed, uncached = run.wrong_step, sum(step.past_length == 0 for step in run.steps)
    cached_only = failed is not None and failed.past_length > 0 and uncached > 1
    if cached_only and judged is not None and judged.outcome in WRONG:
        text = "without a cache the logits match the checkpoint; the loop differs from the reference run, see above"
        raise CannotCheck(text)
    cause = "logits differ from the PyTorch checkpoint" + ", with the cache only" * cached_only
    if failed is not None and failed.past_length == 0 < failed.step and failed is run.steps[-1]:
        shorter = max(step.past_length + step.new_tokens for step in run.steps[:-1])
        cause += f", with {failed.new_tokens} tokens and not with {shorter}"
    fault = Fault("error", (context.logits_name,), cause, EXPORT_AGAIN, run=run, nodes=list_nodes(run))
    fault = fault.compare("the logits of the PyTorch checkpoint", run.reason or "the logits differ")
    where = name_node(run.location) if run.location is not None else None
    yield fault.also(where=where or "", evidence=tuple(_describe_place(run)))


def _describe_place(run: Run) -> Iterator[str]:
    """The first module that differs, the nodes that compute it, and the parts of the model with their differences."""
    if run.location is not None:
        yield f"first difference: {run.location.words}"
        yield from run.location.provenance
    elif run.no_location is not None:
        yield f"the difference could not be placed in the graph: {run.no_location}"
    if run.parts:
        yield f"largest difference of each part: {describe_parts(run.parts)}"
