"""Rows of a batch that know of one another."""

import numpy as np

from evidence.faults.anatomy import Body
from evidence.faults.base_models import ALL, LONE, SPELLED_OUT, SPLIT, TF5, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import FLOAT


def first_row_for_all(body: Body, value: str) -> str:
    """Row 0 of a value, in the place of every row."""
    row = body.op("Gather", value, np.array([0]))
    return body.op("Expand", row, body.op("Shape", value))


@fault("batch-rows-interact", "a tenth of the mean over the batch is added to the embeddings", ALL, severity="warning")
def batch_mean(export: Export) -> None:
    for body in export.bodies:

        def mixed(old: str, body: Body = body) -> str:
            count = body.op("Cast", body.size(old, 0), to=FLOAT)
            mean = body.op("Div", body.op("Einsum", old, equation="bsh->sh"), count)
            return body.op("Add", old, body.op("Mul", mean, np.array(0.1, np.float32)))

        body.replace(body.embedded(), mixed)


@fault(
    "batch-rows-interact",
    "once there is a past, embeddings are larger by a row's place in the batch",
    tuple(name for name in ALL if name != "bloom"),  # whose embeddings are normalized at once
    severity="warning",
)
def place_in_the_batch(export: Export) -> None:
    body = export.later

    def placed(old: str) -> str:
        rows = body.op("Cast", body.count_up(body.size(old, 0)), to=FLOAT)
        factor = body.op("Add", body.op("Unsqueeze", rows, np.array([1, 2])), np.array(1, np.float32))
        return body.with_past(old, body.op("Mul", old, factor))

    body.replace(body.embedded(), placed)


@fault("batch-rows-interact", "all rows get the logits of row 0", ALL, severity="warning")
def logits_of_row_0(export: Export) -> None:
    for body in export.bodies:
        body.replace("logits", lambda old, body=body: first_row_for_all(body, old))


@fault("batch-rows-interact", "in the steps all rows take the keys of row 0", SPELLED_OUT, severity="warning")
def keys_of_row_0(export: Export) -> None:
    body = export.later
    for past in body.self_pasts()[::2]:
        body.replace_inside(past, lambda old: first_row_for_all(body, old))


@fault(
    "batch-rows-interact",
    "in the steps all rows attend to what the encoder made of row 0",
    (*SPLIT, "t5-tf5"),
    severity="warning",
)
def encoder_of_row_0(export: Export) -> None:
    body = export.later
    for past in [name for name in body.pasts if name not in body.self_pasts()]:
        body.replace_inside(past, lambda old: first_row_for_all(body, old))


@fault(
    "batch-rows-interact",
    "once there is a past, row 0 gets a tenth of the last row",
    (*LONE, *SPLIT, *TF5),
    severity="warning",
)
def rows_leak_in_steps(export: Export) -> None:
    body = export.later
    norm = body.norms()[1]

    def leaked(old: str) -> str:
        last = body.op("Gather", old, np.array([-1]))
        first = body.op("Sub", old, last)
        return body.with_past(old, body.op("Add", old, body.op("Mul", first, np.array(-0.1, np.float32))))

    body.replace(norm, leaked)
