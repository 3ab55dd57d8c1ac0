"""What the conversions ask of the worker, and what it answers. Standard library and `decode` only."""

from dataclasses import field

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
        capacity: Tokens of the buffer that its cache became; sequences up to it are compared, and one more must fail.
        stored: Its slots that are stored in another type; the caches are compared as they are read.
        allowed: How far logits may lie apart because of that, in standard deviations of the logits.
        drift: By past, its deviation and how far its rows may lie apart because of that, beyond their own rounding
            (decode/stored_cache.py).
        single_from: From so many sequences on, a past is compared by one token a call, as an operator of the copy takes
            no more, or the original is wrong with more; 0 for none.
        window: The largest window of its attentions, in tokens, beyond which sequences must be compared; 0 for none.
    """

    rows: Rows = "all"
    keep: tuple[int, ...] = ()
    capacity: int | None = None
    stored: tuple[StoredSlot, ...] = ()
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    single_from: int = 0
    window: int = 0


@record
class PairedJob(Job):
    """Run a converted model and its original, call by call; one without a cache has a contract without slots.

    `tolerances` are the largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
    """

    original: PairedSide
    converted: PairedSide
    how: Comparison
    tolerances: dict[str, float] = field(default_factory=dict)


@record
class CacheCostJob(SideJob):
    """Measure on the original graph what a narrower type costs: the loop rounds the `stored` slots that it carries."""

    stored: tuple[StoredSlot, ...]


@record
class PairedDone(Event):
    """What a comparison of two models showed: `calls` agree, and `failed` is the first that differs, and how.

    `worst` is the largest difference of their logits, in standard deviations of the logits; `exact` says that all are
    equal bit for bit. `not_run` are calls that the original itself does not run, and why. `prompts`, `longest` (the
    past) and `tokens` (the longest sequence) count tokens, `chunks` new ones of the later calls. `overflow` is what
    happened to one token more than the buffers hold: the error, or presents that are longer than a buffer; empty if
    neither. `padded` calls have padding on the left. Where the original has no cache, both `decoded` so many tokens
    greedily, and `seconds` has by number of tokens the time in which the original and the copy did.
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
    padded: int = 0
    decoded: int = 0
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)


@record
class CacheCosted(TokenAgreement, Event):
    """How far the logits of a loop that rounds what it carries are from those of one that does not.

    `keys` and `values` are what shares a scale, None where they are carried as they are; `layer` is the one that is
    rounded, None for all. Differences are in standard deviations of the logits: `relative` is the largest, `allowed`
    the largest of more sequences as well, of the rounding that a copy has alone. `drift` has by past its deviation and
    the drift of its rows (decode/stored_cache.py). `failed` says why there are no figures.
    """

    keys: Granularity | None = None
    values: Granularity | None = None
    layer: int | None = None
    relative: float = 0.0
    allowed: float = 0.0
    drift: dict[str, tuple[float, float]] = field(default_factory=dict)
    failed: str = ""


WORK = {
    PairedJob: ("addons.conversions.worker.paired", "run_paired"),
    CacheCostJob: ("addons.conversions.worker.cache_cost", "measure_cost"),
}
"""The module and function of the worker for each job."""
