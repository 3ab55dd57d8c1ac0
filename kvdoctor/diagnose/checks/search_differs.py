"""The tokens of an operator that runs the whole decode loop differ from those of a loop over its decoder.

What it means: a graph with BeamSearch, GreedySearch or WhisperBeamSearch holds its decoder as a subgraph, which the
operator feeds by position, not by name: each present becomes the past at the same position. Where the order differs, or
a second graph for the first step (`init_decoder`) computes something else, the model runs without an error and
generates different text.

How it is decided: the subgraphs are run as models of their own, by the cache contract that their names and dataflow
give, with a search by the rules of the operator: greedy, then with 2 and 4 beams. The tokens and the scores of the
sequences must be those of the operator. A tie that rounding decides is no difference, and a search that finds the same
tokens without the cache proves nothing.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `operator-search`.

Repair: list the inputs and outputs of the subgraph in the order of the operator: `input_ids`, `position_ids`,
`attention_mask`, `past_0` ... and `logits`, `present_0` ... for GPT-2; for an encoder-decoder the self-attention caches
of all layers, key before value, before those of cross-attention.

Source: ONNX Runtime, onnxruntime/contrib_ops/cpu/transformers (subgraph_gpt.cc, subgraph_t5_decoder.cc).
"""

from collections.abc import Iterator

from kvdoctor.decode.runs import SEARCH
from kvdoctor.diagnose.checks.session_refused import UNSUPPORTED
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, check

EXPORT = Advice(
    "re-export",
    "put the past inputs and present outputs of the subgraph in the operator's order, or export again with "
    "onnxruntime.transformers.convert_generation",
)
OTHERS = "different sequences"


@check("KV322", "search-differs", "runs")
def search_differs(context: RunContext) -> Iterator[Fault]:
    """An operator that fails, or whose sequences differ from those of kvdoctor's loop."""
    run = context.find_run(SEARCH)
    if run is None or run.shows not in ("failed", "differs"):
        return
    name = context.stack.operator or SEARCH
    cause, advice = f"the sequences of {name} differ from those of a loop over its decoder", EXPORT
    observed, error = run.cause.evidence if run.cause else OTHERS, None
    if run.shows == "failed":
        cause, advice, observed, error = f"{name} fails", UNSUPPORTED, f"the runtime fails: {run.error}", run.error
    fault = Fault("error", (name,), cause, advice, error=error, where=f"operator {name} of {context.decode_file}")
    yield fault.compare("the sequences of a loop over its decoder", observed)
