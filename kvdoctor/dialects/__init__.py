"""The naming tables of the exporters: data, one file each.

Names are hints that save work; what a graph does with a tensor is asked of the graph.
"""

import re
from dataclasses import dataclass
from typing import Literal

from kvdoctor.contract import Axis, Role


@dataclass(frozen=True, slots=True)
class SlotRule:
    """How a past input is named, and the name of its present: `{layer}` and `{part}` stand for the groups."""

    past: re.Pattern[str]
    present: str
    kind: Literal["self-attention", "cross-attention"]
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class RoleRule:
    """The part that an input or output of this name plays, and what its axes count."""

    name: re.Pattern[str]
    role: Role
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One exporter's names. `file_roles` maps the stem of a file name to the part that the file plays."""

    name: str
    slots: tuple[SlotRule, ...]
    inputs: tuple[RoleRule, ...]
    outputs: tuple[RoleRule, ...]
    encoder_inputs: tuple[RoleRule, ...]
    encoder_outputs: tuple[RoleRule, ...]
    looks_like_cache: re.Pattern[str]
