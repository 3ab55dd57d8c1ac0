"""Exports tiny models with the conversion scripts of onnxruntime.transformers, and fuses exports with its optimizer.

    uv run --isolated --no-project --python 3.11 --with REQUIREMENT ... \\
        python evidence/health/ort_exports.py OUT NAME ... [--sources EXPORTS]

The requirements are those of `REQUIREMENTS`. `gpt2` and `t5` are made by the script of that model family,
from the checkpoint of evidence/zoo/optimum_exports.py. `NAME-fused` rewrites EXPORTS/NAME, an export by Optimum, with
`optimize_model`. One that fails leaves its error in OUT/NAME/failed.txt; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

PYTHON = "3.11"
REQUIREMENTS = (
    *("torch==2.13.0", "transformers==4.46.3", "onnx==1.23.2", "onnxruntime==1.31.1", "numpy==2.4.6"),
    *("onnxscript==0.7.2", "protobuf==7.36.2", "coloredlogs", "packaging", "psutil", "sympy"),
)
CONVERTED = ("gpt2", "t5")
"""Model families with a conversion script that needs no tokenizer beside the checkpoint."""
FUSED = {
    "gpt2": "gpt2",
    "llama": "gpt2",
    "qwen2": "gpt2",
    "gpt_neox": "gpt2",
    "bart": "bart",
    "marian": "bart",
    "t5": "t5",
}
"""The model type that the optimizer is told for each export by Optimum."""
HEADS = ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads")
WIDTHS = ("hidden_size", "n_embd", "d_model")
"""What configurations call the number of heads, and the width of all of them."""
NAMES = (*CONVERTED, *(f"{name}-fused" for name in FUSED))


def convert(family: str, folder: Path) -> None:
    """Runs the conversion script of a model family on a checkpoint.

    Raises:
        RuntimeError: the script failed; with the last line that it said.
    """
    import torch_exports

    with tempfile.TemporaryDirectory(prefix="ort-exports-") as scratch:
        checkpoint = Path(scratch, family)
        model = torch_exports.build(family)
        model.save_pretrained(checkpoint)
        module = f"onnxruntime.transformers.models.{family}.convert_to_onnx"
        target = folder / "model.onnx" if family == "gpt2" else folder
        command = [sys.executable, "-m", module, "-m", str(checkpoint), "--output", str(target)]
        command += ["--cache_dir", str(Path(scratch, "cache"))]
        done = subprocess.run(command, cwd=scratch, check=False, capture_output=True, encoding="utf-8", timeout=900)
        if done.returncode or not list(folder.rglob("*.onnx")):
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was written"]
            raise RuntimeError(said[-1])
        model.config.save_pretrained(folder)


def fuse(source: Path, model_type: str, folder: Path) -> None:
    """Rewrites every graph of an export with fused operators."""
    import json

    from onnxruntime.transformers.fusion_options import FusionOptions
    from onnxruntime.transformers.optimizer import optimize_model

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    heads = next(config[key] for key in HEADS if key in config)
    width = heads * config["d_kv"] if "d_kv" in config else next(config[key] for key in WIDTHS if key in config)
    shutil.copyfile(source / "config.json", folder / "config.json")
    for file in sorted(source.glob("*.onnx")):
        options = FusionOptions(model_type)
        optimized = optimize_model(
            str(file), model_type, num_heads=heads, hidden_size=width, optimization_options=options, opt_level=0
        )
        optimized.save_model_to_file(str(folder / file.name))


def main() -> int:
    """Reads the command line, makes the exports asked for and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="receives each export as OUT/NAME")
    parser.add_argument("names", nargs="+", metavar="NAME", choices=NAMES)
    parser.add_argument("--sources", type=Path, metavar="EXPORTS", help="the exports by Optimum that are fused")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    failed = False
    for name in args.names:
        start = time.monotonic()
        folder = (args.out / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            source = name.removesuffix("-fused")
            if source == name:
                convert(name, folder)
            else:
                fuse(args.sources / source, FUSED[source], folder)
        except Exception as error:
            failed = True
            shutil.rmtree(folder)
            folder.mkdir()
            (folder / "failed.txt").write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
