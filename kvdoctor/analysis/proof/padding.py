"""The proof that masks hide padding: rows of one batch that are padded have the logits that they have alone.

`prove` holds of rows without padding. Here masks have what they have for padding, in regions of each row, and along
axes that count it, entries are combined only by weights that are 0 there: the outputs then are uniform again. What an
index along such an axis says is the distance of two tokens alone, and no position: that is an input of its own.
"""

from collections.abc import Collection

from kvdoctor.analysis.proof.constants import MASK_ROLES, POSITIONS, TOKENS, input_type
from kvdoctor.analysis.proof.masks import stays_finite
from kvdoctor.analysis.proof.prove import NotProved, Prover
from kvdoctor.analysis.proof.types import ENCODER, NEW, PAST, ROWS, Lengths, Type, symbol
from kvdoctor.analysis.proof.walk import Typed
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
    phases += ("embed",) if "embed" in contract.phases else ()
    # A graph without a mask that another graph of the stack has is given the same padding.
    asked = {port.role for phase in phases for port in contract.graph(phase).inputs}.intersection(roles)
    padded = {name for role in asked for name in ((ENCODER,) if role == "encoder_mask" else (PAST, NEW))}
    try:
        for phase in phases:
            first = several and phase == "prefill"
            lengths = prover.lengths(phase, first=first, single=phase == "decode" and prover.takes_one)
            lengths.padded = frozenset(padded)
            walk = prover.walk(phase, lengths, _give_padding(prover, phase, lengths, asked))
            attends = any(node.has("attend") for node in walk.flow.nodes)  # whose masks say nothing of padding here
            kinds = {name: one.type for name, one in walk.values.items()}
            if attends or (NEW in padded and not stays_finite(kinds, walk.flow, lengths.one_float)):
                return False
            if phase == "decode":
                prover.check(walk, phase)
            else:
                for port in contract.graph(phase).outputs:
                    prover.output(walk, port.name)
    except NotProved:
        return False
    return True


def _give_padding(prover: Prover, phase: PhaseName, lengths: Lengths, asked: Collection[Role]) -> dict[str, Typed]:
    """The inputs of a graph that padding changes: masks that exclude it, and positions that do not count it.

    Raises:
        NotProved: a mask is of another form.
    """
    given = dict[str, Typed]()
    for port in prover.contract.graph(phase).inputs:
        kind, of_tokens = input_type(port, prover.contract, phase, lengths), NEW in lengths.padded
        rows = kind.shape is not None and (ROWS,) in kind.shape
        fixed = {axis for axis, dim in zip(port.axes, port.shape or (), strict=False) if isinstance(dim, int)}
        if "encoder" in fixed and ENCODER in lengths.padded:
            raise NotProved(f"input {port.name!r}")
        if port.role in asked or (of_tokens and port.role in MASK_ROLES):
            column = symbol(ENCODER) if port.role == "encoder_mask" else lengths.total
            if port.role not in MARKS or kind.shape != ((ROWS,), (column,)):
                raise NotProved(f"input {port.name!r}")
            hidden, seen = MARKS[port.role]
            regions = (((-2, -1), (hidden, seen, seen)),)
            kind = Type(kind.kind, kind.shape, uniform=True, calm=True, regions=regions)
        elif of_tokens and port.role == "position_ids" and rows:
            kind = Type(kind.kind, kind.shape, uniform=True)
        elif of_tokens and port.role in (*POSITIONS, *TOKENS) and not rows:
            kind = Type(kind.kind, kind.shape, linear=kind.linear)
        else:
            continue
        given[port.name] = Typed(kind, prover.keys.of("padded", port.name))
    return given
