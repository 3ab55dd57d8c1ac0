"""A finding in text: its headline and labeled lines; findings with the same facts as one, and open checks as well."""

from collections.abc import Hashable, Iterable, Iterator, Sequence

from kvdoctor._version import __version__
from kvdoctor.findings import Check, Finding, Issue, NotChecked
from kvdoctor.records import record
from kvdoctor.report.escaping import cut, shortened
from kvdoctor.report.wording import join_some

HOME = "https://github.com/kvdoctor/kvdoctor"
MOST_SOURCES, MOST_PLACES, LONGEST_PLACE = 4, 4, 60


def format_headline(finding: Finding) -> str:
    """`error[KV203] cross-cache-emptied (merged): a decode step returns ...`."""
    stack = f" ({finding.stack})" if finding.stack else ""
    return f"{format_name(finding)}{stack}: {finding.cause}"


def format_name(finding: Finding) -> str:
    """`error[KV203] cross-cache-emptied`."""
    return f"{finding.severity}[{finding.code}] {finding.name}"


def list_details(finding: Finding) -> Iterator[tuple[str, str]]:
    """The lines under a headline in their fixed order, as label and text; the label is empty where it repeats."""
    yield from (*list_facts(finding), *list_advice(finding))
    yield from (("issue", format_issue(issue)) for issue in finding.issues)


def write_lines(finding: Finding) -> list[str]:
    """The headline, and the lines under it."""
    details = (f"{label}: {text}" if label else text for label, text in list_details(finding))
    return [format_headline(finding), *details]


def list_facts(finding: Finding) -> Iterator[tuple[str, str]]:
    """Where a finding is, what shows it, and what follows from it."""
    if (reason := known_reason(finding)) is not None:
        yield "known", reason
    named = finding.file is None or finding.file in finding.where
    yield "where", finding.where if named else f"{finding.file}, {finding.where}"
    yield from (("module", text) for text in list_sources(finding))
    yield "declared", finding.declared
    yield "observed", finding.observed
    yield from (("evidence", reason) for reason in finding.evidence)
    yield from (("effect", consequence) for consequence in finding.effects)
    if finding.confidence == "suspected":
        yield "confidence", "suspected, not confirmed by a run"


def list_advice(finding: Finding) -> Iterator[tuple[str, str]]:
    """The command that fixes it, and what else would."""
    if finding.repair.command:
        yield "fix", finding.repair.command
    yield "" if finding.repair.command else "fix", finding.repair.text


def list_sources(finding: Finding) -> list[str]:
    """The source of each node that a finding names, with the names of the nodes where they differ; of many the first.

    `model.layers.0.self_attn (LlamaAttention), llama/modeling_llama.py:257 forward`, or the known part of it.
    """
    written = {}
    for source in finding.sources:
        module = "the model itself" if source.module == "" else source.module
        within = f"{module} ({source.kind})" if source.kind else module
        written[source] = ", ".join(filter(None, (within, source.line)))
    texts = list(dict.fromkeys(written.values()))
    if len(texts) > 1:
        texts = [f'"{source.node}" in {text}' for source, text in written.items()]
    return [*texts[:MOST_SOURCES], *([f"and {more} more"] if (more := len(texts) - MOST_SOURCES) > 0 else [])]


def format_issue(issue: Issue) -> str:
    """`https://...: a title; fixed in ort 2.0.0-rc.11`."""
    return f"{issue.url}: {issue.title}" + (f"; fixed in {issue.fixed_in}" if issue.fixed_in else "")


def link_check(named: Finding | Check) -> str:
    """The address of the text about a check."""
    return f"{HOME}/blob/v{__version__}/docs/checks.md#{named.code.lower()}-{named.name}"


def known_reason(finding: Finding) -> str | None:
    """The baseline's reason why a known finding does not count; None for a finding that counts."""
    return None if finding.known is None else str(finding.known)


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
    """The groups in the order of their first findings: the location of a fault may differ, the fault does not."""
    found: dict[Hashable, list[Finding]] = {}
    for one in findings:
        facts = (one.declared, one.observed, one.cause, one.repair, one.use, one.known)
        found.setdefault((one.code, one.severity, one.confidence, *facts), []).append(one)
    return [FindingGroup(tuple(group)) for group in found.values()]


TITLES = {"*": "everything", "KV2-KV3": "decode steps (KV2-KV3)"}
"""What stands for several checks that could not run."""


@record
class OpenChecks:
    """Checks that could not run for one reason."""

    entries: tuple[NotChecked, ...]

    @property
    def title(self) -> str:
        """`KV202, KV301 (merged, pair)`."""
        codes = dict.fromkeys(TITLES.get(entry.code, entry.code) for entry in self.entries)
        stacks = dict.fromkeys(entry.stack for entry in self.entries if entry.stack)
        return ", ".join(codes) + (f" ({', '.join(stacks)})" if stacks else "")

    @property
    def reason(self) -> str:
        """Why they could not run."""
        return self.entries[0].reason

    def describe(self, most: int) -> str:
        """`KV301 (merged): why`; the reason alone where it is about everything."""
        reason = shortened(self.reason, most).removeprefix("not run: ")
        return reason if {entry.code for entry in self.entries} == {"*"} else f"{self.title}: {reason}"

    @property
    def essential(self) -> bool:
        """Whether the model cannot be called healthy without them."""
        return self.entries[0].essential


def group_open_checks(entries: Iterable[NotChecked]) -> list[OpenChecks]:
    """The groups, those first that the verdict needs."""
    found: dict[Hashable, list[NotChecked]] = {}
    for entry in entries:
        found.setdefault((entry.essential, entry.reason), []).append(entry)
    groups = [OpenChecks(tuple(group)) for group in found.values()]
    return sorted(groups, key=lambda group: not group.essential)


def format_places(places: Sequence[str]) -> str:
    """`merged, pair`; of many the first ones and a count."""
    return join_some([cut(place, LONGEST_PLACE) for place in places], MOST_PLACES, rest=", {} more") or "the model"
