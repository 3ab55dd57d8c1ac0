"""What runs showed: small facts about each step, never tensors. Standard library only."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "differs", "ambiguous", "inconclusive", "skipped", "died"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor that went in or came out: element type, shape, and whether its data pointer was null."""

    dtype: str
    shape: tuple[int, ...]
    null: bool = False

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape


@dataclass(frozen=True, slots=True)
class Difference:
    """What two arrays of logits, float[batch, new, vocabulary], have between them.

    `relative` is `max_abs` over the spread (the standard deviation of the expected logits over the vocabulary).
    `same_top1` is the fraction of positions with the same argmax; `near_ties` that of positions where they differ
    but the two candidates lie closer together than the noise.
    """

    max_abs: float
    relative: float
    same_top1: float
    near_ties: float
    finite: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One call into the runtime. Steps are counted from 0, the prefill. Lengths in tokens."""

    step: int
    phase: str
    past_length: int
    new_tokens: int
    fed: dict[str, Seen]
    returned: dict[str, Seen]
    empty: tuple[str, ...] = ()
    null_pointer: tuple[str, ...] = ()
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """A call with one thing spoilt on purpose, which must change the logits or the experiment had no power."""

    spoilt: str
    visible: bool
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the graph, as the graph itself names it."""

    name: str
    op: str


Blame = Literal["feed", "graph", "optimisation", "buffer-reuse", "kernel", "precision"]
"""Whom a fault is laid to: the sizes or values fed, the graph itself, an optimisation of the runtime, its reuse of
buffers, the provider's kernel, or rounding that adds up without a place."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a graph a judged run fails, or first parts from the run without a cache.

    `scope` is the path of branches and functions that the node stands in, `layer` counts from 0. `shapes` are the
    tensors that came in, by the names of the graph; `provenance` says of each axis or value concerned where it came
    from, in words; `frozen_by` is the constant that holds it where one does. `words` give the reason for the blame.
    """

    node: Node | None
    scope: str
    layer: int | None
    shapes: dict[str, Seen]
    provenance: tuple[str, ...]
    frozen_by: str | None
    blame: Blame
    words: str


@dataclass(frozen=True, slots=True)
class Cause:
    """The hypothesis that an experiment decided for: the name of its check, and what no other hypothesis predicts."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Run:
    """One experiment on one stack, as it went. `died_by` names the signal or limit that ended the process.

    `passes_with` says what makes the failed call pass: the runtime's optimisations off, or its reuse of buffers.
    `place` is looked for where the run is what a finding rests on; `no_place` is the reason why none was found.
    """

    stack: str
    experiment: str
    target: str
    provider: str
    level: str
    outcome: Outcome
    failed_step: int | None = None
    error: str | None = None
    node: Node | None = None
    reason: str | None = None
    passes_with: Literal["no-optimisation", "no-buffer-reuse"] | None = None
    steps: tuple[Step, ...] = ()
    controls: tuple[Control, ...] = ()
    died_by: str | None = None
    cause: Cause | None = None
    place: Place | None = None
    no_place: str | None = None
    node_names: tuple[str, ...] = ()
