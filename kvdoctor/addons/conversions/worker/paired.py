"""Runs a converted model and its original, call by call, and compares logits and caches.

Both are fed the same tokens and encoder states. Each is driven by its own contract and carries its own cache, so that
the contract of the converted model is proved together with its numbers.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvdoctor.addons.conversions.messages import PairedDone, PairedJob
from kvdoctor.contract import Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, Scenario, StepFailed
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.paired_walks import Walk, plan_walks
from kvdoctor.decode.parity import compare, describe_gap, judge, slot_difference
from kvdoctor.decode.runs import quote_error
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.decode.stored_cache import StoredSlot, measure_drift, read_stored
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.errors import CannotCheck
from kvdoctor.runtime.worker.runner import StackRunner, open_stack

if TYPE_CHECKING:
    from kvdoctor.decode.tolerances import Tolerance


class _Differs(Exception):
    """A call of the converted model fails or returns something else; the message says what."""


def run_paired(job: PairedJob, announce: Announce) -> PairedDone:
    """Carry out a comparison, up to the first call that differs."""
    original, converted = (open_stack(side, job, announce) for side in (job.original, job.converted))
    pair, failed = _Pair(job, original, converted), ""
    for planned in plan_walks(original.contract, converted.contract, job.how.capacity, job.how.window):
        single = 0 < job.how.single_from <= planned.batch
        failed = pair.walk(replace(planned, pieces=(1,) * sum(planned.pieces)) if single else planned)
        if failed:
            break
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
    )


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
    """Both models, and what was compared: `calls` agree, each as (batch, first token, end), others are `not_run`."""

    job: PairedJob
    original: StackRunner
    converted: StackRunner
    calls: list[tuple[int, int, int]] = field(default_factory=list)
    worst: float = 0.0
    exact: bool = True
    not_run: list[str] = field(default_factory=list)

    @property
    def tolerance(self) -> "Tolerance":
        """How far their logits may lie apart."""
        return find_tolerance(self.original.contract.exactness, self.job.tolerances)

    def walk(self, walk: Walk) -> str:
        """Compare the calls of a walk that the original runs; gives the first that differs, and how."""
        left, right = self._build(walk)
        pasts: list[Past | None] = [None, None]
        for start, stop in walk.calls():
            try:
                calls = [_make_call(side, past, start, stop) for side, past in zip((left, right), pasts, strict=True)]
                want = self.original.run_session(calls[0])
            except (StepFailed, CannotCheck) as error:
                reason = quote_error(str(error)) if isinstance(error, StepFailed) else str(error)
                self.not_run.append(f"{walk.describe(start, stop)} ({reason})")
                return ""
            try:
                got = self._compare(calls[1], want)
            except (StepFailed, CannotCheck) as error:
                return f'{walk.describe(start, stop)}: the converted model fails: "{quote_error(str(error))}"'
            except _Differs as difference:
                return f"{walk.describe(start, stop)}: {difference}"
            pasts = [
                side.carry(past, answer, "held")
                for side, past, answer in zip((left, right), pasts, (want, got), strict=True)
            ]
            self.calls.append((walk.batch, start, stop))
        return ""

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
        scenario = Scenario(walk.batch, walk.prompt, walk.total - walk.prompt + 1, encoder, self.job.seed)
        left, right = self.original.build(scenario), self.converted.build(scenario)
        return left, replace(left, contract=self.converted.contract, encoded=right.encoded)

    def _compare(self, call: Call, want: Answer) -> Answer:
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
            answer = self.converted.run_session(call)
            rows = 1 if self.job.how.rows == "last" else min(keep, call.new) or call.new
            rows = min(rows, want.logits.shape[1])  # the original may give the last row alone
            self._compare_logits(answer.logits, want.logits, rows, f" with {keep} rows requested" * bool(port))
            first = first or answer
        assert first is not None  # noqa: S101 - the loop runs once at least
        self._compare_caches(call, first, want)
        return first

    def _compare_logits(self, got: Array, want: Array, rows: int, how: str) -> None:
        if got.shape[1] != rows or want.shape[1] < rows:
            raise _Differs(f"{got.shape[1]} rows of logits{how}, not {rows}")
        wanted = want[:, -rows:]
        if np.array_equal(got, wanted, equal_nan=True):
            return
        self.exact = False
        if got.shape != wanted.shape:
            raise _Differs(f"logits of shape {list(got.shape)}{how}, not {list(wanted.shape)}")
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
    if past is None:
        return builder.prefill(stop)
    fixed = builder.contract.graph("decode").declared_new_tokens
    if isinstance(fixed, int) and fixed != stop - start:
        raise CannotCheck(f"a later step takes {fixed} new token{'s' * (fixed > 1)} only")
    return builder.decode(start, stop, past)
