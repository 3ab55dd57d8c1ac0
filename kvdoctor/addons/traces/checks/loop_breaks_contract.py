"""The caller's loop feeds a step that violates the cache contract.

What it means: `--trace FILE` contains the inputs and outputs of your program. The finding names the first step whose
feed does not follow from the contract and the steps before it: an input that is missing or has another type, the cached
branch too early, a past that is stale or belongs to another slot, a mask or positions that do not match the cache, and
so on. The `effect` lines say what happened when kvdoctor ran your steps again.

Reproduce: `kvdoctor step-test MODEL --trace FILE`; docs/trace.md shows how to write the file in seven languages.

Repair: in your loop, as the finding states. If the graph itself returned what was fed back, as merged decoders of
Optimum do, the graph can be repaired instead. If running the step again shows that the wrong input changes nothing, the
finding is a note: a merged decoder need not read the encoder states once the cross-attention cache exists.
A switch that runs have settled, and a transducer's states after a blank, are reported only where the results differ.
"""

from collections.abc import Iterator

from kvdoctor.addons.traces.step_test import CallerContext, describe_replay, is_harmless, name_location
from kvdoctor.decode.runs import quote_error
from kvdoctor.findings import Advice, Fault, check


@check("KV208", "loop-breaks-contract", "caller")
def loop_breaks_contract(context: CallerContext) -> Iterator[Fault]:
    """The violations in the first step that has any."""
    trace = context.trace_check
    if trace.step is None:
        return
    for one in trace.breaks:
        failed = trace.step.number if trace.step.error is not None else None
        said = quote_error(trace.step.error or "")
        follows = [f"step {trace.step.number} failed there: {said}"] if said else []
        follows += describe_replay(context.replay, failed, trace.step.number)
        advice = Advice("caller", one.advice)
        if one.graph_returned is not None:
            text = f"the graph returned {one.graph_returned}, and a plain loop feeds back what is returned"
            follows.append(f"your loop is right up to there: {text}")
            repair = context.advise_graph_repair("").command
            advice = Advice("caller", f"or, {one.advice}", repair)
        if one.suspected is not None:
            follows.append(one.suspected)
        # A note where the step runs as well as a right one; a warning where it may be meant (listed as undecided).
        harmless = is_harmless(trace, one, context.replay)
        yield Fault(
            severity="note" if harmless else "error" if one.suspected is None else "warning",
            subject=one.inputs,
            where=name_location(trace, one),
            apart=(one.kind,),
            declared=one.declared,
            observed=one.observed,
            cause=one.cause,
            repair=advice,
            effects=tuple(follows),
            confidence="confirmed" if one.suspected is None else "suspected",
        )
