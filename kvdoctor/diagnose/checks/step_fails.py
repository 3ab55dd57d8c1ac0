"""A decode step fails.

Reproduce: `kvdoctor step-test MODEL -v` lists the inputs and outputs of each step.

Repair: the node and the shapes of its inputs show which axis the export has fixed. `kvdoctor re-export` makes it
dynamic if numbers in the graph stand for it; else export again with sample inputs of different sizes, all 2 or more. If
several sequences at once, or another encoder length, fail while one sequence works, it is a warning. A length that no
config declares usable is not a fault.
"""

from kvdoctor.contract import describe
from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.checks._attribution import find_faulty_uses, leave_to_other, rejects_empty_past
from kvdoctor.diagnose.checks._faults import SHORT_STATE, describe_location, find_undeclared_size, list_nodes, name_node
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, Faults, Severity, check
from kvdoctor.model.operators import has

SHOWN_ROLES = ("token_ids", "token_and_position", "embeddings", "past")
EXPORT_AGAIN = "or export again with sample inputs of different sizes, all 2 or more"
AT_NODE = "or correct the graph at that node, or export again"
NOT_PROVED = f"{AT_NODE} (no fixed number in the graph explains the error)"
OTHER_ATTENTION = "or export again with another attention operator, or with sizes that the kernel of that one takes"


@check("KV201", "empty-past-rejected", "runs")
def empty_past_rejected(context: RunContext) -> Faults:
    """The first step with past length 0, if it runs with a dummy past of length 1.

    What it means: the runtime stops with an error if the past of the first step has length 0, and runs if it has length
    1. Most loops begin with an empty cache and fail in their first call.
    """
    run = context.find_run("empty-past")
    if run is not None and rejects_empty_past(context):
        yield _build_fault(context, run, "error", "the first step fails with a past of length 0", "a past of length 0")


@check("KV202", "step-fails", "runs")
def step_fails(context: RunContext) -> Faults:
    """A checked loop, or runs of other sizes, that fail without a named cause.

    What it means: the runtime stops with an error in a call that the cache contract allows, and no other check names
    the cause. It is a warning if only several sequences at once, or another encoder length, fail. A length that no
    config declares usable is not a fault.
    """
    run = context.checked_loop
    if run is None:
        return
    leave_to_other(context)
    if run.outcome == "failed":
        yield _build_fault(context, run, "error", _name_failed_step(run), "a step that passes")
        return
    for other, use in find_faulty_uses(context, "failed"):
        if other.experiment in ("chunk", "full-context"):
            continue  # those have checks of their own
        last, limit = other.steps[-1] if other.steps else None, context.contract.context_limit or 0
        uncached = other.experiment == "long-past" and last is not None and last.phase != "decode"
        if uncached and last is not None and limit < last.new_tokens:
            continue  # no file says that the model takes so many tokens
        cause = f"with {use.words}, {_name_failed_step(other)}"
        yield _build_fault(context, other, use.severity, cause, use.words).also(use=use.required)


def _name_failed_step(run: Run) -> str:
    last = run.steps[-1] if run.steps else None
    if last is not None and last.phase == "reference":
        return f"the reference run, {last.new_tokens} tokens in one call without a cache, fails"
    return "the first step fails" if run.failed_step == 0 else f"decode step {run.failed_step} fails"


def _build_fault(context: RunContext, run: Run, severity: Severity, cause: str, declared: str) -> Fault:
    node = run.fault_node
    place = name_node(run.location) if run.location else None
    place = place or (node.shown if node else f"file {context.decode_file}")
    step = run.steps[-1] if run.steps else None
    mismatch = find_undeclared_size(context, run)
    ports = context.contract.graph("decode" if step and step.phase == "decode" else "prefill").inputs
    given = [(port.name, (step.fed if step else {}).get(port.name)) for port in ports if port.role in SHOWN_ROLES]
    fed = [f"{name} {describe(seen.dtype, seen.shape)}" for name, seen in given if seen is not None]
    shown = ", ".join(fed[:3])
    call = "reference run" if step and step.phase == "reference" else f"step {run.failed_step}"
    fixed = run.location is not None and run.location.frozen_by is not None
    again = EXPORT_AGAIN if fixed else AT_NODE if run.experiment == "empty-past" else NOT_PROVED
    again = OTHER_ATTENTION if node is not None and has(node.op, "attend") else again
    cause += (f" ({run.reason})" if run.reason and run.error else "") + (f": {mismatch}" if mismatch else "")
    advice = SHORT_STATE if mismatch else context.advise_graph_repair(again)
    fault = Fault(severity, (node.name,) if node else (context.decode_file,), cause, advice, where=place)
    observed = f"{run.experiment}, {call}" + (f", fed {shown}" if shown else "") + f": {run.error or run.reason}"
    own = () if run is context.checked_loop else (run.experiment,)
    unnamed = (node.op,) if node and not node.name else ()
    fault = fault.compare(declared, observed).also(run=run, error=run.error, apart=(*own, *unnamed))
    return fault.also(evidence=describe_location(run), nodes=list_nodes(run))
