"""Test vectors: what the program of a loop is called with, and the tokens that it must print."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments.loop_vectors import ONE, SEVERAL, UNDECIDED
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import HELD_LOOP, LOOPS, Run
from kvdoctor.loops.plan import INTEGERS, LoopPlan
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime

Array = np.ndarray[Any, Any]

SOURCE = "source-{rows}.f32"
"""The file of an encoder input that is no list of ids: float32, little endian."""


@record
class Vector:
    """One call of the program.

    `arguments` follow the program's name and the model; `expected` has a row for each sequence, with None where two
    tokens are equally likely but for rounding. `source` is what lies in the file that the arguments name.
    """

    name: str
    arguments: tuple[str, ...]
    expected: tuple[tuple[int | None, ...], ...]
    source: Array | None = None


@record
class ObservedLoop:
    """What the experiments showed before a loop is written.

    `held` is the run of the loop that will be written, `plain` that of the loop that feeds every present back.
    """

    held: Run | None
    plain: Run | None
    vectors: tuple[Vector, ...] = ()
    obstacle: str = ""


@record
class LoopTarget:
    """The stack that a loop is written for: its name, its contract, its plan, and the folder of its files."""

    stack: str
    folder: Path
    contract: CacheContract
    plan: LoopPlan


def observe(target: LoopTarget, options: Options, runtime: Runtime) -> ObservedLoop:
    """Run the loops on a model, and the calls without a cache whose tokens a program must find.

    Raises:
        UsageError: the runtime does not have the execution provider.
    """
    runtime.require_provider(options.provider)
    with tempfile.TemporaryDirectory(prefix="kvdoctor-") as scratch:
        kept = Path(scratch) / "kept.npz"
        job = ExperimentJob(
            stack=target.stack,
            folder=target.folder.absolute(),
            contract=target.contract,
            experiments=(*LOOPS, "batch", ONE, SEVERAL),
            seed=options.seed,
            provider=options.provider,
            keep_logits=kept,
            timed=False,
        )
        results = runtime.examine(job, options.progress)
        runs = {run.experiment: run for run in results.runs}
        held = runs.get(HELD_LOOP)
        chosen = runs.get("plain-loop") if held is None or held.outcome == "skipped" else held
        arrays = _read(kept) if kept.is_file() else {}
    batched = runs.get("batch")
    several = batched is not None and batched.outcome == "passed"
    wanted = [ONE, SEVERAL] if several else [ONE]
    vectors = tuple(_vector(name, arrays, target.plan, several) for name in wanted if f"{name}:expected" in arrays)
    obstacle = next(iter((*results.reasons_not_run, *results.crashes)), "")
    return ObservedLoop(chosen, runs.get("plain-loop"), vectors, obstacle)


def _read(file: Path) -> dict[str, Array]:
    with np.load(file) as kept:
        return {name: kept[name] for name in kept.files if name.startswith((f"{ONE}:", f"{SEVERAL}:"))}


def _vector(name: str, arrays: dict[str, Array], plan: LoopPlan, several: bool) -> Vector:
    """The call that a run without a cache stands for: its tokens are given one by one, whatever is likeliest."""
    tokens, expected = arrays[f"{name}:tokens"], arrays[f"{name}:expected"]
    start, source = int(arrays[f"{name}:prompt"]), arrays.get(f"{name}:source")
    arguments: list[str] = []
    for row in tokens:
        arguments += ["--prompt", _ids(row[:start]), "--follow", _ids(row[start:])]
    if source is not None and plan.source is not None and plan.source.dtype in INTEGERS:
        for row in source:
            arguments += ["--source", _ids(row)]
        source = None
    elif source is not None:
        arguments += ["--source", SOURCE.format(rows=len(tokens)), "--source-shape", _ids(np.array(source.shape))]
        source = source.astype("<f4")
    tests = ["rewind"] * plan.rewinds + ["reorder"] * (plan.rewinds and plan.reorders and several)
    arguments += ["--self-test", ",".join(tests)] if tests else []
    rows = tuple(tuple(None if token == UNDECIDED else int(token) for token in row) for row in expected)
    title = "one sequence" if len(tokens) == 1 else f"{len(tokens)} sequences"
    return Vector(title, tuple(arguments), rows, source)


def _ids(numbers: Array) -> str:
    return ",".join(str(int(number)) for number in numbers)


def differences(vector: Vector, printed: str) -> Iterator[str]:
    """Each place where the printed tokens are not the expected ones."""
    lines = printed.strip().splitlines()
    if len(lines) != len(vector.expected):
        yield f"{len(lines)} lines printed in place of {len(vector.expected)}"
        return
    for row, (line, expected) in enumerate(zip(lines, vector.expected, strict=True)):
        got = line.split(",")
        if len(got) != len(expected):
            yield f"sequence {row}: {len(got)} tokens in place of {len(expected)}"
        for step, (token, wanted) in enumerate(zip(got, expected, strict=False)):
            if wanted is not None and token != str(wanted):
                yield f"sequence {row}, step {step}: token {token[:20]} in place of {wanted}"
