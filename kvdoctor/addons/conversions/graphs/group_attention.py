"""Computes each causal attention by GroupQueryAttention, the operator of ONNX Runtime that keeps the cache itself.

Requires: one graph for all steps; in each layer a Softmax of the product of queries and keys, whose mask hides later
tokens, those before a window and padding alone, as the position types of the proof say; past and new rows in a Concat,
as float[batch, kv_heads, tokens, head_dim]. Ensures: the same inputs and outputs; the operator joins and masks, by
lengths that are counted in the mask, or by the shape of the past. Rotations stay where they are.
"""

from kvdoctor.addons.conversions.graphs import plain_attention
from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion, forget_trace, name_reader
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.analysis.arithmetic.reading import Arithmetic, read_arithmetic
from kvdoctor.analysis.arithmetic.scores import Attention
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.masks import hides_later, is_plain
from kvdoctor.analysis.proof.prove import find_types
from kvdoctor.analysis.proof.types import NEW, Type, constant_of, size_of, symbol
from kvdoctor.choices import AttentionOperator
from kvdoctor.contract import Graph, Slot
from kvdoctor.model.edit import GraphWriter, make_node, prune, sort_nodes
from kvdoctor.model.operators import CONTRIB, has, operators_with
from kvdoctor.model.proto import AttributeProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute, output_of, producer, readers
from kvdoctor.records import record
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

OPERATOR = "GroupQueryAttention"
AXES = ("batch", "kv_heads", "past", "head_dim")
ELEMENTS = ("float", "float16")
"""The element types that the operator takes on every provider."""
WIDTHS = 8
"""The width of a head is a multiple of this. Source: onnxruntime, group_query_attention_helper.h, `head_size % 8`."""
LEAST_OPSET = 13
"""The first in which the axes of ReduceSum are an input, as they are written here."""
WEIGHING = operators_with("copy", "cast", "dropout", "select")
"""Operators between the weights and the product with the values."""
BY_ROWS = (0, 2, 1, 3)
"""Exchanges the axes of heads and tokens."""
LOOP = (
    "Several tokens on a past: one sequence a call; the operator takes a batch there with one token for each alone.",
    "Pad on the right, never on the left: the operator counts the tokens of each sequence from the start of its cache.",
)

WINDOW = "onnxruntime before 1.24.1 sees one token more than the window: run the copy in a later release."


@record(slots=False)
class _Layer:
    """One attention with its cache.

    `keys` and `values` are the Concat nodes that join a past and new rows; `queries`, float[batch, heads, new,
    head_dim], is multiplied with the keys, and the node `mixing` multiplies the weights with the values. `window` are
    the latest tokens that are seen, None for all.
    """

    slots: tuple[Slot, Slot]
    keys: NodeProto
    values: NodeProto
    queries: str
    heads: int
    mixing: NodeProto
    softmax: NodeProto
    scale: float
    cap: float | None
    window: int | None


def convert(context: RepairContext, choice: AttentionOperator) -> Converted:
    """Put the operator in the place of each attention over a growing cache, or plain operators in its place.

    Raises:
        CannotRepair: an attention is of another form; the message names the node.
    """
    if choice == "plain":
        return plain_attention.convert(context)
    contract = context.drivable
    file, graph = context.file_of("decode"), contract.graph("decode")
    context.require_opset(file, LEAST_OPSET, "ReduceSum")
    model = context.model(file)
    pairs = _pair_slots(context)
    arithmetic = read_arithmetic(context.stack.main, pairs[0][0].size("head_dim"), alone=True)
    if arithmetic is None:
        context.cannot("its graph cannot be followed")
    reader = _Reader(context, model, arithmetic, find_types(context.stack, contract))
    layers = [reader.read(*pair) for pair in pairs]
    for slot in (slot for layer in layers for slot in layer.slots):
        if (width := slot.size("head_dim") or 0) % WIDTHS or width != layers[0].slots[0].size("head_dim"):
            context.cannot(f"a head of {slot.past!r} has the width {width}: {OPERATOR} takes one multiple of {WIDTHS}")
    writer = GraphWriter(model, prefix="group_attention")
    lengths = _count_tokens(context, writer, graph, layers[0].slots[0])
    changes = []
    for layer in layers:
        _replace(writer, layer, lengths)
        what = f"{OPERATOR}, {layer.heads} heads, on {layer.slots[0].past!r}"
        changes.append(Change(file, describe_op(layer.softmax), "the weights of an attention", what))
    changes += [Change(file, f"input {name!r}", "nothing reads it any more", "removed") for name in prune(model)]
    if all(entry.domain != CONTRIB for entry in model.opset_import):
        model.opset_import.add(domain=CONTRIB, version=1)
    sort_nodes(model.graph)
    reveals = ("padding-changes-logits",)
    how = Comparison(single_from=2, window=max(layer.window or 0 for layer in layers))
    loop = (*LOOP, WINDOW) if how.window else LOOP
    return Converted((*changes, *forget_trace(context, file)), loop, how, reveals)


def _pair_slots(context: RepairContext) -> list[tuple[Slot, Slot]]:
    """The key and value of each layer."""
    found: dict[int, dict[str, Slot]] = {}
    for slot in context.drivable.slots:
        if slot.kind != "self-attention":
            continue
        if slot.growth == "shared":
            context.cannot(f"{name_reader(context, slot.past)} holds the cache of {slot.past!r} already")
        moved = "cut to a window" * slot.trimmed or "new entries first" * slot.prepended
        if slot.growth != "grow" or slot.axes != AXES or moved or slot.present is None or slot.layer is None:
            form = f"{slot.kind}, {moved or slot.growth}, {', '.join(slot.axes)}"
            context.cannot(f"the cache of {slot.past!r} ({form}) is none that grows by heads at its end")
        if slot.dtype not in ELEMENTS or slot.part not in ("key", "value"):
            context.cannot(f"the cache of {slot.past!r} holds a {slot.part} in {slot.dtype}")
        found.setdefault(slot.layer, {})[slot.part] = slot
    pairs = [(parts.get("key"), parts.get("value")) for parts in found.values()]
    whole = [(key, value) for key, value in pairs if key is not None and value is not None]
    if len(whole) != len(pairs) or not whole:
        context.cannot("not every layer has a key and a value in its cache")
    return whole


@record(slots=False)
class _Reader:
    """Finds the parts of the attentions of a graph, by its arithmetic and its position types."""

    context: RepairContext
    model: ModelProto
    arithmetic: Arithmetic
    types: dict[str, Type]

    def read(self, key: Slot, value: Slot) -> _Layer:
        """The attention of one layer."""
        context, keys, values = self.context, self._find_join(key), self._find_join(value)
        attention, queries = self._find_attention(key, output_of(keys))
        softmax = producer(self.model.graph, attention.node.outputs[0])
        if softmax is None or attention.scale is None or not attention.is_scaled:
            context.cannot(f"the scale of the scores of the node {describe_op(attention.node.proto)} is not known")
        window = self._read_mask(attention)
        weights = self._list_weights(softmax)
        mixing = self._find_mixing(softmax, weights)
        other = next((name for name in mixing.input if name not in weights), "")
        if self._before_views(other) != output_of(values):
            context.cannot(f"the node {describe_op(mixing)} multiplies the weights with more than {value.present!r}")
        heads = self._count_heads(queries, key)
        if heads is None or self._count_heads(output_of(mixing), value) != heads:
            context.cannot(f"the queries of the node {describe_op(softmax)} are not [batch, heads, new, head_dim]")
        scale = attention.scale / attention.query_scale
        return _Layer((key, value), keys, values, queries, heads, mixing, softmax, scale, attention.cap, window)

    def _find_join(self, slot: Slot) -> NodeProto:
        """The Concat that appends new rows to a past."""
        node = producer(self.model.graph, str(slot.present))
        while node is not None and has(node.op_type, "copy") and len(node.input) == 1:
            node = producer(self.model.graph, node.input[0])
        axis = find_attribute(node, "axis") if node is not None and has(node.op_type, "join") else None
        if (
            node is None
            or axis is None
            or len(node.input) != 2
            or axis.i % len(AXES) != 2
            or node.input[0] != slot.past
        ):
            made = f"the node {describe_op(node)}" if node is not None else "no node of the main graph"
            what = f"a Concat of {slot.past!r} and new rows"
            self.context.cannot(f"{made} makes {slot.present!r}, where {what} is expected")
        return node

    def _find_attention(self, key: Slot, joined: str) -> tuple[Attention, str]:
        """The attention over some keys, and its queries."""
        found = []
        for attention in self.arithmetic.attentions:
            operands = attention.product.inputs[:2] if attention.product is not None else ()
            for queries, keys in (operands, operands[::-1]) if len(operands) == 2 else ():
                if self._before_views(keys) == joined:
                    found.append((attention, queries))
        if len(found) != 1:
            count = f"{len(found)} attentions are" if found else "no attention is"
            self.context.cannot(f"{count} recognized whose scores are the product of {key.present!r} and queries")
        return found[0]

    def _before_views(self, name: str) -> str:
        """The value that a factor of a product is, before it was moved, repeated and scaled."""
        return self.arithmetic.fixed.before_scales(name, "copy", "cast", "view", "permute", "repeat")[1]

    def _read_mask(self, attention: Attention) -> int | None:
        """The window of a mask; refuses one that hides others than later tokens and those before it, or adds numbers.

        Whether the number that the graph compares with is that window is left to the comparison beyond it.
        """
        node, types, cannot = attention.node, self.types, self.context.cannot
        scores, name = types.get(node.input(0)), f"the node {describe_op(node.proto)}"
        if scores is not None and len(scores.shape or AXES) != len(AXES):
            cannot(f"{name} takes scores of {len(scores.shape or ())} axes, not of batch, heads, new and total")
        if scores is None or not hides_later(scores, -2, -1):
            cannot(f"the proof for all lengths finds no mask of later tokens in the scores that {name} takes")
        windowed = not is_plain(dict(scores.regions)[-2, -1][2])
        if windowed and len(attention.windows or ()) != 1:
            cannot(f"the mask of {name} may hide earlier tokens, and not by one window")
        for mask in attention.masks:
            one = types.get(mask)
            if one is None or (one.kind == "f" and constant_of(one) is None and not _adds_nothing(one, windowed)):
                cannot(f"{mask!r} is added to the scores of {name}, and is more than a mask of later tokens")
        return next(iter(attention.windows or ())) if windowed else None

    def _list_weights(self, softmax: NodeProto) -> list[str]:
        """The weights of an attention, as they are handed on to the product with the values."""
        reading, found = readers(self.model.graph), [output_of(softmax)]
        for name in found:
            following = [output_of(node) for node, _ in reading.get(name, ()) if node.op_type in WEIGHING]
            found += [one for one in following if one not in found]
        return found

    def _find_mixing(self, softmax: NodeProto, weights: list[str]) -> NodeProto:
        """The product of weights and values. What else reads the weights still can."""
        reading = readers(self.model.graph)
        found = [node for name in weights for node, _ in reading.get(name, ()) if has(node.op_type, "product")]
        if len(found) != 1 or len(found[0].input) != 2:
            self.context.cannot(f"{len(found) or 'no'} product reads the weights of the node {describe_op(softmax)}")
        return found[0]

    def _count_heads(self, name: str, slot: Slot) -> int | None:
        """The heads of float[batch, heads, new, head_dim]; None for another shape."""
        shape, groups = self.types[name].shape if name in self.types else None, slot.size("kv_heads")
        if shape is None or len(shape) != len(AXES) or not groups:
            return None
        heads, width = size_of(shape[1]).number, size_of(shape[3]).number
        fits = shape[2] == (symbol(NEW),) and width == slot.size("head_dim")
        return heads if fits and heads and heads % groups == 0 else None


def _adds_nothing(mask: Type, windowed: bool) -> bool:
    """Whether a mask is 0 for the token itself and for earlier ones, of a window as it may be."""
    return any(marks[1] == 0 and (marks[2] == 0 or windowed) for _, marks in mask.regions)


def _count_tokens(context: RepairContext, writer: GraphWriter, graph: Graph, slot: Slot) -> tuple[str, str]:
    """The index of the last token of each sequence, int32[batch], and the length of the longest one, int32[]."""
    mask = graph.port("attention_mask")
    int32 = int(TensorProto.INT32)
    first, one = writer.numbers([0], [], "first"), writer.numbers([1], hint="one")
    if mask is not None:
        if mask.axes != ("batch", "total"):
            context.cannot(f"{mask.name!r} has the axes {', '.join(mask.axes)}, where batch and total are expected")
        whole = writer.node("mask", "Cast", [mask.name], to=int(TensorProto.INT64))
        counted = writer.node("tokens", "ReduceSum", [whole, one], keepdims=0)
        total = writer.size_of(mask.name, 1)
    else:
        tokens = graph.port("token_ids")
        if tokens is None or tokens.axes != ("batch", "new"):
            context.cannot("it has neither a mask nor token ids of the axes batch and new, to count tokens by")
        total = writer.node("total", "Add", [writer.size_of(slot.past, 2), writer.size_of(tokens.name, 1)])
        counted = writer.node("tokens", "Expand", [total, writer.size_of(tokens.name, 0)])
    last = writer.node("last", "Cast", [writer.node("last_long", "Sub", [counted, one])], to=int32)
    longest = writer.node("longest", "Cast", [writer.node("longest_long", "Gather", [total, first], axis=0)], to=int32)
    return last, longest


def _replace(writer: GraphWriter, layer: _Layer, lengths: tuple[str, str]) -> None:
    """Compute one attention, and the presents of its layer, by the operator."""
    key, value = layer.slots
    groups, width = key.size("kv_heads") or 0, key.size("head_dim") or 0
    rows = [_by_rows(writer, layer.queries, layer.heads * width)]
    for node, slot in ((layer.keys, key), (layer.values, value)):
        rows.append(_by_rows(writer, node.input[1], groups * (slot.size("head_dim") or 0)))
    made = writer.fresh("mixed")
    fused = NodeProto(op_type=OPERATOR, domain=CONTRIB, name=writer.fresh("node"))
    fused.input.extend([*rows, key.past, value.past, *lengths])
    fused.output.extend([made, output_of(layer.keys), output_of(layer.values)])
    for name, number in (("num_heads", layer.heads), ("kv_num_heads", groups), ("local_window_size", layer.window)):
        if number is not None:
            fused.attribute.add(name=name, type=AttributeProto.INT, i=number)
    for name, real in (("scale", layer.scale), ("softcap", layer.cap)):
        if real is not None:
            fused.attribute.add(name=name, type=AttributeProto.FLOAT, f=real)
    graph, mixed = writer.model.graph, output_of(layer.mixing)
    for node in (layer.keys, layer.values, layer.mixing):
        graph.node.remove(node)
    graph.node.append(fused)
    heads = writer.node("heads", "Reshape", [made, writer.numbers([0, 0, layer.heads, width])])
    graph.node.append(make_node("Transpose", [heads], mixed, perm=BY_ROWS))


def _by_rows(writer: GraphWriter, name: str, columns: int) -> str:
    """float[batch, heads, new, head_dim] as float[batch, new, columns]."""
    moved = writer.node("rows", "Transpose", [name], perm=BY_ROWS)
    return writer.node("columns", "Reshape", [moved, writer.numbers([0, 0, columns])])


CONVERSION = GraphConversion(
    "attention",
    order=15,
    read=lambda choices: choices.attention,
    title=lambda choice: f"attention {choice}",
    convert=convert,
    one_graph=True,
)
