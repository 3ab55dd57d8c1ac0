"""The commands of Polygraphy that come closest to a step-test, in an isolated environment.

Shapes are given by hand, since Polygraphy does not relate those of different inputs: one token on a past of 4, the
failing step of the decoders of models.py. torch.onnx.verification.verify_onnx_program is left out: it takes an
ExportedProgram, not a file.
"""

from dataclasses import replace
from pathlib import Path

from measure import Command

from kvdoctor.runtime.environments import EnvironmentUnavailable, Requirements, python_command

NEEDS = Requirements(
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
    """One call with the sizes that Polygraphy chooses: it does not know of a past."""
    return _polygraphy("run", str(model), "--onnxrt")


def run_step(model: Path) -> Command:
    """One call with the sizes of the failing step."""
    return _polygraphy("run", str(model), "--onnxrt", "--input-shapes", *_shapes(), code=1)


def reduce(model: Path, scratch: Path) -> Command:
    """The search for the smallest failing graph. It infers shapes by running the model, and so fails."""
    check = ("polygraphy", "run", "polygraphy_debug.onnx", "--onnxrt", "--input-shapes", *_shapes())
    out = str(scratch / "reduced.onnx")
    options = ("--mode=bisect", "--model-input-shapes", *_shapes(), "--check", *check)
    # It writes files into its working folder.
    return replace(_polygraphy("debug", "reduce", str(model), "-o", out, *options, code=1), folder=scratch)


def find_obstacle(offline: bool) -> str | None:
    """Why the environment cannot be made; None where Polygraphy starts. `offline` downloads nothing."""
    try:
        _polygraphy("--version", offline=offline).run()
    except (EnvironmentUnavailable, RuntimeError) as reason:
        return str(reason)
    return None


def _polygraphy(*arguments: str, code: int = 0, offline: bool = False) -> Command:
    python = python_command(NEEDS, offline)
    return Command((*python, "-c", ARGUMENTS, *arguments), code)


def _shapes() -> list[str]:
    pasts = [f"past_key_values.{n}.{kind}:[1,{HEADS},{PAST},64]" for n in range(LAYERS) for kind in ("key", "value")]
    return ["input_ids:[1,1]", f"attention_mask:[1,{PAST + 1}]", "position_ids:[1,1]", *pasts]
