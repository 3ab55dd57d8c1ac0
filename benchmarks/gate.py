"""Measures `gate` on many small models, beside a shell loop of single gates, and a second time with nothing changed."""

import shlex
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from measure import Command, kvdoctor, seconds
from onnx import numpy_helper

FIXTURE = Path(__file__).parent.parent / "fixtures" / "exports" / "gpt2"
NOISE = 0.01
SETTLED_SECONDS = 4
"""The gate trusts a file's modification time only after so long, so a model exported just now is read again."""


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round: the loop, one gate with two jobs, and that gate again."""

    loop: float
    jobs: float
    again: float


def make_models(folder: Path, count: int, settle: bool) -> list[str]:
    """Copies of a tiny healthy GPT-2 (0.2 MB), each with weights of its own. `settle` waits until they are trusted."""
    for number in range(count):
        copy = folder / f"m{number:03d}"
        shutil.copytree(FIXTURE, copy)
        model = onnx.load(copy / "model.onnx")
        rng = np.random.default_rng(number)
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype == np.float32 and values.ndim > 1:
                noise = 1 + NOISE * rng.standard_normal(values.shape).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(values * noise, tensor.name))
        onnx.save(model, copy / "model.onnx")
    if settle:
        time.sleep(SETTLED_SECONDS)
    return sorted(str(copy) for copy in folder.iterdir())


def measure_round(models: list[str], scratch: Path) -> Round:
    """Measure one round with an empty cache."""
    single = kvdoctor("gate", "--no-cache", "-q").line
    loop = f'for model in "$@"; do {shlex.join(single)} "$model" || exit 1; done'
    cache = tempfile.mkdtemp(dir=scratch)
    many = kvdoctor("gate", "-q", "--jobs", "2", "--cache-dir", cache, *models)
    return Round(seconds(Command(("sh", "-c", loop, "sh", *models))), seconds(many), seconds(many))
