"""Logits with the cache differ from the reference run.

What it means: decoding with the cache runs, but gives other logits than the whole sequence in one call without a
cache, beyond what rounding explains, for a cause that no other check names (KV301). Where dropping the past changes
nothing at all, the graph ignores its cache, or one of its layers does (KV302).

Reproduce: `kvdoctor step-test MODEL -v`: the difference of each step stands in the table of steps, as a fraction of
the spread of the logits; a second table tells what it does to the next word (cosine, divergence, the likeliest words),
how the error goes over the steps, and how far the cache is from that of one call over the same tokens.

Repair: export again with a current exporter. A difference with a batch of 2 or with another encoder length only is a
warning. For a dynamically quantised model the noise of its own arithmetic is measured first, by sequences of several
lengths without any cache; a difference within four times that noise is no fault.

A model that rounds (float16, bfloat16, quantised activations) is run a second time without what it rounds, in float32,
where right splits agree to 1e-6 of the spread. What differs there is a fault, a warning where rounding hides it and it
has no name. What is right there is off by rounding alone: no fault in a step now and then, a warning in most of them.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import (
    UNDECIDED,
    Case,
    broken_promise,
    cause_in_use,
    growth_words,
    leading_cause,
    off_by,
    rounding_words,
)
from kvdoctor.checks.caused import Words, caused
from kvdoctor.checks.placed import because
from kvdoctor.checks.step_fails import SHORT_STATE, explained_elsewhere, fails_only_so
from kvdoctor.findings import Advice, CannotCheck, Fault, Severity, check
from kvdoctor.tolerances import tolerance
from kvdoctor.trace import Run
from kvdoctor.uses import Use

HAVE_OWN_CHECKS = ("left-padding", "encoder-padding", "full-context")

LESS_ROUNDING = Advice(
    "re-export", "keep more bits where the logits need them (float32 for the last layers), or accept the loss"
)
EXPORT_AGAIN = Advice("re-export", "export again with a current exporter, and test the result")
IGNORED = Words(
    cause="the cached step, or a layer of it, gives what it would give without any past",
    promised="logits that depend on the past",
    advice=EXPORT_AGAIN.text,
)


@check("KV301", "cached-differs", "runs")
def cached_differs(case: Case) -> Iterator[Fault]:
    """Judged runs whose logits are wrong for no named cause."""
    run = case.judged
    if run is None or run.shows in UNDECIDED:
        return  # the doctor says so, whichever checks are selected
    if reason := explained_elsewhere(case):
        raise CannotCheck(reason)
    if _ignores_past(case, run):
        raise CannotCheck("the past is ignored, see KV302")
    if _not_finite(run):
        raise CannotCheck("logits are not finite, see KV304")
    if run.outcome == "differs":
        yield from _differs(case, run)
    elif run.outcome == "failed":
        raise CannotCheck(f"logits parity of the {run.experiment}: step {run.failed_step} fails")
    for other, use in fails_only_so(case, "differs"):
        if other.experiment in HAVE_OWN_CHECKS or _has_a_name(case, other):
            continue
        cause = f"with {use.words}, decoding with the cache gives other logits than without"
        yield replace(_fault(case, other, _severity(other, use), cause), use=use.required)
    plain = case.run("plain-loop")
    if case.consumer == "plain" and case.emptied and plain is not None and plain.outcome in ("failed", "died"):
        raise CannotCheck(f"logits parity of the plain loop: no step completed after {(plain.failed_step or 0) - 1}")


@check("KV302", "past-ignored", "runs")
def past_ignored(case: Case) -> Iterator[Fault]:
    """Wrong logits, and zeroing the self-attention cache changes nothing."""
    run = case.judged
    leading = leading_cause(case)
    decided = leading is not None and leading[0] == "past-ignored"
    if run is None or explained_elsewhere(case, "past-ignored"):
        return
    if decided or _ignores_past(case, run):
        yield _fault(case, run, "error", IGNORED.cause)
    else:
        yield from caused(case, "past-ignored", IGNORED)


@check("KV304", "non-finite", "runs")
def non_finite(case: Case) -> Iterator[Fault]:
    """NaN or infinity in the logits of a judged run."""
    run = case.judged
    if run is not None and (steps := _not_finite(run)):
        fault = _fault(case, run, "error", f"logits are not finite at step {', '.join(map(str, steps))}")
        yield replace(fault, advice=case.re_export(f"or {EXPORT_AGAIN.text}"))
        return
    for other, use in fails_only_so(case, "differs"):
        if steps := _not_finite(other):
            cause = f"with {use.words}, logits are not finite at step {', '.join(map(str, steps))}"
            yield replace(_fault(case, other, use.severity, cause), use=use.required)
            return


def _severity(run: Run, use: Use) -> Severity:
    """What one token at a time in batch 1 makes wrong is an error, whatever the lengths."""
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    alone = run.experiment == "sweep" and step is not None and step.phase == "decode" and step.new_tokens == 1
    return "error" if alone else use.severity


def _has_a_name(case: Case, other: Run) -> bool:
    """Whether another check names what a run of other sizes suffers from."""
    cause, rows = cause_in_use(case, other.experiment), case.run("batch-rows")
    if cause is not None and cause[0] != "cached-differs":
        return True
    # Rows that interact without a cache do so with one.
    mixed = other.experiment == "batch" and rows is not None and rows.outcome == "differs"
    return mixed or bool(_not_finite(other))


def _not_finite(run: Run) -> list[int]:
    return [step.step for step in run.steps if step.difference and not step.difference.finite]


def _ignores_past(case: Case, run: Run) -> bool:
    """The spoilt call equals the unspoilt one although the loop is wrong: both are off by the same.

    Where the search for the cause saw an effect of the past, that counts more.
    """
    why = case.run("why")
    if why is not None and why.cause is not None:
        return False
    last = run.steps[-1].difference if run.steps else None
    return run.shows == "differs" and any(
        control.spoilt.startswith("self")
        and control.difference is not None
        and control.difference.finite
        and control.difference == last
        for control in run.controls
    )


def _over_the_steps(run: Run) -> str:
    """How the difference goes over the steps of a loop."""
    words = growth_words(run)
    return f"; the error {words}" if words else ""


def _looked_into(case: Case, run: Run) -> str:
    """What the search for the cause saw, where it found none that has a name."""
    why = case.run("why")
    cause = why.cause if why is not None and run is case.judged else None
    return f"; {cause.evidence}" if cause is not None else ""


def _differs(case: Case, run: Run) -> Iterator[Fault]:
    """The judged loop with other logits: an error, but for what is rounding alone."""
    if run.hidden:
        cause = "decoding with the cache gives other logits than without, by less than rounding hides"
        yield _fault(case, run, "warning", cause)
    elif not run.by_rounding:
        yield _fault(case, run, "error", "decoding with the cache gives other logits than without")
    elif _in_most_steps(case, run):
        cause = "decoding with the cache gives other logits than without, by rounding alone"
        found = _fault(case, run, "warning", cause)
        yield replace(found, follows=(rounding_words(run),), advice=LESS_ROUNDING)
    else:
        raise CannotCheck(f"one step alone of the {run.experiment} is off: {rounding_words(run)}")


def _in_most_steps(case: Case, run: Run) -> bool:
    """Whether more than a step now and then is too far off for the arithmetic of the model."""
    fails = tolerance(case.contract.exactness if case.contract else "float").fails
    found = [step.difference for step in run.steps if step.difference is not None]
    return 2 * sum(d.relative > fails or not d.finite for d in found) > len(found)


def _fault(case: Case, run: Run, severity: Severity, cause: str) -> Fault:
    promise = broken_promise(case, run)
    exactness = case.contract.exactness if case.contract else "float"
    limit = tolerance("float" if run.hidden else exactness)
    words = "float, where nothing is rounded" if run.hidden else exactness
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    place = f"step {step.step} (past {step.past_length}, new {step.new_tokens})" if step else "reference run"
    seen = off_by(run, step) or run.reason or "of another shape"
    logits = case.contract.graph("decode").port("logits") if case.contract else None
    return Fault(
        severity=severity,
        file=case.decode_file,
        subject=(logits.name if logits else "logits",),
        where=f"output {logits.name if logits else 'logits'}, {run.experiment}",
        apart=() if run is case.judged else (run.experiment,),
        promised=f"the logits of the reference run, within {limit.passes:g} of their spread ({words})",
        observed=f"{place}: logits {seen}{_over_the_steps(run)}{_looked_into(case, run)}",
        cause=cause + (f": {promise}" if promise else ""),
        advice=SHORT_STATE if promise else EXPORT_AGAIN,
        because=because(run),
    )
