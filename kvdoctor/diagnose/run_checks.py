"""Runs the checks of one round, and returns what they found."""

from dataclasses import replace
from typing import Any

from kvdoctor.diagnose.context import ContractContext, FileContext, RunContext
from kvdoctor.diagnose.fingerprints import FindingOrigin, make_finding
from kvdoctor.diagnose.node_source import find_sources
from kvdoctor.diagnose.not_checked import find_obstacle
from kvdoctor.errors import CannotCheck, Explained, describe_crash
from kvdoctor.findings import Check, Fault, Faults, Finding, NotChecked, Round, Selection, checks_of
from kvdoctor.records import record
from kvdoctor.report.wording import shorten_names

Context = FileContext | ContractContext
"""The context of any round; those of later rounds extend `ContractContext`."""


@record
class CheckResults:
    """What checks found, what could not be checked, other absent results, and notes; several of them add up."""

    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    absent: tuple[NotChecked, ...] = ()
    notes: tuple[str, ...] = ()

    def __add__(self, other: "CheckResults") -> "CheckResults":
        return CheckResults(
            self.findings + other.findings,
            self.not_checked + other.not_checked,
            self.absent + other.absent,
            self.notes + other.notes,
        )


def leave_open(stack: str | None, code: str, reason: str, *, essential: bool = True) -> CheckResults:
    """No finding, but the reason why something was not checked."""
    return CheckResults(not_checked=(NotChecked(stack, code, reason, essential),))


ALWAYS_LISTED = ("KV202", "KV301")
"""Checks of the loop itself: where another finding explains its failure, they are listed as not checked."""


def run_checks(context: Context, when: Round, selection: Selection) -> CheckResults:
    """Run the selected checks of a round. A check that raises is reported as not checked."""
    found = CheckResults()
    for one in checks_of(when):
        if (obstacle := find_obstacle(one, when, context)) is not None:
            found += CheckResults(absent=(obstacle,))
        elif selection.takes(one.code, one.name):
            found += _run_check(one, when, context)
        elif one.incomplete:
            # Without it nothing was diagnosed: the model is not called healthy.
            hidden = _run_check(one, when, context).findings
            entries = (NotChecked(f.stack, f.code, f"{f.where}: {f.cause}", essential=True) for f in hidden)
            found += CheckResults(not_checked=tuple(entries))
    return found


def _run_check(one: Check, when: Round, context: Context) -> CheckResults:
    stack, required = (None, ()) if isinstance(context, FileContext) else (context.stack.name, context.required)
    findings: list[Finding] = []
    open_check: NotChecked | None = None
    try:
        answered = _Answers(one.functions[when](context))
        for found in answered:
            fault = _complete(found, context)
            fault = fault.also(severity="error") if fault.use in required else fault
            origin = _find_origin(fault, context)
            files = (origin.file, *origin.files) if fault.nodes else ()  # looked for in its own file first
            views = {id(file.view): file.view for file in files if file is not None and file.view is not None}
            sources, (ports, slots) = find_sources(fault.nodes, views.values()), _find_ports(fault, context)
            findings.append(replace(make_finding(one, fault, origin), sources=sources, ports=ports, slots=slots))
    except Explained as why:
        entry = NotChecked(stack, one.code, why.reason, kind="explained")
        if one.code not in ALWAYS_LISTED:
            return CheckResults(tuple(findings), absent=(entry,))
        open_check = entry
    except CannotCheck as why:
        open_check = NotChecked(stack, one.code, why.reason, why.essential)
    except Exception as error:  # one broken check must not hide what the others found
        text = describe_crash("the check", error)
        open_check = NotChecked(stack, one.code, text, essential=True)
    else:
        if answered.open_part is not None:
            entry = NotChecked(stack, one.code, answered.open_part, kind="not-run")
            return CheckResults(tuple(findings), absent=(entry,))
    return CheckResults(tuple(findings), () if open_check is None else (open_check,))


class _Answers:
    """The faults that a check yields; `open_part` is what it may return: why a part of its question has no answer."""

    def __init__(self, faults: Faults) -> None:
        self.faults: Any = faults
        self.open_part: str | None = None

    def __iter__(self) -> Faults:
        self.open_part = yield from self.faults


def _complete(fault: Fault, context: Context) -> Fault:
    """The fault with its place and its file: of a pipeline of files, the one that the first subject belongs to."""
    if isinstance(context, FileContext):
        where = fault.where or f"file {shorten_names(fault.subject)}"
        return fault.also(file=fault.file or context.file.name, where=where)
    name = fault.file or context.decode_file
    if context.stack.stages and name == context.stack.main.name:
        subject, stages = next(iter(fault.subject), ""), context.stack.stages
        own = (stage.file for stage in stages if subject in {*stage.inputs.values(), *stage.outputs.values()})
        name = next(own, stages[-1].file)
    return fault.also(file=name, where=fault.where or _name_place(fault, context))


def _name_place(fault: Fault, context: ContractContext) -> str:
    """`input past.0.key and 3 more`, `output logits, experiment chunk`, `file decoder.onnx`."""
    first, names = fault.subject[0], shorten_names(fault.subject)
    if first == fault.file:
        return f"file {names}"
    sides: dict[str, str] = {}
    for graph in (*context.contract.graphs.values(), context.contract.graph("decode")):
        sides |= {port.name: "output" for port in graph.outputs} | {port.name: "input" for port in graph.inputs}
    place = f"{sides.get(first, 'output')} {names}"
    abstract = isinstance(context, RunContext) and context.predicted
    return place if fault.run is None or abstract else f"{place}, experiment {fault.run.experiment}"


def _find_ports(fault: Fault, context: Context) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The inputs and outputs among the subjects of a fault, and the past inputs of their slots."""
    if isinstance(context, FileContext):
        return (), ()
    graphs = context.contract.graphs.values()
    known = {port.name for graph in graphs for port in (*graph.inputs, *graph.outputs)}
    ports = tuple(name for name in fault.subject if name in known)
    slots = (slot for slot in context.contract.slots if {slot.past, slot.present, slot.filled_by}.intersection(ports))
    return ports, tuple(slot.past for slot in slots)


def _find_origin(fault: Fault, context: Context) -> FindingOrigin:
    """The file that the fault names, else the file or the stack that was checked."""
    if isinstance(context, FileContext):
        stack, own, files = None, context.file, context.folder.files
    else:
        stack, own = context.stack, context.stack.main
        files = (*context.folder.files, *context.stack.members, *context.stack.files.values())
    named = next((file for file in files if file.name == fault.file), None)
    return FindingOrigin(named or own, stack, tuple(files))
