"""The caller's own loop feeds a step that breaks the cache contract.

What it means: `--trace FILE` holds what your program fed and got. The step named is the first whose feed is not what
the contract makes of the steps before it: an input that is missing or of another type, the cached branch too early, a
past that is stale or of another slot, a mask or positions that do not go with the cache, and so on. What follows says
what comes of it when the same steps are run here.

Reproduce: `kvdoctor step-test MODEL --trace FILE`; docs/trace.md shows how to write the file in seven languages.

Where running the step again shows that what was fed changes nothing, it is a note: a merged decoder need not read the
encoder states once the cross-attention cache is there.

Repair: in your loop, as the finding says. Where the graph itself returned what was fed back, as merged decoders of
Optimum do, the graph can be repaired instead.
"""

from collections.abc import Iterator

from kvdoctor.caller import telling
from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.trace import REPLAY


@check("KV208", "loop-breaks-contract", "caller")
def loop_breaks_contract(case: Case) -> Iterator[Fault]:
    """The breaks of the first step that has any."""
    held = case.caller
    if held is None or held.step is None:
        return
    for one in held.breaks:
        failed = held.step.number if held.step.error is not None else None
        said = telling.said(held.step)
        follows = [f"step {held.step.number} failed there: {said}"] if said else []
        follows += telling.replayed(case.run(REPLAY), failed, held.step.number)
        advice = Advice("caller", one.advice)
        if one.graph_returned is not None:
            text = f"the graph returned {one.graph_returned}, and a plain loop feeds back what is returned"
            follows.append(f"your loop is right up to there: {text}")
            repair = case.re_export("").command
            advice = Advice("caller", f"or, {one.advice}", repair)
        if one.suspected is not None:
            follows.append(one.suspected)
        yield Fault(
            severity="note" if telling.harmless(held, one, case.run(REPLAY)) else "error",
            file=case.decode_file,
            subject=one.inputs,
            where=telling.where(held, one),
            apart=(one.kind,),
            promised=one.promised,
            observed=one.observed,
            cause=one.cause,
            advice=advice,
            follows=tuple(follows),
            confidence="confirmed" if one.suspected is None else "suspected",
        )
