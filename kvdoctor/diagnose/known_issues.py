"""Public issues of other projects that concern a finding, from the table `known_issues.json`; no network is used.

A pointer is no verdict: causes are decided by runs and graphs. An entry is listed for a finding if its check is named,
one of its quotes occurs in what was observed, and the file has all of its operators.
"""

import json
import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib.resources import files

from kvdoctor.findings import Finding, Issue
from kvdoctor.records import record

MOST = 2
"""Issues that are listed for one finding."""
LEAST_PART = 16
"""Characters that a part of a quote must have to find it: `the version` is part of too many."""
LEAST_QUOTE = 12
"""Characters that a text must have to be looked for among the quotes and titles."""


@record
class KnownIssue:
    """An entry of the table. `quotes`, `operators` and `producers` are empty where any will do."""

    issue: Issue
    checks: tuple[str, ...]
    quotes: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    producers: tuple[str, ...] = ()

    def concerns(self, finding: Finding, operators: Collection[str], producer: str) -> bool:
        """Whether it may be the cause of a finding in a file with these operators, written by that producer."""
        words = _normalize(" ".join((finding.cause, finding.observed, *finding.effects, *finding.evidence)))
        return (
            finding.name in self.checks
            and (not self.quotes or any(_has_words(words, _normalize(quote)) for quote in self.quotes))
            and set(self.operators) <= {*operators}
            and (not self.producers or any(name in producer.lower() for name in self.producers))
        )


@cache
def list_issues() -> tuple[KnownIssue, ...]:
    """All entries."""
    entries = json.loads(files("kvdoctor.diagnose").joinpath("known_issues.json").read_text(encoding="utf-8"))
    names = ("checks", "quotes", "operators", "producers")
    return tuple(
        KnownIssue(
            Issue(entry["url"], entry["title"], entry["fixed_in"]), *(tuple(entry.get(name, ())) for name in names)
        )
        for entry in entries
    )


def find_issues(finding: Finding, operators: Collection[str], producer: str) -> tuple[Issue, ...]:
    """The issues that concern a finding, those with a quote first."""
    found = [entry for entry in list_issues() if entry.concerns(finding, operators, producer)]
    found.sort(key=lambda entry: not entry.quotes)
    return tuple(entry.issue for entry in found[:MOST])


def issues_of_check(name: str) -> tuple[Issue, ...]:
    """The issues of a check."""
    return tuple(entry.issue for entry in list_issues() if name in entry.checks)


def issues_of_message(text: str) -> tuple[Issue, ...]:
    """The issues of which a text has a quote, or that a part of their title or quote is."""
    wanted = _normalize(text)
    return tuple(entry.issue for entry in list_issues() if _fits(wanted, (*entry.quotes, entry.issue.title)))


def _has_words(text: str, quote: str) -> bool:
    """Whether a quote stands in a text as whole words: `If` is no part of `different`."""
    return re.search(rf"(?<![a-z0-9_]){re.escape(quote)}(?![a-z0-9_])", text) is not None


def _fits(wanted: str, known: Iterable[str]) -> bool:
    texts = [_normalize(text) for text in known]
    inside = any(len(text) >= LEAST_QUOTE and text in wanted for text in texts)
    part = len(wanted) >= LEAST_PART and any(_has_words(text, wanted) for text in texts)
    return inside or part


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())
