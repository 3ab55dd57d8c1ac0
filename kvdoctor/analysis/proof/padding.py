"""The proof that masks hide padding: rows of one batch that are padded have the logits that they have alone.

Where `prove` holds of rows without padding, what is left are the entries that a mask excludes. What a mask has for them
is known, and is followed as it is for later tokens: along an axis that counts padding, entries are combined only by the
weights of a softmax, whose scores a mask hides there.
"""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations

from kvdoctor.analysis.proof.call import NotKnown, Reading
from kvdoctor.analysis.proof.constants import input_type
from kvdoctor.analysis.proof.masks import combine_regions, is_hiding
from kvdoctor.analysis.proof.prove import NotProved, Prover
from kvdoctor.analysis.proof.shaping import viewed
from kvdoctor.analysis.proof.types import (
    ENCODER,
    ROWS,
    UNKNOWN,
    ZERO,
    Axis,
    Mark,
    Region,
    Term,
    Type,
    constant_of,
    size_of,
    symbol,
)
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
    found = _Padded(prover.walk(phase, lengths, walk), padded)
    found.follow_flat()
    return found


@dataclass(eq=False, repr=False)
class _Padded:
    """A walk over a graph whose masks exclude padding.

    `padded` are the lengths that count it, `weights` the results of a softmax, and what is made of one, that are 0
    there, `flat` the masks that were flattened by name, and `placed` the nodes that read these.
    """

    walk: Walk
    padded: set[Term]
    weights: set[str] = field(default_factory=set)
    flat: dict[str, Type] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)

    def follow_flat(self) -> None:
        """Read masks that graphs flatten, and take entry by entry or give two axes again."""
        changed = set[str]()
        for node in self.walk.flow.nodes:
            if not changed.isdisjoint(node.inputs):
                self.walk.visit(node)
                changed.update(node.outputs)
            found = self._read_flat(node)
            if found is not None:
                self.walk.values[node.output()] = replace(self.walk.values[node.output()], type=found)
                changed.add(node.output())
                self.placed.add(node.index)

    def _read_flat(self, node: FlatNode) -> Type | None:
        """The type of what a node takes of a flat mask; None where it is not known, or it flattens a mask itself."""
        taken, made = self._type_of(node.input(0)), self._type_of(node.output())
        if node.has("view") and self._find_mark(taken) is not None and self._find_mark(made) is None:
            self.flat[node.output()] = taken
        mask = self.flat.get(node.input(0))
        if mask is None or mask.shape is None or made.shape is None:
            return None
        if node.has("view"):
            with suppress(NotKnown):
                found = viewed(Reading(node, [mask], self.walk.lengths), mask, list(map(size_of, made.shape))).type
                return found if self._find_mark(found) is not None else None
        shape = taken.shape or ()
        whole = len(mask.shape) == 2 and shape[:1] == ((*mask.shape[0], *mask.shape[1]),)
        pair = self._find_pair(node, mask.shape, len(shape) - 1) if whole else None
        if pair is None:
            return None
        return Type(mask.kind, made.shape, uniform=True, calm=True, regions=((pair, mask.regions[0][1]),))

    def _find_pair(self, node: FlatNode, mask: tuple[Axis, ...], after: int) -> tuple[int, int] | None:
        """The axes of row and column in what a Gather takes, with some more axes after them.

        None where a place is not the row times the number of columns, plus the column.
        """
        makers = self.walk.flow.producers
        places = makers.get(node.input(1)) if node.has("embed") else None
        if places is None or not places.has("add") or node.number("axis", 0):
            return None
        for start, place in permutations(places.inputs):
            times, column = makers.get(start), self._count(place, mask[1])
            for one, other in permutations(times.inputs) if times is not None and times.has("multiply") else ():
                row, columns = self._count(one, mask[0]), constant_of(self._type_of(other))
                if row is not None and column is not None and columns is mask[1][0]:
                    return row - after, column - after
        return None

    def _count(self, name: str, axis: Axis) -> int | None:
        """The axis of a length along which a value counts up from 0; None for another value."""
        one = self._type_of(name)
        places = [at - len(one.shape or ()) for at, each in enumerate(one.shape or ()) if each == axis]
        return next((at for at in places if one.linear == (ZERO, ((at, 1),))), None)

    def is_right(self, node: FlatNode) -> bool:
        """Whether padding changes no other entry of what a node makes; its weights are noted.

        A padded token sees nothing: where what hides is infinite, its weights are no numbers until something else is
        selected in their place.
        """
        taken, made = [self._type_of(name) for name in node.inputs if name], self._type_of(node.output())
        if node.has("measure") or not any(map(self._is_data, taken)):
            return True
        if made.shape is None or not node.has(*APART, *COMBINES):
            return False
        weighs = any(name in self.weights for name in node.inputs)
        if node.has("softmax") and self._counts(made.shape[-1:]):
            weighs = is_hiding(self._find_mark(self._follow(node.input(0), DEEPEST)))
            guarded = all(each.has("elementwise") for each, _ in self.walk.flow.consumers.get(node.output(), ()))
            if not weighs or (self.hides_rows and not guarded):
                return False
        elif node.has(*COMBINES):
            return weighs or not self._counts(self._find_gone(node, taken, made.shape))
        elif self._find_mark(made) is None and all(map(self._is_mask, taken)):
            # A mask of which it is no longer known what it has for padding, but for a flat one that is read rightly.
            return all(each.index in self.placed for each, _ in self.walk.flow.consumers.get(node.output(), ()))
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
        regions: tuple[Region, ...] = ()
        if most and node.has("elementwise", "copy", "cast"):
            taken = [self._follow(each, most - 1) for each in node.inputs]
            regions = combine_regions(Reading(node, taken, self.walk.lengths), taken, one.kind)
        return Type(one.kind, one.shape, calm=True, regions=regions)

    @cached_property
    def hides_rows(self) -> bool:
        """Whether tokens are padded, and a mask may be infinite."""
        kinds = [one.type for one in self.walk.values.values()]
        lowest = {one.linear[0] for one in kinds if one.linear is not None and isinstance(one.linear[0], float)}
        marks = {mark for one in kinds for _, marks in one.regions for mark in marks}
        return self.walk.lengths.total in self.padded and -math.inf in lowest | marks

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
