"""The model builder of onnxruntime-genai: one graph with GroupQueryAttention, for onnxruntime-genai itself.

It builds decoder-only models of the families that it knows, and needs the tokenizer beside the weights.
"""

from typing import Any

from kvdoctor.export.environments import TORCH, Needs
from kvdoctor.export.exporters import Exporter
from kvdoctor.export.wishes import Choice, Wishes


def flags(wishes: Wishes) -> tuple[dict[str, Any], tuple[Choice, ...]]:  # noqa: ARG001 - as the other exporters take it
    """The kernels that the graph is made for."""
    return {"provider": "cpu"}, (Choice("kernels", "for the CPU", "where it is diagnosed and proved"),)


EXPORTER = Exporter(
    name="genai",
    summary="model.onnx and genai_config.json for onnxruntime-genai",
    script="with_genai.py",
    needs=Needs(
        (
            f"torch=={TORCH}",
            "transformers==5.23.0",
            "onnxruntime-genai==0.18.0",
            "onnx==1.23.2",
            "onnx-ir==1.1.0",
            "onnxruntime==1.31.1",
            "numpy==2.4.6",
        ),
        ("torch", "transformers", "onnxruntime_genai.models.builder", "onnx_ir"),
        "genai",
    ),
    writes=("genai", "onnxruntime-genai"),
    dtypes=("fp32", "fp16", "bf16", "int8", "int4"),
    opsets=None,
    flags=flags,
    order=30,
)
