"""Test vectors: what the program of a loop is called with, and the tokens that it must print."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments.against_checkpoint import NAME as CHECKPOINT
from kvdoctor.decode.experiments.loop_vectors import ONE, PADDED, SEVERAL, UNDECIDED, decide
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import HELD_LOOP, LOOPS, Run
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.loops.plan import INTEGERS, LoopPlan
from kvdoctor.loops.uses import EXPERIMENTS, without_wrong_uses
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime

Array = np.ndarray[Any, Any]

SOURCE = "source-{rows}.f32"
"""The file of an encoder input that is no list of ids: float32, little endian."""


@record
class Vector:
    """One call of the program.

    `feeds` are the arguments for what is fed, `self_tests` what the program then tries by itself; `expected` has a row
    for each sequence, with None where two tokens are equally likely but for rounding. `source` is what lies in the file
    that the arguments name.
    """

    name: str
    feeds: tuple[str, ...]
    expected: tuple[tuple[int | None, ...], ...]
    self_tests: tuple[str, ...] = ()
    source: Array | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments behind the program's name and the model."""
        return (*self.feeds, *(("--self-test", ",".join(self.self_tests)) if self.self_tests else ()))

    @property
    def example(self) -> str:
        """Arguments that decode the same prompts freely."""
        pairs = zip(self.feeds[::2], self.feeds[1::2], strict=True)
        return " ".join(f"{name} {value}" for name, value in pairs if name != "--follow")

    @property
    def source_file(self) -> str | None:
        """The name of that file."""
        return None if self.source is None else self.feeds[self.feeds.index("--source") + 1]

    @property
    def decided(self) -> int:
        """How many tokens are compared. Where all are the same, a program that always prints one token would pass."""
        tokens = [token for row in self.expected for token in row if token is not None]
        return len(tokens) if len(set(tokens)) > 1 else 0


@record
class ObservedLoop:
    """What the experiments showed before a loop is written.

    `held` is the run of the loop that will be written, `plain` that of the loop that feeds every present back. `plan`
    has only uses that did not go wrong, `remarks` say which did. `uncompared` says why the checkpoint has no vector.
    """

    held: Run | None
    plain: Run | None
    plan: LoopPlan
    vectors: tuple[Vector, ...] = ()
    remarks: tuple[str, ...] = ()
    obstacle: str = ""
    uncompared: str | None = None


@record
class LoopTarget:
    """The stack that a loop is written for: its name, its contract, its plan, and the folder of its files.

    `external` are the files that hold weights of a file, by its name.
    """

    stack: str
    folder: Path
    contract: CacheContract
    plan: LoopPlan
    external: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


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
            experiments=(*LOOPS, *EXPERIMENTS, ONE, SEVERAL, PADDED, *([CHECKPOINT] if options.reference else [])),
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
        by_checkpoint, uncompared = _ask_checkpoint(kept, arrays, options)
    plan, remarks = without_wrong_uses(target.plan, runs)
    wanted = [ONE, *([SEVERAL] if plan.batch is None else []), *([PADDED] if plan.pads and plan.batch is None else [])]
    vectors = tuple(_vector(name, arrays, plan) for name in wanted if f"{name}:expected" in arrays)
    if by_checkpoint:
        vectors += (replace(_vector(ONE, by_checkpoint, plan), name=f"one sequence by {options.reference}"),)
    obstacle = next(iter((*results.reasons_not_run, *results.crashes)), "")
    return ObservedLoop(chosen, runs.get("plain-loop"), plan, vectors, remarks, obstacle, uncompared)


def _ask_checkpoint(kept: Path, arrays: dict[str, Array], options: Options) -> tuple[dict[str, Array], str | None]:
    """The arrays of the first vector with the tokens that the checkpoint finds likeliest; or why there are none."""
    if options.reference is None:
        return {}, None
    from kvdoctor.diagnose.checkpoint import CannotCompare, Checkpoint

    checkpoint = Checkpoint(options.reference, options.offline)
    try:
        if f"{ONE}:expected" not in arrays or f"{CHECKPOINT}:tokens" not in arrays:
            return {}, "no call without a cache could be run"
        checkpoint.logits(kept, kept.with_suffix(".checkpoint.npz"))
        with np.load(kept.with_suffix(".checkpoint.npz")) as found:
            logits = found["whole"]
    except CannotCompare as reason:
        return {}, str(reason)
    finally:
        checkpoint.close()
    tokens, start = arrays[f"{CHECKPOINT}:tokens"], int(arrays[f"{ONE}:prompt"])
    expected = decide(logits[:, start - 1 : tokens.shape[1]], TOLERANCES["float"].fails)
    return arrays | {f"{ONE}:tokens": tokens, f"{ONE}:expected": expected}, None


def _read(file: Path) -> dict[str, Array]:
    with np.load(file) as kept:
        return {name: kept[name] for name in kept.files if name.partition(":")[0] in (ONE, SEVERAL, PADDED, CHECKPOINT)}


def _vector(name: str, arrays: dict[str, Array], plan: LoopPlan) -> Vector:
    """The call that a run without a cache stands for: its tokens are given one by one, whatever is likeliest."""
    tokens, expected = arrays[f"{name}:tokens"], arrays[f"{name}:expected"]
    start, source = int(arrays[f"{name}:prompt"]), arrays.get(f"{name}:source")
    padding = arrays.get(f"{name}:padding", np.zeros(len(tokens), np.int64))
    arguments: list[str] = []
    for row, padded in zip(tokens, padding, strict=True):
        arguments += ["--prompt", _ids(row[padded:start]), "--follow", _ids(row[start:])]
    if source is not None and plan.source is not None and plan.source.dtype in INTEGERS:
        for row in source:
            arguments += ["--source", _ids(row)]
        source = None
    elif source is not None:
        arguments += ["--source", SOURCE.format(rows=len(tokens)), "--source-shape", _ids(np.array(source.shape))]
        source = source.astype("<f4")
    tests = ("rewind",) * plan.rewinds + ("reorder",) * (plan.rewinds and plan.reorders)
    rows = tuple(tuple(None if token == UNDECIDED else int(token) for token in row) for row in expected)
    title = "one sequence" if len(tokens) == 1 else f"{len(tokens)} sequences"
    title += " of unequal length" if padding.any() else ""
    return Vector(title, tuple(arguments), rows, tests, source)


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
