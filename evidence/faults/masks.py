"""Tokens that see too much or too little."""

import numpy as np

from evidence.faults.anatomy import Body
from evidence.faults.base_models import SPELLED_OUT, SPLIT, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import HIDE, Make

CHUNKED = ("gpt2", "llama-gqa", "opt", *SPLIT)
"""Those that take several tokens on a cache."""
APART = ("gpt2", "llama-gqa", "opt", "qwen2", "marian", "whisper", "marian-pair", "whisper-pair", "llama-tf5")
"""Those whose mask is added by itself: T5 adds it together with what it makes of the distance."""


def columns(body: Body, scores: str) -> str:
    """The places of the entries, int64[total]."""
    return body.count_up(body.size(scores, 3))


def hide(body: Body, layer: int, hidden: Make) -> None:
    """Hide entries from the new tokens once there is a past; `hidden` makes bool[new or 1, total] of the columns."""

    def masked(scores: str) -> str:
        gone = body.op("And", hidden(columns(body, scores)), body.has_past())
        return body.op("Where", gone, np.array(HIDE, np.float32), scores)

    softmax = body.attentions()[layer]
    softmax.input[0] = masked(softmax.input[0])


@fault(
    "mask-not-offset", "the mask is counted from the start of the cache: the first new token sees entry 0", SPELLED_OUT
)
def mask_from_the_start(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        rows = body.op("Unsqueeze", body.count_up(body.new_length()), np.array([1]))
        hide(body, layer, lambda columns, rows=rows: body.op("Greater", columns, rows))


@fault("mask-not-offset", "the mask ends one entry early: the token before the new one is not seen", SPELLED_OUT)
def mask_off_by_one(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        last = body.op("Sub", body.past_length(), np.array([1]))
        hide(body, layer, lambda columns, last=last: body.op("Equal", columns, last))


@fault(
    "mask-not-offset", "the mask has 4 columns for the past, as in the trace: what comes later is not seen", SPELLED_OUT
)
def mask_of_the_trace(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        own = body.op("Sub", body.size(body.scores(layer), 3), np.array([1]))
        hide(
            body,
            layer,
            lambda columns, own=own: body.op(
                "And", body.op("Greater", columns, np.array(3)), body.op("Less", columns, own)
            ),
        )


@fault("past-ignored", "no layer looks at the past", SPELLED_OUT)
def past_ignored(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        hide(body, layer, lambda columns: body.op("Less", columns, body.past_length()))


@fault("past-ignored", "layer 1 does not look at the past", SPELLED_OUT)
def past_ignored_in_layer_1(export: Export) -> None:
    body = export.later
    hide(body, 1, lambda columns: body.op("Less", columns, body.past_length()))


@fault("past-ignored", "layer 0 does not look at the past", SPELLED_OUT)
def past_ignored_in_layer_0(export: Export) -> None:
    body = export.later
    hide(body, 0, lambda columns: body.op("Less", columns, body.past_length()))


@fault("cache-misread", "steps look back over 2 entries only, the prefill over all", SPELLED_OUT)
def window_too_small(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        begin = body.op("Sub", body.past_length(), np.array([2]))
        hide(body, layer, lambda columns, begin=begin: body.op("Less", columns, begin))


@fault(
    "mask-not-offset",
    "several new tokens on a cache see one another",
    tuple(name for name in APART if name in CHUNKED),
    severity="warning",
)
def chunk_sees_ahead(export: Export) -> None:
    body = export.later
    for softmax, layer in zip(body.attentions(), body.layers(), strict=True):
        raw = body.unmasked(layer)
        softmax.input[0] = body.with_past(softmax.input[0], raw)


@fault(
    "mask-not-offset",
    "of several new tokens on a cache all see only what the first one sees",
    CHUNKED,
    severity="warning",
)
def chunk_sees_the_past_alone(export: Export) -> None:
    body = export.later
    for layer in body.layers():
        end = body.op("Add", body.past_length(), np.array([0]))
        hide(body, layer, lambda columns, end=end: body.op("Greater", columns, end))


@fault("not-causal", "the prefill has no causal mask", APART)
def not_causal(export: Export) -> None:
    body = export.first
    for softmax, layer in zip(body.attentions(), body.layers(), strict=True):
        softmax.input[0] = body.unmasked(layer)


@fault("not-causal", "layer 1 of the prefill has no causal mask", APART)
def not_causal_in_layer_1(export: Export) -> None:
    body = export.first
    body.attentions()[1].input[0] = body.unmasked(1)


@fault("not-causal", "beyond 20 tokens the prefill has no causal mask", APART)
def not_causal_when_long(export: Export) -> None:
    body = export.first
    for softmax, layer in zip(body.attentions(), body.layers(), strict=True):
        long = body.op("Greater", body.new_length(), np.array([20]))
        softmax.input[0] = body.op("Where", long, body.unmasked(layer), softmax.input[0])
