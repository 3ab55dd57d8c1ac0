"""Grades variants of a model by another one: logits and caches on the tokens that the other one decodes.

Each runs with its own encoder and carries its own cache, as a loop does; the tokens are the same. One is open at a
time, and what the base returned is kept: large models come in many variants.
"""

from collections.abc import Iterator

import numpy as np

from kvdoctor.decode.calls import Array
from kvdoctor.decode.messages import Graded, GradeJob, PairedSide
from kvdoctor.decode.paired_walks import Walk, plan_decoding
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.runtime.worker.decoding import NOT_RUN, Decoded, Way, choose_states, compare_tokens, decode, read_caches

PROMPT, STEPS = 8, 32
"""Tokens of the prompt, which are random, and tokens that the base decodes after it."""


def grade(job: GradeJob, announce: Announce) -> Iterator[Graded]:
    """Decode with the base, feed each variant the same tokens, and compare."""
    known: dict[tuple[Walk, Way], Decoded] = {}
    for side in job.variants:
        walk = plan_decoding(job.base.contract, side.contract, len(job.prompt) or PROMPT, STEPS)
        if walk is None:
            yield Graded(side.stack, failed="no prompt has a size that both take")
            continue
        try:
            way = Way(job.seed, job.provider, job.threads, choose_states(job.base.contract, side.contract), job.prompt)
            if (walk, way) not in known:
                known[walk, way] = decode(job.base, walk, way, announce)
            theirs = known[walk, way]
            mine = decode(side, walk, way, announce, theirs.tokens)
            yield _compare(side, mine, job.base, theirs)
        except NOT_RUN as error:
            yield Graded(side.stack, failed=str(error)[:300])


def _compare(side: PairedSide, mine: Decoded, base: PairedSide, theirs: Decoded) -> Graded:
    stack, got, want = side.stack, mine.logits, theirs.logits
    if got.shape != want.shape:
        return Graded(stack, failed=f"the logits have {got.shape[-1]} tokens, those of the base {want.shape[-1]}")
    found = compare_tokens(got, want)
    if found is None:
        return Graded(stack, failed="logits are not finite")
    return Graded(
        stack,
        tokens=found.tokens,
        divergence=found.divergence,
        same_top1=found.same_top1,
        first_other=found.first_other,
        layers=_compare_caches(read_caches(side.contract, mine.first), read_caches(base.contract, theirs.first)),
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
