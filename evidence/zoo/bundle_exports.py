"""Exports tiny random checkpoints as bundles: the files that a loop for images or audio calls one after the other.

    uv run --isolated --no-project --python 3.11 --with torch==2.13.0 --with transformers==5.23.0 --with onnx==1.23.2 \
        --with onnxscript==0.7.2 --with onnx-ir==1.1.0 --with numpy==2.4.6 \
        python evidence/zoo/bundle_exports.py OUT

The files are cut and named as the scripts behind transformers.js do it: `embed_tokens.onnx`, `vision_encoder.onnx` or
`audio_encoder.onnx`, `decoder_model_merged.onnx` with a cache from the first step on. The pipeline has the files and
the config of an onnxruntime-genai `decoder-pipeline`. Each recipe writes its folder OUT/NAME anew; one that fails
leaves OUT/NAME/failed.txt and does not stop the others. Reading this module needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import transformers_exports
from transformers_exports import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PYTHON, REQUIREMENTS = transformers_exports.PYTHON, transformers_exports.REQUIREMENTS
BATCH, NEW, PAST = 2, 3, 5
SPREADS = {"embed": 1.0, "lm_head": 0.6, "position": 0.5, "": 0.3}

TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE, SOUND = 100, 101
"""Ids of the placeholder tokens."""

LLAVA = Checkpoint(
    "LlavaForConditionalGeneration",
    "LlavaConfig",
    {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 24,
            "patch_size": 8,
        },
        "image_token_index": IMAGE,
        "image_seq_length": 9,
    },
    SPREADS,
)
QWEN2_VL = Checkpoint(
    "Qwen2VLForConditionalGeneration",
    "Qwen2VLConfig",
    {
        "text_config": {
            **TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 2,
        "vision_start_token_id": IMAGE + 3,
        "vision_end_token_id": IMAGE + 4,
    },
    SPREADS,
)
QWEN2_AUDIO = Checkpoint(
    "Qwen2AudioForConditionalGeneration",
    "Qwen2AudioConfig",
    {
        "text_config": {"model_type": "qwen2", **TEXT},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "d_model": 24,
            "max_source_positions": 20,
        },
        "audio_token_index": SOUND,
    },
    SPREADS,
)
GEMMA3N = Checkpoint(
    "Gemma3nForCausalLM",
    "Gemma3nTextConfig",
    {
        **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
        "intermediate_size": [64] * 4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "head_dim": 8,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 6,
        "layer_types": ["full_attention"] * 4,
        "sliding_window": 64,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    SPREADS,
)
LLAMA = Checkpoint("LlamaForCausalLM", "LlamaConfig", TEXT, SPREADS)


@dataclass(frozen=True)
class Sample:
    """What a graph is traced with: tensors by the name of their input, and the names of their free axes."""

    inputs: dict[str, Any]
    axes: dict[str, dict[int, str]]


def _export(module: Any, file: Path, sample: Sample, outputs: Sequence[str]) -> None:
    """Writes one graph."""
    import torch

    inputs, axes = sample.inputs, sample.axes

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, tensors: list[Any]) -> Any:
            return module(dict(zip(inputs, tensors, strict=True)))

    names = {name: torch.export.Dim(name, max=512) for each in axes.values() for name in each.values()}
    shapes = [{axis: names[name] for axis, name in axes.get(each, {}).items()} for each in inputs]
    program = torch.onnx.export(
        Called().eval(),
        (list(inputs.values()),),
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_shapes=(shapes,),
        dynamo=True,
        opset_version=18,
        verbose=False,
    )
    program.save(file, external_data=False)


def _module(call: Callable[[dict[str, Any]], Any], *owned: Any) -> Any:
    """A module that calls a function, and owns the modules whose weights that uses."""
    import torch

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owned = torch.nn.ModuleList(owned)

        def forward(self, named: dict[str, Any]) -> Any:
            return call(named)

    return Wrapped().eval()


def _tokens() -> Any:
    import torch

    return torch.randint(32, 96, (BATCH, NEW))


def _embed_tokens(table: Any, folder: Path) -> None:
    module = _module(lambda named: table(named["input_ids"]), table)
    axes = {"input_ids": {0: "batch", 1: "sequence"}}
    _export(module, folder / "embed_tokens.onnx", Sample({"input_ids": _tokens()}, axes), ["inputs_embeds"])


def _cache_names(layers: Sequence[int]) -> tuple[list[str], list[str]]:
    pasts = [f"past_key_values.{layer}.{part}" for layer in layers for part in ("key", "value")]
    return pasts, [name.replace("past_key_values", "present") for name in pasts]


def _decode(body: Any, head: Any, named: dict[str, Any], layers: Sequence[int], **more: Any) -> tuple[Any, ...]:
    """Runs layers on a cache of their own: logits (or hidden states, without a head), and the cache."""
    from transformers import DynamicCache

    pasts, _ = _cache_names(layers)
    cache = DynamicCache([(named[key], named[value]) for key, value in zip(pasts[::2], pasts[1::2], strict=True)])
    hidden = body(
        attention_mask=named["attention_mask"],
        position_ids=named["position_ids"],
        past_key_values=cache,
        use_cache=True,
        **more,
    ).last_hidden_state
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return (head(hidden) if head is not None else hidden, *kept)


def _decoder_inputs(config: Any, layers: Sequence[int], ranks: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mask, positions and cache as samples, and their free axes; positions of rank 3 have three rows."""
    import torch

    positions = torch.arange(PAST, PAST + NEW).repeat(BATCH, 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (BATCH, config.num_key_value_heads, PAST, width)
    pasts, _ = _cache_names(layers)
    inputs = {
        "attention_mask": torch.ones(BATCH, PAST + NEW, dtype=torch.int64),
        "position_ids": positions if ranks == 2 else positions.repeat(3, 1, 1),
        **{name: torch.randn(shape) for name in pasts},
    }
    axes = {
        "attention_mask": {0: "batch", 1: "total"},
        "position_ids": {ranks - 2: "batch", ranks - 1: "sequence"},
        **{name: {0: "batch", 2: "past"} for name in pasts},
    }
    return inputs, axes


def _decoder(body: Any, head: Any, config: Any, folder: Path, ranks: int = 2) -> None:
    import torch

    layers = range(config.num_hidden_layers)
    inputs, axes = _decoder_inputs(config, layers, ranks)
    module = _module(lambda n: _decode(body, head, n, layers, inputs_embeds=n["inputs_embeds"]), body, head)
    inputs = {"inputs_embeds": torch.randn(BATCH, NEW, config.hidden_size), **inputs}
    axes = {"inputs_embeds": {0: "batch", 1: "sequence"}, **axes}
    _export(module, folder / "decoder_model_merged.onnx", Sample(inputs, axes), ["logits", *_cache_names(layers)[1]])


def _llava(model: Any, folder: Path) -> None:
    import torch

    inner = model.model
    _embed_tokens(model.get_input_embeddings(), folder)
    size = model.config.vision_config.image_size
    tower, projector = inner.vision_tower, inner.multi_modal_projector

    def encode(named: dict[str, Any]) -> Any:
        """As `get_image_features` does it, whose result is a list by image: a trace would fix their number."""
        seen = tower(named["pixel_values"], output_hidden_states=True).hidden_states[-2]
        return projector(seen[:, 1:])

    module = _module(encode, tower, projector)
    axes = {"pixel_values": {0: "images"}}
    pixels = {"pixel_values": torch.randn(2, 3, size, size)}
    _export(module, folder / "vision_encoder.onnx", Sample(pixels, axes), ["image_features"])
    _decoder(inner.language_model, model.lm_head, model.config.text_config, folder)
    processor = {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 8}
    (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")


def _qwen2_vl(model: Any, folder: Path) -> None:
    """The graphs of text alone: the positions have three rows."""
    inner = model.model
    _embed_tokens(model.get_input_embeddings(), folder)
    _decoder(inner.language_model, model.lm_head, model.config.text_config, folder, ranks=3)


def _qwen2_audio(model: Any, folder: Path) -> None:
    import torch

    inner = getattr(model, "model", model)
    tower, projector = inner.audio_tower, inner.multi_modal_projector
    _embed_tokens(model.get_input_embeddings(), folder)
    config = model.config.audio_config
    frames = 2 * config.max_source_positions

    def encode(named: dict[str, Any]) -> Any:
        return projector(tower(named["input_features"]).last_hidden_state)

    audio = {"input_features": torch.randn(2, config.num_mel_bins, frames)}
    axes = {"input_features": {0: "batch"}}
    _export(_module(encode, tower, projector), folder / "audio_encoder.onnx", Sample(audio, axes), ["audio_features"])
    body, head = inner.language_model, getattr(model, "lm_head", None)
    if head is None:
        body, head = body.model, body.lm_head
    _decoder(body, head, model.config.text_config, folder)


def _gemma3n(model: Any, folder: Path) -> None:
    """The embedding graph also makes a row for each layer, which the decoder takes as an input of its own."""
    import torch

    body, config = model.model, model.config
    module = _module(lambda n: (body.embed_tokens(n["input_ids"]), body.get_per_layer_inputs(n["input_ids"])), body)
    tokens, axes = {"input_ids": _tokens()}, {"input_ids": {0: "batch", 1: "sequence"}}
    _export(module, folder / "embed_tokens.onnx", Sample(tokens, axes), ["inputs_embeds", "per_layer_inputs"])
    layers = range(config.num_hidden_layers)
    inputs, axes = _decoder_inputs(config, layers)
    names = ("inputs_embeds", "per_layer_inputs")
    cap = config.final_logit_softcapping

    def capped(hidden: Any) -> Any:
        return torch.tanh(model.lm_head(hidden) / cap) * cap

    module = _module(
        lambda n: _decode(body, capped, n, layers, **{name: n[name] for name in names}), body, model.lm_head
    )
    width = (config.num_hidden_layers, config.hidden_size_per_layer_input)
    made = {names[0]: torch.randn(BATCH, NEW, config.hidden_size), names[1]: torch.randn(BATCH, NEW, *width)}
    free = {name: {0: "batch", 1: "sequence"} for name in names}
    outputs = ["logits", *_cache_names(layers)[1]]
    _export(module, folder / "decoder_model_merged.onnx", Sample({**made, **inputs}, {**free, **axes}), outputs)


def _llama_stages(model: Any, folder: Path) -> None:
    """Two stages of one layer each: the first takes tokens, the second has the norm and the head."""
    import copy

    import torch

    config = model.config
    entries = []
    for number, file in enumerate(("first.onnx", "second.onnx")):
        body = copy.deepcopy(model.model)
        body.layers = torch.nn.ModuleList([body.layers[number]])
        body.layers[0].self_attn.layer_idx = 0
        body.config = copy.deepcopy(config)
        body.config.num_hidden_layers = 1
        inputs, axes = _decoder_inputs(config, [number])
        if number == 0:
            body.norm = torch.nn.Identity()
            first, name = {"input_ids": _tokens()}, "input_ids"
        else:
            first, name = {"hidden_states": torch.randn(BATCH, NEW, config.hidden_size)}, "inputs_embeds"
        own, head = next(iter(first)), model.lm_head if number else None

        def call(n: dict[str, Any], body: Any = body, head: Any = head, own: str = own, name: str = name) -> Any:
            pasts, _ = _cache_names([0])
            mine = {**n, **dict(zip(pasts, [v for k, v in n.items() if k.startswith("past")], strict=True))}
            return _decode(body, head, mine, [0], **{name: n[own]})

        module = _module(call, body, *([head] if head is not None else []))
        presents = _cache_names([number])[1]
        outputs = ["logits" if number else "hidden_states", *presents]
        _export(module, folder / file, Sample({**first, **inputs}, {own: {0: "batch", 1: "sequence"}, **axes}), outputs)
        entries.append({f"stage-{number}": {"filename": file, "inputs": [own, *inputs], "outputs": outputs}})
    decoder = {
        "head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "pipeline": entries,
    }
    genai = {"model": {"type": "decoder-pipeline", "vocab_size": config.vocab_size, "decoder": decoder}}
    genai["model"]["eos_token_id"] = config.eos_token_id
    (folder / "genai_config.json").write_text(json.dumps(genai, indent=1), encoding="utf-8")


RECIPES: dict[str, tuple[Checkpoint, Callable[[Any, Path], None]]] = {
    "llava": (LLAVA, _llava),
    "qwen2-vl": (QWEN2_VL, _qwen2_vl),
    "qwen2-audio": (QWEN2_AUDIO, _qwen2_audio),
    "gemma3n": (GEMMA3N, _gemma3n),
    "llama-stages": (LLAMA, _llama_stages),
}


def make(name: str, folder: Path) -> bool:
    """Writes one bundle; whether that worked."""
    import torch

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkpoint, write = RECIPES[name]
    try:
        with torch.no_grad():
            model = checkpoint.build()
            model.config.save_pretrained(folder)
            write(model, folder)
    except Exception:  # one export that fails must not stop the others
        (folder / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return False
    return True


def main() -> int:
    """Writes the bundles that are named, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    made = [make(name, asked.out / name) for name in asked.names or RECIPES]
    return int(not all(made))


if __name__ == "__main__":
    raise SystemExit(main())
