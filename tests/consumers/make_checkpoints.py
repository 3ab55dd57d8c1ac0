"""Builds the checkpoints that the real exports were made of: `make_checkpoints.py OUT NAME...`.

Each becomes OUT/NAME, and OUT/NAME-changed with one weight matrix a little larger.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))
import make_exports

out = Path(sys.argv[1])
for name in sys.argv[2:]:
    recipe = make_exports.BY_NAME[name]
    config = getattr(transformers, recipe.config_class)(**recipe.config)
    model = getattr(transformers, recipe.model_class)(config).eval()
    make_exports._randomise(model, recipe)
    model.save_pretrained(out / name)
    matrix = next(weight for key, weight in model.named_parameters() if ".1." in key and weight.dim() > 1)
    with torch.no_grad():
        matrix.mul_(1.02)
    model.save_pretrained(out / f"{name}-changed")
print(json.dumps(sys.argv[2:]))
