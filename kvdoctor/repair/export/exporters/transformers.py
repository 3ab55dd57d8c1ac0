"""The exporter of transformers 5: a graph for the prompt and one for the steps, traced by torch.export.

torch.export treats a length of 0 or 1 as a constant, so the exporter's own sample of an encoder-decoder, whose decoder
starts with one token, freezes the past at 1. kvdoctor's samples have lengths of two or more, all different.
"""

from typing import Any

from kvdoctor.repair.export.exporters.registry import Exporter
from kvdoctor.repair.export.source_model import SourceFacts
from kvdoctor.report.repair_record import ExportChoice
from kvdoctor.runtime.environments import TORCH, Requirements

SIZES = {"rows": 3, "prompt": 7, "source": 9, "decoder_tokens": 4}
"""Two new tokens are traced with a past of 4 or 7 tokens: all sizes differ."""
FROZEN = {"past-axis-frozen", "batch-axis-frozen", "sequence-axis-frozen"}


def choose_flags(source: SourceFacts) -> tuple[dict[str, Any], tuple[ExportChoice, ...]]:
    """Samples that freeze no axis, with padding so that the graphs take the mask."""
    frozen = sorted(FROZEN.intersection(source.faults))
    why = f"{', '.join(frozen)} in {source.name}" if frozen else "torch treats lengths of 0 and 1 as constants"
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in SIZES.items())
    choices = (
        ExportChoice("sample", sizes, why),
        ExportChoice(
            "new tokens", "2 per step, unless a recurrent state forbids it", "one would freeze their number at 1"
        ),
        ExportChoice("padding", "in the sample", "a mask of ones is left out of the graphs"),
    )
    return {**SIZES, "multi_token": True, "padded": True}, choices


EXPORTER = Exporter(
    name="transformers",
    summary="prefill.onnx and decode.onnx, and encoder.onnx if there is one, with the names of transformers 5",
    script="with_transformers.py",
    needs=Requirements(
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
    flags=choose_flags,
    order=20,
)
