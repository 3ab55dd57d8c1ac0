"""The proof that masks hide padding: rows of one batch that are padded have the logits that they have alone.

Where `prove` holds of rows without padding, what is left are the entries that a mask excludes. What a mask has for them
is known, and is followed as it is for later tokens: along an axis that counts padding, entries are combined only by the
weights of a softmax, whose scores a mask hides there.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from kvdoctor.analysis.proof.call import Reading
from kvdoctor.analysis.proof.constants import input_type
from kvdoctor.analysis.proof.masks import combine_regions, is_hiding
from kvdoctor.analysis.proof.prove import NotProved, Prover
from kvdoctor.analysis.proof.types import ENCODER, ROWS, UNKNOWN, Axis, Mark, Term, Type, symbol
from kvdoctor.analysis.proof.walk import Typed, Walk
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract, PhaseName, Role
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import Trait

MARKS: dict[Role, tuple[float, float]] = {"attention_mask": (0.0, 1.0), "encoder_mask": (0.0, 1.0)}
MARKS |= {"padding_mask": (1.0, 0.0)}
"""What a mask has for padding, and for all else."""
MOVES: tuple[Trait, ...] = ("copy", "cast", "view", "permute", "repeat", "pick", "join", "dropout")
APART: tuple[Trait, ...] = (*MOVES, "elementwise", "quantize", "dequantize", "softmax")
"""Operators that combine nothing along an axis; a softmax is looked at by itself."""
COMBINES: tuple[Trait, ...] = ("product", "reduce", "normalize")
DEEPEST = 8
"""Nodes between a mask and the softmax whose scores it hides, at most."""


def hides_padding(stack: StackFiles, contract: CacheContract, roles: Collection[Role]) -> bool:
    """Whether what masks of some roles exclude changes nothing, in a stack that is proved for rows without padding."""
    prover = Prover(stack, contract, weights={file.name: {} for file in stack.files.values()})
    first = contract.phases["prefill"] != contract.phases["decode"]
    phases: tuple[PhaseName, ...] = ("prefill", "decode") if first else ("decode",)
    try:
        walks = [_walk_padded(prover, phase, first, roles) for phase in phases]
    except NotProved:
        return False
    return all(one is not None and all(map(one.is_right, one.walk.flow.nodes)) for one in walks)


def _walk_padded(prover: Prover, phase: PhaseName, several: bool, roles: Collection[Role]) -> "_Padded | None":
    """A walk with padding in the masks; None where a mask or the positions are of another form."""
    graph, first = prover.contract.graph(phase), several and phase == "prefill"
    lengths = prover.lengths(phase, first=first, single=several and not first and prover.takes_one)
    walk, padded = dict[str, Typed](), set[Term]()
    for port in (port for port in graph.inputs if port.role in roles):
        kind = input_type(port, prover.contract, phase, lengths)
        # Without positions as an input, a graph counts padding or computes them from the mask.
        placed = port.role == "encoder_mask" or graph.port("position_ids") is not None
        if port.role not in MARKS or kind.shape is None or kind.shape[:-1] != ((ROWS,),) or not placed:
            return None
        hidden, seen = MARKS[port.role]
        marked = Type(kind.kind, kind.shape, uniform=True, calm=True, regions=(((-2, -1), (hidden, seen, seen)),))
        walk[port.name] = Typed(marked, prover.keys.of("padded", port.name))
        padded |= {symbol(ENCODER)} if port.role == "encoder_mask" else {lengths.past, lengths.new, lengths.total}
    return _Padded(prover.walk(phase, lengths, walk), padded)


@dataclass(eq=False, repr=False)
class _Padded:
    """A walk over a graph whose masks exclude padding.

    `padded` are the lengths that count it, `weights` the results of a softmax, and what is made of one, that are 0
    there.
    """

    walk: Walk
    padded: set[Term]
    weights: set[str] = field(default_factory=set)

    def is_right(self, node: FlatNode) -> bool:
        """Whether padding changes no other entry of what a node makes; its weights are noted."""
        taken, made = [self._type_of(name) for name in node.inputs if name], self._type_of(node.output())
        if node.has("measure") or not any(map(self._is_data, taken)):
            return True
        if made.shape is None or not node.has(*APART, *COMBINES):
            return False
        weighs = any(name in self.weights for name in node.inputs)
        if node.has("softmax") and self._counts(made.shape[-1:]):
            weighs = is_hiding(self._find_mark(self._follow(node.input(0), DEEPEST)))
            if not weighs:
                return False
        elif node.has(*COMBINES):
            return weighs or not self._counts(self._find_gone(node, taken, made.shape))
        elif self._find_mark(made) is None and all(map(self._is_mask, taken)):
            return False  # a mask of which it is no longer known what it has for padding
        if weighs and node.has("softmax", "multiply", "select", *MOVES):
            self.weights.add(node.output())
        return True

    def _type_of(self, name: str) -> Type:
        found = self.walk.values.get(name)
        return found.type if found is not None else UNKNOWN

    def _counts(self, axes: Collection[Axis]) -> bool:
        return any(factor in self.padded for axis in axes for factor in axis)

    def _is_data(self, one: Type) -> bool:
        """Whether a value has an entry for each padded one, and is not only computed from lengths and positions."""
        return one.shape is None or (one.linear is None and one.items is None and self._counts(one.shape))

    def _find_mark(self, one: Type) -> Mark:
        """What is known of the elements of a mask, or of scores, for padding along the last axis."""
        shape = one.shape or ()
        found = (marks[0] for (row, at), marks in one.regions if shape[row] == (ROWS,) and self._counts(shape[at:][:1]))
        return next(found, None)

    def _is_mask(self, one: Type) -> bool:
        return self._find_mark(one) is not None or not self._is_data(one)

    def _follow(self, name: str, most: int) -> Type:
        """The type of scores with what masks make of it; but for these they are ordinary numbers, as was proved."""
        one, node = self._type_of(name), self.walk.flow.producers.get(name)
        if self._find_mark(one) is not None or one.linear is not None or node is None:
            return one
        regions = ()
        if most and node.has("elementwise", "copy", "cast"):
            taken = [self._follow(each, most - 1) for each in node.inputs]
            regions = combine_regions(Reading(node, taken, self.walk.lengths), taken, one.kind)
        return Type(one.kind, one.shape, calm=True, regions=regions)

    @staticmethod
    def _find_gone(node: FlatNode, taken: list[Type], made: tuple[Axis, ...]) -> list[Axis]:
        """The axes along which a node combines entries."""
        shapes = [one.shape or () for one in taken]
        if node.has("product") and not node.has("weights") and node.op != "Einsum":
            return [shapes[0][-1]]
        if node.has("normalize"):
            return list(shapes[0][node.number("axis", -1) :])
        factors = {factor for axis in made for factor in axis}
        return [axis for shape in shapes for axis in shape if not factors.issuperset(axis)]
