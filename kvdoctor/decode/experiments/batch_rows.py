"""Rows of a batch: their order in a beam search, and whether one influences another in a decode step."""

from kvdoctor.decode.calls import Answer, Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, unjudged
from kvdoctor.decode.experiments.cache_entries import as_probe, same_entries, same_logits
from kvdoctor.decode.experiments.loops import has_exact_rows, takes_rows
from kvdoctor.decode.experiments.one_token import right_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

ORDER = (2, 0, 0, 4, 3)
"""Which row each beam goes on from: one is dropped, one comes twice."""
OTHERS = "are not those that it gets alone"


@Experiment(
    "beam-reorder",
    "the held loop with five beams whose cache is reordered after a step",
    Scenario(batch=len(ORDER), steps=3),
    takes_rows,
    changes_feeds=True,
    use=Use("rows of the cache reordered", required="beam", after=("batch", "batch-rows")),
    order=7,
)
def reorder(builder: FeedBuilder) -> Calls:
    """Five beams; after one step each goes on from another row, and must give that row's logits."""
    expected = yield from right_logits(builder)
    start, total = builder.scenario.prompt, builder.scenario.total
    past = yield from builder.begin(expected)
    _, unmoved = yield from builder.go_on(past, start, start + 1, expected)
    moved, expected = builder.rows(ORDER), expected[builder.logits_rows(ORDER)]
    yield from moved.go_on(builder.reorder_past(unmoved, ORDER), start + 1, total, expected)
    wanted = expected[:, start + 1 : start + 2]
    yield moved.decode(start + 1, start + 2, unmoved, wanted, kind="control", label="a cache left in its order")


@unjudged(
    "why-batch",
    "whether a row has the same cache and logits in a batch as alone",
    Scenario(batch=2),
    lambda contract: has_exact_rows(contract) if contract.new_tokens is None else takes_rows(contract),
    explains=("batch",),
    order=41,
)
def why_batch(builder: FeedBuilder) -> Decision:
    """The prompt and a step of two rows, and of each row alone on its part of the same cache."""
    start = builder.scenario.prompt
    first = yield as_probe(builder.prefill(start))
    if first.failed:
        return None
    past = builder.carry(None, first, "held")
    step = yield as_probe(builder.decode(start, start + 1, past))
    for row in () if step.failed else range(builder.scenario.batch):
        alone = builder.row(row)
        answer = yield as_probe(alone.prefill(start))
        if what := _differing(builder, row, answer, first):
            return Cause("batch-rows-interact", f"after the prompt {what} {OTHERS}")
        answer = yield as_probe(alone.decode(start, start + 1, builder.reorder_past(past, (row,))))
        if what := _differing(builder, row, answer, step):
            return Cause("batch-rows-interact", f"in a step on a past of {start}, {what} {OTHERS} on the same cache")
    return None


def _differing(builder: FeedBuilder, row: int, alone: Answer, together: Answer) -> str | None:
    """What differs for a row between a call of it alone and one of all rows: its logits, or what is returned of it."""
    if alone.failed:
        return None
    if not same_logits(alone.logits, together.logits[builder.logits_rows((row,))], builder.tolerance):
        return f"the logits of row {row} in a batch of {builder.scenario.batch}"
    for slot in builder.contract.slots:
        for name in (name for name in alone.outputs if name in (slot.filled_by, slot.present)):
            ours, theirs = (answer.outputs[name].array() for answer in (alone, together))
            mine = builder.take_rows(slot, theirs, (row,)) if theirs.size else theirs
            if ours.shape == mine.shape and not same_entries(ours, mine, builder.tolerance):
                return f"the entries of row {row} in {name}, in a batch of {builder.scenario.batch},"
    return None
