"""The present does not grow by the new tokens.

How it is decided: the lengths that each step returns are compared with those that it was fed: in the loop, and in runs
at other lengths, where a step that returns a wrong length counts if the step after it is the first of that run to fail
or to have wrong logits. The new tokens are followed through the graph, without a run; a run whose logits match those of
a run without the cache overrules this. Else a step with differing logits is run with another token, which must change
its entry. A buffer that is written one position too far decodes the same with and without a cache; if its logits change
with its earlier content, the positions that a step wrote are compared. If a graph takes one token a call, another token
must change every state that a step returns, and at each place of the history the logits, within the reach of a sliding
window: as many latest tokens count at every step, the cache still has the others, and the graph compares a length with
its width. A recurrent or convolution state must change with the tokens of a step and with the state before it, and a
counter by the number of tokens.

Reproduce: `kvdoctor step-test MODEL -v`: the lengths are in the table of steps.
"""

from dataclasses import replace

from kvdoctor.contract import describe
from kvdoctor.decode.runs import HISTORY
from kvdoctor.diagnose.checks._attribution import WrongLength, drops_past, find_wrong_lengths
from kvdoctor.diagnose.checks._dataflow import describe_changes
from kvdoctor.diagnose.checks._faults import RETAIN_WINDOW, CauseText, describe_location, report_cause
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.findings import Fault, Faults, check
from kvdoctor.report.wording.runs import describe_difference

EXPORT_AGAIN = "export again, so that present = past followed by the new tokens"
WORDS = CauseText(
    cause="the cache entry of a new token does not depend on the token",
    declared="the past followed by the keys or values of the new tokens",
    advice=EXPORT_AGAIN,
    on_graph=True,
)
STATE = "the state updated by the new tokens"
MISPLACED = replace(
    WORDS,
    cause="tokens are written to wrong positions of the buffer, so that attention reads its old content",
    declared="each token at its own position: the first new one after the last of the past",
)
UNTOUCHED = CauseText(
    cause="a step returns a cache or a state without its new token",
    declared="presents that depend on the token of the step",
    advice="export again, so that a step returns its new token as well (with another cache class or exporter)",
)
LOST = CauseText(
    cause="earlier tokens are lost: they were overwritten in the cache, or are masked",
    declared="logits that depend on every token that the cache keeps",
    advice="export again with write positions and masks that count the tokens of the past",
)
UNCOUNTED = CauseText(
    cause="a counter of tokens does not grow by the number of new tokens",
    declared="the number of tokens so far",
    advice="export again with a counter that adds the length of the tokens",
)
LOST_STATE = CauseText(
    cause="a step returns a state of its own tokens alone; that of the tokens before them is lost",
    declared="states that depend on the state that the step is fed",
    advice="export again, so that a step goes on from the state that it is fed (with a past in the sample inputs)",
)


@check("KV205", "present-does-not-grow", "runs")
def present_does_not_grow(context: RunContext) -> Faults:
    """Slots that do not depend on the new tokens, or whose length after a step is neither past + new nor new.

    What it means: after a step with past length P and S new tokens, a growing cache must have length P + S, and a
    buffer of fixed size the same length as before. Here the present has another length, or the right length and no
    dependence on the new tokens: the past is returned unchanged, or rearranged. An exporter can lose the write of new
    keys and values when it traces a cache that is changed in place.

    Repair: export again.
    """
    wrong = [item for item in find_wrong_lengths(context) if not drops_past(item)]
    yield from _report_lengths(context, wrong, _describe_length(wrong[0]) if wrong else "")
    if not wrong:
        yield from report_cause(context, "present-does-not-grow", _choose_words(context))


def _describe_length(wrong: WrongLength) -> str:
    """How a present is too short."""
    past, new = wrong.step.past_length, wrong.step.new_tokens
    if wrong.slot.trimmed:
        return f"the present is cut to a length of {wrong.length}, and later steps need more"
    if past < wrong.length < past + new:
        return "a call stores fewer entries than it has tokens"
    return "the length of the present is not past + new"


def _choose_words(context: RunContext) -> CauseText:
    """How a present does not grow: a counter, a state, or entries at the wrong places."""
    why, places = context.find_run("why"), context.find_run("written-places")
    named = why.cause.slot if why is not None and why.cause is not None else ""
    kind = next((slot.kind for slot in context.contract.slots if slot.past == named), None)
    if kind == "counter":
        return UNCOUNTED
    if kind is not None or _find_history(context, "present-does-not-grow"):
        return UNTOUCHED
    return MISPLACED if places is not None and places.cause is not None else WORDS


@check("KV206", "present-drops-past", "runs")
def present_drops_past(context: RunContext) -> Faults:
    """Slots that contain only the new tokens after a step with a past.

    What it means: the present contains the new tokens alone. If it is fed back, the history is lost. The same holds for
    a recurrent state that does not depend on the one that the step is fed. In a graph that takes one token a call it
    means that an earlier token, as far back as its cache reaches, has no influence on later logits: it was overwritten,
    or is masked.

    Repair: in a loop of your own, append the returned entries to the past; otherwise export again.
    """
    wrong = [item for item in find_wrong_lengths(context) if drops_past(item)]
    yield from _report_lengths(context, wrong, "the present contains the new tokens alone; the past is dropped")
    if not wrong:
        lost = LOST if _find_history(context, "present-drops-past") else LOST_STATE
        yield from report_cause(context, "present-drops-past", lost)


@check("KV205", "present-does-not-grow", "contract")
def present_without_new_tokens(context: ContractContext) -> Faults:
    """Slots whose present does not depend on the tokens of the step."""
    lost = tuple(slot for slot in context.contract.slots if slot.takes_new is False)
    if not lost or context.passes_parity:
        return
    names = tuple(slot.present or "" for slot in lost)
    advice = "or export again with another cache class or exporter, if the file does not contain the lost nodes"
    cause = "a decode step returns a cache without its new tokens"
    fault = Fault("error", names, cause, context.advise_graph_repair(advice))
    declared = STATE if lost[0].growth == "replace" else WORDS.declared
    fault = fault.compare(declared, f"{names[0]} does not depend on the tokens of the step")
    effects = (f"{lost[0].past} of the next step does not contain the previous token",)
    yield fault.also(effects=effects, confidence="confirmed" if context.loop_is_wrong else "suspected")


def _find_history(context: RunContext, name: str) -> bool:
    """Whether the comparison of histories decided for a cause."""
    run = context.find_run(HISTORY)
    return run is not None and run.cause is not None and run.cause.name == name


def _report_lengths(context: RunContext, wrong: list[WrongLength], cause: str) -> Faults:
    if not wrong:
        return
    first, names = wrong[0], tuple(item.slot.present or "" for item in wrong)
    slot, run, step, use = first.slot, first.run, first.step, first.use
    absent = f"{slot.past} of step {step.step + 1} does not contain the history"
    advice = context.advise_graph_repair(f"or {RETAIN_WINDOW if slot.trimmed else EXPORT_AGAIN}")
    length = f"length {step.past_length + step.new_tokens} (past {step.past_length} + new {step.new_tokens})"
    if slot.growth in ("static", "ring", "delta"):
        word = "the new tokens alone" if slot.growth == "delta" else "the length of its past"
        length = f"{word} ({slot.growth})"
    fault = Fault("error", names, cause, advice, effects=(absent,))
    fault = fault.compare(length, f"step {step.step}: {describe(first.seen.dtype, first.seen.shape)}")
    if use is not None:
        size = describe_difference(run, run.wrong_step)
        after = "the step fails" if run.outcome == "failed" else f"its logits are {size or 'wrong'}"
        fault = fault.also(severity=use.severity, cause=f"with {use.words}, {cause}", use=use.required, run=run)
        fault = fault.also(observed=f"{run.experiment}, {fault.observed}", effects=(f"{absent}, and {after}",))
    if use is not None or slot.trimmed:
        where = describe_location(run) if use is not None else ()
        fault = fault.also(evidence=(*describe_changes(context, slot.past), *where))
    yield fault
