"""Findings that are gone, new, or on both sides.

They are matched by fingerprint; a fingerprint holds the names of stacks and tensors, so what has none to match is
matched by its check, on the stacks that stand side by side: the same fault under other names is no new one.
"""

from collections.abc import Iterator

from kvdoctor.choices import FailOn
from kvdoctor.findings import SEVERITIES, Finding, Severity, all_checks
from kvdoctor.report.diff_document import FindingDiff
from kvdoctor.report.document import means_incomplete

STATIC = {"file", "contract"}


def findings_diff(a: list[Finding], b: list[Finding], stacks: dict[str, str], fail_on: FailOn) -> Iterator[FindingDiff]:
    """Each finding with its state, new ones first. `stacks` are the stacks of A by those of B.

    New ones at or above `fail_on` make B worse, and those that are gone make it better.
    """
    pairs = _paired(a, b, stacks)
    met = {id(old) for old in pairs.values()}
    for new in b:
        old = pairs.get(id(new))
        if old is None:
            yield _new(new, fail_on)
        elif SEVERITIES.index(new.severity) > SEVERITIES.index(old.severity) and _counts(new.severity, fail_on):
            why = f"{new.code} {new.name} was of severity {old.severity}, and is of {new.severity}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        elif len(new.subject) > len(old.subject) and _counts(new.severity, fail_on):
            why = f"{new.code} {new.name} concerns {len(new.subject)} tensors, not {len(old.subject)}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        else:
            same = (old.severity, old.cause) == (new.severity, new.cause)
            yield FindingDiff("same" if same else "changed", old.fingerprint, new.fingerprint, new)
    for old in a:
        if id(old) not in met:
            better = _counts(old.severity, fail_on) or old.severity != "note"
            yield FindingDiff("gone", old.fingerprint, None, old, "better" if better else "neutral")


def needs_no_run(finding: Finding) -> bool:
    """Whether an inspection can find it."""
    asks = next((check.asks for check in all_checks() if check.code == finding.code), ())
    return bool(STATIC.intersection(asks))


def _paired(a: list[Finding], b: list[Finding], stacks: dict[str, str]) -> dict[int, Finding]:
    """By the identity of a finding of B, the one of A that it is."""
    pairs: dict[int, Finding] = {}
    left = list(a)
    for like in (_same_print, lambda old, new: _same_fault(old, new, stacks)):
        for new in (new for new in b if id(new) not in pairs):
            old = next((old for old in left if like(old, new)), None)
            if old is not None:
                pairs[id(new)] = old
                left = [one for one in left if one is not old]
    return pairs


def _same_print(old: Finding, new: Finding) -> bool:
    return bool(old.fingerprint) and old.fingerprint == new.fingerprint


def _same_fault(old: Finding, new: Finding, stacks: dict[str, str]) -> bool:
    return old.code == new.code and old.stack == stacks.get(new.stack or "", new.stack)


def _new(finding: Finding, fail_on: FailOn) -> FindingDiff:
    if means_incomplete(finding.code) or not _counts(finding.severity, fail_on):
        return FindingDiff("new", None, finding.fingerprint, finding)
    return FindingDiff(
        "new", None, finding.fingerprint, finding, "worse", f"new {finding.severity} {finding.code} {finding.name}"
    )


def _counts(severity: Severity, fail_on: FailOn) -> bool:
    return fail_on != "never" and SEVERITIES.index(severity) >= SEVERITIES.index(fail_on)
