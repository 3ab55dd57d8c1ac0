"""Writes loops and runs their programs."""

from pathlib import Path

from kvdoctor.loops.pipeline import LoopRequest, WrittenLoop, write_loop
from kvdoctor.options import Options


def written(model: Path, language: str = "python", out: Path | None = None) -> WrittenLoop:
    """The loop for a model, its program held to the test vectors."""
    request = LoopRequest(str(model), None if out is None else str(out), language, check=True)
    return write_loop(request, Options())
