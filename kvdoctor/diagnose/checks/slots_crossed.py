"""Names and dataflow of the cache disagree.

How it is decided: each past is followed to the output with its content and to the attention that uses it, before the
Softmax as a key or after it as a value; each output that first fills a past to its own attention; and new entries that
are stored in one slot are those that the attention reads from another. A run whose logits match those of a run without
the cache overrules this. If the graph does not show it, the entries of a step with differing logits are compared with
those of the other slots.

Reproduce: `kvdoctor contract MODEL --format json`: `used_as`, `used_at`, `continues_as`, `made_as` and `made_at` of a
slot with its `part`, `layer` and `present`.

Repair: rename the outputs, or export again with the output names in the order in which the graph returns them.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.contract import Slot
from kvdoctor.diagnose.checks._dataflow import find_exchanged_entries, find_repeated
from kvdoctor.diagnose.checks._faults import CauseText, check_cause
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.records import record

EXPORT_AGAIN = "rename the outputs if only their names are exchanged, else export again"
PARTS = CauseText(
    cause="a step returns a key in the place of a value, or a value in the place of a key",
    declared="the entries of each slot under its own name",
    advice=EXPORT_AGAIN,
    on_graph=True,
)
LAYERS = replace(PARTS, cause="a step returns the entries of one layer in the place of another's")


@record
class _Crossing:
    """A slot, the output with its name, and the real content of that output."""

    slot: Slot
    output: str
    holds: str


@check("KV306", "key-value-swapped", "contract")
def key_value_swapped(context: ContractContext) -> Faults:
    """Slots filled from the other half of their layer, or only named after it.

    What it means: an output named as a key contains the value of its layer, or the other way round. Both have the same
    shape, so that no runtime reports an error: a loop that goes by the names computes wrong logits. If all graphs agree
    and only the names are wrong, loops work and it is a note: a tool that quantizes keys and values differently would
    take the wrong ones.
    """
    slots = context.contract.slots
    crossed = [item for item in _find_crossings(context) if item.holds in ("the key", "the value")]
    yield from _report_crossings(context, crossed, "keys and values of the cache are swapped")
    misnamed = tuple(slot for slot in slots if (slot.part, slot.used_as) in (("key", "value"), ("value", "key")))
    if misnamed and not crossed:
        yield _report_names(misnamed, f"the {misnamed[0].part}", f"the {misnamed[0].used_as}", "keys and values")


@check("KV307", "layers-swapped", "contract")
def layers_swapped(context: ContractContext) -> Faults:
    """Slots filled from another layer, or only named after it.

    What it means: an output named after one layer contains the keys or values of another. Both have the same shape, so
    that no runtime reports an error: a loop that goes by the names computes wrong logits. If all graphs agree and only
    the names are wrong, loops work and it is a note: a tool that drops layers would take the wrong ones.
    """
    slots = context.contract.slots
    crossed = [item for item in _find_crossings(context) if item.holds.startswith("layer")]
    yield from _report_crossings(context, crossed, "layers of the cache are swapped")
    misnamed = tuple(slot for slot, rank in _number_by_layer(slots) if slot.used_at != rank)
    if misnamed and not crossed:
        slot = misnamed[0]
        yield _report_names(misnamed, f"layer {slot.layer}", f"attention number {slot.used_at}", "layers")


check_cause(__name__, "KV306", "key-value-swapped", "runs", PARTS)
check_cause(__name__, "KV307", "layers-swapped", "runs", LAYERS)


def _number_by_layer(slots: tuple[Slot, ...]) -> Iterator[tuple[Slot, int]]:
    """Slots whose attention is known, numbered by layer among those of their kind and part: (slot, number)."""
    counts: dict[tuple[str, str | None], int] = {}
    for slot in sorted((s for s in slots if s.layer is not None and s.used_at is not None), key=lambda s: s.layer or 0):
        group = (slot.kind, slot.used_as)
        yield slot, counts.get(group, 0)
        counts[group] = counts.get(group, 0) + 1


def _report_names(slots: tuple[Slot, ...], named: str, used: str, what: str) -> Fault:
    names = tuple(slot.past for slot in slots)
    cause = f"{what} have each other's names, in every graph: no loop is affected"
    fault = Fault("note", names, cause, Advice("re-export", EXPORT_AGAIN))
    return fault.compare(f"{names[0]} is {named}", f"the graph uses it as {used}")


def _find_crossings(context: ContractContext) -> Iterator[_Crossing]:
    """Slots whose present, or first filling, has the content of another slot."""
    slots, repeated = context.contract.slots, find_repeated(context)
    for slot in (slot for slot in slots if slot.past in repeated):
        output, other = repeated[slot.past]
        yield _Crossing(slot, output, _name_owner(other, slot))
    for slot, other in find_exchanged_entries(context):
        yield _Crossing(slot, slot.present or "", _name_owner(other, slot))
    owners = {slot.present: slot for slot in slots if slot.present is not None}
    for slot in slots:
        owner = owners.get(slot.continues_as or "")
        if slot.present is not None and owner is not None and owner is not slot:
            holder = next((other for other in slots if other.continues_as == slot.present), None)
            yield _Crossing(slot, slot.present, _name_owner(holder, slot) if holder else "something else")
        elif slot.filled_by is not None and slot.made_as is not None and slot.used_as is not None:
            if slot.made_as != slot.used_as:
                yield _Crossing(slot, slot.filled_by, f"the {slot.made_as}")
            elif slot.made_at is not None and slot.made_at != slot.used_at:
                same = (
                    one
                    for one in slots
                    if (one.kind, one.used_as, one.used_at) == (slot.kind, slot.used_as, slot.made_at)
                )
                yield _Crossing(slot, slot.filled_by, f"layer {next((one.layer for one in same), slot.made_at)}")


def _name_owner(holder: Slot, slot: Slot) -> str:
    if holder.layer == slot.layer and holder.part != slot.part:
        return f"the {holder.part}"
    return f"layer {holder.layer} ({holder.past})" if holder.layer is not None else f"layer of {holder.past}"


def _report_crossings(context: ContractContext, crossed: list[_Crossing], cause: str) -> Faults:
    if not crossed or context.passes_parity:
        return
    first, run = crossed[0], context.checked_loop if context.loop_is_wrong else None
    names = tuple(dict.fromkeys(item.output for item in crossed))
    of = f"{first.slot.part} of layer {first.slot.layer}" if first.slot.layer is not None else first.slot.part
    fault = Fault("error", names, cause, context.advise_graph_repair(f"or {EXPORT_AGAIN}"), confidence="suspected")
    declared = f"{first.output} is the {of}, and is fed back as {first.slot.past}"
    fault = fault.compare(declared, f"the graph returns {first.holds} as {first.output}")
    if run is not None:
        effects = (f"{run.experiment}: {run.outcome} at step {run.failed_step}",)
        fault = fault.also(confidence="confirmed", effects=effects)
    yield fault
