"""What works: the uses of a stack that passed, how closely and by what controls, what was not tried, what decides."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdoctor.decode.runs import LOOPS, WRONG, Run
from kvdoctor.errors import as_argument
from kvdoctor.findings import means_incomplete
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.safe import shortened
from kvdoctor.report.wording.alike import group_open_checks
from kvdoctor.report.wording.deciding import advise_missing
from kvdoctor.report.wording.runs import describe_comparisons, describe_result, format_difference
from kvdoctor.report.wording.targets import select_local_runs
from kvdoctor.report.wording.units import format_count

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment

GOLDEN = "KV321"
"""The code of what compares with golden numbers."""

MOST_NAMES, MOST_REASONS = 6, 3


def list_uses(report: Report, stack: StackFacts) -> list[Run]:
    """The runs that were done of the uses which a verdict rests on: loops, other sizes, padding and so on."""
    runs = select_local_runs(report, stack.name)
    experiments = _load(runs)
    return [run for run in runs if run.outcome != "skipped" and _is_use(experiments.get(run.experiment))]


def count_uses(report: Report) -> str | None:
    """`21 of 26 uses work`, over all stacks; None where no model was run.

    What a float32 copy alone shows, and no finding calls an error, does not keep a use from working.
    """
    runs = [run for stack in report.stacks for run in list_uses(report, stack)]
    healthy = report.verdict == "healthy"
    working = sum(run.shows == "passed" or (healthy and run.hidden) for run in runs)
    whose = " of the copy" if report.repair is not None and report.repair.after is not None else ""
    return f"{working} of {len(runs)} uses{whose} work" if runs else None


def list_working(report: Report) -> list[StackFacts]:
    """The stacks that work: a loop passed, no error is about them, and nothing essential stayed open."""
    return [stack for stack in report.stacks if _is_working(report, stack)]


def format_working(report: Report, stacks: Sequence[StackFacts]) -> Iterator[str]:
    """`merged, pair work: plain-loop, batch, rewind; these do not: chunk`: a line for stacks in which the same works.

    Of a report that is not healthy the uses that work are only counted: it is read for what does not.
    """
    for uses, names in _group_names(stacks, lambda stack: _name_uses(report, stack)).items():
        yield f"{_join_names(names)} {'work' if len(names) > 1 else 'works'}: {uses}"


def describe_closeness(report: Report, stacks: Sequence[StackFacts]) -> Iterator[str]:
    """How many decode steps agree with a run without a cache, how closely, and the controls that could have failed."""
    found = _group_names(stacks, lambda stack: _describe_loop(report, stack))
    for text, names in found.items():
        yield f"{_join_names(names)}: {text}" if len(found) > 1 else text


def name_not_tried(report: Report, stacks: Sequence[StackFacts]) -> str | None:
    """The uses that `--require` names and the model does not allow, and the options that try more; None for none."""
    parts = {use: f"{use} ({reason})" for stack in stacks for use, reason in _find_not_allowed(report, stack)}
    more = [] if report.arguments.get("thorough") else ["longer runs (--thorough)"]
    if report.command in ("step-test", "gate") and report.arguments.get("reference") is None:
        more.append("the checkpoint (--reference)")
    return ", ".join([*parts.values(), *more]) or None


def _group_names(stacks: Sequence[StackFacts], describe: Callable[[StackFacts], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stack in stacks:
        found.setdefault(describe(stack), []).append(stack.name)
    return found


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{', '.join(names[:MOST_NAMES])}{more}"


def _is_working(report: Report, stack: StackFacts) -> bool:
    passed = any(run.experiment in LOOPS and run.shows == "passed" for run in list_uses(report, stack))
    faulty = any(finding.stack in (stack.name, None) and finding.severity == "error" for finding in report.findings)
    unchecked = any(entry.stack == stack.name and entry.essential for entry in report.not_checked)
    return passed and not (faulty or unchecked)


def _name_uses(report: Report, stack: StackFacts) -> str:
    runs = list_uses(report, stack)
    passed = [run.experiment for run in runs if run.shows == "passed"]
    working = ", ".join(passed) if report.verdict == "healthy" else f"{len(passed)} of {len(runs)} uses"
    failing = ", ".join(run.experiment for run in runs if run.shows in WRONG)
    return working + (f"; these do not: {failing}" if failing else "")


def _find_not_allowed(report: Report, stack: StackFacts) -> Iterator[tuple[str, str]]:
    """The uses that `--require` names, that are tried as the options are, and that no run could try, with the reason.

    The full context belongs to the longer runs: by itself it is named where these were asked for.
    """
    from kvdoctor.decode.experiments import load, uses

    thorough = report.arguments.get("thorough")
    by_use: dict[str, list[Run]] = {}
    for run in select_local_runs(report, stack.name):
        required = uses()[run.experiment].required if run.experiment in uses() else None
        if required is not None:
            by_use.setdefault(required, []).append(run)
    tried = {one.use.required for one in load() if one.use is not None and (thorough or not one.thorough)}
    needed = {use.required for use in uses().values() if use.needed}
    for use, runs in by_use.items():
        if use in tried - needed and all(run.outcome == "skipped" for run in runs):
            yield use, shortened(runs[0].reason or "not run")


def _describe_loop(report: Report, stack: StackFacts) -> str:
    loop = next(run for run in list_uses(report, stack) if run.experiment in LOOPS and run.shows == "passed")
    steps = [step for step in loop.steps if step.phase == "decode" and step.difference is not None]
    others = describe_comparisons(select_local_runs(report, stack.name)) if loop.repeats else ""
    same = f"{others}, as there is no call without a cache" if loop.repeats else "a run without a cache"
    close = describe_result(loop).removeprefix("the same result twice: ")
    count = f"{format_count(len(steps), 'decode step')} of {loop.experiment}"
    if loop.by_rounding:
        worst = max((step.difference.relative for step in steps if step.difference is not None), default=0.0)
        text = f"{count} are within {format_difference(worst)} of {same}, by rounding alone{_in_float32(loop)}"
    else:
        text = f"{count} agree with {same}: {close}"
    visible = [control.difference.relative for control in loop.controls if control.visible and control.difference]
    if visible:
        off = format_difference(min(visible))
        text += f"; the check could have failed: a corrupted cache changes the logits by {off}"
    return text


def _in_float32(loop: Run) -> str:
    """The difference that is left where nothing is rounded."""
    float32 = loop.unrounded
    return f" ({format_difference(float32.worst)} in a float32 copy)" if float32 is not None else ""


def explain_undecided(report: Report, rest: str) -> list[tuple[str, str]]:
    """Label and text: why there is no verdict, and what decides. Of many reasons `rest` names where the others are."""
    groups = [group for group in group_open_checks(report.not_checked) if group.essential]
    reasons = [("why", f"{group.title}: {shortened(group.reason, 600)}") for group in groups[:MOST_REASONS]]
    if len(groups) > MOST_REASONS:
        reasons.append(("", f"{format_count(len(groups) - MOST_REASONS, 'more reason')} ({rest})"))
    return [*reasons, ("decide", advise_decision(report))]


def advise_decision(report: Report) -> str:
    """What decides about a model that is neither healthy nor unhealthy: a command, or why there is none."""
    model = as_argument(report.model.path)
    again = f"kvdoctor step-test {model}"
    blocking = next((f.repair for f in report.findings if means_incomplete(f.code)), None)
    if blocking is not None:
        return blocking.command or blocking.text
    if any(f.name == "loop-breaks-contract" and f.confidence == "suspected" for f in report.findings):
        return "say whether your loop takes tokens back; a trace with all values decides more (docs/trace.md)"
    if report.command == "speed":
        if report.arguments.get("against") is None:
            return f"{again}   (shows whether it can be run at all)"
        new = f"kvdoctor speed {model} --output speed.json"
        return f"{new}   (a new report to compare with: of this model, on this machine, while nothing else runs)"
    if report.command == "judge":
        return "run the probe again until it ends, then `kvdoctor judge` with the same model and seed"
    if (advice := advise_missing(report, again) or _advise_by_runs(report, model)) is not None:
        return advice
    if any(stack.contract is None or stack.contract.missing for stack in report.stacks):
        return f"{again} --contract FILE   (`kvdoctor contract` prints what was read; complete it)"
    if not report.model.files and report.command != "gate":
        return "give the folder of an export, or an .onnx file"
    if not report.stacks or report.command == "inspect":
        return f"kvdoctor inspect {model} -v   (shows what was read)"
    return "no command: kvdoctor cannot run this model step by step; compare it with its source in its own runtime"


def _advise_by_runs(report: Report, model: str) -> str | None:
    """What decides by what the runs show; None where the loop was not run. `model` is the argument of a command."""
    again = f"kvdoctor step-test {model}"
    loops = [run for run in report.runs if run.experiment in LOOPS]
    if any(run.without_tokens for run in report.runs):
        return f"kvdoctor inspect {model} --weights   (shows weights that are zero or all equal)"
    if any(run.outcome == "died" for run in loops):
        return f"{again} --timeout SECONDS --max-memory MIB, with larger limits"
    if any(run.outcome not in ("skipped", "failed") for run in loops):
        if report.command != "record" and all(entry.code == GOLDEN for entry in report.not_checked if entry.essential):
            new = f"kvdoctor record {model} -o FILE"
            return f"{new}   (golden numbers of this model; those that were given compare nothing)"
        return f"{again} --reference CHECKPOINT   (compares every step with PyTorch)"
    return None


def list_unshown(report: Report) -> Iterator[str]:
    """`KV005 graph-unsorted`: the notes that the first screen only counts."""
    for finding in report.findings:
        if finding.severity == "note" and finding.known is None:
            yield f"{finding.code} {finding.name}"


def _load(runs: list[Run]) -> "Mapping[str, Experiment]":
    """The experiments by name; nothing is loaded where nothing was run, since that loads numpy."""
    if not runs:
        return {}
    from kvdoctor.decode.experiments import by_name

    return by_name()


def _is_use(experiment: "Experiment | None") -> bool:
    """Whether a verdict rests on the experiment by itself: it explains no other, and is no known wrong workaround."""
    extra = experiment is not None and experiment.thorough and experiment.use is None
    return (
        experiment is not None
        and experiment.judged
        and experiment.shown
        and not (experiment.explains or experiment.on_request or extra)
    )
