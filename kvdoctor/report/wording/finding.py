"""A finding in words: its headline, and the labeled lines below it."""

from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding, Issue


def format_headline(finding: Finding, places: Sequence[str] = ()) -> str:
    """`error[KV203] cross-cache-emptied (merged): a decode step returns ...`; `places` are the stacks of all alike."""
    where = ", ".join(places) if len(places) > 1 else finding.stack
    stack = f" ({where})" if where else ""
    return f"{format_name(finding)}{stack}: {finding.cause}"


def format_name(finding: Finding) -> str:
    """`error[KV203] cross-cache-emptied`."""
    return f"{finding.severity}[{finding.code}] {finding.name}"


def list_details(finding: Finding) -> Iterator[tuple[str, str]]:
    """The lines under a headline in their fixed order, as label and text; the label is empty where it repeats."""
    if (reason := known_reason(finding)) is not None:
        yield "known", reason
    yield "where", _location(finding)
    yield "declared", finding.declared
    yield "observed", finding.observed
    for reason in finding.evidence:
        yield "evidence", reason
    for consequence in finding.effects:
        yield "effect", consequence
    if finding.confidence == "suspected":
        yield "confidence", "suspected, not confirmed by a run"
    if finding.repair.command:
        yield "fix", finding.repair.command
        yield "", finding.repair.text
    else:
        yield "fix", finding.repair.text
    for issue in finding.issues:
        yield "issue", format_issue(issue)


def format_issue(issue: Issue) -> str:
    """`https://...: a title; mended in ort 2.0.0-rc.11`."""
    return f"{issue.url}: {issue.title}" + (f"; mended in {issue.mended}" if issue.mended else "")


def known_reason(finding: Finding) -> str | None:
    """The baseline's reason why a known finding does not count; None for a finding that counts."""
    return None if finding.known is None else str(finding.known)


def _location(finding: Finding) -> str:
    if finding.file is None or finding.file in finding.where:
        return finding.where
    return f"{finding.file}, {finding.where}"
