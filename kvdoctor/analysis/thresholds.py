"""Length thresholds: the numbers of a graph at which what it computes may change with the length of the sequence.

A length is the size of an axis, a position, or a sum over a mask. A threshold is a number that a length is compared
with, clipped to, taken modulo of or sliced at, or by which it differs from another length that it is compared with, or
the extent of a constant table that it looks up or cuts; the number is a constant, or computed of constants. The lengths
just before, at and behind each threshold are worth a decode step (`decode/experiments/each_length.py`). A number that
is no threshold of a length may be among them: it costs a few steps, and decides nothing.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from math import prod

from kvdoctor.analysis.fixed_numbers import FixedNumbers
from kvdoctor.contract import Graph
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.view import integers
from kvdoctor.records import record

COUNTS = ("position_ids", "cache_position", "write_index", "past_length", "total_length", "last_index", "new_length")
"""Roles of inputs that hold positions or lengths."""
MASKS = ("attention_mask", "additive_mask")

KEEPS_COUNTS = {
    *(
        "Identity",
        "Cast",
        "Squeeze",
        "Unsqueeze",
        "Reshape",
        "Expand",
        "Transpose",
        "Concat",
        "Gather",
        "GatherElements",
    ),
    *("Slice", "Add", "Sub", "Mul", "Neg", "Abs", "Max", "Min", "Clip", "Div", "Mod", "Where", "Range", "CumSum"),
    *("ReduceSum", "ReduceMax", "ReduceMin", "Tile", "Flatten", "Log", "Floor", "Ceil", "Split", "Shape", "Size"),
}
"""Operators whose result is a length or position where one of their inputs is."""
VIEWS = {"Reshape", "Expand", "Unsqueeze", "Squeeze", "Tile", "Slice", "Split"}
"""Of these only the first input is data; the others say how it is viewed, often by a length."""
COMPARES = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Clip", "Mod"}
LOOKS_UP = {"Gather": 1, "GatherND": 1, "GatherElements": 1}
"""Operators that look up their first input, with the index of the input that says where."""

LEAST, MOST = 2, 1 << 17
"""Bounds of a number that is taken for a length in tokens; larger ones mean "to the end" in most graphs."""
NEAR = 32
"""Values that are looked at for where a place comes from."""
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


def writes_around(flow: Flow, size: int) -> bool:
    """Whether everything that a graph writes into a tensor goes to a place that is counted modulo `size`."""
    writes = [node for node in flow.nodes if node.op in ("ScatterND", "ScatterElements", "TensorScatter")]
    places = [node.inputs[2 if node.op == "TensorScatter" else 1 :][:1] for node in writes]
    return bool(writes) and all(place and _is_modulo(flow, place[0], size) for place in places)


def _is_modulo(flow: Flow, value: str, size: int) -> bool:
    """Whether a place is computed, within a few nodes, by a Mod with this number."""
    waiting, seen = deque([value]), {value}
    while waiting and len(seen) < NEAR:
        node = flow.producers.get(waiting.popleft())
        if node is None:
            continue
        if node.op == "Mod" and list(_numbers(flow.constant(node.input(1)))) == [size]:
            return True
        for name in node.inputs:
            if name and name not in seen:
                seen.add(name)
                waiting.append(name)
    return False


class _Counts:
    """Which values of a flat graph are lengths or positions, and which tensors have an axis of them."""

    def __init__(self, flow: Flow, graph: Graph) -> None:
        self.flow = flow
        self.fixed = FixedNumbers(flow)
        self.counts = {port.name for port in graph.inputs if port.role in COUNTS}
        self.masks = {port.name for port in graph.inputs if port.role in MASKS}
        self.axes = {
            port.name: {at for at, axis in enumerate(port.axes) if axis in ("past", "total", "capacity", "new")}
            for port in graph.inputs
        }

    def follow(self, node: FlatNode) -> None:
        """Mark the outputs of a node that are lengths or positions, and the axes that its outputs have of them."""
        counted = node.op in ("CumSum", "ReduceSum") and node.input(0) in self.masks
        if node.op in ("Shape", "Size") or counted or (node.op in KEEPS_COUNTS and self._is_count(node)):
            self.counts.update(node.outputs)
        if node.op in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Slice", "Reshape") and node.input(0) in self.masks:
            self.masks.update(node.outputs)
        if axes := self._axes_after(node):
            self.axes[node.output()] = axes

    def _is_count(self, node: FlatNode) -> bool:
        data = node.inputs[:1] if node.op in LOOKS_UP or node.op in VIEWS else node.inputs
        return any(name in self.counts for name in data)

    def _axes_after(self, node: FlatNode) -> set[int]:
        """The axes of the first output that are a length: through views, and through what keeps the shape."""
        axes = next((self.axes[name] for name in node.inputs if self.axes.get(name)), set())
        if not axes:
            return set()
        if node.op == "Transpose":
            order = node.numbers("perm")
            return {order.index(at) for at in axes if at in order} if order else set()
        return axes if node.op in ("Identity", "Cast", "Concat", "Slice", "Add", "Mul", "ScatterElements") else set()

    def thresholds_of(self, node: FlatNode) -> Iterator[int]:
        """The constants that a length meets at a node."""
        if node.op in COMPARES and self._is_count(node):
            for name in node.inputs:  # of several numbers, as in a row of positions, the last is where it ends
                yield from (max(numbers) for numbers in [self._numbers(name)] if numbers)
            if not any(self.flow.constant(name) for name in node.inputs):
                yield from (number for name in node.inputs for number in self._shifts(name))
        elif node.op == "Slice":
            yield from self._slice_bounds(node)

    def _shifts(self, length: str) -> Iterator[int]:
        """The constant by which a length was shifted: `key > query - W` compares a distance with W."""
        node = self.flow.producers.get(length)
        if node is not None and node.op in ("Add", "Sub") and self._is_count(node):
            yield from (abs(number) for name in node.inputs for number in self._numbers(name))

    def _numbers(self, name: str) -> Sequence[int]:
        """The whole numbers of a constant, or of what is computed of constants alone."""
        return _numbers(self.flow.constant(name)) or self.fixed.of(name)

    def _slice_bounds(self, node: FlatNode) -> Iterator[int]:
        """The constant begin and end of a Slice along an axis that is a length."""
        axes = self.axes.get(node.input(0), set())
        cut = _numbers(self.flow.constant(node.input(3))) if node.input(3) else range(8)
        for name in (node.input(1), node.input(2)) if axes else ():
            numbers = self._numbers(name) if name else ()
            yield from (abs(number) for number, at in zip(numbers, cut, strict=False) if at in axes)

    def extents_of(self, node: FlatNode) -> Iterator[int]:
        """The sizes of the axes of a constant table along which a length looks it up or cuts it."""
        table = self.flow.constants.get(node.input(0)) if node.inputs else None
        if table is None:
            return
        if node.op in LOOKS_UP and node.input(LOOKS_UP[node.op]) in self.counts:
            axis = node.number("axis", 0) if node.op != "GatherND" else 0
            if -len(table.dims) <= axis < len(table.dims):
                yield int(table.dims[axis])
        elif node.op == "Slice" and any(name in self.counts for name in node.inputs[1:3]):
            axes = _numbers(self.flow.constant(node.input(3))) if node.input(3) else range(len(table.dims))
            yield from (int(table.dims[axis]) for axis in axes if -len(table.dims) <= axis < len(table.dims))


def _numbers(tensor: TensorProto | None) -> Sequence[int]:
    """The whole numbers of a short tensor of integers or of one float; none of any other."""
    if tensor is None:
        return ()
    if tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) == 1:
        value = struct.unpack("<f", tensor.raw_data[:4])[0] if len(tensor.raw_data) >= 4 else sum(tensor.float_data)
        return (int(value),) if abs(value) <= MOST and value == int(value) else ()  # not for a NaN
    return integers(tensor) or ()
