"""The model runs here, and fails or differs under a target.

What it means: the installed runtime opens the file and takes its steps; the runtime that the model must live in does
not, or its logits are others. An operator whose kernel had a fault in that release, an optimisation that goes wrong, a
rule that was made stricter.

How it is decided: the same experiments, with the same feeds, are run in an isolated environment that holds the target's
release and nothing else. What fails here as well is no fault of the target's. Logits of experiments that pass in both
are held against one another by the tolerances of docs/design.md. The place of a fault is looked for under the target.

Reproduce: `kvdoctor step-test MODEL --target onnxruntime==1.16.3 -v`

Repair: use a release that takes the model, or export again for this one: with another opset, without the optimisation
or quantisation that the place of the fault points at.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.target_limits import is_ruled_out
from kvdoctor.choices import Required
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, Fault, Severity, check
from kvdoctor.targets import Target
from kvdoctor.targets.stay import Gap, Stay
from kvdoctor.trace import Run, Step
from kvdoctor.uses import USES

GOES_WRONG = ("failed", "differs", "died")
ANOTHER = Advice("re-export", "use a release that takes the model as it is, or export it again for this one")


@check("KV404", "target-fails", "targets")
def target_fails(case: Case) -> Iterator[Fault]:
    """A target does not open a file that opens here, or a step fails there that passes here."""
    for stay in _others(case):
        refused = list(_refused(case, stay))
        yield from refused
        if not refused:
            yield from _went_wrong(case, stay, ("failed", "died"))


@check("KV405", "target-differs", "targets")
def target_differs(case: Case) -> Iterator[Fault]:
    """Logits are wrong under a target, or not those of here, where they are right here."""
    for stay in _others(case):
        yield from _went_wrong(case, stay, ("differs",))
        if not _wrong_there_alone(case, stay):
            yield from _parted(case, stay)


def _here(case: Case) -> str:
    return case.here.words if case.here is not None else "the runtime here"


def _others(case: Case) -> Iterator[Stay]:
    """What was run under other runtimes than the one that is here; one of several with the same runtime."""
    seen = set()
    for stay in case.stays:
        if not stay.here and stay.not_run is None and stay.target.runtime not in seen:
            seen.add(stay.target.runtime)
            yield stay


def _refused(case: Case, stay: Stay) -> Iterator[Fault]:
    """Files that open here, and there not, or only with less optimisation; the table does not say why."""
    here = {file: opens_at for file, _, opens_at in case.refusals}
    files = {file.name: file for file in case.stack.files.values()} if case.stack else {}
    for file, errors, opens_at in stay.refusals:
        if file in here or (opens_at is None and file in files and is_ruled_out(files[file], stay.target.limits)):
            continue
        levels: dict[str, list[str]] = {}
        for level, error in errors.items():
            levels.setdefault(error, []).append(level)
        advice = ANOTHER
        if opens_at is not None:
            advice = Advice("caller", f"set the graph optimisation level to {opens_at!r} when you open the session")
        yield Fault(
            severity="error",
            file=file,
            subject=(file,),
            apart=(stay.target.asked,),
            where=f"file {file}, under {stay.target.words}",
            promised=f"a model that opens, as with {_here(case)}",
            observed="; ".join(f"level {', '.join(names)}: {error}" for error, names in levels.items()),
            cause=f"{stay.target.words} "
            + ("does not open the file" if opens_at is None else f"opens the file at level {opens_at!r} only"),
            advice=advice,
        )


def _went_wrong(case: Case, stay: Stay, outcomes: tuple[str, ...]) -> Iterator[Fault]:
    """Experiments that go wrong there and do not here: one finding, if the first that matters ends as named."""
    bad = _wrong_there_alone(case, stay)
    if not bad or bad[0].outcome not in outcomes:
        return
    run, severity, use = bad[0], *_hurts(bad[0].experiment)
    yield Fault(
        severity=severity,
        file=case.decode_file,
        subject=tuple(run.experiment for run in bad),
        apart=(stay.target.asked,),
        where=_where(run, stay.target),
        promised=f"{run.experiment} as with {_here(case)}, where it passes",
        observed=_observed(run),
        cause=_cause(run, stay.target),
        advice=ANOTHER,
        follows=tuple(f"{other.experiment} {other.outcome} there as well" for other in bad[1:4]),
        use=use,
        because=(run.place.words, *run.place.provenance) if run.place is not None else (),
    )


def _wrong_there_alone(case: Case, stay: Stay) -> list[Run]:
    """The runs that go wrong there and not here: the consumer's loop first, uses last."""
    bad = []
    for run in stay.runs:
        mine = case.run(run.experiment)
        if run.outcome in GOES_WRONG and mine is not None and mine.outcome not in (*GOES_WRONG, "skipped"):
            bad.append(run)
    judged = case.judged.experiment if case.judged else "plain-loop"
    return sorted(bad, key=lambda run: (run.experiment != judged, run.experiment in USES))


def _hurts(experiment: str) -> tuple[Severity, Required | None]:
    use = USES.get(experiment)
    return ("error", None) if use is None else (use.severity, use.required)


def _where(run: Run, target: Target) -> str:
    node = run.place.node if run.place is not None and run.place.node is not None else run.node
    place = f', {node.op} "{node.name}"' if node is not None else ""
    return f"{run.experiment}, step {run.failed_step or 0}{place}, under {target.words}"


def _observed(run: Run) -> str:
    if run.outcome == "died":
        return run.reason or "the process ended"
    if run.outcome == "failed":
        return run.error or "the step fails"
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    if step is None or step.difference is None:
        return run.reason or "other logits"
    if not step.difference.finite:
        return "logits that are not finite"
    return f"logits off by {step.difference.relative:.2g} of their spread from the run without a cache, there"


def _cause(run: Run, target: Target) -> str:
    """What goes wrong, from shapes where they tell."""
    failed = run.failed_step or 0
    match run.outcome:
        case "died":
            return f"the process with {target.words} ends in {run.experiment}, which passes here"
        case "failed":
            last = next((step for step in run.steps if step.step == failed), None)
            fed = f" on {_fed(last)}" if last is not None else ""
            return f"step {failed} of {run.experiment} fails with {target.words}{fed}, and passes here"
        case _:
            return f"the logits of {run.experiment} are wrong with {target.words}, and right here"


def _fed(step: Step) -> str:
    return f"{step.new_tokens} new tokens and a past of {step.past_length}"


def _parted(case: Case, stay: Stay) -> Iterator[Fault]:
    """Logits that are right by themselves there and here, and are not the same."""
    apart = {name: gap for name, gap in stay.gaps.items() if gap.verdict == "fail"}
    if not apart:
        return
    judged = case.judged.experiment if case.judged else "plain-loop"
    name = judged if judged in apart else min(apart)
    severity, use = _hurts(name)
    shapes = _other_shapes(case.run(name), stay.run(name))
    yield Fault(
        severity=severity,
        file=case.decode_file,
        subject=tuple(sorted(apart)),
        apart=(stay.target.asked, "other logits"),
        where=f"{name}, step {apart[name].step}, under {stay.target.words}",
        promised=f"the logits of {_here(case)}",
        observed=shapes or _gap_words(apart[name]),
        cause=f"the same feeds give other {'shapes' if shapes else 'logits'} with {stay.target.words} than here",
        advice=ANOTHER,
        use=use,
    )


def _gap_words(gap: Gap) -> str:
    if gap.difference is None:
        return "logits in another number"
    if not gap.difference.finite:
        return "logits that are not finite"
    return f"logits off by {gap.difference.relative:.2g} of their spread"


def _other_shapes(here: Run | None, there: Run | None) -> str | None:
    """The first output that has another shape there."""
    theirs = {step.step: step.returned for step in there.steps} if there is not None else {}
    for step in here.steps if here is not None else ():
        for name, seen in step.returned.items():
            other = theirs.get(step.step, {}).get(name)
            if other is not None and other.shape != seen.shape:
                shown, mine = describe(other.dtype, other.shape), describe(seen.dtype, seen.shape)
                return f"step {step.step} returns {name} as {shown} there, and as {mine} here"
    return None
