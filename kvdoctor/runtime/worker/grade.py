"""Grades variants of a model by another one: logits and caches on the tokens that the other one decodes.

Each runs with its own encoder and carries its own cache, as a loop does; the tokens are the same. One is open at a
time, and what the base returned is kept: large models come in many variants.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, NothingToRun, Past, Scenario, TooShort
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import Graded, GradeJob, PairedSide
from kvdoctor.decode.paired_walks import Walk, plan_decoding
from kvdoctor.decode.parity import divergences
from kvdoctor.records import record
from kvdoctor.runtime.worker.runner import StackRunner
from kvdoctor.runtime.worker.sessions import Announce, Refused, Sessions, StepFailed

PROMPT, STEPS = 8, 32
"""Tokens of the prompt, which are random, and tokens that the base decodes after it."""
NOT_RUN = (StepFailed, Refused, TooShort, NothingToRun)


@record(slots=False)
class _Decoded:
    """What one model returned.

    `logits` float[calls, vocabulary] are the last of each call, `caches` those after the prompt by layer and name, and
    `tokens` int64[batch, total] what it was fed.
    """

    walk: Walk
    tokens: Array
    logits: Array
    caches: dict[tuple[str, str], Array]


def grade(job: GradeJob, announce: Announce) -> Iterator[Graded]:
    """Decode with the base, feed each variant the same tokens, and compare."""
    known: dict[Walk, _Decoded] = {}
    for side in job.variants:
        walk = plan_decoding(job.base.contract, side.contract, PROMPT, STEPS)
        if walk is None:
            yield Graded(side.stack, failed="no prompt has a size that both take")
            continue
        try:
            theirs = known[walk] if walk in known else known.setdefault(walk, _decode(job, job.base, walk, announce))
            yield _compare(side.stack, _decode(job, side, walk, announce, theirs.tokens), theirs)
        except NOT_RUN as error:
            yield Graded(side.stack, failed=str(error)[:300])


def _decode(job: GradeJob, side: PairedSide, walk: Walk, announce: Announce, tokens: Array | None = None) -> _Decoded:
    """Run all calls. Without `tokens`, the one after each call is the likeliest one."""
    sessions = Sessions(side.folder, job.provider, job.threads, announce, {})
    runner = StackRunner(side.stack, side.contract, sessions, job.seed, announce)
    states = job.base.contract.encoder_length or Scenario().encoder
    scenario = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, states, job.seed)
    embed = runner.embed if runner.can_embed else None
    builder = FeedBuilder(side.contract, scenario, runner.encode(scenario), embed=embed)
    if tokens is not None:
        builder = replace(builder, tokens=tokens)
    past: Past | None = None
    logits, caches = list[Array](), dict[tuple[str, str], Array]()
    for start, stop in walk.calls():
        call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
        answer = runner.run_session(call)
        caches = caches if past is not None else _read_caches(side.contract, answer)
        logits.append(answer.logits.reshape(-1, answer.logits.shape[-1])[-1].astype(np.float64))
        if tokens is None and stop < walk.total and side.contract.codebooks == 1:
            builder.tokens[:, stop] = int(logits[-1].argmax())
        past = builder.carry(past, answer, "held")
    return _Decoded(walk, builder.tokens, np.stack(logits), caches)


def _read_caches(contract: CacheContract, answer: Answer) -> dict[tuple[str, str], Array]:
    """The self-attention caches that the prompt left, by layer and name."""
    slots = ((slot.filled_by, slot.layer) for slot in contract.of_kind("self-attention"))
    known = ((name, layer) for name, layer in slots if name in answer.outputs and layer is not None)
    return {(str(layer), str(name)): answer.outputs[str(name)].array() for name, layer in known}


def _compare(stack: str, mine: _Decoded, theirs: _Decoded) -> Graded:
    got, want = mine.logits, theirs.logits
    if got.shape != want.shape:
        return Graded(stack, failed=f"the logits have {got.shape[-1]} tokens, those of the base {want.shape[-1]}")
    found = divergences(got, want)
    if found is None:
        return Graded(stack, failed="logits are not finite")
    same = got.argmax(-1) == want.argmax(-1)
    return Graded(
        stack,
        tokens=len(same),
        divergence=float(f"{found.mean():.3g}"),
        same_top1=round(float(same.mean()), 4),
        first_other=None if same.all() else int(np.argmin(same)) + 1,
        layers=_compare_caches(mine.caches, theirs.caches),
    )


def _compare_caches(mine: dict[tuple[str, str], Array], theirs: dict[tuple[str, str], Array]) -> dict[str, float]:
    """By layer, the root mean square difference of its caches as a fraction of the standard deviation: the larger."""
    found: dict[str, float] = {}
    for (layer, name), want in theirs.items():
        got = mine.get((layer, name))
        if got is None or got.shape != want.shape or not all(_is_float(one) for one in (got, want)):
            continue
        exact = want.astype(np.float64)
        deviation = float(exact.std())
        error = float(np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2)))
        if deviation > 0 and np.isfinite(error):
            found[layer] = max(found.get(layer, 0.0), float(f"{error / deviation:.2g}"))
    return found


def _is_float(values: Array) -> bool:
    return bool(np.issubdtype(values.dtype, np.floating))
