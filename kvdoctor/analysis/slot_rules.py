"""What a slot is by its name and by its dataflow: its part, growth, carry and present. Functions without state."""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, Literal

from kvdoctor.analysis.dataflow.states import StateFlow
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS, StateUse
from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.contract import Carry, Dim, Growth, MissingPart, SlotKind
from kvdoctor.model.view import Declared

REPLACED: tuple[SlotKind, ...] = ("conv-state", "recurrent-state", "counter")
"""Kinds of states that each step returns anew, in the same size."""

LONGEST_NAME = 300
"""Characters of names that are compared with one another character by character."""


def proven_part(use: StateUse | None) -> Literal["key", "value", "key-value"] | None:
    """What a past is used as, where the attention that uses it was found; None for a likely use."""
    return use.part if use is not None and use.proven and use.part in ATTENTION_PARTS else None  # type: ignore[return-value]


def part_of(name: SlotName | None, state: StateFlow | None, kind: SlotKind) -> Any:
    """Key, value or both: by its name, else by its use. States that are replaced are a `state`."""
    if name is not None and name.part != "state":
        return name.part
    use: StateUse | None = state.use if state is not None else None
    return use.part if use is not None and use.part in ATTENTION_PARTS and kind not in REPLACED else "state"


def growth_of(kind: SlotKind, name: SlotName | None, state: StateFlow | None, shape: tuple[Dim, ...]) -> Growth:
    """What a step does to the length: by the naming rule unless the graph refutes it, else by the dataflow."""
    if name is not None and name.rule.growth is not None and not _is_appended(name.rule.growth, state, shape):
        return name.rule.growth
    if name is not None and name.rule.or_delta and state is not None and state.output is None:
        return "delta"
    if kind == "cross-attention":
        return "constant"
    if kind in REPLACED:
        return "replace"
    by_flow = state.growth if state is not None and state.joined else None
    if name is None and by_flow == "grow" and state is not None and returns_new_entries(state):
        return "delta"
    if state is None or not isinstance(shape[state.axis or 0], int) or by_flow not in ("grow", None):
        return by_flow or "grow"
    return "ring" if by_flow == "grow" and state.trimmed else "grow"


def returns_new_entries(state: StateFlow) -> bool:
    """Whether no output returns a past that new entries join, but one returns the new entries."""
    return state.joined and state.output is None and state.delta is not None


def _is_appended(by_name: Growth, state: StateFlow | None, shape: tuple[Dim, ...]) -> bool:
    """Whether a past that is named like a buffer has no fixed length, and new entries are concatenated to it."""
    if by_name not in ("static", "ring") or state is None or state.how != "append" or state.trimmed:
        return False
    return state.axis is not None and not isinstance(shape[state.axis], int)


def find_contradictions(name: SlotName | None, kind: SlotKind, growth: Growth) -> Iterator[MissingPart]:
    """Where a name promises another kind or growth than the graph shows."""
    if name is None:
        return
    if name.rule.kind != kind:
        yield MissingPart(name.past, f"its name says {name.rule.kind}, but the graph uses it as {kind}")
    elif name.rule.growth is not None and name.rule.growth != growth and not name.rule.or_delta:
        yield MissingPart(
            name.past, f"its name says growth {name.rule.growth!r}, but in the graph its growth is {growth!r}"
        )


def returns_new_rows(shape: tuple[Dim, ...], state: StateFlow | None, present: Declared | None) -> bool:
    """Whether a past of fixed length is declared to come back with fewer rows: the new ones, to be shifted in."""
    if state is None or state.axis is None or state.output is not None or present is None:
        return False
    if present.shape is None or len(present.shape) != len(shape):
        return False
    before, after = shape[state.axis], present.shape[state.axis]
    return isinstance(before, int) and isinstance(after, int) and after < before


def carry_of(
    kind: SlotKind, name: SlotName | None, growth: Growth, state: StateFlow | None, shape: tuple[Dim, ...]
) -> Carry:
    """How a correct loop computes the next past: by the naming rule, else by the growth."""
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
        # A graph that reads the whole buffer leaves no free rows: new rows are appended, or push the oldest out.
        return "shift" if isinstance(shape[state.axis], int) else "append"
    return "feed-back"


def pair_by_affix(pasts: list[str], presents: set[str], by_number: bool = False) -> dict[str, str]:
    """Pair pasts and presents whose names differ by the same prefix and suffix: `x` and `x_out`, `in_x` and `out_x`.

    Empty where no change of prefix and suffix pairs them all. Names that share a number alone are paired only with
    `by_number`: `in1` and `out1` may be the first and the second tensor of their kind.
    """
    if len(pasts) < 2 or max(map(len, (*pasts, *presents)), default=0) > LONGEST_NAME:
        return {}
    for present in sorted(presents):
        core = _longest_common(pasts[0], present)
        if core.isdigit() != by_number or not core or (not by_number and not any(map(str.isalpha, core))):
            continue
        (before, after), (new_before, new_after) = (name.split(core, 1) for name in (pasts[0], present))
        pairs = {}
        for past in pasts:
            middle = past.removeprefix(before).removesuffix(after) if after else past.removeprefix(before)
            if past.startswith(before) and past.endswith(after):
                pairs[past] = f"{new_before}{middle}{new_after}"
        if set(pairs) == set(pasts) and set(pairs.values()) == presents:
            return pairs
    return {}


def _longest_common(one: str, other: str) -> str:
    match = SequenceMatcher(None, one, other, autojunk=False).find_longest_match()
    return one[match.a : match.a + match.size]
