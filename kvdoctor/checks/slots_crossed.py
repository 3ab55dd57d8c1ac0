"""Names and dataflow of the cache disagree.

What it means: the names say which present is carried back into which past, and the graph says what each is used for.
Where `present.0.key` holds what the next step must take as a value, keys and values are crossed (KV306); where it holds
the keys of another layer, layers are crossed (KV307). Both have the same shapes, so that no runtime complains: a loop
that goes by the names computes wrong logits. Where all graphs agree and the names alone are wrong, no loop is hurt and
it is a note: a tool that quantises keys and values apart, or drops layers, would take the wrong ones.

How it is found: by following each past to the output that carries its content and to the attention that uses it, before
the Softmax as a key or behind it as a value; and each output that first fills a past to its own attention. A run whose
logits are those of a run without the cache overrules that. Where the graph does not tell, a step whose logits differ is
looked into: an entry is held against those of the other slots.

Reproduce: `kvdoctor contract MODEL --format json`: `used_as`, `used_at`, `continues_as`, `made_as` and `made_at` of a
slot beside its `part`, `layer` and `present`.

Repair: rename the outputs, or export again with the output names in the order in which the graph returns them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.case import Case, first_and_count
from kvdoctor.checks.caused import Words, caused
from kvdoctor.contract import Slot
from kvdoctor.findings import Advice, Fault, check

EXPORT_AGAIN = "rename the outputs, or export again with the output names in the order the graph returns them"

PARTS = Words(
    cause="a key comes back where a value must, or the other way round",
    promised="each slot's own entries under its name",
    advice=EXPORT_AGAIN,
    on_graph=True,
)
LAYERS = Words(
    cause="the entries of one layer come back where those of another must",
    promised="each slot's own entries under its name",
    advice=EXPORT_AGAIN,
    on_graph=True,
)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A slot, the output that is named for it, and what that output really holds."""

    slot: Slot
    output: str
    holds: str


@check("KV306", "key-value-swapped", "contract", "runs")
def key_value_swapped(case: Case) -> Iterator[Fault]:
    """Slots that are carried or filled from the other half of their layer, or only named after it."""
    if case.declared_faults is not None:
        yield from caused(case, "key-value-swapped", PARTS)
        return
    slots = case.contract.slots if case.contract else ()
    crossed = [item for item in _crossings(slots) if item.holds in ("the key", "the value")]
    yield from _faults(case, crossed, "keys and values of the cache are swapped")
    misnamed = tuple(slot for slot in slots if (slot.part, slot.used_as) in (("key", "value"), ("value", "key")))
    if misnamed and not crossed:
        yield _misnamed(case, misnamed, f"the {misnamed[0].part}", f"the {misnamed[0].used_as}", "keys and values")


@check("KV307", "layers-swapped", "contract", "runs")
def layers_swapped(case: Case) -> Iterator[Fault]:
    """Slots that are carried or filled from another layer."""
    if case.declared_faults is not None:
        yield from caused(case, "layers-swapped", LAYERS)
        return
    slots = case.contract.slots if case.contract else ()
    crossed = [item for item in _crossings(slots) if item.holds.startswith("layer")]
    yield from _faults(case, crossed, "layers of the cache are swapped")
    misnamed = tuple(slot for slot, rank in _by_layer(slots) if slot.used_at != rank)
    if misnamed and not crossed:
        slot = misnamed[0]
        yield _misnamed(case, misnamed, f"layer {slot.layer}", f"attention number {slot.used_at}", "layers")


def _by_layer(slots: tuple[Slot, ...]) -> Iterator[tuple[Slot, int]]:
    """Slots whose attention is known, numbered by layer among those of their kind and part: (slot, number)."""
    counts: dict[tuple[str, str | None], int] = {}
    for slot in sorted((s for s in slots if s.layer is not None and s.used_at is not None), key=lambda s: s.layer or 0):
        group = (slot.kind, slot.used_as)
        yield slot, counts.get(group, 0)
        counts[group] = counts.get(group, 0) + 1


def _misnamed(case: Case, slots: tuple[Slot, ...], named: str, used: str, what: str) -> Fault:
    names = tuple(slot.past for slot in slots)
    return Fault(
        severity="note",
        file=case.decode_file,
        subject=names,
        where=f"input {first_and_count(names)}",
        promised=f"{names[0]} is {named}",
        observed=f"the graph uses it as {used}",
        cause=f"{what} bear each other's names, in every graph alike: no loop is hurt",
        advice=Advice("re-export", EXPORT_AGAIN),
    )


def _crossings(slots: tuple[Slot, ...]) -> Iterator[_Crossing]:
    """Slots whose present, or first filling, holds what belongs to another slot."""
    owners = {slot.present: slot for slot in slots if slot.present is not None}
    for slot in slots:
        owner = owners.get(slot.continues_as or "")
        if slot.present is not None and owner is not None and owner is not slot:
            holder = next((other for other in slots if other.continues_as == slot.present), None)
            yield _Crossing(slot, slot.present, _belongs(holder, slot) if holder else "something else")
        elif slot.filled_by is not None and slot.made_as is not None and slot.used_as is not None:
            if slot.made_as != slot.used_as:
                yield _Crossing(slot, slot.filled_by, f"the {slot.made_as}")
            elif slot.made_at is not None and slot.made_at != slot.used_at:
                yield _Crossing(slot, slot.filled_by, f"layer {_layer_at(slots, slot)}")


def _belongs(holder: Slot, slot: Slot) -> str:
    return f"layer {holder.layer}" if holder.layer != slot.layer else f"the {holder.part}"


def _layer_at(slots: tuple[Slot, ...], slot: Slot) -> int | None:
    alike = (other for other in slots if (other.kind, other.used_as) == (slot.kind, slot.used_as))
    return next((other.layer for other in alike if other.used_at == slot.made_at), slot.made_at)


def _faults(case: Case, crossed: list[_Crossing], cause: str) -> Iterator[Fault]:
    run = case.judged
    if not crossed or case.proved_right:
        return
    first = crossed[0]
    names = tuple(dict.fromkeys(item.output for item in crossed))
    of = f"{first.slot.part} of layer {first.slot.layer}" if first.slot.layer is not None else first.slot.part
    yield Fault(
        severity="error",
        file=case.decode_file,
        subject=names,
        where=f"output {first_and_count(names)}",
        promised=f"{first.output} holds the {of}, and is fed back as {first.slot.past}",
        observed=f"the graph returns {first.holds} there",
        cause=cause,
        advice=case.re_export(f"or {EXPORT_AGAIN}"),
        follows=tuple(_shown(case)),
        confidence="confirmed" if run is not None and run.outcome in ("differs", "failed") else "suspected",
    )


def _shown(case: Case) -> Iterator[str]:
    """What the judged run made of it."""
    run = case.judged
    if run is not None and run.outcome in ("differs", "failed"):
        yield f"{run.experiment}: {run.outcome} at step {run.failed_step}"
