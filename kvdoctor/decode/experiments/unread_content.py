"""Content that no one may read: the past of a branch that takes none, the places of a buffer after the last token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, several_tokens
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

LARGE, LEFT_OVER = 1e4, 10.0
"""What stands where zeros might: in a branch that reads no past, within the range of float16; in a buffer about what
an earlier sequence leaves there, since masks hide that, and not every number (0 * NaN is NaN)."""


def has_unread_content(contract: CacheContract) -> str | None:
    """There must be a place whose content does not count, and a first step that takes it."""
    if not any(_unread_slots(contract)):
        return "every entry of the cache is read"
    return several_tokens(contract)


@Experiment(
    "unread-content",
    "the held loop with large numbers in every place of the cache that counts as empty",
    Scenario(steps=4),
    has_unread_content,
    use=Use("other content than zeros in places of the cache that count as empty", required="speculation"),
    order=7,
)
def unread(builder: FeedBuilder) -> Calls:
    """The held loop where large numbers stand in every place that the contract calls empty."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    call = builder.prefill(start, expected[:, :start], dummy=int(builder.contract.first_step == "no-past-branch"))
    past = Past({slot.past: call.feeds[slot.past] for slot in builder.contract.slots if slot.past in call.feeds})
    filled = _filled(builder.contract, past, 0)
    answer = yield replace(call, feeds={**call.feeds, **filled})
    past = builder.carry(None, answer, "held")
    for position in range(start, builder.scenario.total):
        past = Past({**past, **_filled(builder.contract, past, position, buffers_only=True)}, past.length)
        before = past
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")
    yield from builder.controls(position, position + 1, before, expected)


@Experiment(
    "written-places",
    "which places of its buffers a prefill writes",
    applies=has_unread_content,
    shown=False,
    explains=("unread-content",),
    order=8,
)
def written_places(builder: FeedBuilder) -> Decision:
    """Whether a step writes its tokens at their places: what stood there must be gone, and stay at later places."""
    start = builder.scenario.prompt
    call = builder.prefill(start)
    past = Past({slot.past: call.feeds[slot.past] for slot in builder.contract.slots if slot.past in call.feeds})
    filled = _filled(builder.contract, past, 0)
    answer = yield replace(call, feeds={**call.feeds, **filled}, kind="probe")
    for slot in _unread_slots(builder.contract):
        made = slot.filled_by or ""
        if answer.failed or slot.growth != "static" or made not in answer.outputs:
            continue
        places = np.moveaxis(as_array(answer.outputs[made]), slot.axes.index("capacity"), 0)
        after = places.reshape(len(places), -1)
        kept = [place for place in range(start) if np.all(after[place] == LEFT_OVER)]
        beyond = [place for place in range(start, len(after)) if np.any(after[place] != LEFT_OVER)]
        if kept and beyond:
            return Cause(
                "present-does-not-grow",
                f"{start} tokens leave place {kept[0]} of {slot.filled_by} as it was, and change place {beyond[0]}",
            )
    return None


def _filled(contract: CacheContract, past: Past, length: int, buffers_only: bool = False) -> dict[str, Any]:
    """The pasts whose content after the first `length` tokens is not to be read, with large numbers there."""
    filled = {}
    for slot in _unread_slots(contract):
        if slot.past not in past or (buffers_only and slot.growth != "static"):
            continue
        tensor = as_array(past[slot.past]).copy()
        if slot.growth == "static":
            place: list[Any] = [slice(None)] * tensor.ndim
            place[slot.axes.index("capacity")] = slice(length, None)
            tensor[tuple(place)] = LEFT_OVER
        else:
            tensor = np.full_like(tensor, LARGE)
        filled[slot.past] = tensor
    return filled


def _unread_slots(contract: CacheContract) -> Iterator[Slot]:
    """Every slot of a branch without a past; buffers that are written at the length of the past, in any layout."""
    for slot in contract.slots:
        if "int" in slot.dtype or slot.kind == "counter":
            continue
        buffer = slot.growth == "static" and slot.carry in ("feed-back", "write") and "capacity" in slot.axes
        if buffer or (slot.first == "ignored" and slot.growth != "constant"):
            yield slot
