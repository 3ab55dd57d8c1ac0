"""Puts keys, values and layers of the cache back under their names.

Requires: the names say which slot is which (key or value, layer), and the dataflow shows what each is used for. Of the
three places where slots can be crossed (what the first step returns, what a decode step takes, what it returns) those
that contradict the names are put right: what the steps return is led to its slot by `joined-presents`.
Ensures: the same values under other names: inputs that were crossed are read crossed back, outputs of the first step
trade their names. Nothing is computed otherwise.
"""

from collections.abc import Mapping

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import in_words, place_of, producer, rename_reads, rename_values, returned_in

INSTEAD = "rename the outputs, or export again with the output names in the order the graph returns them"
Content = tuple[str, str, int]
"""What a slot holds: its kind, key or value, and which attention of its kind that is."""


def apply(patient: Patient) -> tuple[Change, ...]:
    """Trade inputs of the decode step and outputs of the first step that the names contradict."""
    contract = patient.drivable
    named = _named(contract)
    if not named:
        patient.cannot("the names do not say which slot holds keys and which values", INSTEAD)
    used = {s.past: (s.kind, s.used_as, s.used_at) for s in contract.slots if s.used_as and s.used_at is not None}
    made = {s.past: (s.kind, s.made_as, s.made_at) for s in contract.slots if s.made_as and s.made_at is not None}
    crossed_in, crossed_out = (_trade(named, found) for found in (used, made))
    if crossed_in and crossed_in == crossed_out:
        return ()  # every graph is crossed alike: what the steps return is the fault
    changes: list[Change] = []
    if crossed_in:
        changes += _trade_inputs(patient, crossed_in)
    if crossed_out:
        changes += _trade_outputs(patient, contract, crossed_out)
    return tuple(changes)


def _named(contract: CacheContract) -> dict[str, Content]:
    """What each slot holds by its name; layers counted among those of their kind and part."""
    found: dict[str, Content] = {}
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in contract.slots:
        if slot.part in ("key", "value") and slot.layer is not None and slot.used_as is not None:
            groups.setdefault((slot.kind, slot.part), []).append(slot)
    for (kind, part), slots in groups.items():
        for rank, slot in enumerate(sorted(slots, key=lambda slot: slot.layer or 0)):
            found[slot.past] = (kind, part, rank)
    return found


def _trade(named: dict[str, Content], found: Mapping[str, tuple[str, str, int]]) -> dict[str, str]:
    """For each slot that holds another one's content, that other one; empty where slots do not just trade places."""
    owner = {content: past for past, content in named.items()}
    trade = {past: owner[content] for past, content in found.items() if past in named and content in owner}
    trade = {past: other for past, other in trade.items() if past != other}
    return trade if set(trade) == set(trade.values()) else {}


def _trade_inputs(patient: Patient, trade: dict[str, str]) -> list[Change]:
    file = patient.file_of("decode")
    view = patient.view(file)
    graph = view.branches[1].cached.graph if view.branches is not None else view.model.graph
    rename_reads(graph, trade)
    place = place_of(view, graph)
    return [Change(file, f"{place}, what reads {past!r}", past, other) for past, other in trade.items()]


def _trade_outputs(patient: Patient, contract: CacheContract, trade: dict[str, str]) -> list[Change]:
    """Let the outputs of the first step that hold one another's content trade their values."""
    file = patient.file_of("prefill")
    view = patient.view(file)
    outputs = {slot.past: slot.filled_by for slot in contract.slots if slot.filled_by is not None}
    if not set(trade) <= set(outputs):
        patient.cannot("the encoder graph fills the slots that are crossed", INSTEAD)
    places = {past: returned_in(view, outputs[past], cached=False) for past in trade}
    graph = next(iter(places.values()))[0]
    if any(other is not graph or producer(graph, name) is None for other, name in places.values()):
        patient.cannot("the crossed outputs of the first step are not made by nodes of one graph", INSTEAD)
    # The value that stands under one name gets the other one.
    names = {places[past][1]: places[other][1] for past, other in trade.items()}
    if set(names) != set(names.values()):
        patient.cannot("the crossed outputs of the first step share a value", INSTEAD)
    before = {past: in_words(graph, places[past][1]) for past in trade}
    rename_values(graph, names)
    place = place_of(view, graph)
    return [
        Change(file, f"{place}, output {outputs[past]!r}", before[past], in_words(graph, places[past][1]))
        for past in trade
    ]


REPAIR = Repair(
    name="slot-order",
    mends=("key-value-swapped", "layers-swapped"),
    stage="ports",
    keeps="first-step",
    apply=apply,
    advice=("Feed each present to the past that the graph uses it as, whatever the names say.",),
)
