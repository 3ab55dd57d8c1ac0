"""Decodes with one model along a walk, the same calls for every model that is compared; digests golden walks; grades.

Variants of a model are graded by another one: logits and caches on the tokens that the other one decodes. Each runs
with its own encoder and carries its own cache, as a loop does; the tokens are the same. One is open at a time, and what
the base returned is held: large models come in many variants.

The speed of a stack is measured as well: the first token, a step at several lengths of the past, and memory. Linux
gives the memory of a process without psutil, which other systems need: kvdoctor depends on it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Past, Scenario, StepFailed
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.golden import WALKS, GoldenWalk, checksum_draws, digest
from kvdoctor.decode.messages import (
    Digested,
    DigestJob,
    Graded,
    GradeJob,
    Job,
    PairedSide,
    SpeedDone,
    SpeedJob,
    TokenAgreement,
)
from kvdoctor.decode.paired_walks import Walk, fit_walk, plan_decoding
from kvdoctor.decode.parity import divergences
from kvdoctor.decode.speed import PASTS, ROUNDS, SpeedPoint
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record
from kvdoctor.runtime.worker.runner import StackRunner, open_stack

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


Result = TypeVar("Result")

ROUND_SECONDS, MOST_CALLS = 0.05, 50
"""A round repeats a call until this time is over, and no more often."""
MOST_SECONDS = 20.0
"""A length is left out where its rounds would take longer, by the time of the length before it."""
SETTLED = 200
"""Steps after which the runtime has all memory that equal steps need; fewer where they would take half of the time."""
NOT_MEASURED = (CannotCheck, ValueError)


def measure_speed(job: SpeedJob, announce: Announce) -> SpeedDone:
    """Measure each length of the past, then many equal steps at the first of them."""
    runner = open_stack(job.side, job, announce)
    limit = job.side.contract.usable_length
    pasts = [past for past in PASTS if limit is None or past < limit]
    longest = [limit - 1] if limit is not None and limit - 1 not in pasts and limit > 1 else []
    left_out, points, failed = list[str](), list[SpeedPoint](), SpeedDone((), 0, 0)
    for at, past in enumerate(asked := [*pasts, *longest]):
        # At a longer past attention is quadratic, everything else less.
        if points and (seconds := ROUNDS * median(points[-1].first) * (past / points[-1].past) ** 2) > MOST_SECONDS:
            left_out.append(f"a past of {past:,} tokens was left out: it would take about {seconds:.0f} s")
            continue
        try:
            points.append(_measure(runner, past, job))
        except NOT_MEASURED as error:
            left_out.append(f"a past of {past:,} tokens could not be measured: {error}")
            break
        except StepFailed as error:
            before, at_limit = points[-1].past if points else 0, None
            if (fits := _find_longest(runner, job, before, past)) is not None:
                points.append(fits[0])
                at_limit = fits[1]
            failed = replace(failed, failing=tuple(asked[at:]), error=str(error), longest=at_limit)
            break
    steps, grown = _run_equal_steps(runner, points[0].past, job) if points else (0, 0)
    return replace(failed, points=tuple(points), steps=steps, grown_bytes=grown, left_out=tuple(left_out))


def _find_longest(runner: StackRunner, job: SpeedJob, fits: int, fails: int) -> tuple[SpeedPoint, int | None] | None:
    """The longest past between one that fits and one that fails, if a threshold of the graph says where that is.

    With it the tokens of the sequence, where one token more fails.
    """
    for length in sorted((length for length in job.thresholds if fits < length - 1 < fails), reverse=True):
        try:
            found = _measure(runner, length - 1, job)
        except (StepFailed, *NOT_MEASURED):
            continue
        return found, length if _fails(runner, length, job) else None
    return None


def _fails(runner: StackRunner, past: int, job: SpeedJob) -> bool:
    """Whether the runtime fails at a step on a past of that length."""
    builder = _build(runner, past, job)
    try:
        _run_step(runner, builder, _fill(runner, builder, past))
    except StepFailed:
        return True
    except NOT_MEASURED:
        return False
    return False


def _measure(runner: StackRunner, past: int, job: SpeedJob) -> SpeedPoint:
    firsts, steps, written = [], [], 0
    for number in range(ROUNDS + 1):
        builder = _build(runner, past, job)
        first, carried = _time(partial(_fill, runner, builder, past))
        step, answer = _time(partial(_run_step, runner, builder, carried))
        presents = {slot.present for slot in runner.contract.slots if slot.present in answer.outputs}
        written = sum(answer.outputs[str(name)].array().nbytes for name in presents)
        if number:  # the first round warms up
            firsts.append(first)
            steps.append(step)
    return SpeedPoint(past, tuple(firsts), tuple(steps), peak_bytes(), written)


def _build(runner: StackRunner, past: int, job: SpeedJob) -> FeedBuilder:
    contract = job.side.contract
    batch, steps = contract.fixed_batch or 1, (contract.new_tokens or 1) + 1
    return runner.build(Scenario(batch, past, steps, choose_states(contract), job.seed))


def _fill(runner: StackRunner, builder: FeedBuilder, past: int) -> Past:
    """The cache after a prompt, in one call or in as many as the contract asks for."""
    walk = fit_walk(Walk(1, past, ()), builder.contract)
    if walk is None or walk.total != past:
        raise CannotCheck(f"no prompt of {past} tokens fits the sizes of the model")
    carried: Past | None = None
    for start, stop in walk.calls():
        call = builder.prefill(stop) if carried is None else builder.decode(start, stop, carried)
        answer = runner.run_session(call)
        answer.logits  # noqa: B018 - the token is known when the logits are
        carried = builder.carry(carried, answer, "held")
    return carried if carried is not None else builder.first_past(0)


def _run_step(runner: StackRunner, builder: FeedBuilder, carried: Past) -> Answer:
    """A step of one token on a cache, up to its logits.

    Raises:
        StepFailed: the runtime failed, or there are no logits: a table of positions that was sliced has no more rows.
    """
    past = builder.scenario.prompt
    answer = runner.run_session(builder.decode(past, past + (builder.contract.new_tokens or 1), carried))
    if not answer.logits.size:
        raise StepFailed(f"the step returns logits of shape {list(answer.logits.shape)}")
    return answer


def _time(call: Callable[[], Result]) -> tuple[float, Result]:
    """The median time of equal calls, and what the last one returned."""
    seconds, begin = list[float](), time.perf_counter()
    while not seconds or (len(seconds) < MOST_CALLS and time.perf_counter() - begin < ROUND_SECONDS):
        before = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - before)
    return median(seconds), result


def _run_equal_steps(runner: StackRunner, past: int, job: SpeedJob) -> tuple[int, int]:
    """Repeat one step: how often after the first ones, and by how many bytes the resident memory grew meanwhile."""
    builder = _build(runner, past, job)
    carried = _fill(runner, builder, past)
    begin, settled, done, counted = time.perf_counter(), 0, 0, 0
    while done - counted < job.steps and (elapsed := time.perf_counter() - begin) < MOST_SECONDS:
        if not settled and (done == SETTLED or elapsed > MOST_SECONDS / 2):
            settled, counted = resident_bytes(), done
        _run_step(runner, builder, carried)
        done += 1
    return (done - counted, max(resident_bytes() - settled, 0)) if settled else (0, 0)


def resident_bytes() -> int:
    """What is resident now."""
    if sys.platform == "linux":
        return _read_status("VmRSS")
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that was resident until now."""
    if sys.platform == "linux":
        return _read_status("VmHWM")
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _read_status(name: str) -> int:
    """A figure that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
