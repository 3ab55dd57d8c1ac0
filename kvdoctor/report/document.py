"""The report: everything a command found, as one frozen document. Its field names are the public contract."""

from dataclasses import dataclass, field
from typing import Any, Literal

from kvdoctor import __version__
from kvdoctor.choices import FailOn
from kvdoctor.contract import CacheContract
from kvdoctor.errors import Unhealthy
from kvdoctor.findings import SEVERITIES, Finding, NotChecked, all_checks
from kvdoctor.memory import MemoryPlan
from kvdoctor.plain import to_plain
from kvdoctor.trace import Run

SCHEMA = "kvdoctor/report/1"
GATE_SCHEMA = "kvdoctor/gate/1"
CONTRACT_SCHEMA = "kvdoctor/contract/1"

Verdict = Literal["healthy", "unhealthy", "incomplete", "nothing-found"]

EXIT_HEALTHY, EXIT_FINDINGS, EXIT_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a graph is made of, subgraphs and functions included.

    `operators` by name, with the domain where it is not the standard one; `initializer_bytes` by their declared sizes.
    """

    nodes: int
    operators: dict[str, int]
    initializers: int
    initializer_bytes: int


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file as it is on disk. `bytes` without external data; `external` are the files that hold weights."""

    path: str
    role: str
    bytes: int
    sha256: str | None = None
    ir_version: int | None = None
    opsets: dict[str, int] = field(default_factory=dict)
    producer: str | None = None
    external: tuple[str, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    outputs: tuple[dict[str, Any], ...] = ()
    graph: GraphFacts | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model: its path as the user wrote it, and its files."""

    path: str
    files: tuple[FileFacts, ...]


@dataclass(frozen=True, slots=True)
class StackFacts:
    """One stack: what decodes together."""

    name: str
    layout: str
    files: tuple[str, ...]
    contract: CacheContract | None
    cache: MemoryPlan | None = None


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target, and what it did to each stack, by the stack's name.

    `refused` are files that it does not open, `other_logits` experiments whose logits are not those of the installed
    runtime, `not_run` the reason why nothing was run under it. `ir` and `opset` are the largest that it is known to
    take, None where it is too new to have been measured.
    """

    asked: str
    onnxruntime: str
    ir: int | None
    opset: int | None
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    other_logits: dict[str, tuple[str, ...]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def runtime(self) -> str:
        """The runtime as runs name it."""
        return f"onnxruntime=={self.onnxruntime}"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a repair changed: where in which file, and what stood there before and after."""

    file: str
    where: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Proof:
    """A claim about a repaired stack, and whether it held."""

    stack: str
    claim: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """What was found before a repair, or after it."""

    verdict: Verdict
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class AppliedRepair:
    """A repair that changed something: the checks it mends, and what of the original's numbers it must keep."""

    stack: str
    name: str
    mends: tuple[str, ...]
    keeps: str
    summary: str


@dataclass(frozen=True, slots=True)
class Unmended:
    """A finding that was not repaired on the graph: by which repair, why not, and what would do it instead.

    `repair` is empty where none is known.
    """

    stack: str | None
    finding: str
    repair: str
    reason: str
    instead: str = ""


@dataclass(frozen=True, slots=True)
class FileDiff:
    """What is other in a changed file: lines that begin with `-` or `+`; `left_out` more are not shown."""

    file: str
    lines: tuple[str, ...]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """A file that was written anew: the SHA-256 of the source's, and of OUT's."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """One thing that was chosen for an export made afresh, and what it was made from."""

    what: str
    value: str
    because: str


@dataclass(frozen=True, slots=True)
class PortChange:
    """An input or output that is other than in the model that was replaced; None where it is new or gone."""

    file: str
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """How an export was made afresh. `way` is how its Python was had, `failures` what was tried in vain before.

    `findings` are those of the fresh export before any repair, `ports` what is other in its inputs and outputs,
    `left_out` files that the exporter wrote and the replaced model has not. `recipe` is the folder that tells how.
    """

    checkpoint: str
    exporter: str
    way: str
    requirements: tuple[str, ...]
    versions: dict[str, str]
    choices: tuple[ExportChoice, ...]
    failures: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    ports: tuple[PortChange, ...] = ()
    left_out: tuple[str, ...] = ()
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """What `re-export` did. `out` is None where nothing was written; `advice` is for those who cannot take the copy.

    `proved` says that all of `proof` holds, and there is some. `contents` are the files of OUT, relative to it: what
    else lies there is not kvdoctor's, and is not replaced with it.
    """

    source: str
    out: str | None
    changes: tuple[Change, ...]
    before: Side
    after: Side | None
    proof: tuple[Proof, ...]
    advice: tuple[str, ...] = ()
    repairs: tuple[AppliedRepair, ...] = ()
    unmended: tuple[Unmended, ...] = ()
    diff: tuple[FileDiff, ...] = ()
    files: tuple[ChangedFile, ...] = ()
    undo: tuple[str, ...] = ()
    proved: bool = False
    export: ExportRecord | None = None
    contents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reproducer:
    """What `repro` wrote. `out` is None, and `reason` says why, where a failure could not be reproduced.

    `finding` is the fingerprint of the finding that it `shows`; `bytes` are those of all files; `left_out` are parts of
    the model that the failure does not need.
    """

    out: str | None
    reason: str | None
    finding: str | None = None
    shows: str | None = None
    files: tuple[str, ...] = ()
    bytes: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found on one model. All times (seconds) and memory (bytes) of this run are under `measured`."""

    command: str
    arguments: dict[str, Any]
    seed: int
    verdict: Verdict
    environment: dict[str, str]
    model: ModelFacts
    stacks: tuple[StackFacts, ...] = ()
    targets: tuple[TargetFacts, ...] = ()
    runs: tuple[Run, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    repair: RepairRecord | None = None
    reproducer: Reproducer | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The document as it is written to JSON."""
        body = to_plain(self)
        for run in body["runs"]:
            del run["node_names"]
        return {"schema": SCHEMA, "tool": {"name": "kvdoctor", "version": __version__}, **body}

    def __str__(self) -> str:
        """The report as the command line prints it into a pipe."""
        from kvdoctor.report.formats import rendered

        return rendered(self, "text")

    def raise_for_findings(self) -> None:
        """Do nothing where the command line would end with exit code 0, by the `fail_on` that was asked for.

        Raises:
            Unhealthy: there are findings that count, or it could not be checked; the message has them in words.
        """
        if exit_code(self, self.arguments.get("fail_on", "error")) != EXIT_HEALTHY:
            from kvdoctor.report.wording import in_short

            raise Unhealthy("\n" + in_short(self))


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors before warnings before notes, then by code, stack and subject: the order of every report."""
    return tuple(sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), f.code, f.stack or "", f.subject)))


def decide(
    command: str, findings: tuple[Finding, ...], not_checked: tuple[NotChecked, ...], fail_on: FailOn
) -> Verdict:
    """The verdict. `could not check` is never healthy, and an inspection alone never says healthy."""
    lowest = "error" if fail_on == "never" else fail_on
    if any(counts(finding, lowest) and not means_incomplete(finding.code) for finding in findings):
        return "unhealthy"
    if is_open(findings, not_checked):
        return "incomplete"
    return "nothing-found" if command == "inspect" else "healthy"


def counts(finding: Finding, fail_on: FailOn) -> bool:
    """Whether a finding makes the exit code 1: it is as severe as was asked, and not known."""
    severe = fail_on != "never" and SEVERITIES.index(finding.severity) >= SEVERITIES.index(fail_on)
    return severe and finding.known is None


def exit_code(report: Report, fail_on: FailOn) -> int:
    """0, 1 or 3 by the verdict; with `never` findings do not count, but what could not be checked does.

    A repair that was not proved is never 0.
    """
    if report.reproducer is not None and report.reproducer.out is None:
        return EXIT_INCOMPLETE
    if report.repair is not None and not all(entry.holds for entry in report.repair.proof):
        return EXIT_FINDINGS
    if report.verdict == "unhealthy" and fail_on != "never":
        return EXIT_FINDINGS
    return EXIT_INCOMPLETE if is_open(report.findings, report.not_checked) else EXIT_HEALTHY


def is_open(findings: tuple[Finding, ...], not_checked: tuple[NotChecked, ...]) -> bool:
    """Whether anything without which a model is not called healthy could not be checked."""
    if any(entry.essential for entry in not_checked):
        return True
    return any(means_incomplete(finding.code) for finding in findings)


def means_incomplete(code: str) -> bool:
    """Whether a finding of that check says that the model was not diagnosed."""
    return any(check.incomplete for check in all_checks() if check.code == code)
