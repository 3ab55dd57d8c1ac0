"""What a call of `re-export` asks for and passes on, and the repairs that a diagnosis calls for, applied to a copy."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import Run
from kvdoctor.errors import describe_crash
from kvdoctor.findings import Finding
from kvdoctor.options import Options, ReExportChoices
from kvdoctor.records import record
from kvdoctor.repair.repairs.registry import Repair, load
from kvdoctor.repair.workspace import CannotRepair, RepairContext, WorkingCopy
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import CacheCosts, Change, NotRepaired, Proof
from kvdoctor.runtime.client import Runtime

if TYPE_CHECKING:
    import numpy as np


@record
class Conversion:
    """A conversion as the fix report lists it with the repairs: it repairs no finding, and results stay the same.

    `loop` is what a loop of the copy must do that one of the original need not do.
    """

    name: str
    summary: str
    advice: tuple[str, ...] = ()
    keeps: Literal["bits"] = "bits"
    loop: tuple[str, ...] = ()


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
    """The repairs that may be used: all or the named ones, but those `left_out`; `notes` call for some, or for none."""

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
    repairable = {name for repair in load() for name in repair.checks}
    worse = any(finding.severity != "note" and finding.name in repairable for finding in report.findings)
    # A note calls for a repair only if repairs were named, or if no graver finding can be repaired.
    notes = bool(choice.names) or (choice.notes and not worse)
    for context in _list_contexts(folder, report, copy, runtime, options):
        names = {finding.name for finding in context.findings if notes or finding.severity != "note"}
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
    saved, changes, why = context.copy.snapshot(), tuple[Change, ...](), None
    try:
        changes = repair.apply(context)
    except CannotRepair as reason:
        why = NotRepaired(context.stack.name, "", repair.name, str(reason), reason.instead)
    except Exception as error:  # one broken repair must not stop the others
        text = describe_crash("the repair", error)
        why = NotRepaired(context.stack.name, "", repair.name, text)
    if not changes:
        context.copy.restore(saved)
    context.copy.changed |= {change.file for change in changes}
    return changes, why


@record
class RepairRequest:
    """A call of `re-export`: the paths, and how it is done.

    `path` is the model to repair, or with a checkpoint the model to be replaced, None if there is none. Without `out`
    the copy is made and proved in a private folder and then deleted.
    """

    path: str | None
    out: str | None
    force: bool = False
    how: ReExportChoices = field(default_factory=ReExportChoices)


def read_saved(file: Path, experiment: str) -> "np.ndarray[Any, Any] | None":
    """The logits of an experiment in a file that the worker left; None if there are none."""
    import numpy as np

    if not file.is_file():
        return None
    with np.load(file) as store:
        return store[experiment] if experiment in store and store[experiment].size else None


@record(slots=False)
class DiagnosisSide:
    """One diagnosis, and the folder in which each stack left the logits of its experiments."""

    report: Report
    logits: Path

    @property
    def tolerances(self) -> Mapping[str, float]:
        """The requested tolerances of the diagnosis, by arithmetic."""
        requested: Mapping[str, float] = self.report.arguments.get("tolerances", {})
        return requested

    def run(self, stack: str, experiment: str) -> Run | None:
        """The run of an experiment on a stack."""
        return next((r for r in self.report.runs if (r.stack, r.experiment) == (stack, experiment)), None)

    def read_logits(self, stack: str, experiment: str) -> "np.ndarray[Any, Any] | None":
        """The logits of all steps of an experiment, concatenated; None if none were saved."""
        return read_saved(self.logits / f"{stack}.npz", experiment)

    def first_step(self, stack: str, experiment: str) -> "np.ndarray[Any, Any] | None":
        """The logits of the first step of an experiment, float[batch, new, vocabulary]."""
        run, logits, contract = self.run(stack, experiment), self.read_logits(stack, experiment), self.contract(stack)
        port = contract.graph("prefill").port("logits") if contract is not None else None
        if run is None or logits is None or not run.steps or port is None or port.name not in run.steps[0].returned:
            return None
        shape = run.steps[0].returned[port.name].shape
        return logits[: math.prod(shape)].reshape(shape)

    def contract(self, stack: str) -> CacheContract | None:
        """The contract of a stack as this diagnosis read it."""
        return self.contracts.get(stack)

    @property
    def contracts(self) -> dict[str, CacheContract | None]:
        """The contracts of all stacks by name."""
        return {stack.name: stack.contract for stack in self.report.stacks}


@record(slots=False)
class Outcome:
    """The result of repairs: changes, remaining findings and the proof; `after` is the diagnosis of the copy.

    `costs` are those of a narrower type of the cache, where one was asked for. `bases` say what conversions were
    compared with where that is not the original.
    """

    before: DiagnosisSide
    after: DiagnosisSide
    applied: tuple[Applied, ...]
    not_repaired: tuple[NotRepaired, ...]
    proof: tuple[Proof, ...]
    costs: tuple[CacheCosts, ...] = ()
    bases: tuple[str, ...] = ()

    def extended(self, after: DiagnosisSide, applied: Iterable[Applied], proof: Iterable[Proof]) -> "Outcome":
        """The outcome with further changes of the copy, its diagnosis after them, and their proof."""
        return replace(self, after=after, applied=(*self.applied, *applied), proof=(*self.proof, *proof))

    @property
    def holds(self) -> bool:
        """Whether every claim of the proof holds."""
        return bool(self.proof) and all(entry.holds for entry in self.proof)

    @property
    def changed_files(self) -> set[str]:
        """The names of the files that were changed."""
        return {change.file for one in self.applied for change in one.changes}


@record(slots=False)
class RepairSession:
    """One call under way: the options, the tools, the original with its diagnosis, and the copy.

    `shown` is the name of the copy in reports, `at` the folder in which it is made, `model` the path in that folder of
    the file or folder that was given.
    """

    options: Options
    runtime: Runtime
    scratch: Path
    folder: ModelFolder
    before: DiagnosisSide
    shown: str
    at: Path
    model: str

    def open_copy(self, model: str | None = None) -> ModelFolder:
        """The copy as it is now; `model` is another path in its folder."""
        return open_folder(self.shown, self.at / (self.model if model is None else model))
