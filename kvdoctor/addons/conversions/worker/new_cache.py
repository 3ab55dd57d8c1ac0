"""Compares a decoder that was given a cache with its original, call by call, and times both.

Before each call of the copy the original computes all tokens so far; the rows of the new ones must be equal. Then both
decode greedily, the copy fed what the original chose.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdoctor.addons.conversions.messages import NewCacheDone, NewCacheJob
from kvdoctor.decode.calls import Answer, Array, Past, Scenario, StepFailed
from kvdoctor.decode.experiments.padding import takes_left_padding
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.paired_walks import LONG, Walk, fit_walk
from kvdoctor.decode.parity import compare, describe_gap, judge
from kvdoctor.decode.runs import quote_error
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.runner import StackRunner, open_stack
from kvdoctor.runtime.worker.sessions import Sessions, to_runtime

if TYPE_CHECKING:
    from kvdoctor.decode.tolerances import Tolerance

PROMPTS = range(1, 18)
"""Tokens of the prompts that are compared, each followed by two single steps."""
SPLITS = ((1,) * 24, (2,) * 12, (3,) * 8, (1, 23), (23, 1), (24,), (5, 7, 12), (8, 1, 8, 1, 6), (17, 4, 3), (12, 12))
"""Calls of sequences of 24 tokens, by their new tokens."""
BATCHES = (2, 3)
PADDING = (2, 0, 1)
"""Tokens of padding before each row of a batch, where the original has a mask for it."""
DECODED = (10, 50, 200)
"""Tokens after which the time of decoding is taken."""
PROMPT = 3
NEIGHBORS = 2
"""Steps before and after one that are as long."""
MOST_SECONDS, ONE_ROUND = 20.0, 5.0
"""Decoding ends when the original has taken so long; from the second number on it is timed once."""
MOST_STORED = 256 << 20
"""Bytes of the original's logits that are stored: sequences of other splits have the same tokens."""


class _Differs(Exception):
    """A call of the copy fails or returns something else; says what."""


def compare_new_cache(job: NewCacheJob, announce: Announce) -> NewCacheDone:
    """Carry out the comparison, up to the first call that differs."""
    original = Sessions(job.original, job, announce).get(job.side.contract.graph("decode").file)
    pair = _Pair(job, open_stack(job.side, job, announce), original)
    try:
        for walk, padding in _plan(pair.copy):
            pair.walk(walk, padding)
        decoded, seconds = pair.decode()
    except _Differs as difference:
        return replace(pair.done, failed=str(difference))
    return replace(pair.done, decoded=decoded, seconds=seconds)


def _plan(copy: StackRunner) -> Iterator[tuple[Walk, tuple[int, ...]]]:
    planned = [Walk(1, prompt, (1, 1)) for prompt in PROMPTS]
    planned += [Walk(1, first, rest) for first, *rest in SPLITS]  # type: ignore[arg-type]
    planned += [Walk(1, 1, (1,) * (LONG - 1))]
    planned += [Walk(batch, prompt, (1, 2, 1)) for batch in BATCHES for prompt in (1, 3)]
    fits = dict.fromkeys(found for walk in planned if (found := fit_walk(walk, copy.contract)) is not None)
    yield from ((walk, ()) for walk in fits)
    padded = fit_walk(Walk(len(PADDING), 5, (1, 2, 1)), copy.contract)
    if takes_left_padding(copy.contract) is None and padded is not None and padded.batch == len(PADDING):
        yield padded, PADDING


def _smooth(seconds: list[float]) -> list[float]:
    return [median(seconds[max(at - NEIGHBORS, 0) : at + NEIGHBORS + 1]) for at in range(len(seconds))]


@dataclass
class _Pair:
    job: NewCacheJob
    copy: StackRunner
    original: Any
    done: NewCacheDone = field(default_factory=NewCacheDone)
    known: dict[tuple[int, tuple[int, ...], int], Array] = field(default_factory=dict)

    @property
    def tolerance(self) -> "Tolerance":
        """How far their logits may lie apart."""
        return find_tolerance(self.copy.contract.exactness, self.job.tolerances)

    def walk(self, walk: Walk, padding: tuple[int, ...]) -> None:
        """Compare the calls of a sequence.

        Raises:
            _Differs: a call fails or returns something else.
        """
        longest = self._build(replace(walk, pieces=(LONG - walk.prompt,)))
        builder = replace(self._build(walk), padding=padding, tokens=longest.tokens[:, : walk.total])
        past: Past | None = None
        where = f" with {list(padding)} tokens of padding" if padding else ""
        for start, stop in walk.calls():
            try:
                want = self._find_wanted(builder, stop)
            except StepFailed:  # its tables end here, or it takes no such batch
                return
            answer, _ = self._run_copy(builder, past, start, stop)
            rows = min(answer.logits.shape[1], want.shape[1])
            if reason := self._find_gap(answer.logits[:, -rows:], want[:, -rows:], (stop, padding)):
                raise _Differs(f"{walk.describe(start, stop)}{where}: {reason}")
            past = builder.carry(past, answer, "held")
            self._count(walk, stop, padding)

    def _count(self, walk: Walk, stop: int, padding: tuple[int, ...]) -> None:
        now = self.done
        self.done = replace(
            now,
            calls=now.calls + 1,
            prompts=tuple(sorted({*now.prompts, walk.prompt})),
            splits=now.splits + (stop == walk.total),
            batches=tuple(sorted({*now.batches, walk.batch})),
            longest=max(now.longest, stop),
            padded=now.padded + bool(padding),
        )

    def _find_gap(self, got: Array, want: Array, place: tuple[int, tuple[int, ...]]) -> str:
        """How the logits of new tokens differ from the original's; empty if they do not. Padding does not count."""
        stop, padding = place
        if got.shape != want.shape:
            return f"logits of shape {list(got.shape)}, not {list(want.shape)}"
        if padding:
            kept = [np.arange(stop - got.shape[1], stop) >= pads for pads in padding]
            got, want = got[np.array(kept)][None], want[np.array(kept)][None]
        if not want.size:
            return ""
        found = compare(got, want, self.tolerance)
        if judge(found, self.tolerance) != "pass" and not (self.job.rounds and found.finite):
            return f"logits {describe_gap(found)}"
        self.done = replace(self.done, worst=max(self.done.worst, float(f"{found.relative:.3g}")))
        return ""

    def _build(self, walk: Walk) -> FeedBuilder:
        encoder = self.copy.contract.encoder_length or Scenario().encoder
        sizes = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, encoder, self.job.seed)
        return self.copy.build(sizes)

    def _find_wanted(self, builder: FeedBuilder, stop: int) -> Array:
        """The original's logits of all tokens so far, which it computes once for all splits."""
        key = (len(builder.tokens), builder.padding, stop)
        if key in self.known:
            return self.known[key]
        found, _ = self._time_original(builder, stop)
        if sum(one.nbytes for one in self.known.values()) + found.nbytes <= MOST_STORED:
            self.known[key] = found
        return found

    def _time_original(self, builder: FeedBuilder, stop: int) -> tuple[Array, float]:
        feeds = builder.prefill(stop).feeds
        taken = {one.name: to_runtime(feeds[one.name]) for one in self.original.get_inputs() if one.name in feeds}
        port = self.copy.logits_name("prefill")
        began = time.perf_counter()
        try:
            found = self.original.run_with_ort_values([port], taken)
        except Exception as error:  # the bindings raise many types
            raise StepFailed(f"the original: {error}") from None
        return found[0].numpy(), time.perf_counter() - began

    def decode(self) -> tuple[int, dict[str, tuple[float, float]]]:
        """Decode greedily with both: the tokens, and the seconds of both after some numbers of them.

        One after the other, since threads of a session that has just run go on waiting. Of each step the faster of two
        rounds counts, and of neighboring steps the median: a machine that does other things stops some of them.

        Raises:
            _Differs: the copy chooses another token, which is no tie.
        """
        walk = fit_walk(Walk(1, PROMPT, (1,) * (DECODED[-1] - 1)), self.copy.contract)
        if walk is None or self.copy.contract.fixed_batch not in (None, 1):
            return 0, {}
        builder = self._build(walk)
        wanted = self._decode_original(builder, walk)
        old = [seconds for _, seconds in wanted]
        if sum(old) < ONE_ROUND:
            again = (seconds for _, seconds in self._decode_original(builder, walk))
            old = [min(pair) for pair in zip(old, again, strict=False)]
        old = _smooth(old)
        rounds = [list(self._decode_copy(builder, walk, wanted)) for _ in range(2 if sum(old) < ONE_ROUND else 1)]
        new = _smooth([min(pair) for pair in zip(*rounds, strict=True)])
        counts = [*(count for count in DECODED if count < len(new)), len(new)]
        return len(new), {str(count): (sum(old[:count]), sum(new[:count])) for count in counts if count}

    def _decode_original(self, builder: FeedBuilder, walk: Walk) -> list[tuple[Array, float]]:
        """The original's logits of each last token, and the seconds of the call; its choices become the tokens."""
        found = list[tuple[Array, float]]()
        for _, stop in walk.calls():
            try:
                logits, seconds = self._time_original(builder, stop)
            except StepFailed:  # its tables end here
                break
            found.append((logits[:, -1:], seconds))
            if stop < builder.tokens.shape[1]:
                builder.tokens[:, stop] = logits[:, -1].argmax(-1)
            if sum(seconds for _, seconds in found) > MOST_SECONDS:
                break
        return found

    def _decode_copy(self, builder: FeedBuilder, walk: Walk, wanted: list[tuple[Array, float]]) -> Iterator[float]:
        past: Past | None = None
        for (start, stop), (want, _) in zip(walk.calls(), wanted, strict=False):
            answer, seconds = self._run_copy(builder, past, start, stop)
            found = compare(answer.logits[:, -1:], want, self.tolerance)
            other = found.same_top1 + found.near_ties < 1 or judge(found, self.tolerance) == "fail"
            if other and not self.job.rounds:
                raise _Differs(f"token {stop + 1} of greedy decoding is another one: logits {describe_gap(found)}")
            past = builder.carry(past, answer, "held")
            yield seconds

    def _run_copy(self, builder: FeedBuilder, past: Past | None, start: int, stop: int) -> tuple[Answer, float]:
        try:
            call = builder.prefill(stop) if past is None else builder.decode(start, stop, past)
            began = time.perf_counter()
            return self.copy.run_session(call), time.perf_counter() - began
        except (StepFailed, CannotCheck) as error:
            new, where = stop - start, f" on a past of {start}" if start else ""
            raise _Differs(f'a call with {new} new tokens{where} fails: "{quote_error(str(error))}"') from None
