"""What came back, held against what the graph promises. numpy only."""

from dataclasses import dataclass

from kvdoctor.caller.moment import Moment
from kvdoctor.caller.recorded import Recorded
from kvdoctor.contract import Axis, Dim, Slot, describe


@dataclass(frozen=True, slots=True)
class Untrue:
    """An output that came back in another type or shape than promised, in a step whose feed was right."""

    step: int
    output: str
    promised: str
    observed: str


def first_untrue(moment: Moment) -> Untrue | None:
    """Find the first such output of a step."""
    filled = {slot.filled_by if moment.phase == "prefill" else slot.present: slot for slot in moment.contract.slots}
    for port in moment.graph.outputs:
        got = moment.step.got.get(port.name)
        if got is None:
            continue
        slot = filled.get(port.name)
        due = _present(slot, moment) if slot is not None else _plain(port.shape, port.axes, moment)
        if got.dtype != port.dtype or (due is not None and not _fits(due, got)):
            return Untrue(moment.number, port.name, describe(port.dtype, due or port.shape), str(got))
    return None


def _fits(due: tuple[Dim, ...], got: Recorded) -> bool:
    return len(due) == len(got.shape) and all(
        not isinstance(size, int) or size == seen for size, seen in zip(due, got.shape, strict=True)
    )


def _present(slot: Slot, moment: Moment) -> tuple[Dim, ...] | None:
    """The shape of a present: the past's, and its length by the growth rule."""
    fed = moment.step.fed.get(slot.past)
    past, new, sizes = moment.past, moment.new, moment.sizes
    length: int | None = None
    if slot in moment.contract.growing and not moment.buffered:
        length = None if slot.growth == "delta" else past + new
    elif slot.growth in ("static", "shared") and slot.carry == "feed-back" and fed is not None and slot.length_axis:
        length = fed.shape[slot.length_axis] if len(fed.shape) == len(slot.axes) else None
    shape: list[Dim] = []
    for axis, declared in zip(slot.axes, slot.shape, strict=True):
        if axis in ("past", "capacity"):
            shape.append(length)
        elif axis in ("batch", "batch_heads", "encoder"):
            shape.append(declared if isinstance(declared, int) else sizes.get(axis))
        else:
            shape.append(declared)
    return tuple(shape)


def _plain(shape: tuple[Dim, ...] | None, axes: tuple[Axis, ...], moment: Moment) -> tuple[Dim, ...] | None:
    """The shape of logits and other outputs, by the sizes of the step."""
    if shape is None or len(axes) != len(shape):
        return None
    known = moment.sizes if moment.contract.codebooks == 1 else {}
    named = [known.get(axis) if axis in ("batch", "new") else None for axis in axes]
    return tuple(size if isinstance(size, int) else counted for size, counted in zip(shape, named, strict=True))
