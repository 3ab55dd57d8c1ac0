"""What a slot is by its name and by its dataflow: its part, its growth, what a loop carries on. Rules without state."""

from collections.abc import Iterator
from typing import Any, Literal

from kvdoctor.contract import Carry, Dim, Growth, Lack, SlotKind
from kvdoctor.dataflow import StateFlow, Use
from kvdoctor.dialects import SlotName
from kvdoctor.graph import Declared

ATTENTION_PARTS = ("key", "value", "key-value")
REPLACED: tuple[SlotKind, ...] = ("conv-state", "recurrent-state", "counter")


def proven_part(use: Use | None) -> Literal["key", "value", "key-value"] | None:
    """What a past is used as where the attention it is used in was found: no more than likely is None."""
    return use.part if use is not None and use.proven and use.part in ATTENTION_PARTS else None  # type: ignore[return-value]


def part_of(name: SlotName | None, state: StateFlow | None, kind: SlotKind) -> Any:
    """Key, value or both: by its name, else by its use. States that are replaced are a `state`."""
    if name is not None and name.part != "state":
        return name.part
    use: Use | None = state.use if state is not None else None
    return use.part if use is not None and use.part in ATTENTION_PARTS and kind not in REPLACED else "state"


def growth_of(kind: SlotKind, name: SlotName | None, state: StateFlow | None, shape: tuple[Dim, ...]) -> Growth:
    """What a step does to the length: by a rule of its name that the graph does not gainsay, else by the dataflow."""
    if name is not None and name.rule.growth is not None and not _appended(name.rule.growth, state, shape):
        return name.rule.growth
    if name is not None and name.rule.or_delta and state is not None and state.output is None:
        return "delta"
    if kind == "cross-attention":
        return "constant"
    if kind in REPLACED:
        return "replace"
    seen = state.growth if state is not None and state.joined else None
    if name is None and seen == "grow" and state is not None and state.output is None and state.delta is not None:
        return "delta"
    if state is None or not isinstance(shape[state.axis or 0], int) or seen not in ("grow", None):
        return seen or "grow"
    return "ring" if seen == "grow" and state.trimmed else "grow"


def _appended(ruled: Growth, state: StateFlow | None, shape: tuple[Dim, ...]) -> bool:
    """Whether a past that is named like a buffer has no fixed length, and comes back with new entries behind it."""
    if ruled not in ("static", "ring") or state is None or state.how != "append" or state.trimmed:
        return False
    return state.axis is not None and not isinstance(shape[state.axis], int)


def contradictions(name: SlotName | None, kind: SlotKind, growth: Growth) -> Iterator[Lack]:
    """Where a name promises another kind or growth than the graph shows."""
    if name is None:
        return
    if name.rule.kind != kind:
        yield Lack(name.past, f"it is named as {name.rule.kind}, and the graph uses it as {kind}")
    elif name.rule.growth is not None and name.rule.growth != growth and not name.rule.or_delta:
        yield Lack(name.past, f"it is named as a cache of growth {name.rule.growth!r}, and the graph has it {growth}")


def returns_rows(shape: tuple[Dim, ...], state: StateFlow | None, present: Declared | None) -> bool:
    """Whether a past of fixed length is declared to come back as fewer rows: the new ones, to be shifted in."""
    if state is None or state.axis is None or state.output is not None or present is None:
        return False
    if present.shape is None or len(present.shape) != len(shape):
        return False
    before, after = shape[state.axis], present.shape[state.axis]
    return isinstance(before, int) and isinstance(after, int) and after < before


def carry_of(
    kind: SlotKind, name: SlotName | None, growth: Growth, state: StateFlow | None, shape: tuple[Dim, ...]
) -> Carry:
    """What a right loop does to have the next past: by a rule of its name, else by the growth."""
    if name is not None and name.rule.carry is not None:
        return name.rule.carry
    if kind == "cross-attention" or growth == "constant":
        return "hold"
    if name is None and growth == "static" and state is not None and state.at_end:
        return "extend"
    if growth == "delta":
        if name is not None and name.rule.or_delta:
            return "append"
        if state is None or state.axis is None or state.cut:
            return "write"
        # What the graph takes whole has no free places: new rows come behind it, or push the oldest out.
        return "shift" if isinstance(shape[state.axis], int) else "append"
    return "feed-back"
