"""Runs the checks of one round, and returns what they found."""

from dataclasses import replace

from kvdoctor.diagnose.context import ContractContext, FileContext
from kvdoctor.diagnose.fingerprints import FindingOrigin, make_finding
from kvdoctor.diagnose.node_source import find_sources
from kvdoctor.findings import (
    CannotCheck,
    Check,
    Fault,
    Finding,
    NodeSource,
    NotChecked,
    Round,
    Selection,
    checks_of,
)
from kvdoctor.records import record

Context = FileContext | ContractContext
"""The context of any round; those of later rounds extend `ContractContext`."""


@record
class CheckResults:
    """What checks found, and what could not be checked; the results of several rounds add up."""

    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()

    def __add__(self, other: "CheckResults") -> "CheckResults":
        return CheckResults(self.findings + other.findings, self.not_checked + other.not_checked)


OF_PARTS = "parts-do-not-fit"
"""The check of the files that make a model together."""


def run_checks(context: Context, when: Round, selection: Selection) -> CheckResults:
    """Run the selected checks of a round. A check that raises is reported as not checked.

    What is no decoder with a KV cache has no cache contract to be checked, and neither has one that lacks a part: there
    the check of the parts alone is run.
    """
    found = CheckResults()
    checks = checks_of(when)
    if when == "contract" and isinstance(context, ContractContext):
        if any(problem.essential or not problem.declared for problem in context.stack.problems):
            checks = tuple(one for one in checks if one.name == OF_PARTS)
        elif context.contract.no_decoder is not None:
            return found
    for one in checks:
        if selection.takes(one.code, one.name):
            found += _run_check(one, when, context)
        elif one.incomplete:
            found += _hide_findings(_run_check(one, when, context))
    return found


def _hide_findings(found: CheckResults) -> CheckResults:
    """The results of a deselected check without which nothing was diagnosed: the model is not called healthy."""
    return CheckResults(
        not_checked=tuple(NotChecked(f.stack, f.code, f"{f.where}: {f.cause}", essential=True) for f in found.findings)
    )


def _run_check(one: Check, when: Round, context: Context) -> CheckResults:
    stack, required = (None, ()) if isinstance(context, FileContext) else (context.stack.name, context.required)
    findings: list[Finding] = []
    skipped: tuple[NotChecked, ...] = ()
    try:
        for found in one.functions[when](context):
            fault = _name_stage(found, context)
            counted = replace(fault, severity="error") if fault.use in required else fault
            origin = _find_origin(fault, context)
            findings.append(replace(make_finding(one, counted, origin), sources=_find_sources(fault, origin)))
    except CannotCheck as reason:
        skipped = (NotChecked(stack, one.code, str(reason), reason.essential),)
    except Exception as error:  # one broken check must not hide what the others found
        text = f"the check crashed ({type(error).__name__}: {error}); please report it"
        skipped = (NotChecked(stack, one.code, text, essential=True),)
    return CheckResults(tuple(findings), skipped)


def _name_stage(fault: Fault, context: Context) -> Fault:
    """The fault with the file that its first subject belongs to, where the decoder is a pipeline of several files."""
    if isinstance(context, FileContext) or not context.stack.stages or fault.file != context.stack.main.name:
        return fault
    subject = next(iter(fault.subject), "")
    stages = context.stack.stages
    own = (stage.file for stage in stages if subject in {*stage.inputs.values(), *stage.outputs.values()})
    return replace(fault, file=next(own, stages[-1].file))


def _find_sources(fault: Fault, origin: FindingOrigin) -> tuple[NodeSource, ...]:
    """Where the nodes that a fault names come from: looked for in its own file first."""
    files = (origin.file, *origin.files) if fault.nodes else ()
    views = {id(file.view): file.view for file in files if file is not None and file.view is not None}
    return find_sources(fault.nodes, views.values())


def _find_origin(fault: Fault, context: Context) -> FindingOrigin:
    """The file that the fault names, else the file or the stack that was checked."""
    if isinstance(context, FileContext):
        stack, own, files = None, context.file, context.folder.files
    else:
        stack, own = context.stack, context.stack.main
        files = (*context.folder.files, *context.stack.members, *context.stack.files.values())
    named = next((file for file in files if file.name == fault.file), None)
    return FindingOrigin(named or own, stack, tuple(files))
