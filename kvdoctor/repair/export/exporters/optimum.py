"""Hugging Face Optimum (optimum-onnx): names that Optimum, transformers.js and most loops know.

It is limited to transformers < 4.58. Its merged decoder returns an emptied cross-attention cache, which is repaired
afterwards.
"""

from typing import Any

from kvdoctor.repair.export.exporters.registry import Exporter
from kvdoctor.repair.export.source_model import SourceFacts
from kvdoctor.report.repair_record import ExportChoice
from kvdoctor.runtime.environments import TORCH, TRANSFORMERS, Requirements

PAIR = "decoder-with-past"


def choose_flags(source: SourceFacts) -> tuple[dict[str, Any], tuple[ExportChoice, ...]]:
    """Whether the two decoders are merged: as in the model that is replaced."""
    if PAIR in source.roles and "decoder-merged" not in source.roles:
        return {"merge": False}, (ExportChoice("merge", "no", f"{source.name} is a pair of decoders"),)
    why = f"{source.name} has a merged decoder" if "decoder-merged" in source.roles else "Optimum's default"
    return {"merge": True}, (ExportChoice("merge", "yes, if there are two decoders", why),)


EXPORTER = Exporter(
    name="optimum",
    summary="decoder, decoder with past, and both merged, with Optimum's names",
    script="with_optimum.py",
    needs=Requirements(
        (
            f"torch=={TORCH}",
            f"transformers=={TRANSFORMERS}",
            "optimum==2.1.0",
            "optimum-onnx==0.1.0",
            "onnx==1.23.2",
            "onnxruntime==1.31.1",
            "accelerate==1.15.0",
            "numpy==2.4.6",
            "protobuf==7.36.2",
        ),
        ("torch", "transformers", "optimum.exporters.onnx.convert", "onnx", "onnxruntime"),
        "optimum",
    ),
    writes=("optimum",),
    dtypes=("fp32", "fp16", "bf16"),
    opsets=(11, 20),
    flags=choose_flags,
    takes_task=True,
    order=10,
)
