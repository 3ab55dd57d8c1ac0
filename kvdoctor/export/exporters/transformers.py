"""The exporter that transformers 5 brings along: a graph for the prompt and one for the steps, traced by torch.export.

What torch.export sees with a length of 0 or 1 it takes for a constant, so its own sample of an encoder-decoder, whose
decoder starts with one token, freezes the past at 1. The samples here have lengths of two or more, all different.
"""

from typing import Any

from kvdoctor.export.environments import TORCH, Needs
from kvdoctor.export.exporters import Exporter
from kvdoctor.export.wishes import Choice, Wishes

SIZES = {"rows": 3, "prompt": 7, "source": 9, "decoder_tokens": 4}
"""Two new tokens are traced on a past of 4 or 7: no size comes twice."""
FROZEN = {"past-axis-frozen", "batch-axis-frozen", "sequence-axis-frozen"}


def flags(wishes: Wishes) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Samples from which no axis can be frozen, with padding so that the mask reaches the graphs."""
    frozen = sorted(FROZEN.intersection(wishes.sick.faults))
    why = f"{', '.join(frozen)} in {wishes.sick.name}" if frozen else "torch takes lengths of 0 and 1 for constants"
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in SIZES.items())
    choices = (
        Choice("sample", sizes, why),
        Choice("new tokens", "2 a step, where no recurrent state forbids it", "one would freeze their number at 1"),
        Choice("padding", "in the sample", "a mask of ones alone does not reach the graphs"),
    )
    return {**SIZES, "multi_token": True, "padded": True}, choices


EXPORTER = Exporter(
    name="transformers",
    summary="prefill.onnx and decode.onnx, and encoder.onnx where there is one, under the names of transformers 5",
    script="with_transformers.py",
    needs=Needs(
        (
            f"torch=={TORCH}",
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnxscript==0.7.2",
            "onnx-ir==1.1.0",
            "numpy==2.4.6",
        ),
        ("torch", "transformers.exporters", "onnxscript", "onnx_ir"),
        "transformers",
    ),
    writes=("transformers",),
    dtypes=("fp32", "fp16", "bf16"),
    opsets=(18, 24),
    flags=flags,
    order=20,
)
