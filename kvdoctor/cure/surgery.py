"""One call of `re-export` under way: a copy is repaired in rounds, diagnosed after each, and proved at the end.

A fault may hide behind another one and show only once that is mended: it gets a round of its own. Repairs that did not
help are left out of a second attempt, so that they do not keep the others from being proved.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdoctor.cure.again import Again
from kvdoctor.cure.proof import Side, prove, unhelpful
from kvdoctor.cure.treatment import Applied, Chosen, Treatment, treat
from kvdoctor.cure.unoptimised import Unoptimised, opened_otherwise
from kvdoctor.cure.writing import put_back, write_changed
from kvdoctor.model_folder import ModelFolder, open_folder
from kvdoctor.options import Options
from kvdoctor.report.document import Proof, Unmended
from kvdoctor.runtimes import Runtime

MOST_ROUNDS = 3


@dataclass(frozen=True)
class Outcome:
    """What an attempt brought: repairs, what they left, and the proof. `after` is the diagnosis of the copy."""

    before: Side
    after: Side
    applied: tuple[Applied, ...]
    unmended: tuple[Unmended, ...]
    proof: tuple[Proof, ...]

    @property
    def holds(self) -> bool:
        """Whether all of the proof holds."""
        return bool(self.proof) and all(entry.holds for entry in self.proof)


@dataclass
class Surgery:
    """Who asked for what, the tools, and the export before any repair.

    `shown` is what the copy is called, `at` where it is made, in which `model` is the path of what was given.
    """

    options: Options
    runtime: Runtime
    scratch: Path
    folder: ModelFolder
    before: Side
    shown: str
    at: Path
    model: str
    changed: set[str] = field(default_factory=set)
    diagnoses: int = field(default=0)

    def operate(self, first: Treatment, chosen: Chosen) -> Outcome:
        """Repair and prove; where that fails, once more without the repairs that did not help."""
        outcome = self._attempt(first, chosen)
        idle = tuple(unhelpful(outcome.applied, outcome.after.report))
        useless = tuple((one.stack, one.repair.name) for one in idle)
        if outcome.holds or not idle or not {(a.stack, a.repair.name) for a in outcome.applied} - set(useless):
            return replace(outcome, unmended=(*outcome.unmended, *map(_did_not_help, idle)))
        put_back(self.folder, {change.file for one in outcome.applied for change in one.changes}, self.at)
        chosen = Chosen(chosen.names, (*chosen.left_out, *useless))
        again = self._attempt(treat(self.folder, self.before.report, chosen, self.runtime, self.options), chosen)
        return replace(again, unmended=(*again.unmended, *map(_did_not_help, idle)))

    def _attempt(self, treatment: Treatment, chosen: Chosen) -> Outcome:
        applied, unmended = list(treatment.applied), list(treatment.unmended)
        after = self._made(treatment)
        for _ in range(MOST_ROUNDS - 1):
            done = Chosen(chosen.names, (*chosen.left_out, *((one.stack, one.repair.name) for one in applied)))
            copy = open_folder(self.shown, self.at / self.model)
            treatment = treat(copy, after.report, done, self.runtime, self.options)
            if not treatment.applied:
                break
            applied += treatment.applied
            unmended += treatment.unmended
            after = self._made(treatment)
        both = Unoptimised(self.folder.root, self.at, self.runtime, self.options, self.scratch)
        otherwise = [s for s in {one.stack for one in applied} if opened_otherwise(s, self.before, after)]
        instead = {stack: both.proof(stack, self.before, after) for stack in otherwise}
        proof = tuple(prove(applied, self.before, after, instead))
        return Outcome(self.before, after, tuple(applied), tuple(unmended), proof)

    def _made(self, treatment: Treatment) -> Side:
        """Write what was changed, and diagnose the copy as it is now, under the name that it will have."""
        names: dict[str, tuple[str, ...]] = {}
        for one in treatment.applied:
            for file in dict.fromkeys(change.file for change in one.changes):
                names[file] = (*names.get(file, ()), one.repair.name)
        write_changed(treatment.copy, self.at, names)
        self.diagnoses += 1
        logits = self.scratch / f"after-{self.diagnoses}"
        logits.mkdir()
        self.changed |= treatment.copy.changed
        again = Again(self.before, self.shown, self.at / self.model, self.runtime, self.options)
        return again.diagnose(self.changed, logits)


def _did_not_help(one: Applied) -> Unmended:
    reason = f"it changed {len(one.changes)} places, and the finding is still there"
    return Unmended(one.stack, one.because[0], one.repair.name, reason)
