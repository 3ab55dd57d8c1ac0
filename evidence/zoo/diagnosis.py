"""What kvdoctor says of an export, in the words of the tables."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evidence.zoo.row import CONSUMERS, Slots, Stack, Told
from kvdoctor.diagnose.context import Consumer
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.runtime.client import Runtime


@dataclass(frozen=True)
class Seen:
    """A diagnosis.

    Attributes:
        stacks: The stacks with their contracts.
        verdicts: For each consumer, healthy, unhealthy or incomplete.
        told: For each consumer, the errors and warnings.
        largest: Largest difference with and without the cache in the loops that decoded, as a fraction of the logits'
            spread; None where none did.
        details: Findings and what was not checked, for the reader of a failed test.
    """

    stacks: tuple[Stack, ...]
    verdicts: dict[Consumer, str]
    told: dict[Consumer, Told]
    largest: float | None
    details: str


def diagnose(folder: Path, runtime: Runtime, thorough: bool = False) -> Seen:
    """Runs the step test for both consumers."""
    options = {consumer: Options(consumer=consumer, thorough=thorough) for consumer in CONSUMERS}
    reports = {consumer: step_test(str(folder), options[consumer], runtime) for consumer in CONSUMERS}
    held = reports["held"]
    return Seen(
        stacks=tuple(_stack(stack) for stack in held.stacks),
        verdicts={consumer: report.verdict for consumer, report in reports.items()},
        told={consumer: _told(report) for consumer, report in reports.items()},
        largest=max(_differences(held), default=None),
        details="\n".join(_details(held)),
    )


def _stack(facts: StackFacts) -> Stack:
    contract = facts.contract
    assert contract is not None
    counts = Counter((slot.kind, slot.growth, slot.carry) for slot in contract.slots)
    slots = [Slots(count, kind, growth, carry) for (kind, growth, carry), count in counts.items()]
    return Stack.of(facts.name, contract.layout, contract.first_step, slots)


def _told(report: Report) -> Told:
    return frozenset(
        (finding.name, finding.stack or "", finding.severity)
        for finding in report.findings
        if finding.severity != "note"
    )


def _differences(report: Report) -> Iterator[float]:
    """Yields the differences of each stack in the loop of its consumer."""
    for stack in report.stacks:
        runs = {run.experiment: run for run in report.runs if run.stack == stack.name}
        judged = next(
            (runs[name] for name in ("held-loop", "plain-loop") if name in runs and runs[name].outcome != "skipped"),
            None,
        )
        if judged and judged.outcome in ("passed", "inconclusive", "ambiguous"):
            yield from (step.difference.relative for step in judged.steps if step.difference)


def _details(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.severity} {finding.name} ({finding.stack}): {finding.cause}; {finding.observed}"
    for item in report.not_checked:
        yield f"not checked {item.code} ({item.stack}): {item.reason}"
