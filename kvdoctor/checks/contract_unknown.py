"""A cache is promised or suspected, but nothing says how to drive it.

What it means: the graph has inputs or outputs that look like a cache, and kvdoctor could not read from it what a loop
must feed, feed back and hold. No decode step was run, so nothing is said of its health. Or no state leaves the graph at
all, although new keys and values join constants in it: the module kept its cache to itself, in an attribute or a
buffer, and the export made constants of what it held. Every call then starts from the same cache.

Reproduce: `kvdoctor inspect MODEL` lists what was found and what is missing.

Repair: write the contract out (`kvdoctor contract MODEL --format json`), say in it what is missing, and give it to
`step-test --contract`. Or export with the names of Hugging Face Optimum (`past_key_values.N.key`, `present.N.key`). A
cache that the module keeps must go in and out of `forward` as tensors.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.lacks import unfilled
from kvdoctor.lost_state import constant_caches, gives_logits

HAND_OVER = Advice(
    "re-export",
    "take the cache as inputs of forward() and return it with the new entries as outputs, then export again",
)
DESCRIBE = (
    "say what is missing: `kvdoctor contract MODEL --format json` writes the contract out, `step-test --contract FILE` "
    "takes it as you edit it; or export again with past and present named as Optimum names them"
)


@check("KV101", "contract-unknown", "contract", "file")
def contract_unknown(case: Case) -> Iterator[Fault]:
    """Contracts with something missing, and graphs that keep their cache to themselves."""
    contract = case.contract
    if case.file is not None:
        yield from _kept_inside(case)
    if contract is None:
        return
    empty = {*unfilled(contract)}  # past-without-present names these
    missing = [lack for lack in contract.missing if lack not in empty]
    if not missing:
        return
    presents = any(port.role == "present" for graph in contract.graphs.values() for port in graph.outputs)
    if case.stack and case.stack.kind == "unpaired" and (contract.slots or presents):
        return  # past-without-present and present-without-past name this fault
    found = f"{len(contract.slots)} slots" if contract.slots else "no slot"
    reasons = [f"{lack.subject!r}: {lack.reason}" for lack in missing[:4]]
    yield Fault(
        severity="error",
        file=case.decode_file,
        subject=tuple(dict.fromkeys(lack.subject for lack in missing)),
        where=f"file {case.decode_file}",
        promised="a cache that a loop can drive",
        observed=f"{found}; {'; '.join(reasons)}" + ("; ..." if len(missing) > len(reasons) else ""),
        cause="the cache contract cannot be read from the graph",
        advice=Advice("caller", DESCRIBE),
    )


def _kept_inside(case: Case) -> Iterator[Fault]:
    """Asked only where no file of the folder hands a cache in or out: what else might a constant prefix be."""
    file = case.file
    if case.folder.stacks or file is None or not gives_logits(file) or not (constants := constant_caches(file)):
        return
    yield Fault(
        severity="error",
        file=file.name,
        subject=constants,
        where=f"file {file.name}, constant {first_and_count(constants)}",
        promised="a cache that goes in as past and comes out as present",
        observed="new keys and values join constants, and no state leaves the graph, which has no past and no present",
        cause="the cache was kept inside the module, and the export made constants of it",
        advice=HAND_OVER,
        follows=("every call starts from the same cache, whatever was decoded before",),
        confidence="suspected",
    )
