"""Rows of a batch: their order in a beam search, and whether one influences another in a decode step."""

from typing import Any

import numpy as np

from kvdoctor.decode.calls import Answer, Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use
from kvdoctor.decode.experiments.cache_entries import (
    as_probe,
    by_position,
    change_token,
    read_returned,
    same_entries,
    same_logits,
)
from kvdoctor.decode.experiments.loops import has_exact_rows, takes_rows
from kvdoctor.decode.experiments.one_token import each_row_alone
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

ORDER = (2, 0, 0, 4, 3)
"""Which row each beam goes on from: one is dropped, one comes twice."""


def reorder(builder: FeedBuilder) -> Calls:
    """Five beams; after one step each goes on from another row, and must give that row's logits."""
    if builder.contract.new_tokens is None:
        expected = yield from builder.whole()
    else:
        expected = yield from each_row_alone(builder, builder.scenario.total)
    start, total = builder.scenario.prompt, builder.scenario.total
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    answer = yield builder.decode(start, start + 1, past, expected[:, start : start + 1])
    unmoved = builder.carry(past, answer, "held")
    past, moved, expected = (
        builder.reorder_past(unmoved, ORDER),
        builder.rows(ORDER),
        expected[builder.token_rows(ORDER)],
    )
    for position in range(start + 1, total):
        answer = yield moved.decode(position, position + 1, past, expected[:, position : position + 1])
        past = moved.carry(past, answer, "held")
    wanted = expected[:, start + 1 : start + 2]
    yield moved.decode(start + 1, start + 2, unmoved, wanted, kind="control", label="a cache left in its order")


def why_batch(builder: FeedBuilder) -> Decision:
    """Noise in the cache of one row, of each kind in turn, must not change the logits or the cache of the other."""
    start = builder.scenario.prompt
    answer = yield as_probe(builder.prefill(start))
    if answer.failed:
        return None
    past = builder.carry(None, answer, "held")
    step = yield as_probe(builder.decode(start, start + 1, past))
    if step.failed:
        return None
    for row in (0, 1):
        other = 1 - row
        for kind in dict.fromkeys(slot.kind for slot in builder.contract.slots if "batch" in slot.axes):
            changed = yield as_probe(builder.decode(start, start + 1, _noisy(builder, past, kind, row)))
            if what := _changed_in(builder, other, changed, step):
                return Cause(
                    "batch-rows-interact",
                    f"in a step on a past of {start}, {what} of row {other} change with the {kind} cache of row {row}",
                )
        changed = yield as_probe(
            change_token(builder, start, row * builder.contract.codebooks).decode(start, start + 1, past)
        )
        if what := _changed_in(builder, other, changed, step):
            return Cause(
                "batch-rows-interact",
                f"in a step on a past of {start}, {what} of row {other} change with the token of row {row}",
            )
    return None


def _changed_in(builder: FeedBuilder, row: int, one: Answer, other: Answer) -> str | None:
    """What two steps give a row differently, in words: its logits, or what is returned of its cache."""
    if one.failed:
        return None
    if not same_logits(one.logits[[row]], other.logits[[row]], builder.tolerance):
        return "the logits"
    for slot in (slot for slot in by_position(builder.contract) if "batch" in slot.axes):
        ours, theirs = (
            np.take(read_returned(slot, answer, False), [row], axis=slot.axes.index("batch")) for answer in (one, other)
        )
        if not same_entries(ours, theirs, builder.tolerance):
            return f"the entries in {slot.present}"
    return None


def _noisy(builder: FeedBuilder, past: Past, kind: str, row: int) -> Past:
    """The past with noise in one row of the slots of a kind."""
    changed: dict[str, Any] = dict(past)
    rng = np.random.default_rng(13)
    for slot in builder.contract.of_kind(kind):
        if "batch" not in slot.axes:
            continue
        tensor = as_array(past[slot.past]).copy()
        at = (slice(None),) * slot.axes.index("batch") + (row,)
        noise = rng.standard_normal(tensor[at].shape) * max(float(np.std(tensor.astype(np.float64))), 1e-3)
        tensor[at] = noise.astype(tensor.dtype)
        changed[slot.past] = tensor
    return Past(changed, past.length)


EXPERIMENTS = (
    Experiment(
        "why-batch",
        "whether one row of a batch influences the other in a step",
        why_batch,
        Scenario(batch=2),
        lambda contract: has_exact_rows(contract) if contract.new_tokens is None else takes_rows(contract),
        judged=False,
        shown=False,
        explains=("batch",),
        order=41,
    ),
    Experiment(
        "beam-reorder",
        "the held loop with five beams whose cache is reordered after a step",
        reorder,
        Scenario(batch=len(ORDER), steps=3),
        takes_rows,
        changes_feeds=True,
        use=Use("rows of the cache reordered", required="beam", after=("batch", "batch-rows")),
        order=7,
    ),
)
