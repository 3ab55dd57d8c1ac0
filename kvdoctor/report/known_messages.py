"""What is known of a text or a finding: the table known_texts.json, and public issues of other projects.

An entry of the table has texts of runtimes and symptoms in a user's language, and for each cause the question that
decides and the command. A text leads to the entry with which it shares the rarest terms; numbers and names of nodes are
ignored. The frequent entries are the page docs/faq.md (`python docs/make_faq.py`). An issue of the table
`known_issues.json` is no verdict: causes are decided by runs and graphs. It is listed for a finding if its check is
named, one of its quotes occurs in what was observed, and the file has all of its operators.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvdoctor.findings import Finding, Issue
from kvdoctor.records import from_plain, record

LINK = re.compile(r"\[([^\]]+)\]\((\w[\w-]*\.md)\)")
NODES = re.compile(r"\S*[/\\]\S*[/\\:]\S*|(?<=name:)\S+|\{[^}]*\}|(?<=input:)past\S+")
"""Paths, names of nodes and inputs, shapes: they say where, not what."""
ENDINGS = ("ations", "ation", "ings", "ing", "ies", "ed", "es", "ly", "s", "e")
LEAST_QUOTE = 16
"""Characters that a text and a quote must have to be found in one another: `the version` is part of too many."""
LEAST_SHARE, LEAST_COMMON, LEAST_OF_TEXT, LEAST_ALONE = 0.6, 1.2, 0.12, 0.45
"""What must be common: a share of the phrase, or of a shorter text; a weight (1: a term of one entry); a share of the
text, since a long log shares some terms with everything. A whole phrase of frequent terms needs the last share."""
NEAR, MOST_ENTRIES, MOST_CLOSEST = 0.9, 2, 2
"""Entries are listed that score that share of the best; so many at most."""
MOST_ISSUES = 2
"""Issues that are listed for one finding."""


@record
class Cause:
    """One cause of a text: the question that decides, and what answers it."""

    question: str
    then: str


@record
class KnownText:
    """An entry: `texts` of runtimes, `symptoms` as people describe them, and causes; `part` of the page, or `more`."""

    name: str
    part: str
    causes: tuple[Cause, ...]
    texts: tuple[str, ...] = ()
    symptoms: tuple[str, ...] = ()

    @property
    def seen(self) -> str:
        """What is seen, for a heading."""
        return ", ".join(f"`{text}`" for text in self.texts[:2]) or self.symptoms[0]

    @property
    def answers(self) -> tuple[tuple[str, str], ...]:
        """Question and answer of each cause, with links as names of pages."""
        return tuple((cause.question, LINK.sub(r"\1 (docs/\2)", cause.then)) for cause in self.causes)


@record
class Found:
    """The entries that a text leads to, the best first; if there are none, the `closest`."""

    entries: tuple[KnownText, ...] = ()
    closest: tuple[KnownText, ...] = ()


@cache
def _read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("known_texts.json").read_text(encoding="utf-8"))
    return table


@cache
def list_texts() -> tuple[KnownText, ...]:
    """All entries of the table."""
    return from_plain(tuple[KnownText, ...], _read_table()["entries"], newer=True)


@cache
def _normal_forms() -> tuple[tuple[tuple[re.Pattern[str], str], ...], frozenset[str]]:
    """What is rewritten to one term, and the terms that are ignored."""
    rewrites = tuple((re.compile(pattern), term) for pattern, term in _read_table()["rewrites"])
    return rewrites, frozenset(_read_table()["ignored"].split())


def list_terms(text: str) -> frozenset[str]:
    """The terms of a text by which it is found: without numbers, names of nodes and endings, synonyms as one."""
    text, (rewrites, ignored) = NODES.sub(" ", text.lower()), _normal_forms()
    for pattern, term in rewrites:
        text = " ".join(pattern.sub(term, text).split())
    names = (name for name in re.findall(r"[^\W\d_]+", text) if name not in ignored and len(name) > 1)
    return frozenset(map(_stem, names))


def _stem(name: str) -> str:
    for ending in ENDINGS:
        if name.endswith(ending) and len(name) - len(ending) >= 3:
            return name.removesuffix(ending)
    return name


@cache
def _phrases() -> tuple[tuple[KnownText, frozenset[str]], ...]:
    return tuple((one, list_terms(phrase)) for one in list_texts() for phrase in (*one.texts, *one.symptoms))


@cache
def _weights() -> dict[str, float]:
    """The weight of each term: 1 if one entry has it, less if many do."""
    terms: dict[KnownText, set[str]] = {}
    for one, phrase in _phrases():
        terms.setdefault(one, set()).update(phrase)
    entries = Counter(term for known in terms.values() for term in known)
    most = math.log(1 + len(list_texts()))
    return {term: math.log(1 + len(list_texts()) / count) / most for term, count in entries.items()}


def _weigh(terms: Iterable[str]) -> float:
    return sum(_weights().get(term, 1.0) for term in terms)


@cache
def _read_quote(quote: str) -> tuple[str, re.Pattern[str]]:
    known = _normalize(quote)
    return known, re.compile(re.sub(r"\\?-?(?:\d+|\bn\b)", r"-?\\d+", re.escape(known)))


def _contains(text: str, quote: str) -> float:
    """The length of a quote that a text contains, whatever its numbers are, or that the text is a part of; else 0."""
    known, pattern = _read_quote(quote)
    found = len(known) >= LEAST_QUOTE and pattern.search(text)
    return len(known) if found or (len(text) >= LEAST_QUOTE and text in known) else 0


def find_texts(text: str) -> Found:
    """The entries whose texts or symptoms share enough rare terms with a text; else those that share most."""
    wanted, plain = list_terms(text), _normalize(text)
    whole = _weigh(wanted)
    sizes = {entry: max(map(partial(_contains, plain), entry.texts), default=0) for entry in list_texts()}
    scores = {entry: size for entry, size in sizes.items() if size}
    near: dict[KnownText, float] = {}
    for entry, phrase in _phrases():
        common = _weigh(wanted & phrase)
        if not common:
            continue
        size = _weigh(phrase)
        score = common * common / size
        near[entry] = max(near.get(entry, 0.0), score)
        enough = common >= LEAST_COMMON or (wanted >= phrase and common >= LEAST_ALONE * whole)
        if enough and common >= LEAST_SHARE * min(whole, size) and common >= LEAST_OF_TEXT * whole:
            scores[entry] = max(scores.get(entry, 0.0), score)
    best = max(scores.values(), default=0.0)
    entries = sorted((one for one, score in scores.items() if score >= NEAR * best), key=lambda one: -scores[one])
    closest = sorted(near, key=lambda one: -near[one])
    return Found(tuple(entries[:MOST_ENTRIES]), () if entries else tuple(closest[:MOST_CLOSEST]))


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
        quotes = (re.escape(_normalize(quote)) for quote in self.quotes)
        return (
            finding.name in self.checks
            # Between word boundaries: `If` is not found in `different`.
            and (not self.quotes or any(re.search(rf"(?<![a-z0-9_]){one}(?![a-z0-9_])", words) for one in quotes))
            and set(self.operators) <= {*operators}
            and (not self.producers or any(name in producer.lower() for name in self.producers))
        )


@cache
def list_issues() -> tuple[KnownIssue, ...]:
    """All entries."""
    entries = json.loads(Path(__file__).with_name("known_issues.json").read_text(encoding="utf-8"))
    issues = [{name: entry.pop(name) for name in ("url", "title", "fixed_in")} for entry in entries]
    whole = [{"issue": issue, **entry} for issue, entry in zip(issues, entries, strict=True)]
    return from_plain(tuple[KnownIssue, ...], whole, newer=True)


def find_issues(finding: Finding, operators: Collection[str], producer: str) -> tuple[Issue, ...]:
    """The issues that concern a finding, those with a quote first."""
    found = [entry for entry in list_issues() if entry.concerns(finding, operators, producer)]
    found.sort(key=lambda entry: not entry.quotes)
    return tuple(entry.issue for entry in found[:MOST_ISSUES])


def issues_of_check(name: str) -> tuple[Issue, ...]:
    """The issues of a check."""
    return tuple(entry.issue for entry in list_issues() if name in entry.checks)


def issues_of_message(text: str) -> tuple[Issue, ...]:
    """The issues of which a text has a quote, or that a part of their title or quote is."""
    held = partial(_contains, _normalize(text))
    return tuple(entry.issue for entry in list_issues() if any(map(held, (*entry.quotes, entry.issue.title))))


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())
