"""Makes tiny exports with the model builder of onnxruntime-genai, for the CPU.

    uv run --isolated --no-project --python 3.11 --with REQUIREMENT ... evidence/zoo/genai_exports.py OUT [NAME ...]

The requirements are those of `REQUIREMENTS`. Each checkpoint has random weights with a fixed seed and a tokenizer made
on the spot, so no model hub is asked. An export lands in OUT/NAME; where the builder fails, OUT/NAME/failed.txt says
why, the other exports are made all the same, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTHON = "3.11"
REQUIREMENTS = (
    "onnxruntime-genai==0.18.0",
    "torch==2.13.0",
    "transformers==5.23.0",
    "tokenizers==0.23.3",
    "safetensors==0.8.0",
    "huggingface-hub==2.4.0",
    "onnx==1.23.2",
    "onnx-ir==1.1.0",
    "onnxruntime==1.31.1",
    "numpy==2.4.6",
    "protobuf==7.36.2",
)
"""Packages of the isolated environment."""

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    **SPECIAL,
}
"""What most configurations share; its head size of 16 is the smallest that GroupQueryAttention can rotate."""

HEAD_SIZE = {"head_dim": 16}
"""For the configurations whose own head size is not that of `DECODER`."""

WINDOW = {"sliding_window": 4}


@dataclass(frozen=True)
class Recipe:
    """How one export is made.

    Attributes:
        family: Start of the name of the configuration class and of the model class in transformers.
        config: Arguments of the configuration class.
        head: End of the name of the model class.
        precision: Precision handed to the builder.
        options: Further options of the builder.
        cache_scale: Scale of a quantized cache, for keys and values of every layer.
    """

    family: str
    config: dict[str, Any] = field(default_factory=lambda: DECODER)
    head: str = "ForCausalLM"
    precision: str = "fp32"
    options: dict[str, str] = field(default_factory=dict)
    cache_scale: float | None = None


RECIPES = {
    "llama": Recipe("Llama"),
    "llama-int4": Recipe("Llama", precision="int4"),
    # Half precision on the CPU: MultiHeadAttention in the place of GroupQueryAttention.
    "llama-fp16": Recipe("Llama", {**DECODER, "num_key_value_heads": 4}, precision="fp16"),
    # Fails in its second step, unless onnxruntime is told not to reuse memory.
    "llama-fp16-grouped": Recipe("Llama", precision="fp16"),
    "llama-kv8": Recipe("Llama", options={"kv_cache_quant_scheme": "int8_per_tensor"}, cache_scale=0.08),
    "llama-kv4": Recipe("Llama", options={"kv_cache_quant_scheme": "int4_per_tensor"}, cache_scale=1.2),
    "llama-pruned": Recipe("Llama", options={"prune_lm_head": "true"}),
    "llama-embeds": Recipe("Llama", options={"exclude_embeds": "true"}),
    "qwen2": Recipe("Qwen2"),
    "qwen3": Recipe("Qwen3", {**DECODER, **HEAD_SIZE}),
    # The builder leaves the window out of the graph, though not out of genai_config.json.
    "mistral": Recipe("Mistral", {**DECODER, **WINDOW}),
    # With the kinds of layers in the configuration it keeps the window.
    "mistral-window": Recipe("Mistral", {**DECODER, **WINDOW, "layer_types": ["sliding_attention"] * 2}),
    "gemma": Recipe("Gemma", {**DECODER, **HEAD_SIZE, "tie_word_embeddings": True}),
    "gemma2": Recipe(
        "Gemma2",
        {**DECODER, **HEAD_SIZE, **WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gpt-oss": Recipe("GptOss", {**DECODER, **HEAD_SIZE, **WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # Half of the head is rotated, hence twice the head size.
    "phi": Recipe("Phi", {**DECODER, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "phi3": Recipe("Phi3", {**DECODER, "num_key_value_heads": 4, "original_max_position_embeddings": 64}),
    # Other rotations from the 33rd token on.
    "phi3-long": Recipe(
        "Phi3",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "type": "longrope",
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "lfm2": Recipe(
        "Lfm2",
        {**DECODER, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3.5": Recipe(
        "Qwen3_5",
        {
            "text_config": {
                **DECODER,
                "head_dim": 32,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.5,
                },
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
            "tie_word_embeddings": False,
        },
        head="ForConditionalGeneration",
    ),
    "whisper": Recipe(
        "Whisper",
        {
            "vocab_size": 128,
            "num_mel_bins": 80,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            **SPECIAL,
        },
        head="ForConditionalGeneration",
    ),
}


def export(recipe: Recipe, folder: Path) -> None:
    """Makes the checkpoint of `recipe` and lets the builder write the export to `folder`."""
    from onnxruntime_genai.models import builder

    with tempfile.TemporaryDirectory(prefix="genai-exports-") as scratch:
        checkpoint = Path(scratch, "checkpoint")
        make_checkpoint(recipe, checkpoint)
        options = dict(recipe.options)
        if recipe.cache_scale is not None:
            options["kv_cache_scale_file"] = str(write_cache_scales(recipe, Path(scratch)))
        call = ("", str(checkpoint), str(folder), recipe.precision, "cpu", str(Path(scratch, "cache")))
        parsed = builder.parse_extra_options(*call, [f"{key}={value}" for key, value in options.items()])
        builder.create_model(*call, **parsed)


def make_checkpoint(recipe: Recipe, folder: Path) -> None:
    """Saves a model with random weights, and a tokenizer, to `folder`.

    NumPy draws the numbers, because torch's generator gives other ones on other processors. They are large enough for
    a mistake with a cache to show in the logits. Norms stay as they are.
    """
    import numpy as np
    import torch
    import transformers

    config = getattr(transformers, f"{recipe.family}Config")(**recipe.config)
    model = getattr(transformers, f"{recipe.family}{recipe.head}")(config).eval()
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.requires_grad and "norm" not in name:
                std = 1.0 if "embed" in name else 0.25
                weight.copy_(torch.from_numpy(rng.normal(0, std, tuple(weight.shape)).astype("float32")))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer() -> Any:
    """Returns a tokenizer of whole words, with as many of them as the models know tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{number}" for number in range(len(special), DECODER["vocab_size"]))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, special["unk_token"]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def write_cache_scales(recipe: Recipe, folder: Path) -> Path:
    """Writes the scales of a quantized cache, one a layer, and returns their file."""
    scales = [[recipe.cache_scale]] * recipe.config["num_hidden_layers"]
    path = folder / "cache_scales.json"
    path.write_text(json.dumps({"scales": {"k_scales": scales, "v_scales": scales}}), encoding="utf-8")
    return path


def main() -> int:
    """Makes the exports that the command line asks for and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="receives each export as OUT/NAME")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make; all by default: {', '.join(RECIPES)}")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(RECIPES)):
        parser.error(f"no such export: {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    failed = []
    for name in args.names or RECIPES:
        start = time.monotonic()
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            export(RECIPES[name], folder)
        except Exception as error:
            failed.append(name)
            (folder / "failed.txt").write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        print(f"{name}: {'failed' if name in failed else 'made'} in {time.monotonic() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
