"""The present does not grow by the new tokens.

What it means: after a step with past length P and S new tokens a cache that grows must be P + S long, and a buffer of
fixed size as long as before. It has another length (KV205), or it holds the new tokens alone (KV206), so that the
history is lost when it is fed back. KV205 is also a present of the right length that nothing of the new tokens reaches:
the past comes back as it was, or turned round. An exporter can lose the write of new keys and values when it traces a
cache that is changed in place. That is found by following the tokens through the graph, without a run; a run whose
logits are those of a run without the cache overrules it. Where the graph does not tell, a step whose logits differ is
run with another token: its entry must change. A buffer that is written one place too far decodes alike with and without
a cache; where its logits change with what stood in it before, it is looked at which places a step has written.

Reproduce: `kvdoctor step-test MODEL -v`: the lengths stand in the table of steps.

Repair: export again; in a loop of your own, append what is returned to what you hold.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import Case, first_and_count
from kvdoctor.checks.caused import Words, caused
from kvdoctor.checks.lengths import dropped, wrong_lengths
from kvdoctor.contract import Slot, describe
from kvdoctor.findings import Fault, check
from kvdoctor.trace import Seen, Step

EXPORT_AGAIN = "export again, so that present = past followed by the new tokens"
WORDS = Words(
    cause="the entry of a new token holds nothing of it",
    promised="the past and behind it the keys or values of the new tokens",
    advice=EXPORT_AGAIN,
    on_graph=True,
)
STATE = "the state with what the new tokens make of it"
ELSEWHERE = replace(
    WORDS,
    cause="tokens are written beside their places in the buffer, so that what stood there before is seen",
    promised="each token at its own place: the first new one behind the last of the past",
)


@check("KV205", "present-does-not-grow", "contract", "runs")
def present_does_not_grow(case: Case) -> Iterator[Fault]:
    """Slots that the new tokens do not reach; slots whose length after a step is neither past + new nor new."""
    if case.declared_faults is None:
        yield from _untouched(case)
        return
    wrong = [item for item in wrong_lengths(case) if not dropped(item)]
    yield from _faults(case, wrong, "the present has another length than past + new")
    if not wrong:
        places = case.run("written-places")
        elsewhere = places is not None and places.cause is not None
        yield from caused(case, "present-does-not-grow", ELSEWHERE if elsewhere else WORDS)


@check("KV206", "present-drops-past", "runs")
def present_drops_past(case: Case) -> Iterator[Fault]:
    """Slots that hold only the new tokens after a step with a past."""
    wrong = [item for item in wrong_lengths(case) if dropped(item)]
    yield from _faults(case, wrong, "the present holds the new tokens alone, the past is dropped")


def _untouched(case: Case) -> Iterator[Fault]:
    """Slots whose present the tokens of the step have no part in."""
    lost = tuple(slot for slot in (case.contract.slots if case.contract else ()) if slot.takes_new is False)
    run = case.judged
    if not lost or case.proved_right:
        return
    names = tuple(slot.present or "" for slot in lost)
    yield Fault(
        severity="error",
        file=case.decode_file,
        subject=names,
        where=f"output {first_and_count(names)}",
        promised=STATE if lost[0].growth == "replace" else WORDS.promised,
        observed=f"the tokens of the step do not reach {names[0]}",
        cause="a decode step returns a cache without its new tokens",
        advice=case.re_export(
            "or export again with another cache class or exporter, where the file lacks what was lost"
        ),
        follows=(f"{lost[0].past} of the next step lacks the token before it",),
        confidence="confirmed" if run is not None and run.outcome in ("differs", "failed") else "suspected",
    )


def _faults(case: Case, wrong: list[tuple[Slot, Step, Seen, int]], cause: str) -> Iterator[Fault]:
    if wrong:
        slot, step, seen, _ = wrong[0]
        names = tuple(item[0].present or "" for item in wrong)
        yield Fault(
            severity="error",
            file=case.decode_file,
            subject=names,
            where=f"output {first_and_count(names)}",
            promised=_promised(slot, step),
            observed=f"step {step.step}: {describe(seen.dtype, seen.shape)}",
            cause=cause,
            advice=case.re_export(f"or {EXPORT_AGAIN}"),
            follows=(f"{slot.past} no longer holds the history at step {step.step + 1}",),
        )


def _promised(slot: Slot, step: Step) -> str:
    if slot.growth in ("static", "ring", "delta"):
        word = "the new tokens alone" if slot.growth == "delta" else "the length it was fed"
        return f"{word} ({slot.growth})"
    return f"length {step.past_length + step.new_tokens} (past {step.past_length} + new {step.new_tokens})"
