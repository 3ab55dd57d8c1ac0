"""`inspect`: the diagnosis of a model that reads its files and runs nothing. `pipeline` runs the model.

A module of its own, so that an inspection loads nothing of the runtime.

Where the files show no error, the checks of round `runs` also read abstract runs. Such a finding is a prediction: it
has the code of the check that a run would confirm it by, is suspected, and is at most a warning. `step-test` confirms
it, replaces it, or withdraws it. What an abstract run cannot compute is not reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor import addons
from kvdoctor.analysis.completeness import is_cacheless
from kvdoctor.analysis.contract_reader import add_observed_sizes, read_contract
from kvdoctor.analysis.lm_head import NoHead, find_heads
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.readings import with_given
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.choices import CPU
from kvdoctor.contract import DECODING, CacheContract, Role
from kvdoctor.decode.runs import GENERAL_CAUSES, Run
from kvdoctor.diagnose.build_report import build_report, find_proof, stack_facts, without_faults
from kvdoctor.diagnose.context import ContractContext, FileContext, RunContext, extend_context
from kvdoctor.diagnose.not_checked import find_unmet_preconditions, list_absent
from kvdoctor.diagnose.run_checks import CheckResults, leave_open, run_checks
from kvdoctor.errors import as_argument, describe_crash
from kvdoctor.findings import Finding, NotChecked, Round, Selection, checks_of
from kvdoctor.model.files import MODEL_SUFFIXES
from kvdoctor.model.operators import operators_with
from kvdoctor.options import Options
from kvdoctor.report.document import Report

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime
    from kvdoctor.runtime.targets import TargetResult

NOT_RUN = NotChecked(None, "KV2-KV5", "only `kvdoctor step-test` runs decode steps", kind="not-run")

AdviceCheck = Callable[[ContractContext, tuple[Finding, ...], Options, "Runtime | None"], tuple[Finding, ...]]
"""Corrects the advice of a stack's findings where a repair of the graph would decline; may be given no runtime."""


CACHELESS = (
    "it returns logits, but has neither past inputs nor present outputs, so each token costs a pass over all tokens "
    "before"
)
EXPORT = "else export it with the cache as inputs and outputs, in Optimum with a task that ends in -with-past"
PADDED: tuple[Role, ...] = ("attention_mask", "padding_mask", "additive_mask", "encoder_mask")
MOST_PADDED = 2_000
"""Inputs that hide padding, which no proof covers, and the nodes of graphs that are computed for its sake alone."""
NOT_PREDICTED = ("cache-not-faster", "empty-tensor-hazard", "session-refused", "worker-died", "cached-branch-first")
"""Checks about time, memory or the runtime, which an abstract run does not have."""


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
    contracts = read_contracts(folder, options)
    for stack in folder.stacks:
        contract = contracts[stack.name]
        facts = stack_facts(stack, contract, folder.side_cars, options.load)
        context = extend_context(build_context(folder, stack, contract, options), RunContext)
        if predicts:
            context = replace(context, proof=find_proof(stack, contract))
        found = run_checks(context, "contract", options.selection) + run_checks(context, "targets", options.selection)
        if predicts:
            found += predict_faults(context, found, options.selection)
        proof = without_faults(context.proof, stack.name, (*results.findings, *found.findings))
        stacks.append(replace(facts, proof=proof, logits_can_be_cut=_can_cut_logits(stack, contract)))
        results += correct_advice(found, context, check_advice, options, None)
    for target in (target for target in options.targets if target.limits is None):
        text = f"{target.words} is newer than the measured releases; step-test can run it"
        results += leave_open(None, "KV401-KV403", text, essential=False)
    # An invalid graph that a file makes suspect, and its stack confirms, is one fault.
    invalid = [f for f in results.findings if f.name == "invalid-graph"]
    sure = {f.file for f in invalid if f.confidence == "confirmed"}
    repeated = [f for f in invalid if f.confidence == "suspected" and f.file in sure]
    results = replace(results, findings=tuple(f for f in results.findings if f not in repeated))
    report = build_report("inspect", folder, options, results, stacks)
    rounds: set[Round] = {"file", "contract", *(("targets",) if options.targets else ())}
    checks = {one.code: one for each in ("file", "contract", "targets") for one in checks_of(each)}
    absent = (*list_absent(checks.values(), report, options, rounds, results.absent), NOT_RUN)
    return add_targets(replace(report, absent=absent), options, {})


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


def read_contracts(folder: ModelFolder, options: Options) -> dict[str, CacheContract]:
    """The contract of each stack, with what the options say of it."""
    read = {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}
    return with_given(read, options.feed, options.logits_output)


def check_files(folder: ModelFolder, options: Options, unrun: bool = False) -> CheckResults:
    """Check each file by itself, and whether there is a decoder among them; `unrun` says that no run follows."""
    found = CheckResults()
    for file in folder.files:
        context = FileContext(folder=folder, file=file, weights=options.weights, unrun=unrun)
        found += run_checks(context, "file", options.selection)
    if not folder.stacks and not any(file.role == "unreadable" for file in folder.files):
        found += leave_open(None, "*", _explain_no_stack(folder))
    return found


def _explain_no_stack(folder: ModelFolder) -> str:
    if not folder.files:
        below = any(one.suffix in MODEL_SUFFIXES for one in folder.root.glob("*/*"))
        several = f"; `kvdoctor gate {as_argument(folder.shown)}` checks the exports below it" if below else ""
        if any(folder.root.glob("*.safetensors")) or any(folder.root.glob("pytorch_model*.bin")):
            exported = f"kvdoctor re-export --from {as_argument(folder.shown)} -o {folder.name_copy('EXPORTED')}"
            return f"no .onnx file in {folder.shown}, but a checkpoint of PyTorch; export it: {exported}"
        return f"no .onnx file in {folder.shown}; give the folder of an export or an .onnx file{several}"
    if (cacheless := next((file for file in folder.files if is_cacheless(file)), None)) is not None:
        advice = "".join(f"; {module.advise(folder, cacheless)}" for module in addons.modules("new_cache"))
        return f"{cacheless.name} has no cache: {CACHELESS}{advice}; {EXPORT}"
    others = ", ".join(f"{file.name} ({file.role})" for file in folder.files[:4])
    if all(file.role == "encoder" for file in folder.files):
        return "this model is an encoder and has no KV cache; give the folder or file of the decoder"
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
    context = ContractContext(folder=folder, stack=stack, contract=contract, tolerances=options.tolerances)
    return replace(context, consumer=options.consumer, required=options.require, targets=options.targets)


def add_targets(report: Report, options: Options, results: "dict[str, tuple[TargetResult, ...]]") -> Report:
    """The report with the targets that were asked for, the providers among them, and what ran under them."""
    found = (one.target for of_stack in results.values() for one in of_stack if one.target.provider != CPU)
    targets = tuple(dict.fromkeys((*options.targets, *found)))
    if not targets:
        return report
    from kvdoctor.diagnose.targets import list_target_runs, target_facts

    runs = (*report.runs, *list_target_runs(results))
    return replace(report, runs=runs, targets=target_facts(targets, results))


def predict_faults(context: ContractContext, found: CheckResults, selection: Selection) -> CheckResults:
    """What runs of a stack would show, where the graph decides it, and the contract has no error already."""
    predicted = (one for one in checks_of("runs") if one.name not in NOT_PREDICTED)
    if selection != Selection() and not any(selection.takes(one.code, one.name) for one in predicted):
        return CheckResults()
    contract, faulty = context.contract, any(finding.severity == "error" for finding in found.findings)
    if contract.no_decoder is not None or contract.frozen_past is not None or faulty:
        return CheckResults()
    if _is_decided(context) or next(find_unmet_preconditions(context.stack, contract), None) is not None:
        return CheckResults()
    # Loaded here, with numpy: where nothing is run, as of a model with a faulty contract, the start takes half as long.
    from kvdoctor.diagnose.abstract_runs import run_abstractly
    from kvdoctor.errors import CannotCheck

    try:
        runs = run_abstractly(context)
        return CheckResults(tuple(_ask_checks(context, runs, found, selection)) if runs else ())
    except CannotCheck as why:
        return leave_open(context.stack.name, "KV2-KV3", f"not predicted, use step-test: {why}", essential=False)
    except Exception as error:  # an error of kvdoctor here must not cost what the files show
        reason = describe_crash("the analysis without a run", error)
        return leave_open(context.stack.name, "KV2-KV3", reason)


def _is_decided(context: ContractContext) -> bool:
    """Whether the proof leaves nothing that abstract runs would show in time: padding, of which a mask tells."""
    views = [file.view for file in context.stack.files.values() if file.view is not None]
    if not context.is_proved or sum(sum(view.operators.values()) for view in views) > MOST_PADDED:
        return context.is_proved
    # Abstract runs leave out padding of tokens where positions are rotary, as `diagnose/abstract_runs.py` says.
    rotary = any(kind in view.operators for view in views for kind in operators_with("rotary"))
    asked = PADDED[-1:] if rotary else PADDED
    masks = {port.role for phase in DECODING for port in context.contract.graph(phase).inputs}.intersection(asked)
    if not masks:
        return True
    from kvdoctor.analysis.proof.padding import hides_padding

    return hides_padding(context.stack, context.contract, masks)


def _ask_checks(
    context: ContractContext, runs: tuple[Run, ...], found: CheckResults, selection: Selection
) -> Iterator[Finding]:
    """The findings that the checks of round `runs` make of abstract runs."""
    contract = add_observed_sizes(context.contract, runs)
    asked = extend_context(replace(context, contract=contract), RunContext, runs=runs, predicted=True)
    known = {finding.code for finding in found.findings}
    for finding in run_checks(asked, "runs", selection).findings:
        if finding.severity == "note" or finding.name in NOT_PREDICTED or finding.code in known:
            continue
        # Only the size of the difference decides on a rounded cache: a scale that is taken from all entries makes each
        # of them depend on the others, by no more than it rounds.
        if finding.name not in GENERAL_CAUSES or not asked.rounded_presents:
            # No run has confirmed it. Sizes are those of any run; differences of logits are not.
            shown = f": {finding.experiment}, step {finding.step}: {finding.error}" if finding.error else ""
            observed = f"derived from the graph, without a run{shown}"
            weak = replace(finding, severity="warning", confidence="suspected", predicted=True, observed=observed)
            yield replace(weak, evidence=(), effects=("`kvdoctor step-test` confirms it, or withdraws it",))
