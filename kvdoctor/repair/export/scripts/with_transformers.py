"""Exports with the exporter of transformers 5: prefill.onnx, decode.onnx and, if there is one, encoder.onnx.

Run by run.py. Flags: `rows`, `prompt`, `source` and `decoder_tokens`, the sizes of the sample inputs, all different and
two or more, since torch takes lengths of 0 and 1 for constants; `multi_token`, whether the decode graph takes several
new tokens; `padded`, whether the sample is padded, without which the mask does not reach the graphs; `fusions`, the
provider of ONNX Runtime whose fused operators are written, or null; `static`, the tokens of a cache that is written in
place, or null for one that grows.
"""

import copy
from importlib import metadata
from typing import Any

import torch
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.exporters.base import ExportedModel
from transformers.exporters.utils import decompose_for_generation


def export(job: Any) -> dict[str, str]:
    """Export the checkpoint of a job; gives the versions of the libraries used."""
    model = job.load()
    torch.manual_seed(0)
    config = OnnxConfig(dynamic=True, opset_version=job.opset, ort_fusions=job.flags["fusions"])
    inputs = sample(model, job.flags)
    several = job.flags["multi_token"] and not getattr(model, "_is_stateful", False)
    components = {}
    for name, (part, fed) in parts(model, inputs, several, job.flags["static"]).items():
        job.doing(f"tracing {name} with transformers and torch.export")
        components[name] = OnnxExporter().export(part, fed, config).components["model"]
    job.doing("writing the graphs")
    exported = ExportedModel(components, OnnxExporter.export_format, model.config, model.generation_config)
    exported.save_pretrained(job.out)
    return {name: metadata.version(name) for name in ("onnx", "onnxscript", "onnx-ir")}


def parts(
    model: Any, inputs: dict[str, torch.Tensor], several: bool, static: "int | None"
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The parts of the model to trace, with their sample inputs."""
    settings = copy.deepcopy(model.generation_config)
    if static is not None:
        settings.cache_implementation, settings.max_cache_len = "static", static
    found: dict[str, tuple[Any, dict[str, Any]]] = decompose_for_generation(
        model, inputs, generation_config=settings, multi_token_decode=several
    )
    if not model.config.is_encoder_decoder:
        return found
    if several:  # the exporter merges steps of decoder-only models alone
        step = found["decode"][1]
        step["decoder_input_ids"] = torch.cat([step["decoder_input_ids"]] * 2, dim=1)
    encoder = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    return {"encoder": (model.get_encoder(), encoder), **found}


def sample(model: Any, flags: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The arguments of `generate` that the graphs are traced with."""
    config, rows = model.config, flags["rows"]
    if model.main_input_name == "input_features":
        features = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {"input_features": torch.randn(features, dtype=model.dtype)}
    elif model.main_input_name == "pixel_values":
        vision = getattr(config, "encoder", None) or getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = (rows, getattr(vision, "num_channels", 3), height, width)
        inputs = {"pixel_values": torch.randn(pixels, dtype=model.dtype)}
    elif model.main_input_name == "input_ids":
        ids = _tokens(config, rows, flags["source"] if config.is_encoder_decoder else flags["prompt"])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if flags["padded"]:
            inputs["attention_mask"][1, slice(-2, None) if config.is_encoder_decoder else slice(0, 2)] = 0
    else:
        raise ValueError(f"no sample is known for a model that is fed {model.main_input_name}")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _tokens(config, rows, flags["decoder_tokens"])
    return inputs


def _tokens(config: Any, rows: int, length: int) -> torch.Tensor:
    """Token ids from the middle of the vocabulary, without special ones."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    size = text.vocab_size
    return torch.randint(min(3, size - 2), max(size - 2, 2), (rows, length))
