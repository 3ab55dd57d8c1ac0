"""Exports with Hugging Face Optimum: decoder, decoder with past, and both merged. Run by run.py.

Flags: `merge`, whether the two decoders are merged as well, and `shapes`, sizes of the sample by Optimum's names.
"""

from importlib import metadata
from typing import Any

import transformers
from optimum.exporters.onnx.convert import onnx_export_from_model
from optimum.utils.save_utils import maybe_load_preprocessors


def export(job: Any) -> dict[str, str]:
    """Export the checkpoint of a job; gives the versions of the libraries used."""
    model = job.load()
    model.config.use_cache = True
    preprocessors = maybe_load_preprocessors(job.checkpoint, trust_remote_code=False)
    job.doing("tracing the graphs with Optimum")
    onnx_export_from_model(
        model=model,
        output=job.out,
        opset=job.opset,
        task=job.task,
        device="cpu",
        do_validation=False,
        no_post_process=not job.flags.get("merge", True),
        preprocessors=preprocessors,
        **{**_sizes(model.config), **job.flags.get("shapes", {})},
    )
    transformers.logging.set_verbosity_error()
    return {name: metadata.version(name) for name in ("optimum", "optimum-onnx", "onnx", "onnxruntime")}


def _sizes(config: Any) -> dict[str, int]:
    """Assumptions of the exporter on audio that a model's configuration contradicts."""
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if config.model_type == "whisper" and bins and positions:
        return {"feature_size": bins, "nb_max_frames": 2 * positions}
    return {}
