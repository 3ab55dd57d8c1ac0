"""Past and present in one buffer: each present is bound to the memory of its past, as engines with fixed buffers do.

The graph then reads what it is about to write. Operators that hold the cache (GroupQueryAttention) are made for that;
a graph that writes with other operators may read entries of the past after the present has replaced them.
"""

from dataclasses import replace

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Call, Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Use
from kvdoctor.decode.experiments.chunk import takes_chunks
from kvdoctor.decode.experiments.loops import takes_rows
from kvdoctor.decode.experiments.one_token import right_logits
from kvdoctor.decode.feeds import FeedBuilder
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
    return replace(contract, slots=tuple(_as_buffer(slot) for slot in contract.slots))


def _as_buffer(slot: Slot) -> Slot:
    if slot.growth != "shared":
        return slot
    axes = tuple("capacity" if axis == "past" else axis for axis in slot.axes)
    return replace(slot, growth="static", axes=axes)
