"""One walk over a decoder: the type and the key of each value, by the rules of its operators.

Layers repeat: what a rule says of a node is known for each further node of the same operator, attributes and types.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any

from kvdoctor.analysis.proof import attention, combining, elementwise, parts, shaping
from kvdoctor.analysis.proof.call import Made, NotKnown, Reading, Rule
from kvdoctor.analysis.proof.types import UNKNOWN, Lengths, Type, number, settled
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import CONTRIB
from kvdoctor.records import record

Step = tuple[Any, ...]
"""A view, a permutation or a slice, with what it takes besides the function."""
Bound = tuple[Any, ...]
"""An axis from the end, and the start and end of a part along it."""
UNFIT = (NotKnown, ArithmeticError, LookupError, ValueError, TypeError, StopIteration)
"""What a rule raises on what is not known, too few inputs, axes beyond the rank, or attributes of another type."""
RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shaping.RULES,
    **parts.RULES,
    **combining.RULES,
    **attention.RULES,
}


@record
class Typed:
    """A value of a walk.

    Attributes:
        type: its position type.
        key: the number of its function; equal functions have equal ones.
        broken: the first node whose result is not uniform, of those that it is computed from.
    """

    type: Type
    key: int
    broken: FlatNode | None = None


@dataclass(eq=False, repr=False)
class Keys:
    """The functions of absolute positions by number, and what each is."""

    numbers: dict[Any, int] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)

    def of(self, *what: Any) -> int:
        """The number of a function."""
        found = self.numbers.get(what)
        if found is None:
            found = self.numbers[what] = len(self.parts)
            self.parts.append(what)
        return found

    def permuted(self, key: int, order: Sequence[int]) -> int:
        """The number of a function with its axes in another order."""
        what, order = self.parts[key], tuple(order)
        if what[0] == "permute" and len(what[2]) == len(order):
            key, order = what[1], tuple(what[2][at] for at in order)
        return key if order == tuple(range(len(order))) else self.of("permute", key, order)

    def viewed(self, key: int, old: Any, new: Any) -> int:
        """The number of a function under another shape."""
        what = self.parts[key]
        if what[0] == "view" and what[3] == old:
            key, old = what[1], what[2]
        return key if old == new else self.of("view", key, old, new)

    def sliced(self, key: int, bound: Bound) -> int:
        """The number of a part of a function; what was joined of parts, or another order of axes, is seen through."""
        what = self.parts[key]
        if what[0] == "permute" and -bound[0] <= len(what[2]):
            order = what[2]
            below = self.sliced(what[1], (order[bound[0]] - len(order), *bound[1:]))
            return self.permuted(below, order)
        if what[0] == "concat" and what[1] == bound[0]:
            ends = [number(end).parts for end in accumulate(what[2], initial=0)]
            found = [key for *ends, key in zip(ends, ends[1:], what[3], strict=False) if tuple(ends) == bound[1:]]
            if found:
                return int(found[0])
        return self.of("slice", key, bound)

    def follow(self, key: int, step: Step) -> int:
        """The number of a function of which nothing but a view, another order of axes or a part is taken."""
        if step[0] == "slice":
            return reduce(self.sliced, step[1:], key)
        return self.viewed(key, *step[1:]) if step[0] == "view" else self.permuted(key, *step[1:])

    def origin(self, key: int) -> tuple[str, tuple[Step, ...]] | None:
        """The slot that a value is a past of, or a part of one, and the steps that lead to the value."""
        steps: tuple[Step, ...] = ()
        what = self.parts[key]
        while what[0] != "slot":
            if what[0] not in ("permute", "view", "slice"):
                return None
            steps = ((what[0], *what[2:]), *steps)
            what = self.parts[what[1]]
        return what[1], steps


@dataclass(eq=False, repr=False)
class Walk:
    """The values of one graph, under one reading of its lengths.

    `streams` are the functions that the entries of each slot must be, with the steps that take each out of the slot;
    `limits` are the totals up to which tables reach, by the value that ends there.
    """

    flow: Flow
    lengths: Lengths
    keys: Keys
    values: dict[str, Typed]
    streams: dict[str, set[tuple[tuple[Step, ...], int]]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    known: dict[Any, tuple[list[Made], list[tuple[int, int]], Any]] = field(default_factory=dict)
    types: dict[Type, Type] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)

    def run(self) -> None:
        """Give each value its type."""
        for name, one in self.values.items():
            kind = self._one_of(settled(one.type))
            key = one.key if kind.linear is None and kind.items is None else self._number_of(kind)
            self.values[name] = Typed(kind, key, one.broken)
        for node in self.flow.nodes:
            self.visit(node)

    def _one_of(self, one: Type) -> Type:
        return self.types.setdefault(one, one)

    def visit(self, node: FlatNode) -> None:
        """Give what a node makes its types."""
        values, proto, inputs = self.values, node.proto, node.inputs
        taken = [values.get(name) if name else None for name in inputs]
        if len(taken) > 1 and node.has("copy"):
            self._choose(node, taken)
            return
        mark = (node.op, proto.domain, self._attributes(node) if proto.attribute else b"", len(node.outputs))
        key = (
            mark,
            node.index if node.has("quantize-dynamically") else 0,
            tuple([id(one.type) if one else name for one, name in zip(taken, inputs, strict=True)]),
        )
        found = self.known.get(key)
        if found is None:
            missing = any(name and name not in values for name in inputs)
            made, limits = ([Made(UNKNOWN)], []) if missing else self._ask(node, taken)
            found = self.known[key] = made, limits, self._sized(node, mark, taken)
        made, limits, mark = found
        for limit, index in limits:
            ending = inputs[index] if index < len(inputs) else ""
            self.limits[ending] = min(limit, self.limits.get(ending, limit))
        for at, name in enumerate(node.outputs):
            if name:
                one = made[at] if at < len(made) else Made(UNKNOWN)
                values[name] = self._name(node, mark, at, one, taken)

    def _sized(self, node: FlatNode, mark: Any, taken: Sequence[Typed | None]) -> Any:
        """What a node does, also for values that are equal but for broadcasting: along which axes, of which lengths."""
        if node.has("elementwise", "cast"):
            return mark
        return mark, tuple(one and self.lengths.canonical(one.type.shape or ()) for one in taken)

    def _attributes(self, node: FlatNode) -> Any:
        if node.call is not None:
            return (id(node.proto), id(node.call))
        return b"".join(sorted([one.SerializeToString() for one in node.proto.attribute]))

    def _choose(self, node: FlatNode, taken: Sequence[Typed | None]) -> None:
        """The result of a branch: what both bodies return, where it is the same."""
        first = taken[0]
        same = first is not None and all(one and one.type is first.type and one.key == first.key for one in taken)
        made = first if same and first is not None else Typed(UNKNOWN, self.keys.of("broken", node.index, 0), node)
        self.values[node.outputs[0]] = made

    def _ask(self, node: FlatNode, taken: Sequence[Typed | None]) -> tuple[list[Made], list[tuple[int, int]]]:
        call = Reading(node, [one.type if one else None for one in taken], self.lengths)
        rule = RULES.get(node.op)
        made: Any = Made(UNKNOWN)
        if rule is not None and node.domain in ("", CONTRIB):
            with suppress(*UNFIT):  # a node that no runtime would take
                made = rule(call)
        listed = made if isinstance(made, list) else [made]
        return [Made(self._one_of(settled(one.type)), one.how) for one in listed], call.limits

    def _name(self, node: FlatNode, mark: Any, at: int, one: Made, taken: Sequence[Typed | None]) -> Typed:
        """The key of a result, and the node that broke its type."""
        kind = one.type
        if kind.linear is not None or kind.items is not None:
            return Typed(kind, self._number_of(kind))
        if kind.uniform or kind.scale:
            keys = [t.key if t else -1 for t in taken]
            return Typed(kind, self._key_of(one.how, mark, at, keys))
        broken = next((t.broken for t in taken if t is not None and t.broken is not None), node)
        return Typed(kind, self.keys.of("broken", node.index, at), broken)

    def _number_of(self, kind: Type) -> int:
        """The key of numbers: what they are, by absolute position where that is the same in every call."""
        found = self.numbers.get(id(kind))
        if found is None:
            absolute = self.lengths.absolute(kind)
            what = ("items", kind.items, kind.linear) if absolute is None else ("linear", absolute)
            found = self.numbers[id(kind)] = self.keys.of(kind.kind, *what)
        return found

    def _key_of(self, how: int | tuple[Any, ...] | None, mark: Any, at: int, inputs: list[int]) -> int:
        """The key of what a rule says was done."""
        keys = self.keys
        if how is None:
            return keys.of("node", mark, at, *inputs)
        if isinstance(how, int):
            return inputs[how]
        if how[0] == "steps":
            return reduce(keys.follow, how[1:], inputs[0])
        if how[0] == "concat":
            return keys.of(*how, tuple(inputs))
        if how[0] == "join":
            self._expect(inputs[0], inputs[1])
            return inputs[1]
        if how[0] == "compare":
            return keys.of(*how)
        if how[0] == "product":
            return keys.of(*how[:-1], *(keys.permuted(key, order) for key, order in zip(inputs, how[-1], strict=True)))
        if how[0] == "attended":
            made = keys.of("attended", mark, how[2], *(one for at, one in enumerate(inputs) if at not in how[3]))
            self._expect(inputs[how[1]], made)
            return made
        if how[0] == "rotated":
            return keys.of("rotated", mark, *(inputs[at] for at in how[1:]))
        return keys.of(*how, mark if how[0] == "output" else "", *inputs[: 1 if how[0] != "output" else None])

    def _expect(self, past: int, key: int) -> None:
        """Note which function the entries of a slot must be."""
        found = self.keys.origin(past)
        if found is not None:
            self.streams.setdefault(found[0], set()).add((found[1], key))
