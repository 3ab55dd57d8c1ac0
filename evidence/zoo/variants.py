"""Rewrites exports with common tools, inside an environment that has them.

    uv run --isolated --no-project --python 3.11 --with REQUIREMENT ... \\
        python evidence/zoo/variants.py EXPORTS OUT NAME:KIND ...

The requirements are those of `REQUIREMENTS`; only the kind onnxslim needs more than onnx and onnxruntime. Every .onnx
file of EXPORTS/NAME is rewritten into OUT/NAME-KIND, and config.json comes along. A file that the tool refuses is named
in OUT/NAME-KIND/failed.txt with the error, the others are made all the same, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PYTHON = "3.11"
REQUIREMENTS = ("onnx==1.23.2", "onnxruntime==1.31.1", "onnxslim==0.1.98", "numpy==2.4.6", "protobuf==7.36.2")
"""Packages of the isolated environment."""


def _quantize(source: Path, target: Path) -> None:
    """Writes weights as int8, also those inside the two branches of a merged decoder."""
    from onnxruntime.quantization import quantize_dynamic

    # It writes beside what it reads, where another test may be reading too.
    with tempfile.TemporaryDirectory() as scratch:
        alone = shutil.copy(source, scratch)
        quantize_dynamic(Path(alone), target, extra_options={"EnableSubgraph": True})


def _optimize_basic(source: Path, target: Path) -> None:
    """Saves what a session makes of the graph with standard operators only."""
    import onnxruntime

    _save_optimized(source, target, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC)


def _optimize_all(source: Path, target: Path) -> None:
    """Saves what a session makes of the graph with every operator that this onnxruntime and processor know."""
    import onnxruntime

    _save_optimized(source, target, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def _save_optimized(source: Path, target: Path, level: object) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _slim(source: Path, target: Path) -> None:
    """Folds constants and removes what is written twice."""
    import onnxslim

    onnxslim.slim(str(source), str(target))


def _halve(source: Path, target: Path) -> None:
    """Turns float32 into float16, inputs and outputs included.

    Shape inference stays off: with it, merged decoders come out as graphs that onnxruntime refuses.
    """
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=False, disable_shape_infer=True), target)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "int8": _quantize,
    "ort-basic": _optimize_basic,
    "ort-all": _optimize_all,
    "onnxslim": _slim,
    "fp16": _halve,
}


def rewrite(source: Path, out: Path, kind: str) -> bool:
    """Rewrites the export in `source` into `out`, which is replaced; returns whether every file was rewritten."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copyfile(source / "config.json", out / "config.json")
    errors = []
    for file in sorted(source.glob("*.onnx")):
        target = out / file.name
        try:
            KINDS[kind](file, target)
        except Exception as error:
            target.unlink(missing_ok=True)
            errors.append(f"{file.name}: {type(error).__name__}: {error}\n")
    if errors:
        (out / "failed.txt").write_text("".join(errors), encoding="utf-8")
    return not errors


def main() -> int:
    """Reads the command line, makes the variants and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("exports", type=Path, metavar="EXPORTS", help="folder that holds the folders of exports")
    parser.add_argument("out", type=Path, metavar="OUT", help="receives each variant as OUT/NAME-KIND")
    parser.add_argument("wanted", nargs="+", metavar="NAME:KIND", help=f"kinds: {', '.join(KINDS)}")
    args = parser.parse_args()
    wanted = [each.rpartition(":")[::2] for each in args.wanted]
    if unknown := sorted({kind for _, kind in wanted} - set(KINDS)):
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    made = [rewrite(args.exports / name, args.out / f"{name}-{kind}", kind) for name, kind in wanted]
    return int(not all(made))


if __name__ == "__main__":
    sys.exit(main())
