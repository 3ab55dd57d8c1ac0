"""A past that nothing fills, or a present that nothing reads.

What it means: in the whole set of files there is a past input without a present output that could fill it (KV102), or
present outputs that no graph takes as past (KV103). Often a file is missing: `decoder_model.onnx` needs its
`decoder_with_past_model.onnx`, and the other way round. The cross-attention cache that a `decoder_with_past` takes and
does not return is right: it is held.

Reproduce: compare the names of past inputs and present outputs over all files of the export.

Repair: bring the missing file, or export again with the task that ends in `-with-past`.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.lacks import unfilled

EXPORT_AGAIN = Advice("re-export", "bring the missing file of the export, or export again with the task ...-with-past")


@check("KV102", "past-without-present", "contract")
def past_without_present(case: Case) -> Iterator[Fault]:
    """Slots that neither the prefill nor a decode step fills."""
    contract = case.contract
    if case.stack is not None and case.stack.kind == "operator":
        return  # the operator fills the slots of the graphs within it
    empty = tuple(lack.subject for lack in unfilled(contract)) if contract else ()
    lost = tuple(
        slot.past
        for slot in (contract.slots if contract else ())
        if slot.filled_by is not None and slot.present is None and slot.kind == "self-attention"
    )
    for subject, observed in ((empty, "no output of any file fills it"), (lost, "no decode step returns it")):
        if subject:
            yield Fault(
                severity="error",
                file=case.decode_file,
                subject=subject,
                where=f"inputs of {case.decode_file}",
                promised=f"a present output for {first_and_count(subject)}",
                observed=observed,
                cause="the loop has nothing to feed this past from",
                advice=case.re_export("or export again, so that each past is returned"),
            )


@check("KV103", "present-without-past", "contract")
def present_without_past(case: Case) -> Iterator[Fault]:
    """Present outputs that no past input takes."""
    contract = case.contract
    if contract is None:
        return
    if any(port.shape is None or not port.dtype for port in contract.graph("decode").inputs):
        return  # one of them may be the past, which contract-unknown says
    read = {name for slot in contract.slots for name in (slot.present, slot.filled_by)}
    for graph in contract.graphs.values():
        unread = tuple(port.name for port in graph.outputs if port.role == "present" and port.name not in read)
        if unread:
            yield Fault(
                severity="error",
                file=graph.file,
                subject=unread,
                where=f"outputs of {graph.file}",
                promised=f"a past input that takes {first_and_count(unread)}",
                observed="no graph of the export has one",
                cause="the cache that this graph makes cannot be fed to anything",
                advice=EXPORT_AGAIN,
            )
