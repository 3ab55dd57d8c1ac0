"""Past and present of a slot do not match.

Reproduce: `kvdoctor inspect MODEL` shows both declarations.
"""

from kvdoctor.contract import Dim, Slot, describe
from kvdoctor.decode.runs import Step
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import Explained
from kvdoctor.findings import Advice, Confidence, Fault, Faults, check
from kvdoctor.model.view import Declared
from kvdoctor.report.wording import shorten_names

EXPORT_AGAIN = Advice("re-export", "export again, so that past and present agree")


@check("KV104", "cache-dtype-mismatch", "contract")
def cache_dtype_mismatch(context: ContractContext) -> Faults:
    """Slots whose element types differ.

    What it means: the past and the present of a slot have different element types, so that the output of a step cannot
    be the input of the next one. The runtime refuses it, unless the loop adds a cast.

    Repair: add casts at the inputs or outputs of the graph, or export again with one element type.
    """
    pairs = context.declared_pairs()
    differing = [pair for pair in pairs if pair[1].dtype and pair[2].dtype and pair[1].dtype != pair[2].dtype]
    if differing:
        slot, past, now = differing[0]
        names = tuple(slot.past for slot, _, _ in differing)
        cause = f"the element type of {shorten_names(names)} differs from that of its present"
        fault = _build_fault(names, past, now, cause, context.advise_graph_repair(f"or {EXPORT_AGAIN.text}"))
        yield fault.also(effects=(f"the runtime refuses {slot.present} when it is fed back",))


@check("KV105", "cache-shape-mismatch", "contract")
def cache_shape_mismatch(context: ContractContext) -> Faults:
    """Slots whose rank, heads or head width differ between past and present, as declared or as observed.

    What it means: the past and the present of a slot have different ranks, numbers of heads or head widths, so that the
    output of a step cannot be the input of the next one. The runtime refuses it.

    Repair: export again.
    """
    differing = []
    for slot, past, now in context.declared_pairs():
        if past.shape is None or slot.emptied:
            continue
        came_back = [(step, seen) for step, seen in context.observed_presents(slot) if not seen.empty]
        # Sizes may be equal by chance in one step: axes in another order show in the next.
        fit = [_fits(slot.axes, past.shape, seen.shape) and _as_fed(slot, step) for step, seen in came_back]
        seen = None if all(fit) else came_back[fit.index(False)][1]
        if seen is not None or (not came_back and now.shape and not _fits(slot.axes, past.shape, now.shape)):
            differing.append((slot, past, now, seen))
    if differing:
        _, past, now, seen = differing[0]
        cause = "the shape of the present is not a shape that the past takes"
        fault = _build_fault(tuple(slot.past for slot, _, _, _ in differing), past, now, cause, EXPORT_AGAIN)
        fault = fault.also(observed=describe(seen.dtype, seen.shape)) if seen else fault
        certain: Confidence = "confirmed" if seen or context.loop_is_wrong else "suspected"
        yield fault.also(confidence=certain, effects=("the runtime refuses it when it is fed back",))


def require_equal_ranks(context: ContractContext) -> None:
    """Raise `Explained` where a past has another rank than its present: what follows from it is no fault of its own."""
    for _, past, now in context.declared_pairs():
        if past.shape and now.shape and len(past.shape) != len(now.shape):
            raise Explained("a past and its present have different ranks, see KV105")


def _build_fault(names: tuple[str, ...], past: Declared, now: Declared, cause: str, repair: Advice) -> Fault:
    fault = Fault("error", names, cause, repair, where=f"input {past.name}, output {now.name}")
    return fault.compare(describe(past.dtype, past.shape), describe(now.dtype, now.shape))


def _as_fed(slot: Slot, step: Step) -> bool:
    """Whether a step returned the number of heads and the head width that it was fed."""
    fed, seen = step.fed.get(slot.past), step.returned[slot.present or ""]
    if fed is None or len(fed.shape) != len(slot.axes) or len(seen.shape) != len(slot.axes):
        return True
    fixed = [index for index, axis in enumerate(slot.axes) if axis in ("kv_heads", "head_dim")]
    return all(fed.shape[index] == seen.shape[index] for index in fixed)


def _fits(axes: tuple[str, ...], past: tuple[Dim, ...], now: tuple[Dim, ...]) -> bool:
    """Whether a present could be fed back: rank, heads and width are equal, and its numbers stand at the same axes."""
    if len(past) != len(now):
        return False
    fixed = [at for at, axis in enumerate(axes) if axis in ("kv_heads", "head_dim") and isinstance(past[at], int)]
    if any(isinstance(now[index], int) and now[index] != past[index] for index in fixed):
        return False
    numbers = {index for index, size in enumerate(now) if isinstance(size, int)}
    return not (numbers - set(fixed) and set(fixed) - numbers)
