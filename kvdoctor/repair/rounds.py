"""Repair in rounds: a copy is repaired, diagnosed after each round, and proved at the end.

A fault may be hidden by another and show only after that one is repaired: it gets a round of its own. Repairs that did
not help are left out of a second attempt, so that they do not prevent the proof of the others.
"""

from dataclasses import replace

from kvdoctor.records import record
from kvdoctor.repair.apply import Applied, RepairChoice, RepairedFiles, apply_repairs
from kvdoctor.repair.output import put_back, write_changed
from kvdoctor.repair.proof import find_unhelpful, prove
from kvdoctor.repair.rediagnose import opened_at_other_level, prove_unoptimized, rediagnose
from kvdoctor.repair.session import DiagnosisSide, Outcome, RepairSession
from kvdoctor.report.repair_record import NotRepaired

MOST_ROUNDS = 3


@record(slots=False)
class _Attempt:
    """The outcome of all rounds, and the names of all files that differ from the original or did so before."""

    outcome: Outcome
    changed: frozenset[str]


def repair_and_prove(session: RepairSession, first: RepairedFiles, choice: RepairChoice) -> Outcome:
    """Write the first repairs, go on in rounds, and prove; if that fails, once more without unhelpful repairs."""
    attempt = _attempt(session, first, choice, frozenset())
    outcome = attempt.outcome
    idle = tuple(find_unhelpful(outcome.applied, session.before.report, outcome.after.report))
    useless = tuple((one.stack, one.repair.name) for one in idle)
    if outcome.holds or not idle or not {(a.stack, a.repair.name) for a in outcome.applied} - set(useless):
        return replace(outcome, not_repaired=(*outcome.not_repaired, *map(_report_unhelpful, idle)))
    put_back(session.folder, outcome.changed_files, session.at)
    choice = RepairChoice(choice.names, (*choice.left_out, *useless))
    fewer = apply_repairs(session.folder, session.before.report, choice, session.runtime, session.options)
    outcome = _attempt(session, fewer, choice, attempt.changed).outcome
    return replace(outcome, not_repaired=(*outcome.not_repaired, *map(_report_unhelpful, idle)))


def accept_unrepaired(before: DiagnosisSide, first: RepairedFiles) -> Outcome:
    """The outcome if nothing is repaired before a change of layout."""
    return Outcome(before, before, (), first.not_repaired, ())


def _attempt(
    session: RepairSession, repaired: RepairedFiles, choice: RepairChoice, changed: frozenset[str]
) -> _Attempt:
    applied, not_repaired = list(repaired.applied), list(repaired.not_repaired)
    changed |= _write(session, repaired)
    after = rediagnose(session, changed)
    for _ in range(MOST_ROUNDS - 1):
        used = tuple((one.stack, one.repair.name) for one in applied)
        remaining = RepairChoice(choice.names, (*choice.left_out, *used), notes=False)
        repaired = apply_repairs(session.open_copy(), after.report, remaining, session.runtime, session.options)
        if not repaired.applied:
            break
        applied += repaired.applied
        not_repaired += repaired.not_repaired
        changed |= _write(session, repaired)
        after = rediagnose(session, changed)
    other = [stack for stack in {one.stack for one in applied} if opened_at_other_level(stack, session.before, after)]
    instead = {stack: prove_unoptimized(session, stack, after) for stack in other}
    proof = tuple(prove(applied, session.before, after, instead))
    return _Attempt(Outcome(session.before, after, tuple(applied), tuple(not_repaired), proof), changed)


def _write(session: RepairSession, repaired: RepairedFiles) -> frozenset[str]:
    """Write the changed files of the copy; gives their names."""
    repairs: dict[str, tuple[str, ...]] = {}
    for one in repaired.applied:
        for file in dict.fromkeys(change.file for change in one.changes):
            repairs[file] = (*repairs.get(file, ()), one.repair.name)
    write_changed(repaired.copy, session.at, repairs)
    return frozenset(repaired.copy.changed)


def _report_unhelpful(one: Applied) -> NotRepaired:
    reason = f"it changed {len(one.changes)} places, and the finding is still there"
    return NotRepaired(one.stack, one.because[0], one.repair.name, reason)
