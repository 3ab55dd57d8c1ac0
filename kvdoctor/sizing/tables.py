"""Constants whose axis stands for a length: what their values must be at every length, where the values tell it.

Told by the values: one row for all; a causal mask; positions that count up; indexes that pick every entry in its place.
Anything else was computed for the lengths of the trace, and what it was computed from is not in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdoctor.onnx_schema import NodeProto
from kvdoctor.sizing.terms import Term, symbol, whole
from kvdoctor.sizing.writing import Writer

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BROADCASTING = {
    *("Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater", "Expand"),
    *("GreaterOrEqual", "Min", "Max", "Pow", "Unsqueeze", "Cast", "Not", "Identity"),
}
"""Readers for which an axis of 1 is as good as one of any length."""


@dataclass(frozen=True)
class Rewritten:
    """What takes the place of a constant: the value to read, and what it is in words."""

    value: str
    words: str


@dataclass(frozen=True)
class Table:
    """A constant as one node reads it: its values, and the terms that some of its axes stand for."""

    values: "Array"
    axes: Mapping[int, Term]
    node: NodeProto
    size: "Any"

    def rewritten(self, writer: Writer) -> Rewritten | None:
        """What holds at every length, or None where the values do not tell."""
        if self.node.op_type == "GatherND":
            return self._in_place(writer)
        values, left = self.values, dict(self.axes)
        for axis in self.axes:
            if (values == values.take([0], axis)).all():
                values = values.take([0], axis)
                del left[axis]
        if not left:
            return self._one_for_all(writer, values)
        if len(left) == 2 and set(left) == {values.ndim - 2, values.ndim - 1} and values.size == _last_two(values):
            return self._causal(writer, values, left)
        if len(left) == 1 and values.dtype.kind in "iu":
            return self._counted(writer, values, *next(iter(left.items())))
        return None

    def _one_for_all(self, writer: Writer, values: "Array") -> Rewritten:
        from onnx import numpy_helper

        name = writer.tensor("row", numpy_helper.from_array(values))
        if self.node.op_type not in BROADCASTING:
            name = writer.node(f"{name}.expanded", "Expand", [name, writer.vector(self._dims(values))])
        return Rewritten(name, f"{list(values.shape)}, one for all")

    def _dims(self, values: "Array") -> "Sequence[int | Term]":
        return [self.axes.get(axis, int(size)) for axis, size in enumerate(values.shape)]

    def _causal(self, writer: Writer, values: "Array", left: dict[int, Term]) -> Rewritten | None:
        """Rows are new tokens, columns all that is cached: a row sees what is not behind its own place."""
        import numpy as np
        from onnx import numpy_helper

        square = values.reshape(values.shape[-2:])
        rows, columns = left[values.ndim - 2], left[values.ndim - 1]
        offset = columns - rows
        if rows != symbol("new") or offset not in (symbol("past"), whole(0)) or writer.opset < 12:
            return None
        places = np.arange(square.shape[1]) - np.arange(square.shape[0])[:, None]
        seen = places <= self.size(offset)
        if seen.all() or len(np.unique(square[seen])) != 1 or len(np.unique(square[~seen])) != 1:
            return None
        shown, hidden = square[seen][:1].reshape(()), square[~seen][:1].reshape(())
        places_of_rows = writer.count_up(offset, rows, column=True)
        found = writer.node("causal", "LessOrEqual", [writer.count_up(whole(0), columns), places_of_rows])
        key = f"causal.{shown}.{hidden}"
        if values.dtype != np.bool_:
            two = [
                writer.tensor(word, numpy_helper.from_array(np.asarray(v)))
                for word, v in (("shown", shown), ("hidden", hidden))
            ]
            found = writer.node(key, "Where", [found, *two])
        elif not shown:
            found = writer.node(key, "Not", [found])
        if values.ndim > 2:
            target = writer.vector([*[1] * (values.ndim - 2), rows, columns])
            found = writer.node(f"{key}.of{values.ndim}", "Reshape", [found, target])
        return Rewritten(found, f"the causal mask of {rows} rows and {columns} columns")

    def _counted(self, writer: Writer, values: "Array", axis: int, length: Term) -> Rewritten | None:
        """Positions: one number for each place, from 0 or from the length of the past on."""
        import numpy as np

        numbers = values.reshape(-1)
        starts = {0: whole(0), self.size(symbol("past")): symbol("past")} if "past" in writer.lengths.traced else {}
        start = {**starts, 0: whole(0)}.get(int(numbers[0]))
        if start is None or len(numbers) < 2 or not np.array_equal(numbers, numbers[0] + np.arange(len(numbers))):
            return None
        if values.dtype != np.int64:
            return None
        found = writer.count_up(start, length)
        if values.ndim > 1:
            target = [length if at == axis else 1 for at in range(values.ndim)]
            found = writer.node(
                f"range.{start}.{length}.of{values.ndim}.{axis}", "Reshape", [found, writer.vector(target)]
            )
        return Rewritten(found, f"{start} to {start + length}, counted")

    def _in_place(self, writer: Writer) -> Rewritten | None:
        """Indexes of a GatherND that pick each entry in its own place: the data itself, with axes of 1 put in."""
        import numpy as np

        deep, grid = self.values.shape[-1], self.values.shape[:-1]
        wide = [axis for axis, size in enumerate(grid) if size != 1 or axis in self.axes]
        narrow = [axis for axis in range(len(grid)) if axis not in wide]
        wide = sorted([*narrow[: max(deep - len(wide), 0)], *wide])
        if len(wide) != deep:
            return None
        places = np.stack(np.meshgrid(*[np.arange(n) for n in grid], indexing="ij"), -1)[..., wide]
        if not np.array_equal(places, self.values):
            return None
        target = writer.vector([self.axes.get(axis, int(size)) for axis, size in enumerate(grid)])
        self.node.op_type = "Reshape"
        del self.node.attribute[:]
        return Rewritten(target, "every entry in its own place: a Reshape")


def _last_two(values: "Array") -> int:
    return int(values.shape[-2] * values.shape[-1])
