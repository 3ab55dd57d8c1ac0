"""The document of a command: what it found out about one model. Its field names are the public contract."""

import time
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.choices import FAIL_ON, FailOn
from kvdoctor.decode.runs import Run
from kvdoctor.errors import Unhealthy
from kvdoctor.findings import SEVERITIES, Finding, NotChecked, Selection, means_incomplete, names_open_check, reaches
from kvdoctor.records import record, to_plain
from kvdoctor.report import facts
from kvdoctor.report.facts import UNDIAGNOSED, Ground, ModelFacts, StackFacts, TargetFacts, Verdict
from kvdoctor.report.repair_record import RepairRecord
from kvdoctor.report.wording.summary import format_verdict, name_worst, summarize

SCHEMA = "kvdoctor/report/1"
GATE_SCHEMA = "kvdoctor/gate/1"
CONTRACT_SCHEMA = "kvdoctor/contract/1"

PARITY = "KV301"
TOTAL_SECONDS = "total_seconds"
"""The time of the whole command, among the other things that were measured."""

NEVER_HEALTHY = ("inspect", "speed")
"""Commands that do not show that a loop with the model is right."""
EXIT_HEALTHY, EXIT_FINDINGS, EXIT_USAGE, EXIT_INCOMPLETE = 0, 1, 2, 3


@record
class Reproducer:
    """What `repro` wrote.

    Attributes:
        out: the folder; null if the failure could not be reproduced.
        reason: why it could not be reproduced.
        command: what runs it, with the variables that the execution provider needs.
        finding: the fingerprint of the finding that is reproduced.
        shows: the failure that is reproduced.
        files: the files in the folder.
        bytes: the size of all files in bytes.
        left_out: the parts of the model that the failure does not need.
    """

    out: str | None
    reason: str | None
    command: str | None = None
    finding: str | None = None
    shows: str | None = None
    files: tuple[str, ...] = ()
    bytes: int = 0
    left_out: tuple[str, ...] = ()


@record
class Report:
    """What a command found out about one model.

    Attributes:
        command: the command.
        arguments: its options, by name.
        seed: the seed of the synthetic feeds.
        verdict: the verdict.
        ground: what it rests on; null where no run passed.
        environment: the versions of onnxruntime, onnx, Python and the platform.
        model: the model and its files.
        stacks: its stacks.
        targets: the target runtimes.
        variants: variants of one model in the folder, each compared with the most exact one.
        speed: how fast each stack decodes; only of the command `speed`.
        runs: every experiment on every stack and runtime.
        findings: the findings, worst first.
        not_checked: the checks that could not run.
        absent: the other checks and experiments without a result; a check in neither list ran, and found nothing.
        repair: what `re-export` did; null for other commands.
        reproducer: what `repro` wrote; null for other commands.
        measured: all times (seconds) and memory (bytes) of this run; no verdict depends on them.
        notes: remarks on the run.
    """

    command: str
    arguments: dict[str, Any]
    seed: int
    verdict: Verdict
    environment: dict[str, str]
    model: ModelFacts
    stacks: tuple[StackFacts, ...] = ()
    targets: tuple[TargetFacts, ...] = ()
    variants: tuple[facts.VariantFacts, ...] = ()
    speed: tuple[facts.SpeedFacts, ...] = ()
    runs: tuple[Run, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    absent: tuple[NotChecked, ...] = ()
    repair: RepairRecord | None = None
    reproducer: Reproducer | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ground: Ground | None = None

    @property
    def fail_on(self) -> FailOn:
        """The lowest severity that counts as a failure; `error` where the command has no such option."""
        asked = self.arguments.get("fail_on", "error")
        return next((level for level in FAIL_ON if level == asked), "error")

    @property
    def selection(self) -> Selection:
        """The checks that were selected."""
        return Selection(tuple(self.arguments.get("select") or ()), tuple(self.arguments.get("ignore") or ()))

    @property
    def open_checks(self) -> tuple[NotChecked, ...]:
        """What was not checked, without what a finding explains, and without a comparison that another one replaces.

        A check that an error of its stack explains runs where that is repaired.
        """
        faulty = {finding.stack for finding in self.findings if finding.severity == "error"}
        compared = {run.stack for run in self.runs if run.repeats and run.shows == "passed"}
        explained = (e for e in self.not_checked if e.kind == "explained" or e.stack in faulty)
        replaced = (e for e in self.not_checked if e.code == PARITY and e.stack in compared)
        closed = {entry for entry in (*explained, *replaced) if not entry.essential}
        return tuple(entry for entry in self.not_checked if entry not in closed)

    @property
    def allowance(self) -> str | None:
        """Why the model may stay incomplete, by `--allow-incomplete`; None where it may not, or is complete."""
        codes = {one.code for one in self.not_checked if one.essential}
        codes |= {one.code for one in self.findings if means_incomplete(one.code)}
        reasons = [self.allowed(code) for code in sorted(codes)]
        return None if None in reasons or not reasons else "; ".join(dict.fromkeys(filter(None, reasons)))

    def allowed(self, code: str) -> str | None:
        """The reason why a check may stay open; None where it may not."""
        given: dict[str, str] = self.arguments.get("allow_incomplete") or {}
        return next((reason for word, reason in given.items() if names_open_check(word, code)), None)

    def timed(self, began: float) -> "Report":
        """The report with the seconds of the whole command, which began at that value of `time.perf_counter`."""
        return replace(self, measured={**self.measured, TOTAL_SECONDS: round(time.perf_counter() - began, 3)})

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        body = to_plain(self)
        for run in body["runs"]:
            del run["node_names"]
        return {"schema": SCHEMA, "tool": {"name": "kvdoctor", "version": __version__}, **body}

    def __repr__(self) -> str:
        """One line: the command and the verdict."""
        return f"<Report of {self.command}: {format_verdict(self)}>"

    def __str__(self) -> str:
        """The report in short: the verdict and the findings that count. `kvdoctor.render` writes all of it."""
        return summarize(self)

    def _repr_html_(self) -> str:
        """The page of the report, as a notebook shows what a cell returns."""
        # A report is made without a page far more often than with one.
        from kvdoctor.report import formats
        from kvdoctor.report.page.elements import frame

        return frame(formats.render(self, "html"), f"kvdoctor {self.command}: {format_verdict(self)}")

    def raise_for_findings(self) -> None:
        """Return if the exit code of the command line would be 0, by the report's `fail_on`.

        Raises:
            Unhealthy: there are findings that count, or the model could not be checked; the message lists them, and
                its first line names the worst, which is what pytest's summary shows.
        """
        if exit_code(self, self.fail_on) != EXIT_HEALTHY:
            raise Unhealthy(f"{name_worst(self)}\n{self}")


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Errors before warnings before notes, then by code, stack and subject: the order of every report."""
    return tuple(sorted(findings, key=lambda f: (-SEVERITIES.index(f.severity), f.code, f.stack or "", f.subject)))


def decide(
    command: str, findings: tuple[Finding, ...], not_checked: tuple[NotChecked, ...], fail_on: FailOn
) -> Verdict:
    """The verdict. A model that could not be checked is never healthy; some commands never say healthy."""
    lowest = "error" if fail_on == "never" else fail_on
    if any(counts(finding, lowest) and not means_incomplete(finding.code) for finding in findings):
        return "unhealthy"
    if is_open(findings, not_checked):
        return "incomplete"
    return "nothing-found" if command in NEVER_HEALTHY else "healthy"


def counts(finding: Finding, fail_on: FailOn) -> bool:
    """Whether a finding makes the exit code 1: its severity reaches `fail_on`, and it is not known."""
    return reaches(finding, fail_on) and finding.known is None


def exit_code(report: Report, fail_on: FailOn) -> int:
    """0, 1 or 3 by the verdict; with `never` findings do not count, but essential checks that could not run do.

    It is never 0 if a repair was not proved. After a dry run it is that of the original, which stays as it is.
    """
    if report.reproducer is not None and report.reproducer.out is None:
        return EXIT_INCOMPLETE
    if report.repair is not None and not all(entry.holds for entry in report.repair.proof):
        return EXIT_FINDINGS
    if report.verdict == "unhealthy" and fail_on != "never":
        return EXIT_FINDINGS
    if report.repair is not None and report.repair.is_planned:
        return EXIT_INCOMPLETE if report.verdict in UNDIAGNOSED else EXIT_HEALTHY
    is_incomplete = is_open(report.findings, report.not_checked) and report.allowance is None
    return EXIT_INCOMPLETE if is_incomplete else EXIT_HEALTHY


def exit_code_of_all(reports: Sequence[Report]) -> int:
    """The exit code of several models: findings outweigh what could not be checked. To check nothing is no pass."""
    found = [(exit_code(report, report.fail_on), report.allowance is None or bool(report.runs)) for report in reports]
    given = {code for code, _ in found} | ({EXIT_INCOMPLETE} if not any(checked for _, checked in found) else set())
    return next((code for code in (EXIT_FINDINGS, EXIT_INCOMPLETE) if code in given), EXIT_HEALTHY)


def is_open(findings: tuple[Finding, ...], not_checked: tuple[NotChecked, ...]) -> bool:
    """Whether an essential check could not run, so that the model cannot be called healthy."""
    if any(entry.essential for entry in not_checked):
        return True
    return any(means_incomplete(finding.code) for finding in findings)
