"""Another layout for an export that may just have been repaired: converted, diagnosed once more, and proved."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import CacheContract
from kvdoctor.cure.converting import Fit, Fitted, fitted, left_out, name_axes_readably, put_in_place
from kvdoctor.cure.cut_proof import prove_cut
from kvdoctor.cure.numbers import lower_copy
from kvdoctor.cure.proof import LOOPS, Side, equal, loops, prove
from kvdoctor.cure.surgery import Outcome, Surgery
from kvdoctor.cure.treatment import Applied, Treatment
from kvdoctor.doctor import step_test
from kvdoctor.errors import UsageError
from kvdoctor.layouts import Conversion
from kvdoctor.lowering import Wanted
from kvdoctor.model_folder import open_folder
from kvdoctor.parity import compare, judge
from kvdoctor.report.document import Proof, Report

if TYPE_CHECKING:
    import numpy as np


HIDES = {"sequence-axis-frozen": ("chunk-fails", "mask-not-offset", "positions-not-offset")}
"""What a merged decoder cannot declare of one of its branches shows there when it is run with several new tokens."""


@dataclass
class Refitting:
    """One export on its way to another layout; `surgery` holds the export, the tools and the place of the copy."""

    surgery: Surgery
    fit: Fit
    ready: tuple[Fitted, ...] | None = None

    def left_out(self, to_be_repaired: bool) -> frozenset[Path]:
        """The files that need not be copied: where nothing is repaired first, those that the layout replaces.

        Raises:
            UsageError: no stack can have the layout.
        """
        if to_be_repaired or self.fit.layout is None:
            return frozenset()
        self.ready = fitted(self.surgery.folder, _contracts(self.surgery.before.report), self.fit)
        return left_out(self.surgery.folder, self.ready)

    def carry_out(self, outcome: Outcome) -> Outcome:
        """Give the copy its layout, diagnose it and prove it; what is not to be fitted, or not proved, stays as it is.

        Raises:
            UsageError: no stack can have the layout, or no axis is to be renamed.
        """
        if not self.fit.is_asked or (outcome.applied and not outcome.holds):
            return outcome
        if self.fit.layout is not None:
            outcome = self._converted(outcome)
        elif self.fit.readable:
            outcome = self._renamed(outcome)
        return self._lowered(outcome) if self.fit.lowers else outcome

    def _converted(self, outcome: Outcome) -> Outcome:
        at, shown = self.surgery.at, self.surgery.shown
        root, gone = self.surgery.folder.root, frozenset[Path]()
        done = self.ready
        if done is None:
            copy = open_folder(shown, at / self.surgery.model)
            done = fitted(copy, _contracts(outcome.after.report), self.fit)
            root, gone = copy.root, left_out(copy, done)
        put_in_place(done, root, root if gone else at, gone)
        after = self._diagnosed()
        proof = [entry for one in done for entry in self._proved(one, outcome.after, after)]
        applied = tuple(
            Applied(one.stack.name, one.layout.conversion(one.made), tuple(one.made.changes)) for one in done
        )
        return replace(outcome, after=after, applied=(*outcome.applied, *applied), proof=(*outcome.proof, *proof))

    def _proved(self, one: Fitted, before: Side, after: Side) -> Iterator[Proof]:
        """What the diagnosis of the new files shows: its loops pass, nothing new came, numbers are the source's."""
        stack = next((s.name for s in after.report.stacks if set(s.files) & set(one.files)), None)
        if stack is None:
            yield Proof(one.stack.name, f"the layout {one.layout.name} is read as a stack", False, "there is none")
            return
        yield from loops(stack, after)
        known = {finding.name for finding in before.report.findings}
        known |= {shown for name in known for shown in HIDES.get(name, ())}
        fresh = sorted({f.name for f in after.report.findings if f.severity != "note"} - known)
        yield Proof(stack, "no finding that was not there before", not fresh, ", ".join(fresh))
        if one.made.cut is not None:
            source = self.surgery.folder.root / one.stack.files["decoder"].name
            yield from prove_cut(self.surgery, stack, one, source, (one.files[0], one.files[1]))
        else:
            yield _same_numbers(one, stack, before, after)

    def _renamed(self, outcome: Outcome) -> Outcome:
        """The copy with readable axes, files and names as they were."""
        copy = open_folder(self.surgery.shown, self.surgery.at / self.surgery.model)
        changes = name_axes_readably(copy, _contracts(outcome.after.report))
        if not changes and not outcome.applied:
            raise UsageError(f"the open axes of {self.surgery.folder.shown!r} are called as Optimum calls them already")
        if not changes:
            return outcome
        conversion = Conversion("axes readable", "Open axes get the names that Optimum writes.")
        applied = [Applied(stack, conversion, tuple(done)) for stack, done in changes.items()]
        after = self._diagnosed(self.surgery.model)
        proof = prove(applied, outcome.after, after, {})
        return replace(outcome, after=after, applied=(*outcome.applied, *applied), proof=(*outcome.proof, *proof))

    def _lowered(self, outcome: Outcome) -> Outcome:
        """The copy with the numbers that were asked for.

        Raises:
            CannotLower: something that the model uses needs more.
        """
        model = self.surgery.model if self.fit.layout is None else "."
        copy = open_folder(self.surgery.shown, self.surgery.at / model)
        applied = lower_copy(copy, Wanted(self.fit.ir_version, self.fit.opset))
        if not applied:
            return outcome
        after = self._diagnosed(model)
        proof = prove(applied, outcome.after, after, {})
        return replace(outcome, after=after, applied=(*outcome.applied, *applied), proof=(*outcome.proof, *proof))

    def _diagnosed(self, model: str = ".") -> Side:
        """The copy as it is now, under the name that it will have."""
        logits = Path(tempfile.mkdtemp(prefix="fitted-", dir=self.surgery.scratch))
        at = self.surgery.at / model
        report = step_test(self.surgery.shown, self.surgery.options, self.surgery.runtime, logits, at)
        return Side(report, logits)


def untouched(before: Side, treatment: Treatment) -> Outcome:
    """Where nothing is repaired before the layout: the export as it was diagnosed."""
    return Outcome(before, before, (), treatment.unmended, ())


def _contracts(report: Report) -> dict[str, CacheContract | None]:
    return {stack.name: stack.contract for stack in report.stacks}


def _same_numbers(one: Fitted, stack: str, before: Side, after: Side) -> Proof:
    """The logits of the source's loop and of the new one's, step by step: both hold what does not change."""
    old, new = _kept(before, one.stack.name), _kept(after, stack)
    claim = "the loop's logits are those of the source"
    if old is None or new is None or old.shape != new.shape:
        return Proof(stack, claim, False, "no logits to compare: one of the loops did not come to its end")
    if equal(old, new):
        return Proof(stack, f"{claim}, bit for bit", True, f"{old.size} numbers")
    width = one.contract.vocabulary or old.size
    found = compare(new.reshape(1, -1, width), old.reshape(1, -1, width), one.contract.exactness)
    text = f"within {found.relative:.1e} of their spread; not bit for bit" if found.finite else "not finite"
    return Proof(stack, claim, judge(found, one.contract.exactness) == "pass", text)


def _kept(side: Side, stack: str) -> "np.ndarray[Any, Any] | None":
    """The logits of the loop that holds what does not change, or of the plain one where that is the same."""
    return next((kept for name in reversed(LOOPS) if (kept := side.kept(stack, name)) is not None), None)
