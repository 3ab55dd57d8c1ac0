"""Which repairs a diagnosis calls for, and their application to a working copy."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from kvdoctor.findings import Finding
from kvdoctor.layouts import Conversion
from kvdoctor.model_folder import ModelFolder
from kvdoctor.options import Options
from kvdoctor.patient import CannotRepair, Patient, WorkingCopy
from kvdoctor.repairs import Repair, load
from kvdoctor.report.document import Change, Report, Unmended
from kvdoctor.runtimes import Runtime


@dataclass(frozen=True)
class Applied:
    """One repair of one stack, or its conversion to another layout: what it changed, and the findings behind it."""

    stack: str
    repair: Repair | Conversion
    changes: tuple[Change, ...]
    because: tuple[str, ...] = ()


@dataclass(frozen=True)
class Treatment:
    """What repairs made of an export: the changed files, what was changed, and what could not be."""

    copy: WorkingCopy
    applied: tuple[Applied, ...]
    unmended: tuple[Unmended, ...]


@dataclass(frozen=True)
class Chosen:
    """The repairs that may be used: all, or those the user names; `left_out` did not help before."""

    names: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def takes(self, stack: str, repair: Repair) -> bool:
        """Whether a repair may be used on a stack."""
        return (not self.names or repair.name in self.names) and (stack, repair.name) not in self.left_out


def treat(folder: ModelFolder, report: Report, chosen: Chosen, runtime: Runtime, options: Options) -> Treatment:
    """Apply to each stack the repairs that its findings call for, in order. The folder's files stay as they are."""
    copy, applied, unmended = WorkingCopy(folder), list[Applied](), list[Unmended]()
    calling = _calling(report.findings, chosen)
    for patient in _patients(folder, report, copy, runtime, options):
        names = {finding.name for finding in patient.findings if calling(finding)}
        for repair in load():
            because = tuple(name for name in repair.mends if name in names)
            if not because or not chosen.takes(patient.stack.name, repair):
                continue
            changes, reason = _apply(repair, patient)
            if changes:
                applied.append(Applied(patient.stack.name, repair, changes, because))
            if reason is not None:
                unmended += [replace(reason, finding=name) for name in because]
    return Treatment(copy, tuple(applied), tuple(unmended))


def _calling(findings: Collection[Finding], chosen: Chosen) -> Callable[[Finding], bool]:
    """Which findings call for repairs.

    A note hurts nobody: it is mended where repairs were named, or where nothing worse is there to be mended.
    """
    mendable = {name for repair in load() for name in repair.mends}
    worse = any(finding.severity != "note" and finding.name in mendable for finding in findings)
    return lambda finding: bool(chosen.names) or not worse or finding.severity != "note"


def _patients(
    folder: ModelFolder, report: Report, copy: WorkingCopy, runtime: Runtime, options: Options
) -> Iterator[Patient]:
    contracts = {known.name: known.contract for known in report.stacks}
    for stack in folder.stacks:
        runs = tuple(run for run in report.runs if run.stack == stack.name)
        files = {file.name for file in stack.files.values()}
        findings = tuple(finding for finding in report.findings if concerns(finding, stack.name, files))
        if findings and stack.kind != "operator":
            yield Patient(stack, contracts.get(stack.name), findings, runs, copy, runtime, options)


def concerns(finding: Finding, stack: str, files: Collection[str]) -> bool:
    """Whether a finding is one of a stack, or one of its files, which are diagnosed each for itself."""
    return finding.stack == stack or (finding.stack is None and finding.file in files)


def _apply(repair: Repair, patient: Patient) -> tuple[tuple[Change, ...], Unmended | None]:
    """Apply one repair; where it declines or crashes, the copy is as it was before."""
    saved = patient.copy.snapshot()
    try:
        changes = repair.apply(patient)
    except CannotRepair as reason:
        patient.copy.restore(saved)
        return (), Unmended(patient.stack.name, "", repair.name, str(reason), reason.instead)
    except Exception as error:  # one broken repair must not take the others with it
        patient.copy.restore(saved)
        text = f"the repair crashed ({type(error).__name__}: {error}); please report it"
        return (), Unmended(patient.stack.name, "", repair.name, text)
    if not changes:
        patient.copy.restore(saved)
    patient.copy.changed |= {change.file for change in changes}
    return changes, None
