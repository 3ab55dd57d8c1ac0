"""The commands: each a short table of contents that joins the stages.

ModelFolder -> GraphView -> CacheContract -> Experiment -> Trace -> checks -> Report
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kvdoctor.case import Case
from kvdoctor.contract import CacheContract
from kvdoctor.elsewhere.here import Here
from kvdoctor.facts import environment, file_facts, stack_facts
from kvdoctor.findings import Asks, Finding, NotChecked, Selection, Verdicts, run_checks, told_apart
from kvdoctor.lost_state import gives_logits
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.open_questions import passed_over, unasked, undecided, unnamed, unproved
from kvdoctor.options import Options
from kvdoctor.reading import read_contract
from kvdoctor.report.document import (
    ModelFacts,
    Report,
    StackFacts,
    decide,
    worst_first,
)
from kvdoctor.runtimes import Examined, Runtime
from kvdoctor.stack_test import Left, examine, held_against, placed
from kvdoctor.stacks import StackFiles
from kvdoctor.targets import Target, of_release
from kvdoctor.tolerances import told, tolerating
from kvdoctor.trace import REPLAY, Run

if TYPE_CHECKING:
    from kvdoctor.caller.holding import Held
    from kvdoctor.reference import Checkpoint
    from kvdoctor.targets.stay import Stay

__all__ = ("Options", "inspect", "step_test")

NOT_STARTED = "not started"
HAS_OWN_RUN = "cross-cache-emptied"
"""The fault of the contract that leaves a loop to judge: the held one."""


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
        case = Case(
            folder,
            options.consumer,
            stack=stack,
            contract=contract,
            required=options.required,
            targets=options.targets,
        )
        before = len(verdicts.findings)
        run_checks(case, "contract", options.selection, verdicts)
        run_checks(case, "targets", options.selection, verdicts)
        verdicts.findings[before:] = _advised(case, options, None, verdicts.findings[before:])
    verdicts.not_checked += (
        NotChecked(None, "KV401-KV403", f"{target.words} is newer than what was measured; step-test can run it")
        for target in options.targets
        if target.limits is None
    )
    report = _report("inspect", folder, options, verdicts, stacks)
    return _under_targets(report, options, {})


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
    with tolerating(options.tolerances):
        report = _step_tested(path, options, runtime, scratch, at)
    return replace(report, notes=(*report.notes, *told(options.tolerances)))


def _step_tested(path: str, options: Options, runtime: Runtime, scratch: Path | None, at: Path | None) -> Report:
    folder, verdicts = open_folder(path, at), Verdicts()
    described = _described(options, folder)
    folder = _with_stacks(folder, tuple(stack for stack, _ in described))
    _check_files(folder, options, verdicts)
    checkpoint = _checkpoint(options)
    scratch = scratch or (checkpoint.scratch if checkpoint is not None else None)
    given = {stack.name: contract for stack, contract in described}
    contracts = {s.name: given.get(s.name) or read_contract(s, folder.side_cars) for s in folder.stacks}
    options = _with_samples(options, tuple(contracts.values()))
    callers = _callers(options, contracts, verdicts) if options.trace is not None else {}
    shown = _Shown(runtime, scratch, checkpoint)
    for stack in (stack for stack in folder.stacks if options.only is None or stack.name in options.only):
        case = Case(
            folder,
            options.consumer,
            stack=stack,
            contract=contracts[stack.name],
            required=options.required,
            thorough=options.thorough,
            caller=callers.get(stack.name),
            targets=options.targets,
        )
        _diagnose(case, options, verdicts, shown)
    verdicts.not_checked += unasked(options.selection, _rounds(options), shown.runs)
    report = _report("step-test", folder, options, verdicts, shown.stacks)
    # A warm worker has told its version before it is needed; the report must not depend on who came before.
    version = runtime.versions.get("onnxruntime", NOT_STARTED) if shown.runs else NOT_STARTED
    environment = {"onnxruntime": version, **report.environment}
    notes = [*report.notes, *shown.told]
    if checkpoint is not None:
        checkpoint.close()
        environment |= checkpoint.versions
        notes += checkpoint.held
    report = replace(report, notes=tuple(notes), environment=environment)
    return _under_targets(replace(report, runs=tuple(shown.runs), measured=shown.measured), options, shown.stays)


def _rounds(options: Options) -> frozenset[Asks]:
    """The rounds of checks that are held, by what was asked for."""
    more: dict[Asks, bool] = {"targets": bool(options.targets), "caller": options.trace is not None}
    return frozenset({"file", "contract", "runs", *(name for name, held in more.items() if held)})


@dataclass
class _Shown:
    """What the stacks are run with, and what they showed so far; `stays` are what ran under targets, by stack."""

    runtime: Runtime
    scratch: Path | None
    checkpoint: "Checkpoint | None"
    stacks: list[StackFacts] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    stays: "dict[str, tuple[Stay, ...]]" = field(default_factory=dict)


def _diagnose(case: Case, options: Options, verdicts: Verdicts, shown: _Shown) -> None:
    """Run one stack, ask all checks about it, and keep what it showed."""
    stack, contract = case.stack, case.contract
    assert stack is not None  # noqa: S101 - made with both by step_test
    assert contract is not None  # noqa: S101
    with TemporaryDirectory(prefix="kvdoctor-") as calls:
        kept = shown.scratch or (Path(calls) if options.targets else None)
        left = Left(kept / f"{stack.name}.npz" if kept else None, Path(calls))
        case, examined = examine(case, options, verdicts, shown.runtime, left)
        case = replace(case, here=_here(shown.runtime))
        case = _elsewhere(case, options, Here(shown.runtime, contract, left.logits), verdicts)
        case = held_against(case, shown.checkpoint, left.logits, verdicts)
        shown.stacks.append(stack_facts(stack, case.contract or contract, case.folder.side_cars))
        shown.measured[stack.name] = _measured(examined)
        before = len(verdicts.findings)
        case = _by_contract(case, options, verdicts)
        case = placed(case, options, shown.runtime, left.calls) if options.locate else case
        _by_runs(case, options, verdicts, before)
        run_checks(case, "targets", options.selection, verdicts)
        verdicts.findings[before:] = _advised(case, options, shown.runtime, verdicts.findings[before:])
    if case.caller is not None:
        run_checks(case, "caller", options.selection, verdicts)
        shown.told.append(_told(case, options.trace or ""))
    shown.runs += case.runs
    shown.stays[stack.name] = case.stays


def _here(runtime: Runtime) -> Target | None:
    """The runtime that the runs are from; one that the table does not have is asked what it takes."""
    release = runtime.versions.get("onnxruntime")  # told when the worker answers
    if release is None:
        return None
    from kvdoctor.elsewhere.measuring import measured

    return measured(of_release(release), runtime)


def _elsewhere(case: Case, options: Options, here: Here, verdicts: Verdicts) -> Case:
    """The case with what it shows under the targets; where it could not be run here it is not run there."""
    if not (options.targets and case.runs):
        return case
    from kvdoctor.elsewhere.staying import open_ends, with_stays

    case = with_stays(case, options, here)
    verdicts.not_checked += open_ends(case)
    return case


def _under_targets(report: Report, options: Options, stays: "dict[str, tuple[Stay, ...]]") -> Report:
    """The report with the targets that were asked for, and what ran under them."""
    if not options.targets:
        return report
    from kvdoctor.elsewhere.staying import elsewhere_runs, target_facts

    runs = (*report.runs, *elsewhere_runs(stays))
    return replace(report, runs=runs, targets=target_facts(options.targets, stays))


def _by_contract(case: Case, options: Options, verdicts: Verdicts) -> Case:
    """Ask the checks of the contract; the case knows afterwards which errors it declares."""
    before = len(verdicts.findings)
    run_checks(case, "contract", options.selection, verdicts)
    errors = (finding.name for finding in verdicts.findings[before:] if finding.severity == "error")
    return replace(case, declared_faults=tuple(name for name in errors if name != HAS_OWN_RUN))


def _by_runs(case: Case, options: Options, verdicts: Verdicts, before: int) -> None:
    """Ask the checks of the runs, and say what is left open; findings from `before` on are those of this stack."""
    verdicts.not_checked += undecided(case)
    if case.runs:
        run_checks(case, "runs", options.selection, verdicts)
    verdicts.not_checked += unproved(case, verdicts.findings[before:])
    if options.selection == Selection():
        verdicts.not_checked += unnamed(case, verdicts.findings[before:])
    verdicts.not_checked += passed_over(case, options.selection, verdicts.findings[before:])


def _advised(case: Case, options: Options, runtime: Runtime | None, findings: list[Finding]) -> list[Finding]:
    """The findings of a stack; nobody is sent to a repair of the graph that would decline."""
    if all(finding.severity == "note" or finding.repair.kind == "caller" for finding in findings):
        return findings
    from kvdoctor.foreseeing import foreseen
    from kvdoctor.patient import Patient, WorkingCopy

    assert case.stack is not None  # noqa: S101 - made with one by step_test
    copy = WorkingCopy(case.folder)
    return list(foreseen(Patient(case.stack, case.contract, tuple(findings), case.runs, copy, runtime, options)))


def _described(options: Options, folder: ModelFolder) -> tuple[tuple[StackFiles, CacheContract], ...]:
    """The stacks whose contracts the user gave."""
    if options.contract is None:
        return ()
    from kvdoctor.given import given_stacks

    return given_stacks(options.contract, folder)


def _checkpoint(options: Options) -> "Checkpoint | None":
    if options.reference is None:
        return None
    from kvdoctor.reference import Checkpoint

    return Checkpoint(options.reference, options.offline)


def _with_stacks(folder: ModelFolder, described: tuple[StackFiles, ...]) -> ModelFolder:
    """The folder with stacks that a contract file describes, in the place of those it names and behind the others."""
    by_name = {stack.name: stack for stack in (*folder.stacks, *described)}
    return replace(folder, stacks=tuple(by_name.values()))


def _with_samples(options: Options, contracts: tuple[CacheContract, ...]) -> Options:
    """The options with the prompt that was given, wherever it stands, held against the contracts."""
    if not options.prompt and options.inputs is None:
        return options
    from kvdoctor.given_samples import given_samples

    return replace(options, prompt=given_samples(options.prompt, options.inputs, contracts).prompt)


def _callers(options: Options, contracts: dict[str, CacheContract], verdicts: Verdicts) -> "dict[str, Held]":
    """The caller's own steps, held against the contract of the stack that they called."""
    from kvdoctor.caller.holding import hold_fitting

    drivable = {name: contract for name, contract in contracts.items() if contract.slots and not contract.missing}
    if not drivable:
        reason = "the trace was not held against a contract: none is complete"
        verdicts.not_checked.append(NotChecked(None, "KV208", reason, essential=True))
        return {}
    return hold_fitting(options.trace or "", drivable)


def _told(case: Case, path: str) -> str:
    """What the trace showed, in one line."""
    from kvdoctor.caller import telling

    assert case.caller is not None  # noqa: S101 - asked only where a trace was held
    assert case.stack is not None  # noqa: S101
    return telling.line(case.caller, case.run(REPLAY), path, case.stack.name)


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
    findings, not_checked = told_apart(worst_first(verdicts.findings)), tuple(verdicts.not_checked)
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
        **({"unrounded_seconds": examined.unrounded_seconds} if examined.unrounded_seconds else {}),
    }
