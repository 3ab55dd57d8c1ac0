"""The commands of Polygraphy that come nearest to a step-test, in an environment of their own.

Shapes are typed by hand, since Polygraphy couples none: the failing step of the decoders of models.py, one token on a
past of 4. torch.onnx.verification.verify_onnx_program is not among them: it takes the ExportedProgram, not a file.
"""

from dataclasses import replace
from pathlib import Path

from measure import Command

from kvdoctor.export.environments import Needs, Unavailable, start_of

NEEDS = Needs(
    (
        "polygraphy==0.53.6",
        "onnx-graphsurgeon==0.6.1",
        "onnx==1.18.0",
        "onnxruntime==1.22.1",
        "numpy==2.2.6",
        "colored",
    ),
    ("polygraphy", "onnx_graphsurgeon"),
    "",
)
ARGUMENTS = "import sys; from polygraphy.tools import main; sys.exit(main())"
LAYERS, HEADS, PAST = 12, 11, 4


def run(model: Path) -> Command:
    """One call with the sizes that Polygraphy takes by itself: it knows of no past."""
    return _polygraphy("run", str(model), "--onnxrt")


def run_step(model: Path) -> Command:
    """One call with the sizes of the step that fails."""
    return _polygraphy("run", str(model), "--onnxrt", "--input-shapes", *_shapes(), code=1)


def reduce(model: Path, scratch: Path) -> Command:
    """The search for the smallest failing graph. It has the runtime infer what does not run, and ends without one."""
    check = ("polygraphy", "run", "polygraphy_debug.onnx", "--onnxrt", "--input-shapes", *_shapes())
    out = str(scratch / "reduced.onnx")
    options = ("--mode=bisect", "--model-input-shapes", *_shapes(), "--check", *check)
    # It leaves files in the folder that it works in.
    return replace(_polygraphy("debug", "reduce", str(model), "-o", out, *options, code=1), folder=scratch)


def missing() -> str | None:
    """Why the environment cannot be had."""
    try:
        _polygraphy("--version").run()
    except (Unavailable, RuntimeError) as reason:
        return str(reason)
    return None


def _polygraphy(*arguments: str, code: int = 0) -> Command:
    return Command((*start_of(NEEDS, offline=False), "-c", ARGUMENTS, *arguments), code)


def _shapes() -> list[str]:
    pasts = [f"past_key_values.{n}.{kind}:[1,{HEADS},{PAST},64]" for n in range(LAYERS) for kind in ("key", "value")]
    return ["input_ids:[1,1]", f"attention_mask:[1,{PAST + 1}]", "position_ids:[1,1]", *pasts]
