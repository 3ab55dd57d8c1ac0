"""Messages between the parent and its worker process: jobs one way, events the other, one JSON object per line.

Both sides import this module, the worker under releases of onnxruntime and numpy that are years old: standard library
and the rest of `decode` only.
"""

import json
import os
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_args

from kvdoctor.contract import CacheContract
from kvdoctor.decode.cache_types import Granularity, StoredSlot
from kvdoctor.decode.paired_walks import Rows
from kvdoctor.decode.runs import Run, Step
from kvdoctor.decode.script import CallScript, Comparison, ScriptCall
from kvdoctor.decode.search import SearchPlan
from kvdoctor.decode.speed import SpeedPoint
from kvdoctor.records import from_plain, record, to_plain

CPU = "CPUExecutionProvider"

Take = tuple[tuple[int, ...] | None, ...]
"""For each axis None, or (parts, start, count): of each of so many equal parts the entries from `start` on."""


def count_threads() -> int:
    """Threads for the runtime: the cores this process may use, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, min(cores or 1, 16))


@record
class ExperimentJob:
    """Run experiments on one stack.

    Attributes:
        experiments: Names of experiments, in the order in which they are run.
        keep_logits: A private scratch file for the logits of each experiment.
        prompt: Token ids to begin with, in place of synthetic ones.
        inputs: An .npz file of encoder inputs, in place of synthetic ones.
        settings: Entries for the configuration of the runtime's sessions.
        timed: Repeat the calls whose time is measured; otherwise they run once.
        keep_calls: A private folder for the feeds of the first bad call of each judged experiment.
        trace: The file of the caller's own steps, which are run again as the last experiment.
        trace_run: The run of that file, where it is the result of a probe.
        tolerances: Largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
        thresholds: Lengths in tokens at which the graphs may change what they compute.
        ring: Tokens after which the graph writes its buffers from their start again; None where it does not.
        scratch: A private folder for files that an experiment leaves for another worker.
        search: How the operator with the whole loop is called, in the phase `generate`; None without one.
    """

    stack: str
    folder: Path
    contract: CacheContract
    experiments: tuple[str, ...]
    seed: int = 0
    provider: str = CPU
    keep_logits: Path | None = None
    prompt: tuple[int, ...] = ()
    inputs: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)
    timed: bool = True
    keep_calls: Path | None = None
    trace: Path | None = None
    trace_run: str | None = None
    tolerances: dict[str, float] = field(default_factory=dict)
    thresholds: tuple[int, ...] = ()
    ring: int | None = None
    scratch: Path | None = None
    search: SearchPlan | None = None
    threads: int = field(default_factory=count_threads)
    tag: Literal["experiments"] = "experiments"


@record
class TrialModel:
    """A model and the feeds of one call, both files of a private folder; `root` has the weights of a changed graph.

    `level` is the optimization level, `provider` the execution provider where it is not that of the job. `disabled` are
    passes of the optimizer that are left out.
    """

    path: Path
    root: Path | None
    feeds: Path
    level: str = "off"
    provider: str | None = None
    disabled: tuple[str, ...] = ()


@record
class ValuePair:
    """A value of the left model and the one of the right model that corresponds to it, which may have more entries."""

    left: str
    right: str
    take: Take = ()


@record
class TrialJob:
    """Run one call of a changed graph, and report the types, shapes and short integers of its outputs.

    `keep` is a file of a private folder that receives the outputs, as `save_call` writes them.
    """

    model: TrialModel
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    keep: Path | None = None
    tag: Literal["trial"] = "trial"


@record
class CompareJob:
    """Run one call of each of two models and compare their outputs; `inject` feeds values of the right to the left."""

    left: TrialModel
    right: TrialModel
    pairs: tuple[ValuePair, ...]
    inject: tuple[ValuePair, ...] = ()
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["compare"] = "compare"


@record
class RecordJob:
    """Run one experiment and write its calls down as a script; `exact` keeps the floats that the loop computed.

    `thresholds` and `ring` are those of the `ExperimentJob`.
    """

    stack: str
    folder: Path
    contract: CacheContract
    experiment: str
    exact: bool = False
    seed: int = 0
    provider: str = CPU
    thresholds: tuple[int, ...] = ()
    ring: int | None = None
    threads: int = field(default_factory=count_threads)
    tag: Literal["record"] = "record"


@record
class PlayJob:
    """Play a script on the files of a folder."""

    folder: Path
    script: CallScript
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["play"] = "play"


@record
class PairedSide:
    """One side of a comparison: a stack in a folder, with its contract."""

    stack: str
    folder: Path
    contract: CacheContract


@record
class PairedJob:
    """Run a converted model beside its original, call by call.

    Attributes:
        rows: The rows of logits that the converted model returns.
        keep: The numbers of rows that it is asked for, where it has an input for that; it goes on with the first.
        weights: Outputs float[batch, heads, new, encoder] of the converted model whose last axis sums to 1.
        most_tokens: Tokens that a sequence may have with the converted model.
        capacity: Tokens of its buffers, where it has some that the original has not.
        stored: The slots of the converted model that are stored in another type, and are read before they are compared.
        allowed: How far logits may lie apart because of that, in standard deviations of the logits.
        drift: By past, its deviation and how far its rows may lie apart because of that (decode/cache_types.py).
        tolerances: Largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
    """

    original: PairedSide
    converted: PairedSide
    rows: Rows = "all"
    keep: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    most_tokens: int | None = None
    capacity: int | None = None
    stored: tuple[StoredSlot, ...] = ()
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    seed: int = 0
    provider: str = CPU
    tolerances: dict[str, float] = field(default_factory=dict)
    threads: int = field(default_factory=count_threads)
    tag: Literal["paired"] = "paired"


@record
class GradeJob:
    """Run variants of one model on the tokens that the base decodes; each has its own answer.

    `prompt` are token ids to begin with, in place of random ones.
    """

    base: PairedSide
    variants: tuple[PairedSide, ...]
    prompt: tuple[int, ...] = ()
    seed: int = 0
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["grade"] = "grade"


@record
class CacheCostJob:
    """Measure what a narrower type of the cache costs, on the original graph: the loop rounds what it carries.

    Attributes:
        stored: The slots that are rounded, and how.
    """

    side: PairedSide
    stored: tuple[StoredSlot, ...]
    seed: int = 0
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["cache-cost"] = "cache-cost"


@record
class DigestJob:
    """Run one model along the golden walks, and write a digest of what it returned (decode/golden.py).

    Attributes:
        out: The file to write, an `.npz`.
        golden: The file of earlier digests whose walks and tokens are run; None decodes anew.
        states: The encoder states to feed; None for those that the model takes.
    """

    side: PairedSide
    out: Path
    golden: Path | None = None
    states: int | None = None
    seed: int = 0
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["digest"] = "digest"


@record
class SpeedJob:
    """Measure how fast a stack decodes (decode/speed.py); `steps` equal steps show whether memory grows.

    `thresholds` are those of the `ExperimentJob`: where a longer past fails, the longest that fits is looked for there.
    """

    side: PairedSide
    thresholds: tuple[int, ...] = ()
    steps: int = 2000
    seed: int = 0
    provider: str = CPU
    threads: int = field(default_factory=count_threads)
    tag: Literal["speed"] = "speed"


@record
class MeasureJob:
    """Measure the largest IR version and opset that the runtime opens."""

    tag: Literal["measure"] = "measure"


@record
class Hello:
    """The worker is ready: versions, the execution providers of its runtime, and the number of its process.

    That is not the process that was started where Python is started by a launcher, as in an environment on Windows.
    """

    onnxruntime: str
    numpy: str
    python: str
    providers: tuple[str, ...]
    process: int
    tag: Literal["hello"] = "hello"


@record
class ExperimentStarted:
    """An experiment begins."""

    experiment: str
    tag: Literal["start"] = "start"


@record
class FileOpening:
    """A file is about to be opened at an optimization level."""

    file: str
    level: str
    tag: Literal["open"] = "open"


@record
class FileRefused:
    """The runtime does not open a file at some level; `opens_at` is the first level that does."""

    file: str
    errors: dict[str, str]
    opens_at: str | None
    tag: Literal["refused"] = "refused"


@record
class CallStarting:
    """A call is about to run: a crash from here on belongs to `step`. `call` is its kind."""

    experiment: str
    step: int
    call: str
    tag: Literal["step"] = "step"


@record
class StepDone:
    """A step is on record."""

    step: Step
    tag: Literal["stepped"] = "stepped"


@record
class CallTimed:
    """The median duration of a call."""

    label: str
    seconds: float
    tag: Literal["timing"] = "timing"


@record
class RunDone:
    """An experiment ended. The steps of its run were sent before."""

    run: Run
    seconds: float
    tag: Literal["run"] = "run"


@record
class Note:
    """A remark for the report."""

    text: str
    tag: Literal["note"] = "note"


@record
class Obstacle:
    """The reason why experiments could not run."""

    text: str
    tag: Literal["obstacle"] = "obstacle"


@record
class WorkerError:
    """An error of kvdoctor itself, with its traceback."""

    text: str
    tag: Literal["crash"] = "crash"


@record
class TrialValue:
    """An output of a trial; `values` where it is a short tensor of integers."""

    dtype: str
    shape: tuple[int, ...]
    values: tuple[int, ...] | None = None


@record
class ValueDifference:
    """The largest difference of a pair of values, as a fraction of the standard deviation of the expected value.

    `relative` is -1 where one side alone is not finite. `actual` and `expected` are the first numbers of integers that
    differ.
    """

    dtype: str
    relative: float
    actual: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None


@record
class TrialDone:
    """The outputs of a trial, or the differences of a comparison: None for a pair of unequal shapes.

    Where the runtime failed there is its `error`, and the `names` that its text mentions.
    """

    outputs: dict[str, TrialValue] = field(default_factory=dict)
    differences: tuple[ValueDifference | None, ...] = ()
    error: str | None = None
    names: tuple[str, ...] = ()
    tag: Literal["tried"] = "tried"


@record
class PairedDone:
    """What a comparison of two models showed.

    Attributes:
        calls: The calls that agree.
        worst: The largest difference of their logits, in standard deviations of the logits.
        exact: Whether all of them are equal bit for bit.
        failed: The first call that differs, and how; empty if none does.
        not_run: Calls that the original itself does not run, and why.
        prompts: Tokens of the prompts.
        batches: The batches.
        chunks: New tokens of the later calls.
        longest: Tokens of the longest past.
        tokens: Tokens of the longest sequence.
        overflow: What happened to one token more than the buffers hold: the error, or presents that are longer than
            a buffer; empty if neither.
    """

    calls: int = 0
    worst: float = 0.0
    exact: bool = True
    failed: str = ""
    not_run: tuple[str, ...] = ()
    prompts: tuple[int, ...] = ()
    batches: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    longest: int = 0
    tokens: int = 0
    overflow: str = ""
    tag: Literal["compared"] = "compared"


@record
class Graded:
    """How far a variant is from the base.

    Attributes:
        stack: The variant.
        tokens: The positions whose logits were compared.
        divergence: The mean Kullback-Leibler divergence of the base's next-token distribution from the variant's, nats.
        same_top1: The share of positions with the same likeliest token.
        first_other: The first of the decoded tokens, from 1 on, in whose place the variant has another; None without.
        layers: By layer, the root mean square difference of its cache after the prompt, as a fraction of the standard
            deviation of the base's.
        failed: Why there are no figures; empty if there are.
    """

    stack: str
    tokens: int = 0
    divergence: float = 0.0
    same_top1: float = 1.0
    first_other: int | None = None
    layers: dict[str, float] = field(default_factory=dict)
    failed: str = ""
    tag: Literal["graded"] = "graded"


@record
class CacheCosted:
    """How far the logits of a loop that rounds what it carries are from those of one that does not.

    Attributes:
        keys: What shares a scale among the keys; None where they are carried as they are.
        values: The same of the values.
        layer: The layer that is rounded; None for all.
        tokens: The positions whose logits were compared.
        divergence: The mean Kullback-Leibler divergence of the next-token distributions, in nats.
        same_top1: The share of positions with the same likeliest token.
        first_other: The first position, from 1 on, with another likeliest token; None without.
        relative: The largest difference of the logits, in standard deviations of the logits.
        allowed: The largest difference of more sequences as well; of the rounding that a copy has alone.
        drift: By past, its deviation and the drift of its rows (decode/cache_types.py), of the same sequences.
        failed: Why there are no figures; empty if there are.
    """

    keys: Granularity | None = None
    values: Granularity | None = None
    layer: int | None = None
    tokens: int = 0
    divergence: float = 0.0
    same_top1: float = 1.0
    first_other: int | None = None
    relative: float = 0.0
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    failed: str = ""
    tag: Literal["cache-costed"] = "cache-costed"


@record
class Digested:
    """The digests are written.

    Attributes:
        walks: The numbers of the walks that were run.
        states: The encoder states that were fed.
        draws: A checksum of the random numbers that the feeds are made of.
        failed: Why the first was not; empty if it was.
    """

    walks: tuple[int, ...] = ()
    states: int = 0
    draws: int = 0
    failed: str = ""
    tag: Literal["digested"] = "digested"


@record
class SpeedDone:
    """What was measured.

    Attributes:
        points: The figures at each length of the past.
        steps: The equal steps that were run.
        grown_bytes: By how much the resident memory grew over them, the first ones left out.
        left_out: Why lengths were not measured, where the runtime was not at fault.
        failing: Lengths that were not measured because the runtime fails at the first of them.
        error: The text of the runtime at that length, on one line.
        longest: Tokens of the longest sequence, where one of a token more fails; None where that is not known.
    """

    points: tuple[SpeedPoint, ...]
    steps: int
    grown_bytes: int
    left_out: tuple[str, ...] = ()
    failing: tuple[int, ...] = ()
    error: str = ""
    longest: int | None = None
    tag: Literal["speed-done"] = "speed-done"


@record
class LimitsMeasured:
    """The largest IR version and opset that the runtime opens; None where not even the oldest model opens."""

    ir: int | None = None
    opset: int | None = None
    tag: Literal["ceilings"] = "ceilings"


@record
class CallScripted:
    """A call of a script that is being recorded, before it runs; `compared` says where its expected logits are."""

    call: ScriptCall
    compared: Comparison | None = None
    tag: Literal["scripted"] = "scripted"


@record
class CallPlaying:
    """A call of a script is about to run."""

    call: int
    tag: Literal["playing"] = "playing"


@record
class PlayedDifference:
    """The difference of a comparison of a script, as a fraction of the logits' standard deviation."""

    relative: float
    finite: bool


@record
class ScriptPlayed:
    """How a script ended: all calls ran, one failed, or a file was refused.

    `unoptimized` is the text of the same call without graph optimization, and `names` are those that it mentions.
    """

    outcome: Literal["ran", "failed", "refused"]
    text: str = ""
    call: int | None = None
    unoptimized: str | None = None
    names: tuple[str, ...] = ()
    differences: tuple[PlayedDifference, ...] = ()
    tag: Literal["played"] = "played"


@record
class JobDone:
    """The last event of each job."""

    tag: Literal["done"] = "done"


Job = (
    ExperimentJob
    | TrialJob
    | CompareJob
    | RecordJob
    | PlayJob
    | PairedJob
    | GradeJob
    | CacheCostJob
    | DigestJob
    | SpeedJob
    | MeasureJob
)
Event = (
    Hello
    | ExperimentStarted
    | FileOpening
    | FileRefused
    | CallStarting
    | StepDone
    | CallTimed
    | RunDone
    | Note
    | Obstacle
    | WorkerError
    | TrialDone
    | PairedDone
    | Graded
    | CacheCosted
    | Digested
    | SpeedDone
    | LimitsMeasured
    | CallScripted
    | CallPlaying
    | ScriptPlayed
    | JobDone
)
_BY_TAG: dict[str, Any] = {
    kind.__dataclass_fields__["tag"].default: kind for kind in (*get_args(Job), *get_args(Event))
}


def write_message(message: Job | Event) -> str:
    """One line for a message, with its line break."""
    return json.dumps(to_plain(message)) + "\n"


def read_job(line: str) -> Job:
    """The job of a line.

    Raises:
        ValueError: it is none.
    """
    job: Job = _read(line)
    return job


def read_event(line: str) -> Event:
    """The event of a line.

    Raises:
        ValueError: it is none.
    """
    event: Event = _read(line)
    return event


def _read(line: str) -> Any:
    data = json.loads(line)
    return from_plain(_BY_TAG[data["tag"]], data)
