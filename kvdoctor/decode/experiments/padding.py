"""Rows of different lengths in one batch: padding on the left of the tokens, on the right of the encoder states."""

from dataclasses import replace

import numpy as np

from kvdoctor.contract import DECODING, Axis, CacheContract, Role
from kvdoctor.decode.calls import Array, Asking, Call, Encoded, Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Use, as_probe, ask, undecided
from kvdoctor.decode.experiments.cache_entries import same_logits
from kvdoctor.decode.experiments.each_length import longest_sequence, visited
from kvdoctor.decode.experiments.loops import has_exact_rows, takes_encoder_states, takes_rows
from kvdoctor.decode.experiments.multi_turn import takes_chunks
from kvdoctor.decode.feeds import FeedBuilder, fill_front
from kvdoctor.decode.inputs import fills_from_right
from kvdoctor.errors import CannotCheck

BEFORE_PADDING = ("batch", "batch-rows", "chunk", "second-turn", "each-length", "near-thresholds", "numbering")
"""Experiments without padding that fail from the same cause, if they do."""
PLACES: tuple[Role, ...] = ("cache_position", "write_index", "past_length", "total_length", "last_index")
"""Inputs that give the place where a buffer is written."""
MASKS: tuple[Role, ...] = ("attention_mask", "padding_mask", "additive_mask")
"""Inputs that hide entries of the cache."""
PADDING, APART = (2, 1, 0), (5, 3)
"""Tokens of padding before each row of the batch; tokens that two rows have before a step of both."""
STATES = ("conv-state", "recurrent-state")
"""Slots that keep no entry of a token by itself."""
STEPS = 4
"""Steps around a threshold of the graph."""
UNMASKED = "a mask without the padding"
"""What the controls are fed."""
ENCODER_PADDING = (4, 2, 0)
"""Encoder states of padding after those of each row."""


def takes_left_padding(contract: CacheContract) -> str | None:
    """A mask with a column for each token must hide the padding, in every graph; an operator that counts cannot."""
    mask = contract.graph("decode").port("attention_mask")
    if mask is not None and fills_from_right(mask, contract):
        return "every run has it: the mask hides the entries of the window, on the left, that hold no token yet"
    counted = any(slot.growth in ("shared", "ring") for slot in contract.slots)
    if counted or _is_written_by_count(contract):
        return "no per-row mask: the attention reads the cache from its first entry on"
    graph = contract.graph("decode")
    shared = {port.role for port in graph.inputs if "batch" not in port.axes}
    if "token_states" in shared or (shared.intersection(PLACES) and graph.port("position_ids") is None):
        return "one position for the whole batch"
    reasons = [has_exact_rows(contract), *list_unmasked(contract, MASKS, "total")]
    states = (slot.past for slot in contract.slots if slot.kind in STATES and not slot.takes_mask)
    reasons += [f"attention_mask does not reach the state {state!r}: padding would enter it" for state in states]
    return next(filter(None, reasons), None)


def takes_encoder_padding(contract: CacheContract) -> str | None:
    """The decoder must take encoder states, or the caches of an encoder, and in some call a mask over them."""
    if reason := takes_encoder_states(contract) or has_exact_rows(contract):
        return reason
    lacking = list_unmasked(contract)
    return lacking[0] if len(lacking) == len(DECODING) else None


@Experiment(
    "left-padding",
    "the held loop with batch 3, rows with 2, 1 and 0 tokens of padding on the left",
    Scenario(batch=len(PADDING), prompt=5, steps=3),
    takes_left_padding,
    changes_feeds=True,
    use=Use("padding on the left", required="left-padding", after=BEFORE_PADDING),
    order=7,
)
def left(builder: FeedBuilder) -> Calls:
    """The held loop, two rows with masked padding, at the usual lengths and around each threshold of the graph."""
    yield from _left(builder)
    for length in visited(builder.thresholds, builder.contract.usable_length):
        prompt = max(length - 1, max(PADDING) + 1)
        total, longer = prompt + STEPS - 1, builder.resized(prompt, prompt + STEPS - 1)
        if (yield from longest_sequence(longer, 1, total)) == total:
            yield from _left(longer)


def _left(builder: FeedBuilder) -> Calls:
    """Each row must give what it gives alone without padding."""
    alone = []
    for row, pads in enumerate(PADDING):
        logits = yield from builder.row(row).without_first(pads).whole()
        alone.append(fill_front(logits, builder.scenario.total))
    yield from _stays(builder, alone[0])
    yield from _loop(replace(builder, padding=PADDING), builder, np.concatenate(alone), max(PADDING))


def _stays(builder: FeedBuilder, alone: Array) -> Calls:
    """Where only a mask for each query tells the padding, one padded row must keep its logits by itself.

    Raises:
        CannotCheck: it does not: the graph counts the padding among the positions, and no input says otherwise.
    """
    inputs = builder.contract.graph("decode").inputs
    if any(port.role == "position_ids" or (port.role in MASKS and port.axes == ("batch", "total")) for port in inputs):
        return
    padded = replace(builder.row(0), padding=PADDING[:1])
    answer = yield as_probe(padded.prefill(builder.scenario.prompt))
    kept = builder.scenario.prompt - max(PADDING)
    if not answer.failed and not same_logits(
        answer.logits[:, -kept:], alone[:, max(PADDING) : builder.scenario.prompt], builder.tolerance
    ):
        raise CannotCheck("the graph counts padding among the positions, and no input gives others")


def takes_right_padding(contract: CacheContract) -> str | None:
    """Padding between the prompt and new tokens: a mask hides it, and an input gives positions without it."""
    if reason := takes_left_padding(contract):
        return reason
    if any(slot.window is not None for slot in contract.slots):
        return "its attention looks back over a number of entries, and those of padding count among them"
    if contract.graph("decode").port("position_ids") is None:
        return "no input gives the positions of the tokens after the padding"
    return None


@Experiment(
    "right-padding",
    "the held loop with batch 3, rows with 2, 1 and 0 tokens of padding between the prompt and the next token",
    Scenario(batch=len(PADDING), prompt=5, steps=3),
    takes_right_padding,
    changes_feeds=True,
    thorough=True,
    use=Use("padding on the right of a prompt", after=(*BEFORE_PADDING, "left-padding")),
    order=24,
)
def right(builder: FeedBuilder) -> Calls:
    """Each row must give what it gives alone without the padding, whose entries stay in the cache, and are hidden.

    Raises:
        CannotCheck: one row by itself does not: the graph may count entries, as a bias by distance does.
    """
    start, total = builder.scenario.prompt, builder.scenario.total
    alone = []
    for row, pads in enumerate(PADDING):
        one = builder.row(row)
        scenario = replace(one.scenario, prompt=start - pads)
        tokens = np.delete(one.tokens, range(start - pads, start), axis=1)
        logits = yield from replace(one, scenario=scenario, tokens=tokens).whole()
        alone.append(fill_front(logits, total))
    single = replace(builder.row(0), gap=PADDING[:1], gap_end=start)
    first = yield as_probe(single.prefill(start))
    if not first.failed:
        answer = yield as_probe(single.decode(start, start + 1, single.carry(None, first, "held")))
        if not answer.failed and not same_logits(answer.logits, alone[0][:, start : start + 1], builder.tolerance):
            raise CannotCheck("one padded row by itself has other logits: the graph may count the entries of the cache")
    padded, expected = replace(builder, gap=PADDING, gap_end=start), np.concatenate(alone)
    past = yield from padded.begin()
    before, _ = yield from padded.go_on(past, start, total, expected)
    yield builder.decode(total - 1, total, before, expected[:, -1:], kind="control", label=UNMASKED)


@Experiment(
    "encoder-padding",
    "the held loop with batch 3, rows with 4, 2 and 0 fewer encoder states",
    Scenario(batch=len(ENCODER_PADDING), encoder=11, steps=3),
    takes_encoder_padding,
    changes_feeds=True,
    use=Use("encoder states of two lengths in one batch", after=(*BEFORE_PADDING, "other-encoder-length")),
    order=7,
)
def two_lengths(builder: FeedBuilder) -> Calls:
    """The held loop, two rows with fewer encoder states and a mask that says so: each row as it is alone."""
    length = builder.encoder_states
    padded = replace(builder, encoder_padding=ENCODER_PADDING)
    if (control := (yield from _counts_something_else(builder, padded))) is not None:
        yield control
        return
    alone = []
    for row, pads in enumerate(ENCODER_PADDING):
        alone.append((yield from _shorten(builder.row(row), length - pads).whole()))
    yield from _loop(padded, builder, np.concatenate(alone))


def takes_rows_apart(contract: CacheContract) -> str | None:
    """Caches of fixed size, and inputs that tell each row's own length: the rows need not be equally long."""
    if reason := takes_rows(contract):
        return reason
    graph = contract.graph("decode")
    if any({"past", "encoder"} & set(slot.axes) or "batch" not in slot.axes for slot in contract.slots):
        return "the rows of its caches are equally long"
    places = [port for port in graph.inputs if port.role in (*PLACES, "position_ids") and port.role != "total_length"]
    if not places or any("batch" not in port.axes for port in places):
        return "no input tells each row where its buffer is written"
    return None


@Experiment(
    "rows-apart",
    "one step of two rows that have other numbers of tokens in their buffers",
    Scenario(batch=len(APART), prompt=max(APART), steps=2),
    takes_rows_apart,
    changes_feeds=True,
    use=Use("rows of different lengths in one batch", after=BEFORE_PADDING),
    order=7,
)
def rows_apart(builder: FeedBuilder) -> Calls:
    """Each row alone up to its own length; the next step of both together must give what each one gives alone.

    Raises:
        CannotCheck: an input that both rows share depends on the length.
    """
    calls, right = list[Call](), list[Array]()
    axes = {port.name: port.axes for port in builder.contract.graph("decode").inputs}
    axes |= {slot.past: slot.axes for slot in builder.contract.slots}
    for row, length in enumerate(APART):
        alone = builder.row(row)
        _, past = yield from alone.go_on(None, 0, length)
        calls.append(alone.decode(length, length + 1, past))
        right.append((yield calls[-1]).logits)
    together: dict[str, Array] = {}
    for name in calls[0].feeds:
        given = [as_array(call.feeds[name]) for call in calls]
        at = axes[name].index("batch") if "batch" in axes[name] else None
        if len({array.shape for array in given}) > 1 or (at is None and not np.array_equal(given[0], given[1])):
            raise CannotCheck(f"both rows share {name!r}, which depends on the length")
        together[name] = given[0] if at is None else np.concatenate(given, axis=at)
    yield replace(calls[0], feeds=together, expected=np.concatenate(right))
    moved = builder.reorder_past(Past(together), range(len(APART))[::-1])
    control = replace(calls[0], kind="control", label="rows of the cache exchanged", expected=np.concatenate(right))
    yield replace(control, feeds={**together, **moved})


def _shorten(builder: FeedBuilder, length: int) -> FeedBuilder:
    """The builder with its first `length` encoder states alone, and the caches that an encoder made of them."""
    states = None if builder.encoded.states is None else builder.encoded.states[:, :length]
    axes = {slot.filled_by: slot.axes.index("encoder") for slot in builder.contract.slots if "encoder" in slot.axes}
    outputs = {
        name: np.take(array, range(length), axis=axes[name]) if name in axes else array
        for name, array in builder.encoded.outputs.items()
    }
    return replace(builder, encoded=Encoded(states, outputs))


@undecided
def _counts_something_else(builder: FeedBuilder, padded: FeedBuilder) -> Asking[Call | None]:
    """The control that shows no effect, where the mask has one and is yet no mask over states (but over samples)."""
    start, limit = builder.scenario.prompt, builder.tolerance
    blank = replace(builder, encoder_padding=(builder.encoder_states,) * builder.scenario.batch)
    seen, hidden, nothing = yield from ask(*(one.prefill(start) for one in (builder, padded, blank)))
    # One that hides everything and changes nothing is not looked at by the graph.
    if not same_logits(hidden.logits, seen.logits, limit) or same_logits(nothing.logits, seen.logits, limit):
        return None
    return replace(padded.prefill(start, seen.logits), kind="control", label="a mask over the last encoder states")


def _loop(padded: FeedBuilder, unpadded: FeedBuilder, expected: Array, begins: int = 0) -> Calls:
    """The held loop against the logits that all rows have, those from `begins` on; the control shows the padding.

    Several tokens at once where a batch takes them without padding too: GroupQueryAttention takes a single row there.
    """
    start, total = padded.scenario.prompt, padded.scenario.total
    first = padded.carry(None, (yield padded.prefill(start, expected[:, begins:start])), "held")
    before, _ = yield from padded.go_on(first, start, total, expected)
    several = takes_chunks(padded.contract) is None
    if several and not (yield as_probe(unpadded.decode(start, total, first))).failed:
        yield padded.decode(start, total, first, expected[:, start:])
    # A mask hides earlier entries from a step, but for those that left a window or went into a state.
    masks: tuple[Role, ...] = ("encoder_mask",) if padded.encoder_padding else MASKS
    last = any(port.role in masks for port in padded.contract.graph("decode").inputs)
    last = last and not any(slot.trimmed or slot.kind in STATES for slot in padded.contract.slots)
    control = unpadded.decode(total - 1, total, before) if last else unpadded.prefill(start)
    wanted = expected[:, -1:] if last else expected[:, begins:start]
    yield replace(control, expected=wanted, kind="control", label=UNMASKED)


def _is_written_by_count(contract: CacheContract) -> bool:
    """Whether a buffer is written after as many entries as its mask shows, as GroupQueryAttention does.

    No input gives the place, and the mask, which is as long as the tokens, is not that of the buffer.
    """
    graph = contract.graph("decode")
    if not any(slot.growth == "static" for slot in contract.slots) or any(graph.port(role) for role in PLACES):
        return False
    mask = graph.port("attention_mask")
    if mask is None or mask.shape is None or "total" not in mask.axes:
        return False
    return mask.size("total") is None


def list_unmasked(
    contract: CacheContract, roles: tuple[Role, ...] = ("encoder_mask",), axis: Axis = "encoder"
) -> list[str]:
    """For each graph of the loop that takes no mask over the entries of each row, or of each query of it: a text."""
    found = []
    for graph in map(contract.graph, DECODING):
        masks = [port.axes for port in graph.inputs if port.role in roles and port.size("batch") is None]
        if not any(axes[:1] == ("batch",) and axes[-1] == axis for axes in masks):
            found.append(f"{graph.file} takes no {roles[0]} of [batch, {axis}]")
    return found
