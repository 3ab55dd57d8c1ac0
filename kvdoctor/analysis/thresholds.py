"""Length thresholds: the numbers of a graph at which what it computes may change with the length of the sequence.

A length is the size of an axis, a position, or a sum over a mask. A threshold is a number that a length is compared
with, clipped to, taken modulo of or sliced at, or by which it differs from another length that it is compared with, the
extent of a constant table that it looks up or cuts, or where an element type that it is cast to ends or begins to
round; the number is a constant, or computed of constants. The lengths
just before, at and after each threshold are worth a decode step (`decode/experiments/each_length.py`). A number that
is no threshold of a length may be among them: it costs a few steps, and decides nothing.

An exporter writes the end of a table as `Shape(table)[0] - 1` where another writes 99. The rules of an abstract run
compute it (abstract_run/graph_run.py); no weights are read for it.

Two faults are found by lengths. A count of padding may see the columns of the new tokens alone: positions are made
inside, as the number of a token less the padding before it. Where the mask is cut to the new tokens first, and counted
along afterwards, the prefill is right, and each later step is as many positions too far. And keys may be made of
constants that the number of tokens selects.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

from kvdoctor.contract import CacheContract, Graph, Slot
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import has, operator_of, operators_with, ports_of
from kvdoctor.model.proto import NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute, input_of, output_of, readers
from kvdoctor.model.view import GraphView, Scope, integers
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.analysis.abstract_run.values import Abstract


MOST_NODES = 2_000
"""Nodes that are computed for one graph, at most: the numbers after them are unknown."""
MOST_DEEP = 32
"""Consecutive nodes between a number and the constants that it is computed of, at most."""
MOST_LISTED = 64
"""Elements of a value that is read as numbers; a larger one is data."""


class FixedNumbers:
    """The numbers of the values of one flow that no input has a part in; each is computed once."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[str, Abstract | None] = {}

    def of(self, name: str) -> Sequence[int]:
        """The one number of a value, a float rounded down; none where it is not known, or has several.

        Rows of positions are computed as well: where one ends is the capacity of a buffer.
        """
        if name in self.flow.constants or name not in self.flow.fixed:
            return ()
        value = self._compute(name, MOST_DEEP)
        found = value.numbers if value is not None else None
        if found is None or found.size != 1:
            return ()
        return tuple(math.floor(number) for number in found.ravel().tolist() if math.isfinite(number))

    def _compute(self, name: str, left: int) -> "Abstract | None":
        """A value; None where it is not known. `left` is the number of nodes that may still come before it."""
        # Loaded here, with numpy: most graphs compare lengths with constants, or with other lengths.
        import numpy as np

        from kvdoctor.analysis.abstract_run.graph_run import RULES
        from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun, Reading, read_tensor

        if name in self._known:
            return self._known[name]
        self._known[name] = None  # of a value that depends on itself
        tensor, node = self.flow.constants.get(name), self.flow.producers.get(name)
        if tensor is not None:
            small = prod(tensor.dims) <= MOST_LISTED
            self._known[name] = read_tensor(tensor, "") if small else Abstract(tuple(tensor.dims))
        elif node is not None and name in self.flow.fixed and left and len(self._known) < MOST_NODES:
            given = [(self._compute(one, left - 1) or UNKNOWN) if one else None for one in node.inputs]
            rule = RULES.get(node.op)
            with suppress(CannotRun), np.errstate(all="ignore"):
                made = Reading(node.proto, given, np.random.default_rng(0)).compute(rule) if rule is not None else []
                self._known[name] = dict(zip(node.outputs, made, strict=False)).get(name)
        return self._known[name]


COUNTS = ("position_ids", "cache_position", "write_index", "past_length", "total_length", "last_index", "new_length")
"""Roles of inputs that hold positions or lengths."""
MASKS = ("attention_mask", "additive_mask")

COMPUTES = operators_with("arithmetic", "exponential", "select", "range", "accumulate", "reduce", "measure")
KEEPS_COUNTS = COMPUTES | operators_with("copy", "cast", "view", "permute", "repeat", "pick", "join")
"""Operators whose result is a length or position where one of their inputs is."""
COMPARES = operators_with("compare", "clamp", "modulo")

NARROW: dict[int, tuple[int, ...]] = {
    TensorProto.UINT8: (256,),
    TensorProto.INT8: (128, 256),
    TensorProto.INT16: (1 << 15, 1 << 16),
    TensorProto.UINT16: (1 << 16,),
}
"""Where the numbers of a type end, and where they are those from 0 again."""
ROUNDS: dict[int, tuple[int, ...]] = {TensorProto.FLOAT16: (1 << 11,), TensorProto.BFLOAT16: (1 << 8,)}
"""The whole number above which a type has no longer all of them: two positions become one."""

LEAST, MOST = 2, 1 << 17
"""Bounds of a number that is taken for a length in tokens; larger ones mean "to the end" in most graphs."""
NEAR = 32
"""Nodes that are looked at for where a place comes from, or between a length and the selection by it."""
MOST_FOUND = 64
"""Thresholds of a graph up to which they are listed, the smallest first."""


@record
class Threshold:
    """A number at which a length changes what a graph computes: its value in tokens, and the node that holds it."""

    length: int
    node: str


def find_thresholds(flow: Flow, graph: Graph) -> tuple[Threshold, ...]:
    """Return the thresholds of a graph by length, one for each length."""
    found: dict[int, str] = {}
    counts = _Counts(flow, graph)
    for node in flow.nodes:
        for number in (*counts.thresholds_of(node), *counts.extents_of(node)):
            if LEAST <= number <= MOST:
                found.setdefault(number, f'{node.op} "{node.proto.name}"' if node.proto.name else node.op)
        counts.follow(node)
    return tuple(Threshold(length, found[length]) for length in sorted(found)[:MOST_FOUND])


def find_ring(flow: Flow, contract: CacheContract) -> int | None:
    """Give `CacheContract.ring`: how many tokens fill the smallest buffers, where the graph writes over the oldest."""
    buffers = [slot for slot in contract.slots if slot.growth in ("static", "delta", "ring")]
    buffers = [slot for slot in buffers if slot.size("capacity") == contract.capacity and "capacity" in slot.axes]
    size = contract.capacity or 0
    others = any(ports_of(node.domain, node.op) is not None and not node.has("write") for node in flow.nodes)
    if not buffers or others or (size and size != contract.usable_length):
        return None
    pasts = {slot.past for slot in buffers}
    rings = {slot.layer for slot in buffers if _goes_round(flow, slot, size, pasts)}
    return size if rings == {slot.layer for slot in buffers} else None


def _goes_round(flow: Flow, slot: Slot, size: int, buffers: set[str]) -> bool:
    """Whether the oldest entries leave a slot, or the place of an entry is a position that begins again from a length.

    At which length it begins again is not asked: entries of a ring with a wrong one are lost when it is full. Where no
    operator writes, a modulo by the size of the buffers, or one less, is before the present.
    """
    name = slot.present or ""
    before = [*islice(flow.before(flow.results.get(name, name)), MOST_BEFORE)]
    write = next((n for n in before[:NEAR] if n.has("write") or (n.has("select") and slot.past in n.inputs)), None)
    if write is None and slot.growth != "static":
        return slot.growth == "ring"
    if write is not None:
        if (mode := write.attribute("mode")) is not None and mode.s == b"circular":
            return True
        places = operator_of(write.op).places if write.has("write") else (0,)
        near = [node for at in places for node in islice(flow.before(write.input(at)), NEAR)]
        return any(_begins_again(flow, node) for node in near if node.output() not in flow.fixed)
    divisors, numbers = [node.input(1) for node in before if node.has("modulo")], FixedNumbers(flow)
    found = [one for name in divisors for one in whole_numbers(flow.constant(name)) or numbers.of(name)]
    measured = (node for name in divisors for node in islice(flow.before(name), NEAR) if node.has("measure"))
    return bool({size, size - 1}.intersection(found)) or any(node.input(0) in buffers for node in measured)


def _begins_again(flow: Flow, node: FlatNode) -> bool:
    """Whether a node is a modulo, or selects between a number and the same one less a constant."""
    chosen = node.inputs[1:3] if node.has("select") else ()
    less = [flow.producers.get(name) for name in chosen]
    return node.has("modulo") or any(
        n is not None and n.has("subtract") and n.input(0) in chosen and n.input(1) in flow.fixed for n in less
    )


class _Counts:
    """Which values of a flat graph are lengths or positions, and which tensors have an axis of them."""

    def __init__(self, flow: Flow, graph: Graph) -> None:
        self.flow = flow
        self.fixed = FixedNumbers(flow)
        self.counts = {port.name for port in graph.inputs if port.role in COUNTS}
        self.positions = {port.name for port in graph.inputs if port.role in ("position_ids", "cache_position")}
        self.masks = {port.name for port in graph.inputs if port.role in MASKS}
        self.axes = {
            port.name: {at for at, axis in enumerate(port.axes) if axis in ("past", "total", "capacity", "new")}
            for port in graph.inputs
        }

    def follow(self, node: FlatNode) -> None:
        """Mark the outputs of a node that are lengths or positions, and the axes that its outputs have of them."""
        counted = node.has("sum") and node.input(0) in self.masks
        if node.has("measure") or counted or (node.op in KEEPS_COUNTS and self._is_count(node)):
            self.counts.update(node.outputs)
        numbers = node.has("range", "accumulate") and not self.counts.isdisjoint(node.outputs)
        if numbers or (node.op in KEEPS_COUNTS and not self.positions.isdisjoint(node.inputs)):
            self.positions.update(node.outputs)
        if node.has("copy", "cast", "view", "pick") and node.input(0) in self.masks:
            self.masks.update(node.outputs)
        if axes := self._axes_after(node):
            self.axes[node.output()] = axes

    def _is_count(self, node: FlatNode) -> bool:
        takes = operator_of(node.op).takes_content
        return any(name in self.counts for at, name in enumerate(node.inputs) if takes(at))

    def _axes_after(self, node: FlatNode) -> set[int]:
        """The axes of the first output that are a length: through views, and through what keeps the shape."""
        axes = next((self.axes[name] for name in node.inputs if self.axes.get(name)), set())
        if not axes:
            return set()
        if node.has("permute"):
            order = node.numbers("perm")
            return {order.index(at) for at in axes if at in order} if order else set()
        keeps = node.has("copy", "cast", "join", "arithmetic", "write") or node.op == "Slice"
        return axes if keeps else set()

    def thresholds_of(self, node: FlatNode) -> Iterator[int]:
        """The constants that a length meets at a node."""
        if node.op in COMPARES and self._is_count(node):
            for name in node.inputs:  # of several numbers, as in a row of positions, the last is where it ends
                yield from (max(numbers) for numbers in [self._numbers(name)] if numbers)
            if not any(self.flow.constant(name) for name in node.inputs):
                yield from (number for name in node.inputs for number in self._shifts(name))
        elif node.op == "Slice":
            yield from self._slice_bounds(node)
        elif node.op == "Cast" and node.input(0) in self.counts | self.positions:
            ends = NARROW | (ROUNDS if node.input(0) in self.positions else {})
            yield from ends.get(node.number("to", 0), ())

    def _shifts(self, length: str) -> Iterator[int]:
        """The constant by which a length was shifted: `key > query - W` compares a distance with W."""
        node = self.flow.producers.get(length)
        if node is not None and node.has("add", "subtract") and self._is_count(node):
            yield from (abs(number) for name in node.inputs for number in self._numbers(name))

    def _numbers(self, name: str) -> Sequence[int]:
        """The whole numbers of a constant, or of what is computed of constants alone."""
        return whole_numbers(self.flow.constant(name)) or self.fixed.of(name)

    def _slice_bounds(self, node: FlatNode) -> Iterator[int]:
        """The constant begin and end of a Slice along an axis that is a length."""
        axes = self.axes.get(node.input(0), set())
        cut = whole_numbers(self.flow.constant(node.input(3))) if node.input(3) else range(8)
        for name in (node.input(1), node.input(2)) if axes else ():
            numbers = self._numbers(name) if name else ()
            yield from (abs(number) for number, at in zip(numbers, cut, strict=False) if at in axes)

    def extents_of(self, node: FlatNode) -> Iterator[int]:
        """The sizes of the axes of a constant table along which a length looks it up or cuts it."""
        table = self.flow.constants.get(node.input(0)) if node.inputs else None
        if table is None:
            return
        if node.has("pick") and any(node.input(at) in self.counts for at in operator_of(node.op).places):
            axis = node.number("axis", 0)
            if -len(table.dims) <= axis < len(table.dims):
                yield int(table.dims[axis])
        elif node.op == "Slice" and any(name in self.counts for name in node.inputs[1:3]):
            axes = whole_numbers(self.flow.constant(node.input(3))) if node.input(3) else range(len(table.dims))
            yield from (int(table.dims[axis]) for axis in axes if -len(table.dims) <= axis < len(table.dims))


def whole_numbers(tensor: TensorProto | None) -> Sequence[int]:
    """The whole numbers of a short tensor of integers or of one float; none of any other."""
    if tensor is None:
        return ()
    if tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) == 1:
        value = struct.unpack("<f", tensor.raw_data[:4])[0] if len(tensor.raw_data) >= 4 else sum(tensor.float_data)
        return (int(value),) if abs(value) <= MOST and value == int(value) else ()  # not for a NaN
    return integers(tensor) or ()


MOST_BETWEEN = 8
"""Nodes between a mask and a count along it that are followed."""


@record(slots=False)
class SlicedCount:
    """A node that counts along a mask which was cut before; `between` stand after the cut, the last one first."""

    scope: Scope
    count: NodeProto
    cut: NodeProto
    between: tuple[NodeProto, ...]


def find_sliced_counts(view: GraphView, mask: str) -> Iterator[SlicedCount]:
    """The counts of padding along a mask [batch, total] that was cut along the same axis, and that are subtracted."""
    for scope in view.scopes():
        users = readers(scope.graph)
        for node in scope.graph.node:
            subtracted = any(has(user.op_type, "subtract") and at == 1 for user, at in users.get(output_of(node), ()))
            if has(node.op_type, "accumulate") and subtracted and not find_attribute(node, "exclusive"):
                found = _follow_back(scope, node, mask)
                yield from (found,) if found is not None else ()


def _follow_back(scope: Scope, count: NodeProto, mask: str) -> SlicedCount | None:
    """The cut between a mask and a count along it; None where there is none, or more than the mask comes in."""
    cut, between, name = None, list[NodeProto](), input_of(count, 0)
    for _ in range(MOST_BETWEEN):
        if name == mask:
            return SlicedCount(scope, count, cut, tuple(between)) if cut is not None else None
        node = scope.producers.get(name)
        if node is None:
            return None
        if node.op_type == "Slice" and cut is None:
            if _axis_of(scope, node, 3) is None or _axis_of(scope, node, 3) != _axis_of(scope, count, 1):
                return None
            cut, name = node, input_of(node, 0)
            continue
        values = [each for each in node.input if scope.constant(each) is None]
        if len(values) != 1 or not has(node.op_type, "copy", "cast", "elementwise"):
            return None
        between += [node] if cut is None else []
        name = values[0]
    return None


def _axis_of(scope: Scope, node: NodeProto, index: int) -> int | None:
    """The axis that an input says, of the two of a mask."""
    tensor = scope.constant(input_of(node, index)) if input_of(node, index) else None
    numbers = integers(tensor) if tensor is not None else None
    return numbers[0] % 2 if numbers is not None and len(numbers) == 1 else None


MOST_BEFORE = 2_000
"""Nodes before the first layer's keys that are looked at, at most."""
ONE_NUMBER = frozenset(COUNTS) - {"position_ids", "cache_position"}
"""Roles of inputs with a number for the whole call."""
KEEPS = operators_with("arithmetic", "copy", "cast", "view", "pick", "repeat", "logic", "clamp")


def find_selected_constants(flow: Flow, graph: Graph, key: str) -> Threshold | None:
    """The first selection of constants by the number of tokens before the output `key`, and its length.

    The output is the present of the first layer's keys. A model of two sets of rotary factors (LongRoPE) compares the
    total length with `original_max_position_embeddings` and rotates all keys by the short or by the long set: with a
    Where, or with an If that returns tables of cosines and sines. Keys in the cache that were rotated by the other set
    are not those that a call without a cache computes. A selection by the position of each token is none of these.
    """
    numbers = FixedNumbers(flow)
    for node in islice(flow.before(flow.results.get(key, key)), MOST_BEFORE):
        if node.has("select"):
            conditions, chosen = {node.input(0)}, node.inputs[1:3]
        elif node.has("copy") and len(node.inputs) > 1:  # the outputs of an If, whose conditions are apart
            conditions, chosen = flow.decides, node.inputs
        else:
            continue
        if not _are_tables(flow, chosen):
            continue
        lengths = {length for one in conditions for length in _compared(flow, graph, one, numbers)}
        if len(lengths) == 1:
            kind = node.op if node.has("select") else "an If"
            return Threshold(lengths.pop(), f'{kind} "{node.proto.name}"' if node.proto.name else kind)
    return None


def _are_tables(flow: Flow, names: tuple[str, ...]) -> bool:
    """Whether all values are constants, or computed of constants alone, and differ."""
    if len(names) < 2 or not all(name in flow.constants or name in flow.fixed for name in names):
        return False
    tensors = [flow.constants.get(name) for name in names]
    contents = {(tuple(one.dims), one.raw_data, *one.float_data) for one in tensors if one is not None}
    return len(contents) > 1 or None in tensors


def _compared(flow: Flow, graph: Graph, condition: str, numbers: FixedNumbers) -> Iterator[int]:
    """The numbers with which a length of the whole call is compared, for a condition."""
    for node in islice(flow.before(condition), NEAR):
        if node.has("compare"):
            for one, other in (node.inputs[:2], node.inputs[1::-1]):
                found = whole_numbers(flow.constant(one)) or numbers.of(one)
                if len(found) == 1 and _is_one_number(flow, graph, other):
                    yield found[0]


def _is_one_number(flow: Flow, graph: Graph, name: str) -> bool:
    """Whether a value is a length of the whole call, and not a position of each token."""
    numbers = {port.name for port in graph.inputs if port.role in ONE_NUMBER}
    waiting = [name]
    for value in islice(waiting, NEAR):
        node = flow.producers.get(value)
        if value in numbers or (node is not None and node.has("measure", "reduce")):
            return True
        if node is not None and node.op in KEEPS:
            waiting += [one for one in node.inputs if one and one not in waiting]
    return False
