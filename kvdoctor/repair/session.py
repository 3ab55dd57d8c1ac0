"""The values that one call of `re-export` passes from step to step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.analysis.model_folder import ModelFolder, open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import Run
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.repair.apply import Applied
from kvdoctor.report.document import Report
from kvdoctor.report.repair_record import CacheCosts, NotRepaired, Proof
from kvdoctor.runtime.client import Runtime

if TYPE_CHECKING:
    import numpy as np


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
        import numpy as np

        file = self.logits / f"{stack}.npz"
        if not file.is_file():
            return None
        with np.load(file) as store:
            return store[experiment] if experiment in store and store[experiment].size else None

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
        return next((known.contract for known in self.report.stacks if known.name == stack), None)

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
