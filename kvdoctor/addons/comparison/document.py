"""The document of `diff`: the differences between two models. Its field names are the public contract."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from kvdoctor._version import __version__
from kvdoctor.errors import Worse
from kvdoctor.findings import Finding
from kvdoctor.records import record, to_plain
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE
from kvdoctor.report.wording import shorten_names

DIFF_SCHEMA = "kvdoctor/diff/1"

Effect = Literal["worse", "better", "neutral"]
DiffVerdict = Literal["equal", "different", "better", "worse", "incomplete"]
LogitsAgreement = Literal["bits", "logits", "tokens", "other"]


@record
class Difference:
    """A difference between A and B.

    Attributes:
        what: the kind of the subject: stack, graph, input, output, slot, axis, file or operator.
        subject: the names of all subjects with this difference.
        field: the property that differs; empty if only one side has the subject.
        before: the value of A; None if only B has the subject.
        after: the value of B; None if only A has the subject.
        effect: whether it makes B worse or better.
        because: why it makes B worse.
    """

    what: str
    subject: tuple[str, ...]
    field: str
    before: str | None
    after: str | None
    effect: Effect = "neutral"
    because: str = ""


@record
class Logits:
    """The logits of one loop on the same feeds, both float[steps, vocabulary].

    Attributes:
        experiment: the loop.
        steps: the number of steps compared.
        agree: bit for bit; within the tolerance of the arithmetic; only in the top-1 tokens; or not at all.
        exactness: the arithmetic, the coarser one of the two.
        relative: the largest difference in standard deviations of A's logits; None if it is not finite.
        same_tokens: the fraction of positions with the same top-1 token, or one that is as likely within the noise.
    """

    experiment: str
    steps: int
    agree: LogitsAgreement
    exactness: str
    relative: float | None
    same_tokens: float


@record
class Outcomes:
    """The outcomes of an experiment on both sides, as `failed at step 2`; None if it was not run under that target."""

    experiment: str
    target: str
    a: str | None
    b: str | None
    effect: Effect = "neutral"


@record
class StackDiff:
    """A stack of A and the matching stack of B, by name; None if only one side has it."""

    a: str | None
    b: str | None
    contract: tuple[Difference, ...] = ()
    graph: tuple[Difference, ...] = ()
    experiments: tuple[Outcomes, ...] = ()
    logits: Logits | None = None


@record
class FindingDiff:
    """A finding of A only (`gone`), of B only (`new`), or of both; `a` and `b` are their fingerprints."""

    state: Literal["gone", "new", "same", "changed"]
    a: str | None
    b: str | None
    finding: Finding
    effect: Effect = "neutral"
    because: str = ""


@record
class NotCompared:
    """A part that could not be compared, and why. `essential`: without it the verdict is not equal or better."""

    stack: str | None
    what: str
    reason: str
    essential: bool = False


@record
class ComparedModel:
    """One side: a model that was diagnosed now, a report, a contract that a model must fulfil, or golden numbers."""

    path: str
    source: Literal["model", "report", "contract", "golden"]
    model: str
    verdict: str
    environment: dict[str, str]


@record
class DiffReport:
    """The result of `diff`. All times (seconds) and memory (bytes) are under `measured`, and have no effect."""

    arguments: dict[str, Any]
    seed: int
    verdict: DiffVerdict
    a: ComparedModel
    b: ComparedModel
    reasons: tuple[str, ...] = ()
    stacks: tuple[StackDiff, ...] = ()
    findings: tuple[FindingDiff, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()
    notes: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: equal, better, or different but not worse; 1: worse; 3: could not be compared."""
        codes = {"worse": EXIT_FINDINGS, "incomplete": EXIT_INCOMPLETE}
        return codes.get(self.verdict, EXIT_HEALTHY)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        head = {"schema": DIFF_SCHEMA, "tool": {"name": "kvdoctor", "version": __version__}, "command": "diff"}
        return {**head, **to_plain(self)}

    def __str__(self) -> str:
        """The diff in short: the verdict and all reasons. `kvdoctor.render` writes all of it."""
        return "\n".join([f"{self.b.path} compared with {self.a.path}: {format_verdict(self)}", *self.reasons[1:]])

    def raise_if_worse(self) -> None:
        """Return if the exit code of the command line would be 0.

        Raises:
            Worse: B is worse than A, or could not be compared; the message has all reasons.
        """
        if self.exit_code != EXIT_HEALTHY:
            raise Worse(f"\n{self}")


def decide(
    stacks: tuple[StackDiff, ...], findings: tuple[FindingDiff, ...], *, worse: bool, incomplete: bool
) -> DiffVerdict:
    """The verdict on B, by why it is worse, what could not be compared, and what differs."""
    if worse:
        return "worse"
    if incomplete:
        return "incomplete"
    effects = {one.effect for one in findings}
    for stack in stacks:
        effects |= {one.effect for one in (*stack.contract, *stack.graph)} | {one.effect for one in stack.experiments}
    if "better" in effects:
        return "better"
    different = any(one.state != "same" for one in findings)
    for stack in stacks:
        different |= stack.a is None or bool(stack.contract or stack.graph)
        different |= any(one.a != one.b for one in stack.experiments)
        different |= stack.logits is not None and stack.logits.agree != "bits"
    return "different" if different else "equal"


VERDICTS = {
    "equal": "equal",
    "different": "B is different, but not worse",
    "better": "B is better",
    "worse": "B is worse",
    "incomplete": "the comparison is incomplete",
}


def format_verdict(diff: DiffReport) -> str:
    """The verdict in one line, with the first reason."""
    reasons: list[str] = []
    if diff.verdict == "worse":
        reasons = list(diff.reasons)
    elif diff.verdict == "better":
        reasons = list(_list_gains(diff))
    elif diff.verdict == "incomplete":
        reasons = list(dict.fromkeys(entry.reason for entry in diff.not_compared if entry.essential))
    more = f" (and {len(reasons) - 1} more, listed above)" if len(reasons) > 1 else ""
    return VERDICTS[diff.verdict] + _scope(diff) + (f": {reasons[0]}{more}" if reasons else "")


def _scope(diff: DiffReport) -> str:
    if diff.verdict != "equal" or any(stack.logits is not None for stack in diff.stacks):
        return ""
    if diff.a.source == "golden":
        return " to the golden numbers"
    if not diff.arguments.get("static"):
        return ", without logits"
    return " in contract and operator counts; wiring, weights and logits were not compared"


def _list_gains(diff: DiffReport) -> Iterator[str]:
    for one in diff.findings:
        if one.effect == "better":
            yield f"{one.finding.code} {one.finding.name} is gone"
    for stack in diff.stacks:
        for run in stack.experiments:
            if run.effect == "better":
                yield f"{run.experiment} {run.a} -> {run.b}"
        for change in stack.contract:
            if change.effect == "better":
                values = f"{change.before} -> {change.after}"
                yield f"{change.what} {shorten_names(change.subject)}: {change.field} {values}"
