"""Measures `gate` on many small models: `python benchmarks/gate.py [MODELS [REPEATS]]`.

A shell loop of single gates, against one gate with two jobs, against the same again with nothing changed. Prints one
table; the exit code is 1 if a ratio is below its limit.
"""

import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from measure import Command, kvdoctor, seconds
from onnx import numpy_helper

FIXTURE = Path(__file__).parent.parent / "fixtures" / "exports" / "gpt2"
SPREAD = 0.01
LEAST = {"loop": 3.0, "again": 20.0}
RESTED_SECONDS = 4
"""After so long a file's time of change is believed, as it is for any model that was not exported just now."""


def made(folder: Path, count: int) -> list[str]:
    """Copies of a tiny healthy GPT-2 (0.2 MB), each with weights of its own."""
    for number in range(count):
        copy = folder / f"m{number:03d}"
        shutil.copytree(FIXTURE, copy)
        model = onnx.load(copy / "model.onnx")
        rng = np.random.default_rng(number)
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype == np.float32 and values.ndim > 1:
                noise = 1 + SPREAD * rng.standard_normal(values.shape).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(values * noise, tensor.name))
        onnx.save(model, copy / "model.onnx")
    time.sleep(RESTED_SECONDS)
    return sorted(str(copy) for copy in folder.iterdir())


def main() -> int:
    given = [int(word) for word in sys.argv[1:3]]
    count, repeats = (*given, *(100, 3)[len(given) :])
    took: dict[str, list[float]] = {"loop": [], "jobs": [], "again": []}
    with tempfile.TemporaryDirectory() as scratch:
        models = made(Path(scratch, "models"), count)
        single = kvdoctor("gate", "--no-cache", "-q").line
        script = f'for model in "$@"; do {shlex.join(single)} "$model" || exit 1; done'
        for _ in range(repeats):
            cache = Path(tempfile.mkdtemp(dir=scratch))
            many = kvdoctor("gate", "-q", "--jobs", "2", "--cache-dir", str(cache), *models)
            took["loop"].append(seconds(Command(("sh", "-c", script, "sh", *models))))
            took["jobs"].append(seconds(many))
            took["again"].append(seconds(many))
            print(*(f"{name} {times[-1]:.2f} s" for name, times in took.items()), file=sys.stderr)
    return shown(took, count)


def shown(took: dict[str, list[float]], count: int) -> int:
    """Print the table: medians, and medians of the ratios within each round."""
    over = 0
    print("| what | figure | alternative | its figure | times as fast | limit | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ours, theirs, limit, what, other in (
        ("jobs", "loop", LEAST["loop"], "gate --jobs 2", "shell loop of single gates"),
        ("again", "jobs", LEAST["again"], "the same again, nothing changed", "the first time"),
    ):
        ratio = median(slow / fast for slow, fast in zip(took[theirs], took[ours], strict=True))
        over += ratio < limit
        print(
            f"| {count} small models, {what} | {median(took[ours]):.2f} s | {other} | {median(took[theirs]):.2f} s "
            f"| {ratio:.1f} | {limit:g} | {'OVER' if ratio < limit else 'ok'} |"
        )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
