"""Computes each GroupQueryAttention by plain operators, over a cache that grows by concatenation.

Requires: one graph for all steps; pasts that are inputs; opset 13. Ensures: the same names of pasts and presents, each
present the past and the new rows; rotary tables, scale, soft cap and window are computed as the operator does. Padding
of either side is hidden where the graph has a mask. Every runtime has these operators, and other conversions follow.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onnx import parser

from kvdoctor.addons.conversions.graphs.conversion import Converted, forget_trace
from kvdoctor.addons.conversions.graphs.growing_cache import DOMAIN, OPERATOR, declare_length
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.prove import find_types
from kvdoctor.analysis.proof.types import size_of
from kvdoctor.contract import Graph, Slot
from kvdoctor.model.edit import GraphWriter, prune, sort_nodes
from kvdoctor.model.proto import NodeProto, TensorProto
from kvdoctor.model.traverse import input_of, output_of
from kvdoctor.repair.lowering.lower import is_silent
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

LEAST_OPSET = 13
"""The first in which the axes of Unsqueeze and the lengths of Split are inputs."""
WINDOW_SIZE = "local_window_size"
KNOWN = ("num_heads", "kv_num_heads", "scale", "softcap", WINDOW_SIZE, "do_rotary")
"""Attributes that are written out; others must have the meaning of no attribute."""
KEY, VALUE, PAST_KEY, PAST_VALUE, COS, SIN, POSITIONS, FURTHER = 1, 2, 3, 4, 7, 8, 9, 10
"""Inputs by number; those from the last on (a bias, sinks, scales of a quantized cache) are not written out."""
OUTPUTS = ("result", "key_joined", "value_joined")
"""Outputs in their order, by their names in the texts; others are not written out."""
GENAI, SHARES = "genai_config.json", "past_present_share_buffer"
LOWEST = {"float": (1, -3.4e38), "float16": (10, -65504.0)}
"""By element type of the cache: its number, and what hides a score."""
LOOP = (
    "Feed each present as the next past: it is past + new rows long. A mask has past + new columns, and may hide "
    "padding on either side.",
)

NUMBERS: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    **{f"c{number}": ((number,), ()) for number in (0, 1, 2)},
    **{f"v{number}": ((number,), None) for number in (0, 1, 2)},
    "end": (((1 << 63) - 1,), None),
    "last": ((-1,), None),
    "inner": ((1, 2), None),
}
"""Constants of the texts."""
LENGTHS = """
  past_shape = Shape (past)
  before = Gather (past_shape, c2)
  tokens_shape = Shape (tokens)
  new = Gather (tokens_shape, at_new)
  total = Add (before, new)
  places = Range (before, total, c1)
  row = Unsqueeze (places, last)
  columns = Range (c0, total, c1)
  causal = LessOrEqual (columns, row)
"""
COUNTED = """
  whole = Cast <to = 7> (mask)
  counted = CumSum (whole, c1)
  index = Sub (counted, c1)
  least = Max (index, c0)
  minus = Neg (new)
  first_new = Unsqueeze (minus, v0)
  positions = Slice (least, first_new, end, v1)
  by_key = Cast <to = 9> (mask)
  hiding = Unsqueeze (by_key, inner)
  seen = And (causal, hiding)
"""
UNCOUNTED = """
  positions = Unsqueeze (places, v0)
  seen = Identity (causal)
"""
WINDOW = """
  oldest = Sub (row, window)
  inside = Greater (columns, oldest)
  seen_inside = And (seen, inside)
"""
APART = "  query, key, value = Split <axis = -1> (packed, sizes)\n"
HEADS = """
  {x}_rows = Reshape ({x}, {x}_form)
  {x}_heads = Transpose <perm = [0, 2, 1, 3]> ({x}_rows)
"""
TABLES = """
  cos_rows = Gather (cos_table, positions)
  cos = Unsqueeze (cos_rows, v1)
  sin_rows = Gather (sin_table, positions)
  sin = Unsqueeze (sin_rows, v1)
"""
ROTATED = """
  {x}_first, {x}_second{rest} = Split <axis = -1> ({x}_heads, parts)
  {x}_a = Mul ({x}_first, cos)
  {x}_b = Mul ({x}_second, sin)
  {x}_c = Mul ({x}_second, cos)
  {x}_d = Mul ({x}_first, sin)
  {x}_e = Sub ({x}_a, {x}_b)
  {x}_f = Add ({x}_c, {x}_d)
  {x}_rotated = Concat <axis = -1> ({x}_e, {x}_f{rest})
"""
JOINED = """
  key_joined = Concat <axis = 2> (past_key, {key})
  value_joined = Concat <axis = 2> (past_value, value_heads)
"""
REPEATED = """
  {x}_apart = Unsqueeze ({x}_joined, v2)
  {x}_wide = Expand ({x}_apart, times)
  {x}_all = Reshape ({x}_wide, whole_form)
"""
SCORES = """
  upright = Transpose <perm = [0, 1, 3, 2]> ({key})
  products = MatMul ({query}, upright)
  scores = Mul (products, scale)
"""
CAPPED = """
  shared = Div (scores, cap)
  bent = Tanh (shared)
  capped = Mul (bent, cap)
"""
MIXED = """
  masked = Where (seen, {scores}, lowest)
  weights = Softmax <axis = -1> (masked)
  mixed = MatMul (weights, {value})
  rows = Transpose <perm = [0, 2, 1, 3]> (mixed)
  result = Reshape (rows, flat)
"""


def convert(context: RepairContext) -> Converted:
    """Put plain operators in the place of each GroupQueryAttention of a stack.

    Raises:
        CannotRepair: one does more than is written out here, or the graph has none; the message names the node.
    """
    contract, file = context.drivable, context.file_of("decode")
    model, graph = context.model(file), contract.graph("decode")
    found = [node for node in model.graph.node if (node.op_type, node.domain) == (OPERATOR, DOMAIN)]
    if not found:
        context.cannot(f"no node of its main graph is a {OPERATOR}")
    context.require_opset(file, LEAST_OPSET, "Unsqueeze")
    mask, tokens = graph.port("attention_mask"), graph.port("token_ids") or graph.port("embeddings")
    if tokens is None or "new" not in tokens.axes or (mask is not None and mask.axes != ("batch", "total")):
        context.cannot("it has no token ids, or its mask has other axes than batch and total")
    slots = {slot.past: slot for slot in contract.slots}
    layers = [(node, _read_slots(context, node, slots), _find_table(context, node)) for node in found]
    writer, changes, windows = _Writer(model, graph, prefix="plain_attention"), list[Change](), [0]
    for node, pair, table in layers:
        numbers = {one.name: one.f if one.type == 1 else one.i for one in node.attribute}
        windows.append(max(int(numbers.get(WINDOW_SIZE, 0)), 0))
        writer.write(node, pair, numbers, table)
        what = f"plain operators, {numbers['num_heads']} heads, over {pair[0].past!r}"
        changes.append(Change(file, describe_op(node), OPERATOR, what))
        model.graph.node.remove(node)
    changes += [Change(file, f"input {name!r}", "nothing reads it any more", "removed") for name in prune(model)]
    changes += declare_length(model, [slot for _, pair, _ in layers for slot in pair], None, file)
    changes += _stop_sharing(context)
    del model.graph.value_info[:]
    sort_nodes(model.graph)
    how = Comparison(single_from=2, window=max(windows))
    return Converted((*changes, *forget_trace(context, file)), LOOP, how, ("padding-changes-logits",))


def _stop_sharing(context: RepairContext) -> Iterator[Change]:
    """Let onnxruntime-genai feed a cache that grows, where its config says that past and present are one buffer."""
    content = context.copy.side_car(GENAI)
    search = content.get("search") if isinstance(content, dict) else None
    if isinstance(search, dict) and search.get(SHARES):
        search[SHARES] = False
        yield Change(GENAI, f"search.{SHARES}", "true", "false, since each present is a longer tensor")


def _read_slots(context: RepairContext, node: NodeProto, slots: Mapping[str, Slot]) -> tuple[Slot, Slot]:
    """The key and the value of a node that does no more than is written out."""
    name = f"the node {describe_op(node)}"
    key, value = (slots.get(input_of(node, at)) for at in (PAST_KEY, PAST_VALUE))
    if key is None or value is None or not (output_of(node, 1) and output_of(node, 2)):
        context.cannot(f"{name} does not take its past from inputs, or does not return it")
    more = [f"input {at}" for at, given in enumerate(node.input) if given and at >= FURTHER]
    more += [f"output {at}" for at, made in enumerate(node.output) if made and at >= len(OUTPUTS)]
    more += [one.name for one in node.attribute if one.name not in KNOWN and not is_silent(node, one)]
    if more:
        context.cannot(f"{name} has {', '.join(more)}, which plain operators do not compute here")
    if key.dtype not in LOWEST or None in (key.size("head_dim"), key.size("kv_heads")):
        context.cannot(f"the cache of {key.past!r} ({key.dtype}) has no known heads and width, or another type")
    return key, value


def _find_table(context: RepairContext, node: NodeProto) -> int | None:
    """The columns of the rotary tables of a node; None where it does not rotate."""
    if not any(one.name == "do_rotary" and one.i for one in node.attribute):
        return None
    table = find_types(context.stack, context.drivable).get(input_of(node, COS))
    columns = size_of(table.shape[-1]).number if table is not None and table.shape else None
    if columns is None:
        context.cannot(f"the width of the rotary tables of the node {describe_op(node)} is not known")
    return columns


def _list_sizes(heads: int, groups: int, width: int, table: int) -> dict[str, list[int]]:
    """The shapes and lengths of the texts, for heads of a width and rotary tables of so many columns, or 0."""
    rows, rest = [0, 0, groups, width], width - 2 * table
    sizes = {"sizes": [heads * width, groups * width, groups * width], "flat": [0, 0, heads * width]}
    sizes |= {"query_form": [0, 0, heads, width], "key_form": rows, "value_form": rows}
    sizes |= {"times": [1, 1, heads // groups, 1, 1], "whole_form": [0, heads, -1, width]}
    return sizes | {"parts": [table] * 2 + [rest] * bool(rest)}


def _join_texts(*, repeats: bool, rotated: int, capped: bool) -> str:
    """The nodes from query, key and value to the result; a head is rotated in so many parts, or not at all."""
    query, key = ("query_rotated", "key_rotated") if rotated else ("query_heads", "key_heads")
    whole = {x: f"{x}_all" if repeats else f"{x}_joined" for x in ("key", "value")}
    text = [*(HEADS.format(x=x) for x in ("query", "key", "value")), TABLES * bool(rotated)]
    text += [ROTATED.format(x=x, rest=f", {x}_rest" * (rotated - 2)) for x in ("query", "key") if rotated]
    text += [JOINED.format(key=key), *(REPEATED.format(x=x) for x in whole if repeats)]
    text += [SCORES.format(query=query, **whole), CAPPED * capped]
    return "".join([*text, MIXED.format(scores="capped" if capped else "scores", **whole)])


@dataclass(eq=False, repr=False)
class _Writer(GraphWriter):
    """Writes fragments of ONNX text; `names` are the values that all layers share."""

    graph: Graph
    names: dict[str, str] = field(default_factory=dict)

    def text(self, text: str, names: Mapping[str, str]) -> dict[str, str]:
        """Add the nodes of a text; `names` are those of its values that are there already, or wanted."""
        made = dict(names)
        for node in parser.parse_graph(f"fragment () => () {{{text}}}").node:
            for values in (node.input, node.output):
                values[:] = [made.get(one) or made.setdefault(one, self.fresh(one)) for one in values]
            node.name = node.output[0]
            self.nodes.append(node)
        return made

    def write(self, node: NodeProto, pair: tuple[Slot, Slot], numbers: Mapping[str, float], table: int | None) -> None:
        """Write one attention, whose rotary tables have so many columns."""
        self.names = self.names or self._count_tokens(pair[0])
        heads, groups, width = int(numbers["num_heads"]), int(numbers["kv_num_heads"]), pair[0].size("head_dim") or 0
        sizes = _list_sizes(heads, groups, width, table or 0)
        parts = {"query": 0, "key": KEY, "value": VALUE} if input_of(node, KEY) else {"packed": 0}
        names = self.names | dict(zip(OUTPUTS, node.output, strict=False))
        names |= {"past_key": pair[0].past, "past_value": pair[1].past}
        names |= {"cos_table": input_of(node, COS), "sin_table": input_of(node, SIN)}
        names |= {name: node.input[at] for name, at in parts.items()}
        names |= {name: self.numbers(size) for name, size in sizes.items()}
        names["positions"] = input_of(node, POSITIONS) or names["positions"]
        names["seen"] = self._see(int(numbers.get(WINDOW_SIZE, 0)))
        (kind, lowest), cap = LOWEST[pair[0].dtype], numbers.get("softcap") or 0.0
        scale = numbers.get("scale") or 1 / math.sqrt(width)
        for name, real in (("scale", scale), ("cap", cap), ("lowest", lowest)):
            number = TensorProto(data_type=TensorProto.FLOAT, float_data=[real])
            names[name] = self.node(name, "Cast", [self.tensor(name, number)], to=kind)
        text = _join_texts(repeats=heads > groups, rotated=len(sizes["parts"]) * bool(table), capped=bool(cap))
        self.text(APART * ("packed" in parts) + text, names)

    def _see(self, window: int) -> str:
        """The columns that each row sees, in a window of so many where it is above 0; written once for all layers."""
        name = f"seen {window}" if window > 0 else "seen"
        if name not in self.names:
            self.names[name] = self.text(WINDOW, self.names | {"window": self.numbers([window], [])})["seen_inside"]
        return self.names[name]

    def _count_tokens(self, slot: Slot) -> dict[str, str]:
        """Write positions, and which columns each row sees."""
        mask, tokens = self.graph.port("attention_mask"), self.graph.port("token_ids") or self.graph.port("embeddings")
        assert tokens is not None  # noqa: S101 - refused before
        given = {name: self.numbers(list(one), dims) for name, (one, dims) in NUMBERS.items()}
        given |= {"past": slot.past, "tokens": tokens.name, "at_new": self.numbers([tokens.axes.index("new")], [])}
        given |= {"mask": mask.name} if mask is not None else {}
        return self.text(LENGTHS + (COUNTED if mask is not None else UNCOUNTED), given)
