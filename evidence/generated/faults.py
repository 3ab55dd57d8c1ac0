"""All kinds of faults, the bases that can have them, and the proof that each is one."""

from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException

from .designs import BASES
from .exports import build
from .faults_attention import masks, padding, positions
from .faults_cache import buffers, kept, lengths, read
from .faults_function import cross, declared, function
from .loops import ENOUGH, Loop, differences
from .strikes import Fault

KINDS: dict[str, Fault] = {
    fault.name: fault
    for group in (kept, read, masks, padding, positions, function, buffers, cross, lengths, declared)
    for fault in group()
}


def applicable() -> list[tuple[str, str]]:
    """Each base with each kind of fault that it can have: their names."""
    return [(base, kind) for kind, fault in KINDS.items() for base, design in BASES.items() if fault.fits(design)]


def truth(base: str, kind: str, clean: Loop | None = None) -> float:
    """How wrong the fault is where it strikes, in standard deviations of the logits; infinity if a call is refused.

    Raises:
        AssertionError: the fault does not change the logits of its walk enough, or changes those of a call before it.
    """
    design, fault = BASES[base], KINDS[kind]
    clean = clean or Loop(design, build(design))
    try:
        off = differences(Loop(design, build(design, fault)), clean, fault.walk)
    except (Fail, InvalidArgument, RuntimeException, ValueError):
        assert fault.fails, f"{kind} in {base} makes a call fail"
        return float("inf")
    past, spared = 0, 0
    for new in fault.walk.chunks:
        if fault.edit is not None or fault.strike.hits(past, new, prefill=not past):
            break
        past += new
        spared = past
    assert spared == 0 or off[:, :spared].max() < ENOUGH, f"{kind} in {base} strikes before its place"
    found = float(off[:, spared:].max()) if spared < fault.walk.length else 0.0
    assert found > ENOUGH, f"{kind} in {base} changes the logits by {found:.1e} alone"
    return found
