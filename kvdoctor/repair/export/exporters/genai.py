"""The model builder of onnxruntime-genai: one graph with GroupQueryAttention, for onnxruntime-genai itself.

It builds decoder-only models of the families that it supports, and needs the tokenizer beside the weights.
"""

from typing import Any

from kvdoctor.repair.export.exporters.registry import Exporter
from kvdoctor.repair.export.source_model import SourceFacts
from kvdoctor.report.repair_record import ExportChoice
from kvdoctor.runtime.environments import GENAI, TORCH, Requirements


def choose_flags(source: SourceFacts) -> tuple[dict[str, Any], tuple[ExportChoice, ...]]:  # noqa: ARG001 - the signature of all exporters
    """The kernels that the graph is built for."""
    return {"provider": "cpu"}, (
        ExportChoice("kernels", "for the CPU", "the export is diagnosed and proved on the CPU"),
    )


EXPORTER = Exporter(
    name="genai",
    summary="model.onnx and genai_config.json for onnxruntime-genai",
    script="with_genai.py",
    needs=Requirements(
        (
            f"torch=={TORCH}",
            "transformers==5.23.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            *GENAI,
        ),
        ("torch", "transformers", "onnxruntime_genai.models.builder", "onnx_ir"),
        "genai",
    ),
    writes=("genai", "onnxruntime-genai"),
    dtypes=("fp32", "fp16", "bf16", "int8", "int4"),
    opsets=None,
    flags=choose_flags,
    own_layout=True,
    order=30,
)
