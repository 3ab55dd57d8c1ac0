"""What kinds of faults share: names of checks that fit, walks, and which designs can have them."""

from .designs import Design
from .strikes import Walk

DIFFERS = ("cached-differs",)
LOST = (*DIFFERS, "present-does-not-grow")
PLACED = (*DIFFERS, "positions-not-offset")
SEEN = (*DIFFERS, "mask-not-offset", "past-ignored")
BRANCH = (*DIFFERS, "branches-disagree")
MIXED = ("batch-rows-interact", *DIFFERS)
REWRITES = ("present-rewrites-past", *DIFFERS)
CHUNK = Walk((9, 3, 1))
EARLY = Walk((9, 1, 1))
PADDED = Walk((9, 1, 1), rows=2, pads=(0, 4))


def appends(design: Design) -> bool:
    return not design.buffered and design.layout != "delta"


def readable(design: Design) -> bool:
    return not design.buffered


def buffered(design: Design) -> bool:
    return design.buffered


def unbounded(design: Design) -> bool:
    """No window."""
    return design.layout != "ring"


def static(design: Design) -> bool:
    return design.layout == "static"


def numbered(design: Design) -> bool:
    return design.position in ("learned", "sinusoidal", "rotary")


def rotary(design: Design) -> bool:
    return design.position == "rotary"


def relative(design: Design) -> bool:
    return design.position in ("alibi", "relative")


def masked(design: Design) -> bool:
    return design.mask == "mask2d"


def branched(design: Design) -> bool:
    return design.branched


def merged(design: Design) -> bool:
    return design.files == "merged"


def crossed(design: Design) -> bool:
    return bool(design.encoder)


def passes(design: Design) -> bool:
    return design.encoder == "passed"


def apart(design: Design) -> bool:
    return design.layout not in ("stacked", "fused")


def grouped(design: Design) -> bool:
    return design.kv_heads > 1


def to_past(length: int, *behind: int) -> Walk:
    """A prefill, and one token per step to a past of this length; then chunks."""
    return Walk((length - 4, 1, 1, 1, 1, *(behind or (1, 1))))
