"""Why a check or an experiment has no result; each reason is a `NotChecked`.

| question | decided by |
| --- | --- |
| Why was no decode step run on a stack? | `find_unmet_preconditions` |
| Why is an experiment not in the list of runs? | `why_unfit` |
| Why was an experiment `skipped`? | `why_skipped`; what runs show: `decode/experiment_run.py` |
| Why were experiments cut off? | `find_interrupted` |
| Why is a check of the contract not run? | `find_obstacle` |
| Why does a run give no verdict? | `find_undecided_runs`, and the other `find_` functions after it |
| Which finding explains what a check would report? | the check raises `Explained`; `checks/_attribution.py` decides |
| Why can a check not answer? | the check raises `CannotCheck`, or crashes (`run_checks.py`) |
| Which checks did nobody ask for? | `list_absent`, which also gathers all that is not in `not_checked` |

A report has the reasons that a reader must know as `not_checked`, those of skipped experiments in their runs, and all
others as `absent`: a check in none of them ran, and found nothing.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING

from kvdoctor.analysis.completeness import find_unfilled
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.choices import RESTS_ON
from kvdoctor.contract import DECODING, CacheContract, describe
from kvdoctor.decode.runs import HISTORY, ONLY_THOROUGH, OWN_SESSION, PAGED_LOOP, SEARCH, UNDECIDED, WRONG, Run
from kvdoctor.diagnose.context import ContractContext, FileContext
from kvdoctor.findings import Check, Finding, NotChecked, Round, Selection, all_checks
from kvdoctor.model.flow import FLAWS
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording.runs import describe_comparisons, describe_rounding

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment
    from kvdoctor.runtime.client import StackResults

REASONS = {
    "skipped": "{reason}",
    "died": "{reason}",
    "inconclusive": "{reason}",
    "ambiguous": "the difference of the logits is between noise and a fault",
}
"""Outcomes of the checked loop that leave open whether the model is healthy, and the reason reported for each."""
DIFFERS = "the logits differ by more than noise"
"""The reason for a run that differs, and agrees in a float32 copy of the model."""
OF_PARTS = "parts-do-not-fit"
"""The check of the files that make a model together."""
ASKED_BY: dict[Round, str] = {
    "targets": "only with --target",
    "golden": "only with --against",
    "caller": "only with --trace",
    "speed": "only `kvdoctor speed` measures it",
}
"""What asks for the rounds of checks that not every step-test has."""
REPORTED_REQUESTS = ("", "reference")
"""The requests of `Experiment.on_request` that a step-test knows; the other experiments serve other commands."""
PROVED = "proved for every length; --thorough runs it"
"""The reason for experiments that a proof answers."""
COMPILED = "EPContext"
"""The operator that holds a graph in the binary form of a device. Source: ONNX Runtime, EP context design."""


def find_unmet_preconditions(stack: StackFiles, contract: CacheContract, opened: bool = False) -> Iterator[str]:
    """Why no decode step can be run, the reason to report first; `opened`: graphs inside operators are called."""
    yield from (problem.cause for problem in stack.problems if problem.essential or not problem.declared)
    for file in stack.members:
        if file.external_problems:
            yield f"the external data of {file.name} cannot be read"
    if stack.operator is not None and not opened:
        yield f"the operator {stack.operator} contains the whole loop and its cache; there is nothing to feed back"
    if any(slot.growth == "paged" for slot in contract.slots):
        yield from _find_unpaged(stack, contract, opened)
    if any(COMPILED in file.view.operators for file in stack.members if file.view is not None):
        yield f"the graph was compiled for a device ({COMPILED}), and only the provider of that device can run it"
    if contract.no_decoder is not None:
        yield f"not a decoder with a KV cache: {contract.no_decoder}"
    empty = {*find_unfilled(contract)}
    if set(contract.missing) - empty or stack.kind == "unpaired" or not contract.slots:
        inside = f" of the decoder inside {stack.operator}" if stack.operator is not None else ""
        yield f"the cache contract{inside} is not complete"
    yield from _find_undrivable(contract)
    unsettled = [one.subject for one in contract.ambiguities if one.unknown and not one.settled and not opened]
    yield from (f"nothing in the file says what to feed {name!r}; a step-test settles it" for name in unsettled)
    from kvdoctor.decode.calls import NUMPY_TYPES

    unknown = {port.dtype for graph in contract.graphs.values() for port in graph.inputs} - set(NUMPY_TYPES)
    if unknown:
        yield f"there is no synthetic feed of element type {', '.join(sorted(unknown))}"


def _find_unpaged(stack: StackFiles, contract: CacheContract, opened: bool) -> Iterator[str]:
    """Why the blocks of a paged cache cannot be given out by us."""
    from kvdoctor.decode.experiments.paged_loop import NO_KERNEL, read_paged_inputs

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
        from kvdoctor.decode.experiments.multi_turn import drives

        if reason := drives(contract):
            yield f"the first step takes {contract.new_tokens} new tokens only, and cannot be compared: {reason}"


def _find_other_tokens(contract: CacheContract) -> Iterator[str]:
    """Tokens in another order of axes than that of every call of ours, [batch, new], or without a batch."""
    graphs = [contract.graph(phase) for phase in DECODING]
    batched = any(axis.startswith("batch") for graph in graphs for port in graph.inputs for axis in port.axes)
    for port in (port for graph in graphs for port in graph.inputs if port.role in ("token_ids", "embeddings")):
        kind = describe(port.dtype, port.shape)
        if port.axes[:2] == ("new", "batch") and port.role == "embeddings":
            yield f"{port.name!r}, {kind}, has the new tokens in front of the batch; steps are run on [batch, new]"
        elif port.axes == ("new",) and not batched and contract.growing and contract.new_tokens is None:
            yield f"neither {port.name!r}, {kind}, nor the cache has a batch axis; steps are run on [batch, new]"


def find_obstacle(one: Check, when: Round, context: FileContext | ContractContext) -> NotChecked | None:
    """Why a check is not run on a stack: without all its parts it has no contract, and an encoder has none either."""
    if when != "contract" or isinstance(context, FileContext):
        return None
    lacking = [each.cause for each in context.stack.problems if each.essential or not each.declared]
    if not lacking and context.contract.no_decoder is not None:
        reason = f"not a decoder with a KV cache: {context.contract.no_decoder}"
    elif lacking and one.name != OF_PARTS:
        reason = lacking[0]
    elif one.name != "invalid-graph" and any(lack.reason in FLAWS for lack in context.contract.missing):
        reason = "the structure of the graph is not valid"
    else:
        return None
    return NotChecked(context.stack.name, one.code, reason, kind="not-run")


def why_unasked(experiment: "Experiment", options: Options) -> str | None:
    """Why an experiment is not run with these options. A thorough one is where a required use depends on it."""
    if experiment.on_request == "reference":
        return None if options.reference is not None else "only with --reference"
    if experiment.on_request:
        return "only for the programs of `kvdoctor loop`"
    use = experiment.use
    wanted = not experiment.thorough or options.thorough or (use is not None and use.required in options.require)
    return None if wanted else ONLY_THOROUGH


def why_skipped(experiment: "Experiment", context: ContractContext, options: Options) -> str | None:
    """Why an experiment is not asked for, or not needed: exact numbers in one runtime are proved at every length."""
    compared = options.targets or options.providers[1:]
    runs = options.thorough or compared or context.contract.exactness != "float"
    proved = experiment.lengths and context.is_proved and not runs
    return why_unasked(experiment, options) or (PROVED if proved else None)


def why_unfit(experiment: "Experiment", contract: CacheContract) -> str | None:
    """Why an experiment is not for such a contract, and no run of it is listed."""
    from kvdoctor.decode.experiments.lengths import FROZEN_PAST
    from kvdoctor.decode.experiments.paged_loop import is_paged

    frozen, unpaged = _is_frozen(contract), is_paged(contract)
    if frozen != (experiment.name == FROZEN_PAST):
        return f"the past has the fixed length {contract.frozen_past}" if frozen else "the length of the past varies"
    if (unpaged is None) != (experiment.name == PAGED_LOOP):
        return unpaged or f"the cache has blocks, which {PAGED_LOOP} gives out"
    if experiment.with_features and not contract.features:
        return "no encoder of images or audio"
    if experiment.one_token and contract.new_tokens != 1:
        return "only for a graph that takes one token in each call"
    return None


def _is_frozen(contract: CacheContract) -> bool:
    """Whether the past has one length only, and can be driven up to it."""
    from kvdoctor.decode.experiments.lengths import can_be_filled

    return contract.frozen_past is not None and can_be_filled(contract) is None


def find_interrupted(stack: str, contract: CacheContract, results: "StackResults") -> Iterator[NotChecked]:
    """Experiments that could not be carried out, or not wholly."""
    if _is_frozen(contract):
        reason = f"run only up to a past of the fixed length {contract.frozen_past}"
        yield NotChecked(stack, "KV2-KV3", reason, essential=True)
    for crash in dict.fromkeys(crash.strip().splitlines()[-1] for crash in results.crashes):
        reason = f"an experiment crashed ({crash}); please report it"
        yield NotChecked(stack, "KV2-KV3", reason, essential=True)
    for note in dict.fromkeys(results.notes):
        yield NotChecked(stack, "KV2-KV3", note)
    for text in results.reasons_not_run:
        yield NotChecked(stack, "KV2-KV3", text, essential=True)


def find_undecided_runs(context: ContractContext, findings: Sequence[Finding] = ()) -> Iterator[NotChecked]:
    """Runs without a verdict, but for rounding that a finding names. An open loop is never healthy."""
    from kvdoctor.decode.experiments import judged_names

    loop, stack, new_tokens = context.checked_loop, context.stack.name, context.contract.new_tokens
    reported = (finding for finding in findings if finding.name == "cached-differs" and loop is not None)
    explained = loop is not None and loop.by_rounding and any(f.experiment == loop.experiment for f in reported)
    names = judged_names() - {SEARCH}
    if loop and loop.outcome == "passed" and new_tokens == 1:
        reason = "the first step takes 1 new token only, so there is no call without a cache to compare with"
        left = _find_uncompared(context, findings)
        instead = left or f"the same logits instead {describe_comparisons(context.runs)}"
        yield NotChecked(stack, "KV301", f"logits parity: {reason}; {instead}", essential=left is not None)
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
    """What of a graph that takes one token a call was not compared in another way, as text; None where all was."""
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


def find_unproved_uses(context: ContractContext, findings: Iterable[Finding]) -> Iterator[NotChecked]:
    """Uses that must work, and that neither a run showed to work nor a finding denies."""
    denied = {finding.use for finding in findings}
    for required in context.required:
        if denied & {required, RESTS_ON.get(required, required)}:
            continue
        tried = {name: use for name, use in context.uses.items() if use.required == required}
        needed = {name for name, use in tried.items() if use.needed}
        runs = [run for run in context.runs if run.experiment in (needed or tried)]
        passed = {run.experiment for run in runs if run.outcome == "passed"}
        if passed and passed >= needed:
            continue
        open_run = next((run for run in runs if run.outcome != "passed"), None)
        reason = "it was not run"
        if open_run is not None:
            wrong = f"{open_run.experiment} {open_run.outcome} at step {open_run.failed_step}"
            reason = REASONS.get(open_run.outcome, wrong).format(reason=open_run.reason or reason)
        yield NotChecked(context.stack.name, "KV2-KV3", f"required use {required}: {reason}", essential=True)


def find_unexplained_loop(
    context: ContractContext, selection: Selection, findings: Iterable[Finding]
) -> Iterator[NotChecked]:
    """A wrong loop that no finding explains is never healthy, unless a check was left out that may explain it."""
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


def list_absent(
    checks: Iterable[Check], report: Report, options: Options, rounds: Set[Round], found: Iterable[NotChecked]
) -> Iterator[NotChecked]:
    """Every absent result that no list of the report has: `rounds` ran, and `found` is what checks left out."""
    present = {(finding.stack, finding.code) for finding in report.findings}
    yield from (entry for entry in dict.fromkeys(found) if (entry.stack, entry.code) not in present)
    for one in checks:
        if not options.selection.takes(one.code, one.name):
            yield NotChecked(None, one.code, "not selected", kind="not-selected")
        elif not rounds & set(one.rounds):
            yield NotChecked(None, one.code, ASKED_BY[one.rounds[0]], kind="not-run")
        else:
            yield from _list_unrun(one, report, rounds)
    for stack in report.stacks:
        yield from _list_unlisted(stack, report.runs, options)


def _list_unrun(one: Check, report: Report, rounds: Set[Round]) -> Iterator[NotChecked]:
    """The stacks on which a check had no run to read."""
    for stack in report.stacks:
        runs = {run.experiment: run for run in report.runs if run.stack == stack.name}
        needed = [runs[name] for name in one.needs if name in runs]
        if rounds & set(one.rounds) == {"runs"} and not runs:
            yield NotChecked(stack.name, one.code, "no decode step was run", kind="not-run")
        elif needed and all(run.outcome == "skipped" for run in needed):
            reason = f"{needed[0].experiment} was skipped: {needed[0].reason}"
            yield NotChecked(stack.name, one.code, reason, kind="not-run")


def _list_unlisted(stack: StackFacts, runs: Iterable[Run], options: Options) -> Iterator[NotChecked]:
    """The experiments of a step-test without an entry in the list of runs, where there are runs."""
    listed = {run.experiment for run in runs if run.stack == stack.name}
    if not listed or stack.contract is None:
        return
    from kvdoctor.decode.experiments import load  # loads numpy

    for experiment in load():
        if experiment.name not in listed and experiment.on_request in REPORTED_REQUESTS:
            reason = why_unasked(experiment, options) or why_unfit(experiment, stack.contract) or "it was not run"
            yield NotChecked(stack.name, experiment.name, reason, kind="not-run")
