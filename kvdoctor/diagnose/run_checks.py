"""Runs the checks of one round, and returns what they found, each finding with its fingerprint.

The fingerprint lets a baseline, and code scanning, recognize a fault. It is made of what the fault is, and of nothing
that may change while the fault stays:

1. the name of its check;
2. the graph it is in: the *part* that the file plays, read from its graph (`merged`; `step` takes a past, `first-step`
   makes one, ...), the kind of the stack (merged, pair, ...), and how the weights of the file are stored (`float16`;
   `uint8` and MatMulNBits), which separates the variants of a model;
3. its `subject` (names of inputs, outputs, nodes, tensors), sorted; a file stands there as the part that it plays;
4. `Fault.apart` (an experiment, a target), where the subject does not separate two faults of one check.

So it survives renamed or moved files, folders and stacks, other wording and numbers, another severity, and another
order of nodes or findings. It changes when the fault affects more or fewer layers, and when the exporter renames nodes.
A fault whose subject is a whole file has the fingerprint of every such fault of that file. Two findings of one model
with the same one are numbered by the names of their stacks and files. A baseline for several models adds their paths.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from kvdoctor.analysis.stacks import OnnxFile, StackFiles, takes_past
from kvdoctor.diagnose.context import ContractContext, FileContext, RunContext
from kvdoctor.diagnose.node_source import find_sources
from kvdoctor.diagnose.not_checked import find_obstacle
from kvdoctor.errors import CannotCheck, Explained, describe_crash
from kvdoctor.findings import Check, Fault, Finding, NotChecked, Round, Selection, checks_of
from kvdoctor.model.view import ELEMENT_TYPES, GraphView
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


@record
class FindingOrigin:
    """Where a finding comes from: its file and its stack, None where it has none, and all files of the model."""

    file: OnnxFile | None = None
    stack: StackFiles | None = None
    files: tuple[OnnxFile, ...] = ()


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
        for found in one.functions[when](context):
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
    return CheckResults(tuple(findings), () if open_check is None else (open_check,))


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


FINGERPRINT_LENGTH = 16
"""Hexadecimal digits, that is 64 bits: enough that no two of some millions coincide by chance."""
PACKED = ("NBits", "Bnb4", "Quantize", "Integer", "QLinear")
"""Parts of the names of operators that compute with packed or rounded weights."""
NAMED_ALONE = ("encoder", "embedding", "other")
"""Roles of files that only their names identify."""


def make_finding(one: Check, fault: Fault, origin: FindingOrigin) -> Finding:
    """The finding of a fault: with the code and name of its check, its stack and its fingerprint."""
    shared = {field.name for field in fields(Fault)} & {field.name for field in fields(Finding)}
    facts: dict[str, Any] = {name: getattr(fault, name) for name in shared}
    identity = compute_fingerprint(one.name, fault.subject, fault.apart, origin)
    if (run := fault.run) is not None:
        step = run.wrong_step
        facts |= {"experiment": run.experiment, "step": run.failed_step}
        facts |= {"past_length": step.past_length, "new_tokens": step.new_tokens} if step is not None else {}
    stack = origin.stack.name if origin.stack else None
    return Finding(code=one.code, name=one.name, stack=stack, fingerprint=identity, **facts)


def with_distinct_fingerprints(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings of one model, each with a fingerprint of its own."""
    by_name = sorted(range(len(findings)), key=lambda at: (findings[at].stack or "", findings[at].file or "", at))
    distinct = dict(zip(by_name, number_repeated([findings[at].fingerprint for at in by_name]), strict=True))
    return tuple(replace(finding, fingerprint=distinct[at]) for at, finding in enumerate(findings))


def compute_fingerprint(check: str, subject: Iterable[str], apart: Sequence[str], origin: FindingOrigin) -> str:
    """The fingerprint of one finding, by the rules above."""
    parts, view = {one.name: part_of(one) for one in origin.files}, origin.file.view if origin.file else None
    graph = [part_of(origin.file) if origin.file else "", origin.stack.kind if origin.stack else ""]
    if view is not None:  # how most weights are stored, and the operators that read packed or rounded ones
        graph += [_find_commonest_type(view), *sorted(op for op in view.operators if any(one in op for one in PACKED))]
    about = sorted(parts.get(name, name) for name in subject)
    return _digest(json.dumps([check, graph, about, [parts.get(name, name) for name in apart]]))


def number_repeated(fingerprints: Sequence[str]) -> list[str]:
    """The fingerprints without repetition: the second of two equal ones, and each later one, gets another value."""
    counts: Counter[str] = Counter()
    distinct = []
    for one in fingerprints:
        counts[one] += 1
        distinct.append(one if counts[one] == 1 else _digest(f"{one} {counts[one]}"))
    return distinct


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode("ascii")).hexdigest()[:FINGERPRINT_LENGTH]


def part_of(file: OnnxFile) -> str:
    """The part that a file plays, by its graph alone."""
    if file.view is None or file.role in ("generator", "unreadable"):
        return file.role
    if takes_past(file.view):
        return "merged" if file.view.branches is not None else "step"
    return "beside" if file.role in NAMED_ALONE else "first-step"


def _find_commonest_type(view: GraphView) -> str:
    sizes: Counter[str] = Counter()
    for tensor in view.model.graph.initializer:
        sizes[ELEMENT_TYPES.get(tensor.data_type, "")] += math.prod(tensor.dims)
    return min(sizes, key=lambda kind: (-sizes[kind], kind), default="")
