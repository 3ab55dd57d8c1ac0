"""Decodes greedily with PyTorch on a checkpoint: CHECKPOINT INPUTS.json STEPS. Prints the new tokens as JSON."""

import json
import sys
from pathlib import Path

import torch
import transformers

inputs, steps = json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
model = getattr(transformers, config.architectures[0]).from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([inputs["input_ids"]])
with torch.inference_mode():
    fed = torch.tensor([[inputs["start"]]]) if config.is_encoder_decoder else ids
    encoded = {"input_ids": ids} if config.is_encoder_decoder else {}
    name = "decoder_input_ids" if config.is_encoder_decoder else "input_ids"
    tokens = []
    for _ in range(steps):  # no cache, no processors of logits: what each word is by itself
        tokens.append(int(model(**encoded, **{name: fed}, use_cache=False).logits[0, -1].argmax()))
        fed = torch.cat([fed, torch.tensor([[tokens[-1]]])], dim=1)
print(json.dumps(tokens))
