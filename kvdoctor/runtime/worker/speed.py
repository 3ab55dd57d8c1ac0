"""Measures how fast a stack decodes: the first token, a step at several lengths of the past, and memory.

Linux gives the memory of a process without psutil, which other systems need: kvdoctor depends on it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from kvdoctor.decode.calls import Answer, Past, Scenario, StepFailed
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.messages import SpeedDone, SpeedJob
from kvdoctor.decode.paired_walks import Walk, fit_walk
from kvdoctor.decode.speed import PASTS, ROUNDS, SpeedPoint
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.decoding import choose_states
from kvdoctor.runtime.worker.runner import StackRunner, open_stack

Result = TypeVar("Result")

ROUND_SECONDS, MOST_CALLS = 0.05, 50
"""A round repeats a call until this time is over, and no more often."""
MOST_SECONDS = 20.0
"""A length is left out where its rounds would take longer, by the time of the length before it."""
SETTLED = 200
"""Steps after which the runtime has all memory that equal steps need; fewer where they would take half of the time."""
NOT_RUN = (CannotCheck, ValueError)


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
        except NOT_RUN as error:
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
        except (StepFailed, *NOT_RUN):
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
    except NOT_RUN:
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
