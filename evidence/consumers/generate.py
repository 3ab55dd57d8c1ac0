"""Generates greedily with Optimum on an export and with PyTorch on its checkpoint.

    python generate.py EXPORT CHECKPOINT

Runs in the environment that made the export. Prints one JSON document: the tokens of PyTorch, the file that Optimum
took as decoder and, without and with I/O binding, Optimum's tokens, the length of the cache it ended with, and the
largest distance between its logits and PyTorch's beside the spread of the latter.
"""

import json
import sys

import numpy as np
import optimum.onnxruntime
import torch
import transformers

NEW_TOKENS = 16
CLASSES = {
    "marian": ("ORTModelForSeq2SeqLM", "MarianMTModel"),
    "t5": ("ORTModelForSeq2SeqLM", "T5ForConditionalGeneration"),
    "bart": ("ORTModelForSeq2SeqLM", "BartForConditionalGeneration"),
    "whisper": ("ORTModelForSpeechSeq2Seq", "WhisperForConditionalGeneration"),
    "gpt2": ("ORTModelForCausalLM", "GPT2LMHeadModel"),
    "llama": ("ORTModelForCausalLM", "LlamaForCausalLM"),
}


def inputs(config):
    """Returns the twelve inputs that fixtures/exports/README.md names for this kind of model."""
    rng = np.random.default_rng(99)
    if config.model_type == "whisper":
        return {"input_features": torch.from_numpy(rng.normal(0, 1, (12, 8, 60)).astype(np.float32))}
    tokens = torch.from_numpy(rng.integers(3, 126, (12, 9 if config.is_encoder_decoder else 4)))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def load(config, folder, bound):
    """Opens an export with Optimum; seq2seq models by their merged decoder."""
    merged = {"use_merged": True} if config.is_encoder_decoder else {}
    model = getattr(optimum.onnxruntime, CLASSES[config.model_type][0]).from_pretrained(
        folder, use_cache=True, use_io_binding=bound, **merged
    )
    if config.model_type == "t5":
        # Optimum takes the head width to be d_model / num_heads. A T5 may have another one, and its first call is then
        # refused for the width of the empty past (huggingface/optimum#1523).
        model.decoder.embed_size_per_head = config.d_kv
    return model


def generate(model, feeds):
    """Returns what greedy decoding gives: tokens, logits, and the keys and values at the end."""
    return model.generate(
        **feeds,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
    )


def main(export, checkpoint):
    """Prints what both decode."""
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    original = getattr(transformers, CLASSES[config.model_type][1]).from_pretrained(checkpoint).eval()
    expected = generate(original, inputs(config))
    expected_logits = torch.stack(expected.logits)
    runs = []
    for bound in (False, True):
        model = load(config, export, bound)
        found = generate(model, inputs(config))
        runs.append(
            {
                "io_binding": bound,
                "tokens": found.sequences.tolist(),
                "cache_length": found.past_key_values[0][0].shape[2],
                "distance": float((torch.stack(found.logits) - expected_logits).abs().max()),
                "spread": float(expected_logits.max() - expected_logits.min()),
            }
        )
    decoder = model.decoder if config.is_encoder_decoder else model
    print(json.dumps({"decoder": str(decoder.path), "pytorch": expected.sequences.tolist(), "optimum": runs}))


main(*sys.argv[1:])
