"""Not a check: the faults whose cause an experiment decided, and the evidence of a fault location."""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.contract import describe
from kvdoctor.decode.runs import FaultLocation, Run
from kvdoctor.diagnose.checks._attribution import (
    AT_LENGTHS,
    cause_in_use,
    find_explanation,
    find_faulty_uses,
    leading_cause,
)
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Severity
from kvdoctor.records import record
from kvdoctor.report.wording.runs import describe_difference

MOST_SHAPES = 3
MOST_LINES = 2


@record
class CauseText:
    """What a check says of its fault, whatever the model. `on_graph`: a repair of the graph may fix it."""

    cause: str
    declared: str
    advice: str
    on_graph: bool = False


def report_cause(context: RunContext, name: str, text: CauseText) -> Iterator[Fault]:
    """The fault of the check `name`, if an experiment decided for it and no other fault explains the runs.

    Where only runs of other sizes differ for that cause, it is one fault, by the worst of them.
    """
    leading = leading_cause(context)
    if find_explanation(context, name):
        return
    if leading is None or leading[0] != name:
        yield from _report_cause_in_use(context, name, text)
        return
    loop = context.checked_loop
    if loop is None or loop.shows != "differs":
        yield build_fault(context, leading[1], text, "error")
        return
    # Two graphs quantized apart have other weights, by no more than quantization changes them anyway.
    severity: Severity = "warning" if loop.hidden and name == "branches-disagree" else "error"
    effect = f"experiment {loop.experiment}: logits differ at step {loop.failed_step}"
    yield build_fault(context, leading[1], text, severity, (effect,))


def _report_cause_in_use(context: RunContext, name: str, text: CauseText) -> Iterator[Fault]:
    found = []
    for run, use in find_faulty_uses(context, "differs"):
        cause = cause_in_use(context, run.experiment)
        if cause is not None and cause[0] == name:
            found.append((run, use, cause[1]))
    found.sort(key=lambda entry: entry[1].severity != "error")
    if found:
        _, use, why = found[0]
        effects = tuple(f"experiment {run.experiment}: logits differ at step {run.failed_step}" for run, _, _ in found)
        # A repair of the computation changes every step, and those of other lengths are right.
        on_graph = text.on_graph and not any(run.experiment in AT_LENGTHS for run, _, _ in found)
        text = replace(text, cause=f"with {use.words}: {text.cause}", on_graph=on_graph)
        yield replace(build_fault(context, why, text, use.severity, effects), use=use.required)


def build_fault(
    context: RunContext, run: Run, text: CauseText, severity: Severity, effects: tuple[str, ...] = ()
) -> Fault:
    """A fault that quotes the run which decided."""
    from kvdoctor.decode.experiments import uses

    located = run if run.location is not None or run.experiment in uses() else _find_located_run(context)
    return Fault(
        severity=severity,
        file=context.decode_file,
        subject=(context.logits_name,),
        where=f"output {context.logits_name}, experiment {run.experiment}",
        apart=(run.experiment,),
        declared=text.declared,
        observed=_describe_decision(run),
        cause=text.cause,
        repair=context.advise_graph_repair(f"or {text.advice}") if text.on_graph else Advice("re-export", text.advice),
        effects=effects,
        evidence=describe_location(located),
        nodes=list_nodes(located),
    )


def _describe_decision(run: Run) -> str:
    """The evidence that decided, and whether the float32 copy showed it."""
    if run.cause is not None:
        return run.cause.evidence + ("; the same in the float32 copy" if run.unrounded is not None else "")
    if run.reason:
        return run.reason
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    size = describe_difference(run, step)
    return f"step {run.failed_step}: the logits differ" + (f", {size}" if size else "")


def _find_located_run(context: RunContext) -> Run | None:
    """The run with a fault location: the checked loop, or the first of those with other sizes."""
    runs = (context.checked_loop, *context.runs)
    return next((run for run in runs if run is not None and run.location is not None), None)


def name_node(place: FaultLocation) -> str | None:
    """The node with the branches and functions around it; None where no node is at fault."""
    if place.node is None:
        return None
    inside = f" in {place.scope}" if place.scope else ""
    return f"{place.node.shown}{inside}"


def list_nodes(run: Run | None) -> tuple[str, ...]:
    """The node at which a run fails or first differs, as `Fault.nodes` has it."""
    node = run.fault_node if run is not None else None
    return (node.name,) if node is not None and node.name else ()


def describe_location(run: Run | None) -> tuple[str, ...]:
    """Where and why a run fails or first differs from the run without a cache, and the origin: 3 lines at most."""
    place = run.location if run is not None else None
    if run is None or place is None:
        return ()
    if run.outcome == "failed":
        inputs = [f"{name} {describe(one.dtype, one.shape)}" for name, one in place.shapes.items()][:MOST_SHAPES]
        into = f"inputs {', '.join(inputs)}: " if inputs else ""
        return (f"{into}{place.words}", *place.provenance[:MOST_LINES])
    node = name_node(place)
    layer = f"layer {place.layer}, " if place.layer is not None and node else ""
    first = f"first divergence: {layer}{node}: " if node else ""
    return (f"{first}{place.words}", *place.provenance[: MOST_LINES - 1])


def find_undeclared_size(context: RunContext, run: Run) -> str | None:
    """The first slot that a run got in another size than the graph declares as a number, in words."""
    for step in run.steps:
        for port in context.contract.graph("decode" if step.phase == "decode" else "prefill").outputs:
            seen = step.returned.get(port.name)
            if port.role != "present" or seen is None or port.shape is None or len(seen.shape) != len(port.shape):
                continue
            if any(isinstance(size, int) and size != got for size, got in zip(port.shape, seen.shape, strict=True)):
                declared, got = describe(port.dtype, port.shape), describe(seen.dtype, seen.shape)
                return f"step {step.step} returns {port.name} as {got}, declared as {declared}"
    return None
