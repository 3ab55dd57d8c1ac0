"""A prefix that is computed once: continued by several sequences, and saved to a file for another process.

Both are what prompt caching does. The cache of the prefix must hold all that a continuation needs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import NothingToRun, Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Obstacle, Use, several_tokens
from kvdoctor.decode.experiments.loops import has_exact_rows, takes_any_batch
from kvdoctor.decode.feeds import FeedBuilder

SEQUENCES = 3
STEPS = 4
SAVED = "prefix.cache.npz"
FAILING_ALIKE = ("batch", "batch-rows", "beam-reorder")


def share(builder: FeedBuilder) -> Calls:
    """One prompt alone; its cache repeated for each sequence; each goes on with tokens of its own."""
    start, total = builder.scenario.prompt, builder.scenario.total
    alone = yield builder.prefill(start)
    prefix = builder.carry(None, alone, "held")
    together = _branch(builder)
    expected = yield from together.whole()
    past = first = builder.reorder_past(prefix, (0,) * SEQUENCES)
    for position in range(start, total):
        answer = yield together.decode(position, position + 1, past, expected[:, position : position + 1])
        past = together.carry(past, answer, "held")
    yield from together.controls(start, start + 1, first, expected)


def _branch(builder: FeedBuilder) -> FeedBuilder:
    """As many sequences with one prompt and other tokens behind it; the first is that of the builder."""
    together = builder.rows((0,) * SEQUENCES)
    tokens, books = together.tokens.copy(), builder.contract.codebooks
    for row in range(1, SEQUENCES):
        tokens[row * books : (row + 1) * books, builder.scenario.prompt :] += row
    return replace(together, tokens=tokens)


def save(builder: FeedBuilder) -> Calls:
    """A prompt whose cache is written to a file, and one step on it."""
    file = _find_file(builder)
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    arrays = {f"past:{name}": as_array(value) for name, value in past.items()}
    np.savez(file, length=np.array(past.length), **arrays)  # type: ignore[arg-type]
    yield builder.decode(start, start + 1, past, expected[:, start : start + 1])
    yield from builder.controls(start, start + 1, past, expected)


def restore(builder: FeedBuilder) -> Calls:
    """The cache of that file in a process that did not make it; the sequence goes on."""
    file = _find_file(builder)
    if not file.exists():
        raise NothingToRun("no cache of a prefix was saved")
    expected = yield from builder.whole()
    past = first = _read_past(file)
    file.unlink()  # what another run of this process would find is not of its model
    start = past.length
    for position in range(start, builder.scenario.total):
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")
    yield from builder.controls(start, start + 1, first, expected)


def _read_past(file: Path) -> Past:
    with np.load(file) as kept:
        values = {name.removeprefix("past:"): kept[name] for name in kept.files if name.startswith("past:")}
        return Past(values, int(kept["length"]))


def _find_file(builder: FeedBuilder) -> Path:
    if builder.scratch is None:
        raise NothingToRun("there is no folder to save a cache in")
    return builder.scratch / SAVED


def find_obstacles(contract: CacheContract) -> Iterator[Obstacle]:
    """The slots that cannot be repeated for several sequences. One sequence after the other can still go on from them.

    A counter, and what one tensor of a tuned prefix gives all rows, serve any number of sequences.
    """
    found: dict[str, list[str]] = {}
    for slot in contract.slots:
        if slot.growth == "paged":
            found.setdefault("its blocks belong to the serving engine, which shares them itself", []).append(slot.past)
        elif not {"batch", "batch_heads"} & set(slot.axes) and slot.kind != "counter" and not slot.is_given:
            found.setdefault("it has no axis for the sequences of a batch", []).append(slot.past)
    for reason, names in found.items():
        advice = "export again with a batch axis in every cache; until then let one sequence after the other go on"
        yield Obstacle(tuple(names), reason, advice)


EXPERIMENTS = (
    Experiment(
        "prefix-sharing",
        f"the cache of one prompt repeated for {SEQUENCES} sequences that go on from it",
        share,
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
    ),
    Experiment(
        "saved-prefix",
        "the cache of a prompt written to a file",
        save,
        Scenario(steps=STEPS),
        several_tokens,
        thorough=True,
        shown=False,
        use=Use("a prefix that is saved", required="prefix-sharing"),
        order=98,
    ),
    Experiment(
        "restored-prefix",
        "this file read by a process that is started for it, and the sequence continued",
        restore,
        Scenario(steps=STEPS),
        several_tokens,
        thorough=True,
        fresh=True,
        use=Use("a prefix that is saved to a file and restored", required="prefix-sharing", needed=True),
        order=99,
    ),
)
