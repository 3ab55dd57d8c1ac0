"""The cached branch used on the first step.

What it means: loops that set `use_cache_branch` to true at once (or another switch to what later steps take) hand an
empty or dummy cache to the branch that never computes the cross-attention cache. What that does to this model is
reported; it is no fault of the file.

Reproduce: `kvdoctor step-test MODEL`, experiment `cached-branch-first`.

Repair: in your loop, false on the first step, true on every later one; of a switch that says it is the first step, the
other way round, as the finding has it.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.findings import Advice, Fault, check


@check("KV204", "cached-branch-first", "runs")
def cached_branch_first(case: Case) -> Iterator[Fault]:
    """What the cached branch does with an empty cache."""
    run, contract = case.run("cached-branch-first"), case.contract
    if run is None or contract is None or run.outcome not in ("failed", "differs"):
        return
    switch = contract.graph("decode").port("branch_switch")
    first, later = (str(contract.phases[phase].switch).lower() for phase in ("prefill", "decode"))
    step = run.steps[0].difference if run.steps else None
    wrong = f"runs, and its logits are off by {step.relative:g} of their spread" if step else "runs, with wrong logits"
    yield Fault(
        severity="note",
        file=case.decode_file,
        subject=(switch.name if switch else "",),
        where=f"input {switch.name if switch else ''}, {later} on step 0",
        promised=f"{first} on the first step",
        observed="the step fails" if run.outcome == "failed" else wrong,
        cause="the cached branch attends to whatever the cross-attention past holds, and never computes it",
        advice=Advice("caller", f"feed {first} on the first step and {later} on every later one"),
    )
