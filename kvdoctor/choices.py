"""The values that options take: for the command line, for programs and for a policy alike."""

from collections.abc import Iterable
from typing import Literal, get_args

Consumer = Literal["plain", "held"]
"""The loop that calls the model: every present fed back, or the cross-attention cache held."""
Required = Literal["chunked-prefill", "batch", "left-padding", "beam", "full-context"]
"""Uses that must work."""
FailOn = Literal["note", "warning", "error", "never"]
"""The lowest severity that counts as a failure."""
Agree = Literal["tokens", "logits", "bits"]
"""How far the logits of two models must be the same."""
AxisNames = Literal["kept", "readable"]
ExporterName = Literal["optimum", "transformers", "genai"]
Dtype = Literal["fp32", "fp16", "bf16", "int8", "int4"]

CONSUMERS: tuple[Consumer, ...] = get_args(Consumer)
REQUIRED: tuple[Required, ...] = get_args(Required)
FAIL_ON: tuple[FailOn, ...] = get_args(FailOn)
AGREE: tuple[Agree, ...] = get_args(Agree)
AXIS_NAMES: tuple[AxisNames, ...] = get_args(AxisNames)
EXPORTERS: tuple[ExporterName, ...] = get_args(ExporterName)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def why_no_use(words: Iterable[str]) -> str | None:
    """Why one of the words is no use that can be required; None where all are."""
    unknown = next((word for word in words if word not in REQUIRED), None)
    return None if unknown is None else f"takes {', '.join(REQUIRED)}; got {unknown!r}"
