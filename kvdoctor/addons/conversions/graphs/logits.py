"""Computes the logits of the wanted rows alone: those of the last token, or of as many as the loop asks for.

Requires: an LM head whose rows reach the logits one by one; opset 10. Ensures: a Slice in front of the head, so that it
multiplies the wanted rows only. `selectable` adds the input `num_logits_to_keep`, as transformers and transformers.js
name it: the number of last rows, 0 for all.
"""

from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion, forget_trace
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.analysis.lm_head import Head, NoHead, describe_op, find_ends, find_heads
from kvdoctor.choices import LogitsRows
from kvdoctor.contract import Port
from kvdoctor.model.edit import GraphWriter, declare, fresh_name, replace_all, set_size, sort_nodes
from kvdoctor.model.proto import ModelProto, NodeProto, TensorProto
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

KEEP = "num_logits_to_keep"
END = (1 << 63) - 1
COMPARED = (0, 1, 2, 50)
"""The numbers of rows that are asked for in the proof: all, the last, two, and more than there are."""

LAST = (
    "A call returns the logits of its last token alone, float[batch, 1, vocabulary]: take row 0, not row n - 1.",
    "Prompts of different lengths in one batch must be padded on the left: on the right, the last row is padding.",
    "Scoring a prompt and speculative decoding need all rows: a copy with --logits selectable gives them.",
)
SELECTABLE = (
    f"Feed {KEEP}, int64[], in every call: k returns the logits of the last k tokens, 0 those of all.",
    "Feed 1 in a loop that generates, and take the last row; transformers.js feeds 0 if nothing else is asked for.",
)


def convert(context: RepairContext, choice: LogitsRows) -> Converted:
    """Put a Slice in front of each LM head of a stack.

    Raises:
        CannotRepair: the head is not recognized; the message names the node.
    """
    contract = context.drivable
    models = {name: context.model(name) for _, name in context.graphs()}
    try:
        heads = find_heads(contract, models)
    except NoHead as reason:
        context.cannot(str(reason))
    ports = {graph.file: graph.port("logits") for graph in contract.graphs.values()}
    changes = list[Change]()
    for name, model in models.items():
        port = ports[name]
        if port is not None:  # find_heads has looked
            changes += _insert(model, heads[name], port, choice, name)
    if choice == "last":
        return Converted(tuple(changes), LAST, Comparison(rows="last"))
    for name in models:
        changes += forget_trace(context, name)
    return Converted(tuple(changes), SELECTABLE, Comparison(keep=COMPARED))


def _insert(model: ModelProto, heads: tuple[Head, ...], port: Port, choice: LogitsRows, file: str) -> list[Change]:
    writer = GraphWriter(model, prefix="logits_rows")
    if choice == "last":
        starts = writer.numbers([-1], hint="starts")
    else:  # minus the number that is fed: 0 is the first row
        model.graph.input.append(declare(KEEP, TensorProto.INT64, ()))
        starts = writer.node("starts", "Neg", [writer.node("row", "Reshape", [KEEP, writer.numbers([1])])])
    known, ends, axes = writer.known, writer.numbers([END], hint="ends"), writer.numbers([1], hint="axes")
    changes = []
    rows = "the last row" if choice == "last" else f"the last {KEEP} rows"
    for head in heads:
        hidden = head.node.input[head.index]
        kept = fresh_name(f"{hidden}.kept", known)
        name = fresh_name(f"{head.node.name or head.node.output[0]}.rows", known)
        head.graph.node.append(NodeProto(op_type="Slice", name=name, input=[hidden, starts, ends, axes], output=[kept]))
        head.node.input[head.index] = kept
        sort_nodes(head.graph)
        replace_all(head.graph.value_info, [v for v in head.graph.value_info if v.name not in head.values])
        changes.append(Change(file, describe_op(head.node), f"reads every row of {hidden}", f"reads {rows}"))
    sort_nodes(model.graph)
    size = 1 if choice == "last" else fresh_name("kept_sequence_length", known)
    before = port.shape[port.axes.index("new")] if port.shape is not None else None
    _declare(model, port, size)
    changes.append(Change(file, f"output {port.name!r}", f"{before} rows", f"{size} rows"))
    if choice == "selectable":
        changes.append(Change(file, f"input {KEEP!r}", "", "int64[], the number of last rows, 0 for all"))
    return changes


def _declare(model: ModelProto, port: Port, size: int | str) -> None:
    outputs = [value for value in model.graph.output if value.name == port.name]
    for scopes, name in find_ends((model.graph,), port.name):
        outputs += [value for value in scopes[-1].output if value.name == name]
    for value in outputs:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == len(port.axes):
            set_size(dims[port.axes.index("new")], size)


CONVERSION = GraphConversion(
    "logits", order=20, read=lambda asked: asked.logits, title=lambda choice: f"logits {choice}", convert=convert
)
