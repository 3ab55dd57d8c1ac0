"""Hugging Face Optimum (optimum-onnx): names that Optimum itself, transformers.js and most loops know.

It is held to transformers < 4.58. Its merged decoder returns an emptied cross-attention cache, which is repaired
afterwards.
"""

from typing import Any

from kvdoctor.export.environments import TORCH, TRANSFORMERS, Needs
from kvdoctor.export.exporters import Exporter
from kvdoctor.export.wishes import Choice, Wishes

PAIR = "decoder-with-past"


def flags(wishes: Wishes) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Whether the two decoders are merged: as in the model that is replaced."""
    sick = wishes.sick
    if PAIR in sick.roles and "decoder-merged" not in sick.roles:
        return {"merge": False}, (Choice("merge", "no", f"{sick.name} is a pair of decoders"),)
    why = f"{sick.name} has a merged decoder" if "decoder-merged" in sick.roles else "Optimum's default"
    return {"merge": True}, (Choice("merge", "yes, where there are two decoders", why),)


EXPORTER = Exporter(
    name="optimum",
    summary="decoder, decoder with past, and both merged, under Optimum's names",
    script="with_optimum.py",
    needs=Needs(
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
    flags=flags,
    takes_task=True,
    order=10,
)
