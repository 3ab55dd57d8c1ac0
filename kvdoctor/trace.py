"""What runs showed: small facts about each step, never tensors. Standard library only."""

from dataclasses import dataclass
from typing import Literal

REPLAY = "caller-replay"
"""The experiment that runs the caller's own steps again."""

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


@dataclass(frozen=True, slots=True)
class Cause:
    """The hypothesis that an experiment decided for: the name of its check, and what no other hypothesis predicts."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Run:
    """One experiment on one stack, as it went. `died_by` names the signal or limit that ended the process.

    `passes_with` says what makes the failed call pass: the runtime's optimisations off, or its reuse of buffers.
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
    node_names: tuple[str, ...] = ()
