"""A tensor without elements, which not every language binding can handle.

What it means: an output without elements has a null data pointer. That is harmless in Python, but a binding that builds
a slice from the pointer aborts: the Rust crate `ort` 2.0.0-rc.10 does in builds that check for undefined behavior
(`slice::from_raw_parts requires the pointer to be aligned and non-null`); earlier releases return an error; rc.11 fixed
it. Up to rc.12 the same crate refuses to create a tensor with a dimension of 0 from data, so that a loop which starts
with an empty past cannot start.

How it is decided: by the shapes and pointers that the loops showed. Without a `--target` that names an affected
binding, an output is a note, and is not reported if the emptied cross-attention cache (KV203) explains it.

Reproduce: `kvdoctor step-test MODEL -v` marks such outputs in the table of steps.

Repair: skip outputs whose shape contains a zero, or use a release of the binding that does. The repair of the emptied
cross-attention cache (KV203) removes the output. For an empty past: a newer release of the binding; with a merged
decoder, feed a past of length 1 with the switch off at the first step, which ignores it.

Source: issue 424 of the crate `ort`.
"""

from kvdoctor.contract import describe
from kvdoctor.diagnose.checks._attribution import find_wrong_lengths
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.runtime.targets import Hazard, Kind, Target


@check("KV410", "empty-tensor-hazard", "runs")
def empty_tensor_hazard(context: RunContext) -> Faults:
    """Null pointers in the loops, and past inputs that a binding cannot create."""
    if next(find_wrong_lengths(context), None) or "present-does-not-grow" in context.declared_faults:
        return  # the hazard is a consequence of what KV205 names
    yield from _find_empty_outputs(context)
    yield from _find_empty_inputs(context)


def _find_empty_outputs(context: RunContext) -> Faults:
    """Outputs without elements: an error where a target cannot read them."""
    affected, emptied = _list_affected(context, "reads-empty"), {slot.present for slot in context.emptied_slots}
    run = context.find_run("plain-loop")
    for step in run.steps if run else ():
        names = tuple(name for name in step.null_pointer if affected or name not in emptied)
        if not names:
            continue
        advice = Advice("caller", "skip outputs whose shape contains a zero")
        if affected and set(names) <= emptied:
            newer = "the repaired copy has no such output; or use a newer release of the binding"
            advice = context.advise_graph_repair(newer)
        elif affected:
            advice = Advice("caller", f"{advice.text}, or use release {affected[0][1].fixed_in} or newer")
        cause = "an output without elements has a null data pointer"
        fault = Fault("error" if affected else "note", names, cause, advice, effects=_list_effects(affected))
        seen = step.returned[names[0]]
        observed = f"step {step.step}: {describe(seen.dtype, seen.shape)}, data pointer null"
        yield fault.compare("an output that every binding can read", observed)
        return


def _find_empty_inputs(context: RunContext) -> Faults:
    """Past inputs of length 0 in the first step: a binding may refuse to create them."""
    affected = _list_affected(context, "makes-empty")
    first = next((run.steps[0] for run in context.runs if run.experiment == "plain-loop" and run.steps), None)
    names = tuple(name for name, seen in first.fed.items() if seen.empty) if first is not None else ()
    if not affected or first is None or not names:
        return
    text = f"use release {affected[0][1].fixed_in} or newer"
    if context.decode_graph.branches is not None:
        switch, branches = context.decode_graph.branches
        text += f", or feed a past of length 1 with {switch} = {str(not branches.on).lower()}, which ignores it"
    cause, seen = "the past of the first step has no elements", first.fed[names[0]]
    fault = Fault("warning", names, cause, Advice("caller", text), effects=_list_effects(affected))
    observed = f"the first step is fed {describe(seen.dtype, seen.shape)}"
    yield fault.compare("inputs that the binding can create", observed).also(confidence="suspected")


def _list_affected(context: RunContext, kind: Kind) -> list[tuple[Target, Hazard]]:
    """The targets whose binding has a fault of that kind."""
    found = ((target, target.hazard(kind)) for target in context.targets)
    return [(target, hazard) for target, hazard in found if hazard is not None]


def _list_effects(affected: list[tuple[Target, Hazard]]) -> tuple[str, ...]:
    return tuple(f"with {target.asked}: {hazard.words}; fixed in {hazard.fixed_in}" for target, hazard in affected)
