"""`convert`: diagnose, copy, repair, convert, diagnose again, prove, and write a whole copy or none."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kvdoctor.addons.conversions.convert_layout import (
    ConvertedStack,
    apply_layout,
    convert_layouts,
    convert_stack,
    find_replaced_files,
    put_in_place,
    refuse_clashes,
    refuse_impossible_layout,
    refuse_unknown_layout,
)
from kvdoctor.addons.conversions.graphs.conversion import Asked, Base, Converted, measure_costs, prove_conversions
from kvdoctor.addons.conversions.layouts.registry import DoesNotFit, load
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.addons.conversions.new_cache import convert_cacheless, find_cacheless
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import PairedSide
from kvdoctor.decode.runs import LOOPS, WRONG
from kvdoctor.errors import UsageError, describe_crash
from kvdoctor.findings import find_check
from kvdoctor.model.output_folder import refuse_unfit, whole_folder
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.fix_report import report_fix, report_nothing_done, report_refused, report_unproved
from kvdoctor.repair.pipeline import diagnose, diagnose_copy, repair_and_prove
from kvdoctor.repair.proof import prove_loops
from kvdoctor.repair.session import (
    Applied,
    Conversion,
    DiagnosisSide,
    Outcome,
    RepairChoice,
    RepairedFiles,
    RepairSession,
    apply_repairs,
)
from kvdoctor.repair.workspace import (
    CannotConvert,
    CannotRepair,
    RepairContext,
    WorkingCopy,
    copy_export,
    write_changed,
    write_reports,
)
from kvdoctor.report.document import EXIT_FINDINGS, Report, decide, exit_code
from kvdoctor.report.repair_record import CacheCosts, Proof
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.scratch import scratch_folder


@record
class ConvertRequest:
    """A call of `convert`; `conversions` are those that the `choices` ask for.

    Without `out` the copy is made and proved in a private folder and then deleted.
    """

    path: str
    out: str | None
    choices: ConvertChoices
    conversions: tuple[Asked, ...]
    force: bool = False


def convert(request: ConvertRequest, options: Options) -> Report:
    """Convert the model at a path into OUT and prove the result.

    A graph that has not the form that a conversion needs may have it when its faults are repaired: so it is diagnosed
    before it is refused, and what was found comes first.

    Raises:
        UsageError: there is nothing at the path, OUT must not be written, or a model without errors cannot be
            converted; nothing was written.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    path = request.path
    refuse_unknown_layout(request.choices)
    if not (request.choices.has_layout or request.conversions):
        raise UsageError("say what to convert the model to: `kvdoctor convert --help` lists the forms")
    if request.out is not None and Path(path).exists():
        refuse_unfit(Path(request.out), Path(path), request.force)
    if request.choices.cache == "growing" and (folder := find_cacheless(path)) is not None:
        if request.choices.has_layout or len(request.conversions) > 1:
            raise UsageError("a decoder without a cache is converted with --cache growing alone: convert its copy then")
        return convert_cacheless(request, folder, options)
    return replace(_convert(request, options, _find_refusal(request, options)), command="convert")


def _convert(request: ConvertRequest, options: Options, refusal: CannotConvert | None) -> Report:
    path = request.path
    with Runtime(options.limits) as runtime, scratch_folder() as scratch:
        before = diagnose(path, options, runtime, Path(scratch, "before"))
        folder = open_folder(path)
        first = apply_repairs(folder, before.report, RepairChoice(), runtime, options)
        if refusal is not None and not first.applied:
            return _report_refusal(before.report, first, refusal)
        with whole_folder(Path(request.out or Path(scratch, "out"))) as pending:
            shown, model = request.out or path, "." if Path(path).is_dir() else Path(path).name
            session = RepairSession(options, runtime, Path(scratch), folder, before, shown, pending.path, model)
            try:
                outcome = _make_copy(session, request, first)
            except CannotConvert as reason:
                return _report_refusal(before.report, first, reason)
            if not outcome.applied:
                return report_nothing_done(before.report, first, ())
            if not outcome.holds:
                if refusal is not None and exit_code(before.report, before.report.fail_on) != EXIT_FINDINGS:
                    raise refusal  # the model works, and what was tried to repair it did not help
                return report_unproved(session, outcome, False, refusal)
            report = replace(report_fix(session, outcome, request.out), command="convert")
            if request.out is not None:
                write_reports(pending.path, report)
                pending.kept = True
        return report


def _find_refusal(request: ConvertRequest, options: Options) -> CannotConvert | None:
    """Why the model cannot be given the form that is asked for, as it is; None if it can.

    Raises:
        UsageError: the form cannot be asked for.
    """
    for file in open_folder(request.path).files:
        if file.sequences:
            ports = " and ".join(map(repr, file.sequences))
            why = "are sequences of tensors, and a copy would have tensors instead"
            return CannotConvert(f"{file.name}: {ports} {why}")
    try:
        refuse_impossible_layout(request.path, request.choices)
        refuse_impossible_conversions(request.path, request.conversions, options)
    except CannotConvert as refusal:
        return refusal
    return None


def _report_refusal(before: Report, tried: RepairedFiles, refusal: CannotConvert) -> Report:
    """The report if a model with errors cannot be converted: its findings, and then why.

    Raises:
        CannotConvert: there are no errors.
    """
    if exit_code(before, before.fail_on) != EXIT_FINDINGS:
        raise refusal
    return report_refused(before, tried, refusal)


def _make_copy(session: RepairSession, request: ConvertRequest, first: RepairedFiles) -> Outcome:
    outcome = Outcome(session.before, session.before, (), first.not_repaired, ())
    if first.applied or request.conversions:
        copy_export(session.folder, session.at)
        if first.applied:
            outcome = repair_and_prove(session, first, RepairChoice())
        outcome = apply_conversions(session, request.conversions, outcome)
        return apply_layout(_find_model(session), request.choices, outcome)
    # The files that a layout replaces need not be copied first.
    ready = convert_layouts(session.folder, session.before.contracts, request.choices)
    copy_export(session.folder, session.at, find_replaced_files(session.folder, ready))
    return apply_layout(session, request.choices, outcome, ready)


PARITY = "KV301"
"""The code under which a report lists that logits could not be compared with a call without a cache."""
REPAIRED = ".kvdoctor-repaired"
"""The folder in OUT that holds the repaired copy until its conversion was compared with it."""


Made = dict[str, tuple[tuple[Asked, Converted], ...]]
"""What the conversions made of each stack, in their order."""


def refuse_impossible_conversions(path: str, asked: tuple[Asked, ...], options: Options) -> None:
    """Refuse what cannot be converted as it is: the graphs are read, and nothing is run.

    Raises:
        CannotConvert: with the stack, the node and the reason.
    """
    if asked and Path(path).exists():
        folder = open_folder(path)
        contracts = _read_contracts(folder)
        joined = {one.stack.name for one in make_one_graph(folder, contracts, asked)}
        if left := {name: contract for name, contract in contracts.items() if name not in joined}:
            convert_stacks(WorkingCopy(folder), left, asked, options)


def _read_contracts(folder: ModelFolder) -> dict[str, CacheContract | None]:
    return {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}


def make_one_graph(
    folder: ModelFolder, contracts: Mapping[str, CacheContract | None], asked: tuple[Asked, ...]
) -> tuple[ConvertedStack, ...]:
    """The pairs and merged decoders as one graph each, in memory, where a conversion takes no other form.

    Raises:
        CannotConvert: the graph of later steps cannot serve the first one.
        UsageError: several would have files of one name.
    """
    wanting, done = next((one for one in asked if one.conversion.one_graph), None), list[ConvertedStack]()
    single = next(layout for layout in load() if layout.name == "single")
    for stack in folder.stacks:
        contract = contracts.get(stack.name)
        if wanting is None or stack.kind not in ("pair", "merged") or contract is None or not contract.slots:
            continue
        try:
            done.append(convert_stack(folder, stack, contract, single))
        except DoesNotFit as error:
            why = CannotRepair(f"its first step is another graph or branch, and its later one cannot serve it: {error}")
            raise _refuse(folder, stack, wanting, why) from None
    refuse_clashes(folder, [(one.stack, one.files) for one in done], " ".join(f"--{one.title}" for one in asked))
    return tuple(done)


def _find_model(session: RepairSession) -> RepairSession:
    """The session with the folder of the copy as its model, where the file that was given is no longer there."""
    return session if (session.at / session.model).exists() else replace(session, model=".")


def convert_stacks(
    copy: WorkingCopy, contracts: Mapping[str, CacheContract | None], asked: tuple[Asked, ...], options: Options
) -> Made:
    """Convert every decoder of a working copy in memory: all of them, or none.

    Raises:
        CannotConvert: one of them is not of the form that a conversion knows.
    """
    folder, done = copy.folder, Made()
    for stack in folder.stacks:
        contract = contracts.get(stack.name)
        if contract is None or not contract.slots or stack.kind == "operator":
            continue
        if stack.parts:
            reason = CannotRepair(f"the decoder is a pipeline of {len(stack.parts)} files, which are not converted")
            raise _refuse(folder, stack, asked[0], reason)
        context = RepairContext(stack, contract, (), (), copy, None, options)
        made = []
        for one in asked:
            try:
                converted = one.conversion.convert(context, one.choice)
            except CannotRepair as error:
                raise _refuse(folder, stack, one, error) from None
            except MemoryError:
                raise
            except Exception as error:  # a graph that no form foresees must not end in a traceback
                crash = CannotRepair(describe_crash("the conversion", error))
                raise _refuse(folder, stack, one, crash) from None
            copy.changed |= {change.file for change in converted.changes}
            made.append((one, converted))
        done[stack.name] = tuple(made)
    if not done:
        none = "it holds no decoder whose cache is known"
        raise CannotConvert(f"{folder.shown!r} cannot be converted ({_list_titles(asked)}): {none}")
    return done


def _list_titles(asked: Iterable[Asked]) -> str:
    return ", ".join(f"--{one.title}" for one in asked)


def _refuse(folder: ModelFolder, stack: StackFiles, one: Asked, error: CannotRepair) -> CannotConvert:
    others = len(folder.stacks) > 1
    hint = f" (to convert the other decoders, give their files; this one is {stack.main.name})" if others else ""
    instead = f"; instead: {error.instead}" if error.instead else ""
    text = f"{folder.shown!r} cannot be converted with --{one.title}: {stack.name}: {error}{instead}{hint}"
    return CannotConvert(text)


def apply_conversions(session: RepairSession, asked: tuple[Asked, ...], outcome: Outcome) -> Outcome:
    """Convert the copy, diagnose it and prove it; an unproved copy stays as it is.

    A copy that was repaired is proved before it is converted, and is then what its conversion is compared with.

    Raises:
        CannotConvert: a stack cannot be converted, or it has a fault, so that there is nothing to compare with.
    """
    if not asked or (outcome.applied and not outcome.holds):
        return outcome
    folder, contracts = replace(session.open_copy(), shown=session.folder.shown), outcome.after.contracts
    joined, root = make_one_graph(folder, contracts, asked), session.folder.root
    names = {stack.name: stack.name for stack in folder.stacks}
    if outcome.applied:
        root = session.at / REPAIRED
        copy_export(folder, root)
    if joined:
        put_in_place(joined, folder.root, folder.root, find_replaced_files(folder, joined))
        session = _find_model(session)
        folder = replace(session.open_copy(), shown=session.folder.shown)
        contracts = _read_contracts(folder)
        files = {stack.name: {file.name for file in stack.files.values()} for stack in folder.stacks}
        names = {
            name: next((one.stack.name for one in joined if made & set(one.files)), name)
            for name, made in files.items()
        }
    copy = WorkingCopy(folder)
    done = convert_stacks(copy, contracts, asked, session.options)
    _refuse_wrong_loops(session, outcome.after, asked, [names[stack] for stack in done])
    write_changed(copy, session.at, dict.fromkeys(copy.changed, tuple(one.title for one in asked)))
    applied = [Applied(one.stack.name, one.layout.conversion(one.made), tuple(one.made.changes)) for one in joined]
    applied += [
        Applied(stack, Conversion(one.title, one.conversion.summary, loop=converted.loop), converted.changes)
        for stack, conversions in done.items()
        for one, converted in conversions
    ]
    bases = {stack: _find_base(outcome, root, names[stack]) for stack in done}
    found = _prove_all(session, replace(outcome, applied=(*outcome.applied, *applied)), done, bases)
    shutil.rmtree(session.at / REPAIRED, ignore_errors=True)
    return found


def _prove_all(session: RepairSession, outcome: Outcome, done: Made, bases: Mapping[str, Base]) -> Outcome:
    """The outcome with the diagnosis of the copy and its proof; `bases` are what its stacks are compared with."""
    after, before = diagnose_copy(session, session.model), outcome.after
    proofs, costs, notes = dict[str, list[Proof]](), list[CacheCosts](), list[str]()
    for stack, conversions in done.items():
        made, base = _merge(conversions), bases[stack]
        chunk = before.run(base.stack, "chunk") if stack != base.stack else None
        if chunk is not None and chunk.shows in WRONG:  # the graph has a mask of its own now
            made = replace(made, how=replace(made.how, single_from=1))
        if made.how.stored and base.side is not None:
            cost, may = measure_costs(session, made.how.stored, base.side)
            made = replace(made, how=replace(made.how, allowed=may.allowed, drift=may.drift))
            costs.append(cost)
        proofs[stack] = list(prove_conversions(session, made, base, before, (stack, after)))
        if base.repaired:
            checks = filter(None, map(find_check, base.repaired))
            measured = " and its cost measured on it" if made.how.stored else ""
            found = ", ".join(f"{check.code} {check.name}" for check in checks)
            notes.append(
                f"{stack}: the conversion is compared with {base.words}{measured}, not with "
                f"{session.folder.shown}, which has {found}"
            )
    proved = {stack: bases[stack].stack for stack, proof in proofs.items() if all(entry.holds for entry in proof)}
    after = _settle(before, after, proved, session.options)
    extended = outcome.extended(after, (), [entry for proof in proofs.values() for entry in proof])
    return replace(extended, costs=tuple(costs), bases=tuple(notes))


def _refuse_wrong_loops(
    session: RepairSession, before: DiagnosisSide, asked: tuple[Asked, ...], done: Iterable[str]
) -> None:
    """Refuse to convert a model with errors whose loop is wrong: its conversion could only be compared with that.

    Raises:
        CannotConvert: with the stack and its loop.
    """
    if before.report.verdict != "unhealthy":
        return
    for stack in done:
        wrong = next((entry for entry in prove_loops(stack, before, before) if not entry.holds), None)
        if wrong is not None:
            loop = wrong.claim.removesuffix(" passes")
            raise CannotConvert(
                f"{session.folder.shown!r} cannot be converted ({_list_titles(asked)}): {stack}: a conversion is "
                f"compared with the model as it is, and its {loop} does not pass ({wrong.detail})"
            )


def _find_base(outcome: Outcome, root: Path, stack: str) -> Base:
    """What a stack is compared with: as it was repaired, the original where none of its files was changed."""
    contract = outcome.after.contract(stack)
    side = None if contract is None else PairedSide(stack, root.absolute(), contract)
    files = next((known.files for known in outcome.after.report.stacks if known.name == stack), ())
    repairs = (one for one in outcome.applied if any(change.file in files for change in one.changes))
    return Base(stack, side, tuple(dict.fromkeys(name for one in repairs for name in one.because)))


def _settle(before: DiagnosisSide, after: DiagnosisSide, proved: Mapping[str, str], options: Options) -> DiagnosisSide:
    """The diagnosis of the copy without the question whose answer is the original; `proved` are by stack its original.

    A copy that takes one token a call has no call without a cache. Its logits are those of the original, whose own loop
    was compared with such a call.
    """
    ran = {
        base for base in proved.values() for loop in LOOPS if (run := before.run(base, loop)) and run.shows == "passed"
    }
    passed = {stack for stack, base in proved.items() if base in ran}
    known = {entry.code for entry in before.report.not_checked if entry.essential}
    report = after.report
    left = tuple(
        one for one in report.not_checked if not (one.stack in passed and one.code == PARITY and PARITY not in known)
    )
    verdict = decide(report.command, report.findings, left, options.fail_on)
    return replace(after, report=replace(report, not_checked=left, verdict=verdict))


def _merge(made: tuple[tuple[Asked, Converted], ...]) -> Converted:
    whole = Converted((), ())
    for _, one in made:
        how, more = whole.how, one.how
        how = Comparison(
            rows="last" if "last" in (how.rows, more.rows) else "all",
            keep=how.keep or more.keep,
            capacity=more.capacity if how.capacity is None else how.capacity,
            stored=how.stored + more.stored,
            single_from=how.single_from or more.single_from,
            window=max(how.window, more.window),
        )
        whole = Converted(whole.changes + one.changes, (), how, whole.reveals + one.reveals)
    return whole
