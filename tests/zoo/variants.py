"""Rewrites an export with a common tool, inside an environment that has these packages.

    uv run --isolated --no-project --python 3.11 --with onnx==1.23.2 --with onnxruntime==1.31.1 --with onnxslim==0.1.98
        --with numpy==2.4.6 --with protobuf==7.36.2 python tests/zoo/variants.py SOURCE_DIR OUT KIND

Every .onnx file of SOURCE_DIR is rewritten into OUT, and config.json comes along. A file that the tool refuses is named
in OUT/failed.txt with the error, the others are made all the same, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path


def _quantize(source: Path, target: Path) -> None:
    """Writes weights as int8, also those inside the two branches of a merged decoder."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target, extra_options={"EnableSubgraph": True})


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


def main() -> int:
    """Reads the command line, makes the variant and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, metavar="SOURCE_DIR", help="folder of an export")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the variant; replaced if it exists")
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    shutil.copyfile(args.source / "config.json", args.out / "config.json")
    errors = []
    for source in sorted(args.source.glob("*.onnx")):
        target = args.out / source.name
        try:
            KINDS[args.kind](source, target)
        except Exception as error:
            target.unlink(missing_ok=True)
            errors.append(f"{source.name}: {type(error).__name__}: {error}\n")
    if errors:
        (args.out / "failed.txt").write_text("".join(errors), encoding="utf-8")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
