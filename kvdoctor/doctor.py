"""The commands: each a short table of contents that joins the stages.

ModelFolder -> GraphView -> CacheContract -> Experiment -> Trace -> checks -> Report
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdoctor.case import UNDECIDED, Case, Consumer
from kvdoctor.child import Limits
from kvdoctor.contract import CacheContract
from kvdoctor.facts import environment, file_facts, stack_facts
from kvdoctor.findings import NotChecked, Selection, Verdicts, run_checks
from kvdoctor.given import given_stacks
from kvdoctor.kept import Load
from kvdoctor.lost_state import gives_logits
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.plain import to_plain
from kvdoctor.reading import read_contract, with_observed
from kvdoctor.reference import CannotCompare, Checkpoint, hold
from kvdoctor.report.document import (
    EXIT_FINDINGS,
    EXIT_HEALTHY,
    EXIT_INCOMPLETE,
    FailOn,
    ModelFacts,
    Report,
    StackFacts,
    decide,
    exit_code,
    worst_first,
)
from kvdoctor.runtimes import Examined, Job, Runtime
from kvdoctor.stacks import StackFiles
from kvdoctor.trace import Node, Run

COMPILED = "EPContext"
"""The operator that holds a graph in the binary form of a device. Source: ONNX Runtime, EP context design."""

HAS_OWN_RUN = "cross-cache-emptied"
"""The fault of the contract that leaves a loop to judge: the held one."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, the same for every command."""

    consumer: Consumer = "plain"
    fail_on: FailOn = "error"
    selection: Selection = field(default_factory=Selection)
    seed: int = 0
    provider: str = "CPUExecutionProvider"
    limits: Limits = field(default_factory=Limits)
    hash_files: bool = False
    contract: str | None = None
    reference: str | None = None
    offline: bool = False
    load: Load = field(default_factory=Load)

    def as_arguments(self) -> dict[str, Any]:
        """The options as the report shows them; what the memory is planned for only where it was asked."""
        load = {name: number for name, number in to_plain(self.load).items() if number is not None}
        return {
            "consumer": self.consumer,
            "fail_on": self.fail_on,
            "select": list(self.selection.select),
            "ignore": list(self.selection.ignore),
            "provider": self.provider,
            **({"contract": self.contract} if self.contract is not None else {}),
            **({"reference": self.reference, "offline": self.offline} if self.reference is not None else {}),
            **load,
        }


def inspect(path: str, options: Options | None = None) -> Report:
    """Read a model without its weights and without a runtime.

    Raises:
        UsageError: there is nothing at the path.
    """
    options = options or Options()
    folder, verdicts = open_folder(path), Verdicts()
    _check_files(folder, options, verdicts)
    stacks = []
    for stack in folder.stacks:
        contract = read_contract(stack, folder.side_cars)
        stacks.append(stack_facts(stack, contract, folder.side_cars, options.load))
        case = Case(folder, options.consumer, stack=stack, contract=contract)
        run_checks(case, "contract", options.selection, verdicts)
    return _report("inspect", folder, options, verdicts, stacks)


def step_test(
    path: str,
    options: Options | None = None,
    runtime: Runtime | None = None,
    scratch: Path | None = None,
    at: Path | None = None,
) -> Report:
    """Run decode steps with and without the cache, and say what they showed.

    `scratch` is a private folder in which each stack leaves the logits of its experiments as `STACK.npz`. `at` is where
    the model really lies, when `path` is what to call it.

    Raises:
        UsageError: there is nothing at the path, or the contract given does not fit it.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    options = options or Options()
    if runtime is None:
        # The worker loads the runtime while this process reads the graphs.
        with Runtime(options.limits) as fresh:
            return step_test(path, options, fresh, scratch, at)
    folder, verdicts = open_folder(path, at), Verdicts()
    described = given_stacks(options.contract, folder) if options.contract is not None else ()
    folder = _with_stacks(folder, tuple(stack for stack, _ in described))
    _check_files(folder, options, verdicts)
    checkpoint = Checkpoint(options.reference, options.offline) if options.reference is not None else None
    scratch = scratch or (checkpoint.scratch if checkpoint is not None else None)
    stacks, runs, measured = [], [], {}
    given = {stack.name: contract for stack, contract in described}
    for stack in folder.stacks:
        contract = given.get(stack.name) or read_contract(stack, folder.side_cars)
        case = Case(folder, options.consumer, stack=stack, contract=contract)
        case, examined = _examine(case, options, verdicts, runtime, scratch)
        case = _held(case, checkpoint, scratch, verdicts)
        runs += list(case.runs)
        stacks.append(stack_facts(stack, case.contract or contract, folder.side_cars))
        measured[stack.name] = _measured(examined)
        before = len(verdicts.findings)
        run_checks(case, "contract", options.selection, verdicts)
        verdicts.not_checked += _undecided(case)
        if case.runs:
            faults = tuple(
                f.name for f in verdicts.findings[before:] if f.severity == "error" and f.name != HAS_OWN_RUN
            )
            run_checks(replace(case, declared_faults=faults), "runs", options.selection, verdicts)
    report = _report("step-test", folder, options, verdicts, stacks)
    environment = {"onnxruntime": runtime.versions.get("onnxruntime", "not started"), **report.environment}
    if checkpoint is not None:
        checkpoint.close()
        environment |= checkpoint.versions
        report = replace(report, notes=(*report.notes, *checkpoint.held))
    return replace(report, runs=tuple(runs), measured=measured, environment=environment)


def gate(paths: tuple[str, ...], options: Options) -> tuple[str, list[Report], int]:
    """Step-test every model under one policy, on one warm worker: (verdict, reports, exit code).

    Findings weigh more than what could not be checked; healthy is only what all models are.

    Raises:
        UsageError: there is nothing at one of the paths.
    """
    with Runtime(options.limits) as runtime:
        reports = [step_test(path, options, runtime) for path in paths]
    codes = [exit_code(report, options.fail_on) for report in reports]
    verdicts = [report.verdict for report in reports]
    verdict = next((v for v in ("unhealthy", "incomplete") if v in verdicts), "healthy")
    reports = [replace(report, command="gate") for report in reports]
    return verdict, reports, next((code for code in (EXIT_FINDINGS, EXIT_INCOMPLETE) if code in codes), EXIT_HEALTHY)


def _with_stacks(folder: ModelFolder, described: tuple[StackFiles, ...]) -> ModelFolder:
    """The folder with stacks that a contract file describes, in the place of those it names and behind the others."""
    by_name = {stack.name: stack for stack in (*folder.stacks, *described)}
    return replace(folder, stacks=tuple(by_name.values()))


def _examine(
    case: Case, options: Options, verdicts: Verdicts, runtime: Runtime, scratch: Path | None
) -> tuple[Case, Examined]:
    """Put all experiments to one stack, if it can be driven."""
    assert case.stack is not None  # noqa: S101 - made with both by step_test
    assert case.contract is not None  # noqa: S101
    from kvdoctor.experiments import frozen_past, load

    obstacle = next(_obstacles(case.stack, case.contract), None)
    frozen = case.contract.frozen_past is not None and frozen_past.can_be_filled(case.contract) is None
    if obstacle or frozen:
        reason = (
            f"not run: {obstacle}"
            if obstacle
            else f"run only to a past of the fixed length {case.contract.frozen_past}"
        )
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", reason, essential=True))
    if obstacle:
        return case, Examined()

    asked = options.reference is not None
    chosen = (e for e in load() if (e.name == frozen_past.NAME) == frozen and (asked or not e.on_request))
    job = Job(
        stack=case.stack.name,
        folder=case.folder.root.absolute(),
        contract=case.contract,
        experiments=tuple(experiment.name for experiment in chosen),
        seed=options.seed,
        provider=options.provider,
        keep_logits=scratch / f"{case.stack.name}.npz" if scratch else None,
    )
    examined = runtime.examine(job)
    for crash in dict.fromkeys(crash.strip().splitlines()[-1] for crash in examined.crashes):
        reason = f"an experiment crashed ({crash}); please report it"
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", reason, essential=True))
    for note in dict.fromkeys(examined.notes):
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", note))
    for obstacle in examined.obstacles:
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV2-KV3", obstacle, essential=True))
    runs = tuple(_located(run, case) for run in examined.runs)
    refusals = tuple((refusal.file, refusal.errors, refusal.opens_at) for refusal in examined.refusals)
    contract = with_observed(case.contract, runs)
    return replace(case, contract=contract, runs=runs, refusals=refusals), examined


def _held(case: Case, checkpoint: Checkpoint | None, scratch: Path | None, verdicts: Verdicts) -> Case:
    """Hold what the stack computed against the checkpoint, where there is one: it was asked for, so it must be done."""
    if checkpoint is None or scratch is None or case.stack is None or case.contract is None:
        return case
    try:
        run = hold(case.stack, case.contract, case.runs, scratch / f"{case.stack.name}.npz", checkpoint)
    except CannotCompare as reason:
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV320", str(reason), essential=True))
        return case
    if run.outcome in ("ambiguous", "failed"):
        open_end = {
            "ambiguous": "the difference lies between noise and fault",
            "failed": f"step {run.failed_step} fails, and only what came before was held against the checkpoint",
        }[run.outcome]
        verdicts.not_checked.append(NotChecked(case.stack.name, "KV320", f"{open_end}: {run.reason}", essential=True))
    return replace(case, runs=tuple(run if run.experiment == each.experiment else each for each in case.runs))


def _obstacles(stack: StackFiles, contract: CacheContract) -> Iterator[str]:
    """Why decode steps cannot be run on a stack; the first reason is the one to give."""
    for file in stack.files.values():
        if file.external_problems:
            yield f"external data of {file.name} cannot be read"
    if contract.missing or stack.kind == "unpaired" or not contract.slots:
        yield "the cache contract is not complete"
    yield from _undrivable(stack, contract)
    yield from _unfeedable(contract)


def _undrivable(stack: StackFiles, contract: CacheContract) -> Iterator[str]:
    """What is understood and still cannot be run step by step here."""
    if any(COMPILED in file.view.operators for file in stack.files.values() if file.view is not None):
        yield f"it was compiled for a device ({COMPILED}), and only the execution provider of that device can run it"
    if stack.operator is not None:
        yield f"the operator {stack.operator} runs the whole loop with the cache inside; there is nothing to feed back"
    if contract.slots and not contract.takes_tokens:
        yield "it takes no tokens and gives no logits: a decoder of frames, a streaming encoder, a pipeline stage"
    if contract.graph("decode").port("logits") is None:
        yield "the decoder returns tokens and no logits, so there is nothing to hold against a reference run"
    if any(slot.growth == "paged" for slot in contract.slots):
        yield "a paged cache is addressed by tables that the serving engine keeps"
    if any(slot.filled_by is None and not slot.is_given for slot in contract.slots):
        yield "a past has no present that fills it"
    from kvdoctor.experiments import frozen_past

    if contract.frozen_past is not None:
        if reason := frozen_past.can_be_filled(contract):
            yield reason
    elif contract.new_tokens not in (None, 1):
        yield f"the first step takes {contract.new_tokens} new tokens only, so there is no reference run"


def _unfeedable(contract: CacheContract) -> Iterator[str]:
    """Inputs of an element type that cannot be made up."""
    unknown = {port.dtype for graph in contract.graphs.values() for port in graph.inputs} - _feedable()
    if unknown:
        yield f"no feed can be made of element type {', '.join(sorted(unknown))}"


def _feedable() -> set[str]:
    from kvdoctor.feeds import NUMPY_TYPES

    return set(NUMPY_TYPES)


def _undecided(case: Case) -> Iterator[NotChecked]:
    """Runs without a verdict. For the consumer's own loop that keeps the model from being called healthy."""
    from kvdoctor.experiments import load

    judged, names = case.judged, {experiment.name for experiment in load() if experiment.judged}
    contract = case.contract
    if contract and judged and judged.outcome == "passed" and contract.new_tokens is not None and case.stack:
        recurrent = all(slot.growth == "replace" for slot in contract.slots)
        reason = (
            f"the first step takes {contract.new_tokens} new token only, so no call without a cache can be held against"
        )
        yield NotChecked(case.stack.name, "KV301", f"logits parity: {reason}", essential=not recurrent)
    for run in case.runs:
        unclear = run.outcome in ("ambiguous", "inconclusive") and run.experiment in names
        if case.stack and (unclear or (run is judged and run.outcome in UNDECIDED)):
            reason = UNDECIDED[run.outcome].format(reason=run.reason)
            yield NotChecked(case.stack.name, "KV301", f"logits parity of {run.experiment}: {reason}", run is judged)


def _located(run: Run, case: Case) -> Run:
    """Turn names that the runtime mentioned into a place, if the graph holds a node of that name."""
    view = case.main
    if run.steps and case.contract and case.stack:
        phase = run.steps[-1].phase if run.steps[-1].phase != "reference" else "prefill"
        file = case.contract.graphs[case.contract.phases[phase].graph].file
        view = next((f.view for f in case.stack.files.values() if f.name == file and f.view), view)
    for name in reversed(run.node_names):
        node = view.node(name)
        if node is not None and node.op_type not in ("If", "Loop", "Scan"):
            return replace(run, node=Node(name, node.op_type), node_names=())
    return replace(run, node_names=())


def _check_files(folder: ModelFolder, options: Options, verdicts: Verdicts) -> None:
    for file in folder.files:
        run_checks(Case(folder, options.consumer, file=file), "file", options.selection, verdicts)
    if not folder.stacks and not any(file.role == "unreadable" for file in folder.files):
        verdicts.not_checked.append(NotChecked(None, "*", _why_no_stack(folder), essential=True))


def _why_no_stack(folder: ModelFolder) -> str:
    if not folder.files:
        return f"no .onnx file in {folder.shown}; give the folder of an export or an .onnx file"
    cacheless = [file.name for file in folder.files if gives_logits(file)]
    if cacheless:
        return (
            f"{cacheless[0]} gives logits, but no state leaves the graph, it has neither past inputs nor present "
            "outputs: a model without a cache, or one whose module kept it to itself; export a decoder with the task "
            "...-with-past, or with the cache as inputs and outputs of forward()"
        )
    others = ", ".join(f"{file.name} ({file.role})" for file in folder.files[:4])
    return f"no decoder in {folder.shown}, only {others}; give the folder or file of the decoder"


def _report(
    command: str, folder: ModelFolder, options: Options, verdicts: Verdicts, stacks: list[StackFacts]
) -> Report:
    findings, not_checked = worst_first(verdicts.findings), tuple(verdicts.not_checked)
    return Report(
        command=command,
        arguments=options.as_arguments(),
        seed=options.seed,
        verdict=decide(command, findings, not_checked, options.fail_on),
        environment=environment(),
        model=ModelFacts(folder.shown, tuple(file_facts(file, options.hash_files) for file in folder.files)),
        stacks=tuple(stacks),
        findings=findings,
        not_checked=not_checked,
        notes=tuple(_notes(folder)),
    )


def _notes(folder: ModelFolder) -> Iterator[str]:
    yield from folder.side_cars.problems
    used = {file.name for stack in folder.stacks for file in stack.files.values()}
    for file in folder.files:
        if folder.stacks and file.name not in used and file.role != "unreadable":
            yield f"{file.name} was skipped: it is no part of a decoder with a cache ({file.role})"


def _measured(examined: Examined) -> dict[str, Any]:
    return {
        "seconds": examined.seconds,
        "step_seconds": examined.timings,
        "peak_bytes": examined.peak_bytes,
    }
