"""Changes the graph of a decoder without a cache: a call takes new tokens, pasts and a mask of the whole sequence."""

from dataclasses import dataclass, field

from kvdoctor.addons.conversions.new_cache.cuts import LENGTH_AXIS, RANK, KeySide
from kvdoctor.addons.conversions.new_cache.fused import choose_mask, is_causal, write_mask
from kvdoctor.addons.conversions.new_cache.labels import Mixes
from kvdoctor.addons.conversions.new_cache.lengths import Lengths
from kvdoctor.addons.conversions.new_cache.sizes import Inputs
from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes
from kvdoctor.model.edit import GraphWriter, make_node, prune, replace_all, sort_nodes
from kvdoctor.model.operators import has, operator_of
from kvdoctor.model.proto import ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import describe_node, find_attribute, input_of
from kvdoctor.repair.workspace import CannotRepair
from kvdoctor.report.repair_record import Change

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
        """The length of the first past, int64[1]."""
        side, slot = slots[0]
        axis = LENGTH_AXIS if _is_permuted(side, self.walk) else side.axis
        shape = self.writer.node("past_shape", "Shape", [f"past_key_values.{slot}"])
        return self.writer.node("past_length", "Gather", [shape, self.writer.numbers([axis])], axis=0)

    def _join(self, side: KeySide, slot: str) -> None:
        """Join a past in front of a value on the key side, and return both as a present."""
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
            kind = _find_type(self.walk, self.model, side.value)
            batch = self.walk.sizes.batch_axis(side.value)
            for ports, name, length in (
                (self.model.graph.input, past, PAST_SIZE),
                (self.model.graph.output, present, f"{PAST_SIZE} + {self.given.length}"),
            ):
                dims: list[int | str] = list(shape)
                dims[axis] = length
                if batch is not None:
                    dims[batch] = self.given.batch
                _declare_value(ports.add(name=name), kind, dims)
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
        """A shape of a view, with new tokens and the key side each where the result has them."""
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
        """Whether a node cuts the key side."""
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
                dims[axis].Clear()
                dims[axis].dim_param = total
                self.changes.append(Change(self.file, value.name, before, total))


def _is_permuted(side: KeySide, walk: TokenAxes) -> bool:
    """Whether a value has the tokens in front of the heads."""
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


def _declare_value(value: ValueInfoProto, kind: int, dims: list[int | str]) -> None:
    value.type.tensor_type.elem_type = kind
    for size in dims:
        value.type.tensor_type.shape.dim.add(**{"dim_value" if isinstance(size, int) else "dim_param": size})


def _find_type(walk: TokenAxes, model: ModelProto, name: str) -> int:
    """The element type of a value that is made of the tokens, by the nodes that make it."""
    known = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.value_info)}
    known |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for _ in range(len(walk.makers)):
        if known.get(name):
            return int(known[name])
        node = walk.makers.get(name)
        if node is None:
            break
        if has(node.op_type, "cast") and (to := find_attribute(node, "to")) is not None:
            return int(to.i)
        if has(node.op_type, "constant"):
            found = find_attribute(node, "value")
            return int(found.t.data_type) if found is not None else TensorProto.FLOAT
        scale = operator_of(node.op_type).scale
        if has(node.op_type, "dequantize") and scale is not None:
            name = input_of(node, scale)
            continue
        embedded = has(node.op_type, "embed") and node.input[0] not in walk.labels
        name = node.input[0] if embedded else next((one for one in node.input if one in walk.labels), node.input[0])
    return TensorProto.FLOAT
