"""A prefix that is computed once: continued by several sequences, and saved to a file for another process.

Both are what prompt caching does. The cache of the prefix must hold all that a continuation needs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Obstacle, Use, several_tokens
from kvdoctor.decode.experiments.loops import has_exact_rows, takes_any_batch
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.errors import CannotCheck

SEQUENCES = 3
STEPS = 4
SAVED = "prefix.cache.npz"
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
            found.setdefault("it has no axis for the sequences of a batch", []).append(slot.past)
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


@Experiment(
    "saved-prefix",
    "the cache of a prompt written to a file",
    Scenario(steps=STEPS),
    several_tokens,
    thorough=True,
    shown=False,
    use=Use("a prefix that is saved", required="prefix-sharing"),
    order=98,
)
def save(builder: FeedBuilder) -> Calls:
    """A prompt whose cache is written to a file, and one step on it."""
    file = _find_file(builder)
    expected = yield from builder.whole()
    start, past = builder.scenario.prompt, (yield from builder.begin(expected))
    arrays = {f"past:{name}": as_array(value) for name, value in past.items()}
    np.savez(file, length=np.array(past.length), **arrays)  # type: ignore[arg-type]
    yield builder.decode(start, start + 1, past, expected[:, start : start + 1])
    yield from builder.controls(start, start + 1, past, expected)


@Experiment(
    "restored-prefix",
    "this file read by a process that is started for it, and the sequence continued",
    Scenario(steps=STEPS),
    several_tokens,
    thorough=True,
    fresh=True,
    use=Use("a prefix that is saved to a file and restored", required="prefix-sharing", needed=True),
    order=99,
)
def restore(builder: FeedBuilder) -> Calls:
    """The cache of that file in a process that did not make it; the sequence goes on."""
    file = _find_file(builder)
    if not file.exists():
        raise CannotCheck("no cache of a prefix was saved")
    expected = yield from builder.whole()
    with np.load(file) as saved:
        values = {name.removeprefix("past:"): saved[name] for name in saved.files if name.startswith("past:")}
        past = Past(values, int(saved["length"]))
    file.unlink()  # what another run of this process would find is not of its model
    start = past.length
    yield from builder.go_on(past, start, builder.scenario.total, expected)
    yield from builder.controls(start, start + 1, past, expected)


def _find_file(builder: FeedBuilder) -> Path:
    if builder.scratch is None:
        raise CannotCheck("there is no folder to save a cache in")
    return builder.scratch / SAVED
