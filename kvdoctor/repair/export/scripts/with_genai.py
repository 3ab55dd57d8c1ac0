"""Exports with the model builder of onnxruntime-genai: model.onnx and genai_config.json. Run by run.py.

Flags: `provider`, whose kernels the graph is made for, and `options` of the builder. The checkpoint must hold its
tokenizer, which the builder reads the special tokens from.
"""

import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from onnxruntime_genai.models import builder


def export(job: Any) -> dict[str, str]:
    """Export the checkpoint of a job; gives the versions of the libraries used."""
    job.load()  # the builder makes up weights that are missing, and says nothing
    folder = _folder(job)
    job.doing("building the graph with onnxruntime-genai")
    with tempfile.TemporaryDirectory(prefix="kvdoctor-") as cache:
        call = ("", folder, str(job.out), job.dtype, job.flags["provider"], cache)
        options = [f"{key}={value}" for key, value in job.flags.get("options", {}).items()]
        builder.create_model(*call, **builder.parse_extra_options(*call, options))
    return {name: metadata.version(name) for name in ("onnxruntime-genai", "onnx", "onnx-ir")}


def _folder(job: Any) -> str:
    """The folder of the checkpoint: the builder would download a model of the hub into a cache of its own."""
    if Path(job.checkpoint).is_dir():
        return str(job.checkpoint)
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt"]
    local = job.given["local_files_only"]
    return str(snapshot_download(job.checkpoint, allow_patterns=patterns, local_files_only=local))
