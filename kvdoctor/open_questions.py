"""What the runs of a stack leave open, with the reason: silence is not health."""

from collections.abc import Iterable, Iterator, Sequence

from kvdoctor.case import UNDECIDED, Case, rounding_words
from kvdoctor.choices import Required
from kvdoctor.findings import Asks, Finding, NotChecked, Selection, all_checks
from kvdoctor.trace import Run
from kvdoctor.uses import USES


def undecided(case: Case) -> Iterator[NotChecked]:
    """Runs without a verdict. For the consumer's own loop that keeps the model from being called healthy."""
    from kvdoctor.experiments import load

    judged, names = case.judged, {experiment.name for experiment in load() if experiment.judged}
    contract = case.contract
    if contract and judged and judged.outcome == "passed" and contract.new_tokens is not None and case.stack:
        reason = (
            f"the first step takes {contract.new_tokens} new token only, so no call without a cache can be held against"
        )
        yield NotChecked(case.stack.name, "KV301", f"logits parity: {reason}", essential=True)
    for run in case.runs:
        unclear = run.outcome in ("ambiguous", "inconclusive") and run.experiment in names
        if case.stack and (unclear or (run is judged and run.outcome in UNDECIDED)):
            reason = UNDECIDED[run.outcome].format(reason=run.reason)
            if run.by_rounding:
                reason += f"; {rounding_words(run)}"
            open_end = run is judged and not run.by_rounding
            yield NotChecked(case.stack.name, "KV301", f"logits parity of {run.experiment}: {reason}", open_end)


def unnamed(case: Case, findings: list[Finding]) -> Iterator[NotChecked]:
    """A loop that is wrong without a finding: that is a gap between the checks, and never health."""
    run = case.judged
    if run is not None and run.outcome in ("differs", "failed") and all(f.severity == "note" for f in findings):
        reason = (
            f"the {run.experiment} {run.outcome} at step {run.failed_step}, and no check names it; please report it"
        )
        yield NotChecked(case.stack.name if case.stack else None, "KV2-KV3", reason, essential=True)


def passed_over(case: Case, selection: Selection, findings: list[Finding]) -> Iterator[NotChecked]:
    """A loop that is wrong by what another check names than those that were selected. Who ignores that one knows it."""
    asked = any(one.code.startswith(("KV2", "KV3")) and selection.takes(one.code, one.name) for one in all_checks())
    run = case.judged
    if not (selection.select and asked) or selection.ignore or run is None:
        return
    if run.outcome in ("differs", "failed") and all(f.severity == "note" for f in findings):
        reason = f"the {run.experiment} {run.outcome} at step {run.failed_step}, and no selected check names it"
        yield NotChecked(case.stack.name if case.stack else None, "KV2-KV3", reason, essential=True)


def unasked(selection: Selection, rounds: Iterable[Asks], runs: Sequence[Run]) -> Iterator[NotChecked]:
    """A selection of checks none of which could be asked: that no finding came says nothing then."""
    if not selection.select:
        return
    held = set(rounds)
    ran = {run.experiment for run in runs if run.outcome != "skipped"}
    taken = [one for one in all_checks() if selection.takes(one.code, one.name)]
    if all(set(one.asks).isdisjoint(held) or (one.needs and ran.isdisjoint(one.needs)) for one in taken):
        codes = ", ".join(one.code for one in taken)
        reason = "none of the selected checks could be asked: they need a target, a trace, a checkpoint or --thorough"
        yield NotChecked(None, codes, reason, essential=True)


def unproved(case: Case, findings: list[Finding]) -> Iterator[NotChecked]:
    """Uses that must work, and that neither a run showed to work nor a finding denies."""
    assert case.stack is not None  # noqa: S101 - asked only where there is a stack
    for required in case.required:
        runs = [run for run in case.runs if required in _needs(run)]
        if any(run.outcome == "passed" for run in runs) or any(finding.use == required for finding in findings):
            continue
        reason = next((run.reason for run in runs if run.reason), "it was not run")
        yield NotChecked(case.stack.name, "KV2-KV3", f"required use {required}: {reason}", essential=True)


def _needs(run: Run) -> tuple[Required | None, ...]:
    return (USES[run.experiment].required,) if run.experiment in USES else ()
