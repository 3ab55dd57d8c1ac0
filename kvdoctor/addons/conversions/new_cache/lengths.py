"""Free values for the new tokens, for the whole sequence, and the rows of the latter that the new tokens have.

A free value follows from sizes, masks and constants. The original nodes compute it for the tokens of a call; where it
must cover the sequence, its nodes are repeated with the length of the past added to each size that counts new tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.addons.conversions.new_cache.labels import Mixes
from kvdoctor.addons.conversions.new_cache.sizes import Inputs
from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes
from kvdoctor.model.edit import GraphWriter, rename_reads
from kvdoctor.model.operators import has
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import find_attribute, output_of, values_read

Span = Literal["new", "total"]
"""For which tokens a free value is computed: those of the call, or the whole sequence."""

INT64_MAX = (1 << 63) - 1


@dataclass(eq=False)
class Lengths:
    """Writes free values of a graph for another span; `past` is the length of the past, int64[1]."""

    walk: TokenAxes
    given: Inputs
    writer: GraphWriter
    past: str
    varying: set[str] = field(default_factory=set, init=False)
    made: dict[tuple[Span, str], str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Find the free values that depend on the number of tokens."""
        self.order = {name: at for at, node in enumerate(self.walk.graph.node) for name in node.output if name}
        self.varying |= set(self.given.masks)
        for node in self.walk.graph.node:
            if not any(name in self.walk.labels for name in node.output) and self._varies(node):
                self.varying.update(filter(None, node.output))

    def _varies(self, node: NodeProto) -> bool:
        source = node.input[0] if node.input else ""
        if has(node.op_type, "measure"):
            return self.walk.sizes.varies(source)
        if has(node.op_type, "pick") and self._picks_other_sizes(node):
            return False
        return any(name in self.varying for name in values_read(node))

    def _picks_other_sizes(self, node: NodeProto) -> bool:
        """Whether a node takes sizes that do not count tokens out of a shape."""
        maker = self.walk.makers.get(node.input[0])
        if maker is None or not has(maker.op_type, "sizes") or any(name in self.varying for name in node.input[1:]):
            return False
        one, other = (numbers for numbers in self.walk.sizes.numbers(output_of(node)))
        return one is not None and other is not None and one.shape == other.shape and bool((one == other).all())

    def write(self, name: str, span: Span) -> str:
        """The name of a free value for a span.

        Raises:
            Mixes: a size that it follows from is folded into others.
        """
        if name not in self.varying:
            return name
        for wanted in self._list_needed(name, span):
            if (span, wanted) not in self.made:
                self._write_one(wanted, span)
        return self.made[span, name]

    def _list_needed(self, name: str, span: Span) -> list[str]:
        """The varying values that one follows from, in the order of the graph."""
        found, waiting = set[str](), [name]
        while waiting:
            one = waiting.pop()
            if one in found or one not in self.varying or (span, one) in self.made:
                continue
            found.add(one)
            node = self.walk.makers.get(one)
            if node is not None:
                waiting += [source for source in values_read(node) if source not in self.walk.labels]
        return sorted(found, key=lambda one: self.order.get(one, -1))

    def _write_one(self, name: str, span: Span) -> None:
        node = self.walk.makers.get(name)
        if node is None:  # a mask, which has the whole sequence
            axis = self.given.masks[name]
            self.made[span, name] = name if span == "total" else self.last_rows(name, axis)
            return
        source = node.input[0] if node.input else ""
        if has(node.op_type, "sizes") and source in self.walk.labels:
            self.made[span, name] = self._write_shape(node, source, span)
            return
        if has(node.op_type, "measure") and source in self.walk.labels:
            raise Mixes(f"the number of elements of {source!r} counts tokens")
        renamed = {one: self.made[span, one] for one in values_read(node) if (span, one) in self.made}
        renamed = {old: new for old, new in renamed.items() if old != new}
        if not renamed:
            self.made.update({(span, one): one for one in node.output if one})
            return
        holder = GraphProto()
        copy = holder.node.add()
        copy.CopyFrom(node)
        rename_reads(holder, renamed)
        for at, one in enumerate(copy.output):
            if one:
                copy.output[at] = self.made[span, one] = self.writer.fresh(f"{span}.{one}")
        copy.name = self.writer.fresh(f"{span}.{node.name or name}")
        self.writer.nodes.append(copy)

    def _write_shape(self, node: NodeProto, source: str, span: Span) -> str:
        """The sizes of a value of tokens with those of the span on each axis that counts them."""
        labels = list(self.walk.own(source))
        flags = [find_attribute(node, name) for name in ("start", "end")]
        start, end = (None if flag is None else int(flag.i) for flag in flags)
        labels = labels[slice(start, end)]
        name = output_of(node)
        if "folded" in labels and span == "total":
            raise Mixes(f"the sizes of {source!r} count tokens and others together")
        signs = [(label == "new") if span == "total" else -(label == "total") for label in labels]
        return self.add_past(name, [int(sign) for sign in signs])

    def add_past(self, name: str, times: list[int]) -> str:
        """Sizes with the length of the past added so many times to each."""
        if not any(times):
            return name
        added = self.writer.node("past_sizes", "Mul", [self.past, self.writer.numbers(times)])
        return self.writer.node("sizes", "Add", [name, added])

    def last_rows(self, name: str, axis: int) -> str:
        """The last rows of a value for the whole sequence: those of the new tokens."""
        first = self.writer.node("first_new", "Neg", [self.count_new()])
        return self.writer.node("rows", "Slice", [name, first, *map(self.writer.numbers, ([INT64_MAX], [axis]))])

    def count_new(self) -> str:
        """The number of new tokens, int64[1]."""
        shape = self.writer.node("new_shape", "Shape", [self.given.ids])
        place = self.writer.numbers([self.given.new[self.given.ids]])
        return self.writer.node("new_length", "Gather", [shape, place], axis=0)

    def rows(self, name: str, axes: Iterable[int]) -> str:
        """A free value for the whole sequence with the rows of the new tokens alone on some axes."""
        axes = tuple(axes)
        node = self.walk.makers.get(name)
        if axes and node is not None and has(node.op_type, "elementwise", "cast") and name in self.varying:
            return self._rows_of_operands(node, name, axes)
        found = self.write(name, "total")
        for axis in axes:
            found = self.last_rows(found, axis)
        return found

    def _rows_of_operands(self, node: NodeProto, name: str, axes: tuple[int, ...]) -> str:
        """Rows of what is computed element by element are computed of the rows of its operands."""
        key: tuple[Span, str] = ("total", f"{name} rows {axes}")
        if key not in self.made:
            rank, taken = len(self.walk.shape(name)), list[str]()
            for one in node.input:
                lead = rank - len(self.walk.shape(one))
                own = [at - lead for at in axes if at >= lead and self.walk.sizes.counts_tokens(one, at - lead)]
                taken.append(self.rows(one, own) if one else "")
            copy = self.writer.nodes.add()
            copy.CopyFrom(node)
            copy.input[:], copy.output[:] = taken, [self.writer.fresh(f"rows.{name}")]
            copy.name = self.made[key] = copy.output[0]
        return self.made[key]
