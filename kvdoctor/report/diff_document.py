"""What `diff` found: two models side by side, as one frozen document. Its field names are the public contract."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kvdoctor import __version__
from kvdoctor.errors import Worse
from kvdoctor.findings import Finding
from kvdoctor.plain import to_plain
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE

DIFF_SCHEMA = "kvdoctor/diff/1"

Effect = Literal["worse", "better", "neutral"]
DiffVerdict = Literal["equal", "different", "better", "worse", "incomplete"]
Numbers = Literal["bits", "logits", "tokens", "other"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One thing that is other in B, for all the `subject`s that it is true of in the same way.

    `before` is None for what only B has, `after` for what only A has; `field` says what of the subject is other, and is
    empty where it is there on one side only. `because` says why it makes B `worse`.
    """

    what: str
    subject: tuple[str, ...]
    field: str
    before: str | None
    after: str | None
    effect: Effect = "neutral"
    because: str = ""


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of one loop on the same feeds, both float[steps, vocabulary].

    `agree` is how far they do: bit for bit, within the tolerance of the arithmetic (`exactness`, the coarser of the
    two), in the likeliest tokens alone, or not. `relative` is the largest difference as a fraction of A's spread, None
    where it is not finite; `same_tokens` the fraction of positions with the same likeliest token, or another as
    likely but for noise.
    """

    experiment: str
    steps: int
    agree: Numbers
    exactness: str
    relative: float | None
    same_tokens: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """One experiment on both sides: `failed at step 2`; None where it was not run under that runtime."""

    experiment: str
    target: str
    a: str | None
    b: str | None
    effect: Effect = "neutral"


@dataclass(frozen=True, slots=True)
class StackDiff:
    """A stack of A and the one of B that takes its place, by name; None where only one side has it."""

    a: str | None
    b: str | None
    contract: tuple[Delta, ...] = ()
    graph: tuple[Delta, ...] = ()
    experiments: tuple[Outcomes, ...] = ()
    logits: Logits | None = None


@dataclass(frozen=True, slots=True)
class FindingDiff:
    """A finding that only A has (`gone`), only B has (`new`), or that both have; `a` and `b` are their fingerprints."""

    state: Literal["gone", "new", "same", "changed"]
    a: str | None
    b: str | None
    finding: Finding
    effect: Effect = "neutral"
    because: str = ""


@dataclass(frozen=True, slots=True)
class NotCompared:
    """What could not be compared, and why. `essential`: without it nothing is called equal or better."""

    stack: str | None
    what: str
    reason: str
    essential: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """One side: a model that was diagnosed now, or a report of it that was written earlier."""

    path: str
    source: Literal["model", "report"]
    model: str
    verdict: str
    environment: dict[str, str]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `diff` found. All times (seconds) and memory (bytes) are under `measured`, and decide nothing."""

    arguments: dict[str, Any]
    seed: int
    verdict: DiffVerdict
    a: Compared
    b: Compared
    reasons: tuple[str, ...] = ()
    stacks: tuple[StackDiff, ...] = ()
    findings: tuple[FindingDiff, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 equal, better, or other without being worse; 1 worse; 3 could not be compared."""
        codes = {"worse": EXIT_FINDINGS, "incomplete": EXIT_INCOMPLETE}
        return codes.get(self.verdict, EXIT_HEALTHY)

    def to_dict(self) -> dict[str, Any]:
        """The document as it is written to JSON."""
        head = {"schema": DIFF_SCHEMA, "tool": {"name": "kvdoctor", "version": __version__}, "command": "diff"}
        return {**head, **to_plain(self)}

    def __str__(self) -> str:
        """The diff as the command line prints it into a pipe."""
        from kvdoctor.report.diff_text import plain

        return plain(self)

    def raise_if_worse(self) -> None:
        """Do nothing where the command line would end with exit code 0.

        Raises:
            Worse: B is worse than A, or could not be compared; the message is the whole diff.
        """
        if self.exit_code != EXIT_HEALTHY:
            raise Worse(f"\n{self}")
