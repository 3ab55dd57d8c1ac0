"""Decodes with one model along a walk, the same calls for every model that is compared; digests golden walks; grades.

Variants of a model are graded by another one: logits and caches on the tokens that the other one decodes. Each runs
with its own encoder and carries its own cache, as a loop does; the tokens are the same. One is open at a time, and what
the base returned is held: large models come in many variants.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Past, Scenario, StepFailed
from kvdoctor.decode.golden import WALKS, GoldenWalk, checksum_draws, digest
from kvdoctor.decode.messages import Digested, DigestJob, Graded, GradeJob, Job, PairedSide, TokenAgreement
from kvdoctor.decode.paired_walks import Walk, fit_walk, plan_decoding
from kvdoctor.decode.parity import divergences
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record
from kvdoctor.runtime.worker.runner import open_stack

NOT_RUN = (StepFailed, CannotCheck)
"""How a decoding ends that a model does not take (`decode`)."""


@record
class Way:
    """What every model is run with: seed, provider and threads of the job, and the encoder states of its feeds.

    `store` is what becomes of the cache between one call and the next, where it is not fed as it was returned.
    """

    job: Job
    states: int
    store: Callable[[Past], Past] | None = None


@record(slots=False)
class Decoded:
    """What one model returned along a walk.

    `tokens` int64[batch, total] are what it was fed, `logits` float64[calls, vocabulary] the last of each call (of the
    last sequence of a batch), `first` and `last` what the first and the last call returned, `carried` what the next one
    would be fed.
    """

    walk: Walk
    tokens: Array
    logits: Array
    first: Answer
    last: Answer
    carried: Past


def compare_tokens(got: Array, want: Array) -> TokenAgreement | None:
    """Compare logits, float[calls, vocabulary]; None where some are not finite."""
    found = divergences(got, want)
    if found is None:
        return None
    same = got.argmax(-1) == want.argmax(-1)
    return TokenAgreement(
        tokens=len(same),
        divergence=float(f"{found.mean():.3g}"),
        same_top1=round(float(same.mean()), 4),
        first_other=None if same.all() else int(np.argmin(same)) + 1,
    )


def choose_states(*contracts: CacheContract) -> int:
    """The encoder states that all of these models take."""
    fixed = (contract.encoder_length for contract in contracts)
    return next((count for count in fixed if count is not None), Scenario().encoder)


def decode(side: PairedSide, walk: Walk, way: Way, announce: Announce, tokens: Array | None = None) -> Decoded:
    """Run all calls with the model's own encoder and cache. Without `tokens`, the one after each call is the likeliest.

    Raises:
        StepFailed: the runtime fails in a call.
        CannotCheck: the runtime does not open a file, or the contract has no such call.
    """
    runner = open_stack(side, way.job, announce)
    scenario = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, way.states, way.job.seed)
    builder = runner.build(scenario, **({} if tokens is None else {"tokens": tokens}))
    past: Past | None = None
    logits, answers = list[Array](), list[Answer]()
    for start, stop in walk.calls():
        call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
        answer = runner.run_session(call)
        answers = [*answers[:1], answer]
        logits.append(answer.logits.reshape(-1, answer.logits.shape[-1])[-1].astype(np.float64))
        if tokens is None and stop < walk.total and side.contract.codebooks == 1:
            # The head may be padded to more rows than there are tokens.
            builder.tokens[:, stop] = int(logits[-1][: side.contract.vocabulary].argmax())
        past = builder.carry(past, answer, "held")
        past = past if way.store is None else way.store(past)
    return Decoded(walk, builder.tokens, np.stack(logits), answers[0], answers[-1], past or Past())


def read_caches(contract: CacheContract, answer: Answer) -> dict[tuple[str, str], Array]:
    """The self-attention caches that a prompt left, by layer and name."""
    slots = ((slot.filled_by, slot.layer) for slot in contract.of_kind("self-attention"))
    known = ((name, layer) for name, layer in slots if name in answer.outputs and layer is not None)
    return {(str(layer), str(name)): answer.outputs[str(name)].array() for name, layer in known}


def make_digests(job: DigestJob, announce: Announce) -> Digested:
    """Run the walks, and digest those that the model takes. The first must be one of them."""
    states = choose_states(job.side.contract) if job.states is None else job.states
    way = Way(job, states)
    found, failed = dict[int, GoldenWalk](), list[str]()
    for number, (walk, tokens) in enumerate(_list_walks(job)):
        try:
            done = decode(job.side, walk, way, announce, tokens)
        except (*NOT_RUN, ValueError) as error:  # ValueError: its sizes make no feed
            failed.append(f"{walk.describe(0, walk.prompt)}: {error}"[:300])
            continue
        found[number] = digest(walk, done.tokens, done.logits, done.last, job.side.contract)
    reason = "" if 0 in found else (failed or ["no golden decoding fits the sizes of the model"])[0]
    return Digested(tuple(found), tuple(found.values()), states, checksum_draws(job.seed), reason)


def _list_walks(job: DigestJob) -> Iterator[tuple[Walk, Array | None]]:
    """The walks to run, in the sizes of the model, each with the tokens to feed if they are known."""
    contract = job.side.contract
    if not job.golden:
        fitted = dict.fromkeys(filter(None, (fit_walk(walk, contract) for walk in WALKS)))
        yield from ((walk, None) for walk in fitted)
        return
    for one in job.golden:
        walk, tokens = fit_walk(one.walk, contract), np.array(one.tokens)
        fits = walk is not None and walk.batch == one.walk.batch
        yield (walk, tokens[:, : walk.total]) if walk is not None and fits else (one.walk, tokens)


PROMPT, STEPS = 8, 32
"""Tokens of the prompt, which are random, and tokens that the base decodes after it."""


def grade(job: GradeJob, announce: Announce) -> Iterator[Graded]:
    """Decode with the base, feed each variant the same tokens, and compare."""
    known: dict[tuple[Walk, int], Decoded] = {}
    for side in job.variants:
        walk = plan_decoding(job.base.contract, side.contract, PROMPT, STEPS)
        if walk is None:
            yield Graded(side.stack, failed="no prompt has a size that both take")
            continue
        try:
            way = Way(job, choose_states(job.base.contract, side.contract))
            if (walk, way.states) not in known:
                known[walk, way.states] = decode(job.base, walk, way, announce)
            theirs = known[walk, way.states]
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
        **asdict(found),
        layers=_compare_caches(read_caches(side.contract, mine.first), read_caches(base.contract, theirs.first)),
    )


def _compare_caches(mine: dict[tuple[str, str], Array], theirs: dict[tuple[str, str], Array]) -> dict[str, float]:
    """By layer, the root mean square difference of its caches as a fraction of the standard deviation: the larger."""
    found: dict[str, float] = {}
    for (layer, name), want in theirs.items():
        got = mine.get((layer, name))
        if got is None or got.shape != want.shape or not {got.dtype.kind, want.dtype.kind} <= {"f"}:
            continue
        exact = want.astype(np.float64)
        deviation = float(exact.std())
        error = float(np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2)))
        if deviation > 0 and np.isfinite(error):
            found[layer] = max(found.get(layer, 0.0), float(f"{error / deviation:.2g}"))
    return found
