"""Logits are right in the usual loop, and wrong at other lengths or with several new tokens.

How it is decided: one step at each past from 1 to 39, steps, chunks and prefills around each number that the graph
compares a length with, and one step after 49 tokens; chunks of 3 tokens, and of 2 in a batch of 2. All logits are
compared with those of one call over the same tokens without a cache. A cause that has a check of its own is reported by
that check.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `each-length`, `near-thresholds`, `far-thresholds`, `long-past`,
`chunk`, `second-turn` and `chunks-near-thresholds`; the table of each run lists the past of every step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor.decode.runs import Run
from kvdoctor.diagnose.checks._attribution import AT_LENGTHS, CHUNKS, find_faulty_uses, find_named_cause, leave_to_other
from kvdoctor.diagnose.checks._faults import OFF, CauseText, build_use_difference, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.errors import Explained
from kvdoctor.findings import Advice, Faults, check

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Use

OTHER_TOKEN = CauseText(
    cause="a call with several tokens gives one of them the logits of another, with and without a cache",
    declared="logits of each token that depend on it",
    advice="export again; until then feed one token a call, the prompt as well",
)
CHANGED = CauseText(
    cause="without a cache, logits of earlier tokens change with the number of tokens, and steps with one differ",
    declared="logits that depend on the token and earlier ones alone",
    advice="correct what the number of tokens changes (a mask, the values that are read, a scale), or export again",
)
ZEROS = Advice(
    "re-export",
    "correct the part that fills the cache at these lengths, or export again without it; until then feed a long prompt "
    "in calls of lengths that are right",
)
ONE_TOKEN = Advice("caller", "feed one token per step once there is a cache, or export again")


@check("KV308", "wrong-at-lengths", "runs")
def wrong_at_lengths(context: RunContext) -> Faults:
    """Wrong logits at some lengths of the past.

    What it means: the loop of a few single tokens gives the logits of the reference run, and at some lengths of the
    past it does not. The fault begins at a length, or is at one alone: a table that ends, a mask or a window of a fixed
    size, a branch that is taken from some length on. It is an error, since every sequence gets there.

    Repair: correct the node that the evidence names, or a number of the graph at which the wrong lengths begin, or
    export again.
    """
    yield from report_cause(context, "wrong-at-lengths", CHANGED)
    for run, use in _unnamed(context, AT_LENGTHS):
        fault = build_use_difference(context, run, use, f", {OFF}").also(effects=tuple(_describe_lengths(context, run)))
        numbering = context.find_run("numbering")
        zeros = numbering.cause if numbering is not None else None
        if zeros is not None and zeros.name == "wrong-at-lengths":  # in a long prompt
            cause = f"{fault.cause}: entries of the cache are left at zero"
            yield replace(fault, cause=cause, evidence=(zeros.evidence,), repair=ZEROS)
            return  # it is one fault, at whatever lengths it shows
        yield fault


@check("KV309", "chunk-differs", "runs")
def chunk_differs(context: RunContext) -> Faults:
    """Wrong logits of several new tokens at once.

    What it means: single tokens on a cache give the logits of the reference run, and several new tokens at once do not
    (chunked prefill, a second turn, speculation). It is a warning, since a loop can feed one token per step, and an
    error where no call with several tokens is right: the last token of a prompt does not change its own logits.

    Repair: feed one token per step once there is a cache, or export again with several new tokens on a past in the
    sample inputs.
    """
    yield from report_cause(context, "chunk-differs", OTHER_TOKEN)
    for run, use in _unnamed(context, CHUNKS):
        yield build_use_difference(context, run, use, f", {OFF}").also(repair=ONE_TOKEN)


def _unnamed(context: RunContext, experiments: tuple[str, ...]) -> "Iterator[tuple[Run, Use]]":
    """The runs of some experiments that differ for no cause that has a check of its own."""
    leave_to_other(context, "chunk-differs")
    wrong = [(run, use) for run, use in find_faulty_uses(context, "differs") if run.experiment in experiments]
    named = {run.experiment: name for run, _ in wrong if (name := find_named_cause(context, run)) is not None}
    yield from ((run, use) for run, use in wrong if run.experiment not in named)
    if named and len(named) == len(wrong):
        raise Explained("; ".join(f"{experiment} is explained by {name}" for experiment, name in named.items()))


def _describe_lengths(context: RunContext, run: Run) -> Iterator[str]:
    """The first past at which a single step is wrong; later ones may be so for the entries that it left."""
    single = [step for step in run.steps if step.phase == "decode" and step.new_tokens == 1 and step.difference]
    wrong = {s.past_length for s in single if s.difference and not s.difference.relative <= context.tolerance.fails}
    right = {step.past_length for step in single if wrong and step.past_length < min(wrong)}
    if right:
        yield f"first wrong at a past of {min(wrong)} tokens; {len(right)} shorter ones that were run are right"
