"""What every cache rests on: the same feed gives the same logits, and a token's logits know it and not the next one."""

from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, ControlFailed
from kvdoctor.decode.experiments import Calls, Decision, Experiment, as_probe, ask, prefill, several_tokens
from kvdoctor.decode.experiments.cache_entries import (
    by_position,
    change_token,
    find_changed,
    keeps_all,
    pieces_of,
    read_returned,
    same_logits,
)
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import measurable
from kvdoctor.decode.runs import NOTHING_CHANGES, Cause

HIDDEN_TOKEN = ("; the attention mask does not hide it", "; hidden by the attention mask it changes none")
MORE_TOKENS = 2
"""Tokens that are tried in the place of the last one after the first: some rows of an embedding table may be equal."""


@Experiment("same-feed", "the same feed twice", shown=False, order=6)
def same_feed(builder: FeedBuilder) -> Calls:
    """The reference run a second time, and one decode step twice."""
    expected = (yield builder.reference()).logits
    if not measurable(expected):
        return  # two of them cannot be compared
    yield builder.prefill(builder.scenario.total, expected)
    start = builder.scenario.prompt
    _, past = yield from prefill(builder, start)
    (step,) = yield from ask(builder.decode(start, start + 1, past))
    if measurable(step.logits):
        yield builder.decode(start, start + 1, past, step.logits)


@Experiment(
    "later-token", "whether logits change with their own token, and not with the next one", shown=False, order=6
)
def later_token(builder: FeedBuilder) -> Decision:
    """The reference run with another last token: its own logits and entries change, and none before it.

    Raises:
        ControlFailed: no token changes the logits, or the entries of a layer.
    """
    total, other = builder.scenario.total, change_token(builder, -1)
    expected = yield as_probe(builder.prefill(total))
    if expected.failed:
        yield builder.reference()  # the run fails by it
        return None
    (answer,) = yield from ask(other.prefill(total))
    if gives_all_logits(builder.contract) is None and (
        cause := (yield from _sees_later_token(builder, expected.logits, answer))
    ):
        return cause
    return (yield from _token_counts(builder, expected, other, answer))


def looks_ahead(builder: FeedBuilder, expected: Array) -> Decision:
    """Whether another last token changes the logits of those before it, without a cache."""
    if builder.contract.last_logits_only:
        return None
    other = yield as_probe(change_token(builder, -1).prefill(builder.scenario.total))
    return (yield from _sees_later_token(builder, expected, other))


def _sees_later_token(builder: FeedBuilder, expected: Array, other: Answer) -> Decision:
    """The same token hidden by the mask of padding shows whether a mask is what is missing."""
    if other.failed or same_logits(other.logits[:, :-1], expected[:, :-1], builder.tolerance):
        return None
    last, whole = builder.scenario.total - 1, (yield as_probe(builder.prefill(builder.scenario.total)))
    for slot in [s for s in by_position(builder.contract) if s.growth == "static" and not whole.failed][:1]:
        place = find_changed(slot, read_returned(slot, whole, True), read_returned(slot, other, True))
        if place is not None and place < last:
            text = f"a call writes its token at position {last} to entry {place} of {slot.filled_by}"
            return Cause("present-rewrites-past", text, slot.past)
    text = "without a cache, another last token changes the logits of the tokens before it"
    mask = builder.contract.graph("prefill").port("attention_mask")
    if mask is None or mask.axes != ("batch", "total"):
        return Cause("not-causal", text)
    padded = replace(builder, gap=(1,) * builder.scenario.batch, gap_end=last + 1)
    one, two = (yield as_probe(padded.prefill(last + 1))), (yield as_probe(change_token(padded, -1).prefill(last + 1)))
    hidden = not (one.failed or two.failed) and same_logits(one.logits[:, :-1], two.logits[:, :-1], builder.tolerance)
    return Cause("not-causal", f"{text}{HIDDEN_TOKEN[hidden]}", masked=hidden)


def _token_counts(builder: FeedBuilder, expected: Answer, other: FeedBuilder, answer: Answer) -> Decision:
    """Where no other last token changes the logits, or the entries of a layer, wrong ones would look right as well.

    `answer` is that of the sequence with an `other` last token.

    Raises:
        ControlFailed: that is so.
    """
    same_last, layers = True, _list_last_entries(builder, expected)
    for more in range(MORE_TOKENS + 1):
        if more:
            other = change_token(other, -1)
            (answer,) = yield from ask(other.prefill(builder.scenario.total))
        same_last = same_last and np.array_equal(answer.logits[:, -1], expected.logits[:, -1])
        changed = _list_last_entries(builder, answer)
        layers = {layer: entries for layer, entries in layers.items() if _are_same(entries, changed.get(layer, {}))}
        if not same_last and not layers:
            return None
    others = f"{MORE_TOKENS + 1} others in the place"
    if same_last:
        alone = builder.without_first(builder.scenario.total - 1)
        one = yield as_probe(alone.prefill(1))
        two = yield as_probe(change_token(alone, 0).prefill(1))
        if not (one.failed or two.failed or same_logits(one.logits, two.logits, builder.tolerance)):
            tokens = f"{builder.scenario.total} tokens"
            text = f"of {tokens} in one call the last one does not change its logits; alone it does"
            return Cause("chunk-differs", text)
        raise ControlFailed(f"{NOTHING_CHANGES} the logits: {others} of the last one give the same")
    layer, entries = next(iter(layers.items()))
    where = f"layer {layer} of the cache" if layer is not None else "the cache"
    raise ControlFailed(
        f"{NOTHING_CHANGES} {where}: {others} of the last one leave its entry in {' and '.join(entries)} as it is"
    )


def _list_last_entries(builder: FeedBuilder, answer: Answer) -> dict[int | None, dict[str, Array]]:
    """The entries of the last token, where a slot has them at its position, by layer and output.

    Of a window of fixed capacity all entries: new ones may come at its end, and the oldest be shifted out.
    """
    found: dict[int | None, dict[str, Array]] = {}
    for piece in pieces_of(by_position(builder.contract), answer):
        if piece.slot.growth == "ring":
            entries = piece.of(read_returned(piece.slot, answer, True))
        elif keeps_all(piece.slot, answer):
            entries = piece.right_entry(answer, answer.new - 1)
        else:
            continue
        found.setdefault(piece.layer, {})[piece.filled_by] = entries
    return found


def _are_same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        entry.size > 0 and np.array_equal(entry, other[name]) for name, entry in one.items()
    )


def gives_all_logits(contract: CacheContract) -> str | None:
    """The logits of earlier tokens must be there, and must not be rounded by later tokens."""
    if contract.last_logits_only:
        return "only the last token's logits are returned"
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization takes one scale from all tokens"
    return several_tokens(contract)
