"""The proof that masks hide padding: rows of one batch that are padded have the logits that they have alone.

`prove` holds of rows without padding. Here masks have what they have for padding, in regions of each row, and along
axes that count it, entries are combined only by weights that are 0 there: the outputs then are uniform again.
"""

import math
from collections.abc import Collection

from kvdoctor.analysis.proof.constants import input_type
from kvdoctor.analysis.proof.prove import NotProved, Prover
from kvdoctor.analysis.proof.types import ENCODER, ROWS, Lengths, Term, Type, symbol
from kvdoctor.analysis.proof.walk import Typed, Walk
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract, PhaseName, Role

MARKS: dict[Role, tuple[float, float]] = {"attention_mask": (0.0, 1.0), "encoder_mask": (0.0, 1.0)}
MARKS |= {"padding_mask": (1.0, 0.0)}
"""What a mask has for padding, and for all else."""


def hides_padding(stack: StackFiles, contract: CacheContract, roles: Collection[Role]) -> bool:
    """Whether what masks of some roles exclude changes nothing, in a stack that is proved for rows without padding."""
    prover = Prover(stack, contract, weights={file.name: {} for file in stack.files.values()})
    several = contract.phases["prefill"] != contract.phases["decode"]
    phases: tuple[PhaseName, ...] = ("prefill", "decode") if several else ("decode",)
    try:
        for phase in phases:
            first = several and phase == "prefill"
            lengths = prover.lengths(phase, first=first, single=several and not first and prover.takes_one)
            walk = prover.walk(phase, lengths, _mask_padding(prover, phase, lengths, roles))
            prover.logits(walk, phase)
            attends = any(node.has("attend") for node in walk.flow.nodes)  # whose masks say nothing of padding here
            if attends or (lengths.total in lengths.padded and not _weighs_nothing_apart(walk)):
                return False
    except NotProved:
        return False
    return True


def _mask_padding(prover: Prover, phase: PhaseName, lengths: Lengths, roles: Collection[Role]) -> dict[str, Typed]:
    """The masks of a graph with padding, which the lengths count from here on.

    Raises:
        NotProved: a mask or the positions are of another form.
    """
    graph, given, padded = prover.contract.graph(phase), dict[str, Typed](), set[Term]()
    for port in (port for port in graph.inputs if port.role in roles):
        kind = input_type(port, prover.contract, phase, lengths)
        # Without positions as an input, a graph counts padding or computes them from the mask.
        placed = port.role == "encoder_mask" or graph.port("position_ids") is not None
        if port.role not in MARKS or kind.shape is None or kind.shape[:-1] != ((ROWS,),) or not placed:
            raise NotProved(f"input {port.name!r}")
        hidden, seen = MARKS[port.role]
        marked = Type(kind.kind, kind.shape, uniform=True, calm=True, regions=(((-2, -1), (hidden, seen, seen)),))
        given[port.name] = Typed(marked, prover.keys.of("padded", port.name))
        padded |= {symbol(ENCODER)} if port.role == "encoder_mask" else {lengths.past, lengths.new, lengths.total}
    lengths.padded = frozenset(padded)
    return given


def _weighs_nothing_apart(walk: Walk) -> bool:
    """Whether a token that sees nothing has weights: an infinite mask makes them no numbers, which must be replaced."""
    kinds = [one.type for one in walk.values.values()]
    lowest = {one.linear[0] for one in kinds if one.linear is not None and isinstance(one.linear[0], float)}
    if -math.inf not in lowest | {mark for one in kinds for _, marks in one.regions for mark in marks}:
        return True
    weights = [node.output() for node in walk.flow.nodes if node.has("softmax")]
    return all(reader.has("elementwise") for name in weights for reader, _ in walk.flow.consumers.get(name, ()))
