"""`inspect`: the diagnosis of a model that reads its files and runs nothing.

A module of its own, so that an inspection loads nothing of the runtime; `pipeline` runs the model.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor.analysis.constant_caches import returns_logits
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.lm_head import NoHead, find_heads
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import DECODING, CacheContract
from kvdoctor.diagnose.context import ContractContext, FileContext, TargetContext, extend_context
from kvdoctor.diagnose.devices import find_limits
from kvdoctor.diagnose.facts import build_report, stack_facts
from kvdoctor.diagnose.run_checks import CheckResults, run_checks
from kvdoctor.errors import as_argument
from kvdoctor.findings import Finding, NotChecked
from kvdoctor.model.files import MODEL_SUFFIXES
from kvdoctor.options import Options
from kvdoctor.report.document import Report

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime
    from kvdoctor.runtime.targets.result import TargetResult

AdviceCheck = Callable[[ContractContext, tuple[Finding, ...], Options, "Runtime | None"], tuple[Finding, ...]]
"""Corrects the advice of a stack's findings where a repair of the graph would decline; may be given no runtime."""


def inspect(
    path: str, options: Options | None = None, check_advice: AdviceCheck | None = None, *, predicts: bool = True
) -> Report:
    """Read a model without its weights and without a runtime; with `predicts` also what runs of it would show.

    Raises:
        UsageError: there is nothing at the path.
    """
    options = options or Options()
    folder = open_folder(path)
    results, stacks = check_files(folder, options, unrun=True), []
    for stack in folder.stacks:
        contract = read_contract(stack, folder.side_cars)
        facts = stack_facts(stack, contract, folder.side_cars, options.load)
        devices, cut = find_limits(contract, stack.members), _can_cut_logits(stack, contract)
        stacks.append(replace(facts, devices=devices, logits_can_be_cut=cut))
        context = extend_context(build_context(folder, stack, contract, options), TargetContext)
        found = run_checks(context, "contract", options.selection) + run_checks(context, "targets", options.selection)
        if predicts:
            found += _predict(context, found, options)
        results += correct_advice(found, context, check_advice, options, None)
    unknown = (
        NotChecked(None, "KV401-KV403", f"{target.words} is newer than the measured releases; step-test can run it")
        for target in options.targets
        if target.limits is None
    )
    results += CheckResults(not_checked=tuple(unknown))
    results = _leave_out_repeated(results)
    return add_targets(build_report("inspect", folder, options, results, stacks), options, {})


def _can_cut_logits(stack: StackFiles, contract: CacheContract) -> bool:
    """Whether the head of every graph can compute the logits of the last token alone: no other advice is given."""
    views = {file.name: file.view for file in stack.members}
    models = {name: view.model for name, view in views.items() if view is not None}
    whole = contract.slots and all(contract.graph(one).file in models for one in DECODING if one in contract.phases)
    if not whole or stack.parts or stack.kind == "operator":
        return False
    try:
        find_heads(contract, models)
    except NoHead:
        return False
    return True


def _leave_out_repeated(results: CheckResults) -> CheckResults:
    """The results without an invalid place (KV004) of which a contract that cannot be read (KV101) is the finding."""
    unread = {finding.file: finding.subject for finding in results.findings if finding.name == "contract-unknown"}

    def is_repeated(finding: Finding) -> bool:
        alone = finding.name == "invalid-graph" and not finding.evidence
        # A value stands there in single quotes, a node in double ones; the names of both may be the same.
        named = (shown for name in unread.get(finding.file, ()) for shown in (repr(name), f'"{name}"'))
        return alone and any(shown in finding.observed for shown in named)

    return replace(results, findings=tuple(finding for finding in results.findings if not is_repeated(finding)))


def _predict(context: ContractContext, found: CheckResults, options: Options) -> CheckResults:
    """What runs would show. Loaded here: an inspection of files without a decoder needs no numpy."""
    from kvdoctor.diagnose.predictions import predict_faults

    return predict_faults(context, found, options.selection)


def check_files(folder: ModelFolder, options: Options, unrun: bool = False) -> CheckResults:
    """Check each file by itself, and whether there is a decoder among them; `unrun` says that no run follows."""
    found = CheckResults()
    for file in folder.files:
        context = FileContext(folder=folder, file=file, weights=options.weights, unrun=unrun)
        found += run_checks(context, "file", options.selection)
    if not folder.stacks and not any(file.role == "unreadable" for file in folder.files):
        found += CheckResults(not_checked=(NotChecked(None, "*", _explain_no_stack(folder), essential=True),))
    return found


def _explain_no_stack(folder: ModelFolder) -> str:
    if not folder.files:
        below = any(one.suffix in MODEL_SUFFIXES for one in folder.root.glob("*/*"))
        several = f"; `kvdoctor gate {as_argument(folder.shown)}` checks the exports below it" if below else ""
        return f"no .onnx file in {folder.shown}; give the folder of an export or an .onnx file{several}"
    cacheless = [file.name for file in folder.files if returns_logits(file)]
    if cacheless:
        return (
            f"{cacheless[0]} returns logits, but has neither past inputs nor present outputs: a model without a cache, "
            "or one whose module keeps it in an attribute; export a decoder with the task ...-with-past, or with the "
            "cache as inputs and outputs of forward()"
        )
    others = ", ".join(f"{file.name} ({file.role})" for file in folder.files[:4])
    return f"no decoder with a KV cache in {folder.shown}, only {others}; give the folder or file of the decoder"


def correct_advice(
    found: CheckResults,
    context: ContractContext,
    check_advice: AdviceCheck | None,
    options: Options,
    runtime: "Runtime | None",
) -> CheckResults:
    """The results with advice that no repair of the graph would decline."""
    if check_advice is None or all(f.severity == "note" or f.repair.kind == "caller" for f in found.findings):
        return found
    return replace(found, findings=check_advice(context, found.findings, options, runtime))


def build_context(folder: ModelFolder, stack: StackFiles, contract: CacheContract, options: Options) -> ContractContext:
    """What the checks of the round `contract` read."""
    return ContractContext(
        folder=folder,
        stack=stack,
        contract=contract,
        consumer=options.consumer,
        required=options.require,
        targets=options.targets,
        tolerances=options.tolerances,
    )


def add_targets(report: Report, options: Options, results: "dict[str, tuple[TargetResult, ...]]") -> Report:
    """The report with the targets that were asked for, and what ran under them."""
    if not options.targets:
        return report
    from kvdoctor.diagnose.targets import list_target_runs, target_facts

    runs = (*report.runs, *list_target_runs(results))
    return replace(report, runs=runs, targets=target_facts(options.targets, results))
