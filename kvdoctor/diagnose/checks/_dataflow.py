"""Not a check: what the dataflow of the decode graph says of a slot, as evidence for what the runs show."""

from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.flatten import FlatNode
from kvdoctor.report.wording.units import shorten_names

MOST_NODES = 3


def describe_changes(context: ContractContext, past: str) -> tuple[str, ...]:
    """The nodes between a past and its present that change its entries or cut some off, in one line; () for none."""
    flow = _follow(context)
    slot = next((slot for slot in context.contract.slots if slot.past == past), None)
    if flow is None or slot is None or slot.present is None:
        return ()
    nodes = flow.find_changes(past, len(slot.shape), slot.present)
    more = f" and {len(nodes) - MOST_NODES} more" if len(nodes) > MOST_NODES else ""
    words = ", ".join(map(_name, nodes[:MOST_NODES])) + more
    return (f"between {past} and {slot.present}: {words}",) if nodes else ()


def describe_unread(context: ContractContext) -> tuple[str, ...]:
    """The pasts that no logit of a decode step depends on, with an attention that should read one; () for none."""
    flow, logits = _follow(context), context.contract.graph("decode").port("logits")
    if flow is None or logits is None or logits.name not in flow.flow.results:
        return ()
    behind = flow.descent.ancestors(flow.flow.results[logits.name])
    unread = [slot for slot in context.contract.of_kind("self-attention") if slot.past not in behind]
    if not unread:
        return ()
    uses = (flow.state(slot.past, len(slot.shape)).use for slot in unread)
    site = next((use.site for use in uses if use is not None), None)
    where = f": {_name(flow.flow.nodes[site])} reads the new entries alone" if site is not None else ""
    return (f"no logit depends on {shorten_names(tuple(slot.past for slot in unread))}{where}",)


def _follow(context: ContractContext) -> Dataflow | None:
    """The dataflow of a decode step, where its graph is one file of the stack."""
    name = context.contract.graph("decode").file
    return next((file.dataflow for file in context.stack.files.values() if file.name == name), None)


def _name(node: FlatNode) -> str:
    return f'{node.op} "{node.proto.name or node.output()}"'
