"""A cache is promised or suspected, but nothing says how to drive it.

What it means: the graph has inputs or outputs that look like a cache, and kvdoctor could not read from it what a loop
must feed, feed back and hold. No decode step was run, so nothing is said of its health.

Reproduce: `kvdoctor inspect MODEL` lists what was found and what is missing.

Repair: export with the names of Hugging Face Optimum (`past_key_values.N.key`, `present.N.key`).
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check


@check("KV101", "contract-unknown", "contract")
def contract_unknown(case: Case) -> Iterator[Fault]:
    """Contracts with something missing."""
    contract = case.contract
    if contract is None or not contract.missing:
        return
    presents = any(port.role == "present" for graph in contract.graphs.values() for port in graph.outputs)
    if case.stack and case.stack.kind == "unpaired" and (contract.slots or presents):
        return  # past-without-present and present-without-past name this fault
    found = f"{len(contract.slots)} slots" if contract.slots else "no slot"
    reasons = [f"{lack.subject!r}: {lack.reason}" for lack in contract.missing[:4]]
    yield Fault(
        severity="error",
        file=case.decode_file,
        subject=tuple(dict.fromkeys(lack.subject for lack in contract.missing)),
        where=f"file {case.decode_file}",
        promised="a cache that a loop can drive",
        observed=f"{found}; {'; '.join(reasons)}" + ("; ..." if len(contract.missing) > len(reasons) else ""),
        cause="the cache contract cannot be read from the graph",
        advice=Advice("re-export", "export with past and present named as Optimum names them"),
    )
