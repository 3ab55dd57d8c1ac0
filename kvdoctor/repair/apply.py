"""Which repairs a diagnosis calls for, and their application to a working copy."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.findings import Finding
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.layouts.registry import Conversion
from kvdoctor.repair.repairs.registry import Repair, load
from kvdoctor.repair.workspace import CannotRepair, RepairContext, WorkingCopy
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import Change, NotRepaired
from kvdoctor.runtime.client import Runtime


@record(slots=False)
class Applied:
    """One repair or conversion of one stack: its changes, and the findings that called for it."""

    stack: str
    repair: Repair | Conversion
    changes: tuple[Change, ...]
    because: tuple[str, ...] = ()


@record(slots=False)
class RepairedFiles:
    """The result of repairs on an export: the changed files, the changes, and the findings that were not repaired."""

    copy: WorkingCopy
    applied: tuple[Applied, ...]
    not_repaired: tuple[NotRepaired, ...]


@record(slots=False)
class RepairChoice:
    """The repairs that may be used: all, or those that the user names, without those in `left_out`.

    Without `notes`, findings that are notes call for no repair.
    """

    names: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    notes: bool = True

    def allows(self, stack: str, repair: Repair) -> bool:
        """Whether a repair may be used on a stack."""
        return (not self.names or repair.name in self.names) and (stack, repair.name) not in self.left_out


def apply_repairs(
    folder: ModelFolder, report: Report, choice: RepairChoice, runtime: Runtime, options: Options
) -> RepairedFiles:
    """Apply to each stack the repairs that its findings call for, in order; the folder itself stays as it is."""
    copy, applied, not_repaired = WorkingCopy(folder), list[Applied](), list[NotRepaired]()
    calls = _select_findings(report.findings, choice)
    for context in _list_contexts(folder, report, copy, runtime, options):
        names = {finding.name for finding in context.findings if calls(finding)}
        for repair in load():
            because = tuple(name for name in repair.checks if name in names)
            if not because or not choice.allows(context.stack.name, repair):
                continue
            changes, reason = _apply(repair, context)
            if changes:
                applied.append(Applied(context.stack.name, repair, changes, because))
            if reason is not None:
                not_repaired += [replace(reason, finding=name) for name in because]
    return RepairedFiles(copy, tuple(applied), tuple(not_repaired))


def _select_findings(findings: Collection[Finding], choice: RepairChoice) -> Callable[[Finding], bool]:
    """The findings that call for repairs.

    A note calls for one only if repairs were named, or if no graver finding can be repaired.
    """
    repairable = {name for repair in load() for name in repair.checks}
    worse = any(finding.severity != "note" and finding.name in repairable for finding in findings)
    return lambda finding: bool(choice.names) or (choice.notes and not worse) or finding.severity != "note"


def _list_contexts(
    folder: ModelFolder, report: Report, copy: WorkingCopy, runtime: Runtime, options: Options
) -> Iterator[RepairContext]:
    contracts = {known.name: known.contract for known in report.stacks}
    for stack in folder.stacks:
        runs = tuple(run for run in report.runs if run.stack == stack.name)
        files = {file.name for file in stack.files.values()}
        findings = tuple(finding for finding in report.findings if concerns(finding, stack.name, files))
        if findings and stack.kind != "operator" and not stack.parts:
            yield RepairContext(stack, contracts.get(stack.name), findings, runs, copy, runtime, options)


def concerns(finding: Finding, stack: str, files: Collection[str]) -> bool:
    """Whether a finding is about a stack or about one of its files."""
    return finding.stack == stack or (finding.stack is None and finding.file in files)


def _apply(repair: Repair, context: RepairContext) -> tuple[tuple[Change, ...], NotRepaired | None]:
    """Apply one repair; if it declines or crashes, the copy is restored."""
    saved = context.copy.snapshot()
    try:
        changes = repair.apply(context)
    except CannotRepair as reason:
        context.copy.restore(saved)
        return (), NotRepaired(context.stack.name, "", repair.name, str(reason), reason.instead)
    except Exception as error:  # one broken repair must not stop the others
        context.copy.restore(saved)
        text = f"the repair crashed ({type(error).__name__}: {error}); please report it"
        return (), NotRepaired(context.stack.name, "", repair.name, text)
    if not changes:
        context.copy.restore(saved)
    context.copy.changed |= {change.file for change in changes}
    return changes, None
