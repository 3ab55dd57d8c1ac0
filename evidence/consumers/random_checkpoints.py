"""Saves PyTorch checkpoints with random weights, those that the zoo's exports are made of: `OUT NAME ...`.

Each becomes OUT/NAME, with a tokenizer of whole words beside it, which the builder of onnxruntime-genai asks for.
"""

import copy
import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "evidence" / "zoo"))
import genai_exports
import optimum_exports

out = Path(sys.argv[1])
for name in sys.argv[2:]:
    if name == "llama-genai":
        genai_exports.make_checkpoint(genai_exports.RECIPES["llama"], out / name)
        continue
    recipe = optimum_exports.BY_NAME[name]
    torch.manual_seed(optimum_exports.SEED)
    model_class = getattr(transformers, recipe.model_class)
    model = model_class(model_class.config_class(**copy.deepcopy(recipe.config))).eval()
    optimum_exports._randomise(model, recipe.spreads)
    model.save_pretrained(out / name)
print(json.dumps(sys.argv[2:]))
