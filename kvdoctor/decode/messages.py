"""Messages between the parent and its worker process: jobs one way, events the other, one JSON object per line.

Both sides import this module, the worker under releases of onnxruntime and numpy that are years old: standard library
and the rest of `decode` only.
"""

import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Conditions
from kvdoctor.decode.golden import GoldenWalk
from kvdoctor.decode.runs import Run, Step
from kvdoctor.decode.speed import SpeedPoint
from kvdoctor.records import from_plain, record, to_plain

T = TypeVar("T")

Take = tuple[tuple[int, ...] | None, ...]
"""For each axis None, or (parts, start, count): of each of so many equal parts the entries from `start` on."""

SPINNING = "session.intra_op.allow_spinning"
"""Sessions set it to 0: spinning, threads that wait take a third of the processor time of the tests of a small model.

The number of threads stays, since results depend on it: the split of a product decides the order of its sums.
"""


def count_threads() -> int:
    """Threads for the runtime: the cores this process may use, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, min(cores or 1, 16))


@record
class Sandbox:
    """What a worker may use from now on besides its environment: absolute paths of files and folders.

    Attributes:
        reads: What it may read; of a folder all that is below it.
        writes: What it may change as well.
        devices: Patterns of the device files that a provider needs; with some, its driver may talk to services.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    devices: tuple[str, ...] = ()


@record(slots=False, kw_only=True)
class Job:
    """What a worker is to do: the seed of synthetic feeds, and the provider, threads and settings of its sessions.

    `unopened` are files with levels of optimization at which a worker ended while it opened them: it would end again.
    `diagnosis` is a number that jobs on the same model have in common: its sessions stay open from one to the next.
    The first job of a worker has its `sandbox`; None leaves it as it is.
    """

    seed: int = 0
    provider: str = CPU
    settings: dict[str, str] = field(default_factory=dict)
    threads: int = field(default_factory=count_threads)
    unopened: tuple[tuple[str, str], ...] = ()
    diagnosis: int = 0
    sandbox: Sandbox | None = None


@record(slots=False)
class PairedSide:
    """A stack in a folder, with its contract."""

    stack: str
    folder: Path
    contract: CacheContract


@record
class SideJob(Job):
    """A job on one stack."""

    side: PairedSide


class Event:
    """What a worker answers."""

    __slots__ = ()


@record
class AddedExperiment:
    """An experiment of an add-on: a module with the function `make_experiment`, which gets the contract and `data`."""

    name: str
    module: str
    data: dict[str, str]


@record
class ExperimentJob(Conditions, PairedSide, Job):
    """Run experiments on one stack.

    Attributes:
        experiments: Names of experiments, in the order in which they are run.
        keep_logits: A private scratch file for the logits of each experiment.
        prompt: Token ids to begin with, in place of synthetic ones.
        inputs: An .npz file of encoder inputs, in place of synthetic ones.
        timed: Repeat the calls whose time is measured; otherwise they run once.
        keep_calls: A private folder for the feeds of the first bad call of each judged experiment.
        added: Experiments of add-ons, which run last.
        keep_step: The step whose calls `keep_calls` receives before they run, each in place of the one before.
    """

    experiments: tuple[str, ...]
    keep_logits: Path | None = None
    prompt: tuple[int, ...] = ()
    inputs: Path | None = None
    timed: bool = True
    keep_calls: Path | None = None
    added: tuple[AddedExperiment, ...] = ()
    keep_step: int | None = None


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
class TrialJob(Job):
    """Run one call of a changed graph, and report the types, shapes and short integers of its outputs.

    `keep` is a file of a private folder that receives the outputs, as `save_call` writes them.
    """

    model: TrialModel
    keep: Path | None = None


@record
class CompareJob(Job):
    """Run one call of each of two models and compare their outputs; `inject` feeds values of the right to the left."""

    left: TrialModel
    right: TrialModel
    pairs: tuple[ValuePair, ...]
    inject: tuple[ValuePair, ...] = ()


@record
class SettleJob(SideJob):
    """Settle the readings of a contract by short calls (decode/settle.py)."""


@record
class GradeJob(Job):
    """Run variants of one model on the tokens that the base decodes; each has its own answer."""

    base: PairedSide
    variants: tuple[PairedSide, ...]


@record
class DigestJob(SideJob):
    """Run one model along the golden walks, and digest what it returned (decode/golden.py).

    Attributes:
        golden: The earlier digests whose walks and tokens are run; without them it decodes anew.
        states: The encoder states to feed; None for those that the model takes.
    """

    golden: tuple[GoldenWalk, ...] = ()
    states: int | None = None


@record
class SpeedJob(SideJob):
    """Measure how fast a stack decodes (decode/speed.py); `steps` equal steps show whether memory grows.

    `thresholds` are those of the `ExperimentJob`: where a longer past fails, the longest that fits is looked for there.
    """

    thresholds: tuple[int, ...] = ()
    steps: int = 2000


@record
class MeasureJob(Job):
    """Measure the largest IR version and opset that the runtime opens."""


@record
class FindProviderJob(Job):
    """Open the smallest model on the provider of the job."""


@record
class Hello(Event):
    """The worker is ready: versions, the execution providers of its runtime, its process, and what can restrict it.

    That is not the process that was started where Python is started by a launcher, as in an environment on Windows.
    """

    onnxruntime: str
    numpy: str
    python: str
    providers: tuple[str, ...]
    process: int
    sandbox: str = ""


@record
class ExperimentStarted(Event):
    """An experiment begins."""

    experiment: str


@record
class FileOpening(Event):
    """A file is about to be opened at an optimization level; `path` is the whole path."""

    file: str
    level: str
    path: str


@record
class FileOpened(Event):
    """It is open: what was going on before goes on."""


@record
class FileRefused(Event):
    """The runtime does not open a file at some level; `opens_at` is the first level that does."""

    file: str
    errors: dict[str, str]
    opens_at: str | None


@record
class NodesPlaced(Event):
    """The nodes of an open file that run on the provider, and those that run elsewhere, by operator."""

    file: str
    there: int
    elsewhere: dict[str, int]


@record
class ProviderFound(Event):
    """A provider by its name in sessions, its version and its adapter; or the `error` with which it was refused.

    `no_adapter` says that its library was taken and the session refused.
    """

    name: str = ""
    version: str = ""
    adapter: str = ""
    software: bool = False
    error: str = ""
    no_adapter: bool = False


@record
class CallStarting(Event):
    """A call is about to run: a crash from here on belongs to `step`. `call` is its kind."""

    experiment: str
    step: int
    call: str


@record
class StepDone(Event):
    """A step is on record."""

    step: Step


@record
class CallTimed(Event):
    """The median duration of a call."""

    label: str
    seconds: float


@record
class RunDone(Event):
    """An experiment ended. The steps of its run were sent before."""

    run: Run
    seconds: float


@record
class Note(Event):
    """A remark for the report."""

    text: str


@record
class Obstacle(Event):
    """The reason why experiments could not run."""

    text: str


@record
class WorkerError(Event):
    """An error of kvdoctor itself, with its traceback."""

    text: str


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
    differ. `order` is an axis along which entries are expected ones, and which.
    """

    dtype: str
    relative: float
    actual: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()


@record
class TrialDone(Event):
    """The outputs of a trial, or the differences of a comparison: None for a pair of unequal shapes.

    Where the runtime failed there is its `error`, and the `names` that its text mentions.
    """

    outputs: dict[str, TrialValue] = field(default_factory=dict)
    differences: tuple[ValueDifference | None, ...] = ()
    error: str | None = None
    names: tuple[str, ...] = ()


@record(kw_only=True)
class TokenAgreement:
    """How the next tokens of two decodings of the same tokens compare.

    Attributes:
        tokens: The positions whose logits were compared.
        divergence: The mean Kullback-Leibler divergence of the expected next-token distribution from the other, nats.
        same_top1: The share of positions with the same likeliest token.
        first_other: The first position, from 1 on, with another likeliest token; None without.
    """

    tokens: int = 0
    divergence: float = 0.0
    same_top1: float = 1.0
    first_other: int | None = None


@record
class Graded(TokenAgreement, Event):
    """How far a variant is from the base.

    Attributes:
        stack: The variant.
        layers: By layer, the root mean square difference of its cache after the prompt, as a fraction of the standard
            deviation of the base's.
        failed: Why there are no figures; empty if there are.
    """

    stack: str
    layers: dict[str, float] = field(default_factory=dict)
    failed: str = ""


@record
class Digested(Event):
    """The digests of what a model returned.

    Attributes:
        numbers: The numbers of the walks that were run.
        walks: Their digests.
        states: The encoder states that were fed.
        draws: A checksum of the random numbers that the feeds are made of.
        failed: Why the first was not; empty if it was.
    """

    numbers: tuple[int, ...] = ()
    walks: tuple[GoldenWalk, ...] = ()
    states: int = 0
    draws: int = 0
    failed: str = ""


@record
class SpeedDone(Event):
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


@record
class LimitsMeasured(Event):
    """The largest IR version and opset that the runtime opens; None where not even the oldest model opens."""

    ir: int | None = None
    opset: int | None = None


@record
class Settled(Event):
    """What short calls showed: the contract under the readings that hold, or under those that come closest.

    `holds` says whether the model is consistent under them, `runs` whether it runs at all, and `tried` whether every
    other reading of each port was tried.
    """

    contract: CacheContract
    holds: bool
    runs: bool
    tried: bool
    calls: int


@record
class JobDone(Event):
    """The last event of each job."""


_KINDS: dict[str, Any] = {name: kind for name, kind in globals().items() if isinstance(kind, type)}


def write_message(message: Job | Event) -> str:
    """One line for a message, with its line break."""
    kind = type(message)
    _, _, addon = kind.__module__.removesuffix(".messages").partition("kvdoctor.addons.")
    return json.dumps({"addon": addon, "kind": kind.__name__, **to_plain(message)}) + "\n"


def read_message(line: str) -> Any:
    """The job or the event of a line; those of an add-on are in its module `messages`.

    Raises:
        ValueError: it is none.
    """
    data = json.loads(line)
    addon, kind = data.pop("addon"), data.pop("kind")
    if addon:
        return from_plain(getattr(importlib.import_module(f"kvdoctor.addons.{addon}.messages"), kind), data)
    return from_plain(_KINDS[kind], data)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Give the reader of standard input and the writer of standard output to messages alone.

    Afterwards standard input is empty, and standard output is standard error: what a library prints must not mix with
    messages. On Windows a library may ask for the kind of standard input as it is loaded, and would wait for as long as
    another thread reads from it.
    """
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return reader, writer


def read_until_gone(read: Callable[[], T]) -> Iterator[T]:
    """What the parent sends, by a thread. Its end means that the parent is gone, and ends this process at once.

    Tearing the runtime down would cost time and can itself crash, and nothing is left to save.
    """
    received: queue.SimpleQueue[T] = queue.SimpleQueue()

    def pump() -> None:
        try:
            while True:
                received.put(read())
        finally:  # also where a message cannot be read: the parent then sees the process end
            os._exit(0)

    threading.Thread(target=pump, daemon=True).start()
    return iter(received.get, object())  # endless: no message is that object
