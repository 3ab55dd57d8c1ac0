"""Runs a converted model and its original, call by call, and compares logits and caches.

Both are fed the same tokens and encoder states. Each is driven by its own contract and carries its own cache, so that
the contract of the converted model is proved together with its numbers. An original without a cache computes all tokens
so far in each call; then both decode greedily as well, the copy fed what the original chose, and are timed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from kvdoctor.addons.conversions.messages import PairedDone, PairedJob
from kvdoctor.contract import Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, Scenario, StepFailed
from kvdoctor.decode.experiments.padding import takes_left_padding
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.paired_walks import LONG, Walk, fit_walk, plan_decoding, plan_walks
from kvdoctor.decode.parity import compare, describe_gap, judge, slot_difference
from kvdoctor.decode.runs import quote_error
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.decode.stored_cache import StoredSlot, measure_drift, read_stored
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.runner import StackRunner, open_stack

if TYPE_CHECKING:
    from kvdoctor.decode.tolerances import Tolerance


PROMPTS = range(10, 17)
"""Tokens of further prompts where the original has no cache."""
SPLITS = ((2,) * 12, (3,) * 8, (1, 23), (23, 1), (24,), (5, 7, 12), (8, 1, 8, 1, 6), (17, 4, 3), (12, 12))
"""Calls of sequences of 24 tokens, by their new tokens, where the original has no cache."""
PADDING = (2, 0, 1)
"""Tokens of padding before each row of a batch, where an original without a cache has a mask for it."""
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
    """A call of the converted model fails or returns something else; the message says what."""


def run_paired(job: PairedJob, announce: Announce) -> PairedDone:
    """Carry out a comparison, up to the first call that differs."""
    original, converted = (open_stack(side, job, announce) for side in (job.original, job.converted))
    pair, failed, decoded, seconds = _Pair(job, original, converted), "", 0, dict[str, tuple[float, float]]()
    for planned, padding in _plan(pair):
        single = 0 < job.how.single_from <= planned.batch
        failed = pair.walk(replace(planned, pieces=(1,) * sum(planned.pieces)) if single else planned, padding)
        if failed:
            break
    if not failed and not original.contract.slots:
        try:
            decoded, seconds = pair.decode()
        except _Differs as difference:
            failed = str(difference)
    later = [(start, stop) for _, start, stop in pair.calls if start]
    return PairedDone(
        calls=len(pair.calls),
        worst=float(f"{pair.worst:.3g}"),
        exact=pair.exact,
        failed=failed,
        not_run=tuple(dict.fromkeys(pair.not_run)),
        prompts=tuple(sorted({stop for _, start, stop in pair.calls if not start})),
        batches=tuple(sorted({batch for batch, _, _ in pair.calls})),
        chunks=tuple(sorted({stop - start for start, stop in later})),
        longest=max((start for start, _ in later), default=0),
        tokens=max((stop for _, _, stop in pair.calls), default=0),
        overflow=pair.overflow(job.how.capacity) if job.how.capacity is not None and not failed else "",
        padded=pair.padded,
        decoded=decoded,
        seconds=seconds,
    )


def _plan(pair: "_Pair") -> Iterator[tuple[Walk, tuple[int, ...]]]:
    """The walks, and the tokens of padding before each row."""
    how, contracts = pair.job.how, (pair.original.contract, pair.converted.contract)
    for walk in plan_walks(*contracts, how.capacity, how.window):
        yield walk, ()
    if contracts[0].slots:
        return
    planned = [*(Walk(1, prompt, (1, 1)) for prompt in PROMPTS), *(Walk(1, split[0], split[1:]) for split in SPLITS)]
    for found in dict.fromkeys(fit_walk(walk, contracts[1]) for walk in planned):
        if found is not None:
            yield found, ()
    padded = fit_walk(Walk(len(PADDING), 5, (1, 2, 1)), contracts[1])
    if takes_left_padding(contracts[1]) is None and padded is not None and padded.batch == len(PADDING):
        yield padded, PADDING


def _smooth(seconds: list[float]) -> list[float]:
    return [median(seconds[max(at - NEIGHBORS, 0) : at + NEIGHBORS + 1]) for at in range(len(seconds))]


def _cut_rows(slot: Slot, call: Call, pair: tuple[Array, Array], *, is_buffer: bool) -> tuple[Array, Array]:
    """The rows of a cache, now and in the original, that both have and that hold tokens."""
    mine, theirs = pair
    at = slot.length_axis
    if at is None or mine.ndim != theirs.ndim:
        return pair
    if mine.shape[at] > theirs.shape[at]:
        # A buffer has its tokens in front, a past that is padded at its end.
        first = 0 if is_buffer else mine.shape[at] - theirs.shape[at]
        return np.take(mine, range(first, first + theirs.shape[at]), axis=at), theirs
    if slot.growth == "static":
        return mine, np.take(theirs, range(mine.shape[at]), axis=at)
    if slot.growth == "ring" and mine.shape == theirs.shape:
        # Rows of a ring without tokens are not written, and hold what was in the memory.
        rows = range(min(call.past + call.new, theirs.shape[at]))
        return np.take(mine, rows, axis=at), np.take(theirs, rows, axis=at)
    return pair


@dataclass
class _Pair:
    """Both models, and what was compared: `calls` agree, each as (batch, first token, end), others are `not_run`.

    `padded` calls have padding. `known` are answers of an original without a cache, by batch, padding and last token.
    """

    job: PairedJob
    original: StackRunner
    converted: StackRunner
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    worst: float = 0.0
    exact: bool = True
    not_run: list[str] = field(default_factory=list)
    padded: int = 0
    known: dict[tuple[int, tuple[int, ...], int], Answer] = field(default_factory=dict)

    @property
    def tolerance(self) -> "Tolerance":
        """How far their logits may lie apart."""
        return find_tolerance(self.original.contract.exactness, self.job.tolerances)

    def walk(self, walk: Walk, padding: tuple[int, ...] = ()) -> str:
        """Compare the calls of a walk that the original runs; gives the first that differs, and how."""
        left, right = (replace(side, padding=padding) for side in self._build(walk))
        pasts: list[Past | None] = [None, None]
        for start, stop in walk.calls():
            try:
                calls = [_make_call(side, past, start, stop) for side, past in zip((left, right), pasts, strict=True)]
                want = self._run_original(calls[0], (walk.batch, padding, stop))
            except (StepFailed, CannotCheck) as error:
                reason = quote_error(str(error)) if isinstance(error, StepFailed) else str(error)
                self.not_run.append(f"{walk.describe(start, stop)} ({reason})")
                return ""
            try:
                got = self._compare(calls[1], want, padding)
            except (StepFailed, CannotCheck) as error:
                return f'{walk.describe(start, stop)}: the converted model fails: "{quote_error(str(error))}"'
            except _Differs as difference:
                return f"{walk.describe(start, stop)}: {difference}"
            pasts = [
                side.carry(past, answer, "held")
                for side, past, answer in zip((left, right), pasts, (want, got), strict=True)
            ]
            self.calls.append((walk.batch, start, stop))
            self.padded += bool(padding)
        return ""

    def _run_original(self, call: Call, key: tuple[int, tuple[int, ...], int]) -> Answer:
        if self.original.contract.slots:
            return self.original.run_session(call)
        if key not in self.known:
            found = self.original.run_session(call)
            if sum(one.logits.nbytes for one in (*self.known.values(), found)) > MOST_STORED:
                return found
            self.known[key] = found
        return self.known[key]

    def decode(self) -> tuple[int, dict[str, tuple[float, float]]]:
        """Decode greedily with both: the tokens, and the seconds of both after some numbers of them.

        One after the other, since threads of a session that has just run go on waiting. Of each step the faster of two
        rounds counts, and of neighboring steps the median: a machine that does other things stops some of them.

        Raises:
            _Differs: the copy chooses another token, which is no tie.
        """
        walk = plan_decoding(self.original.contract, self.converted.contract, PROMPT, DECODED[-1] - 1)
        if walk is None or walk.batch != 1:
            return 0, {}
        left, right = self._build(walk)
        wanted = self._decode_original(left, walk)
        old = [seconds for _, seconds in wanted]
        if sum(old) < ONE_ROUND:
            again = (seconds for _, seconds in self._decode_original(left, walk))
            old = [min(pair) for pair in zip(old, again, strict=False)]
        old = _smooth(old)
        rounds = [list(self._decode_copy(right, walk, wanted)) for _ in range(2 if sum(old) < ONE_ROUND else 1)]
        new = _smooth([min(pair) for pair in zip(*rounds, strict=True)])
        counts = [*(count for count in DECODED if count < len(new)), len(new)]
        return len(new), {str(count): (sum(old[:count]), sum(new[:count])) for count in counts if count}

    def _decode_original(self, builder: FeedBuilder, walk: Walk) -> list[tuple[Array, float]]:
        """The original's logits of each last token, and the seconds of the call; its choices become the tokens."""
        found = list[tuple[Array, float]]()
        for _, stop in walk.calls():
            call, began = builder.prefill(stop), time.perf_counter()
            try:
                answer = self.original.run_session(call)
            except StepFailed:  # its tables end here
                break
            seconds, logits = time.perf_counter() - began, answer.logits[:, -1:]
            found.append((logits, seconds))
            if stop < builder.tokens.shape[1]:
                builder.tokens[:, stop] = logits[:, -1].argmax(-1)
            if sum(seconds for _, seconds in found) > MOST_SECONDS:
                break
        return found

    def _decode_copy(self, builder: FeedBuilder, walk: Walk, wanted: list[tuple[Array, float]]) -> Iterator[float]:
        past: Past | None = None
        for (start, stop), (want, _) in zip(walk.calls(), wanted, strict=False):
            call, began = _make_call(builder, past, start, stop), time.perf_counter()
            try:
                answer = self.converted.run_session(call)
            except (StepFailed, CannotCheck) as error:
                raise _Differs(f'{walk.describe(start, stop)} fails: "{quote_error(str(error))}"') from None
            yield time.perf_counter() - began
            found = compare(answer.logits[:, -1:], want, self.tolerance)
            within = found.finite and found.relative <= self.job.how.allowed
            if not within and (found.same_top1 + found.near_ties < 1 or judge(found, self.tolerance) == "fail"):
                raise _Differs(f"token {stop + 1} of greedy decoding is another one: logits {describe_gap(found)}")
            past = builder.carry(past, answer, "held")

    def overflow(self, capacity: int) -> str:
        """What a call on full buffers does that keeps their end: it fails, or returns more rows; empty if neither.

        Their content does not matter: they hold zeros.
        """
        contract = self.converted.contract
        new = contract.new_tokens or 1
        _, builder = self._build(Walk(contract.fixed_batch or 1, capacity, (new,)))
        past = builder.first_past(0)
        past.length = capacity
        try:
            answer = self.converted.run_session(builder.decode(capacity, capacity + new, past))
        except (StepFailed, CannotCheck) as error:
            return f"a call with token {capacity + 1} fails: {quote_error(str(error))}"
        for slot in contract.slots:
            value = answer.outputs.get(slot.present or "") if "capacity" in slot.axes else None
            if value is not None and (rows := value.shape[slot.axes.index("capacity")]) > capacity:
                return f"a call with token {capacity + 1} returns {slot.present} with {rows} rows, a new tensor"
        return ""

    def _build(self, walk: Walk) -> tuple[FeedBuilder, FeedBuilder]:
        contracts = self.original.contract, self.converted.contract
        fixed = [one.encoder_length for one in contracts]
        fixed += [slot.size("encoder") for one in contracts for slot in one.slots]
        encoder = next(filter(None, fixed), Scenario().encoder)
        # The same tokens in all walks of an original without a cache, whose answers are stored.
        total = walk.total if self.original.contract.slots else max(walk.total, LONG)
        scenario = Scenario(walk.batch, walk.prompt, total - walk.prompt + 1, encoder, self.job.seed)
        left, right = self.original.build(scenario), self.converted.build(scenario)
        return left, replace(left, contract=self.converted.contract, encoded=right.encoded)

    def _compare(self, call: Call, want: Answer, padding: tuple[int, ...]) -> Answer:
        """Run a call of the converted model and compare it.

        Raises:
            _Differs: it returns something else.
        """
        port = self.converted.contract.graph(call.phase).port("logits_to_keep")
        first: Answer | None = None
        for keep in self.job.how.keep or (0,):
            if port is not None and self.job.how.keep:
                fed = np.full_like(np.asarray(call.feeds[port.name]), keep)
                call = replace(call, feeds={**call.feeds, port.name: fed})
            answer, how = self.converted.run_session(call), f" with {keep} rows requested" * bool(port)
            rows = 1 if self.job.how.rows == "last" else min(keep, call.new) or call.new
            rows = min(rows, want.logits.shape[1])  # the original may give the last row alone
            wanted = want.logits[:, -rows:]
            if answer.logits.shape[1] != rows or wanted.shape[1] < rows:
                raise _Differs(f"{answer.logits.shape[1]} rows of logits{how}, not {rows}")
            counted = np.arange(call.past, call.past + call.new)[-rows:] >= np.array(padding or (0,))[:, None]
            self._compare_logits(answer.logits, wanted, np.broadcast_to(counted, wanted.shape[:2]), how)
            first = first or answer
        assert first is not None  # noqa: S101 - the loop runs once at least
        self._compare_caches(call, first, want)
        return first

    def _compare_logits(self, got: Array, wanted: Array, counted: Array, how: str) -> None:
        """Compare logits, of which rows of padding are not `counted`."""
        if got.shape != wanted.shape:
            raise _Differs(f"logits of shape {list(got.shape)}{how}, not {list(wanted.shape)}")
        got, wanted = got[counted][None], wanted[counted][None]
        if np.array_equal(got, wanted, equal_nan=True):
            return
        self.exact = False
        found = compare(got, wanted, self.tolerance)
        within = found.finite and found.relative <= self.job.how.allowed
        if not within and judge(found, self.tolerance) != "pass":
            raise _Differs(f"logits {describe_gap(found)}{how}")
        self.worst = max(self.worst, found.relative)

    def _compare_caches(self, call: Call, got: Answer, want: Answer) -> None:
        """Compare what both return of each slot; the rows of a longer cache without tokens are left out."""
        for slot in self.original.contract.slots:
            name, twin = slot.filled_by if call.phase == "prefill" else slot.present, self._find_twin(slot)
            if name is None or name not in want.outputs or (twin.filled_in == "encode" and slot.filled_in != "encode"):
                continue  # the logits of each call rest on what the encoder of the copy made
            rounded = slot.past in self.job.how.drift
            if slot.carry == "hold" and call.phase == "decode" and rounded:
                continue  # the loop keeps the value of the prefill
            made = str(twin.filled_by if call.phase == "prefill" else twin.present)
            if made not in got.outputs:
                raise _Differs(f"{made} is not returned")
            mine, theirs = self._read(twin.past, made, got), want.outputs[name].array()
            mine, theirs = _cut_rows(slot, call, (mine, theirs), is_buffer=twin.growth == "static")
            if rounded:
                self._compare_stored(slot, made, (mine, theirs), got)
                continue
            if np.array_equal(mine, theirs, equal_nan=True):
                continue
            off = slot_difference(mine, theirs)
            if off is None or off > self.tolerance.passes:
                raise _Differs(f"{made} differs" + (f" by {off:.1e} standard deviations" if off is not None else ""))

    def _find_twin(self, slot: Slot) -> Slot:
        """The slot of the converted model that is this one: by its name, else by its layer and part."""
        slots = self.converted.contract.slots
        named = next((one for one in slots if one.past == slot.past), None)
        key = slot.kind, slot.layer, slot.part
        return named or next((one for one in slots if (one.kind, one.layer, one.part) == key), slot)

    def _read(self, past: str, name: str, answer: Answer) -> Array:
        one = next((one for one in self.job.how.stored if one.past == past), None)
        values = answer.outputs[name].array()
        return values if one is None else read_stored(values, _find_scales(one, name, answer), one.kind, one.axis)

    def _compare_stored(self, slot: Slot, name: str, pair: tuple[Array, Array], answer: Answer) -> None:
        """Compare rounded rows: they may be off by their own rounding, and by what that of the layers below explains.

        Raises:
            _Differs: they are off further.
        """
        one = next((one for one in self.job.how.stored if one.past == slot.past), None)
        deviation, most = self.job.how.drift[slot.past]
        if pair[0].shape != pair[1].shape:
            raise _Differs(f"{name}, as it is read, has shape {list(pair[0].shape)}, not {list(pair[1].shape)}")
        scales = None if one is None else _find_scales(one, name, answer)
        if scales is not None and slot.length_axis is not None:
            rows = range(pair[0].shape[slot.length_axis])
            scales = np.take(scales, rows, axis=slot.length_axis)
        off = measure_drift(pair, scales, slot.length_axis or 0, deviation)
        if not off <= most:
            raise _Differs(f"{name}, as it is read, is off by {off:.1e} standard deviations, more than {most:.1e}")


def _find_scales(one: StoredSlot, name: str, answer: Answer) -> Array | None:
    """The scales that were returned with a present.

    Raises:
        _Differs: there are none.
    """
    if one.kind == "float16":
        return None
    output = one.scales.get(name, "")
    if output not in answer.outputs:
        raise _Differs(f"no scales of {name} are returned")
    return answer.outputs[output].array()


def _make_call(builder: FeedBuilder, past: Past | None, start: int, stop: int) -> Call:
    """The call of a side.

    Raises:
        CannotCheck: its later graph takes another number of new tokens.
    """
    if past is None or not builder.contract.slots:
        return builder.prefill(stop)
    fixed = builder.contract.graph("decode").declared_new_tokens
    if isinstance(fixed, int) and fixed != stop - start:
        raise CannotCheck(f"a later step takes {fixed} new token{'s' * (fixed > 1)} only")
    return builder.decode(start, stop, past)
