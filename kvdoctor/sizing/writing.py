"""Puts sizes that are computed where the graph runs in the place of numbers.

All of it stands in front of the graph, since it rests on the inputs alone; branches read it from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.sizing.lengths import Lengths
from kvdoctor.sizing.terms import Term

PREFIX = "kvdoctor"


@dataclass(eq=False)
class Writer:
    """New nodes for a model; `done` puts them in. Everything that is made once is made once only."""

    model: ModelProto
    lengths: Lengths
    nodes: list[NodeProto] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.used = set(_names(self.model.graph))

    @property
    def opset(self) -> int:
        """The version of the standard operators."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 1)

    def node(self, key: str, op: str, inputs: Sequence[str], **attributes: int) -> str:
        """The value that a node makes; the same one for the same key."""
        if key not in self.made:
            name = self.fresh(key)
            node = NodeProto(op_type=op, name=name, input=inputs, output=[name])
            for attribute, number in attributes.items():
                node.attribute.add(name=attribute, i=number, type=2)
            self.nodes.append(node)
            self.made[key] = name
        return self.made[key]

    def fresh(self, hint: str) -> str:
        """A name that nothing has yet."""
        name, number = f"{PREFIX}.{hint}", 1
        while name in self.used:
            number += 1
            name = f"{PREFIX}.{hint}.{number}"
        self.used.add(name)
        return name

    def numbers(self, values: Sequence[int], dims: Sequence[int] | None = None) -> str:
        """A constant of integers, int64."""
        dims = [len(values)] if dims is None else list(dims)
        key = f"numbers{list(dims)}{list(values)}".replace(" ", "")
        return self._constant(key, TensorProto(data_type=TensorProto.INT64, dims=dims, int64_data=values))

    def tensor(self, hint: str, tensor: TensorProto) -> str:
        """An initializer; its name is made here."""
        tensor.name = self.fresh(hint)
        self.model.graph.initializer.append(tensor)
        return str(tensor.name)

    def _constant(self, key: str, tensor: TensorProto) -> str:
        if key not in self.made:
            tensor.name = self.fresh(key)
            self.model.graph.initializer.append(tensor)
            self.made[key] = tensor.name
        return self.made[key]

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
        found = self.vector(entries)
        if len(dims) != 1:
            found = self.node(
                f"{found.removeprefix(PREFIX + '.')}.as{list(dims)}".replace(" ", ""),
                "Reshape",
                [found, self.numbers(dims)],
            )
        if element != TensorProto.INT64:
            found = self.node(f"{found.removeprefix(PREFIX + '.')}.int32", "Cast", [found], to=element)
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
        """Put the new nodes in front of the graph."""
        for node in reversed(self.nodes):
            self.model.graph.node.insert(0, node)
        self.nodes.clear()


def _key(term: Term) -> str:
    return str(term).replace(" ", "")


def _names(graph: GraphProto) -> "list[str]":
    found = [value.name for value in (*graph.input, *graph.output)] + [t.name for t in graph.initializer]
    for node in graph.node:
        found += [node.name, *node.output]
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                found += _names(body)
    return found
