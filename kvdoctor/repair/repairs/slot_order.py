"""Gives keys, values and layers of the cache their own names again.

Requires: the names tell which slot is which (key or value, layer), and the dataflow shows how each is used. Slots can
be swapped in three places: the outputs of the first step, the inputs of a decode step and its outputs. The first two
are corrected here; `joined-presents` corrects the outputs of the steps.
Ensures: the same values under other names: swapped inputs are read swapped back, outputs of the first step exchange
their names. The computation is unchanged.
"""

from collections.abc import Mapping

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.model.edit import describe_graph, describe_maker, rename_reads, rename_values
from kvdoctor.model.traverse import producer
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

INSTEAD = "rename the outputs, or export again with the output names in the order the graph returns them"
Content = tuple[str, str, int]
"""The content of a slot: its kind, key or value, and the index of the attention among those of its kind."""


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Swap inputs of the decode step and outputs of the first step that contradict their names."""
    contract = context.drivable
    if not (named := _content_by_name(contract)):
        context.cannot("the names do not tell which slot holds keys and which values", INSTEAD)
    used = {s.past: (s.kind, s.used_as, s.used_at) for s in contract.slots if s.used_as and s.used_at is not None}
    made = {s.past: (s.kind, s.made_as, s.made_at) for s in contract.slots if s.made_as and s.made_at is not None}
    crossed_in, crossed_out = (_find_swaps(named, found) for found in (used, made))
    if crossed_in and crossed_in == crossed_out:
        return ()  # all graphs have the same swap: the fault is in the outputs of the steps
    inputs = _swap_inputs(context, crossed_in) if crossed_in else []
    return (*inputs, *(_swap_outputs(context, contract, crossed_out) if crossed_out else []))


def _content_by_name(contract: CacheContract) -> dict[str, Content]:
    """The content of each slot by its name; layers are counted among those of their kind and part."""
    found: dict[str, Content] = {}
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in contract.slots:
        if slot.part in ("key", "value") and slot.layer is not None and slot.used_as is not None:
            groups.setdefault((slot.kind, slot.part), []).append(slot)
    for (kind, part), slots in groups.items():
        for rank, slot in enumerate(sorted(slots, key=lambda slot: slot.layer or 0)):
            found[slot.past] = (kind, part, rank)
    return found


def _find_swaps(named: dict[str, Content], found: Mapping[str, Content]) -> dict[str, str]:
    """For each slot with the content of another one, that other one; empty if slots are not simply swapped."""
    owner = {content: past for past, content in named.items()}
    owners = {past: owner[content] for past, content in found.items() if past in named and content in owner}
    trade = {past: other for past, other in owners.items() if past != other}
    return trade if set(trade) == set(trade.values()) else {}


def _swap_inputs(context: RepairContext, trade: dict[str, str]) -> list[Change]:
    file = context.file_of("decode")
    view = context.view(file)
    graph = view.branches[1].cached.graph if view.branches is not None else view.model.graph
    rename_reads(graph, trade)
    place = describe_graph(view, graph)
    return [Change(file, f"{place}, readers of {past!r}", past, other) for past, other in trade.items()]


def _swap_outputs(context: RepairContext, contract: CacheContract, trade: dict[str, str]) -> list[Change]:
    """Swap the values of outputs of the first step that have one another's content."""
    file = context.file_of("prefill")
    view = context.view(file)
    outputs = {slot.past: slot.filled_by for slot in contract.slots if slot.filled_by is not None}
    if not set(trade) <= set(outputs):
        context.cannot("the encoder graph fills the swapped slots", INSTEAD)
    places = {past: view.behind(outputs[past], cached=False) for past in trade}
    graph = next(iter(places.values()))[0].graph
    if any(scope.graph is not graph or producer(graph, name) is None for scope, name in places.values()):
        context.cannot("the swapped outputs of the first step are not computed by nodes of one graph", INSTEAD)
    # The value under one name gets the other name.
    names = {places[past][1]: places[other][1] for past, other in trade.items()}
    if set(names) != set(names.values()):
        context.cannot("the swapped outputs of the first step share a value", INSTEAD)
    before = {past: describe_maker(graph, places[past][1]) for past in trade}
    rename_values(graph, names)
    place = describe_graph(view, graph)
    return [
        Change(file, f"{place}, output {outputs[past]!r}", before[past], describe_maker(graph, places[past][1]))
        for past in trade
    ]


ADVICE = ("Feed each present to the past that the graph uses it as, whatever its name is.",)
REPAIR = Repair("slot-order", ("key-value-swapped", "layers-swapped"), "ports", "first-step", apply, ADVICE)
