"""New nodes and constants: sizes that the graph computes at run time, in place of numbers and traced constants.

New nodes are placed in front of the graph, because they depend only on its inputs; branches read them from there. A
constant with an axis that stands for a length is replaced only if its values show the rule: one row for all, a causal
mask, positions that count up, or indexes that pick every entry in its place. Other constants were computed for the
traced lengths, and what they were computed from is not in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.model.edit import GraphWriter
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import NodeProto, TensorProto
from kvdoctor.model.traverse import opset_version
from kvdoctor.records import record
from kvdoctor.repair.shapes.terms import Lengths

if TYPE_CHECKING:
    from kvdoctor.decode.calls import Array


@dataclass(eq=False)
class Writer(GraphWriter):
    """New nodes in front of those of a model; `given` are values int64[1] that hold a length, by its symbol."""

    lengths: Lengths
    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nodes = []

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return opset_version(self.model.opset_import)

    def size(self, term: Term) -> str:
        """A size, int64[1]."""
        number = term.number
        if number is not None:
            return self.numbers([number])
        pieces = [self._product(monomial, count) for monomial, count in term.parts]
        found = pieces[0]
        for at, piece in enumerate(pieces[1:], 2):
            found = self.node(f"sum.{_key(Term(term.parts[:at]))}", "Add", [found, piece])
        return found

    def _product(self, monomial: tuple[str, ...], count: int) -> str:
        if not monomial:
            return self.numbers([count])
        found = self._length(monomial[0])
        for at, name in enumerate(monomial[1:], 2):
            found = self.node(f"product.{'.'.join(monomial[:at])}", "Mul", [found, self._length(name)])
        if count == 1:
            return found
        return self.node(f"product.{count}.{'.'.join(monomial)}", "Mul", [found, self.numbers([count])])

    def _length(self, symbol: str) -> str:
        if symbol in self.given:
            return self.given[symbol]
        name, axis = self.lengths.where[symbol]
        shape = self.node(f"shape.{name}", "Shape", [name])
        return self.node(f"length.{symbol}", "Gather", [shape, self.numbers([axis])], axis=0)

    def vector(self, entries: "Sequence[int | Term]") -> str:
        """A list of sizes, int64[len(entries)]."""
        if all(isinstance(entry, int) for entry in entries):
            return self.numbers([entry for entry in entries if isinstance(entry, int)])
        parts, run, words = list[str](), list[int](), list[str]()
        for entry in [*entries, None]:
            if isinstance(entry, int):
                run.append(entry)
                continue
            if run:
                parts.append(self.numbers(run))
                words += map(str, run)
                run = []
            if entry is not None:
                parts.append(self.size(entry))
                words.append(_key(entry))
        if len(parts) == 1:
            return parts[0]
        return self.node(f"shape[{','.join(words)}]", "Concat", parts, axis=0)

    def shaped(self, entries: "Sequence[int | Term]", dims: Sequence[int], element: int) -> str:
        """Sizes in a tensor of any rank and integer type."""
        if element == TensorProto.INT64 and all(isinstance(entry, int) for entry in entries):
            return self.numbers([entry for entry in entries if isinstance(entry, int)], dims)
        found = self.vector(entries)
        if len(dims) != 1:
            key = f"{found.removeprefix(self.prefix + '.')}.as{list(dims)}".replace(" ", "")
            found = self.node(key, "Reshape", [found, self.numbers(dims)])
        if element != TensorProto.INT64:
            kind = "int32" if element == TensorProto.INT32 else f"type{element}"
            found = self.node(f"{found.removeprefix(self.prefix + '.')}.{kind}", "Cast", [found], to=element)
        return found

    def count_up(self, start: Term, length: Term, column: bool = False) -> str:
        """start, start + 1, ... int64[length], or int64[length, 1]."""
        key = f"range.{_key(start)}.{_key(length)}"
        ends = [self._scalar(start), self._scalar(start + length), self.numbers([1], [])]
        found = self.node(key, "Range", ends)
        return self.node(f"{key}.column", "Reshape", [found, self.numbers([-1, 1])]) if column else found

    def _scalar(self, term: Term) -> str:
        if term.number is not None:
            return self.numbers([term.number], [])
        return self.node(f"scalar.{_key(term)}", "Reshape", [self.size(term), self.numbers([], [0])])

    def done(self) -> None:
        """Insert the new nodes in front of the graph."""
        for node in reversed(self.nodes):
            self.model.graph.node.insert(0, node)
        self.nodes.clear()


def _key(term: Term) -> str:
    return str(term).replace(" ", "")


BROADCASTING = operators_with("broadcast", "cast", "copy", "logic") | {"Expand", "Unsqueeze"}
"""Readers that broadcast an axis of 1 to any length."""

Rewritten = tuple[str, str]
"""The replacement of a constant: the value to read, and a description."""


@record(slots=False)
class Table:
    """A constant as one node reads it: its values, and the terms that some axes stand for."""

    values: "Array"
    axes: Mapping[int, Term]
    node: NodeProto
    size: "Any"

    def rewritten(self, writer: Writer) -> Rewritten | None:
        """A replacement that is right at every length; None if the values do not show the rule."""
        from onnx import numpy_helper

        if self.node.op_type == "GatherND":
            return self._in_place(writer)
        values, left = self.values, dict(self.axes)
        for axis in self.axes:
            if (values == values.take([0], axis)).all():
                values = values.take([0], axis)
                del left[axis]
        if not left:
            name = writer.tensor("row", numpy_helper.from_array(values))
            if self.node.op_type not in BROADCASTING:
                dims = [self.axes.get(axis, int(size)) for axis, size in enumerate(values.shape)]
                name = writer.node(f"{name}.expanded", "Expand", [name, writer.vector(dims)])
            return name, f"{list(values.shape)}, one for all"
        are_last = len(left) == 2 and set(left) == {values.ndim - 2, values.ndim - 1}
        if are_last and values.size == values.shape[-2] * values.shape[-1]:
            return self._causal(writer, values, left)
        if len(left) == 1 and values.dtype.kind in "iu":
            return self._counted(writer, values, *next(iter(left.items())))
        return None

    def _causal(self, writer: Writer, values: "Array", left: dict[int, Term]) -> Rewritten | None:
        """A causal mask: rows are new tokens, columns all cached tokens; a row sees no later position."""
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
            two = {"shown": shown, "hidden": hidden}
            made = [writer.tensor(word, numpy_helper.from_array(np.asarray(v))) for word, v in two.items()]
            found = writer.node(key, "Where", [found, *made])
        elif not shown:
            found = writer.node(key, "Not", [found])
        if values.ndim > 2:
            target = writer.vector([*[1] * (values.ndim - 2), rows, columns])
            found = writer.node(f"{key}.of{values.ndim}", "Reshape", [found, target])
        return found, f"the causal mask of {rows} rows and {columns} columns"

    def _counted(self, writer: Writer, values: "Array", axis: int, length: Term) -> Rewritten | None:
        """Positions that count up from 0 or from the length of the past."""
        import numpy as np

        numbers = values.reshape(-1)
        starts = {self.size(symbol("past")): symbol("past")} if "past" in writer.lengths.traced else {}
        start = {**starts, 0: whole(0)}.get(int(numbers[0]))
        if start is None or len(numbers) < 2 or not np.array_equal(numbers, numbers[0] + np.arange(len(numbers))):
            return None
        if values.dtype != np.int64:
            return None
        found = writer.count_up(start, length)
        if values.ndim > 1:
            target = [length if at == axis else 1 for at in range(values.ndim)]
            key = f"range.{start}.{length}.of{values.ndim}.{axis}"
            found = writer.node(key, "Reshape", [found, writer.vector(target)])
        return found, f"{start} to {start + length}, counted"

    def _in_place(self, writer: Writer) -> Rewritten | None:
        """Indexes of a GatherND that pick each entry in its own place: a Reshape of the data."""
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
        return target, "a Reshape, because every index picks its own entry"
