"""Memory that a loop uses again: past and present in one buffer, and content that no one may read.

Where each present is bound to the memory of its past, the graph reads what it is about to write. Operators that hold
the cache (GroupQueryAttention) are made for that; a graph that writes with other operators may read entries of the past
after the present has replaced them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Array, Call, Past, Scenario, Value, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, ask, several_tokens
from kvdoctor.decode.experiments.chunk import takes_chunks
from kvdoctor.decode.experiments.loops import takes_rows
from kvdoctor.decode.experiments.one_token import right_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.errors import CannotCheck

SINGLE, CHUNK = 2, 3
"""Single tokens after the prompt, then tokens of one chunk; single ones again to the end."""


def has_buffers(contract: CacheContract) -> str | None:
    """Past and present must have one shape, and the graph must place the new entries in the buffer itself."""
    if not _buffers(with_buffers(contract)):
        return "no present has the shape of its past"
    if any(slot.growth in ("grow", "delta") and slot.kind == "self-attention" for slot in contract.slots):
        return "some presents are longer than their pasts"
    fixed = contract.new_tokens
    return None if fixed in (None, 1) else f"the first step takes {fixed} new tokens only"


@Experiment(
    "one-buffer",
    "past and present bound to one buffer: a prompt, single tokens and a chunk",
    applies=has_buffers,
    thorough=True,
    changes_feeds=True,
    use=Use("past and present in one buffer"),
    order=36,
)
@Experiment(
    "one-buffer-batch",
    "the same with batch 2",
    Scenario(batch=2),
    lambda contract: has_buffers(contract) or takes_rows(contract),
    thorough=True,
    changes_feeds=True,
    use=Use("past and present in one buffer, with a batch of 2", after=("batch", "one-buffer")),
    order=36,
)
def one_buffer(builder: FeedBuilder) -> Calls:
    """The prompt, single tokens and a chunk, each written into the buffers that are read; as with separate buffers."""
    expected = yield from right_logits(builder)
    shared = replace(builder, contract=with_buffers(builder.contract))
    start, total = builder.scenario.prompt, builder.scenario.total
    call = shared.prefill(start, expected[:, :start])
    if not _pairs(shared.contract, call):
        raise CannotCheck("the first step takes no buffer")
    answer = yield _in_place(shared.contract, call)
    past, position = shared.carry(None, answer, "held"), start
    # GroupQueryAttention of onnxruntime takes several tokens on a past in batch 1 alone.
    several = takes_chunks(builder.contract) is None and builder.scenario.batch == 1
    chunk = CHUNK if several else 1
    before, last = past, start
    while position < total:
        new = min(chunk if position == start + SINGLE else 1, total - position)
        before = Past({name: as_array(value).copy() for name, value in past.items()}, past.length)
        last, stop = position, position + new
        answer = yield _in_place(shared.contract, shared.decode(position, stop, past, expected[:, position:stop]))
        past, position = shared.carry(past, answer, "held"), stop
    yield from shared.controls(last, total, before, expected)


def _in_place(contract: CacheContract, call: Call) -> Call:
    return replace(call, via="one-buffer", in_place=_pairs(contract, call))


def _pairs(contract: CacheContract, call: Call) -> dict[str, str]:
    """The pasts by the presents that are written into them, of a call."""
    names = ((slot.filled_by if call.phase == "prefill" else slot.present, slot.past) for slot in _buffers(contract))
    return {present: past for present, past in names if present is not None and past in call.feeds}


def _buffers(contract: CacheContract) -> tuple[Slot, ...]:
    """The slots whose past and present are one buffer."""
    found = (slot for slot in contract.of_kind("self-attention") if slot.growth in ("static", "ring"))
    return tuple(slot for slot in found if slot.carry == "feed-back" and slot.present is not None)


def with_buffers(contract: CacheContract) -> CacheContract:
    """The contract of a loop that feeds buffers of fixed size to slots that take either."""
    slots = list[Slot]()
    for slot in contract.slots:
        axes: tuple[Axis, ...] = tuple("capacity" if axis == "past" else axis for axis in slot.axes)
        slots.append(replace(slot, growth="static", axes=axes) if slot.growth == "shared" else slot)
    return replace(contract, slots=tuple(slots))


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
    answer = yield replace(call, feeds={**call.feeds, **_filled(builder.contract, call.feeds, 0)})
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
    (answer,) = yield from ask(replace(call, feeds={**call.feeds, **_filled(builder.contract, call.feeds, 0)}))
    for slot in _unread_slots(builder.contract):
        made = slot.filled_by or ""
        if slot.growth != "static" or made not in answer.outputs:
            continue
        places = np.moveaxis(as_array(answer.outputs[made]), slot.axes.index("capacity"), 0)
        after = places.reshape(len(places), -1)
        kept = [place for place in range(start) if np.all(after[place] == LEFT_OVER)]
        beyond = [place for place in range(start, len(after)) if np.any(after[place] != LEFT_OVER)]
        if kept and beyond:
            text = f"{start} tokens leave place {kept[0]} of {slot.filled_by} as it was, and change place {beyond[0]}"
            return Cause("present-does-not-grow", text)
    return None


def _filled(
    contract: CacheContract, past: Mapping[str, Value | Array], length: int, buffers_only: bool = False
) -> dict[str, Any]:
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
