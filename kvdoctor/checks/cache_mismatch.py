"""Past and present of a slot do not agree.

What it means: what a step returns cannot be what the next step takes: the element types differ (KV104), or the number
of heads or the head width (KV105). A loop that feeds the present back is refused by the runtime, or needs a cast that
no one wrote.

Reproduce: `kvdoctor inspect MODEL` shows both declarations.

Repair: export again; for element types, casts at the borders of the graph.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, Fault, check

EXPORT_AGAIN = Advice("re-export", "export again, so that past and present agree")


@check("KV104", "cache-dtype-mismatch", "contract")
def cache_dtype_mismatch(case: Case) -> Iterator[Fault]:
    """Slots whose element types differ."""
    differing = [
        (s, past, now) for s, past, now in case.pairs() if past.dtype and now.dtype and past.dtype != now.dtype
    ]
    if differing:
        slot, past, now = differing[0]
        names = tuple(s.past for s, _, _ in differing)
        yield Fault(
            severity="error",
            file=case.decode_file,
            subject=names,
            where=f"input {past.name}, output {now.name}",
            promised=describe(past.dtype, past.shape),
            observed=describe(now.dtype, now.shape),
            cause=f"the element type of {first_and_count(names)} differs from that of its present",
            advice=EXPORT_AGAIN,
            follows=(f"feeding {slot.present} back is refused by the runtime",),
        )


@check("KV105", "cache-shape-mismatch", "contract")
def cache_shape_mismatch(case: Case) -> Iterator[Fault]:
    """Slots whose rank, heads or head width differ."""
    differing = [
        (slot, past, now)
        for slot, past, now in case.pairs()
        if now.shape is not None and past.shape is not None and not slot.emptied and _disagree(slot.axes, past, now)
    ]
    if differing:
        _, past, now = differing[0]
        yield Fault(
            severity="error",
            file=case.decode_file,
            subject=tuple(slot.past for slot, _, _ in differing),
            where=f"input {past.name}, output {now.name}",
            promised=describe(past.dtype, past.shape),
            observed=describe(now.dtype, now.shape),
            cause="the shape that a step returns is not the shape that the next step takes",
            advice=EXPORT_AGAIN,
            confidence="suspected",
        )


def _disagree(axes: tuple[str, ...], past: object, now: object) -> bool:
    """Ranks differ, or a number for heads or head width does."""
    before, after = getattr(past, "shape", ()), getattr(now, "shape", ())
    if len(before) != len(after):
        return True
    fixed = [(b, a) for b, a, axis in zip(before, after, axes, strict=True) if axis in ("kv_heads", "head_dim")]
    return any(isinstance(b, int) and isinstance(a, int) and b != a for b, a in fixed)
