"""Exports tiny random checkpoints with the exporter that transformers 5 brings along, and with plain torch.onnx.

    uv run --isolated --no-project --python 3.11 --with torch==2.13.0 --with transformers==5.23.0 --with onnx==1.23.2 \
        --with onnxscript==0.7.2 --with onnx-ir==1.1.0 --with numpy==2.4.6 \
        python evidence/zoo/transformers_exports.py OUT

Every recipe writes its folder OUT/NAME anew, with whatever the exporter writes. A recipe that fails leaves
OUT/NAME/failed.txt and does not stop the others; the exit code is 1 then. Reading this module needs the standard
library only, so that a test can ask for the names and the requirements.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import io
import logging
import shutil
import time
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PYTHON = "3.11"
REQUIREMENTS = (
    *("torch==2.13.0", "transformers==5.23.0", "onnx==1.23.2"),
    *("onnxscript==0.7.2", "onnx-ir==1.1.0", "numpy==2.4.6"),
)

BATCH, PROMPT, SOURCE, FRAMES = 2, 7, 9, 60
"""Sizes of the sample inputs: rows, tokens of a prompt, tokens and audio frames for an encoder."""

WINDOW = 6
"""Sliding window, shorter than the prompt: what a trace makes of a full window depends on it."""

CAPACITY = 32
"""Length of a static cache."""


# --- checkpoints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A model with random weights.

    Attributes:
        model_class: Name of the model class in transformers.
        config_class: Name of the configuration class in transformers.
        config: Arguments of the configuration class.
        spreads: Standard deviation of the random weights: the first key that is part of a weight's name decides; 0
            leaves the weight as the model class initializes it.
    """

    model_class: str
    config_class: str
    config: dict[str, Any]
    spreads: dict[str, float] = field(default_factory=lambda: {"embed": 1.0, "lm_head": 0.6, "": 0.3})

    def build(self) -> Any:
        """Returns the model. NumPy draws the weights, because torch's generator differs between processors."""
        import numpy as np
        import torch
        import transformers

        torch.manual_seed(7)
        model = getattr(transformers, self.model_class)(getattr(transformers, self.config_class)(**self.config)).eval()
        model.config.architectures = [self.model_class]
        rng = np.random.default_rng(7)
        with torch.no_grad():
            for name, weight in sorted(model.named_parameters()):
                std = next(std for part, std in self.spreads.items() if part in name)
                if weight.requires_grad and std and "norm" not in name and ".ln_" not in name:
                    weight.copy_(torch.from_numpy(rng.normal(0, std, tuple(weight.shape)).astype("float32")))
        return model


TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ENCODER_DECODER = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
MIXED_WINDOWS = {
    **DECODER,
    "head_dim": 12,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
MAMBA_HEADS = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
STATE_SPREADS = {"embed": 1.0, "A_log": 0, "dt_bias": 0, "dt_proj.bias": 0, ".D": 0, "": 0.3}

BAMBA = Checkpoint(
    "BambaForCausalLM",
    "BambaConfig",
    {**DECODER, **MAMBA_HEADS, "mamba_d_head": 16, "mamba_expand": 2, "attn_layer_indices": [1]},
    STATE_SPREADS,
)
BART = Checkpoint(
    "BartForConditionalGeneration",
    "BartConfig",
    {
        **ENCODER_DECODER,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    {"shared": 0.6, "": 0.3},
)
FALCON_H1 = Checkpoint(
    "FalconH1ForCausalLM",
    "FalconH1Config",
    {**DECODER, **MAMBA_HEADS, "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_expand": 1},
    STATE_SPREADS,
)
GEMMA2 = Checkpoint("Gemma2ForCausalLM", "Gemma2Config", MIXED_WINDOWS)
GEMMA3 = Checkpoint("Gemma3ForCausalLM", "Gemma3TextConfig", MIXED_WINDOWS)
GPT2 = Checkpoint(
    "GPT2LMHeadModel",
    "GPT2Config",
    {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    {"wte": 0.7, "wpe": 1.0, "": 0.3},
)
LFM2 = Checkpoint(
    "Lfm2ForCausalLM",
    "Lfm2Config",
    {**DECODER, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
)
LLAMA = Checkpoint("LlamaForCausalLM", "LlamaConfig", DECODER)
MAMBA = Checkpoint(
    "MambaForCausalLM",
    "MambaConfig",
    {**TOKENS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    STATE_SPREADS,
)
MARIAN = Checkpoint(
    "MarianMTModel",
    "MarianConfig",
    {
        **ENCODER_DECODER,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "pad_token_id": 127,
        "decoder_start_token_id": 127,
        "forced_eos_token_id": None,
        "scale_embedding": True,
    },
    {"encoder_attn.out_proj": 0.1, "self_attn.out_proj": 0.15, ".fc": 0.6, "shared": 0.6, "": 0.3},
)
MISTRAL = Checkpoint("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": WINDOW})
QWEN3 = Checkpoint("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 12})
QWEN3_NEXT = Checkpoint(
    "Qwen3NextForCausalLM",
    "Qwen3NextConfig",
    {
        **DECODER,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0, 1],
    },
    STATE_SPREADS,
)
T5 = Checkpoint(
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": 128,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    {"shared": 1.5, ".q.": 0.1, "": 0.6},
)
WHISPER = Checkpoint(
    "WhisperForConditionalGeneration",
    "WhisperConfig",
    {
        **ENCODER_DECODER,
        "num_mel_bins": 8,
        "max_source_positions": FRAMES // 2,
        "max_target_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
    },
    {"embed": 0.5, "q_proj": 0.35, "": 0.45},
)


def _tokens(length: int) -> Tensor:
    """Returns random token ids without special tokens, the same ones at every call."""
    import numpy as np
    import torch

    return torch.from_numpy(np.random.default_rng(length).integers(3, 126, (BATCH, length)))


# --- the exporter of transformers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """An export by `OnnxExporter.export_for_generation`: `prefill.onnx`, `decode.onnx`, `export.json`, `config.json`.

    Attributes:
        checkpoint: What is exported.
        sample: What `generate` is called with. A mask of ones alone does not reach the graphs; a padded one does.
        decoder_tokens: Tokens the decoder of an encoder-decoder starts with. With none given it starts with one, and
            the length of the past is frozen at 1.
        multi_token_decode: Traces the decode graph with two new tokens, so that their number stays free.
        dims: Which axes are free: all that the trace lets be, those of the tokens and of the past, or none.
        capacity: Length of the static cache, or None for one that grows.
        fusions: Execution provider of ONNX Runtime whose fused operators are written, or None for plain ONNX.
    """

    checkpoint: Checkpoint
    sample: Literal["prompt", "padded", "source", "features"] = "prompt"
    decoder_tokens: int | None = None
    multi_token_decode: bool = False
    dims: Literal["all", "listed", "none"] = "all"
    capacity: int | None = None
    fusions: str | None = None

    def write(self, model: Any, folder: Path) -> None:
        """Writes the export into `folder`."""
        from transformers.exporters import OnnxConfig, OnnxExporter

        generation_config = None
        if self.capacity is not None:
            generation_config = copy.deepcopy(model.generation_config)
            generation_config.update(cache_implementation="static", max_cache_len=self.capacity)
        exported = OnnxExporter().export_for_generation(
            model,
            self._sample(),
            _listed_dims()
            if self.dims == "listed"
            else OnnxConfig(dynamic=self.dims == "all", ort_fusions=self.fusions),
            generation_config=generation_config,
            multi_token_decode=self.multi_token_decode,
        )
        exported.save_pretrained(folder)

    def _sample(self) -> dict[str, Tensor]:
        """Returns the arguments of `generate`."""
        import numpy as np
        import torch

        if self.sample == "features":
            features = np.random.default_rng(4).normal(0, 1, (BATCH, 8, FRAMES)).astype("float32")
            inputs = {"input_features": torch.from_numpy(features)}
        else:
            ids = _tokens(SOURCE if self.sample == "source" else PROMPT)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.sample == "padded":
            inputs["attention_mask"][1, :2] = 0
        if self.sample == "source":
            inputs["attention_mask"][1, -2:] = 0
        if self.decoder_tokens is not None:
            inputs["decoder_input_ids"] = _tokens(self.decoder_tokens)
        return inputs


def _listed_dims() -> Mapping[str, Any]:
    """Returns one configuration a graph that frees the axes of tokens and past only, for two layers and a mask."""
    from torch.export import Dim
    from transformers.exporters import OnnxConfig

    batch, new, past = Dim("batch"), Dim("sequence", min=2, max=4096), Dim("past", min=2, max=4095)
    rows = {"input_ids": {0: batch}, "position_ids": {0: batch}}
    prompt = {name: {0: batch, 1: new} for name in ("input_ids", "attention_mask", "position_ids")}
    shapes = {
        "prefill": {**prompt, "past_key_values": []},
        "decode": {**rows, "attention_mask": {0: batch, 1: past + 1}, "past_key_values": [{0: batch, 2: past}] * 4},
    }
    return {
        name: OnnxConfig(dynamic=True, dynamic_shapes=shape, prefer_deferred_runtime_asserts_over_guards=True)
        for name, shape in shapes.items()
    }


# --- plain torch.onnx -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """One graph.

    Attributes:
        file: Name of the file.
        new: New tokens in the sample.
        past: Length of the past in the sample, or None for a graph without a past.
        dims: Which axes of batch, tokens and past are free: all, all and named by hand, or none.
    """

    file: str
    new: int
    past: int | None
    dims: Literal["all", "named", "none"] = "all"


@dataclass(frozen=True)
class Dynamo:
    """Graphs by `torch.onnx.export(dynamo=True)`, with the cache as an argument and no names given.

    Attributes:
        traces: The graphs.
        opset: Version of the operator set.
        keys_first: Flattens the cache as all keys, then all values, rather than layer by layer.
        checkpoint: What is exported.
    """

    traces: tuple[Trace, ...]
    opset: int = 18
    keys_first: bool = False
    checkpoint: Checkpoint = LLAMA

    def write(self, model: Any, folder: Path) -> None:
        """Writes the graphs and `config.json` into `folder`."""
        import torch
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

        register_cache_pytrees_for_model(model)
        model.config.save_pretrained(folder)
        for trace in self.traces:
            total = trace.new + (trace.past or 0)
            positions = torch.arange(total - trace.new, total).repeat(BATCH, 1)
            inputs: dict[str, Any] = {
                "input_ids": _tokens(trace.new),
                "attention_mask": torch.ones(BATCH, total, dtype=torch.int64),
                "position_ids": positions,
            }
            if trace.past is not None:
                inputs["past_key_values"] = self._past(model, trace.past)
            program = torch.onnx.export(
                model,
                (),
                kwargs={**inputs, "use_cache": True},
                dynamo=True,
                dynamic_shapes=_free_axes(trace),
                opset_version=self.opset,
                verbose=False,
            )
            program.save(folder / trace.file)

    def _past(self, model: Any, length: int) -> Any:
        """Returns a cache of random numbers."""
        import torch
        from transformers import DynamicCache

        config = model.config
        shape = (BATCH, config.num_key_value_heads, length, config.hidden_size // config.num_attention_heads)
        layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]
        return (_keys_first_cache() if self.keys_first else DynamicCache)(layers)


def _free_axes(trace: Trace) -> dict[str, Any] | None:
    """Returns the axes of the arguments that a trace leaves free; a single new token cannot be one."""
    from torch.export import Dim

    if trace.dims == "none":
        return None
    batch, new, past, total = (
        (Dim("batch"), Dim("sequence", max=512), Dim("past", max=512), Dim("total", max=1024))
        if trace.dims == "named"
        else [Dim.AUTO] * 4
    )
    tokens = {0: batch, 1: new} if trace.new > 1 else {0: batch}
    axes = {"input_ids": tokens, "attention_mask": {0: batch, 1: total}, "position_ids": tokens, "use_cache": None}
    return axes if trace.past is None else {**axes, "past_key_values": [{0: batch, 2: past}] * 4}


@cache
def _keys_first_cache() -> type:
    """Returns a cache class that torch flattens as all keys, then all values, as hand-written scripts do."""
    from torch.utils import _pytree as pytree
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class KeysFirstCache(DynamicCache):
        pass

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [layer.keys for layer in value.layers] + [layer.values for layer in value.layers], None

    def unflatten(leaves: Any, _: None) -> Any:
        value = KeysFirstCache()
        for keys, values in zip(leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values, layer.is_initialized = keys, values, True
            layer.dtype, layer.device = keys.dtype, keys.device
            value.layers.append(layer)
        return value

    def flatten_with_keys(value: Any) -> tuple[list[Any], None]:
        leaves, context = flatten(value)
        return [(pytree.SequenceKey(index), leaf) for index, leaf in enumerate(leaves)], context

    pytree.register_pytree_node(KeysFirstCache, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
    return KeysFirstCache


# --- recipes --------------------------------------------------------------------------------------------------------

RECIPES: dict[str, Generation | Dynamo] = {
    "llama": Generation(LLAMA),
    "gpt2": Generation(GPT2),
    "t5": Generation(T5, "source", decoder_tokens=3),
    "marian": Generation(MARIAN, "source", decoder_tokens=3),
    "bart": Generation(BART, "source", decoder_tokens=3),
    "whisper": Generation(WHISPER, "features", decoder_tokens=3),
    "t5-frozen": Generation(T5, "source"),
    "marian-frozen": Generation(MARIAN, "source"),
    "bart-frozen": Generation(BART, "source"),
    "whisper-frozen": Generation(WHISPER, "features"),
    "llama-padded": Generation(LLAMA, "padded"),
    "llama-multi": Generation(LLAMA, "padded", multi_token_decode=True),
    "llama-fixed": Generation(LLAMA, dims="none"),
    "llama-static": Generation(LLAMA, capacity=CAPACITY),
    "gpt2-static": Generation(GPT2, multi_token_decode=True, capacity=CAPACITY),
    "mistral-static": Generation(MISTRAL, capacity=CAPACITY),
    "qwen3": Generation(QWEN3),
    "mistral": Generation(MISTRAL),
    "gemma2": Generation(GEMMA2),
    "lfm2": Generation(LFM2),
    "mamba": Generation(MAMBA),
    "llama-dynamo": Dynamo((Trace("model.onnx", 3, 5),)),
    "llama-dynamo-opset23": Dynamo((Trace("model.onnx", 3, 5),), opset=23),
    "llama-dynamo-named": Dynamo((Trace("model.onnx", 3, 5, "named"),)),
    "llama-dynamo-keys-first": Dynamo((Trace("model.onnx", 3, 5),), keys_first=True),
    "llama-dynamo-pair": Dynamo((Trace("prefill.onnx", 3, None), Trace("decode.onnx", 1, 5))),
    "llama-dynamo-fixed": Dynamo((Trace("prefill.onnx", 5, None, "none"), Trace("decode.onnx", 1, 5, "none"))),
}
"""What is made when no name is given."""

MORE_RECIPES: dict[str, Generation | Dynamo] = {
    "gemma3": Generation(GEMMA3),
    "bamba": Generation(BAMBA),
    "falcon-h1": Generation(FALCON_H1),
    "llama-listed": Generation(LLAMA, "padded", dims="listed"),
    "lfm2-multi": Generation(LFM2, multi_token_decode=True),
    "marian-static": Generation(MARIAN, "source", decoder_tokens=3, capacity=CAPACITY),
    "qwen3-next": Generation(QWEN3_NEXT),
    "llama-dynamo-empty": Dynamo((Trace("model.onnx", 3, 0),)),
    "llama-dynamo-opset24": Dynamo((Trace("model.onnx", 3, 5),), opset=24),
}
"""What is made only when named: more of the same kinds, and models with a recurrent scan, which take long to trace."""

FUSED = {"llama": LLAMA, "gpt2": GPT2, "qwen3": QWEN3, "mistral": MISTRAL, "gemma2": GEMMA2}
FUSED_PAIRS = {"t5": T5, "marian": MARIAN, "bart": BART}
for _name, _checkpoint in FUSED.items():
    RECIPES[f"{_name}-cpu"] = Generation(_checkpoint, "padded", multi_token_decode=True, fusions="cpu")
for _name, _checkpoint in FUSED_PAIRS.items():
    RECIPES[f"{_name}-cpu"] = Generation(_checkpoint, "source", decoder_tokens=3, fusions="cpu")
RECIPES["llama-webgpu"] = Generation(LLAMA, "padded", multi_token_decode=True, fusions="webgpu")


def make(name: str, folder: Path, checkpoints: Path | None) -> bool:
    """Makes one export.

    Args:
        name: Name of the recipe.
        folder: What is replaced.
        checkpoints: Folder that receives the checkpoint as `checkpoints / name`, or None to drop it.

    Returns:
        Whether it worked; `folder / "failed.txt"` says why not.
    """
    recipe = {**RECIPES, **MORE_RECIPES}[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        model = recipe.checkpoint.build()
        if checkpoints is not None:
            model.save_pretrained(checkpoints / name)
        with contextlib.redirect_stdout(io.StringIO()):
            recipe.write(model, folder)
    except Exception as error:
        causes = [error, error.__cause__] if error.__cause__ else [error]
        said = "".join(f"{type(cause).__name__}: {str(cause)[:500]}\n" for cause in causes)
        (folder / "failed.txt").write_text(said, encoding="utf-8", newline="\n")
        return False
    return True


def main() -> int:
    """Reads the command line, makes the exports asked for and returns the exit code."""
    known = {**RECIPES, **MORE_RECIPES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the exports")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make; known: {', '.join(known)}")
    parser.add_argument("--keep-checkpoint", type=Path, metavar="DIR", help="save the PyTorch checkpoints as DIR/NAME")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"no such recipe: {', '.join(unknown)}; there are {', '.join(known)}")

    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gc.disable()  # a trace makes many objects that live until its end: collecting after each saves a tenth of the time
    failed = False
    for name in args.names or RECIPES:
        start = time.monotonic()
        made = make(name, args.out / name, args.keep_checkpoint)
        gc.collect()
        failed = failed or not made
        print(f"{name}: {time.monotonic() - start:.0f} s{'' if made else ', failed'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
