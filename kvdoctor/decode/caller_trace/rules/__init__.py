"""Rules that a step must keep, one file for each part of the contract; each yields the violations of a step.

They are applied in order, and only the first that finds a violation is reported: a past of the wrong length causes a
mask of the wrong length too.
"""

from collections.abc import Callable, Iterator

from kvdoctor.decode.caller_trace.rules import branches, coupled, encoder, pasts, ports, tokens
from kvdoctor.decode.caller_trace.step import ContractViolation, StepContext

RULES: tuple[Callable[[StepContext], Iterator[ContractViolation]], ...] = (
    ports.ports,
    branches.branches,
    tokens.all_ids,
    tokens.batch,
    tokens.capacity,
    encoder.encoder,
    pasts.pasts,
    coupled.lengths,
    coupled.values,
)


def first_breaks(moment: StepContext) -> tuple[ContractViolation, ...]:
    """What the first rule that is broken says; nothing for a step that keeps the contract as far as it can be seen."""
    mild: tuple[ContractViolation, ...] = ()
    for rule in RULES:
        found = tuple(rule(moment))
        if any(not one.mild for one in found):
            return found
        mild = mild or found
    return mild
