"""Exports tiny models of transformers with torch.onnx.export alone, as a script that people write by hand does.

    uv run --isolated --no-project --python 3.11 --with REQUIREMENT ... \\
        python evidence/health/torch_exports.py torchscript|dynamo OUT [NAME ...]

The requirements are those of `REQUIREMENTS` and a release of transformers. The cache goes in and out as one key and
one value a layer, named as Optimum names them. Configurations and weights are those of evidence/zoo/optimum_exports.py.
An export that fails leaves its error in OUT/NAME/failed.txt and does not stop the others; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))

import optimum_exports

PYTHON = "3.11"
REQUIREMENTS = ("torch==2.13.0", "onnx==1.23.2", "onnxscript==0.7.2", "onnx-ir==1.1.0", "numpy==2.4.6")
ARCHITECTURES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi", "gpt_neox", "opt", "gemma2", "bloom")
"""Names in evidence/zoo/optimum_exports.py; all are decoders alone."""

BATCH, NEW, PAST = 2, 3, 5
"""Sizes of the sample inputs: rows, new tokens, tokens of the past. All differ, and none is 1."""
OPSET = 18


def build(name: str) -> Any:
    """The model with its random weights, which computes its attention node by node."""
    import torch
    import transformers

    architecture = optimum_exports.BY_NAME[name]
    torch.manual_seed(optimum_exports.SEED)
    model_class = getattr(transformers, architecture.model_class)
    config = model_class.config_class(**copy.deepcopy(architecture.config))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    optimum_exports._randomise(model, architecture.spreads)
    return model


def make_wrapper(model: Any) -> Any:
    """A module that takes the cache as separate tensors and returns it in the same order."""
    import torch
    from transformers import DynamicCache

    class WithCache(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, past: list[Any]) -> tuple[Any, ...]:
            cache = DynamicCache.from_legacy_cache(tuple(zip(past[0::2], past[1::2], strict=True)))
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            pairs = out.past_key_values
            legacy = pairs.to_legacy_cache() if hasattr(pairs, "to_legacy_cache") else pairs
            return (out.logits, *(tensor for layer in legacy for tensor in layer))

    return WithCache()


def export(name: str, folder: Path, exporter: str) -> None:
    """Writes `model.onnx` and `config.json` into `folder`."""
    import torch

    model = build(name)
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    past = [torch.randn(BATCH, kv_heads, PAST, width) for _ in range(2 * layers)]
    ids = torch.randint(3, config.vocab_size, (BATCH, NEW))
    mask = torch.ones(BATCH, PAST + NEW, dtype=torch.int64)
    kinds = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask", *(f"past_key_values.{kind}" for kind in kinds)]
    outputs = ["logits", *(f"present.{kind}" for kind in kinds)]
    options: dict[str, Any] = {"input_names": inputs, "output_names": outputs, "opset_version": OPSET}
    config.save_pretrained(folder)
    if exporter == "torchscript":
        axes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}
        axes |= {f"past_key_values.{kind}": {0: "batch", 2: "past"} for kind in kinds}
        axes |= {f"present.{kind}": {0: "batch", 2: "total"} for kind in kinds}
        axes["logits"] = {0: "batch", 1: "sequence"}
        options |= {"dynamo": False, "dynamic_axes": axes}
        torch.onnx.export(make_wrapper(model), (ids, mask, past), str(folder / "model.onnx"), **options)
    else:
        auto = torch.export.Dim.AUTO
        shapes = ({0: auto, 1: auto}, {0: auto, 1: auto}, [{0: auto, 2: auto} for _ in past])
        options |= {"dynamo": True, "dynamic_shapes": shapes, "verbose": False}
        torch.onnx.export(make_wrapper(model), (ids, mask, past), **options).save(folder / "model.onnx")


def main() -> int:
    """Reads the command line, makes the exports asked for and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("exporter", choices=["torchscript", "dynamo"])
    parser.add_argument("out", type=Path, metavar="OUT", help="receives each export as OUT/NAME")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to make; all by default")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    failed = False
    for name in args.names or ARCHITECTURES:
        start = time.monotonic()
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            export(name, folder, args.exporter)
        except Exception as error:
            failed = True
            (folder / "failed.txt").write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
