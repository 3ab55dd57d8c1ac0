"""What `kvdoctor explain TEXT` answers: checks, experiments, terms of the glossary, known texts and issues."""

import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.findings import Check, all_checks, find_check
from kvdoctor.report.info_document import ExplainedCheck, ExplainedMessage, ExplainedName, Explanation
from kvdoctor.report.known_messages import find_texts, issues_of_check, issues_of_message

TERM = re.compile(r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)

ListRepairs = Callable[[str], tuple[str, ...]]


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
