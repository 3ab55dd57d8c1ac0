"""A past that no output fills, or a present that no input takes.

Reproduce: compare the names of past inputs and present outputs over all files of the export.

Repair: add the missing file, or export again with the task that ends in `-with-past`.
"""

from kvdoctor.analysis.completeness import find_unfilled
from kvdoctor.diagnose.checks._dataflow import find_repeated, refuse_unread, unread_in_loops
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import shorten_names

OTHERS = Advice("re-export", "export again, so that each layer reads its own past and returns it with its new entries")
EXPORT_AGAIN = Advice("re-export", "add the missing file of the export, or export again with the task ...-with-past")


@check("KV102", "past-without-present", "contract")
def past_without_present(context: ContractContext) -> Faults:
    """Slots that neither the prefill nor a decode step fills.

    What it means: no present output in the whole set of files can fill a past input. Often a file is missing:
    `decoder_with_past_model.onnx` needs its `decoder_model.onnx`. A cross-attention cache that a single decoder takes
    and no file of the folder makes is no fault: the caller's encoder gives it. A cache that passes through a Loop or
    Scan which cannot be followed is not checked: some output may return it. An output in its place that returns another
    slot once more is KV306 or KV307.
    """
    contract = context.contract
    if context.stack.operator is not None:
        return  # the operator fills the slots of the graphs within it
    unread, repeated = unread_in_loops(context), find_repeated(context)
    empty = [lack.subject for lack in find_unfilled(contract) if lack.subject not in repeated]
    filled = (slot for slot in contract.of_kind("self-attention") if slot.filled_by is not None)
    lost = [slot.past for slot in filled if slot.present is None]
    for pasts, observed in ((empty, "no output of any file fills it"), (lost, "no decode step returns it")):
        subject = tuple(past for past in pasts if past not in unread)
        if subject:
            advice = context.advise_graph_repair("or export again, with a present output for each past")
            name = shorten_names(subject)
            fault = Fault("error", subject, f"no output can be fed back as {name}", advice)
            fault = fault.compare(f"a present output for {name}", observed)
            yield fault.also(where=f"inputs of {context.decode_file}")
    refuse_unread(unread, [past for past in (*empty, *lost) if past in unread])


@check("KV103", "present-without-past", "contract")
def present_without_past(context: ContractContext) -> Faults:
    """Present outputs that no past input takes.

    What it means: no graph in the whole set of files takes some present outputs as its past. Often a file is missing:
    `decoder_model.onnx` needs its `decoder_with_past_model.onnx`. A cross-attention cache that a `decoder_with_past`
    takes and does not return is no fault: the loop keeps it.
    """
    contract = context.contract
    if context.stack.operator is not None:
        return
    if any(port.shape is None or not port.dtype for port in contract.graph("decode").inputs):
        return  # one of them may be the past; contract-unknown reports it
    read = {*unread_in_loops(context), *(name for slot in contract.slots for name in (slot.present, slot.filled_by))}
    pasts = tuple(port.name for port in contract.graph("decode").inputs if port.role == "past")
    others = f"the graph takes {shorten_names(pasts)}, and returns none of them there"
    advice, observed = (OTHERS, others) if pasts else (EXPORT_AGAIN, "no graph of the export has one")
    for graph in contract.graphs.values():
        unread = tuple(port.name for port in graph.outputs if port.role == "present" and port.name not in read)
        if unread:
            cause = f"no input takes {shorten_names(unread)}, which this graph returns"
            fault = Fault("error", unread, cause, advice, file=graph.file, where=f"outputs of {graph.file}")
            yield fault.compare(f"a past input that takes {shorten_names(unread)}", observed)
