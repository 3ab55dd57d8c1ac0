"""A decode step computes wrong logits, and it is known whether it misreads the cache or fills it wrongly.

What it means: a step reads the cache, and adds an entry to it; one of the two is wrong.

How it is decided: the entries of a prefill are compared with those of a longer one, and each new entry with the entry
of the same token in one call over all tokens, layer by layer; then noise is put into entries of the past. Positions,
masks, exchanged layers and the like have checks of their own, which go first. A difference that only a float32 copy of
the model shows is a warning.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: `kvdoctor re-export MODEL -o FIXED` where entries are changed on their way out of the graph; otherwise export
again with a current exporter. The evidence names the first layer that is wrong.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.diagnose.checks._attribution import find_explanation, leading_cause
from kvdoctor.diagnose.checks._dataflow import describe_changes, describe_rounded
from kvdoctor.diagnose.checks._differences import HIDDEN, build_difference
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, Severity, check


@check("KV317", "cache-misread", "runs")
def cache_misread(context: RunContext) -> Iterator[Fault]:
    """Right entries in the cache, and wrong logits.

    What it means: the entries of the cache are right, but the logits that a step computes from them are wrong. The past
    is scaled, reordered, cut or masked on its way to the attention, the entries are clipped or cast to integers on
    their way out of the graph, or what follows the attention differs from the call without a cache. A cache that is
    only rounded on its way out is KV301.
    """
    yield from _report(
        context, "cache-misread", "the cache holds what a prefill returns, and a step computes wrong logits from it"
    )


@check("KV318", "new-entries-wrong", "runs")
def new_entries_wrong(context: RunContext) -> Iterator[Fault]:
    """Wrong keys or values that a step adds to the cache.

    What it means: a step adds other keys or values than a call without a cache computes for the same token, or a
    prefill returns other entries than its own attention used.
    """
    text = "the keys or values that are added to the cache are not those of a call without a cache"
    yield from _report(context, "new-entries-wrong", text)


def _report(context: RunContext, name: str, cause: str) -> Iterator[Fault]:
    run, leading = context.checked_loop, leading_cause(context)
    if run is None or run.shows != "differs" or leading is None or leading[0] != name:
        return
    if find_explanation(context, name):
        return
    severity: Severity = "warning" if run.hidden else "error"
    found = build_difference(context, run, severity, f"{cause}, {HIDDEN}" if run.hidden else cause)
    decided = leading[1].cause
    slot = decided.slot if decided is not None else ""
    changes = (describe_changes(context, slot) or describe_rounded(context, slot)) if slot else ()
    advice = context.advise_graph_repair(f"or {found.repair.text}")
    yield replace(found, evidence=(*changes, *found.evidence), repair=advice)
