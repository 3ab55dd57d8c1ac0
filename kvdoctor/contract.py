"""The cache contract: what a decode loop must feed, feed back and hold. Standard library only.

A contract describes a *stack*, the graphs that decode together, and says how to drive it. Layouts differ in its
values alone, so experiments, checks and reports hold no code for one exporter.

Shapes are written as `float[batch, kv_heads, past, head_dim]`: the words below are the meanings an axis can have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Dim = int | str | None
"""A declared size: a number, a symbolic name, or None where the file declares nothing."""

Axis = Literal[
    "batch", "new", "past", "total", "encoder", "encoder_input", "kv_heads", "head_dim", "hidden", "vocabulary", "fixed"
]
"""What an axis counts. new + past = total, all in tokens; `encoder` counts encoder states."""

Role = Literal[
    "token_ids",
    "attention_mask",
    "position_ids",
    "cache_position",
    "encoder_mask",
    "encoder_states",
    "encoder_input",
    "branch_switch",
    "logits_to_keep",
    "past",
    "present",
    "logits",
    "auxiliary",
]

PhaseName = Literal["encode", "prefill", "decode"]

ITEM_BYTES = {
    "float": 4,
    "float16": 2,
    "bfloat16": 2,
    "double": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""Bytes per element of the element types a cache is seen in."""


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph, with the part it plays."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    role: Role
    axes: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """One ONNX file of the stack, `file` relative to the model's folder."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def port(self, role: Role) -> Port | None:
        """Give the first port of that role, inputs before outputs, or None."""
        return next((port for port in (*self.inputs, *self.outputs) if port.role == role), None)


@dataclass(frozen=True, slots=True)
class Phase:
    """Which graph serves a phase, and the value of the branch switch there (None where there is no switch)."""

    graph: str
    switch: bool | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """One layer's key or value, seen as past and present.

    `filled_by` is the prefill output that makes the value, `present` the decode output that carries it on.
    `carry` is what a right loop does with it: feed the present back, or hold the value of the prefill.
    `emptied` says that the decode graph itself returns a constant without elements under the present's name.
    """

    kind: Literal["self-attention", "cross-attention"]
    layer: int
    part: Literal["key", "value"]
    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[Axis, ...]
    past: str
    present: str | None
    filled_by: str | None
    carry: Literal["feed-back", "hold"]
    emptied: bool = False

    def size(self, axis: Axis) -> int | None:
        """Give the declared size of an axis where it is a number."""
        if axis not in self.axes:
            return None
        size = self.shape[self.axes.index(axis)]
        return size if isinstance(size, int) else None

    def bytes_per_position(self) -> int | None:
        """Bytes that one sequence position of one batch row takes; None where a size is not known."""
        widths = [self.shape[i] for i, axis in enumerate(self.axes) if axis in ("kv_heads", "head_dim")]
        numbers = [width for width in widths if isinstance(width, int)]
        if len(numbers) != len(widths) or self.dtype not in ITEM_BYTES:
            return None
        return math.prod(numbers) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that stands in the way of driving a stack: what it is about, and the reason."""

    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class CacheContract:
    """How to drive one stack.

    `first_step` says what the first call gets: a past of length 0, the no-past branch of a merged decoder, or the
    graph without past of a pair. `exactness` is what the arithmetic of the graph allows two ways of computing the
    same logits to differ by: its weakest float type, or `dynamic-quantisation`.
    `context_limit` is in tokens, from the side-car config. `missing` is empty for a contract that can be driven.
    """

    layout: str
    graphs: dict[str, Graph]
    phases: dict[str, Phase]
    slots: tuple[Slot, ...]
    first_step: Literal["empty-past", "no-past-branch", "no-past-graph"]
    exactness: Literal["float", "float16", "bfloat16", "dynamic-quantisation"] = "float"
    vocabulary: int | None = None
    context_limit: int | None = None
    evidence: tuple[str, ...] = ()
    missing: tuple[Lack, ...] = ()

    def graph(self, phase: PhaseName) -> Graph:
        """Give the graph that serves a phase."""
        return self.graphs[self.phases[phase].graph]

    def of_kind(self, kind: str) -> tuple[Slot, ...]:
        """Give the slots of one kind, in layer order."""
        return tuple(slot for slot in self.slots if slot.kind == kind)

    @property
    def held(self) -> tuple[Slot, ...]:
        """The slots that a right loop holds."""
        return tuple(slot for slot in self.slots if slot.carry == "hold")

    @property
    def has_encoder_states(self) -> bool:
        """Whether the decoder takes the states of an encoder."""
        return any(graph.port("encoder_states") for graph in self.graphs.values())


def describe(dtype: str, shape: Sequence[Dim] | None) -> str:
    """Write a tensor type as the field does: `float[batch, 4, past, 8]`."""
    if shape is None:
        return f"{dtype}[no declared shape]"
    return f"{dtype}[{', '.join('?' if size is None else str(size) for size in shape)}]"
