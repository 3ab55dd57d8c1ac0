"""`step_test`: the diagnosis that runs a model. `inspection` has the one that only reads it.

ModelFolder -> GraphView -> CacheContract -> Experiment -> Run -> checks -> Report
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvdoctor import addons
from kvdoctor.analysis.contract_file import list_differences
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.readings import with_given
from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import AddedExperiment
from kvdoctor.decode.runs import Run
from kvdoctor.decode.tolerances import list_loosened
from kvdoctor.diagnose import not_checked
from kvdoctor.diagnose.build_report import (
    build_report,
    find_ground,
    find_proof,
    find_short_ground,
    stack_facts,
    sum_up_proofs,
    without_faults,
)
from kvdoctor.diagnose.checks._attribution import rests_on_place
from kvdoctor.diagnose.context import ContractContext, GoldenContext, LocalRun, RunContext, extend_context
from kvdoctor.diagnose.decodings import CODE, Golden, compare_with_golden, grade_variants, read_golden
from kvdoctor.diagnose.examine import WorkerFiles, examine, locate_faults, measure_largest
from kvdoctor.diagnose.inspection import AdviceCheck, add_targets, build_context, check_files, correct_advice
from kvdoctor.diagnose.run_checks import CheckResults, leave_open, run_checks
from kvdoctor.errors import CannotCheck, UsageError
from kvdoctor.findings import Finding, NotChecked, Round, Selection, all_checks
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.wording import join_some
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder
from kvdoctor.runtime.targets import Target, of_release

if TYPE_CHECKING:
    from kvdoctor.diagnose.checkpoint import Checkpoint
    from kvdoctor.runtime.targets import TargetResult


NOT_STARTED = "not started"
NO_OTHER_SIDE = "the CPU does not open the file, so {} is compared with itself alone"
EXPLAIN_NO_RUN = ("cross-cache-emptied", not_checked.OF_PARTS)
"""Faults of the contract that leave a loop to check: the held one, and that without another part."""


class AddedPart(Protocol):
    """The part of an add-on: the round of its checks, and what it says of the whole model before anything is run."""

    round: Round
    results: CheckResults

    def list_experiments(self, stack: str) -> tuple[AddedExperiment, ...]:
        """The experiments to run on a stack after those of the core."""

    def judge(self, context: RunContext, options: Options) -> CheckResults:
        """What it finds on a stack that was run; its notes stand first in the report."""


def open_parts(options: Options, contracts: Mapping[str, CacheContract]) -> tuple[AddedPart, ...]:
    """The parts that the options ask for; raises `UsageError` where one cannot be opened."""
    opened = (module.open_part(options, contracts) for module in addons.modules("step_test"))
    return tuple(part for part in opened if part is not None)


@record
class RunPlan:
    """How a caller inside kvdoctor wants one diagnosis carried out; none of this is an option of the user.

    `at` is where the model lies, if the path is only its name in the report. `logits` is a private folder that receives
    the logits of each stack's experiments as `STACK.npz`. `stacks` names the stacks to run, None for all of them.
    `locate` false skips the search for the first divergence, which takes as long as the experiments, unless the name of
    the cause rests on it. `check_advice` knows the repairs, which a diagnosis does not; without it the advice of each
    check stays as it is.
    """

    at: Path | None = None
    logits: Path | None = None
    stacks: frozenset[str] | None = None
    locate: bool = True
    check_advice: AdviceCheck | None = None


@record
class StackDiagnosis:
    """What the diagnosis of one stack brings to the report."""

    facts: StackFacts
    results: CheckResults
    runs: tuple[Run, ...]
    measured: dict[str, Any]
    target_results: "tuple[TargetResult, ...]" = ()


@record
class _Session:
    """What all stacks of one step-test are diagnosed with: on the CPU, which `providers` are compared with."""

    options: Options
    plan: RunPlan
    runtime: Runtime
    checkpoint: "Checkpoint | None"
    golden: Golden | None = None
    parts: tuple[AddedPart, ...] = ()
    providers: tuple[str, ...] = ()

    @property
    def logits(self) -> Path | None:
        """The folder that receives the logits of all stacks, if anybody reads them."""
        return self.plan.logits or (self.checkpoint.scratch if self.checkpoint is not None else None)


def step_test(
    path: str, options: Options | None = None, runtime: Runtime | None = None, plan: RunPlan | None = None
) -> Report:
    """Run decode steps with and without the cache, and report their results.

    Raises:
        UsageError: there is nothing at the path, or the contract given does not fit it.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    options, plan = options or Options(), plan or RunPlan()
    if runtime is None:
        # The worker loads the runtime while this process reads the graphs.
        with Runtime(options.limits) as fresh:
            return step_test(path, options, fresh, plan)
    began = time.perf_counter()
    report = _test_steps(path, options, runtime, plan)
    if options.contract is not None and report.verdict in ("unhealthy", "incomplete"):
        own = _test_steps(path, replace(options, contract=None), runtime, replace(plan, locate=False))
        if own.verdict == "healthy":
            raise UsageError(_blame_contract(options.contract, report, own))
    return replace(report, notes=(*report.notes, *list_loosened(options.tolerances))).timed(began)


def _blame_contract(file: str, report: Report, own: Report) -> str:
    """Why a contract that was given is at fault: the model works by the one that its graph shows, and not by this."""
    found = [f"{one.code} {one.name}" for one in report.findings if one.severity == "error"]
    found += [f"{one.code} not checked" for one in report.not_checked if one.essential]
    read = {stack.name: stack.contract for stack in own.stacks}
    listed = [text for one in report.stacks for text in list_differences(one.contract, read.get(one.name))]
    text = f"the contract in {file} is not that of the model, which is healthy by the contract that its graph shows"
    return f"{text}; by this one: {found[0]}. It has {join_some(listed, 3, '; ')}"


def _test_steps(path: str, options: Options, runtime: Runtime, plan: RunPlan) -> Report:
    folder, contracts = _read_contracts(open_folder(path, plan.at), options)
    results = check_files(folder, options)
    prompted = _read_prompt(options, folder, contracts)
    golden = read_golden(options.against) if options.against is not None else None
    checkpoint = _open_checkpoint(options)
    parts = open_parts(options, contracts)
    others = tuple(name for name in options.providers if name != CPU)
    for name in others:
        runtime.require_provider(name)
    on_cpu = replace(prompted, providers=(CPU, *others))
    session = _Session(on_cpu, plan, runtime, checkpoint, golden, parts, others)
    results = sum((part.results for part in parts), results)

    diagnoses: dict[str, StackDiagnosis] = {}
    for stack in folder.stacks:
        if plan.stacks is None or stack.name in plan.stacks:
            added = tuple(one for part in parts for one in part.list_experiments(stack.name))
            context = build_context(folder, stack, contracts[stack.name], options)
            diagnoses[stack.name] = _diagnose_stack(replace(context, added=added), session)
            results += diagnoses[stack.name].results

    runs = tuple(run for diagnosis in diagnoses.values() for run in diagnosis.runs)
    idle = not_checked.find_idle_selection(options.selection, _list_rounds(session), runs)
    results += CheckResults(not_checked=tuple(idle))
    report = build_report("step-test", folder, prompted, results, [d.facts for d in diagnoses.values()])
    # A warm worker reports its version before it is needed; the report must not depend on who used it before.
    version = runtime.versions.get("onnxruntime", NOT_STARTED) if runs else NOT_STARTED
    environment = {"onnxruntime": version, **report.environment}
    if session.checkpoint is not None:
        session.checkpoint.close()
        environment |= session.checkpoint.versions
    measured = {name: diagnosis.measured for name, diagnosis in diagnoses.items()}
    # Not of a trace, of some checks, or of the copy of a repair.
    whole = not session.parts and plan.at is None and plan.stacks is None and options.selection == Selection()
    variants = tuple(grade_variants(folder, contracts, options, runtime)) if whole else ()
    read = {name: diagnosis.facts.contract or contracts[name] for name, diagnosis in diagnoses.items()}
    sides = (
        "consistent",
        *(["faithful"] if options.reference else []),
        *(["portable"] if options.targets or others else []),
    )
    report = replace(report, environment=environment, runs=runs, measured=measured, variants=variants)
    ground = find_ground(runs, read, sides)
    if ground is not None:
        report = replace(report, ground=replace(ground, proved=sum_up_proofs(report.stacks)))
    absent = tuple(not_checked.list_absent(all_checks(), report, options, set(_list_rounds(session)), results.absent))
    report = replace(report, absent=absent, notes=report.notes + results.notes)
    return add_targets(report, options, {name: d.target_results for name, d in diagnoses.items()})


def _diagnose_stack(context: ContractContext, session: _Session) -> StackDiagnosis:
    """Run one stack, and then the checks of all rounds that need one."""
    stack, runtime, plan, selection = context.stack, session.runtime, session.plan, session.options.selection
    options = session.options
    with scratch_folder() as calls:
        folder = session.logits or (Path(calls) if options.targets or session.providers else None)
        files = WorkerFiles(folder / f"{stack.name}.npz" if folder else None, Path(calls))
        seen = examine(context, options, runtime, files)
        if session.providers and any(one.opens_at is None for one in seen.refusals):
            # What the CPU does not open has no other side: the provider is judged by itself.
            options = replace(options, providers=session.providers)
            session = replace(session, options=options, providers=())
            seen = examine(context, options, runtime, files)
            alone = NotChecked(stack.name, "KV405", NO_OTHER_SIDE.format(options.provider))
            seen = replace(seen, not_checked=(*seen.not_checked, alone))
        tested = extend_context(
            replace(context, contract=seen.contract, runs=seen.runs),
            RunContext,
            refusals=seen.refusals,
            local_runtime=_find_local_runtime(runtime),
            timings=seen.timings,
            thorough=options.thorough,
        )
        tested, on_targets = _run_targets(tested, session, LocalRun(runtime, context.contract, files.logits))
        tested, on_checkpoint = _compare_with_checkpoint(tested, session, files)
        by_contract = run_checks(tested, "contract", selection)
        # A use that cannot work explains no fault of the loop, however severe it is for who requires it.
        errors = (f.name for f in by_contract.findings if f.severity == "error" and f.use is None)
        located = plan.locate or rests_on_place(tested)
        runs = locate_faults(tested, options, runtime, files.calls, seen.ran) if located else tested.runs
        declared = tuple(name for name in errors if name not in EXPLAIN_NO_RUN)
        largest = measure_largest(seen.ran or tested, options, runtime, files.calls)
        after = replace(tested, runs=runs, declared_faults=declared, largest=largest)
        found = by_contract + _check_runs(after, by_contract.findings, options)
        found += run_checks(after, "targets", selection)
        found += _compare_with_golden(after, session)
        found = correct_advice(found, after, plan.check_advice, options, runtime)
    found = CheckResults(not_checked=seen.not_checked + on_targets) + on_checkpoint + found
    for part in session.parts:
        more = part.judge(after, options)
        found = replace(found + more, notes=more.notes + found.notes)
    facts = stack_facts(stack, after.contract, context.folder.side_cars)
    proof = seen.proof or find_proof(stack, after.contract)
    facts = replace(facts, proof=without_faults(proof, stack.name, found.findings))
    measured = seen.measured | ({"largest_value": str(largest)} if largest is not None else {})
    return StackDiagnosis(facts, found, after.runs, measured, after.target_results)


def _check_runs(context: RunContext, declared: tuple[Finding, ...], options: Options) -> CheckResults:
    """Run the checks of the runs, and list what these leave open."""
    found = run_checks(context, "runs", options.selection) if context.runs else CheckResults()
    findings = (*declared, *found.findings)
    undecided = not_checked.find_undecided_runs(context, findings)
    unproved = not_checked.find_unproved_uses(context, findings)
    unexplained = not_checked.find_unexplained_loop(context, options.selection, findings)
    left = (*unproved, *unexplained, *not_checked.find_unsearched(context), *find_short_ground(context))
    return CheckResults(not_checked=tuple(undecided)) + found + CheckResults(not_checked=left)


def _list_rounds(session: _Session) -> Iterable[Round]:
    """The rounds of checks that a step-test has."""
    yield from ("file", "contract", "runs")
    if session.options.targets or session.providers:
        yield "targets"
    if session.golden is not None:
        yield "golden"
    yield from (part.round for part in session.parts)


def _read_contracts(folder: ModelFolder, options: Options) -> tuple[ModelFolder, dict[str, CacheContract]]:
    """The contract of each stack, and the folder with the stacks that a contract file of the user describes."""
    given: dict[str, CacheContract] = {}
    if options.contract is not None:
        from kvdoctor.analysis.contract_file import read_contract_file

        described = read_contract_file(options.contract, folder)
        stacks = {stack.name: stack for stack in (*folder.stacks, *(stack for stack, _ in described))}
        folder = replace(folder, stacks=tuple(stacks.values()))
        given = {stack.name: contract for stack, contract in described}
    read = {s.name: given.get(s.name) or read_contract(s, folder.side_cars) for s in folder.stacks}
    names: Collection[str] = ()
    if options.inputs is not None:
        from kvdoctor.decode.samples import given_names

        names = given_names(options.inputs, read.values())
    return folder, with_given(read, options.feed, options.logits_output, names)


def _read_prompt(options: Options, folder: ModelFolder, contracts: dict[str, CacheContract]) -> Options:
    """The options with the prompt that was given, directly or in a file, checked against the contracts."""
    if not options.prompt_ids and options.inputs is None:
        return options
    from kvdoctor.decode.samples import read_samples
    from kvdoctor.diagnose.checks.side_cars.graph_sizes import positions

    tables = (positions(stack, contracts[stack.name]) for stack in folder.stacks if stack.name in contracts)
    rows = min((count for count in tables if count is not None), default=None)
    samples = read_samples(options.prompt_ids, options.inputs, tuple(contracts.values()), rows)
    return replace(options, prompt_ids=samples.prompt)


def _open_checkpoint(options: Options) -> "Checkpoint | None":
    """The checkpoint to compare with."""
    if options.reference is None:
        return None
    from kvdoctor.diagnose.checkpoint import Checkpoint

    return Checkpoint(options.reference, options.offline)


def _compare_with_golden(context: RunContext, session: _Session) -> CheckResults:
    """What golden numbers show, if there are some, and a note on what agrees with them."""
    if session.golden is None:
        return CheckResults()
    try:
        compared = compare_with_golden(context, session.golden, session.options, session.runtime)
    except CannotCheck as error:
        return leave_open(context.stack.name, CODE, f"not compared with {session.golden.words}: {error}")
    found = run_checks(extend_context(context, GoldenContext, golden=compared), "golden", session.options.selection)
    open_checks = tuple(replace(entry, essential=True) for entry in found.not_checked)
    notes = () if found.findings or open_checks else (f"{context.stack.name}: {compared.words}",)
    return CheckResults(found.findings, open_checks, found.absent, notes)


def _compare_with_checkpoint(
    context: RunContext, session: _Session, files: WorkerFiles
) -> tuple[RunContext, CheckResults]:
    """The context with runs compared with the checkpoint, if there is one; what was left open, and notes."""
    checkpoint, options, logits = session.checkpoint, session.options, files.logits
    if checkpoint is None or logits is None:
        return context, CheckResults()
    from kvdoctor.diagnose.checkpoint import NAME, compare_with_checkpoint, find_arithmetic, locate_in_modules
    from kvdoctor.diagnose.locate.search import LocateContext

    runs, results = compare_with_checkpoint(context, checkpoint, logits)
    run = next((run for run in runs if run.experiment == NAME and run.outcome == "differs"), None)
    if run is None or not session.plan.locate:
        return replace(context, runs=runs), results
    if options.show_line is not None:
        options.show_line("locating the difference to the checkpoint in its modules")
    search = LocateContext.of(context, session.runtime, options.provider, files.calls)
    located = locate_in_modules(run, search, checkpoint, logits, find_arithmetic(context))
    return replace(context, runs=tuple(located if each is run else each for each in runs)), results


def _find_local_runtime(runtime: Runtime) -> Target | None:
    """The runtime of this Python, which made the runs; None where its worker has not answered."""
    release = runtime.versions.get("onnxruntime")
    if release is None:
        return None
    from kvdoctor.runtime.release_environments import measure_limits

    return measure_limits(of_release(release), runtime)


def _run_targets(context: RunContext, session: _Session, local: LocalRun) -> tuple[RunContext, tuple[NotChecked, ...]]:
    """The context with what the model shows under targets and on other providers, if it could be run here."""
    if not ((session.options.targets or session.providers) and context.runs):
        return context, ()
    if unmet := next(not_checked.find_unmet_preconditions(context.stack, context.contract), None):
        reason = f"not run in target runtimes: {unmet}"
        return context, (NotChecked(context.stack.name, "KV401-KV403", reason, essential=True),)
    from kvdoctor.diagnose.targets import find_open_targets, run_providers, run_targets

    results = run_targets(context, session.options, local)
    results += run_providers(context, session.options, local, session.providers)
    context = replace(context, target_results=results)
    return context, tuple(find_open_targets(context))
