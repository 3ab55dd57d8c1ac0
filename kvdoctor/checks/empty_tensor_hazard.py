"""A tensor without elements, which not every binding can handle.

What it means: an output without elements has a null data pointer. That is harmless in Python, but a binding that builds
a slice from the pointer aborts: the Rust crate `ort` 2.0.0-rc.10 in builds that check for undefined behaviour
(`slice::from_raw_parts requires the pointer to be aligned and non-null`); releases before it give an error; rc.11
mended it. The same crate refuses to make a tensor with a dimension of 0 from data up to rc.12, so that a loop which
begins with an empty past cannot begin.

How it is decided: by the shapes and pointers that the runs of the loops showed. Where no `--target` names a binding
with the fault, outputs are a note, and not said of those that the emptied cross-attention cache (KV203) explains.

Reproduce: `kvdoctor step-test MODEL -v` marks such outputs in the table of steps.

Repair: skip outputs whose shape has a zero, or use a release of the binding that does. Where the cause is the emptied
cross-attention cache (KV203), its repair removes the output. For an empty past: a newer release of the binding; with a
merged decoder feed a past of length 1 and the switch off at the first step, which ignores it.

Source: issue 424 of the crate `ort`.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.checks.lengths import has_wrong_lengths
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.targets import Target
from kvdoctor.targets.bindings import Hazard, Kind
from kvdoctor.trace import Step


@check("KV410", "empty-tensor-hazard", "runs")
def empty_tensor_hazard(case: Case) -> Iterator[Fault]:
    """Null pointers in the runs of the loops, and pasts that a binding cannot make."""
    if has_wrong_lengths(case) or "present-does-not-grow" in (case.declared_faults or ()):
        return  # the hazard is a consequence of what KV205 names
    yield from _come_out(case)
    yield from _go_in(case)


def _come_out(case: Case) -> Iterator[Fault]:
    """Outputs without elements: an error where a target cannot read them."""
    hurt = _hurt(case, "reads-empty")
    explained = set() if hurt else {slot.present for slot in case.emptied}
    run = case.run("plain-loop")
    for step in run.steps if run else ():
        names = tuple(name for name in step.null_pointer if name not in explained)
        if names:
            yield _read(case, step, names, hurt)
            return


def _read(case: Case, step: Step, names: tuple[str, ...], hurt: list[tuple[Target, Hazard]]) -> Fault:
    seen, emptied = step.returned[names[0]], {slot.present for slot in case.emptied}
    advice = Advice("caller", "skip outputs whose shape holds a zero")
    if hurt and set(names) <= emptied:
        advice = case.re_export("the copy has no such output; or use a newer release of the binding")
    elif hurt:
        advice = Advice("caller", f"skip outputs whose shape holds a zero, or use release {hurt[0][1].mended} or newer")
    return Fault(
        severity="error" if hurt else "note",
        file=case.decode_file,
        subject=names,
        where=f"output {first_and_count(names)}",
        promised="an output that every binding can read",
        observed=f"step {step.step}: {describe(seen.dtype, seen.shape)}, data pointer null",
        cause="an output without elements has no memory behind it",
        advice=advice,
        follows=_consequences(hurt),
    )


def _go_in(case: Case) -> Iterator[Fault]:
    """Pasts of length 0 that the first step is fed: a binding may refuse to make them."""
    hurt = _hurt(case, "makes-empty")
    first = next((run.steps[0] for run in case.runs if run.experiment == "plain-loop" and run.steps), None)
    if not hurt or first is None:
        return
    names = tuple(name for name, seen in first.fed.items() if seen.empty)
    if not names:
        return
    text = f"use release {hurt[0][1].mended} or newer"
    if case.main.branches is not None:
        switch, branches = case.main.branches
        text += f", or feed a past of length 1 with {switch} = {str(not branches.on).lower()}, which ignores it"
    seen = first.fed[names[0]]
    yield Fault(
        severity="warning",
        file=case.decode_file,
        subject=names,
        where=f"input {first_and_count(names)}",
        promised="inputs that the binding can make",
        observed=f"the first step is fed {describe(seen.dtype, seen.shape)}",
        cause="the first past has no elements",
        advice=Advice("caller", text),
        follows=_consequences(hurt),
        confidence="suspected",
    )


def _hurt(case: Case, kind: Kind) -> list[tuple[Target, Hazard]]:
    """The targets whose binding has a fault of that kind."""
    found = ((target, target.hazard(kind)) for target in case.targets)
    return [(target, hazard) for target, hazard in found if hazard is not None]


def _consequences(hurt: list[tuple[Target, Hazard]]) -> tuple[str, ...]:
    return tuple(f"with {target.asked}: {hazard.words}; mended in {hazard.mended}" for target, hazard in hurt)
