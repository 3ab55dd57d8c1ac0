"""Not a check: the faults of runs, and the evidence of a fault location."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kvdoctor.contract import describe
from kvdoctor.decode.runs import RING, FaultLocation, Run
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.diagnose.checks._attribution import (
    AT_LENGTHS,
    cause_in_use,
    find_faulty_uses,
    leading_cause,
    leave_to_other,
)
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Faults, Severity, check
from kvdoctor.records import record
from kvdoctor.report.wording.runs import describe_difference

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Use

MOST_SHAPES = 3
MOST_LINES = 2
SHORT_STATE = Advice(
    "caller", "pad that state with leading zeros to its declared size before it is fed, or export again with that size"
)
RETAIN_WINDOW = "export again, with as many of the latest entries retained as the attention looks back over"
HIDDEN = "by no more than the model rounds; a float32 copy, which rounds nothing, shows the difference"
OFF = "logits with the cache differ from logits without it"


@record
class CauseText:
    """What a check says of its fault, whatever the model. `on_graph`: a repair of the graph may fix it.

    `on_ring` is the advice where steps on a full ring are wrong.
    """

    cause: str
    declared: str
    advice: str
    on_graph: bool = False
    on_ring: str = ""


def report_cause(context: RunContext, name: str, text: CauseText) -> Faults:
    """The fault of the check `name`, if an experiment decided for it; of runs of other sizes, by the worst of them."""
    leading = leading_cause(context)
    leave_to_other(context, name)
    if leading is None or leading[0] != name:
        yield from _report_cause_in_use(context, name, text)
        return
    loop = context.checked_loop
    if loop is None or loop.shows != "differs":
        yield build_fault(context, leading[1], text, "error")
        return
    # Two graphs quantized apart have other weights, by no more than quantization changes them anyway.
    severity: Severity = "warning" if loop.hidden and name == "branches-disagree" else "error"
    yield build_fault(context, leading[1], text, severity, (describe_effect(loop),))


def check_cause(module: str, code: str, name: str, when: Literal["runs"], text: CauseText) -> None:
    """Register a check of a module that says the same of every model: `when` is a literal, as for `check`."""

    def report(context: RunContext) -> Faults:
        return report_cause(context, name, text)

    report.__module__ = module
    check(code, name, when)(report)


def describe_effect(run: Run) -> str:
    """What a run shows of a cause that another one decided."""
    return f"experiment {run.experiment}: logits differ at step {run.failed_step}"


def _report_cause_in_use(context: RunContext, name: str, text: CauseText) -> Faults:
    found = []
    for run, use in find_faulty_uses(context, "differs"):
        cause = cause_in_use(context, run.experiment)
        if cause is not None and cause[0] == name:
            found.append((run, use, cause[1]))
    found.sort(key=lambda entry: entry[1].severity != "error")
    if found:
        _, use, why = found[0]
        effects = tuple(describe_effect(run) for run, _, _ in found if run.failed_step is not None)
        # A repair of the computation changes every step, and those of other lengths are right.
        on_graph = text.on_graph and not any(run.experiment in AT_LENGTHS for run, _, _ in found)
        on_ring = text.on_ring if found[0][2].experiment == RING else ""
        first = why.cause.from_length if why.cause is not None else 0
        where = f"in a call of {first} tokens or more" if first else f"with {use.words}"
        text = replace(text, cause=f"{where}: {text.cause}", on_graph=on_graph, advice=on_ring or text.advice)
        yield build_fault(context, why, text, use.severity, effects).also(use=use.required)


def build_fault(
    context: RunContext, run: Run, text: CauseText, severity: Severity, effects: tuple[str, ...] = ()
) -> Fault:
    """A fault that quotes the run which decided."""
    # The place is that of the run, of the checked loop, or of the first run of other sizes that has one.
    others = (
        (context.checked_loop, *context.runs) if run.location is None and run.experiment not in context.uses else (run,)
    )
    located = next((one for one in others if one is not None and one.location is not None), None)
    advice = context.advise_graph_repair(f"or {text.advice}") if text.on_graph else Advice("re-export", text.advice)
    fault = Fault(severity, (context.logits_name,), text.cause, advice, effects=effects)
    fault = fault.compare(text.declared, _describe_decision(run)).also(run=run, apart=(run.experiment,))
    return fault.also(evidence=describe_location(located), nodes=list_nodes(located))


def _describe_decision(run: Run) -> str:
    """The evidence that decided, and whether the float32 copy showed it."""
    if run.cause is not None:
        return run.cause.evidence + ("; the same in the float32 copy" if run.unrounded is not None else "")
    if run.reason:
        return run.reason
    size = describe_difference(run, run.wrong_step)
    return f"step {run.failed_step}: the logits {f'are {size}' if size else 'differ'}"


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
    """The first slot that a run returned in another size than the graph declares as a number, as text."""
    for step in run.steps:
        for port in context.contract.graph("decode" if step.phase == "decode" else "prefill").outputs:
            seen = step.returned.get(port.name)
            if port.role != "present" or seen is None or port.shape is None or len(seen.shape) != len(port.shape):
                continue
            if any(isinstance(size, int) and size != got for size, got in zip(port.shape, seen.shape, strict=True)):
                declared, got = describe(port.dtype, port.shape), describe(seen.dtype, seen.shape)
                return f"step {step.step} returns {port.name} as {got}, declared as {declared}"
    return None


def build_difference(context: RunContext, run: Run, severity: Severity, cause: str) -> Fault:
    """The fault of a run whose logits differ, or of a step of it."""
    mismatch = find_undeclared_size(context, run)
    exactness = context.contract.exactness
    limit = find_tolerance("float" if run.hidden else exactness, context.tolerances)
    words = "in the float32 copy" if run.hidden else exactness
    compared = [step for step in run.steps if step.difference is not None and run.failed_step is None]
    worst = max(compared, key=lambda step: step.difference.relative if step.difference else 0.0, default=None)
    step = run.wrong_step or worst
    call = f"step {step.step} (past {step.past_length}, new {step.new_tokens})" if step else "reference run"
    seen = describe_difference(run, step) or run.reason or "of another shape"
    located = run.location is not None and run.location.node is not None
    advised = "the runs do not show the cause: " * (not located)
    if run is context.checked_loop and not located:  # a checkpoint is run without other uses of the cache
        advised += "`--reference CHECKPOINT` compares the layers with PyTorch; or "
    advice = Advice("re-export", advised + advise_place(run))
    cause, advice = (f"{cause}: {mismatch}", SHORT_STATE) if mismatch else (cause, advice)
    fault = Fault(severity, (context.logits_name,), cause, advice, run=run).compare(
        f"the reference logits, within {limit.passes:g} standard deviations of the logits ({words})",
        f"{call}: logits {seen}{_describe_search(context, run)}",
    )
    fault = fault.also(apart=() if run is context.checked_loop else (run.experiment,))
    return fault.also(evidence=describe_location(run), nodes=list_nodes(run))


def advise_place(run: Run) -> str:
    """To correct the node at which a run first differs, where it was located, or to export again."""
    node = run.location.node if run.location is not None else None
    correct = f"correct {node.shown}, where the two calls first differ, or " if node is not None else ""
    return f"{correct}export again; test the result"


def build_use_difference(context: RunContext, run: Run, use: "Use", cause: str) -> Fault:
    """The same of another use; `cause` follows it."""
    return build_difference(context, run, use.severity, f"with {use.words}{cause}").also(use=use.required)


def _describe_search(context: RunContext, run: Run) -> str:
    """The evidence of the search for the cause, if it found none that has a check, and the place tells none."""
    if run.location is not None and run.location.cause:
        return ""
    is_loop = run is context.checked_loop
    why = context.find_run("why") if is_loop else (cause_in_use(context, run.experiment) or (0, None))[1]
    return f"; {why.cause.evidence}" if why is not None and why.cause is not None else ""
