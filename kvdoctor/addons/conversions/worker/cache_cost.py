"""Measures what a narrower type of the cache costs, without changing the graph: the loop rounds what it carries.

The tokens are those that the model decodes. They are fed one by one, so that every token but the first attends to
rounded rows alone, and the logits are compared with those of the same calls without rounding. A row is rounded once.
What shares a scale is varied, for keys and values apart, and so is the layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from kvdoctor.addons.conversions.messages import CacheCosted, CacheCostJob
from kvdoctor.contract import Axis, Slot
from kvdoctor.decode.calls import Array, Past, as_array
from kvdoctor.decode.inputs import random_tokens
from kvdoctor.decode.paired_walks import Walk, plan_decoding
from kvdoctor.decode.parity import compare
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.decode.stored_cache import (
    GRANULARITIES,
    STORABLE,
    Granularity,
    StoredSlot,
    find_scales,
    measure_drift,
    round_values,
    row_scales,
)
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record
from kvdoctor.runtime.worker.decoding import NOT_RUN, Decoded, Way, choose_states, compare_tokens, decode

SEQUENCES = 4
"""Random sequences that are run as well, to know how far a copy may be off."""
PROMPT, STEPS = 8, 32
"""Tokens of the prompt, which are random, and tokens that the model decodes after it."""
KEPT: dict[Granularity, tuple[Axis, ...]] = {
    "channel": ("kv_heads", "batch_heads", "layers", "parts", "head_dim"),
    "head": ("kv_heads", "batch_heads", "layers", "parts"),
    "tensor": (),
}
"""The axes along which scales differ that all tokens share."""


@record
class Rounding:
    """What a run rounds: keys and values by what shares a scale, None for not at all; and the layer, None for all."""

    keys: Granularity | None
    values: Granularity | None
    layer: int | None = None

    def of(self, slot: Slot) -> Granularity | None:
        """What shares a scale in a slot."""
        if self.layer is not None and slot.layer != self.layer:
            return None
        return self.values if slot.part == "value" else self.keys


def measure_cost(job: CacheCostJob, announce: Announce) -> Iterator[CacheCosted]:
    """Measure all roundings; the first is the one that a conversion writes, a scale for each row."""
    plans = list(_plan(job))
    try:
        measure = _prepare(job, announce, any(not {one.keys, one.values} <= {"token", None} for one in plans))
    except NOT_RUN as error:
        yield CacheCosted(failed=str(error)[:300])
        return
    for number, plan in enumerate(plans):
        try:
            found = measure.run(plan)
            yield _add_others(found, plan, job, announce) if number == 0 else replace(found, drift={})
        except NOT_RUN as error:
            yield CacheCosted(**asdict(plan), failed=str(error)[:300])


def _add_others(found: CacheCosted, plan: Rounding, job: CacheCostJob, announce: Announce) -> CacheCosted:
    """With the largest differences and drifts of more sequences, of random tokens: a proof runs such ones.

    Raises:
        StepFailed: the runtime fails in a call.
    """
    most, drift = found.relative, dict(found.drift)
    for number in range(1, SEQUENCES + 1):
        more = _prepare(replace(job, seed=job.seed + number), announce, shares=False, greedy=False).run(plan)
        if more.failed:
            return more
        most = max(most, more.relative)
        drift |= {
            past: max(one, drift.get(past, one), key=lambda pair: pair[0] * pair[1]) for past, one in more.drift.items()
        }
    return replace(found, allowed=most, drift=drift)


def _plan(job: CacheCostJob) -> Iterator[Rounding]:
    scaled = any(one.kind != "float16" for one in job.stored)
    yield Rounding("token", "token")
    for shared in GRANULARITIES if scaled else GRANULARITIES[:1]:
        yield Rounding(shared, None)
        yield Rounding(None, shared)
    pasts = {one.past for one in job.stored}
    layers = {slot.layer for slot in job.side.contract.slots if slot.past in pasts and slot.layer is not None}
    if len(layers) > 1:
        yield from (Rounding("token", "token", layer) for layer in sorted(layers))


@dataclass
class _Measure:
    """What all roundings are compared with: the calls, and what they return without rounding.

    `scales` are those that all tokens share, by past and granularity, of another sequence.
    """

    job: CacheCostJob
    announce: Announce
    way: Way
    walk: Walk
    exact: Decoded
    scales: Mapping[tuple[str, Granularity], Array]

    def run(self, plan: Rounding) -> CacheCosted:
        """Decode with one rounding.

        Raises:
            StepFailed: the runtime fails in a call.
            CannotCheck: a buffer is too short.
        """
        store = _Store(self.job, plan, self.scales)
        way = replace(self.way, store=store.round)
        got = decode(self.job.side, self.walk, way, self.announce, self.exact.tokens).logits
        want = self.exact.logits
        found = compare_tokens(got, want)
        if found is None:
            return CacheCosted(**asdict(plan), failed="logits are not finite")
        relative = compare(got[None], want[None]).relative
        return CacheCosted(**asdict(plan), **asdict(found), relative=relative, drift=self._measure_drift(store))

    def _measure_drift(self, store: "_Store") -> dict[str, tuple[float, float]]:
        """How far each row is off beyond what its own rounding explains: what the layers below add.

        Layers that stay as they are have no rounding of their own, and that of the layers below all the same.
        """
        stored = {one.past: one for one in self.job.stored}
        found = {}
        for slot in self.job.side.contract.slots:
            if slot.past not in stored and slot.kind not in STORABLE:
                continue
            if slot.past not in self.exact.carried or slot.past not in store.carried:
                continue
            want, got = as_array(self.exact.carried[slot.past]), as_array(store.carried[slot.past])
            if got.shape == want.shape and want.size:
                one = stored.get(slot.past)
                scales = None if one is None else find_scales(got, one)
                deviation = float(want.astype(np.float64).std())
                off = measure_drift((got, want), scales, slot.length_axis or 0, deviation)
                found[slot.past] = (deviation, off)
        return found


def _prepare(job: CacheCostJob, announce: Announce, shares: bool, greedy: bool = True) -> _Measure:
    """Decode without rounding: the tokens, then the same tokens one by one; and another sequence for shared scales.

    Tokens that are not `greedy` are random.

    Raises:
        StepFailed: the runtime fails in a call.
        CannotCheck: no prompt has a size that the model takes.
    """
    contract = job.side.contract
    first = plan_decoding(contract, contract, PROMPT, STEPS)
    walk = plan_decoding(contract, contract, 1, PROMPT + STEPS - 1)
    if first is None or walk is None or not walk.pieces:
        raise CannotCheck("no prompt and step have a size that the model takes")
    way = Way(job, choose_states(contract))
    shape = (walk.batch * contract.codebooks, walk.total)
    drawn = random_tokens(contract, shape, job.seed)
    tokens = decode(job.side, first, way, announce).tokens if greedy else drawn
    exact = decode(job.side, walk, way, announce, tokens[:, : walk.total])
    scales: dict[tuple[str, Granularity], Array] = {}
    if shares:
        other = decode(job.side, walk, replace(way, job=replace(job, seed=job.seed + 1)), announce)
        axes = {slot.past: slot.axes for slot in job.side.contract.slots}
        for one in job.stored:
            for shared, kept in KEPT.items():
                over = tuple(at for at, axis in enumerate(axes[one.past]) if axis not in kept)
                scales[one.past, shared] = row_scales(as_array(other.carried[one.past]), one.kind, over)
    return _Measure(job, announce, way, walk, exact, scales)


@dataclass
class _Store:
    """Rounds what is carried. Rows that were rounded in an earlier step are fed as they are."""

    job: CacheCostJob
    plan: Rounding
    scales: Mapping[tuple[str, Granularity], Array]
    rounded: dict[str, Array] = field(default_factory=dict)
    carried: Past = field(default_factory=Past)

    def round(self, past: Past) -> Past:
        """The past as a loop that stores it in the narrower type feeds it."""
        slots = {slot.past: slot for slot in self.job.side.contract.slots}
        stored = self.carried = Past(past, past.length)
        for one in self.job.stored:
            shared = self.plan.of(slots[one.past])
            if shared is not None:
                stored[one.past] = self.rounded[one.past] = self._round(one, shared, slots[one.past], past)
        return stored

    def _round(self, one: StoredSlot, shared: Granularity, slot: Slot, past: Past) -> Array:
        values, before = as_array(past[one.past]), self.rounded.get(one.past)
        at = slot.axes.index("past") if "past" in slot.axes else None
        known = before.shape[at] if before is not None and at is not None else 0
        new = values if at is None else np.take(values, range(known, values.shape[at]), axis=at)
        scales = find_scales(new, one) if shared == "token" else self.scales[one.past, shared]
        rounded = round_values(new, one.kind, scales)
        return rounded if before is None or at is None else np.concatenate([before, rounded], axis=at)
