"""The cache contract in words: what it keeps, what the first step gets, what to feed, and how to carry each slot."""

import re
from collections.abc import Iterable, Iterator, Sequence

from kvdoctor.contract import CacheContract, Carry, First, Growth, Port, Slot, describe

GROWTH_WORDS: dict[Growth, str] = {
    "grow": "grows by the new tokens",
    "static": "a buffer of fixed capacity, written in place",
    "shared": "grows, or is a buffer where it is fed as one",
    "ring": "a window of fixed capacity, the oldest entries leave",
    "delta": "the new entries alone are returned",
    "replace": "a state of fixed size, returned anew by each step",
    "constant": "does not change after the first step",
    "paged": "blocks of a pool, found through the block table",
}

CARRY_WORDS: dict[Carry, tuple[str, str]] = {
    "feed-back": ("feed back", "{present} -> {past}"),
    "hold": ("hold", "{filled_by} -> {past} at every later step"),
    "append": ("append", "{past} of the next step = {past} with {present} behind it"),
    "write": ("write", "{present} into {past} at the past length"),
    "shift": ("shift", "{past} without its oldest rows, {present} in at the end"),
    "drop-oldest": ("feed back", "{present} without its first row -> {past}"),
    "extend": ("feed back", "{present} with one row of zeros behind it -> {past}"),
}

FIRST_WORDS: dict[First, str] = {
    "empty": "a past of length 0",
    "dummy": "a past of length 1, masked",
    "zeros": "zeros",
    "encoder": "what the encoder returns",
    "prefill": "made by {prefill}, which takes no past",
    "ignored": "any length (0 is usual, it is ignored)",
}

STATES = {"hidden-memory": "hidden memory", "encoder-states": "encoder states", "conv-state": "convolution state"}
MOST_NUMBERED = 6
MOST_TOLD = 8


def rows(contract: CacheContract) -> Iterator[tuple[str, str]]:
    """Label and text of each line; a label that repeats is left out."""
    label = "cache"
    for group in _alike(contract.slots):
        yield label, _kept(group)
        label = ""
    yield "axes", _axes(contract)
    yield "first step", _first_step(contract)
    yield "feed", _fed(contract)
    for carry, (verb, rule) in CARRY_WORDS.items():
        for slots in _by_kind([slot for slot in contract.slots if slot.carry == carry]):
            yield verb, _carried(slots, rule)


def slot_rows(contract: CacheContract) -> Iterator[list[str]]:
    """Every slot: past, type with the meaning of its axes, growth, present."""
    for slot in contract.slots:
        yield [slot.past, typed(slot), slot.growth, slot.carry, slot.present or f"({slot.filled_by or 'nothing'})"]


def _alike(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Slots that differ in their layer, or in being key or value, alone."""
    groups: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.kind, slot.growth, slot.window, slot.dtype, sizes(slot)), []).append(slot)
    return list(groups.values())


def _by_kind(slots: Iterable[Slot]) -> list[list[Slot]]:
    groups: dict[tuple[object, ...], list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.kind, slot.filled_in, slot.is_given), []).append(slot)
    return list(groups.values())


def sizes(slot: Slot) -> tuple[object, ...]:
    """Axes with their sizes where these are numbers: names of axes may differ from slot to slot."""
    numbers = (size if isinstance(size, int) else None for size in slot.shape)
    return tuple(zip(slot.axes, numbers, strict=True))


def _kept(slots: list[Slot]) -> str:
    """`self-attention, layers 0 to 11, key and value float[batch, 4 kv_heads, past, 8 head_dim]: grows ...`."""
    slot = slots[0]
    parts = " and ".join(dict.fromkeys(s.part for s in slots if s.part != "state"))
    window = f", its attention looks back {slot.window} tokens" if slot.window is not None else ""
    what = f"{STATES.get(slot.kind, slot.kind.replace('-state', ' state'))}, {layers(slots)}"
    return f"{what}, {parts + ' ' if parts else ''}{typed(slot)}: {GROWTH_WORDS[slot.growth]}{window}"


def layers(slots: Sequence[Slot]) -> str:
    """`layers 0 to 11`."""
    numbers = sorted({slot.layer for slot in slots if slot.layer is not None})
    if not numbers:
        return "all layers in one tensor"
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    more = f" and {len(numbers) - MOST_NUMBERED} more" if len(numbers) > MOST_NUMBERED else ""
    return f"layers {', '.join(map(str, numbers[:MOST_NUMBERED]))}{more}"


def typed(slot: Slot) -> str:
    """`float[batch, 4 kv_heads, past, 8 head_dim]`: the meaning of each axis, and its size where it is a number."""
    known = ("fixed", "state")
    written = [
        (str(size) if axis in known else f"{size} {axis}") if isinstance(size, int) else axis
        for size, axis in zip(slot.shape, slot.axes, strict=True)
    ]
    return f"{slot.dtype}[{', '.join(written)}]"


def _axes(contract: CacheContract) -> str:
    """What each axis is called where it is dynamic, and how large it is where it is a number."""
    dynamic: dict[str, dict[str, None]] = {}
    fixed: dict[str, dict[str, None]] = {}
    for phase in contract.phases.values():
        for port in contract.graphs[phase.graph].inputs:
            for axis, size in zip(port.axes, port.shape or (), strict=False):
                if axis != "fixed":
                    (fixed if isinstance(size, int) else dynamic).setdefault(axis, {})[str(size or "unnamed")] = None
    parts = [f"{title} {_listed(found)}" for title, found in (("dynamic:", dynamic), ("fixed:", fixed)) if found]
    return "; ".join(parts)


def _listed(found: dict[str, dict[str, None]]) -> str:
    return ", ".join(f"{axis} = {' or '.join(names)}" for axis, names in found.items())


def _first_step(contract: CacheContract) -> str:
    """Which graph or branch serves the first step, and what its pasts are fed."""
    switch, prefill = contract.graph("decode").port("branch_switch"), contract.graph("prefill").file
    if contract.first_step == "no-past-graph" and all(slot.first == "prefill" for slot in contract.slots):
        return f"{prefill}, which takes no past; every later step {contract.graph('decode').file}"
    words = []
    for first in dict.fromkeys(slot.first for slot in contract.slots):
        slots = [slot for slot in contract.slots if slot.first == first]
        kinds = ", ".join(dict.fromkeys(slot.kind for slot in slots))
        whose = "past inputs of " if first == "ignored" else f"{kinds}: " if len(slots) < len(contract.slots) else ""
        words.append(whose + FIRST_WORDS[first].format(prefill=prefill))
    text = "; ".join(words) or "no past"
    if contract.first_step == "no-past-branch":
        off, on = (str(contract.phases[phase].switch).lower() for phase in ("prefill", "decode"))
        return f"{switch.name if switch else 'the switch'} = {off}, {text}; {on} on every later step"
    return f"{prefill}: {text}; every later step {contract.graph('decode').file}" if _two_graphs(contract) else text


def _two_graphs(contract: CacheContract) -> bool:
    return contract.graph("prefill") is not contract.graph("decode")


def _fed(contract: CacheContract) -> str:
    """What every step is fed besides the cache, and what the first step is fed on top of that."""
    every = [port for port in contract.graph("decode").inputs if _is_fed(port)]
    names = {port.name for port in every}
    first = [port for port in contract.graph("prefill").inputs if _is_fed(port) and port.name not in names]
    return f"every step: {_named(every)}" + (f"; first step also: {_named(first)}" if first else "")


def _is_fed(port: Port) -> bool:
    return port.role not in ("past", "branch_switch", "auxiliary")


def _named(ports: list[Port]) -> str:
    """Names, with the part each plays where the name does not say it."""
    return ", ".join(
        f"{port.name}" if _says_its_role(port) else f"{port.name} ({port.role} {_typed(port)})" for port in ports
    )


def _typed(port: Port) -> str:
    kind = describe(port.dtype, port.shape)
    return kind if port.value is None else f"{kind}, {port.value:g} here"


def _says_its_role(port: Port) -> bool:
    words = {"token_ids": "input_ids", "embeddings": "embeds", "encoder_states": "encoder_hidden_states"}
    return words.get(port.role, port.role) in port.name or (port.role == "encoder_mask" and "mask" in port.name)


def _carried(slots: list[Slot], rule: str) -> str:
    """The rule for the first slot where the others follow from it by their numbers and words, else for each."""
    told = [_carried_one(slot, rule) for slot in slots]
    patterns = {_pattern(text) for text in told}
    if len(told) == 1 or (len(patterns) == 1 and min(patterns)[1]):
        return told[0] + (f" ({len(slots)} slots)" if len(slots) > 1 else "")
    more = f"; {len(told) - MOST_TOLD} more: --format json lists them" if len(told) > MOST_TOLD else ""
    return "; ".join(told[:MOST_TOLD]) + more


def _carried_one(slot: Slot, rule: str) -> str:
    made_in = {"prefill": "the first step", "encode": "the encoder", "decode": "the first step"}[slot.filled_in]
    filled = f"{slot.filled_by} of {made_in}" if slot.filled_by else "what the caller gives"
    return rule.format(past=slot.past, present=slot.present or "nothing", filled_by=filled)


def _pattern(text: str) -> tuple[str, bool]:
    """A line without its numbers and words for key and value, and whether both names have the same of them."""
    before, _, after = text.partition(" -> ")
    marks = re.compile(r"\d+|key|value|[kv](?=_|\b|\d)", re.ASCII)
    return marks.sub("", text), marks.findall(before)[:1] == marks.findall(after)[:1]
