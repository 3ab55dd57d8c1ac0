"""The names of inputs or outputs do not match the cache of the graph.

What it means: an input has the name that an exporter gives to one kind of slot, and the graph uses it as another kind:
a cross-attention cache that grows, a buffer of fixed size that is appended to, a key that a convolution reads. It is a
warning if the outputs have the numbers of the inputs, each of another layer, or the other parts of their names, each of
another slot; or if no names tell which output belongs to which input, and the outputs are in another order than the
inputs: a loop that matches names, or goes by their order, computes wrong logits, and no runtime reports an error. The
contract and all runs follow the graph.

Reproduce: `kvdoctor contract MODEL` lists each slot as the graph uses it.

Repair: rename the inputs and outputs, or write the loop by the contract.
"""

import re
from itertools import takewhile

from kvdoctor.analysis.slot_rules import pair_by_name
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import shorten_names

MOST_PAIRS = 4
"""Pairs that a finding lists; `kvdoctor contract` has them all."""
BY_CONTRACT = Advice(
    "caller", "feed each output back to the input that `kvdoctor contract` lists for it, not by its place or its name"
)


@check("KV107", "names-mislead", "contract")
def names_mislead(context: ContractContext) -> Faults:
    """All names that the dataflow contradicts, as one finding."""
    contract = context.contract
    moved = (
        tuple(_find_other_read_numbers(contract))
        or tuple(_find_other_names(contract))
        or tuple(_find_another_order(contract))
    )
    yield from moved
    named = {name for fault in moved for name in fault.subject}
    known = {slot.past for slot in contract.slots if slot.present in named}
    found = [entry for entry in contract.contradictions if entry.subject not in known]
    if not found:
        return
    advice = Advice("caller", "feed each slot back as `kvdoctor contract` lists it, not by its name")
    names, seen = tuple(entry.subject for entry in found), dict.fromkeys(entry.reason for entry in found[:4])
    fault = Fault("note", names, "the names do not match the cache of the graph", advice)
    yield fault.compare("slots that the graph uses as their names say", "; ".join(seen))


def _find_other_read_numbers(contract: CacheContract) -> Faults:
    """Outputs with the numbers of the inputs, in another order."""
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in contract.slots:
        groups.setdefault((slot.kind, slot.part), []).append(slot)
    crossed = [pair for slots in groups.values() for pair in _find_crossed(slots)]
    if crossed:
        declared = "outputs with the numbers of the inputs to which they are fed back"
        yield _report(crossed, "the numbers in the names of outputs are those of other layers", declared)


def _find_other_names(contract: CacheContract) -> Faults:
    """Outputs whose names pair all of them with inputs, and not as the graph does."""
    pairs = {slot.past: slot.present for slot in contract.slots if slot.present is not None}
    promised = pair_by_name(list(pairs), set(pairs.values()))
    crossed = [(past, present) for past, present in pairs.items() if promised.get(past, present) != present]
    if crossed:
        declared = f"{promised[crossed[0][0]]} as the present of {crossed[0][0]}, by its name"
        yield _report(crossed, "the names of outputs are those of other slots", declared)


def _report(crossed: list[tuple[str, str]], cause: str, declared: str) -> Fault:
    """Pasts with presents that their names give to others."""
    fault = Fault("warning", tuple(present for _, present in crossed), cause, BY_CONTRACT)
    return fault.compare(declared, f"{crossed[0][1]} is the present of {crossed[0][0]}")


def _find_another_order(contract: CacheContract) -> Faults:
    """Outputs in another order than the inputs, where no names tell which belong together and shapes do not either."""
    slots = [slot for slot in contract.slots if slot.present is not None]
    pairs = ((slot, other) for slot in slots for other in slots if other is not slot)
    # Names alone pair each past with its present.
    if contract.has_known_names or all(_in_common(one, one) > _in_common(one, other) for one, other in pairs):
        return
    graph = contract.graph("decode")
    places = {port.name: place for ports in (graph.inputs, graph.outputs) for place, port in enumerate(ports)}
    by_input = sorted(slots, key=lambda slot: places.get(slot.past, 0))
    by_output = sorted(slots, key=lambda slot: places.get(slot.present or "", 0))
    same = (pair for pair in zip(by_input, by_output, strict=True) if pair[0] is not pair[1])
    kinds = ((slot, {(one.dtype, one.axes, one.sized({})) for one in (slot, there)}) for slot, there in same)
    moved = [slot for slot, kind in kinds if len(kind) == 1]  # the present of one could be fed to the other
    if moved:
        seen = [f"{slot.present} is the present of {slot.past}" for slot in moved]
        cause = "the outputs are not in the order of the inputs to which they are fed back"
        declared = "outputs in the order of the inputs to which they are fed back, as no names tell it"
        fault = Fault("warning", tuple(slot.present or "" for slot in moved), cause, BY_CONTRACT)
        effects = ("a loop that feeds the outputs back in their order computes wrong logits",)
        yield fault.compare(declared, shorten_names(seen, MOST_PAIRS)).also(effects=effects)


def _in_common(slot: Slot, other: Slot) -> tuple[int, int]:
    """How many parts (text or number) a past and a present share, and how many letters both begin with: `h`, `hn`."""
    past, present = slot.past, other.present or ""
    words, others = ({*re.findall(r"[a-z]+|[0-9]+", name.lower())} for name in (past, present))
    begin = takewhile(lambda pair: pair[0] == pair[1], zip(past, present, strict=False))
    return len(words & others), len(list(begin))


def _find_crossed(slots: list[Slot]) -> list[tuple[str, str]]:
    """Past and present of slots whose numbers differ, if both sides use the same numbers."""
    pairs = [(slot.past, slot.present) for slot in slots if slot.present is not None]
    if len(pairs) < max(len(slots), 2):
        return []
    numbers = ([map(int, re.findall(r"[0-9]{1,6}", name)) for name in side] for side in zip(*pairs, strict=True))
    pasts, presents = (list(zip(*side, strict=False)) for side in numbers)
    matching = [(into, out) for into in pasts for out in presents if len({*into}) == len(into) and {*into} == {*out}]
    if not matching or any(into == out for into, out in matching):
        return []
    return [pair for pair, into, out in zip(pairs, *matching[0], strict=True) if into != out]
