"""Logits with the cache differ from the reference run.

How it is decided: the difference of each step is measured in standard deviations of the logits. The noise of a
dynamically quantized model is measured first, by sequences of several lengths without any cache; a difference below
four times that noise is no fault. A model that rounds (float16, bfloat16, quantized activations, or the cache alone) is
run again as a float32 copy, where different splits of a correct model agree to 1e-6 standard deviations. A difference
there is a fault, and a warning if the rounding of the model is larger. If the copy is correct, only rounding makes the
model differ: a few such steps are ignored, most steps are a warning. It is also a warning if the graph rounds the cache
before it returns it (QuantizeLinear and DequantizeLinear, which also cut off large entries, Round between two scales, a
Cast to fewer bits and back), and that changes the logits by more than the limit of the model's arithmetic; the finding
has the size. Such a cache is an error if at least every second step is off by more than half of what a corrupted cache
changes, or by more than 0.6 standard deviations, the loosest limit of any arithmetic.

Where no other token changes the logits, or the keys and values of a layer, a wrong cache would change nothing either:
that is not checked, and never healthy.

Where a graph takes one token a call, no call without a cache exists. The same tokens are fed again, in this session and
in one of another process, in turn with a second sequence; noise in each slot must change the logits, and so must
another token at each place that the cache keeps. The report says that such a model was compared in no other way. With
`--thorough`, recurrent states are fed 2,000 tokens: one that each step amplifies is KV304.

Reproduce: `kvdoctor step-test MODEL -v`: one table lists the difference of each step; a second one its effect on the
next token (divergence, the likeliest token), and the difference of the cache from that of a single call over the same
tokens.

Repair: correct the node that the evidence names, or export again. A difference only with a batch of 2, or only with
another encoder length, is a warning.
"""

from kvdoctor.decode.runs import HISTORY, PAGED_LOOP, Run
from kvdoctor.diagnose.checks._attribution import (
    NAMED_BY_USE,
    find_broken_uses,
    find_faulty_uses,
    find_named_cause,
    leading_cause,
    leave_to_other,
)
from kvdoctor.diagnose.checks._dataflow import describe_rounded, describe_unread, find_other_entries
from kvdoctor.diagnose.checks._faults import (
    HIDDEN,
    OFF,
    CauseText,
    build_difference,
    build_use_difference,
    report_cause,
)
from kvdoctor.diagnose.context import RunContext
from kvdoctor.diagnose.not_checked import REASONS
from kvdoctor.errors import CannotCheck, Explained
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import format_count, join_some, shorten_names
from kvdoctor.report.wording.runs import describe_rounding

NEAR_THE_END = 0.5
"""The share of float16's range from which on a value may leave it with other tokens."""
HAVE_OWN_CHECKS = ("left-padding", "right-padding", "encoder-padding", "rows-apart", "full-context", *NAMED_BY_USE)
LESS_ROUNDING = Advice(
    "re-export", "keep more bits where the logits need them (float32 for the last layers), or accept the difference"
)
ACCEPT = "accept the difference: a cache of fewer bits is smaller"
FINER = "store the cache in more bits, or by a scale that covers its values with smaller steps"
AMPLIFIED = "correct the state that each step amplifies, or export again"
OVERFLOWS = "or replace what overflows (-inf in a mask by the lowest number), or "
ONE_SEQUENCE = Advice("re-export", "export again; until then feed the tokens of one sequence a call")
WIDER = "or run the model in float32 or bfloat16, "
NEVER_FINITE = (
    "look for NaN in the weights (kvdoctor inspect MODEL --weights), for a logarithm, root or quotient that has no"
    " value, and for what overflows (-inf in a mask that hides a whole row); correct it, or export again"
)
ALL_HIDDEN = "; a row whose keys are all hidden by -inf gives NaN"
MOST_USES = 2  # that a finding about several names
IGNORED = CauseText(
    cause="the cached step, or one of its layers, ignores the past",
    declared="logits that depend on the past",
    advice="export again, so that the attention reads the past together with the new keys and values",
)


@check("KV301", "cached-differs", "runs")
def cached_differs(context: RunContext) -> Faults:
    """Wrong logits of the checked loop, or of runs of other sizes, without a named cause.

    What it means: decoding with the cache runs, but its logits differ from those of one call over the whole sequence
    without a cache, by more than rounding explains. No other check names the cause, or says whether reading the past or
    adding entries is wrong.
    """
    run = context.checked_loop
    if run is None or run.shows in REASONS:
        return  # the pipeline reports it as not checked, whichever checks are selected
    leave_to_other(context)
    if _ignores_past(context, run):
        raise Explained("the past is ignored, see KV302")
    if run.not_finite:
        raise Explained("logits are not finite, see KV304")
    yield from _judge_loop(context, run)
    one_by_one = "logits with the cache differ from those of the same tokens one by one"
    off = one_by_one if context.contract.new_tokens == 1 else OFF
    for other, use in find_faulty_uses(context, "differs"):
        if other.experiment not in HAVE_OWN_CHECKS and find_named_cause(context, other) is None:
            yield build_use_difference(context, other, use, f", {off}")
    plain = context.find_run("plain-loop") if context.consumer == "plain" and context.emptied_slots else None
    if plain is not None and plain.outcome in ("failed", "died"):
        raise CannotCheck(f"the plain loop failed at step {plain.failed_step}, so its later logits were not compared")


def _judge_loop(context: RunContext, run: Run) -> Faults:
    if run.outcome == "differs":
        yield from _differs(context, run)
    elif run.outcome == "ambiguous" and run.by_rounding and context.rounded_presents:
        yield _rounded(context, run)
    elif coarse := [*find_faulty_uses(context, "differs", coarse=True)]:
        yield _rounded(context, coarse[0][0])
    elif run.outcome == "failed":
        reason = f"the {run.experiment} failed at step {run.failed_step}, so its later logits were not compared"
        raise CannotCheck(reason)


@check("KV302", "past-ignored", "runs")
def past_ignored(context: RunContext) -> Faults:
    """Wrong logits, and zeroing the self-attention cache changes nothing, or no logit depends on some of it.

    What it means: the graph, or one of its layers, ignores the cache. The logits with the cache differ from those of
    one call over the whole sequence, and they stay the same if the self-attention cache is filled with zeros; or some
    of the past inputs have no path to the logits in the graph.

    How it is decided: the loop is run again with zeros in place of the cache, which must change the logits; and each
    past is followed through the graph. Where no other token changes the logits, or the keys and values of a layer, a
    cache that is ignored would look the same: then the answer is "not checked".

    Reproduce: `kvdoctor step-test MODEL -v`; in a loop of your own, feed zeros as the past and compare the logits.

    Repair: export again. The attention must read the past together with the new keys and values, not the new ones
    alone.
    """
    run = context.checked_loop
    leading = leading_cause(context)
    decided = leading is not None and leading[0] == "past-ignored"
    unread = describe_unread(context) if run is not None and run.shows == "differs" else ()
    # A graph that looks ahead has lost its mask, and with it what tells a run whether the past is read.
    looks_ahead = leading is not None and leading[0] == "not-causal"
    if run is None:
        return
    if not (looks_ahead and unread):
        leave_to_other(context, "past-ignored")
    if (decided and leading is not None and leading[1].experiment != HISTORY) or unread or _ignores_past(context, run):
        fault = build_difference(context, run, "error", IGNORED.cause)
        advice = Advice("re-export", IGNORED.advice)
        yield fault.also(evidence=(*unread, *fault.evidence), repair=advice)
    else:
        yield from report_cause(context, "past-ignored", IGNORED)


@check("KV304", "non-finite", "runs")
def non_finite(context: RunContext) -> Faults:
    """NaN or infinity in the logits of the checked loop, or of runs of other sizes.

    What it means: the logits of some step are NaN or infinite. Common causes are values beyond 65,504 in float16, a
    mask whose rows hide every token, and a recurrent state that each step amplifies.

    How it is decided: the logits of every step are searched for values that are not finite. With `--thorough`,
    recurrent states are also fed 2,000 tokens; one that only grows towards infinity is a warning. A vocabulary entry
    that is -inf in the reference run as well is not a fault. Of a model in float16 with at most 256 MiB of weights in
    float32, or of any one with `--thorough`, products, sums, powers and inputs of norms in a call without a cache are
    looked at, but for low numbers that hide a key or a token: one beyond half of the range of float16 is a warning, and
    so is one that is infinite where the logits are not, because a later node divides by it.

    Reproduce: `kvdoctor step-test MODEL -v`; the table of steps shows the first one and its past length. `kvdoctor
    inspect MODEL` names constants that overflow in float16.

    Repair: run the model in float32 or bfloat16, or replace the constant that overflows and export again.
    """
    run = context.checked_loop
    if run is not None and run.not_finite:
        if any(find_other_entries(context, slot) for slot in context.contract.slots):
            raise Explained("a step uses one value for its new entries and returns another, see KV318")
        fault = build_difference(context, run, "error", _describe_steps(run))
        always = len(run.not_finite) == len(run.steps)
        advice = context.advise_graph_repair(f"or {NEVER_FINITE}") if always else _advise_range(context)
        yield fault.also(repair=advice)
        return
    for other, use in find_broken_uses(context):
        if other.cause is not None and not other.not_finite:
            severity = use.severity if other.cause.slot else "error"  # a slot that grows is not infinite yet
            what = "a state grows with each step" if other.cause.slot else f"with {use.words}: {other.cause.evidence}"
            fault = build_difference(context, other, severity, what)
            fault = fault.compare("logits and states within the range of their type", other.cause.evidence)
            yield fault.also(repair=Advice("re-export", AMPLIFIED))
        else:
            hidden = ALL_HIDDEN if use.required == "left-padding" else ""
            fault = build_difference(context, other, "error", f"with {use.words}, {_describe_steps(other)}{hidden}")
            yield fault.also(use=use.required, repair=_advise_range(context))
        return
    if context.largest is not None and context.largest.share > NEAR_THE_END:
        largest, cause = context.largest, "other tokens may leave the range: NaN or infinity follows"
        if largest.share > 1:
            cause = "a value is infinite or no number; a later node hides that from the logits"
        fault = Fault("warning", (context.logits_name,), cause, _advise_range(context), nodes=(largest.node.name,))
        yield fault.compare(f"values within {NEAR_THE_END:g} of float16's range", str(largest))


def _advise_range(context: RunContext) -> Advice:
    narrow = context.contract.exactness != "float"
    has_states = any(slot.growth == "replace" for slot in context.contract.slots)
    again = AMPLIFIED if has_states else "export again"
    return context.advise_graph_repair(WIDER * narrow + OVERFLOWS.removeprefix("or " * narrow) + again)


def _describe_steps(run: Run) -> str:
    rest = " and in {} of the steps after it"
    return f"logits are not finite at step {join_some([*map(str, run.not_finite)], 1, rest=rest)}"


def _ignores_past(context: RunContext, run: Run) -> bool:
    """Whether a corrupted past changes as much as the loop is off, and no search saw an effect of the past."""
    why = context.find_run("why")
    if why is not None and why.cause is not None:
        return False
    last = run.steps[-1].difference if run.steps else None
    own = (control.difference for control in run.controls if control.corrupted.startswith("self"))
    return run.shows == "differs" and any(one is not None and one.finite and one == last for one in own)


def _differs(context: RunContext, run: Run) -> Faults:
    """The checked loop with other logits: an error, unless only rounding makes it differ."""
    limit, found = context.tolerance.fails, [step.difference for step in run.steps if step.difference is not None]
    if run.hidden:
        yield build_difference(context, run, "warning", f"{OFF}, {HIDDEN}")
    elif run.unrounded is not None and run.unrounded.outcome == "passed" and context.rounded_presents:
        yield _rounded(context, run)
    elif not run.by_rounding:
        calls = _name_calls(context, run)
        fault = build_difference(context, run, "error", f"{calls}{OFF}")
        yield fault.also(repair=ONE_SEQUENCE) if calls else fault
    elif 2 * sum(d.relative > limit or not d.finite for d in found) > len(found):
        fault = build_difference(context, run, "warning", f"{OFF}, by rounding alone")
        yield fault.also(effects=(describe_rounding(run),), repair=LESS_ROUNDING)
    else:
        raise CannotCheck(f"few steps of the {run.experiment} differ: {describe_rounding(run)}")


def _name_calls(context: RunContext, run: Run) -> str:
    """Which calls of a loop over blocks are wrong, where those of one sequence before are right; else empty."""
    fed = run.wrong_step.fed if run.experiment == PAGED_LOOP and run.wrong_step is not None else {}
    pasts = {slot.past for slot in context.contract.slots}
    tables = [seen for name, seen in fed.items() if name not in pasts and len(seen.shape) == 2]
    return "in calls with tokens of several sequences, " if any(one.shape[0] > 1 for one in tables) else ""


def _rounded(context: RunContext, run: Run) -> Fault:
    """A cache that the graph rounds: a warning, or an error if it is too coarse, for the loop or for other uses."""
    rounded, uses = context.rounded_presents, [*find_faulty_uses(context, "differs", coarse=True)]
    coarse = run.too_coarse or bool(uses)
    more = f", and in {format_count(len(uses) - MOST_USES, 'other use')}" if len(uses) > MOST_USES else ""
    where = f" with {' or '.join(use.words for _, use in uses[:MOST_USES])}{more}" if uses else ""
    how = f" by so much that the logits are wrong{where}" if coarse else ""
    names, verb = shorten_names([*rounded]), "are" if len(rounded) > 1 else "is"
    cause = f"{names} {verb} returned rounded{how}, but the same step attends to the unrounded values"
    wrong = coarse and (not uses or any(use.severity == "error" for _, use in uses))
    found = build_difference(context, run, "error" if wrong else "warning", cause)
    found = found.also(use=next((use.required for _, use in uses if use.required in context.required), None))
    rounding = next(iter(rounded.values())).rounding
    found = found.also(nodes=tuple(node.name for node in rounding[:1] if node.name), effects=(describe_rounding(run),))
    advice = context.advise_graph_repair(f"or {FINER if coarse else ACCEPT}")
    return found.also(evidence=describe_rounded(context), repair=advice)
