"""Grades a variant of a model by another one: logits and caches on the tokens that the other one decodes.

Each variant runs with its own encoder and carries its own cache, as a loop does; the tokens are the same.
"""

from dataclasses import dataclass, replace

import numpy as np

from kvdoctor.decode.calls import Answer, Array, NothingToRun, Past, Scenario, TooShort
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import Graded, GradeJob, PairedSide
from kvdoctor.decode.paired_walks import Walk, plan_decoding
from kvdoctor.decode.parity import divergences
from kvdoctor.runtime.worker.runner import StackRunner
from kvdoctor.runtime.worker.sessions import Announce, Refused, Sessions, StepFailed

PROMPT, STEPS = 8, 32
"""Tokens of the prompt, which are random, and tokens that the base decodes after it."""


@dataclass
class _Decoded:
    """What one variant returned: the last logits of each call, float[vocabulary] each, and the answer to the prompt."""

    logits: list[Array]
    first: Answer


def grade(job: GradeJob, announce: Announce) -> Graded:
    """Decode with the base, feed the variant the same tokens, and compare."""
    try:
        return _grade(job, announce)
    except (StepFailed, Refused, TooShort, NothingToRun) as error:
        return Graded(failed=str(error)[:300])


def _grade(job: GradeJob, announce: Announce) -> Graded:
    walk = plan_decoding(job.base.contract, job.variant.contract, PROMPT, STEPS)
    if walk is None:
        return Graded(failed="no prompt has a size that both take")
    builder, runner = _open(job, job.base, walk, announce)
    theirs = _decode(builder, runner, walk, greedy=True)
    other, runner = _open(job, job.variant, walk, announce, builder.tokens)
    mine = _decode(other, runner, walk, greedy=False)
    got, want = (np.stack(side.logits) for side in (mine, theirs))
    if got.shape != want.shape:
        return Graded(failed=f"the logits have {got.shape[-1]} tokens, those of the base {want.shape[-1]}")
    found = divergences(got, want)
    if found is None:
        return Graded(failed="logits are not finite")
    same = got.argmax(-1) == want.argmax(-1)
    return Graded(
        tokens=len(same),
        divergence=float(f"{found.mean():.3g}"),
        same_top1=round(float(same.mean()), 4),
        first_other=None if same.all() else int(np.argmin(same)) + 1,
        layers=_compare_caches(job, mine.first, theirs.first),
    )


def _open(
    job: GradeJob, side: PairedSide, walk: Walk, announce: Announce, tokens: Array | None = None
) -> tuple[FeedBuilder, StackRunner]:
    runner = StackRunner(
        side.stack, side.contract, Sessions(side.folder, job.provider, job.threads, announce, {}), job.seed, announce
    )
    states = job.base.contract.encoder_length or Scenario().encoder
    scenario = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, states, job.seed)
    embed = runner.embed if runner.can_embed else None
    builder = FeedBuilder(side.contract, scenario, runner.encode(scenario), embed=embed)
    return builder if tokens is None else replace(builder, tokens=tokens), runner


def _decode(builder: FeedBuilder, runner: StackRunner, walk: Walk, greedy: bool) -> _Decoded:
    """Run all calls; where `greedy`, the token after each call is the likeliest one, for both to be fed."""
    past: Past | None = None
    logits, first = list[Array](), None
    for start, stop in walk.calls():
        call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
        answer = runner.run_session(call)
        first = first or answer
        logits.append(answer.logits.reshape(-1, answer.logits.shape[-1])[-1].astype(np.float64))
        if greedy and stop < walk.total and builder.contract.codebooks == 1:
            builder.tokens[:, stop] = int(logits[-1].argmax())
        past = builder.carry(past, answer, "held")
    assert first is not None  # noqa: S101 - a walk has a prompt
    return _Decoded(logits, first)


def _compare_caches(job: GradeJob, mine: Answer, theirs: Answer) -> dict[str, float]:
    """The difference of each layer's self-attention cache after the prompt."""
    found: dict[str, float] = {}
    for slot in job.base.contract.of_kind("self-attention"):
        name = slot.filled_by
        if name is None or slot.layer is None or not (name in mine.outputs and name in theirs.outputs):
            continue
        got, want = (side.outputs[name].array() for side in (mine, theirs))
        if got.shape != want.shape or not all(np.issubdtype(one.dtype, np.floating) for one in (got, want)):
            continue
        exact = want.astype(np.float64)
        deviation = float(exact.std())
        error = float(np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2)))
        if deviation > 0 and np.isfinite(error):
            layer = str(slot.layer)
            found[layer] = max(found.get(layer, 0.0), float(f"{error / deviation:.2g}"))
    return found
