"""Exports tiny models of many architectures with Hugging Face Optimum, inside an environment that has these packages.

    uv run --isolated --no-project --python 3.11 --with REQUIREMENT ... \\
        python evidence/zoo/optimum_exports.py OUT [NAME ...]

The requirements are those of `REQUIREMENTS`. Every export lies in OUT/NAME. Weights are random with a fixed seed, so
no model hub is asked. One that fails leaves its error in OUT/NAME/failed.txt, the others are made all the same, and the
exit code is 1. Only pix2struct needs pillow. With PYTHONHASHSEED=0 in the environment, the merged decoders are the same
to the byte every time.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PYTHON = "3.11"
REQUIREMENTS = (
    "torch==2.13.0",
    "optimum==2.1.0",
    "optimum-onnx==0.1.0",
    "transformers==4.57.6",
    "onnx==1.23.2",
    "onnxruntime==1.31.1",
    "numpy==2.4.6",
    "protobuf==7.36.2",
    "pillow==13.0.0",
)
"""Packages of the isolated environment."""

SEED = 11
SPREADS = {"bias": 0.1, "encoder_attn.out_proj": 0.15, "shared": 1.0, "": 0.3}
"""Chosen so that neither biases, nor the encoder, nor the latest token drown the past tokens."""

TEXT = "text2text-generation-with-past"
SPEECH = "automatic-speech-recognition-with-past"
IMAGE = "image-to-text-with-past"
CAUSAL = "text-generation-with-past"
AUDIO = "text-to-audio"


@dataclass(frozen=True)
class Architecture:
    """One architecture of the zoo.

    Attributes:
        name: Folder below the output folder.
        task: Task handed to Optimum's exporter.
        model_class: Name of the model class in transformers.
        config: Arguments of the configuration class.
        spreads: Standard deviation of the random weights: the first key that is part of a weight's name decides.
        arguments: More arguments of the exporter, such as shapes that it cannot read off the configuration.
        save_companion: Saves what the exporter wants beside the model; gets the folder of the checkpoint.
    """

    name: str
    task: str
    model_class: str
    config: dict[str, Any]
    spreads: dict[str, float] = field(default_factory=lambda: SPREADS)
    arguments: dict[str, Any] = field(default_factory=dict)
    save_companion: Callable[[Path], None] | None = None


BART = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
"""Shared by Bart and its many descendants."""

T5 = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
T5_SPREADS = {"shared": 1.5, ".q.": 0.1, "": 0.6}

GPT2 = {
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
"""Two query heads share a key and value head."""

FALCON = {**LLAMA, "new_decoder_architecture": False}

VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
CROSS = {"is_decoder": True, "add_cross_attention": True}
START = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _save_pix2struct_processor(checkpoint: Path) -> None:
    """Saves the processor that the exporter reads the number and size of the patches from."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram
    from transformers import Pix2StructImageProcessor, Pix2StructProcessor, T5TokenizerFast

    model = Unigram([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)], unk_id=2)
    tokenizer = T5TokenizerFast(tokenizer_object=Tokenizer(model), extra_ids=0)
    image_processor = Pix2StructImageProcessor(patch_size={"height": 4, "width": 4}, max_patches=16)
    Pix2StructProcessor(image_processor, tokenizer).save_pretrained(checkpoint)


def _save_speecht5_vocoder(checkpoint: Path) -> None:
    """Saves the vocoder, without which the exporter refuses the model, as the folder `vocoder` beside it."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    config = SpeechT5HifiGanConfig(
        model_in_dim=8,
        upsample_initial_channel=16,
        upsample_rates=[2],
        upsample_kernel_sizes=[4],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
    )
    SpeechT5HifiGan(config).save_pretrained(checkpoint.with_name("vocoder"))


ARCHITECTURES = (
    Architecture("marian", TEXT, "MarianMTModel", {**BART, "scale_embedding": True}),
    Architecture("t5", TEXT, "T5ForConditionalGeneration", T5, T5_SPREADS),
    Architecture("bart", TEXT, "BartForConditionalGeneration", BART),
    Architecture(
        "whisper",
        SPEECH,
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "max_target_positions": 64,
            "begin_suppress_tokens": None,
        },
        arguments={"nb_max_frames": 60, "feature_size": 8},
    ),
    Architecture("gpt2", CAUSAL, "GPT2LMHeadModel", GPT2),
    Architecture("llama", CAUSAL, "LlamaForCausalLM", GROUPED),
    Architecture("mbart", TEXT, "MBartForConditionalGeneration", BART),
    Architecture("m2m_100", TEXT, "M2M100ForConditionalGeneration", BART),
    Architecture("pegasus", TEXT, "PegasusForConditionalGeneration", BART),
    Architecture("blenderbot", TEXT, "BlenderbotForConditionalGeneration", BART),
    Architecture("blenderbot-small", TEXT, "BlenderbotSmallForConditionalGeneration", BART),
    Architecture("bigbird_pegasus", TEXT, "BigBirdPegasusForConditionalGeneration", {**BART, "block_size": 4}),
    Architecture("mt5", TEXT, "MT5ForConditionalGeneration", T5, T5_SPREADS),
    Architecture("longt5", TEXT, "LongT5ForConditionalGeneration", {**T5, "local_radius": 6}, T5_SPREADS),
    Architecture(
        "bert2gpt2",
        TEXT,
        "EncoderDecoderModel",
        {"encoder": {**LLAMA, "model_type": "bert"}, "decoder": {**GPT2, **CROSS, "model_type": "gpt2"}, **START},
    ),
    Architecture(
        "bert2bart",
        TEXT,
        "EncoderDecoderModel",
        {"encoder": {**LLAMA, "model_type": "bert"}, "decoder": {**BART, **CROSS, "model_type": "bart"}, **START},
    ),
    Architecture(
        "speech_to_text",
        SPEECH,
        "Speech2TextForConditionalGeneration",
        {
            **BART,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 200,
            "max_target_positions": 64,
        },
        arguments={"audio_sequence_length": 64},
    ),
    Architecture(
        "moonshine",
        SPEECH,
        "MoonshineForConditionalGeneration",
        {
            **LLAMA,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
        },
    ),
    Architecture(
        "trocr",
        IMAGE,
        "VisionEncoderDecoderModel",
        {
            "encoder": VIT,
            "decoder": {**BART, **CROSS, "model_type": "trocr", "cross_attention_hidden_size": 32},
            **START,
        },
    ),
    Architecture(
        "vit-gpt2",
        IMAGE,
        "VisionEncoderDecoderModel",
        {"encoder": VIT, "decoder": {**GPT2, **CROSS, "model_type": "gpt2"}, **START},
    ),
    Architecture(
        "donut",
        IMAGE,
        "VisionEncoderDecoderModel",
        {
            "encoder": {
                "model_type": "donut-swin",
                "image_size": [32, 32],
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [1, 1],
                "num_heads": [2, 4],
                "window_size": 4,
            },
            "decoder": {**BART, **CROSS, "model_type": "mbart"},
            **START,
        },
    ),
    Architecture(
        "pix2struct",
        IMAGE,
        "Pix2StructForConditionalGeneration",
        {
            "text_config": {
                "vocab_size": 128,
                "hidden_size": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
            },
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 48,
                "d_ff": 64,
                "d_kv": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "seq_len": 16,
                "patch_size": 4,
            },
            "is_encoder_decoder": True,
            **START,
        },
        save_companion=_save_pix2struct_processor,
    ),
    Architecture(
        "musicgen",
        AUDIO,
        "MusicgenForConditionalGeneration",
        {
            "text_encoder": {**T5, "model_type": "t5"},
            "audio_encoder": {
                "model_type": "encodec",
                "num_filters": 4,
                "hidden_size": 8,
                "codebook_size": 64,
                "codebook_dim": 8,
                "num_lstm_layers": 1,
                "upsampling_ratios": [2, 2],
                "target_bandwidths": [24.0],
                "sampling_rate": 200,
                "chunk_length_s": None,
            },
            "decoder": {
                **LLAMA,
                "model_type": "musicgen_decoder",
                "vocab_size": 64,
                "ffn_dim": 64,
                "num_codebooks": 4,
                "bos_token_id": 64,
                "pad_token_id": 64,
            },
        },
    ),
    Architecture(
        "speecht5",
        AUDIO,
        "SpeechT5ForTextToSpeech",
        {
            **BART,
            "hidden_size": 32,
            "num_mel_bins": 8,
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 16,
            "max_text_positions": 64,
            "max_speech_positions": 64,
        },
        arguments={"model_kwargs": {"vocoder": "vocoder"}},
        save_companion=_save_speecht5_vocoder,
    ),
    Architecture("bart-causal", CAUSAL, "BartForCausalLM", BART),
    Architecture("gptj", CAUSAL, "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    Architecture("gpt_bigcode", CAUSAL, "GPTBigCodeForCausalLM", GPT2),
    Architecture("codegen", CAUSAL, "CodeGenForCausalLM", {**GPT2, "rotary_dim": 4}),
    Architecture(
        "gpt_neo",
        CAUSAL,
        "GPTNeoForCausalLM",
        {**LLAMA, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    Architecture("gpt_neox", CAUSAL, "GPTNeoXForCausalLM", LLAMA),
    Architecture("opt", CAUSAL, "OPTForCausalLM", {**LLAMA, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    Architecture("bloom", CAUSAL, "BloomForCausalLM", {**LLAMA, "n_layer": 2, "n_head": 4}),
    Architecture("falcon", CAUSAL, "FalconForCausalLM", {**FALCON, "multi_query": True, "alibi": False}),
    Architecture("falcon-alibi", CAUSAL, "FalconForCausalLM", {**FALCON, "multi_query": False, "alibi": True}),
    Architecture(
        "mpt",
        CAUSAL,
        "MptForCausalLM",
        {"vocab_size": 128, "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64},
    ),
    Architecture("mistral", CAUSAL, "MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    Architecture("qwen2", CAUSAL, "Qwen2ForCausalLM", GROUPED),
    Architecture("qwen3", CAUSAL, "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    Architecture(
        "qwen3_moe",
        CAUSAL,
        "Qwen3MoeForCausalLM",
        {**GROUPED, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture("phi", CAUSAL, "PhiForCausalLM", LLAMA),
    Architecture("phi3", CAUSAL, "Phi3ForCausalLM", GROUPED),
    Architecture("gemma", CAUSAL, "GemmaForCausalLM", {**LLAMA, "num_key_value_heads": 1, "head_dim": 8}),
    Architecture("gemma2", CAUSAL, "Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    Architecture("gemma3_text", CAUSAL, "Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    Architecture(
        "gpt_oss",
        CAUSAL,
        "GptOssForCausalLM",
        {**GROUPED, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture("olmo", CAUSAL, "OlmoForCausalLM", LLAMA),
    Architecture("olmo2", CAUSAL, "Olmo2ForCausalLM", GROUPED),
    Architecture("cohere", CAUSAL, "CohereForCausalLM", GROUPED),
    Architecture("granite", CAUSAL, "GraniteForCausalLM", GROUPED),
    Architecture("stablelm", CAUSAL, "StableLmForCausalLM", GROUPED),
    Architecture(
        "deepseek_v3",
        CAUSAL,
        "DeepseekV3ForCausalLM",
        {
            **LLAMA,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 10,
            "first_k_dense_replace": 2,
        },
    ),
    Architecture("glm", CAUSAL, "GlmForCausalLM", {**GROUPED, "head_dim": 8}),
    Architecture("helium", CAUSAL, "HeliumForCausalLM", {**GROUPED, "head_dim": 8}),
    Architecture("nemotron", CAUSAL, "NemotronForCausalLM", GROUPED),
    Architecture("smollm3", CAUSAL, "SmolLM3ForCausalLM", GROUPED),
    Architecture("arcee", CAUSAL, "ArceeForCausalLM", GROUPED),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def export(architecture: Architecture, folder: Path) -> None:
    """Builds the checkpoint below the working folder and exports it into `folder`.

    The path of the checkpoint is relative because the exporter writes it into config.json.
    """
    import torch
    import transformers
    from optimum.exporters.onnx import main_export

    torch.manual_seed(SEED)
    model_class = getattr(transformers, architecture.model_class)
    model = model_class(model_class.config_class(**copy.deepcopy(architecture.config))).eval()
    _randomise(model, architecture.spreads)
    checkpoint = Path(architecture.name)
    model.save_pretrained(checkpoint)
    if architecture.save_companion is not None:
        architecture.save_companion(checkpoint)
    main_export(
        str(checkpoint),
        output=folder,
        task=architecture.task,
        device="cpu",
        local_files_only=True,
        do_validation=False,
        **architecture.arguments,
    )


def _randomise(model: Any, spreads: dict[str, float]) -> None:
    """Gives the model weights so far apart that its logits feel every token of the past.

    NumPy draws the numbers, because torch's generator gives other ones on other processors. Norms stay as they are.
    """
    import numpy as np
    import torch

    rng = np.random.default_rng(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if not weight.requires_grad or "norm" in name.lower() or ".ln_" in name:
                continue
            std = next(std for part, std in spreads.items() if part in name)
            weight.copy_(torch.from_numpy(rng.normal(0, std, tuple(weight.shape)).astype("float32")))


def main() -> int:
    """Reads the command line, makes the exports asked for and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that receives one folder per architecture")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make; all by default: {', '.join(BY_NAME)}")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(BY_NAME)):
        parser.error(f"no such architecture: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    out = args.out.resolve()
    failed = False
    for name in args.names or BY_NAME:
        start = time.monotonic()
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
            os.chdir(scratch)
            try:
                export(BY_NAME[name], folder)
                outcome = "made"
            except Exception as error:
                failed = True
                outcome = " ".join(f"{type(error).__name__}: {error}".split())
                shutil.rmtree(folder)
                folder.mkdir()
                (folder / "failed.txt").write_text(f"{outcome}\n", encoding="utf-8")
            os.chdir(out)
        print(f"{name}: {outcome}, {time.monotonic() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
