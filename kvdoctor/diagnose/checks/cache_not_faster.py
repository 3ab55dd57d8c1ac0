"""A step with the cache takes as long as a call without it.

What it means: after 50 tokens, a decode step with the cache should take a fraction of the time of one call over the
whole sequence. If it does not, the graph does work that is independent of the number of new tokens: it copies or
recomputes the whole sequence, or most of the step has nothing to do with the sequence.

How it is decided: the step and the call without a cache are run several times; their medians are compared. The step
must be at least 1.25 times as fast as the call without a cache. It is not decided if that call takes less than 5 ms,
since the fixed cost of a call then hides the rest. The figures are under `measured` in the JSON report.

Reproduce: `kvdoctor step-test MODEL`, the line `cache speed-up`.

Repair: profile a decode step (`SessionOptions.enable_profiling`); look for nodes whose cost does not fall with the
number of new tokens.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, check

LEAST_SECONDS = 5e-3
FASTER = 1.25
TOKENS = 50
"""A call without a cache that takes less tells nothing; a cached step must be this many times as fast; past tokens."""
PROFILE = "profile a decode step, and look for nodes whose cost does not fall with the number of tokens"


@check("KV501", "cache-not-faster", "runs")
def cache_not_faster(context: RunContext) -> Iterator[Fault]:
    """Compare the times of the longest sequence that was timed with and without the cache."""
    cached, uncached = (context.timings.get(f"{how}:{TOKENS}") for how in ("cached", "uncached"))
    if cached is None or uncached is None or uncached < LEAST_SECONDS or cached * FASTER < uncached:
        return
    fault = Fault("note", (context.decode_file,), "the cache saves no time", Advice("re-export", PROFILE))
    declared = f"a step with the cache that is faster than one call over {TOKENS} tokens"
    fault = fault.compare(declared, "the step takes about the same time, or more")
    yield fault.also(where=f"file {context.decode_file}, experiment long-past")
