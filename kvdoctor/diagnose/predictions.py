"""Findings that need no run: the checks of round `runs`, asked about abstract runs.

A prediction has the code of the check that a run would confirm it by. It is suspected and at most a warning:
`step-test` asks the same checks about real runs instead, and so confirms it, replaces it, or withdraws it.
Nothing follows from a stack without predictions: what an abstract run cannot compute is not reported.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.analysis.contract_reader import add_observed_sizes
from kvdoctor.decode.runs import GENERAL_CAUSES, Run
from kvdoctor.diagnose.context import ContractContext, RunContext, extend_context
from kvdoctor.diagnose.not_checked import find_unmet_preconditions
from kvdoctor.diagnose.run_checks import CheckResults, run_checks
from kvdoctor.findings import Finding, NotChecked, Selection, checks_of

NOT_PREDICTED = ("cache-not-faster", "empty-tensor-hazard", "session-refused", "worker-died", "cached-branch-first")
"""Checks about time, memory or the runtime, which an abstract run does not have."""

UNSEEN = "derived from the graph, without a run"


def predict_faults(context: ContractContext, found: CheckResults, selection: Selection) -> CheckResults:
    """What runs of a stack would show, as far as the graph tells.

    Nothing where the contract has an error already: one fault is one finding.
    """
    if not _takes_any(selection):
        return CheckResults()
    contract = context.contract
    if contract.no_decoder is not None or contract.frozen_past is not None:
        return CheckResults()
    if any(finding.severity == "error" for finding in found.findings):
        return CheckResults()
    if next(find_unmet_preconditions(context.stack, contract), None) is not None:
        return CheckResults()
    # Loaded here, with numpy: where nothing is run, as of a model with a faulty contract, the start takes half as long.
    from kvdoctor.diagnose.abstract_runs import NotFollowed, run_abstractly

    try:
        runs = run_abstractly(context)
        return CheckResults(tuple(_ask_checks(context, runs, found, selection)) if runs else ())
    except NotFollowed as why:
        return CheckResults(not_checked=(NotChecked(context.stack.name, "KV2-KV3", f"nothing was predicted: {why}"),))
    except Exception as error:  # an error of kvdoctor here must not cost what the files show
        reason = f"the analysis without a run crashed ({type(error).__name__}: {error}); please report it"
        return CheckResults(not_checked=(NotChecked(context.stack.name, "KV2-KV3", reason, essential=True),))


def _ask_checks(
    context: ContractContext, runs: tuple[Run, ...], found: CheckResults, selection: Selection
) -> Iterator[Finding]:
    """The findings that the checks of round `runs` make of abstract runs."""
    contract = add_observed_sizes(context.contract, runs)
    asked = extend_context(replace(context, contract=contract), RunContext, runs=runs)
    known = {finding.code for finding in found.findings}
    for finding in run_checks(asked, "runs", selection).findings:
        if finding.severity == "note" or finding.name in NOT_PREDICTED or finding.code in known:
            continue
        # Only the size of the difference decides on a rounded cache: a scale that is taken from all entries makes each
        # of them depend on the others, by no more than it rounds.
        if finding.name not in GENERAL_CAUSES or not asked.rounded_presents:
            yield _weaken(finding, runs)


def _takes_any(selection: Selection) -> bool:
    """Whether a check that can be predicted is selected."""
    if not selection.select and not selection.ignore:
        return True
    return any(selection.takes(one.code, one.name) for one in checks_of("runs") if one.name not in NOT_PREDICTED)


def _weaken(finding: Finding, runs: tuple[Run, ...]) -> Finding:
    """The finding as one that no run has confirmed. Sizes are those of any run; differences of logits are not."""
    failed = next((run for run in runs if run.error and finding.observed.endswith(run.error)), None)
    shown = f": {failed.experiment}, step {failed.failed_step}: {failed.error}" if failed is not None else ""
    return replace(
        finding,
        severity="warning",
        confidence="suspected",
        where=finding.where.partition(", ")[0] if finding.where.startswith("output ") else finding.where,
        observed=UNSEEN + shown,
        evidence=(),
        effects=("`kvdoctor step-test` confirms it, or withdraws it",),
    )
