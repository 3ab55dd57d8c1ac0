"""The loops that people write: does decoding with the cache give the logits of the reference run?

In other sizes, with an adapter (LoRA), in other sessions and fed in other ways too: dummies or the cached branch on the
first step, and workarounds for a loop that fails.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Loop, Past, Scenario, Value, Way
from kvdoctor.decode.experiments import Calls, Experiment, Use, always, grows, one_step, several_tokens
from kvdoctor.decode.experiments.cache_entries import fill_with, growing, has_length
from kvdoctor.decode.experiments.multi_turn import overlapping
from kvdoctor.decode.experiments.one_token import each_row_alone, keep_logits, longer
from kvdoctor.decode.feeds import FeedBuilder

ROWS, FEW = (0, 1, 2, 3, 4, 0, 1, 2, 4), 3
"""The rows of a larger batch: a graph may number eight of them alone; decode steps of a loop with other sizes."""
STEPS_WITHOUT_CACHE = 3

workaround = partial(Experiment, judged=False, unless_passed="plain-loop")


def has_exact_rows(contract: CacheContract) -> str | None:
    """Dynamic quantization has one scale for all rows: they interact by design."""
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization takes one scale from all rows"
    return takes_any_batch(contract)


def has_something_to_hold(contract: CacheContract) -> str | None:
    """The held loop differs from the plain one only where a returned slot is to be held."""
    if any(slot.present is not None for slot in contract.held):
        return several_tokens(contract)
    return "no returned slot has to be held: the same as the plain loop"


def takes_encoder_states(contract: CacheContract) -> str | None:
    """Encoder lengths can be varied only where there is an encoder, and where its length is not a number."""
    made = [slot for slot in contract.slots if slot.filled_in == "encode" and "encoder" in slot.axes]
    if several_tokens(contract) or not (contract.has_encoder_states or made):
        return several_tokens(contract) or "the decoder takes no encoder states"
    if contract.encoder_length is not None or any(slot.size("encoder") is not None for slot in made):
        return "the encoder length is a fixed number"
    if "encode" in contract.phases and not any(
        "encoder_input" in port.axes and port.size("encoder_input") is None for port in contract.graph("encode").inputs
    ):
        return "the encoder takes one length only"
    return None


def takes_rows(contract: CacheContract) -> str | None:
    """A batch is compared with a reference run; where a call takes one token, with each row alone."""
    if contract.new_tokens != 1:
        return takes_any_batch(contract)
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization takes one scale from all rows"
    tokens = [p for p in contract.graph("decode").inputs if p.role in ("token_ids", "token_and_position", "embeddings")]
    states = [slot for slot in contract.slots if slot.kind != "counter" and not slot.is_given]
    axes = [*(port.axes for port in tokens), *(slot.axes for slot in states)]
    if not all({"batch", "batch_heads", "batch_codebooks"} & set(one) for one in axes):
        return "the graph has no batch axis"
    return has_free_batch(contract)


def takes_adapter(contract: CacheContract) -> str | None:
    """A graph has inputs for the matrices of an adapter."""
    ports = (port for graph in contract.graphs.values() for port in graph.inputs)
    if not any(port.role == "adapter" for port in ports):
        return "no input takes an adapter"
    return several_tokens(contract)


@Experiment("plain-loop", "every returned slot fed back, one token a step", applies=always, order=1)
def plain(builder: FeedBuilder) -> Calls:
    """Feed every returned slot back."""
    tokens = builder.contract.new_tokens
    if tokens is None:
        yield from decode_loop(builder, "plain")
    else:
        yield from replayed(builder) if tokens == 1 else overlapping(builder)


@Experiment("held-loop", "the cross-attention cache of the prefill held", applies=has_something_to_hold, order=2)
def held(builder: FeedBuilder) -> Calls:
    """Feed back what grows, hold what the contract holds."""
    yield from decode_loop(builder, "held")


@Experiment(
    "batch",
    "the held loop with batch 2",
    Scenario(batch=2),
    takes_rows,
    use=Use("a batch of 2", required="batch"),
    order=3,
)
@Experiment(
    "one-token-prompt",
    "the held loop after a prompt of one token",
    Scenario(prompt=1, steps=Scenario().total),
    use=Use("a prompt of one token", "error"),
    order=3,
)
@Experiment(
    "other-encoder-length",
    "the held loop with encoder length 11",
    Scenario(encoder=11),
    applies=takes_encoder_states,
    use=Use("an encoder length other than the first"),
    order=4,
)
def held_shortly(builder: FeedBuilder) -> Calls:
    """The held loop for a few steps of the sequence, which is enough where the whole loop was run before."""
    if builder.contract.new_tokens is not None:
        yield from rows_together(builder)
    else:
        yield from decode_loop(builder, "held", FEW)


def rows_together(builder: FeedBuilder) -> Calls:
    """One token a call: each row alone, then all together, and in the other order; a row keeps its logits."""
    stop = min(builder.scenario.total, 1 + FEW)
    expected = yield from each_row_alone(builder, stop)
    for order in (range(builder.scenario.batch), range(builder.scenario.batch)[::-1]):
        together, right = builder.rows(order), expected[builder.logits_rows(order)]
        before, _ = yield from together.go_on(None, 0, stop, right)
    yield from together.controls(stop - 1, stop, before, right)
    moved = together.reorder_past(before, range(builder.scenario.batch)[::-1])
    wanted, label = right[:, stop - 1 : stop], "rows of the cache exchanged"
    yield together.decode(stop - 1, stop, moved, wanted, kind="control", label=label)


def decode_loop(builder: FeedBuilder, loop: Loop, most: int | None = None) -> Calls:
    """Prefill, then one token a step; each step compared with the reference run. Ends with the positive controls.

    The cache after the last token is compared with that of the reference run.
    """
    expected = yield from builder.whole()
    start, slots = builder.scenario.prompt, dict[str, Value]()
    # What shorter sequences without any cache differ by from the whole one is no fault of a cache.
    for stop in range(start, builder.scenario.total) if builder.contract.exactness == "dynamic-quantization" else ():
        yield replace(builder.prefill(stop), expected=expected[:, stop - 1 : stop], kind="noise")
    last = min(builder.scenario.total, start + (most or builder.scenario.total)) - 1
    past = yield from builder.begin(expected)
    _, past = yield from replace(builder, loop=loop).go_on(past, start, last, expected)
    if last == builder.scenario.total - 1:
        slots = fill_with(growing(builder.contract), (yield builder.reference()))
    yield builder.decode(last, last + 1, past, expected[:, last : last + 1], slots=slots)
    yield from builder.controls(last, last + 1, past, expected)


def replayed(builder: FeedBuilder) -> Calls:
    """Without a reference run: the same tokens one by one, twice from an empty state, must give the same logits.

    The control shows that what is carried matters. More is decided by other histories and sessions (one_token.py).
    """
    builder, logits = longer(builder), list[Array]()
    for again in (False, True):
        past: Past | None = None
        for position in range(builder.scenario.total):
            before, expected = past, logits[position] if again else None
            answer = yield one_step(builder, position, past, expected)
            logits += [] if again else [answer.logits]
            past = builder.carry(past, answer, "plain")
        if not again:
            keep_logits(builder, logits)
    assert before is not None  # noqa: S101 - a scenario has two steps or more
    last = builder.scenario.total - 1
    yield from builder.controls(last, last + 1, before, np.concatenate(logits, axis=1))


@Experiment(
    "batch-rows",
    "rows of a batch of 9 compared with the same rows alone and in another order, without a cache",
    Scenario(batch=5, steps=2),
    applies=has_exact_rows,
    changes_feeds=True,
    order=3,
)
def rows_alone(builder: FeedBuilder) -> Calls:
    """Two rows by themselves, without a cache, compared with their logits in the batch; then all in reverse order."""
    many = builder.rows(ROWS)
    together = yield from many.whole()
    for order in ((0,), (1,), range(len(ROWS))[::-1]):
        call = replace(many.rows(order).reference(), kind="step")
        yield replace(call, expected=together[many.logits_rows(order)])


def takes_any_batch(contract: CacheContract) -> str | None:
    """The batch can be varied only where no decoder input declares it as a number, and a reference run takes it."""
    return several_tokens(contract) or has_free_batch(contract)


def has_free_batch(contract: CacheContract) -> str | None:
    """The batch can be varied only where no decoder input declares it as a number."""
    ports = [port for phase in contract.phases.values() for port in contract.graphs[phase.graph].inputs]
    for port in ports:
        if port.size("batch") is not None:
            return f"the batch of {port.name!r} is a fixed number"
    return None


@Experiment(
    "adapter",
    "the loop with an adapter of noise (LoRA)",
    applies=takes_adapter,
    use=Use("an adapter (LoRA)", severity="error"),
    changes_feeds=True,
    order=8,
)
def with_adapter(builder: FeedBuilder) -> Calls:
    """The loop with an adapter of noise in every call; without it the logits must be others."""
    adapted = replace(builder, adapted=True)
    expected = yield from adapted.whole()
    total = builder.scenario.total
    before = yield from adapted.run_through(expected)
    yield builder.decode(total - 1, total, before, expected[:, -1:], kind="control", label="adapter left out")
    yield from adapted.controls(total - 1, total, before, expected)


def run_in(mode: Way) -> Callable[[FeedBuilder], Calls]:
    """The held loop in another way, against the reference run as it is usually run."""

    def loop(builder: FeedBuilder) -> Calls:
        expected = yield from builder.whole()
        yield from replace(builder, via=mode).run_through(expected)

    return loop


MODES: dict[Way, tuple[str, Use]] = {
    "basic": ("the held loop with basic graph optimization only", Use("basic graph optimization only")),
    "off": ("the held loop without graph optimization", Use("graph optimization off", after=("way-basic",))),
    "io-binding": ("the held loop with bound inputs and outputs", Use("inputs and outputs bound")),
}


for mode, (question, use) in MODES.items():
    Experiment(f"way-{mode}", question, Scenario(steps=4), thorough=True, use=use, order=35)(run_in(mode))


def takes_past(contract: CacheContract) -> str | None:
    """The graph of the first step must have past inputs."""
    if contract.first_step == "no-past-graph":
        return "the graph of the first step takes no past"
    return several_tokens(contract) or grows(contract)


@workaround(
    "same-cache",
    "the cache of the prefill fed at every step",
    applies=has_length,
    why="new tokens are never appended to the cache",
    order=20,
)
def same_cache(builder: FeedBuilder) -> Calls:
    """The cache of the prefill fed at every step, presents ignored."""
    expected = yield from builder.whole()
    past = yield from builder.begin(expected)
    for position in range(builder.scenario.prompt, builder.scenario.total):
        yield builder.decode(position, position + 1, past, expected[:, position : position + 1])


@workaround(
    "all-ids-with-cache",
    "all ids so far, with a cache",
    applies=has_length,
    why="tokens in the cache count twice",
    order=21,
)
def all_ids(builder: FeedBuilder) -> Calls:
    """All ids so far at every step, with the cache as well."""
    expected = yield from builder.whole()
    past = yield from builder.begin(expected)
    for position in range(builder.scenario.prompt, builder.scenario.total):
        answer = yield builder.decode(0, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")


@workaround(
    "late-cache",
    f"no cache for {STEPS_WITHOUT_CACHE} steps, then the plain loop",
    why="it fails like the plain loop, at a later step",
    order=22,
)
def late_cache(builder: FeedBuilder) -> Calls:
    """No cache for the first steps, then the plain loop."""
    expected, prompt = (yield from builder.whole()), builder.scenario.prompt
    start = prompt + STEPS_WITHOUT_CACHE
    for stop in range(prompt, start + 1):
        answer = yield builder.prefill(stop, expected[:, :stop])
    past = builder.carry(None, answer, "plain")
    yield from replace(builder, loop="plain").go_on(past, start, builder.scenario.total, expected)


@Experiment("empty-past", "first step with past length 0", applies=takes_past, order=2)
def empty_past(builder: FeedBuilder) -> Calls:
    """Past length 0: what Optimum and transformers.js feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt])


@Experiment(
    "dummy-past",
    "first step with a dummy past of length 1",
    applies=takes_past,
    judged=False,
    why="the dummy is attended to unless it is masked",
    order=11,
)
def dummy_past(builder: FeedBuilder) -> Calls:
    """A dummy past of length 1: what bindings that refuse empty tensors feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt], dummy=1)


@Experiment(
    "dummy-past-runs",
    "whether the first step runs at all with a past of length 1",
    applies=takes_past,
    shown=False,
    unless_passed="empty-past",
    order=3,
)
def dummy_past_runs(builder: FeedBuilder) -> Calls:
    """The same calls with a dummy past of length 1: tells whether it is the length 0 that a first step fails on."""
    yield builder.prefill(builder.scenario.total, dummy=1)
    yield builder.prefill(builder.scenario.prompt, dummy=1)


@Experiment(
    "cached-branch-first",
    "cached branch on the first step",
    applies=lambda contract: None if contract.first_step == "no-past-branch" else "there is no branch switch",
    judged=False,
    why="the cached branch attends to the dummy past",
    order=12,
)
def cached_branch(builder: FeedBuilder) -> Calls:
    """The switch already true on the first step, over an empty cache."""
    expected, prompt = (yield from builder.whole()), builder.scenario.prompt
    yield builder.decode(0, prompt, builder.first_past(0), expected[:, :prompt])
