"""Changes the graph of a decoder without a cache: a call takes new tokens, pasts and a mask of the whole sequence."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.addons.conversions.graphs.cache_axes import LENGTH_AXIS, RANK, Inputs, KeySide, Mixes
from kvdoctor.addons.conversions.graphs.conversion import find_element
from kvdoctor.addons.conversions.graphs.token_axes import MASK, TokenAxes, is_causal
from kvdoctor.model.edit import GraphWriter, declare, make_node, prune, rename_reads, replace_all, set_size, sort_nodes
from kvdoctor.model.operators import has, operator_of
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import describe_node, find_attribute, output_of, values_read
from kvdoctor.repair.workspace import CannotRepair
from kvdoctor.report.repair_record import Change

Span = Literal["new", "total"]
"""For which tokens a free value is computed: those of the call, or the whole sequence."""

INT64_MAX = (1 << 63) - 1


@dataclass(eq=False)
class Lengths:
    """Writes free values of a graph for another span; `past` is the length of the past, int64[1].

    A free value follows from sizes, masks and constants. The original nodes compute it for the tokens of a call; where
    it must cover the sequence, its nodes are repeated with the length of the past added to each size of new tokens.
    """

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
        return self.writer.size_of(self.given.ids, self.given.new[self.given.ids])

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


def write_mask(node: NodeProto, lengths: Lengths, writer: GraphWriter) -> None:
    """Give a causal node its mask as an input, bool[new, total].

    Where a past stands in front of the keys, releases of the operator disagree on where `is_causal` begins to count.
    """
    for attribute in node.attribute:
        if attribute.name == "is_causal":
            attribute.i = 0
    nought, one = writer.numbers([0], [], "nought"), writer.numbers([1], [], "one")
    past = writer.node("past_scalar", "Squeeze", [lengths.past])
    new = writer.node("new_scalar", "Squeeze", [lengths.count_new()])
    total = writer.node("total_scalar", "Add", [past, new])
    keys = writer.node("key_positions", "Range", [nought, total, one])
    queries = writer.node("query_positions", "Range", [past, total, one])
    column = writer.node("query_column", "Unsqueeze", [queries, writer.numbers([1])])
    mask = writer.node("causal_mask", "LessOrEqual", [keys, column])
    node.input[:] = [*node.input[:MASK], mask]


def choose_mask(name: str, lengths: Lengths) -> str:
    """The mask of a node that has one: the rows of its new tokens."""
    rank = len(lengths.walk.shape(name))
    counted = [at for at in (rank - 2,) if at >= 0 and lengths.walk.sizes.counts_tokens(name, at)]
    return lengths.rows(name, counted)


PAST_SIZE = "past_sequence_length"
TO_KEYS = (0, 2, 1, 3)
"""From [batch, tokens, heads, width] to the order of a cache, and back."""


@dataclass(eq=False)
class Rewriter:
    """Gives a labelled graph its pasts and presents. `changes` are listed for the report."""

    model: ModelProto
    file: str
    walk: TokenAxes
    given: Inputs
    writer: GraphWriter = field(init=False)
    lengths: Lengths = field(init=False)
    changes: list[Change] = field(default_factory=list, init=False)
    joined: dict[str, str] = field(default_factory=dict, init=False)

    def run(self) -> tuple[Change, ...]:
        """Change the graph.

        Raises:
            CannotRepair: a value cannot be computed for the whole sequence; the message names the node.
        """
        self.writer = GraphWriter(self.model, prefix="new_cache")
        slots = _name_slots(self.walk.sides)
        past = self._measure_past(slots)
        self.lengths = Lengths(self.walk, self.given, self.writer, past)
        nodes = list(self.model.graph.node)
        for node in nodes:
            if any(name in self.walk.labels for name in node.output):
                try:
                    self._adapt(node)
                except Mixes as reason:
                    raise CannotRepair(f"the node {describe_node(node)} stands in the way: {reason}") from None
        for node in filter(is_causal, self.walk.fused):
            write_mask(node, self.lengths, self.writer)
        for side, slot in slots:
            self._join(side, slot)
        self._declare()
        del self.model.graph.value_info[:]
        sort_nodes(self.model.graph)
        inputs = list(self.model.graph.input)
        prune(self.model)
        replace_all(self.model.graph.input, inputs)  # what nothing reads stays an input
        return tuple(self.changes)

    def _measure_past(self, slots: "list[tuple[KeySide, str]]") -> str:
        side, slot = slots[0]
        axis = LENGTH_AXIS if _is_permuted(side, self.walk) else side.axis
        return self.writer.size_of(f"past_key_values.{slot}", axis)

    def _join(self, side: KeySide, slot: str) -> None:
        node, index = side.reads
        if side.value not in self.joined:
            past, present = f"past_key_values.{slot}", f"present.{slot}"
            permuted = _is_permuted(side, self.walk)
            shape, axis = list(self.walk.shape(side.value)), side.axis
            new = side.value
            if permuted:
                new, axis = self.writer.node("permuted", "Transpose", [new], perm=TO_KEYS), LENGTH_AXIS
                shape = [shape[at] for at in TO_KEYS]
            self.writer.nodes.append(make_node("Concat", [past, new], present, axis=axis))
            kind = find_element((self.model.graph,), side.value) or TensorProto.FLOAT
            batch = self.walk.sizes.batch_axis(side.value)
            for ports, name, length in (
                (self.model.graph.input, past, PAST_SIZE),
                (self.model.graph.output, present, f"{PAST_SIZE} + {self.given.length}"),
            ):
                dims: list[int | str] = list(shape)
                dims[axis] = length
                if batch is not None:
                    dims[batch] = self.given.batch
                ports.append(declare(name, kind, dims))
            read = self.writer.node("permuted", "Transpose", [present], perm=TO_KEYS) if permuted else present
            self.joined[side.value] = read
            text = f"joins {past!r} in front of it: {present!r}"
            self.changes.append(Change(self.file, describe_node(node), f"reads {side.part}s of all tokens", text))
        node.input[index] = self.joined[side.value]

    def _adapt(self, node: NodeProto) -> None:
        """Let a node that computes with the tokens read free values for the tokens that it has."""
        for index, name in enumerate(node.input):
            if name not in self.lengths.varying:
                continue
            found = self._choose(node, index, name)
            if found != name:
                self.changes.append(Change(self.file, describe_node(node), f"reads {name}", "counts from the past on"))
                node.input[index] = found

    def _choose(self, node: NodeProto, index: int, name: str) -> str:
        """What a node reads in place of a free value that follows from the number of tokens."""
        made = self.walk.own(node.output[0])
        operator = operator_of(node.op_type)
        if has(node.op_type, "view", "repeat") and index in operator.shapes:
            return self._choose_shape(node, name)
        if index in operator.bounds:
            return self.lengths.write(name, "total" if self._cuts_total(node) else "new")
        if index in operator.shapes or (index in operator.places and node.input[0] in self.walk.labels):
            return self.lengths.write(name, "new")
        if has(node.op_type, "attend"):
            return choose_mask(name, self.lengths)
        if has(node.op_type, "elementwise", "join"):
            lead = len(made) - len(self.walk.shape(name))
            counted = [at for at in range(len(made)) if at >= lead and self.walk.sizes.counts_tokens(name, at - lead)]
            return self.lengths.rows(name, [at - lead for at in counted if made[at] == "new"])
        return self.lengths.write(name, "total")

    def _choose_shape(self, node: NodeProto, name: str) -> str:
        made = self.walk.own(node.output[0])
        if "total" not in made:
            return self.lengths.write(name, "new")
        if "new" not in made and "folded" not in made:
            return self.lengths.write(name, "total")
        asked = self.walk.sizes.integers(name)
        if asked is None or len(asked) != len(made):
            raise Mixes("its shape is not known")
        count = self.walk.sizes.lengths[0]
        times = [int(label == "total" and size == count) for label, size in zip(made, asked, strict=True)]
        return self.lengths.add_past(self.lengths.write(name, "new"), times)

    def _cuts_total(self, node: NodeProto) -> bool:
        own = self.walk.own(node.input[0])
        axes = self.walk.listed(node, 3, "axes") or tuple(range(len(own)))
        found = {own[axis] for axis in axes}
        if {"new", "total"} <= found:
            raise Mixes("it cuts new tokens and the key side at once")
        return "total" in found

    def _declare(self) -> None:
        """Declare that a mask is as long as past and new tokens together, and attention weights as well."""
        total = f"{PAST_SIZE} + {self.given.length}"
        outputs = {
            name: axis for name, labels in self.walk.labels.items() for axis, one in enumerate(labels) if one == "total"
        }
        for value in (*self.model.graph.input, *self.model.graph.output):
            axis = self.given.masks.get(value.name, outputs.get(value.name))
            dims = value.type.tensor_type.shape.dim
            if axis is not None and axis < len(dims):
                before = dims[axis].dim_param
                set_size(dims[axis], total)
                self.changes.append(Change(self.file, value.name, before, total))


def _is_permuted(side: KeySide, walk: TokenAxes) -> bool:
    return side.axis == 1 and len(walk.shape(side.value)) == RANK and walk.sizes.batch_axis(side.value) in (0, None)


def _name_slots(sides: list[KeySide]) -> list[tuple[KeySide, str]]:
    """The slot of each side: the layer by the order of the products, and the part."""
    counts, named, known = {"key": 0, "value": 0}, list[tuple[KeySide, str]](), dict[str, str]()
    for side in sides:
        if side.value not in known:
            known[side.value] = f"{counts[side.part]}.{side.part}"
            counts[side.part] += 1
        named.append((side, known[side.value]))
    if counts["key"] != counts["value"]:
        raise CannotRepair(f"it has {counts['key']} keys and {counts['value']} values of its tokens")
    return named
