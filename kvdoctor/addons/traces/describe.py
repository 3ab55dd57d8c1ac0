"""Text on a trace and its comparison with the contract. Standard library only."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdoctor.decode.runs import Run

if TYPE_CHECKING:
    from kvdoctor.addons.traces.check import TraceCheck
    from kvdoctor.addons.traces.recorded import TraceStep
    from kvdoctor.addons.traces.step import ContractViolation

MOST_QUOTED = 300
NOT_RUN = ("skipped", "died")


def describe_trace(held: "TraceCheck", run: Run | None, path: str, stack: str) -> str:
    """One line: how many steps were compared, what was found, and what stays undecided."""
    steps = f"{held.steps} step{'s' * (held.steps != 1)} of {stack}"
    if held.sequences > 1:
        steps += f" in {held.sequences} sequences"
    if held.step is not None:
        verb = "may break" if all(one.suspected for one in held.breaks) else "breaks"
        text = f"{steps} compared with the contract; step {held.step.number} ({held.step.place}) {verb} it"
    else:
        text = f"{steps} compared with the contract, none breaks it"
        text += "" if held.cached or held.sequences < 2 else "; no step used the cache"
    if held.also:
        text += f" (it fits {', '.join(held.also)} as well)"
    parts = [text, *_describe_outputs(held), *_describe_own_replay(held, run)]
    if held.blind:
        shown = ", ".join(held.blind[:4]) + (f" and {len(held.blind) - 4} more" if len(held.blind) > 4 else "")
        parts.append(f"not decided by shapes: the values of {shown} (give their data, or .npz)")
    return f"trace {path}: {'; '.join(parts)}"


def _describe_outputs(held: "TraceCheck") -> Iterator[str]:
    if held.untrue is not None and held.step is None:
        yield (
            f"with the right feeds, step {held.untrue.step} returned {held.untrue.output} as {held.untrue.observed}, "
            f"where the graph declares {held.untrue.declared}"
        )
    if held.failed is not None:
        step = f"step {held.failed.number} ({held.failed.place})"
        yield f"{step} failed in the caller's runtime although its feeds are right"


def _describe_own_replay(held: "TraceCheck", run: Run | None) -> Iterator[str]:
    if held.step is None and run is not None:
        failed = held.failed.number if held.failed is not None else None
        yield from describe_replay(run, failed, None)


def describe_replay(run: Run | None, failed: int | None, broken: int | None) -> Iterator[str]:
    """The result of running the same steps locally; `failed` is the step that failed in the caller's program."""
    if run is None or run.outcome in NOT_RUN:
        yield f"not run again locally{f': {run.reason}' if run is not None and run.reason else ''}"
    elif run.outcome == "failed" and failed is not None:
        yield f"run again locally, step {run.failed_step} fails as well{_place(run)}"
    elif run.outcome == "failed":
        yield f"run again locally, step {run.failed_step} fails{_place(run)}"
    elif failed is not None:
        yield f"run again locally, every step runs: only the caller's runtime fails at step {failed}"
    elif broken is not None:
        yield f"run again locally, every step runs{_off(run, broken)}"
    else:
        yield from _numbers(run)


def _numbers(run: Run) -> Iterator[str]:
    if run.outcome == "differs":
        return
    known = [step.difference.relative for step in run.steps if step.difference is not None]
    if known:
        text = f"{len(known)} of {len(run.steps)} steps give the logits of the trace"
        if len(known) < len(run.steps):
            text = f"{len(run.steps)} steps run; the {len(known)} whose logits are in the trace give the same"
        yield f"run again locally, {text}" + (f" within {max(known):.1e}" if any(known) else "")
    else:
        yield f"run again locally, {len(run.steps)} steps run; the trace has no logits to compare"


def _off(run: Run, broken: int) -> str:
    """How far a broken step is from one that is rightly fed."""
    found = next((step.difference for step in run.steps if step.step == broken), None)
    if found is None:
        return ""
    if not found.finite:
        return f", and the logits of step {broken} are not finite"
    text = f", and the logits of step {broken} are {found.relative:.2g} standard deviations off those of a right feed"
    if run.outcome == "passed":
        text = f", and the logits of step {broken} are those of a right feed"
    return text + (f"; {run.reason}" if run.cause is not None and run.reason else "")


def is_harmless(held: "TraceCheck", one: "ContractViolation", run: Run | None) -> bool:
    """Whether running a broken step again showed that what was fed, as it was fed, changes nothing."""
    if held.step is None or held.step.error is not None or run is None or run.outcome != "passed":
        return False
    compared = any(step.step == held.step.number and step.difference is not None for step in run.steps)
    told = all(name in held.step.fed and held.step.fed[name].has_values for name in one.inputs)
    return compared and (told or one.mild)


def _place(run: Run) -> str:
    return f" in {run.node.shown}" if run.node else ""


def quote_error(step: "TraceStep") -> str:
    """What the caller's runtime said of a step that failed, on one line, shortened."""
    return " ".join((step.error or "").split())[:MOST_QUOTED]


def name_location(held: "TraceCheck", one: "ContractViolation") -> str:
    """The place of a break: `trace step 2 (line 3), input past_key_values.0.key and 3 more`."""
    assert held.step is not None  # noqa: S101 - a break is one of a step
    names = one.inputs[0] + (f" and {len(one.inputs) - 1} more" if len(one.inputs) > 1 else "") if one.inputs else ""
    return f"trace step {held.step.number} ({held.step.place})" + (f", input {names}" if names else "")
