"""The numbers that the model returns differ from the recorded ones.

What it means: `kvdoctor record` stored a small digest of what a healthy model returned. The same tokens give different
logits now, or leave different entries in a cache: weights, graph, runtime or provider changed, by more than the
arithmetic explains. The logits with and without a cache may still agree.

How it is decided: the tokens of the file are decoded again, with its seed, in one long decoding, one with chunks, and a
batch. Samples of the logits of each call, and of each cache after the last call, are compared, by the tolerance of the
less exact arithmetic, of the recording or of now. Where the weights are quantized differently (8 bits, 4 bits), the
correlation of the logits decides. Where all logits agree and a cache differs, it is a warning: an exporter may store
keys in a different form.

Reproduce: `kvdoctor step-test MODEL --against golden.json`.

Repair: find the change: `kvdoctor diff OLD NEW` compares two models, `--target onnxruntime==VERSION` two runtimes. If
it is meant, record golden numbers again.
"""

from typing import TYPE_CHECKING

from kvdoctor.decode.tolerances import UNLIKE, Tolerance
from kvdoctor.diagnose.context import GoldenContext
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import Advice, Fault, Faults, Severity, check

if TYPE_CHECKING:
    from kvdoctor.decode.golden import GoldenDifference

FIND_CHANGE = Advice(
    "re-export",
    "compare the model with the one that was recorded (`kvdoctor diff OLD NEW`); if the change is meant, record again",
)


@check("KV321", "golden-differs", "golden")
def golden_differs(context: GoldenContext) -> Faults:
    """Logits or caches that are not those of the golden numbers."""
    compared, found = context.golden, context.golden.difference
    if compared.unclear:
        raise CannotCheck(f"rounding explains it as well as a fault: {compared.words}")
    if found is None:
        return
    start = next(start for start, stop in found.walk.calls() if stop == found.stop)
    rounded = compared.correlation is not None
    hardly = not rounded and found.relative <= compared.tolerance.fails
    severity: Severity = "warning" if found.cache is not None or hardly else "error"
    subject = context.logits_name if found.cache is None else f"cache {found.cache}"
    limit = f"within {compared.tolerance.passes:g} standard deviations ({compared.tolerance.reason})"
    if rounded:
        limit = f"with a correlation of at least {UNLIKE:g}, as the weights are quantized differently"
    fault = Fault(severity, (subject,), _explain(compared.golden, found, hardly), FIND_CHANGE)
    observed = compared.words if rounded else _describe(found, compared.tolerance)
    fault = fault.compare(f"the numbers of {compared.golden}, {limit}", observed)
    yield fault.also(where=found.walk.describe(start, found.stop))


def _describe(found: "GoldenDifference", tolerance: Tolerance) -> str:
    what = "logits" if found.cache is None else f"the cache of layer {found.cache.replace('.', ', ')}"
    text = f"{what} off by {found.relative:.2g} standard deviations, and {tolerance.passes:g} are allowed"
    if found.tokens is not None:
        text += f"; the likeliest token is {found.tokens[1]}, it was {found.tokens[0]}"
    return text


def _explain(golden: str, found: "GoldenDifference", hardly: bool) -> str:
    if found.cache is not None:
        return f"the entries of a cache differ from those recorded in {golden}, and all logits agree"
    return f"logits differ from those recorded in {golden}{', hardly more than rounding explains' if hardly else ''}"
