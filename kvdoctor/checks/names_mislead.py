"""The names promise another cache than the graph keeps.

What it means: an input is named as an exporter names a slot of one kind, and the graph does something else with it: a
cross-attention cache that grows, a buffer of fixed size that is appended to, a key that a convolution reads. The
contract follows the graph, and so do all runs; a loop that goes by the names, as most libraries do, carries the slot
wrongly.

Reproduce: `kvdoctor contract MODEL` lists each slot as the graph uses it.

Repair: rename the inputs and outputs, or write the loop by the contract.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.findings import Advice, Fault, check


@check("KV107", "names-mislead", "contract")
def names_mislead(case: Case) -> Iterator[Fault]:
    """All promises of names that the dataflow refutes, as one finding."""
    found = case.contract.contradictions if case.contract else ()
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
