"""The answers of `explain`, and its document and that of `env`, whose field names are the public contract."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.findings import Check, Issue, all_checks, find_check
from kvdoctor.records import record, to_plain
from kvdoctor.report.known_messages import find_texts, issues_of_check, issues_of_message

EXPLAIN_SCHEMA = "kvdoctor/explain/1"
ENV_SCHEMA = "kvdoctor/env/1"
TERM = re.compile(r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)

ListRepairs = Callable[[str], tuple[str, ...]]


@record
class ExplainedCheck:
    """What a finding means.

    Attributes:
        code: the code of the check.
        name: its name.
        summary: what it finds, in one line.
        text: the whole explanation, in paragraphs.
        repairs: the graph repairs that `re-export` tries for it.
        issues: public issues of other projects that concern it.
    """

    code: str
    name: str
    summary: str
    text: str
    repairs: tuple[str, ...] = ()
    issues: tuple[Issue, ...] = ()


@record
class ExplainedMessage:
    """A known error message.

    Attributes:
        seen: what is seen.
        question: the question that decides between its causes.
        answer: the command that answers it.
    """

    seen: str
    question: str
    answer: str


@record
class ExplainedName:
    """A name that is no check: its kind (`term`, `experiment`), the name, and what it means."""

    kind: str
    name: str
    text: str


@record
class Explanation:
    """The document of `explain`.

    Attributes:
        checks: the checks that were asked for.
        messages: the known messages that are like the text.
        issues: public issues of other projects whose message is in the text.
        names: terms of the glossary and experiments of that name.
        closest: where nothing is known, the known messages that share most with the text.
    """

    checks: tuple[ExplainedCheck, ...] = ()
    messages: tuple[ExplainedMessage, ...] = ()
    issues: tuple[Issue, ...] = ()
    names: tuple[ExplainedName, ...] = ()
    closest: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return _with_head(EXPLAIN_SCHEMA, to_plain(self))


@record
class Component:
    """Something that kvdoctor uses.

    Attributes:
        state: ok, or what is wrong with it: MISSING, absent, BROKEN; `limits` for what limits a run.
        text: its name and version, and the command that installs it.
    """

    state: str
    text: str

    def __str__(self) -> str:
        """The line in text."""
        return f"{self.state:<8} {self.text}"


@record
class EnvironmentDocument:
    """The document of `env`.

    Attributes:
        python: the version of Python.
        platform: the system and the processor.
        components: everything that kvdoctor uses.
    """

    python: str
    platform: str
    components: tuple[Component, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        return _with_head(ENV_SCHEMA, to_plain(self))

    @property
    def head(self) -> str:
        """The first line of the text."""
        return f"kvdoctor {__version__}, Python {self.python}, {self.platform}"

    def __str__(self) -> str:
        """The text: a line for each component."""
        return "\n".join([self.head, *map(str, self.components)])


def _with_head(schema: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"schema": schema, "tool": {"name": "kvdoctor", "version": __version__}, **body}


def explain(text: str | None, list_repairs: ListRepairs) -> Explanation:
    """What is known of a code, a name, a term or a message; without one, all checks.

    Raises:
        UsageError: the text is empty, or a name that is spelled almost as a check.
    """
    if text is None:
        return Explanation(_describe(all_checks(), list_repairs))
    wanted = text.strip()
    if not wanted:
        what = "give a code, a name or a message; `kvdoctor explain` alone lists all checks"
        raise UsageError(f"the text is empty: {what}")
    if exact := find_check(wanted):
        return Explanation(_describe((exact,), list_repairs))
    part = wanted.lower()
    checks = [one for one in all_checks() if one.code.lower().startswith(part) or part in one.name]
    names = _find_names(part)
    if checks or names:
        return Explanation(_describe(checks, list_repairs), names=names)
    found, issues = find_texts(wanted), issues_of_message(wanted)
    known = [name for check in all_checks() for name in (check.code, check.name)]
    if not found.entries and not issues and " " not in wanted and (hint := did_you_mean(wanted, known)):
        raise UsageError(f"there is no check {wanted!r}; {hint} `kvdoctor explain` lists all checks")
    messages = (ExplainedMessage(one.seen, *answer) for one in found.entries for answer in one.answers)
    return Explanation(messages=tuple(messages), issues=issues, closest=tuple(one.seen for one in found.closest))


def _describe(checks: Iterable[Check], list_repairs: ListRepairs) -> tuple[ExplainedCheck, ...]:
    texts = ((one.code, one.name, one.summary, one.documentation) for one in checks)
    return tuple(ExplainedCheck(*text, list_repairs(text[1]), issues_of_check(text[1])) for text in texts)


def _find_names(wanted: str) -> tuple[ExplainedName, ...]:
    from kvdoctor.decode.experiments import by_name

    found = [ExplainedName("term", terms, meaning) for terms, meaning in _list_terms() if wanted in _split(terms)]
    if one := by_name().get(wanted):
        use = f"It tries this use: {one.use.words}." if one.use else ""
        explains = f"It explains differences of {', '.join(one.explains)}." if one.explains else ""
        parts = (f"{one.question}.", use, explains, one.why and f"{one.why}.", "docs/experiments.md says when it runs.")
        found.append(ExplainedName("experiment", one.name, " ".join(filter(None, parts))))
    return tuple(found)


@cache
def _list_terms() -> tuple[tuple[str, str], ...]:
    page = Path(__file__).with_name("glossary.md").read_text(encoding="utf-8")
    return tuple((row["terms"], row["meaning"]) for row in TERM.finditer(page) if row["terms"] not in ("term", "---"))


def _split(terms: str) -> set[str]:
    """Each name of a row, alone and as it stands: `keep (hold)` is found as keep, hold and keep (hold)."""
    plain = terms.lower().replace("`", "")
    return {plain, *(name.strip() for name in re.split(r",| and |[()]", plain)), plain.partition(" (")[0]}
