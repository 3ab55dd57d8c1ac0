"""Original and copy run without graph optimisation: what a repair did, apart from what a runtime makes of it.

Where the runtime opens the original at a lower level only, its fusions compute the copy another way. With none of them
on either side, a repair that changes no value leaves all logits equal.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvdoctor.calls import Array
from kvdoctor.contract import CacheContract
from kvdoctor.cure.proof import Side
from kvdoctor.options import Options
from kvdoctor.report.document import Proof
from kvdoctor.runtimes import Job, Runtime

WAY = "way-off"
"""The experiment that runs the held loop without optimisation, and a reference run as usual."""


@dataclass(frozen=True)
class Unoptimised:
    """The two folders in which original and copy lie, and what runs them."""

    original: Path
    copy: Path
    runtime: Runtime
    options: Options
    scratch: Path

    def proof(self, stack: str, before: Side, after: Side) -> Proof:
        """Run both sides of a stack, and hold their logits against each other."""
        claim = "without graph optimisation, logits equal to the original's, bit for bit"
        found = []
        for name, folder, side in (("original", self.original, before), ("copy", self.copy, after)):
            contract = side.contract(stack)
            if contract is None:
                return Proof(stack, claim, False, f"the {name} has no contract to run it by")
            found.append(self._logits(f"{stack}-{name}", folder, contract))
        old, new = found
        if old is None or new is None:
            return Proof(stack, claim, False, "one of the two gives no logits so")
        return Proof(stack, claim, bool(np.array_equal(old, new, equal_nan=True)))

    def _logits(self, name: str, folder: Path, contract: CacheContract) -> Array | None:
        file = self.scratch / f"unoptimised-{name}.npz"
        file.unlink(missing_ok=True)
        job = Job(
            name, folder.absolute(), contract, (WAY,), self.options.seed, self.options.provider, file, timed=False
        )
        self.runtime.examine(job)
        if not file.is_file():
            return None
        with np.load(file) as store:
            return store[WAY] if WAY in store.files else None


def opened_otherwise(stack: str, before: Side, after: Side) -> bool:
    """Whether the runtime opened the original at a lower level of optimisation than the copy."""
    levels = [{run.level for run in side.report.runs if run.stack == stack and run.steps} for side in (before, after)]
    return bool(levels[0]) and levels[0] != levels[1]
