"""What was not checked, and why: preconditions of a run that are not met, and runs without a clear result."""

from collections.abc import Iterable, Iterator, Sequence

from kvdoctor.analysis.completeness import find_unfilled
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.choices import RESTS_ON
from kvdoctor.contract import DECODING, CacheContract, describe
from kvdoctor.decode.runs import HISTORY, OWN_SESSION, SEARCH, UNDECIDED, WRONG, Run
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Finding, NotChecked, Round, Selection, all_checks
from kvdoctor.report.facts import DraftFacts
from kvdoctor.report.wording.runs import describe_comparisons, describe_rounding

REASONS = {
    "skipped": "{reason}",
    "died": "{reason}",
    "inconclusive": "{reason}",
    "ambiguous": "the difference of the logits is between noise and a fault",
}
"""Outcomes of the checked loop that leave open whether the model is healthy, and the reason reported for each."""

DIFFERS = "the logits differ by more than noise"
"""The reason for a run that differs, and agrees in a float32 copy of the model."""

COMPILED = "EPContext"
"""The operator that holds a graph in the binary form of a device. Source: ONNX Runtime, EP context design."""


def find_unmet_preconditions(stack: StackFiles, contract: CacheContract, opened: bool = False) -> Iterator[str]:
    """Why decode steps cannot be run on a stack; the first reason is the one to report.

    Where it is `opened`, the graphs inside an operator are called as models of their own, and the blocks of a paged
    cache are given out by us.
    """
    yield from (problem.cause for problem in stack.problems if problem.essential or not problem.declared)
    for file in stack.members:
        if file.external_problems:
            yield f"the external data of {file.name} cannot be read"
    if stack.operator is not None and not opened:
        yield f"the operator {stack.operator} contains the whole loop and its cache; there is nothing to feed back"
    if any(slot.growth == "paged" for slot in contract.slots):
        yield from _find_unpaged(stack, contract, opened)
    yield from _find_other_callers(stack, contract)
    empty = {*find_unfilled(contract)}
    if set(contract.missing) - empty or stack.kind == "unpaired" or not contract.slots:
        inside = f" of the decoder inside {stack.operator}" if stack.operator is not None else ""
        yield f"the cache contract{inside} is not complete"
    yield from _find_undrivable(contract)
    yield from _find_types_without_feed(contract)


def _find_other_callers(stack: StackFiles, contract: CacheContract) -> Iterator[str]:
    """Why no decode loop of ours could call the graph, whatever its contract lacks."""
    if any(COMPILED in file.view.operators for file in stack.members if file.view is not None):
        yield f"the graph was compiled for a device ({COMPILED}), and only the provider of that device can run it"
    if contract.no_decoder is not None:
        yield f"not a decoder with a KV cache: {contract.no_decoder}"


def _find_unpaged(stack: StackFiles, contract: CacheContract, opened: bool) -> Iterator[str]:
    """Why the blocks of a paged cache cannot be given out by us."""
    from kvdoctor.decode.paged import NO_KERNEL, read_paged_inputs

    if any(NO_KERNEL in file.view.operators for file in stack.members if file.view is not None):
        yield f"a paged cache needs the block tables of the serving engine; {NO_KERNEL} has no kernel for the CPU"
    if not opened:
        yield "a paged cache needs the block tables of the serving engine"
    elif reason := read_paged_inputs(contract).unknown:
        yield f"a paged cache needs the block tables of the serving engine; {reason}"


def _find_undrivable(contract: CacheContract) -> Iterator[str]:
    """What is understood and still cannot be run step by step."""
    yield from _find_other_tokens(contract)
    if contract.graph("decode").port("logits") is None:
        yield "the decoder returns tokens and no logits, so there is nothing to compare with a reference run"
    if any(find_unfilled(contract)):
        yield "no present output fills one of the past inputs"
    from kvdoctor.decode.experiments.lengths import can_be_filled

    if contract.frozen_past is not None:
        if reason := can_be_filled(contract):
            yield reason
    elif contract.new_tokens not in (None, 1):
        from kvdoctor.decode.experiments.fixed_chunks import drives

        if reason := drives(contract):
            yield f"the first step takes {contract.new_tokens} new tokens only, and cannot be compared: {reason}"


def _find_other_tokens(contract: CacheContract) -> Iterator[str]:
    """Tokens in another order of axes than that of every call of ours, [batch, new], or without a batch."""
    graphs = [contract.graph(phase) for phase in DECODING]
    batched = any(axis.startswith("batch") for graph in graphs for port in graph.inputs for axis in port.axes)
    for port in (port for graph in graphs for port in graph.inputs if port.role in ("token_ids", "embeddings")):
        kind = describe(port.dtype, port.shape)
        if port.axes[:2] == ("new", "batch"):
            yield f"{port.name!r}, {kind}, has the new tokens in front of the batch; steps are run on [batch, new]"
        elif port.axes == ("new",) and not batched and contract.growing and contract.new_tokens is None:
            yield f"neither {port.name!r}, {kind}, nor the cache has a batch axis; steps are run on [batch, new]"


def _find_types_without_feed(contract: CacheContract) -> Iterator[str]:
    """Inputs of an element type for which no synthetic feed exists."""
    from kvdoctor.decode.calls import NUMPY_TYPES

    unknown = {port.dtype for graph in contract.graphs.values() for port in graph.inputs} - set(NUMPY_TYPES)
    if unknown:
        yield f"there is no synthetic feed of element type {', '.join(sorted(unknown))}"


def find_undecided_runs(context: ContractContext, findings: Sequence[Finding] = ()) -> Iterator[NotChecked]:
    """Runs without a verdict. For the consumer's own loop that keeps the model from being called healthy.

    What is rounding alone is left out where a finding tells of the rounding of the loop.
    """
    from kvdoctor.decode.experiments import judged_names

    loop, stack, new_tokens = context.checked_loop, context.stack.name, context.contract.new_tokens
    told = (finding for finding in findings if finding.name == "cached-differs" and loop is not None)
    explained = loop is not None and loop.by_rounding and any(f.where.endswith(f", {loop.experiment}") for f in told)
    names = judged_names() - {SEARCH}
    if loop and loop.outcome == "passed" and new_tokens == 1:
        reason = (
            f"the first step takes {new_tokens} new token only, so there is no call without a cache to compare with"
        )
        left = _find_uncompared(context, findings)
        instead = f"; {left}" if left else f"; compared instead: {describe_comparisons(context.runs)}"
        yield NotChecked(stack, "KV301", f"logits parity: {reason}{instead}", essential=left is not None)
    for run in context.runs:
        if run.by_rounding and explained:
            continue
        if run.without_tokens:
            if loop is not None and loop.shows == "passed":
                yield NotChecked(stack, "KV301", f"logits parity: {run.reason}", essential=True)
            continue
        unclear = (run.outcome in UNDECIDED or run.by_rounding) and run.experiment in names
        if unclear or (run is loop and run.outcome in REASONS):
            reason = REASONS.get(run.outcome, DIFFERS).format(reason=run.reason)
            if run.by_rounding:
                reason += f"; {describe_rounding(run)}"
            essential = run is loop and not run.by_rounding
            yield NotChecked(stack, "KV301", f"logits parity of {run.experiment}: {reason}", essential)


def _find_uncompared(context: ContractContext, findings: Sequence[Finding]) -> str | None:
    """What of a graph that takes one token a call was not compared in another way, in words; None where all was."""
    from kvdoctor.decode.experiments.loops import takes_rows

    needed = [HISTORY, OWN_SESSION, *(["batch"] if takes_rows(context.contract) is None else [])]
    for name in needed:
        run = context.find_run(name)
        named = run is not None and run.outcome in WRONG and any(one.severity != "note" for one in findings)
        if not named and (run is None or run.shows != "passed"):
            return f"{name} {run.outcome}: {run.reason}" if run is not None and run.reason else f"{name} did not pass"
    if suspected := next((f for f in findings if f.severity == "error" and f.confidence == "suspected"), None):
        return f"nothing else refutes {suspected.code} {suspected.name}"
    rows = context.contract.fixed_batch
    return None if rows in (None, 1) else f"the {rows} rows of its fixed batch were not compared with each other"


def find_unsearched(context: ContractContext) -> Iterator[NotChecked]:
    """An operator with the whole loop that was not compared with a loop over its decoder: that is no health."""
    run = context.find_run(SEARCH)
    if context.stack.operator is not None and run is not None and run.outcome in ("skipped", "died", *UNDECIDED):
        reason = f"{context.stack.operator} itself was not compared with a loop over its decoder: {run.reason}"
        yield NotChecked(context.stack.name, "KV322", reason, essential=True)


def find_undecided_steps(stack: str, findings: Iterable[Finding]) -> Iterator[NotChecked]:
    """A step of the caller's loop that may break the contract, and may be meant: neither is health."""
    for finding in findings:
        if finding.name == "loop-breaks-contract" and finding.confidence == "suspected" and finding.severity != "note":
            reason = f"whether the caller's loop is right there is not decided: {finding.effects[-1]}"
            yield NotChecked(stack, finding.code, reason, essential=True)


def find_ungraded(draft: DraftFacts, findings: Iterable[Finding]) -> Iterator[NotChecked]:
    """A draft without figures; essential unless a finding says that its vocabulary is another one."""
    if draft.reason is not None:
        known = any(finding.name == "draft-vocabulary-differs" for finding in findings)
        yield NotChecked(draft.stack, "KV022", f"the draft was not compared: {draft.reason}", essential=not known)


def find_unproved_uses(context: ContractContext, findings: Iterable[Finding]) -> Iterator[NotChecked]:
    """Uses that must work, and that neither a run showed to work nor a finding denies."""
    from kvdoctor.decode.experiments import uses

    denied = {finding.use for finding in findings}
    for required in context.required:
        if denied & {required, RESTS_ON.get(required, required)}:
            continue
        tried = {name: use for name, use in uses().items() if use.required == required}
        needed = {name for name, use in tried.items() if use.needed}
        runs = [run for run in context.runs if run.experiment in (needed or tried)]
        passed = {run.experiment for run in runs if run.outcome == "passed"}
        if passed and passed >= needed:
            continue
        reasons = (_why_unproved(run) for run in runs if run.outcome != "passed")
        reason = next(reasons, "it was not run")
        yield NotChecked(context.stack.name, "KV2-KV3", f"required use {required}: {reason}", essential=True)


def _why_unproved(run: Run) -> str:
    if run.outcome not in REASONS:
        return f"{run.experiment} {run.outcome} at step {run.failed_step}"
    return REASONS[run.outcome].format(reason=run.reason or "it was not run")


def find_unexplained_loop(
    context: ContractContext, selection: Selection, findings: Iterable[Finding]
) -> Iterator[NotChecked]:
    """A checked loop that is wrong, and that no finding explains: never health.

    Where some checks were selected, one of the others may explain it; a user who ignores a check knows of its fault.
    """
    run = context.checked_loop
    if run is None or run.outcome not in ("differs", "failed") or any(f.severity != "note" for f in findings):
        return
    loops = any(one.code.startswith(("KV2", "KV3")) and selection.takes(one.code, one.name) for one in all_checks())
    if selection == Selection():
        unnamed = "no check names the cause; please report it"
    elif selection.select and loops and not selection.ignore:
        unnamed = "no selected check names the cause"
    else:
        return
    reason = f"the {run.experiment} {run.outcome} at step {run.failed_step}, and {unnamed}"
    yield NotChecked(context.stack.name, "KV2-KV3", reason, essential=True)


def find_idle_selection(selection: Selection, rounds: Iterable[Round], runs: Sequence[Run]) -> Iterator[NotChecked]:
    """A selection of checks none of which could run: that nothing was found means nothing then."""
    if not selection.select:
        return
    done = {run.experiment for run in runs if run.outcome != "skipped"}
    taken = [one for one in all_checks() if selection.takes(one.code, one.name)]
    if all(set(one.rounds).isdisjoint(rounds) or (one.needs and done.isdisjoint(one.needs)) for one in taken):
        codes = ", ".join(one.code for one in taken)
        reason = "none of the selected checks could run: they need a target, a trace, a checkpoint or --thorough"
        yield NotChecked(None, codes, reason, essential=True)
