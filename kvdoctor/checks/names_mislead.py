"""The names promise another cache than the graph keeps.

What it means: an input is named as an exporter names a slot of one kind, and the graph does something else with it: a
cross-attention cache that grows, a buffer of fixed size that is appended to, a key that a convolution reads. Or the
outputs have the numbers of the inputs, each that of another layer: a warning, since a loop that counts goes wrong. The
contract follows the graph, and so do all runs; a loop that goes by the names, as most libraries do, carries the slot
wrongly.

Reproduce: `kvdoctor contract MODEL` lists each slot as the graph uses it.

Repair: rename the inputs and outputs, or write the loop by the contract.
"""

import re
from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.findings import Advice, Fault, check


@check("KV107", "names-mislead", "contract")
def names_mislead(case: Case) -> Iterator[Fault]:
    """All promises of names that the dataflow refutes, as one finding."""
    if case.contract is None:
        return
    yield from _numbered_otherwise(case, case.contract)
    found = case.contract.contradictions
    if not found:
        return
    names = tuple(entry.subject for entry in found)
    yield Fault(
        severity="note",
        file=case.decode_file,
        subject=names,
        where=f"input {first_and_count(names)}",
        promised="slots that are used as their names say",
        observed="; ".join(dict.fromkeys(entry.reason for entry in found[:4])),
        cause="the names promise another cache than the graph keeps",
        advice=Advice("caller", "carry each slot as `kvdoctor contract` says, not by its name"),
    )


def _numbered_otherwise(case: Case, contract: CacheContract) -> Iterator[Fault]:
    """Outputs whose numbers are those of the inputs, in another order."""
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in contract.slots:
        groups.setdefault((slot.kind, slot.part), []).append(slot)
    crossed = [pair for slots in groups.values() for pair in _crossed(slots)]
    if crossed:
        names = tuple(present for _, present in crossed)
        yield Fault(
            severity="warning",
            file=case.decode_file,
            subject=names,
            where=f"output {first_and_count(names)}",
            promised="outputs that are numbered as the inputs they are fed back to",
            observed=f"{crossed[0][1]} is what comes of {crossed[0][0]}",
            cause="the numbers in the names of outputs are those of other layers",
            advice=Advice("caller", "carry each slot as `kvdoctor contract` says, not by its name or place"),
        )


def _crossed(slots: list[Slot]) -> list[tuple[str, str]]:
    """Past and present of slots that have other numbers, where both sides are numbered alike."""
    pairs = [(slot.past, slot.present) for slot in slots if slot.present is not None]
    if len(pairs) < max(len(slots), 2):
        return []
    pasts, presents = (list(zip(*map(_numbers, side), strict=False)) for side in zip(*pairs, strict=True))
    alike = [(into, out) for into in pasts for out in presents if len({*into}) == len(into) and {*into} == {*out}]
    if not alike or any(into == out for into, out in alike):
        return []
    return [pair for pair, into, out in zip(pairs, *alike[0], strict=True) if into != out]


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]{1,6}", name)]
