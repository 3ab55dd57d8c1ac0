"""The new tokens alone are fed, in the same batch as everything else, and the cache has room for them."""

from collections.abc import Iterator

import numpy as np

from kvdoctor.contract import Axis
from kvdoctor.decode.caller_trace.step import TOKENS, ContractViolation, StepContext, list_inputs, size_of, tokens


def all_ids(moment: StepContext) -> Iterator[ContractViolation]:
    """All tokens so far fed again although they are in the cache."""
    before = moment.before
    if before is None or moment.new <= before.tokens or before.tokens == 0:
        return
    for port, fed in moment.ports(*TOKENS):
        known = _repeats(moment, port.name)
        if known is False:
            return
        suspected = None
        if known is None:
            following = _tokens_of(moment, port.name, port.axes)
            if moment.new != before.tokens + 1 or following not in (None, moment.new + 1):
                return
            if following is None:
                suspected = f"{tokens(moment.new)} at once may also be a chunk: give the data of {port.name} to decide"
        yield ContractViolation(
            kind="all-ids-with-cache",
            inputs=(port.name,),
            declared=f"{port.name}: the new tokens alone; the cache holds {tokens(before.tokens)}",
            observed=f"{port.name} {fed} on a cache of {tokens(before.tokens)}",
            cause="all ids so far are fed together with the cache, so that those in the cache count twice",
            advice="feed the last token only once there is a cache; or all ids and no cache",
            suspected=suspected,
        )
        return


def _repeats(moment: StepContext, name: str) -> bool | None:
    """Whether the ids begin with those so far; None where either is not known."""
    before, values = moment.before, moment.values(name)
    if before is None or before.ids is None or values is None or values.ndim != before.ids.ndim:
        return None
    count = before.ids.shape[-1]
    return values.shape[:-1] == before.ids.shape[:-1] and bool(np.array_equal(values[..., :count], before.ids))


def _tokens_of(moment: StepContext, name: str, axes: tuple[Axis, ...]) -> int | None:
    fed = moment.following.fed.get(name) if moment.following is not None else None
    return size_of(axes, fed.shape, "new") if fed is not None else None


def batch(moment: StepContext) -> Iterator[ContractViolation]:
    """One input in another batch than the others. All in another one is a batch that the caller expanded."""
    rows: dict[str, int] = {}
    for port in moment.graph.inputs:
        fed = moment.step.fed[port.name]
        slot = next((slot for slot, _ in moment.slots if slot.past == port.name), None)
        ignored = moment.before is None and slot is not None and slot.first == "ignored"
        size = moment.batch_of(port.axes, fed)
        # A placeholder without elements has a rule of its own.
        if size is not None and not ignored and not (slot is not None and size == 0):
            rows[port.name] = size
    expected = moment.batch if moment.before is None else moment.before.batch
    if len(set(rows.values())) < 2:
        return
    wrong = [name for name, size in rows.items() if size != expected] or list(rows)
    earlier = "the token ids have" if moment.before is None else "the step before had"
    yield ContractViolation(
        kind="batch-changes",
        inputs=tuple(wrong),
        declared=f"a batch of {expected} in every input",
        observed=list_inputs(wrong, moment),
        cause=f"{wrong[0]} has a batch of {rows[wrong[0]]}, where {earlier} {expected} and other inputs still do",
        advice="feed every input with the same batch; to go on with other sequences, repeat or pick the rows of the "
        "cache as well",
    )


def capacity(moment: StepContext) -> Iterator[ContractViolation]:
    """More tokens than the buffers or the context hold."""
    total, room = moment.past + moment.new, moment.capacity
    limit = moment.contract.context_limit
    names = tuple(port.name for port, _ in moment.ports(*TOKENS))
    if room is not None and total > room:
        held = tuple(slot.past for slot, _ in moment.slots if slot.growth in ("static", "delta", "shared"))
        promised, text = f"at most {tokens(room)}, the length of the buffer", "the buffer of the cache"
        names = held or names
    elif limit is not None and total > limit:
        promised, text = f"at most {tokens(limit)}, by the config", "the context"
    else:
        return
    yield ContractViolation(
        kind="capacity-exceeded",
        inputs=names,
        declared=promised,
        observed=f"{moment.past} in the cache and {moment.new} new",
        cause=f"{tokens(total)} are more than {text} holds",
        advice="stop there, drop the oldest entries, or allocate (and export) a longer one",
    )
