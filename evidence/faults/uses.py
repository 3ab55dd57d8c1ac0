"""Uses of a cache beyond one sequence, the declared context, and operators that hold a whole attention."""

import numpy as np
import onnx

from evidence.faults.anatomy import Body
from evidence.faults.base_models import GQA, LONE, PAIRED, Export
from evidence.faults.positions import renumber
from evidence.faults.registry import fault


@fault("padding-changes-logits", "the mask of the tokens is not looked at", LONE, severity="warning")
def mask_not_read(export: Export) -> None:
    _ones_instead(export.later, "attention_mask")


@fault(
    "padding-changes-logits",
    "positions are counted from the length of the past, not taken",
    ("gpt2", "opt"),
    severity="warning",
)
def positions_not_read(export: Export) -> None:
    body = export.later

    def counted(ids: str) -> str:
        own = body.op("Add", body.count_up(body.new_length()), body.past_length())
        return body.op("Add", body.op("Mul", ids, np.array(0)), own)

    body.replace_inside("position_ids", counted)


@fault(
    "padding-changes-logits",
    "the mask of the encoder states is not looked at",
    ("marian", "t5", "marian-pair", "t5-pair"),
    severity="warning",
)
def encoder_mask_not_read(export: Export) -> None:
    for body in export.bodies:
        _ones_instead(body, "encoder_attention_mask")


@fault(
    "padding-changes-logits",
    "the steps alone do not look at the mask of the encoder states",
    ("marian", "t5", "marian-pair", "t5-pair"),
    severity="warning",
)
def encoder_mask_not_read_in_steps(export: Export) -> None:
    _ones_instead(export.later, "encoder_attention_mask")


def _ones_instead(body: Body, mask: str) -> None:
    body.replace_inside(mask, lambda old: body.op("Add", body.op("Mul", old, np.array(0)), np.array(1)))


@fault(
    "context-limit-fails",
    "a table of the mask has 55 columns, and 64 tokens are declared",
    ("gpt2", "llama-gqa", "opt", "marian", "whisper", "marian-pair", "whisper-pair"),
    severity="warning",
    thorough=True,
)
def table_of_55(export: Export) -> None:
    for body in export.bodies:
        softmax = body.attentions()[0]
        row = np.zeros((1, 1, 1, 55), np.float32)
        cut = body.op("Slice", row, np.array([0]), body.size(softmax.input[0], 3), np.array([3]))
        softmax.input[0] = body.op("Add", softmax.input[0], cut)


@fault(
    "context-limit-fails",
    "beyond 55 tokens the steps number all new ones alike",
    ("gpt2", "llama-gqa", "opt", "marian", "whisper-pair"),
    severity="warning",
    thorough=True,
)
def positions_end_at_55(export: Export) -> None:
    body = export.later

    def ended(ids: str) -> str:
        over = body.op("Max", body.op("Sub", body.past_length(), np.array([55])), np.array([0]))
        return body.op("Sub", ids, over)

    renumber(body, ended)


@fault(
    "context-limit-fails",
    "beyond 20 tokens all have one number, with a cache and without",
    ("gpt2", "llama-gqa", "opt", "qwen2", "marian", "whisper", "marian-pair", "whisper-pair"),
    severity="warning",
)
def positions_end_at_20(export: Export) -> None:
    for body in export.bodies:
        renumber(body, lambda ids, body=body: body.op("Min", ids, np.array([20])))


@fault("attention-cache-half-wired", "the sum of the mask is given as the place of the last entry", GQA)
def sum_for_last(export: Export) -> None:
    body = export.later
    node = body.producer(body.producer(body.of_type("GroupQueryAttention")[0].input[5]).input[0])
    assert node.op_type == "Sub"
    node.CopyFrom(onnx.helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name))


@fault("graph-unsorted", "the first node of the graph stands last", (*LONE, *PAIRED), severity="note")
def first_node_last(export: Export) -> None:
    def move(folder: "object") -> None:
        model = onnx.load(folder / export.decoder)
        nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
        read = next(i for i, node in enumerate(nodes) if any(set(node.output) & set(n.input) for n in nodes))
        del model.graph.node[:]
        model.graph.node.extend([*nodes[:read], *nodes[read + 1 :], nodes[read]])
        (folder / export.decoder).write_bytes(model.SerializeToString())

    export.after.append(move)


@fault("session-refused", "all nodes bear one name", (*LONE, *PAIRED))
def one_name_for_all(export: Export) -> None:
    for node in export.later.graph.node:
        node.name = "node"
