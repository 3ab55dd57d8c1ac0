"""The new tokens alone are fed, and masks, positions and counters go with the cache: counted on from the past.

All inputs have the same batch, and the cache has room for the tokens.
"""

from collections.abc import Iterator

import numpy as np

from kvdoctor.addons.traces.recorded import TraceTensor
from kvdoctor.addons.traces.step import TOKENS, ContractViolation, Kind, StepContext, list_inputs, size_of, tokens
from kvdoctor.contract import Axis, Port, Role, describe
from kvdoctor.decode.calls import Array
from kvdoctor.decode.inputs import fills_from_right

OTHER_RULES = ("past", "token_ids", "embeddings", "token_and_position")
COUNTED = {
    "write_index": "the tokens of the past",
    "past_length": "the tokens of the past",
    "total_length": "past and new tokens",
    "last_index": "past and new tokens, less one",
    "new_length": "the new tokens",
}
MAKES_MASK = "make the mask past + new long at every step: one entry for each token of the cache and each new one"
COUNTS_ON = "count positions on from the past: past, past + 1, ..."
FROM_LARGEST = "count on from the largest position of the step before: the tokens of an image share positions"


def compare_with_length(moment: StepContext, length: int) -> Iterator[bool]:
    """Whether masks, positions and counters go with a past of that length; nothing for those that do not tell."""
    for port in moment.graph.inputs:
        fed = moment.step.fed.get(port.name)
        if fed is None:
            continue
        total = size_of(port.axes, fed.shape, "total")
        if total is not None:
            yield total == length + moment.new
        values = fed.array() if fed.has_values and not fed.empty else None
        if values is None:
            continue
        if port.role in ("position_ids", "cache_position"):
            # Rows with padding on the left start lower.
            yield int(values.reshape(-1, values.shape[-1])[:, 0].max()) == length
        elif port.role in COUNTED:
            yield int(values.max()) == _count(port.role, length, moment.new)


def _count(role: Role, past: int, new: int) -> int:
    return {"total_length": past + new, "last_index": past + new - 1, "new_length": new}.get(role, past)


def lengths(moment: StepContext) -> Iterator[ContractViolation]:
    """Inputs of another size than past, new and encoder states make."""
    for port in moment.graph.inputs:
        fed = moment.step.fed[port.name]
        states = port.role == "encoder_states" and moment.before is not None
        if port.role in OTHER_RULES or states or len(port.axes) != len(fed.shape):
            continue
        due = list[int | None]()
        for axis, declared, got in zip(port.axes, port.shape or (), fed.shape, strict=True):
            size = declared if isinstance(declared, int) else moment.sizes.get(axis)
            covers_buffer = axis == "total" and moment.capacity is not None and got == moment.capacity
            due.append(got if covers_buffer and not isinstance(declared, int) else size)
        wrong = [i for i, size in enumerate(due) if size is not None and size != fed.shape[i]]
        if wrong:
            yield _wrong_length(moment, port, fed, tuple(due), port.axes[wrong[0]])


def _wrong_length(
    moment: StepContext, port: Port, fed: TraceTensor, due: tuple[int | None, ...], axis: Axis
) -> ContractViolation:
    at = port.axes.index(axis)
    got, size = fed.shape[at], due[at]
    kind: Kind = "wrong-size"
    cause, advice = f"{port.name} has {got} entries on the axis {axis}, not {size}", f"feed {size} entries there"
    words = ""
    if axis == "total":
        kind, advice = "mask-length", MAKES_MASK
        words = f": past {moment.past} + new {moment.new}"
        cause = f"{port.name} covers {tokens(got)}, where past {moment.past} and new {moment.new} make {size}"
        if got == moment.new:
            cause += ": it covers the new tokens alone"
        elif got == moment.past:
            cause += ": it is that of the step before"
    elif axis == "new" and port.role in ("position_ids", "cache_position"):
        kind, advice = "positions", COUNTS_ON
        cause = f"{port.name} has {got} positions for {tokens(moment.new)}"
    elif axis == "encoder":
        cause = f"{port.name} covers {got} encoder states, and there are {size}"
        advice = f"feed {port.name} as long as the encoder's states"
    return ContractViolation(
        kind=kind,
        inputs=(port.name,),
        declared=f"{port.name} {describe(port.dtype, due)}{words}",
        observed=f"{port.name} {fed}",
        cause=cause,
        advice=advice,
    )


def values(moment: StepContext) -> Iterator[ContractViolation]:
    """What masks, positions and counters hold, where the trace has it."""
    for port in moment.graph.inputs:
        if port.role not in ("attention_mask", "position_ids", "cache_position", *COUNTED):
            continue
        array = moment.values(port.name)
        if array is None or not array.size:
            continue
        if port.role == "attention_mask":
            yield from _mask(moment, port, array)
        elif port.role in COUNTED:
            yield from _counter(moment, port, array)
        else:
            yield from _positions(moment, port, array)


def _mask(moment: StepContext, port: Port, mask: Array) -> Iterator[ContractViolation]:
    """A mask hides no new token, and goes on hiding what it hid."""
    total, before = moment.past + moment.new, moment.before
    from_right = fills_from_right(port, moment.contract)
    seen = _of_tokens(mask, total, from_right)
    suspected, hidden, advice = None, None, "append a 1 for each new token to the mask of the step before"
    shown = _shown(mask)
    if before is None:
        wrong = None if seen.any(axis=-1).all() else "hides every token of a sequence"
        # Hidden tokens after one that is shown and before another one.
        holes = np.logical_or.accumulate(seen, axis=-1) & np.logical_or.accumulate(seen[:, ::-1], axis=-1)[:, ::-1]
        holes &= ~seen
        if wrong is None and not moment.past and holes.any():
            hidden = _find_hidden_id(moment, seen, holes)
            named = f" (id {hidden})" if hidden is not None else ""
            wrong = f"hides token {np.argwhere(holes)[0, 1]}{named}, which stands between tokens that it shows"
            advice = "make the mask of the prompts' lengths: an end token inside a prompt is not padding"
            suspected = "a loop may hide a token of its prompt on purpose"
    elif not seen[:, max(0, seen.shape[1] - moment.new) if from_right else moment.past :].all():
        wrong = f"hides {'a new token' if moment.new > 1 else 'the new token'}"
    else:
        earlier = before.last.fed.get(port.name)
        known = None
        if earlier is not None and earlier.has_values:
            known = _of_tokens(earlier.array(), moment.past, from_right)
        comparable = known is not None and known.shape == (len(seen), moment.past)
        same_rows = known is None or not comparable or np.array_equal(known, seen[:, : moment.past])
        if not same_rows and known is not None:
            row = int(np.argwhere(known != seen[:, : moment.past])[0, 0])
            shown = f"{_shown(seen[row])} in row {row}, and {_shown(known[row])} at step {before.last.number}"
        wrong = None if same_rows else f"hides other tokens of the past than at step {before.last.number}"
    if wrong is not None:
        yield ContractViolation(
            kind="mask-values",
            inputs=(port.name,),
            declared=f"{port.name} {moment.step.fed[port.name]}: 1 for every token but padding, the new ones included",
            observed=f"{port.name} {shown}",
            cause=f"{port.name} {wrong}",
            advice=advice,
            suspected=suspected,
            hidden=hidden,
        )


def _find_hidden_id(moment: StepContext, seen: Array, holes: Array) -> int | None:
    """The id of all tokens in the holes, where no token of that id is shown and none of them has another next to it."""
    for port, _ in moment.ports("token_ids"):
        ids = moment.values(port.name)
        if ids is not None and ids.shape == seen.shape and not (holes[:, 1:] & holes[:, :-1]).any():
            found = set(ids[holes].tolist())
            return int(found.pop()) if len(found) == 1 and found.isdisjoint(ids[seen].tolist()) else None
    return None


def _of_tokens(mask: Array, count: int, from_right: bool) -> Array:
    """The columns of some tokens, bool[batch, count]: the first ones, or the last ones of a window after padding."""
    rows = mask.astype(bool).reshape(-1, mask.shape[-1])
    return rows[:, max(rows.shape[1] - count, 0) :] if from_right else rows[:, :count]


def _positions(moment: StepContext, port: Port, array: Array) -> Iterator[ContractViolation]:
    """Positions count on; padding on the left is not counted, so that a row may start lower than its past.

    Of several numbers for each token (time, height and width) those of an image differ, and its tokens share them: the
    next token counts on from the largest.
    """
    if array.ndim == 3 and (array != array[:1]).any():
        return
    rows = array.reshape(-1, array.shape[-1]).astype(np.int64)
    before = moment.before
    earlier = before.last.fed.get(port.name) if before is not None else None
    if before is None:
        # Padding and dummies are counted in many ways; without them the last position is the last token.
        masks = [moment.values(mask.name) for mask, _ in moment.ports("attention_mask")]
        padded = bool(moment.past) or any(mask is not None and not mask.all() for mask in masks)
        wrong = not padded and int(rows.max()) != moment.new - 1
        due, cause = _span(0, moment.new), f"{port.name} ends at {int(rows.max())} for {tokens(moment.new)}"
    else:
        last = None
        if earlier is not None and earlier.has_values:
            known = earlier.array()
            if array.ndim == 3:  # of several numbers for each token the largest
                known = np.broadcast_to(known.max(axis=(0, -1), keepdims=True), known.shape)
            last = known.reshape(-1, known.shape[-1])[:, -1].astype(np.int64)
        begins = last + 1 if last is not None and len(last) == len(rows) else None
        start = int(begins[0]) if begins is not None else moment.past
        wrong_rows = rows[:, 0] != begins if begins is not None else (rows[:, 0] > moment.past) | (rows[:, 0] == 0)
        wrong = bool(wrong_rows.any()) or bool((np.diff(rows, axis=-1) != 1).any())
        first = int(rows[int(np.argmax(wrong_rows))][0])
        reason = "the largest position before it makes" if array.ndim == 3 else "the cache makes"
        cause = f"{port.name} starts at {first}, where {reason} it {start}"
        if first == 0:
            cause = f"{port.name} starts again at 0, although {tokens(before.tokens)} are in the cache"
        elif first == start - before.new and begins is not None:
            cause = f"{port.name} does not go on: it starts at {first}, as at step {before.last.number}"
        due = _span(start, start + moment.new)
    if wrong:
        yield ContractViolation(
            kind="positions",
            inputs=(port.name,),
            declared=f"{port.name} {moment.step.fed[port.name]}: {due}",
            observed=f"{port.name} {_shown(array)}",
            cause=cause,
            advice=FROM_LARGEST if array.ndim == 3 and before is not None else COUNTS_ON,
        )


def _counter(moment: StepContext, port: Port, array: Array) -> Iterator[ContractViolation]:
    """A length or a place to write at. Shorter rows of a batch are padded on the right: the longest one counts."""
    past, new = moment.past, moment.new
    due, got = _count(port.role, past, new), int(array.max())
    if got != due:
        yield ContractViolation(
            kind="counter",
            inputs=(port.name,),
            declared=f"{port.name} {moment.step.fed[port.name]}: {due}, {COUNTED[port.role]}",
            observed=f"{port.name} {_shown(array)}",
            cause=f"{port.name} is {got}, where past {past} and new {new} make it {due}",
            advice=f"feed {COUNTED[port.role]}: {due} at this step",
        )


def _span(begin: int, end: int) -> str:
    return str(begin) if end - begin == 1 else f"{begin} to {end - 1}"


def _shown(array: Array) -> str:
    """The first values of an array: `[0, 1, 2, ...]`."""
    listed = [str(int(value)) for value in array.reshape(-1)[:8]]
    return f"[{', '.join(listed)}{', ...' if array.size > 8 else ''}]"


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
            following = moment.following.fed.get(port.name) if moment.following is not None else None
            more = size_of(port.axes, following.shape, "new") if following is not None else None
            if moment.new != before.tokens + 1 or more not in (None, moment.new + 1):
                return
            if more is None:
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
    """More tokens than the buffers or the context hold; for a ring, more in one call than it has rows."""
    total, room = moment.past + moment.new, moment.capacity
    limit, ring = moment.contract.context_limit, moment.contract.ring
    names = tuple(port.name for port, _ in moment.ports(*TOKENS))
    held = tuple(slot.past for slot, _ in moment.slots if slot.growth in ("static", "delta", "shared"))
    advice = "stop there, drop the oldest entries, or allocate (and export) a longer one"
    cause = f"{tokens(total)} are more than the buffer of the cache holds"
    if room is not None and ring in (0, room):
        if moment.new <= room:
            return
        names, promised = held or names, f"at most {tokens(room)} in one call: a call writes no row twice"
        cause = f"{tokens(moment.new)} in one call are more than the {room} rows of the cache: some overwrite others"
        advice = f"feed the prompt in calls of at most {tokens(room)}; fewer if a window needs older rows"
    elif room is not None and total > room:
        names, promised = held or names, f"at most {tokens(room)}, the length of the buffer"
    elif limit is not None and total > limit:
        promised, cause = f"at most {tokens(limit)}, by the config", f"{tokens(total)} are more than the context holds"
    else:
        return
    yield ContractViolation(
        kind="capacity-exceeded",
        inputs=names,
        declared=promised,
        observed=f"{moment.past} in the cache and {moment.new} new",
        cause=cause,
        advice=advice,
    )
