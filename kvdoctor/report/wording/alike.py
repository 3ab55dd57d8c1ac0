"""What is alike is told once: a finding on several stacks or files, checks that could not run for one reason."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

from kvdoctor.findings import Finding, NotChecked
from kvdoctor.records import record
from kvdoctor.report.safe import cut
from kvdoctor.report.wording.finding import list_details

MOST_PLACES, LONGEST_PLACE = 4, 60


@record
class FindingGroup:
    """Findings of one check with the same facts, on several stacks or files."""

    findings: tuple[Finding, ...]

    @property
    def first(self) -> Finding:
        """The finding that stands for all."""
        return self.findings[0]

    @property
    def places(self) -> tuple[str, ...]:
        """The stack of each finding, or its file where it has none."""
        named = (finding.stack or finding.file for finding in self.findings)
        return tuple(dict.fromkeys(place for place in named if place))


def group_findings(findings: Iterable[Finding]) -> list[FindingGroup]:
    """The groups in the order of their first findings: where a fault is may differ, what it is does not."""
    found: dict[Hashable, list[Finding]] = {}
    for one in findings:
        facts = (one.declared, one.observed, one.cause, one.repair, one.use, one.known)
        found.setdefault((one.code, one.severity, one.confidence, *facts), []).append(one)
    return [FindingGroup(tuple(alike)) for alike in found.values()]


def list_group_details(group: FindingGroup) -> Iterator[tuple[str, str]]:
    """The details of the first finding, and behind them what is different in the others, under its stack."""
    first = list(list_details(group.first))
    yield from first
    for finding in group.findings[1:]:
        for label, text in list_details(finding):
            if (label, text) not in first:
                yield label, f"{finding.stack or finding.file}: {text}"


@record
class OpenChecks:
    """Checks that could not run for one reason."""

    entries: tuple[NotChecked, ...]

    @property
    def title(self) -> str:
        """`KV202, KV301 (merged, pair)`."""
        codes = dict.fromkeys("everything" if entry.code == "*" else entry.code for entry in self.entries)
        stacks = dict.fromkeys(entry.stack for entry in self.entries if entry.stack)
        return ", ".join(codes) + (f" ({', '.join(stacks)})" if stacks else "")

    @property
    def reason(self) -> str:
        """Why they could not run."""
        return self.entries[0].reason

    @property
    def essential(self) -> bool:
        """Whether the model cannot be called healthy without them."""
        return self.entries[0].essential


def group_open_checks(entries: Iterable[NotChecked]) -> list[OpenChecks]:
    """The groups, those first that the verdict needs."""
    found: dict[Hashable, list[NotChecked]] = {}
    for entry in entries:
        found.setdefault((entry.essential, entry.reason), []).append(entry)
    groups = [OpenChecks(tuple(alike)) for alike in found.values()]
    return sorted(groups, key=lambda group: not group.essential)


def format_places(places: Sequence[str]) -> str:
    """`merged, pair`; of many the first ones and a count."""
    more = len(places) - MOST_PLACES
    named = [cut(place, LONGEST_PLACE) for place in places[:MOST_PLACES]]
    return ", ".join([*named, *([f"{more} more"] if more > 0 else [])]) or "the model"
