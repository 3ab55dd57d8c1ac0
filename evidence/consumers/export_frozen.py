"""Exports a checkpoint with the exporter of transformers as its documentation does: CHECKPOINT OUT.

Its own sample starts the decoder of an encoder-decoder with one token, of which torch makes a constant.
"""

import contextlib
import io
import json
import sys

import torch
import transformers
from transformers.exporters import OnnxConfig, OnnxExporter

checkpoint, out = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(checkpoint)
model = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint).eval()
if model.main_input_name == "input_features":
    sample = {"input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)}
else:
    ids = torch.arange(3, 21).reshape(2, 9)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
with contextlib.redirect_stdout(io.StringIO()):
    OnnxExporter().export_for_generation(model, sample, OnnxConfig(dynamic=True)).save_pretrained(out)
print(json.dumps(out))
