"""A finding in words: its headline, and the labeled lines below it."""

from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding, Issue, NodeSource

MOST_SOURCES = 4


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
    yield from (("module", text) for text in list_sources(finding))
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


def list_sources(finding: Finding) -> list[str]:
    """The source of each node that a finding names, with the names of the nodes where they differ; of many the first.

    `model.layers.0.self_attn (LlamaAttention), llama/modeling_llama.py:257 forward`, as far as it is known.
    """
    told = {source: _format_source(source) for source in finding.sources}
    texts = list(dict.fromkeys(told.values()))
    if len(texts) > 1:
        texts = [f'"{source.node}" in {text}' for source, text in told.items()]
    more = len(texts) - MOST_SOURCES
    return [*texts[:MOST_SOURCES], *([f"and {more} more"] if more > 0 else [])]


def _format_source(source: NodeSource) -> str:
    module = "the model itself" if source.module == "" else source.module
    within = f"{module} ({source.kind})" if source.kind else module
    return ", ".join(filter(None, (within, source.line)))


def format_issue(issue: Issue) -> str:
    """`https://...: a title; fixed in ort 2.0.0-rc.11`."""
    return f"{issue.url}: {issue.title}" + (f"; fixed in {issue.fixed_in}" if issue.fixed_in else "")


def known_reason(finding: Finding) -> str | None:
    """The baseline's reason why a known finding does not count; None for a finding that counts."""
    return None if finding.known is None else str(finding.known)


def _location(finding: Finding) -> str:
    if finding.file is None or finding.file in finding.where:
        return finding.where
    return f"{finding.file}, {finding.where}"
