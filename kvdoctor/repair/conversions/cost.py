"""What a narrower type of the cache costs, and how far a copy that has it may be from the original.

The worker decodes with the model as it was before, and rounds what it carries (runtime/worker/cache_cost.py). A copy
rounds the same rows, and those of the call itself as well, so its logits may be off by a small multiple of what that
loop shows.
"""

import statistics

from kvdoctor.analysis.slot_memory import total
from kvdoctor.choices import CacheType
from kvdoctor.contract import ITEM_BYTES, Slot
from kvdoctor.decode.cache_types import STORABLE
from kvdoctor.decode.messages import CacheCosted, CacheCostJob, PairedSide
from kvdoctor.records import record
from kvdoctor.repair.conversions.registry import Converted
from kvdoctor.repair.session import RepairSession
from kvdoctor.report.repair_record import CacheCost, CacheCosts

ROWS, LOGITS = 3.0, 5.0
"""What the rows and the logits of a copy may be off by, as multiples of what the loop that rounds shows: the copy also
rounds the rows of the call itself, which weighs most in short prompts, and more calls are compared."""
NOISE = 1e-3
"""What rows may be off by anyway, in standard deviations of the cache: float32 tips a rounding here and there."""
STANDS_OUT = 4.0
"""A layer stands out that costs so many times the median of all."""
SCALE_BYTES = 2
"""Bytes of the scale of a row."""
CHEAP = 1e-3
"""Nats below which a cost is not worth a layer in another type."""


@record(slots=False)
class MeasuredCost:
    """The cost of a stack, and what its proof may allow; `failed` says why there is none."""

    facts: CacheCosts
    allowed: float
    drift: dict[str, tuple[float, float]]
    failed: str = ""


def measure_costs(session: RepairSession, made: Converted, side: PairedSide) -> MeasuredCost:
    """Run a model in a loop that rounds its cache as its conversion does, and in other ways.

    Raises:
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    job = CacheCostJob(side, made.stored, seed=session.options.seed, provider=session.options.provider)
    found, failed = session.runtime.answer(job, CacheCosted)
    if not found:
        found = (CacheCosted("token", "token", failed=failed or "nothing was measured"),)
    written = found[0]
    kind = made.stored[0].kind
    narrow = {one.past for one in made.stored}
    growing = [slot for slot in side.contract.slots if slot.kind in STORABLE and "past" in slot.axes]
    facts = CacheCosts(
        side.stack,
        kind,
        total(slot.bytes_per_position() for slot in growing),
        total(_stored_bytes(slot, kind) if slot.past in narrow else slot.bytes_per_position() for slot in growing),
        written.tokens,
        tuple(_describe(one) for one in found),
        _find_sensitive(found),
        tuple(sorted({slot.layer for slot in growing if slot.past not in narrow and slot.layer is not None})),
    )
    drift = {past: (deviation, ROWS * off + NOISE) for past, (deviation, off) in written.drift.items()}
    return MeasuredCost(facts, LOGITS * written.allowed, drift, written.failed)


def _describe(one: CacheCosted) -> CacheCost:
    if one.failed:
        return CacheCost(one.keys, one.values, one.layer, reason=one.failed)
    return CacheCost(
        one.keys, one.values, one.layer, one.divergence, one.same_top1, one.first_other, largest=one.relative
    )


def _find_sensitive(found: tuple[CacheCosted, ...]) -> tuple[int, ...]:
    """The layers that alone cost far more than the others do, where all together cost something."""
    alone = {one.layer: one.divergence for one in found if one.layer is not None and not one.failed}
    if found[0].failed or found[0].divergence < CHEAP or len(alone) < 3:
        return ()
    median = statistics.median(alone.values())
    return tuple(sorted(layer for layer, cost in alone.items() if cost > max(STANDS_OUT * median, CHEAP / 10)))


def _stored_bytes(slot: Slot, kind: CacheType) -> int | None:
    """Bytes of one token in the narrower type, its scales included."""
    whole, width = slot.bytes_per_position(), slot.size("head_dim")
    if whole is None or not width:
        return None
    numbers = whole // ITEM_BYTES[slot.dtype]
    values = numbers * {"float16": 2, "int8": 1, "int4": 0.5}[kind]
    return int(values) + (0 if kind == "float16" else SCALE_BYTES * (numbers // width))
