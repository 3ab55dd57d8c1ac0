"""Exports encoder-decoders with transformers 5: with_encoder.py ZOO OUT NAME...

ZOO is the folder of transformers_exports.py, whose checkpoints are taken. Each becomes OUT/checkpoints/NAME and
OUT/NAME-beside, with the encoder as a graph of its own. The first also becomes OUT/NAME-inside, whose first step holds
the encoder.
"""

import json
import logging
import shutil
import sys
import warnings
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import torch
import transformers
import transformers_exports
from transformers.exporters import OnnxConfig, OnnxExporter

DYNAMIC = OnnxConfig(dynamic=True)


def export(model, inputs, folder, name):
    """Writes one graph as `folder / name`, its weights beside it."""
    made = folder / "made"
    OnnxExporter().export(model, inputs, DYNAMIC).save_pretrained(made)
    shutil.move(made / "model.onnx", folder / name)
    if (made / "model.onnx.data").exists():
        shutil.move(made / "model.onnx.data", folder / "model.onnx.data")
    shutil.rmtree(made)


def main(out, names):
    """Writes the exports."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=logging.ERROR)
    transformers.logging.set_verbosity_error()
    for name in names:
        recipe = transformers_exports.RECIPES[name]
        model = recipe.checkpoint.build()
        model.save_pretrained(out / "checkpoints" / name)
        beside, inside = out / f"{name}-beside", out / f"{name}-inside"
        recipe.write(model, beside)
        sample = recipe._sample()
        encoder = {key: value for key, value in sample.items() if not key.startswith("decoder_")}
        if name == names[0]:
            shutil.copytree(beside, inside, ignore=shutil.ignore_patterns("prefill*"))
            tokens = {"decoder_input_ids": transformers_exports._tokens(4), "use_cache": True}
            export(model, {**encoder, **tokens}, inside, "prefill.onnx")
        export(model.get_encoder(), encoder, beside, "encoder.onnx")
    print(json.dumps(names))


main(Path(sys.argv[2]), sys.argv[3:])
