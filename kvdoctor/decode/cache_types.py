"""Narrower types of a cache: how a row is stored, by what numbers and under which names. Standard library only.

A row is what one token and one head has along head_dim. int8 and int4 are symmetric: a row is divided by its scale,
its largest magnitude over 127 or 7, and rounded. Scales are float16, which is 2 bytes for each row, and what is rounded
is divided by the scale as it is stored.
"""

from typing import Literal

from kvdoctor.choices import CacheType
from kvdoctor.records import record

LEVELS = {"int8": 127, "int4": 7}
"""The largest number of steps, either way."""
ZERO_POINT = 8
"""What is added to a 4-bit number, so that two of them make one unsigned byte: the first half of a row lies in the low
bits, the second half in the high ones."""
SMALLEST_SCALE = 2.0**-24
"""The smallest positive float16. A row of zeros has it too."""
LARGEST_SCALE = 65504.0
"""The largest float16."""
SCALE_SUFFIX = "_scale"
"""What the name of a scale has behind that of its values: `past_key_values.0.key_scale`."""

STORABLE = ("self-attention", "cross-attention")
"""The kinds of slots that hold keys and values, which can be stored in a narrower type."""

Granularity = Literal["token", "channel", "head", "tensor"]
"""What shares a scale: a row (one token and head), a channel of a head over all tokens, a head, or a whole tensor."""

GRANULARITIES: tuple[Granularity, ...] = ("token", "channel", "head", "tensor")


@record
class StoredSlot:
    """How a slot is stored in a converted model: the type, the axis of head_dim, and the outputs that have its scales.

    `scales` maps the output that returns the values to the one that returns their scales; it is empty for float16.
    """

    past: str
    kind: CacheType
    axis: int
    scales: dict[str, str]


def scale_name(name: str) -> str:
    """The name of the scales of a past or a present."""
    return f"{name}{SCALE_SUFFIX}"
