"""What the conversions ask of the worker, and what it answers. Standard library and `decode` only."""

from dataclasses import field
from pathlib import Path

from kvdoctor.decode.messages import Event, Job, PairedSide, SideJob, TokenAgreement
from kvdoctor.decode.paired_walks import Rows
from kvdoctor.decode.stored_cache import Granularity, StoredSlot
from kvdoctor.records import record


@record
class Comparison:
    """How a converted model is compared with its original.

    Attributes:
        rows: The rows of logits that a call of the converted model returns.
        keep: The values of its input that asks for rows, each of which is compared; empty without such an input. The
            loop goes on with the first.
        weights: Outputs float[batch, heads, new, encoder] of the converted model whose last axis sums to 1.
        capacity: Tokens of the buffer that its cache became; sequences up to it are compared, and one more must fail.
        stored: Its slots that are stored in another type; the caches are compared as they are read.
        allowed: How far logits may lie apart because of that, in standard deviations of the logits.
        drift: By past, its deviation and how far its rows may lie apart because of that, beyond their own rounding
            (decode/stored_cache.py).
        single_steps: Whether several sequences on a past are compared by one token a call: its operator takes no more.
    """

    rows: Rows = "all"
    keep: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    capacity: int | None = None
    stored: tuple[StoredSlot, ...] = ()
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    single_steps: bool = False


@record
class PairedJob(Job):
    """Run a converted model and its original, call by call.

    `tolerances` are the largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
    """

    original: PairedSide
    converted: PairedSide
    how: Comparison
    tolerances: dict[str, float] = field(default_factory=dict)


@record
class CacheCostJob(SideJob):
    """Measure what a narrower type of the cache costs, on the original graph: the loop rounds what it carries.

    Attributes:
        stored: The slots that are rounded, and how.
    """

    stored: tuple[StoredSlot, ...]


@record
class PairedDone(Event):
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


@record
class CacheCosted(TokenAgreement, Event):
    """How far the logits of a loop that rounds what it carries are from those of one that does not.

    Attributes:
        keys: What shares a scale among the keys; None where they are carried as they are.
        values: The same of the values.
        layer: The layer that is rounded; None for all.
        relative: The largest difference of the logits, in standard deviations of the logits.
        allowed: The largest difference of more sequences as well; of the rounding that a copy has alone.
        drift: By past, its deviation and the drift of its rows (decode/stored_cache.py), of the same sequences.
        failed: Why there are no figures; empty if there are.
    """

    keys: Granularity | None = None
    values: Granularity | None = None
    layer: int | None = None
    relative: float = 0.0
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    failed: str = ""


@record
class NewCacheJob(SideJob):
    """Compare a decoder that was given a cache with its original, which takes all tokens in each call.

    Attributes:
        original: The folder of the original; its file has the name of the copy's.
        rounds: Whether differences are measured only: both round, each by the tokens of its own call.
        tolerances: Largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
    """

    original: Path
    rounds: bool = False
    tolerances: dict[str, float] = field(default_factory=dict)


@record
class NewCacheDone(Event):
    """What the comparison showed.

    Attributes:
        calls: The calls whose new rows are those of the original.
        worst: Their largest difference, in standard deviations of the logits.
        failed: The first call that differs, and how; empty if none does.
        prompts: Tokens of the prompts.
        splits: Different splits of a sequence into calls.
        batches: The batches.
        longest: Tokens of the longest sequence.
        padded: Calls with padding on the left.
        decoded: Tokens that both decoded greedily, all of them the same.
        seconds: By number of tokens, the time in which the original and the copy decoded them.
    """

    calls: int = 0
    worst: float = 0.0
    failed: str = ""
    prompts: tuple[int, ...] = ()
    splits: int = 0
    batches: tuple[int, ...] = ()
    longest: int = 0
    padded: int = 0
    decoded: int = 0
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)


WORK = {
    NewCacheJob: ("addons.conversions.worker.new_cache", "compare_new_cache"),
    PairedJob: ("addons.conversions.worker.paired", "run_paired"),
    CacheCostJob: ("addons.conversions.worker.cache_cost", "measure_cost"),
}
"""The module and function of the worker for each job."""
