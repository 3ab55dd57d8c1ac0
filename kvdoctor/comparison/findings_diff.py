"""Compares findings: gone, new, changed or the same.

Findings are matched by fingerprint. A fingerprint includes the names of stacks and tensors, so the remaining findings
are matched by check and stack: the same fault with other names is not a new finding.
"""

from collections.abc import Iterator

from kvdoctor.choices import FailOn
from kvdoctor.findings import SEVERITIES, Finding, all_checks, means_incomplete, reaches
from kvdoctor.report.diff_document import FindingDiff

STATIC = {"file", "contract"}


def compare_findings(
    a: list[Finding], b: list[Finding], stacks: dict[str, str], fail_on: FailOn
) -> Iterator[FindingDiff]:
    """Each finding with its state, new ones first. `stacks` maps the stacks of B to those of A.

    A new finding at or above `fail_on` makes B worse; one that is gone makes it better.
    """
    pairs = _match(a, b, stacks)
    matched = {id(old) for old in pairs.values()}
    for new in b:
        old = pairs.get(id(new))
        if old is None:
            yield _new(new, fail_on)
        elif SEVERITIES.index(new.severity) > SEVERITIES.index(old.severity) and reaches(new, fail_on):
            why = f"{new.code} {new.name} had severity {old.severity}, and has {new.severity}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        elif len(new.subject) > len(old.subject) and reaches(new, fail_on):
            why = f"{new.code} {new.name} affects {len(new.subject)} tensors, not {len(old.subject)}"
            yield FindingDiff("changed", old.fingerprint, new.fingerprint, new, "worse", why)
        else:
            same = (old.severity, old.cause) == (new.severity, new.cause)
            yield FindingDiff("same" if same else "changed", old.fingerprint, new.fingerprint, new)
    for old in a:
        if id(old) not in matched:
            better = reaches(old, fail_on) or old.severity != "note"
            yield FindingDiff("gone", old.fingerprint, None, old, "better" if better else "neutral")


def needs_no_run(finding: Finding) -> bool:
    """Whether an inspection, which runs nothing, can find it."""
    rounds = next((check.rounds for check in all_checks() if check.code == finding.code), ())
    return bool(STATIC.intersection(rounds))


def _match(a: list[Finding], b: list[Finding], stacks: dict[str, str]) -> dict[int, Finding]:
    """The finding of A that matches each finding of B, by the identity of the latter."""
    pairs: dict[int, Finding] = {}
    left = list(a)
    for alike in (_same_fingerprint, lambda old, new: _same_fault(old, new, stacks)):
        for new in (new for new in b if id(new) not in pairs):
            old = next((old for old in left if alike(old, new)), None)
            if old is not None:
                pairs[id(new)] = old
                left = [one for one in left if one is not old]
    return pairs


def _same_fingerprint(old: Finding, new: Finding) -> bool:
    return bool(old.fingerprint) and old.fingerprint == new.fingerprint


def _same_fault(old: Finding, new: Finding, stacks: dict[str, str]) -> bool:
    return old.code == new.code and old.stack == stacks.get(new.stack or "", new.stack)


def _new(finding: Finding, fail_on: FailOn) -> FindingDiff:
    if means_incomplete(finding.code) or not reaches(finding, fail_on):
        return FindingDiff("new", None, finding.fingerprint, finding)
    return FindingDiff(
        "new", None, finding.fingerprint, finding, "worse", f"new {finding.severity} {finding.code} {finding.name}"
    )
