"""The first step uses the cached branch.

What it means: some loops set `use_cache_branch` to true from the first step on (or another switch to the value of later
steps). They feed an empty or dummy cache to the branch that never computes the cross-attention cache. A
loop that does this is at fault, not the file; the finding shows what happens to this model then.

Reproduce: `kvdoctor step-test MODEL`, experiment `cached-branch-first`.

Repair: in your loop, feed false on the first step and true on every later one. A switch that marks the first step takes
the opposite values, as the finding states.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, check


@check("KV204", "cached-branch-first", "runs")
def cached_branch_first(context: RunContext) -> Iterator[Fault]:
    """Report the result of the cached branch with an empty cache."""
    run, contract = context.find_run("cached-branch-first"), context.contract
    if run is None or run.outcome not in ("failed", "differs"):
        return
    switch = contract.graph("decode").port("branch_switch")
    name = switch.name if switch else ""
    first, later = (str(contract.phases[phase].switch).lower() for phase in ("prefill", "decode"))
    step = run.steps[0].difference if run.steps else None
    wrong = f"wrong logits, off by {step.relative:.3g} standard deviations of the logits" if step else "wrong logits"
    cause = "the cached branch reads the cross-attention cache from the past, and never computes it"
    advice = Advice("caller", f"feed {first} on the first step and {later} on every later one")
    fault = Fault("note", (name,), cause, advice, where=f"input {name}, {later} on step 0")
    yield fault.compare(f"{first} on the first step", "the step fails" if run.outcome == "failed" else wrong)
