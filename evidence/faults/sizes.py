"""Sizes of the trace that became a part of the graph."""

import numpy as np

from evidence.faults.base_models import ALL, LONE, MERGED, SPELLED_OUT, SPLIT, Export
from evidence.faults.registry import fault


@fault("step-fails", "a table of the mask has 6 columns: the first step with more fails", SPELLED_OUT)
def table_of_6(export: Export) -> None:
    _table(export, 6)


@fault("step-fails", "the length of the past in the second step was traced: others fail", SPELLED_OUT)
def past_traced(export: Export) -> None:
    body = export.later
    past = body.self_pasts()[0]

    def of_length_4(old: str) -> str:
        shape = body.op("Where", body.has_past(), np.array([0, 0, 4, 0]), np.array([0, 0, 0, 0]))
        return body.op("Reshape", old, shape)

    body.replace_inside(past, of_length_4)


def _table(export: Export, size: int) -> None:
    """Add a row of zeros of a fixed length to the scores, cut to the length of the cache."""
    body = export.later
    softmax = body.attentions()[0]
    row = np.zeros((1, 1, 1, size), np.float32)
    cut = body.op("Slice", row, np.array([0]), body.size(softmax.input[0], 3), np.array([3]))
    softmax.input[0] = body.op("Add", softmax.input[0], cut)


@fault(
    "chunk-fails",
    "steps take one new token only, although they declare any number",
    ("gpt2", "llama-gqa", "opt", *SPLIT),
    severity="warning",
)
def one_token_only(export: Export) -> None:
    body = export.later
    norm = body.norms()[0]
    body.replace(norm, lambda old: body.with_past_shape(old, 1, 1))


@fault("step-fails", "steps take a batch of 1 only, although they declare any", (*LONE, *SPLIT), severity="warning")
def one_row_only(export: Export) -> None:
    body = export.later
    body.replace(body.norms()[0], lambda old: body.with_past_shape(old, 0, 1))


@fault(
    "step-fails",
    "steps take 7 encoder states only, although they declare any number",
    ("marian", "t5", "marian-pair", "t5-pair", "t5-tf5"),
    severity="warning",
)
def one_encoder_length(export: Export) -> None:
    body = export.later
    past = next(name for name in body.pasts if name not in body.self_pasts())
    body.replace_inside(past, lambda old: body.op("Reshape", old, np.array([0, 0, 7, 0])))


@fault(
    "cached-differs",
    "steps see the first 7 encoder states only",
    ("marian", "t5", "marian-pair", "t5-pair", "t5-tf5"),
    severity="warning",
)
def encoder_cut(export: Export) -> None:
    body = export.later
    for softmax in body.attentions(cross=True):
        columns = body.count_up(body.size(softmax.input[0], 3))
        beyond = body.op("Greater", columns, np.array(6))
        softmax.input[0] = body.op("Where", beyond, np.array(-1e9, np.float32), softmax.input[0])


@fault(
    "empty-past-rejected",
    "the first entry of the past is read, also where there is none",
    ("gpt2", "llama-gqa", "opt", "bloom", "qwen2", "llama-genai"),
)
def first_entry_read(export: Export) -> None:
    body = export.later
    past = body.self_pasts()[0]

    def read(old: str) -> str:
        first = body.op("Gather", old, np.array([0]), axis=2)
        return body.op("Add", old, body.op("Mul", first, np.array(0, np.float32)))

    body.replace_inside(past, read)


@fault("past-axis-frozen", "the length of the past is declared as 1", (*SPLIT, *LONE))
def past_declared(export: Export) -> None:
    for past in export.later.self_pasts():
        _declare(export, past, 2, 1)


@fault("batch-axis-frozen", "the batch is declared as 1", ALL, severity="warning")
def batch_declared(export: Export) -> None:
    export.beside.pop("export.json", None)  # says with which sizes the graph was traced
    for value in (*export.later.model.graph.input, *export.first.model.graph.input):
        if value.type.tensor_type.shape.dim and value.name != "use_cache_branch":
            _freeze(value.type.tensor_type.shape.dim[0], 1)


@fault(
    "sequence-axis-frozen",
    "the number of new tokens is declared as 1",
    ("gpt2", "llama-gqa", "opt", "bloom", *MERGED),
    severity="warning",
)
def new_declared(export: Export) -> None:
    _declare(export, export.later.token_ids, 1, 1)
    if "position_ids" in export.later.inputs:
        _declare(export, "position_ids", 1, 1)


def _declare(export: Export, name: str, axis: int, size: int) -> None:
    value = next(v for v in export.later.model.graph.input if v.name == name)
    _freeze(value.type.tensor_type.shape.dim[axis], size)


def _freeze(dim: "object", size: int) -> None:
    dim.Clear()
    dim.dim_value = size


@fault("axis-name-collision", "past and present declare their lengths by one name", (*LONE, *SPLIT), severity="note")
def one_name(export: Export) -> None:
    body = export.later
    for past, now in body.self_slots():
        for value in (*body.model.graph.input, *body.model.graph.output):
            if value.name in (past, now):
                value.type.tensor_type.shape.dim[2].dim_param = "past_length"
