"""Rules that a step must keep: its inputs, their lengths and its pasts. Each yields the violations of a step.

They are applied in order, and only the first that finds a violation is reported: a past of the wrong length causes a
mask of the wrong length too.
"""

from collections.abc import Callable, Iterator

from kvdoctor.addons.traces.rules import inputs, lengths, pasts
from kvdoctor.addons.traces.step import ContractViolation, StepContext

RULES: tuple[Callable[[StepContext], Iterator[ContractViolation]], ...] = (
    inputs.ports,
    inputs.branches,
    lengths.all_ids,
    lengths.batch,
    lengths.capacity,
    inputs.encoder,
    pasts.pasts,
    lengths.lengths,
    lengths.values,
)


def first_breaks(moment: StepContext) -> tuple[ContractViolation, ...]:
    """What the first broken rule says; nothing for a step that breaks the contract in no visible way."""
    mild: tuple[ContractViolation, ...] = ()
    for rule in RULES:
        found = tuple(rule(moment))
        if any(not one.mild for one in found):
            return found
        mild = mild or found
    return mild
