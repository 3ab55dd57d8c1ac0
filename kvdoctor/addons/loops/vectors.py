"""Test vectors: what the program of a loop is fed, and the tokens that it must find.

Beyond one sequence, token by token, a loop offers what no run of the model showed to be wrong.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.addons.loops.plan import INTEGERS, LoopPlan
from kvdoctor.analysis.configs import SideCars
from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments.compared_elsewhere import NAME as CHECKPOINT
from kvdoctor.decode.experiments.compared_elsewhere import ONE, PADDED, SEVERAL, UNDECIDED, decide
from kvdoctor.decode.messages import ExperimentJob
from kvdoctor.decode.runs import HELD_LOOP, KEYS_CHANGE, LOOPS, WRONG, Run
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder


@record
class OfferedUse:
    """A use that a loop offers.

    Attributes:
        words: The use, as it begins a sentence.
        experiments: Those that try it; one that goes wrong takes it out of the loop.
        offered: Whether a plan has it.
        without: The plan without it.
        instead: What the loop does then.
        must_pass: Offered only where an experiment showed that it is right, and not where none could be run.
    """

    words: str
    experiments: tuple[str, ...]
    offered: Callable[[LoopPlan], bool]
    without: Callable[[LoopPlan], LoopPlan]
    instead: str
    must_pass: bool = False


USES = (
    OfferedUse(
        "several sequences at once",
        ("batch", "batch-rows"),
        lambda plan: plan.batch is None,
        lambda plan: replace(plan, batch=1, pads=False),
        "the loop takes one sequence",
    ),
    OfferedUse(
        "prompts of unequal length",
        ("left-padding",),
        lambda plan: plan.pads,
        lambda plan: replace(plan, pads=False),
        "the prompts of a batch must have the same length",
        must_pass=True,
    ),
    OfferedUse(
        "several new tokens on top of a cache",
        ("chunk", "second-turn"),
        lambda plan: plan.chunks,
        lambda plan: replace(plan, chunks=False),
        "a step takes one token",
    ),
    OfferedUse(
        "steps taken back",
        ("rewind",),
        lambda plan: plan.rewinds,
        lambda plan: replace(plan, rewindable=False),
        "the loop cannot go back",
    ),
    OfferedUse(
        "rows in another order",
        ("beam-reorder",),
        lambda plan: plan.reorders,
        lambda plan: replace(plan, reorderable=False),
        "the loop does not change rows",
    ),
)

LENGTHS = "near-thresholds"
"""The experiment that finds a length from which on the keys in the cache are other ones."""
EXPERIMENTS = (*(name for use in USES for name in use.experiments), LENGTHS)


def without_wrong_uses(plan: LoopPlan, runs: Mapping[str, Run]) -> tuple[LoopPlan, tuple[str, ...]]:
    """The plan without the uses that went wrong in a run, and a remark on each."""
    remarks = []
    for use in USES:
        if not use.offered(plan):
            continue
        outcomes = {name: runs[name].outcome for name in use.experiments if name in runs}
        wrong = next((name for name, outcome in outcomes.items() if outcome in WRONG), None)
        if wrong is not None:
            remarks.append(f"{use.words}: wrong with this model (experiment {wrong}); {use.instead}")
        if wrong is not None or (use.must_pass and "passed" not in outcomes.values()):
            plan = use.without(plan)
    return plan, tuple(remarks)


Array = np.ndarray[Any, Any]

SOURCE = "source-{rows}.f32"
"""The file of an encoder input that is no list of ids: float32, little endian."""

Rows = tuple[tuple[int, ...], ...]
"""Token ids, a row for each sequence."""


@record
class Vector:
    """One run of the program.

    After the `prompts` the tokens of `follow` are fed one by one; `expected` has a row for each sequence, with None
    where two tokens are equally likely but for rounding. `self_tests` is what the program then tries by itself. An
    encoder reads the ids of `sources`, or the array `source`, which lies in a file.
    """

    name: str
    prompts: Rows
    follow: Rows
    expected: tuple[tuple[int | None, ...], ...]
    self_tests: tuple[str, ...] = ()
    sources: Rows = ()
    source: Array | None = None

    @property
    def example(self) -> str:
        """Calls of the program that decode the same prompts freely, as JSON."""
        generate = {"call": "generate", "rows": [list(row) for row in self.prompts], "most": 20}
        return json.dumps([*_list_encodings(self), generate])

    @property
    def source_file(self) -> str | None:
        """The name of that file."""
        return None if self.source is None else SOURCE.format(rows=len(self.prompts))

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

    `external` are the files that hold weights of a file, by its name; `side_cars` are the configs of the folder.
    `thresholds` are lengths that the graph compares with.
    """

    stack: str
    folder: Path
    contract: CacheContract
    plan: LoopPlan
    external: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    side_cars: SideCars = SideCars()
    thresholds: tuple[int, ...] = ()


def observe(target: LoopTarget, options: Options, runtime: Runtime) -> ObservedLoop:
    """Run the loops on a model, and the calls without a cache whose tokens a program must find.

    Raises:
        UsageError: the runtime does not have the execution provider.
    """
    runtime.require_provider(options.provider)
    with scratch_folder() as scratch:
        kept = Path(scratch) / "kept.npz"
        job = ExperimentJob(
            stack=target.stack,
            folder=target.folder.absolute(),
            contract=target.contract,
            experiments=(*LOOPS, *EXPERIMENTS, ONE, SEVERAL, PADDED, *([CHECKPOINT] if options.reference else [])),
            thresholds=target.thresholds,
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
    plan, remarks = without_wrong_uses(_until_keys_change(target.plan, runs), runs)
    wanted = [ONE, *([SEVERAL] if plan.batch is None else []), *([PADDED] if plan.pads and plan.batch is None else [])]
    vectors = tuple(_vector(name, arrays, plan) for name in wanted if f"{name}:expected" in arrays)
    if by_checkpoint:
        vectors += (replace(_vector(ONE, by_checkpoint, plan), name=f"one sequence by {options.reference}"),)
    obstacle = next(iter((*results.reasons_not_run, *results.crashes)), "")
    return ObservedLoop(chosen, runs.get("plain-loop"), plan, vectors, remarks, obstacle, uncompared)


def _until_keys_change(plan: LoopPlan, runs: Mapping[str, Run]) -> LoopPlan:
    """The plan up to the last length at which the keys in the cache are those of a call without a cache."""
    cause = runs[LENGTHS].cause if LENGTHS in runs else None
    if cause is None or cause.name != KEYS_CHANGE:
        return plan
    limit = min(plan.context_limit or cause.from_length, cause.from_length - 1)
    return replace(plan, context_limit=limit, longest=None)


def _ask_checkpoint(kept: Path, arrays: dict[str, Array], options: Options) -> tuple[dict[str, Array], str | None]:
    """The arrays of the first vector with the tokens that the checkpoint finds likeliest; or why there are none."""
    if options.reference is None:
        return {}, None
    from kvdoctor.diagnose.checkpoint import Checkpoint
    from kvdoctor.errors import CannotCheck

    checkpoint = Checkpoint(options.reference, options.offline)
    try:
        if f"{ONE}:expected" not in arrays or f"{CHECKPOINT}:tokens" not in arrays:
            return {}, "no call without a cache could be run"
        checkpoint.logits(kept, kept.with_suffix(".checkpoint.npz"))
        with np.load(kept.with_suffix(".checkpoint.npz")) as found:
            logits = found["whole"]
    except CannotCheck as reason:
        return {}, str(reason)
    finally:
        checkpoint.close()
    # What follows these tokens is for one longer call.
    tokens = arrays[f"{CHECKPOINT}:tokens"][:, : int(arrays[f"{CHECKPOINT}:total"])]
    start = int(arrays[f"{ONE}:prompt"])
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
    sources: Rows = ()
    if source is not None and plan.source is not None and plan.source.dtype in INTEGERS:
        sources, source = _rows(source), None
    tests = ("rewind",) * plan.rewinds + ("reorder",) * (plan.rewinds and plan.reorders)
    rows = tuple(tuple(None if token == UNDECIDED else int(token) for token in row) for row in expected)
    title = "one sequence" if len(tokens) == 1 else f"{len(tokens)} sequences"
    title += " of unequal length" if padding.any() else ""
    return Vector(
        name=title,
        prompts=_rows(row[padded:start] for row, padded in zip(tokens, padding, strict=True)),
        follow=_rows(tokens[:, start:]),
        expected=rows,
        self_tests=tests,
        sources=sources,
        source=None if source is None else source.astype("<f4"),
    )


def _rows(numbers: Iterable[Array]) -> Rows:
    return tuple(tuple(int(number) for number in row) for row in numbers)


ANY = -1
"""In place of an expected token, where several are right."""


def list_calls(name: str, vector: Vector) -> Iterator[dict[str, Any]]:
    """The calls of a run: of a self test the last step again, after a rewind and perhaps with other rows.

    An encoder reads token ids of each source, or the file of an array (float32, little endian, C order) with its shape.
    """
    yield from _list_encodings(vector)
    due = [[ANY if token is None else token for token in found] for found in zip(*vector.expected, strict=True)]
    yield {"call": "prefill", "rows": [list(row) for row in vector.prompts], "expect": due[0]}
    steps = [[[token] for token in tokens] for tokens in zip(*vector.follow, strict=True)]
    yield from ({"call": "step", "rows": rows, "expect": found} for rows, found in zip(steps, due[1:], strict=True))
    if name in vector.self_tests:
        order = list(range(len(vector.prompts)))
        yield {"call": "rewind", "count": 1}
        if name == "reorder":
            order = [*reversed(order), 0]  # backwards, and the first one once more
            yield {"call": "reorder", "order": order}
        yield {"call": "step", "rows": [steps[-1][row] for row in order], "expect": [due[-1][row] for row in order]}


def _list_encodings(vector: Vector) -> Iterator[dict[str, Any]]:
    if vector.source is not None:
        yield {"call": "encode-file", "file": vector.source_file, "shape": list(vector.source.shape)}
    elif vector.sources:
        yield {"call": "encode", "rows": [list(row) for row in vector.sources]}


def differences(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Iterator[str]:
    """Each place where the tokens that were found after calls are not the expected ones."""
    if [len(row) for row in found] != [len(row) for row in expected]:
        yield f"{[len(row) for row in found]} tokens in place of {[len(row) for row in expected]}"
        return
    for call, (tokens, due) in enumerate(zip(found, expected, strict=True)):
        for row, (token, wanted) in enumerate(zip(tokens, due, strict=True)):
            if wanted not in (ANY, token):
                yield f"sequence {row}, step {call}: token {token} in place of {wanted}"


def list_runs(vectors: tuple[Vector, ...]) -> Iterator[tuple[str, Vector]]:
    """Each run with its name: every vector, each self test with as many sequences as it can, the first vector again."""
    for vector in vectors:
        yield vector.name.replace(" ", "-"), vector
    for test in dict.fromkeys(test for vector in vectors for test in vector.self_tests):
        yield test, max((one for one in vectors if test in one.self_tests), key=lambda one: len(one.expected))
    for vector in vectors[:1]:
        yield f"{vector.name.replace(' ', '-')}-again", vector
