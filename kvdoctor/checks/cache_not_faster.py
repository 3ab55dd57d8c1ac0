"""A step with the cache takes as long as one without.

What it means: at 50 tokens a decode step with the cache should cost a fraction of the whole sequence in one call. Where
it does not, the graph does work that does not depend on the new tokens alone: it copies or recomputes the whole, or a
large part of each step has nothing to do with the sequence.

How it is decided: medians of several runs of each; only where the call without a cache takes 5 ms and more, since
below that the fixed cost of a call hides the rest. The figures stand under `measured` in the JSON report.

Reproduce: `kvdoctor step-test MODEL`, the line on the time of a step.

Repair: profile a decode step (`SessionOptions.enable_profiling`); look for nodes whose cost does not fall with the
number of new tokens.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check

TELLING_SECONDS = 5e-3
FASTER = 1.25
TOKENS = 50


@check("KV501", "cache-not-faster", "runs")
def cache_not_faster(case: Case) -> Iterator[Fault]:
    """The longest sequence that was timed both ways."""
    cached, uncached = (case.timings.get(f"{how}:{TOKENS}") for how in ("cached", "uncached"))
    if cached is None or uncached is None or uncached < TELLING_SECONDS or cached * FASTER < uncached:
        return
    yield Fault(
        severity="note",
        file=case.decode_file,
        subject=(case.decode_file,),
        where=f"file {case.decode_file}, experiment long-past",
        promised=f"a step with the cache that is faster than {TOKENS} tokens without",
        observed="about the same time, or more",
        cause="the cache saves no time",
        advice=Advice(
            "re-export", "profile a decode step, and look for nodes whose cost does not fall with the tokens"
        ),
    )
