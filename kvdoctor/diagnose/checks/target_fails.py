"""The model works in the local runtime, and fails or differs under a target, or on another execution provider.

How it is decided: the same experiments, with the same feeds, are run in an isolated environment with only the target's
release. What fails in the local runtime as well is not reported for the target. Logits of experiments that pass in both
are compared by the tolerances of docs/policy.md. The fault location is searched under the target. With `--provider` the
local runtime is the CPU, and the tolerance is measured on the model (docs/targets.md).

Reproduce: `kvdoctor step-test MODEL --target onnxruntime==1.16.3 -v`

Repair: use a release that runs the model, or export again for this one: with another opset, without the optimization or
quantization to which the fault location points.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.choices import CPU, Required
from kvdoctor.contract import describe
from kvdoctor.decode.runs import LogitsDifference, Run
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.checks.meaning_changed import list_changes
from kvdoctor.diagnose.checks.session_refused import list_errors, lower
from kvdoctor.diagnose.checks.target_limits import is_ruled_out
from kvdoctor.diagnose.context import RunContext
from kvdoctor.errors import as_argument
from kvdoctor.findings import Advice, Confidence, Fault, Faults, Severity, check
from kvdoctor.runtime.targets import Target, TargetResult, list_wrong_runs

ON_CPU = Advice(
    "re-export", "run the model on the CPU, or export it without the operator or fusion that the evidence names"
)
SEND = "; `kvdoctor repro MODEL --provider {} -o DIR` writes a small model that crashes, to send to its project"
ANOTHER = Advice("re-export", "use a release that runs the model as it is, or export it again for this one")


@check("KV404", "target-fails", "targets")
def target_fails(context: RunContext) -> Faults:
    """Files and steps that the local runtime runs, and that fail under a target.

    What it means: the installed runtime opens the file and runs its steps; the target runtime does not. An operator is
    missing or had a bug in that release, or a rule became stricter.
    """
    for result in _list_other_results(context):
        refused = list(_report_refusals(context, result))
        yield from refused
        if not refused:
            yield from _report_runs(context, result, ("failed", "died"))


@check("KV405", "target-differs", "targets")
def target_differs(context: RunContext) -> Faults:
    """Logits that are right in the local runtime, and wrong or different under a target.

    What it means: the steps run in both runtimes, and the logits of the target differ. An operator had a bug in that
    release, or one of its optimizations is wrong.
    """
    for result in _list_other_results(context):
        gaps = list(_report_gaps(context, result))
        wrong = _find_wrong_runs(context, result)
        if gaps and (not wrong or result.target.provider != CPU):
            others = tuple(f"{run.experiment} {run.outcome} as well" for run in wrong if run.outcome == "differs")
            yield from (gap.also(effects=others[:3]) for gap in gaps)
        else:
            yield from _report_runs(context, result, ("differs",))


def _name_local(context: RunContext, target: Target) -> str:
    if target.provider != CPU:
        return "the CPU"
    return context.local_runtime.words if context.local_runtime is not None else "the local runtime"


def _say_here(target: Target) -> str:
    return "on the CPU" if target.provider != CPU else "in the local runtime"


def _is_judged(experiment: str) -> bool:
    from kvdoctor.decode.experiments import judged_names  # with numpy, which no inspection needs

    return experiment in judged_names()


def _say_how(run: Run) -> str:
    return "passes" if _is_judged(run.experiment) else "runs"


def _list_other_results(context: RunContext) -> Iterator[TargetResult]:
    """The results of other runtimes than the local one; one of several with the same runtime."""
    seen = set()
    for result in context.target_results:
        place = result.target.runtime, result.target.ran_on
        if not result.is_local and result.not_run is None and place not in seen:
            seen.add(place)
            yield result


def _report_refusals(context: RunContext, result: TargetResult) -> Faults:
    """Files that open only locally, or under the target only with less optimization, for no known limit."""
    here = {one.file: one.opens_at for one in context.refusals}
    files = {file.name: file for file in context.stack.members}
    for refusal in result.refusals:
        file, opens_at = refusal.file, refusal.opens_at
        if file in here or (opens_at is None and file in files and is_ruled_out(files[file], result.target.limits)):
            continue
        what = "does not open the file" if opens_at is None else f"opens the file at level {opens_at!r} only"
        advice = ANOTHER if opens_at is None else lower(opens_at)
        fault = Fault("error", (file,), f"{result.target.words} {what}", advice, apart=(result.target.asked,))
        fault = fault.compare(
            f"a model that opens, as with {_name_local(context, result.target)}", list_errors(refusal.errors)
        )
        yield fault.also(file=file, where=f"file {file}, under {result.target.words}")


def _report_runs(context: RunContext, result: TargetResult, outcomes: tuple[str, ...]) -> Faults:
    """Experiments that go wrong under the target alone: one finding, if the first of them has one of these outcomes."""
    bad = _find_wrong_runs(context, result)
    if not bad or bad[0].outcome not in outcomes:
        return
    run, severity, use = bad[0], *_rate(context, bad[0].experiment)
    cause, subject = _describe_cause(run, result.target), tuple(run.experiment for run in bad)
    advice = _advise(result.target, crashed=run.outcome == "died")
    fault = Fault(severity, subject, cause, advice, use=use, apart=(result.target.asked,))
    fault = fault.also(run=run, nodes=list_nodes(run), error=run.error if run.outcome == "failed" else None)
    declared = f"{run.experiment} as with {_name_local(context, result.target)}, where it {_say_how(run)}"
    fault = fault.compare(declared, _describe_observed(run))
    node = f", {run.fault_node.shown}" if run.fault_node is not None else ""
    where = f"{run.experiment}, step {run.failed_step or 0}{node}, under {result.target.words}"
    evidence = (run.location.words, *run.location.provenance) if run.location is not None else ()
    if run.location is None and run.no_location is not None:
        evidence = (f"node not found: {run.no_location}",)
    if run.outcome == "differs":
        fault = fault.also(confidence=_find_confidence(result))
        evidence += _say_tolerance(result)
    effects = tuple(f"{other.experiment} {other.outcome} as well" for other in bad[1:4])
    evidence += tuple(list_changes(context, result, run))
    yield fault.also(where=where, effects=effects, evidence=evidence)


def _find_wrong_runs(context: RunContext, result: TargetResult) -> list[Run]:
    """The runs that go wrong under the target alone: the consumer's loop first, uses last."""
    bad = list_wrong_runs(context.runs, result.runs, on_provider=result.target.provider != CPU)
    judged = context.checked_loop.experiment if context.checked_loop else "plain-loop"
    return sorted(bad, key=lambda run: (run.experiment != judged, run.experiment in context.uses))


def _rate(context: RunContext, experiment: str) -> tuple[Severity, Required | None]:
    use = context.uses.get(experiment)
    if not _is_judged(experiment):  # the loop that callers are to write is another one
        return "warning", None
    return ("error", None) if use is None else (use.severity, use.required)


def _describe_observed(run: Run) -> str:
    if run.outcome == "died":
        return run.reason or "the process ended"
    if run.outcome == "failed":
        return run.error or "the step fails"
    step = run.wrong_step
    if step is None or step.difference is None:
        return run.reason or "the logits differ"
    size = _describe_size(step.difference)
    return size + " from the run without a cache under the target" * step.difference.finite


def _describe_cause(run: Run, target: Target) -> str:
    """What goes wrong, with the sizes of the step."""
    failed, here = run.failed_step or 0, _say_here(target)
    last = next((step for step in run.steps if step.step == failed), None)
    fed = f" on {last.new_tokens} new tokens and a past of {last.past_length}" if last is not None else ""
    if run.outcome == "died":
        fed = fed or (f", step {failed}" if run.failed_step is not None else "")
        node = f" at {run.fault_node.shown}" if run.fault_node is not None else ""
        return f"the process of {target.words} ends{node} in {run.experiment}{fed}, which {_say_how(run)} {here}"
    if run.outcome != "failed":
        return f"the logits of {run.experiment} are wrong with {target.words}, and right {here}"
    return f"step {failed} of {run.experiment} fails with {target.words}{fed}, and passes {here}"


def _report_gaps(context: RunContext, result: TargetResult) -> Faults:
    """Logits that are consistent in both runtimes, and differ between them."""
    apart = {name: gap for name, gap in result.gaps.items() if gap.verdict == "fail"}
    if not apart:
        return
    judged = context.checked_loop.experiment if context.checked_loop else "plain-loop"
    name = judged if judged in apart else min(apart)
    severity, use, target, gap = *_rate(context, name), result.target, apart[name]
    shapes = _find_other_shape(context.find_run(name), result.run(name), target)
    here = "the CPU" if target.provider != CPU else "the local runtime"
    what = f"takes fewer tokens than {here}" if gap.difference is None else f"gives other logits than {here}"
    cause = f"{target.words} " + (f"gives other shapes than {here}" if shapes else what)
    fault = Fault(severity, tuple(sorted(apart)), cause, _advise(target), use=use, apart=(target.asked, "other logits"))
    fault = fault.also(confidence=_find_confidence(result), evidence=_say_tolerance(result))
    node, place = "", gap.location
    if place is not None:
        node = f", {place.node.shown}" if place.node is not None else ""
        names = (place.node.name,) if place.node is not None else ()
        fault = fault.also(evidence=(place.words, *place.provenance, *fault.evidence), nodes=names)
    elif gap.no_location is not None:
        fault = fault.also(evidence=(f"operator not found: {gap.no_location}", *fault.evidence))
    fault = fault.also(evidence=(*fault.evidence, *list_changes(context, result, result.run(name))))
    ends = f"it takes no tokens after step {gap.step}"
    seen = shapes or (ends if gap.difference is None else _describe_size(gap.difference))
    fault = fault.compare(f"the logits of {_name_local(context, target)}", seen)
    yield fault.also(where=f"{name}, step {gap.step}{node}, under {target.words}")


def _advise(target: Target, crashed: bool = False) -> Advice:
    if target.provider == CPU:
        return ANOTHER
    return replace(ON_CPU, text=ON_CPU.text + SEND.format(as_argument(target.asked))) if crashed else ON_CPU


def _find_confidence(result: TargetResult) -> Confidence:
    """A difference on an emulated device alone may be one of that device: another adapter decides."""
    return "suspected" if result.target.software and not result.agreed else "confirmed"


def _say_tolerance(result: TargetResult) -> tuple[str, ...]:
    if result.tolerance is None:
        return ()
    noise = f"; first calls, without a cache, are off by {result.noise:.1g}" if result.noise is not None else ""
    alone = result.target.software and not result.agreed
    decides = (
        ("a software adapter alone: another adapter or a device decides (--provider NAME@DRIVER)",) if alone else ()
    )
    return (f"logits within {result.tolerance.passes:g} standard deviations pass there{noise}", *decides)


def _describe_size(difference: LogitsDifference) -> str:
    if not difference.finite:
        return "logits are not finite"
    return f"logits off by {difference.relative:.2g} standard deviations of the logits"


def _find_other_shape(here: Run | None, there: Run | None, target: Target) -> str | None:
    """The first output with another shape under the target."""
    theirs = {(step.step, name): one for step in (there.steps if there else ()) for name, one in step.returned.items()}
    for step in here.steps if here is not None else ():
        for name, seen in step.returned.items():
            other = theirs.get((step.step, name))
            if other is not None and other.shape != seen.shape:
                shown, mine = describe(other.dtype, other.shape), describe(seen.dtype, seen.shape)
                return f"step {step.step} returns {name} as {shown}, and as {mine} {_say_here(target)}"
    return None
