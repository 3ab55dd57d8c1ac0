"""Not a check: what the dataflow of the decode graph says of a slot, as evidence for what the runs show."""

from collections.abc import Collection

from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.unread_loops import find_unread_loops
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import CannotCheck
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


def describe_rounded(context: ContractContext, past: str | None = None) -> tuple[str, ...]:
    """The nodes that round a present on the way to the output alone; () for none.

    It is that of the slot with this past, or the first one that is rounded.
    """
    wanted = next((slot.present for slot in context.contract.slots if slot.past == past), None)
    for name, processed in context.rounded_presents.items():
        if past is None or name == wanted:
            text = f"between the attention and {name}: {', '.join(processed.words)}"
            cuts = any(node.op_type == "QuantizeLinear" for node in processed.rounding)
            return (text + ("; it would also cut off entries beyond the range of its scale" if cuts else ""),)
    return ()


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


def unread_in_loops(context: ContractContext) -> dict[str, str]:
    """The inputs and outputs between which a loop stands that was not followed, each with that loop."""
    return find_unread_loops(_follow(context), context.contract)


def refuse_unread(unread: dict[str, str], left_out: Collection[str]) -> None:
    """Say why nothing is known of the pasts that a check left out.

    Raises:
        CannotCheck: it left some out.
    """
    if left_out:
        loop = next(unread[name] for name in left_out)
        raise CannotCheck(
            f"which output returns {shorten_names(tuple(left_out))} cannot be read from the graph, because the cache "
            f"passes through {loop}; `step-test --contract FILE` takes a contract that says it",
            essential=True,
        )


def _follow(context: ContractContext) -> Dataflow | None:
    """The dataflow of a decode step, where its graph is one file of the stack."""
    name = context.contract.graph("decode").file
    return next((file.dataflow for file in context.stack.files.values() if file.name == name), None)


def _name(node: FlatNode) -> str:
    return f'{node.op} "{node.proto.name or node.output()}"'
