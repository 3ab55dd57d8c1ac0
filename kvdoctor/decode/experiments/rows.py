"""Rows: of a batch in a beam search and in a decode step, of an encoder in a prompt, and of sequences with one prefix.

A prefix that is computed once is continued by several sequences: the cache of it must hold all that they need.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Scenario
from kvdoctor.decode.experiments import (
    Calls,
    Decision,
    Experiment,
    Obstacle,
    Use,
    as_probe,
    prefill,
    several_tokens,
    unjudged,
)
from kvdoctor.decode.experiments.cache_entries import same_entries, same_logits
from kvdoctor.decode.experiments.loops import FEW, decode_loop, has_exact_rows, takes_any_batch, takes_rows
from kvdoctor.decode.experiments.one_token import right_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import ROWS_DIFFER, Cause
from kvdoctor.errors import CannotCheck

ORDER = (2, 0, 0, 4, 3, 8, 7, 5, 6)
"""Which row each beam goes on from: one is dropped, one comes twice."""
OTHERS = "are not those that it gets alone"


@Experiment(
    "beam-reorder",
    "the held loop with nine beams whose cache is reordered after a step",
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
    first, past = yield from prefill(builder, start)
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


MOST_ROWS = 64
"""Rows in the prompt of the loop: an image may have a thousand, and all of them are one prefill."""


def has_rows(contract: CacheContract) -> str | None:
    """There must be an encoder of images or audio, and a graph that makes the embeddings of the other tokens."""
    if not contract.features:
        return "no encoder makes rows for the embeddings"
    if "embed" not in contract.phases:
        return "no graph makes the embeddings of the other tokens"
    return several_tokens(contract)


@Experiment(
    "encoder-rows",
    "whether each encoder returns one row per placeholder",
    applies=has_rows,
    with_features=True,
    order=6,
)
def count_rows(builder: FeedBuilder) -> Decision:
    """Each encoder once: as many rows as the prompt has placeholders for one image or one audio clip."""
    yield from ()
    made = builder.count_rows() if builder.count_rows is not None else {}
    declared = [one for one in builder.contract.features if one.rows is not None and one.phase in made]
    for one in declared:
        if made[one.phase] != one.rows:
            file = builder.contract.graph(one.phase).file
            thing = "an image" if one.phase == "vision" else "an audio clip"
            returned = f"{file} returns {made[one.phase]} rows for {thing}"
            return Cause(ROWS_DIFFER, f"{returned}, and the prompt has {one.rows} placeholders ({one.declared})")
    if not declared:
        raise CannotCheck("no config gives the number of placeholders")
    return None


@Experiment(
    "rows-in-prompt",
    "the held loop after a prompt with the rows of the encoders",
    Scenario(prompt=MOST_ROWS + 2, steps=FEW),
    applies=has_rows,
    use=Use("the rows of an encoder in the prompt", "error"),
    changes_feeds=True,
    with_features=True,
    order=6,
)
def loop_with_rows(builder: FeedBuilder) -> Calls:
    """The held loop after a prompt with the rows between two tokens; without the rows the logits must be others."""
    made = builder.count_rows() if builder.count_rows is not None else {}
    rows = min(sum(made.values()), MOST_ROWS)
    limit = builder.contract.usable_length
    if limit is not None:
        rows = min(rows, limit - FEW - 2)
    if rows < 1:
        raise CannotCheck("there is no room for the rows of an encoder")
    text = builder.resized(rows + 2, rows + 1 + FEW)
    tokens = text.tokens.copy()
    tokens[:, 1 : rows + 1] = -1 - np.arange(rows)
    mixed = replace(text, tokens=tokens)
    yield from decode_loop(mixed, "held")
    expected = yield from mixed.whole(rows + 2)
    yield replace(text.prefill(rows + 2, expected), kind="control", label="rows of the encoder left out")


SEQUENCES = 3
STEPS = 4
FAILING_ALIKE = ("batch", "batch-rows", "beam-reorder")


def find_obstacles(contract: CacheContract) -> Iterator[Obstacle]:
    """The slots that cannot be repeated for several sequences. One sequence after the other can still go on from them.

    A counter, and what one tensor of a tuned prefix gives all rows, serve any number of sequences.
    """
    found: dict[str, list[str]] = {}
    for slot in contract.slots:
        if slot.growth == "paged":
            found.setdefault("its blocks belong to the serving engine, which shares them itself", []).append(slot.past)
        elif not {"batch", "batch_heads"} & set(slot.axes) and slot.kind != "counter" and not slot.is_given:
            found.setdefault("no axis for the sequences of a batch", []).append(slot.past)
    for reason, names in found.items():
        advice = "export again with a batch axis in every cache; until then let one sequence after the other go on"
        yield Obstacle(tuple(names), reason, advice)


@Experiment(
    "prefix-sharing",
    f"the cache of one prompt repeated for {SEQUENCES} sequences that go on from it",
    Scenario(steps=STEPS),
    lambda contract: has_exact_rows(contract) or takes_any_batch(contract),
    thorough=True,
    changes_feeds=True,
    use=Use(
        "one prefix shared by several sequences",
        required="prefix-sharing",
        after=FAILING_ALIKE,
        needed=True,
        obstacles=find_obstacles,
    ),
    order=25,
)
def share(builder: FeedBuilder) -> Calls:
    """One prompt alone; its cache repeated for each sequence; each goes on with tokens of its own."""
    start, total = builder.scenario.prompt, builder.scenario.total
    prefix = yield from builder.begin()
    together = _branch(builder)
    expected = yield from together.whole()
    first = builder.reorder_past(prefix, (0,) * SEQUENCES)
    yield from together.go_on(first, start, total, expected)
    yield from together.controls(start, start + 1, first, expected)


def _branch(builder: FeedBuilder) -> FeedBuilder:
    """As many sequences with one prompt and other tokens after it; the first is that of the builder."""
    together = builder.rows((0,) * SEQUENCES)
    tokens, books = together.tokens.copy(), builder.contract.codebooks
    for row in range(1, SEQUENCES):
        tokens[row * books : (row + 1) * books, builder.scenario.prompt :] += row
    return replace(together, tokens=tokens)
