"""An output without elements has a null data pointer.

What it means: harmless in Python, but a binding that builds a slice from the pointer aborts: the Rust crate `ort`
2.0.0-rc.10 in debug builds (`slice::from_raw_parts requires the pointer to be aligned and non-null`), mended in rc.11.

Reproduce: `kvdoctor step-test MODEL -v` marks such outputs in the table of steps.

Repair: skip outputs whose shape has a zero, or use a release of the binding that does. Where the cause is the emptied
cross-attention cache (KV203), its repair removes the output.

Source: issue 424 of the crate `ort`.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.checks.lengths import has_wrong_lengths
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, Fault, check


@check("KV410", "empty-tensor-hazard", "runs")
def empty_tensor_hazard(case: Case) -> Iterator[Fault]:
    """Null pointers in the runs of the two loops, but for those that an emptied cache explains."""
    explained = {slot.present for slot in case.emptied}
    if has_wrong_lengths(case) or "present-does-not-grow" in (case.declared_faults or ()):
        return  # the hazard is a consequence of what KV205 names
    run = case.run("plain-loop")
    for step in run.steps if run else ():
        names = tuple(name for name in step.null_pointer if name not in explained)
        if names:
            seen = step.returned[names[0]]
            yield Fault(
                severity="note",
                file=case.decode_file,
                subject=names,
                where=f"output {first_and_count(names)}",
                promised="an output that every binding can read",
                observed=f"step {step.step}: {describe(seen.dtype, seen.shape)}, data pointer null",
                cause="an output without elements has no memory behind it",
                advice=Advice("caller", "skip outputs whose shape holds a zero"),
            )
            return
