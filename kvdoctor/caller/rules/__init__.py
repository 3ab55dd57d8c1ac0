"""What a step must keep, one file for each part of the deal: each gives the breaks that it sees in a step.

They are asked in order, and the first that has something to say is the one that is heard: a past of the wrong length
makes a mask of the wrong length too. numpy and the standard library only.
"""

from collections.abc import Callable, Iterator

from kvdoctor.caller.moment import Break, Moment
from kvdoctor.caller.rules import branches, coupled, encoder, pasts, ports, tokens

RULES: tuple[Callable[[Moment], Iterator[Break]], ...] = (
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


def first_breaks(moment: Moment) -> tuple[Break, ...]:
    """What the first rule that is broken says; nothing for a step that keeps the contract as far as it can be seen."""
    mild: tuple[Break, ...] = ()
    for rule in RULES:
        found = tuple(rule(moment))
        if any(not one.mild for one in found):
            return found
        mild = mild or found
    return mild
