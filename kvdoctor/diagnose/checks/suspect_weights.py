"""A weight matrix is zero, constant, not finite or implausibly large.

What it means: the values of a weight were lost or damaged on the way: a matrix that training never leaves at zero or at
one number, NaN or Inf from a conversion to half precision, or numbers beyond 10,000. The graph is valid, and what it
computes is not.

How it is decided: `kvdoctor inspect MODEL --weights` reads all values, in portions. Zero and constant count for
matrices of MatMul, Gemm, Conv and Gather only: not for biases of zeros, scales of a norm that are all one number, a new
LoRA adapter, or tables of less than 16 rows: the types of tokens, which RoBERTa does not use. Inf counts where a matrix
is multiplied, since masks hold it; NaN counts anywhere, also in the scale of a rounded weight. Weights in packed types
are not read, and without `--weights` none are.

Reproduce: `kvdoctor inspect MODEL --weights`.

Repair: export again from a correct checkpoint; for NaN and Inf, in a wider type.
"""

from collections.abc import Iterator
from math import isfinite

from kvdoctor.diagnose.context import FileContext
from kvdoctor.diagnose.locate.runnable import LAYER
from kvdoctor.errors import CannotCheck, UnreadableError
from kvdoctor.findings import Advice, Fault, Faults, Severity, check
from kvdoctor.model.operators import has, operator_of
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.weights import Weight, list_weights
from kvdoctor.report.wording import shorten_names

FEW_ROWS = 16
"""Of a table that may be zero: of the types of tokens, which RoBERTa does not use."""
SMALLEST = 64
"""Elements of the smallest matrix that is called zero or constant."""
LARGEST = 1e4
"""Weights of trained decoders stay below a few hundred; 65504 is the end of half precision."""
MOST_NAMED = 8
EXPORT_AGAIN = Advice("re-export", "export again from a correct checkpoint")


@check("KV030", "suspect-weights", "file")
def suspect_weights(context: FileContext) -> Faults:
    """One fault for each kind of damage, with all weights that have it."""
    if not context.weights or context.file.view is None:
        return
    found: dict[str, list[tuple[str, str]]] = {}
    try:
        for weight in list_weights(context.file.path):
            for kind in _judge(weight) if weight.has_values else ():
                found.setdefault(kind, []).append((weight.name, _describe(weight)))
    except (OSError, ValueError, UnreadableError) as error:
        raise CannotCheck(f"the weights of {context.file.name} cannot be read: {error}") from None
    for kind, weights in found.items():
        severity: Severity = "error" if kind in ("NaN", "Inf") else "warning"
        names, shown = zip(*weights, strict=True)
        fault = Fault(severity, names, CAUSES[kind], EXPORT_AGAIN, apart=(kind,))
        fault = fault.compare("values of a trained weight", shorten_names(shown, MOST_NAMED))
        yield fault.also(where=f"weights of {context.file.name}")


CAUSES = {
    "zero": "a weight matrix is all zeros",
    "constant": "a weight matrix repeats one number",
    "NaN": "weights hold NaN",
    "Inf": "weights that are multiplied hold Inf",
    "large": f"weights that are multiplied are larger than {LARGEST:,.0f}",
}


def _judge(weight: Weight) -> Iterator[str]:
    """The kinds of damage that a weight shows."""
    if not weight.is_float and not _is_rounded(weight):
        return
    least, greatest, nans, infinite = _read(weight)
    if nans and (weight.size > 1 or has(weight.op, "weights")):
        yield "NaN"
    if infinite and weight.is_multiplied:
        yield "Inf"
    if nans == infinite == 0 and least == greatest and _is_matrix(weight):
        yield "zero" if least == 0 else "constant"
    if weight.is_multiplied and max(-least, greatest) > LARGEST:
        yield "large"


def _is_rounded(weight: Weight) -> bool:
    held = has(weight.op, "weights") and weight.input == operator_of(weight.op).weight
    return held and weight.data_type in (TensorProto.INT8, TensorProto.UINT8)


def _is_matrix(weight: Weight) -> bool:
    """Whether one number everywhere is damage: not of a small table, nor of a new LoRA adapter."""
    table = has(weight.op, "embed") and weight.dims[:1] >= (FEW_ROWS,)
    known = weight.is_multiplied or table or _is_rounded(weight)
    lora = "lora" in f"{weight.name} {weight.reader}".lower()
    return known and len(weight.dims) > 1 and weight.size >= SMALLEST and not lora


def _read(weight: Weight) -> tuple[float, float, int, int]:
    """The least and the greatest finite value of a weight, and how many are NaN or Inf."""
    import numpy as np

    least, greatest, nans, infinite = float("inf"), float("-inf"), 0, 0
    for values in weight.values():
        nans += int(np.isnan(values).sum())
        infinite += int(np.isinf(values).sum())
        finite = values[np.isfinite(values)]
        if finite.size:
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
    return (least, greatest, nans, infinite) if isfinite(least) else (0.0, 0.0, nans, infinite)


def _describe(weight: Weight) -> str:
    match = LAYER.search(weight.name) or LAYER.search(weight.reader)
    layer = f"layer {match[1]}, " if match else ""
    return f"{weight.name} ({layer}{weight.dtype}{list(weight.dims)}, input {weight.input} of {weight.op or 'no node'})"
