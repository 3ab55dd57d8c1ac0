"""What runs showed: small facts about each step, never tensors. Standard library only."""

from dataclasses import dataclass, field
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
    but the two candidates lie closer together than the noise, which decides nothing. `same_top5` is the mean share of
    the five likeliest words that are among the expected five, or tie with the fifth within the noise. Of all positions
    the worst: `cosine` of the angle between the logits, each less its mean, which softmax does not see, and `kl`, the
    divergence of the next word's distribution from the expected one, in nats. Not `finite`: the numbers mean nothing.
    """

    max_abs: float
    relative: float
    same_top1: float
    near_ties: float
    finite: bool
    cosine: float = 1.0
    kl: float = 0.0
    same_top5: float = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One call into the runtime. Steps are counted from 0, the prefill. Lengths in tokens.

    `slots` is what a loop has after its last step against the cache of one call over the same tokens: by the name of
    the present, the largest difference as a fraction of the spread of that tensor.
    """

    step: int
    phase: str
    past_length: int
    new_tokens: int
    fed: dict[str, Seen]
    returned: dict[str, Seen]
    empty: tuple[str, ...] = ()
    null_pointer: tuple[str, ...] = ()
    difference: Difference | None = None
    slots: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ErrorGrowth:
    """How the difference to the reference run goes over the steps with a cache; `step` is where a sudden one sets in.

    flat: no trend, from the first of them on. linear: more with every step. sudden: from one step to the next.
    """

    shape: Literal["flat", "linear", "sudden"]
    step: int | None = None


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
class Unrounded:
    """What an experiment shows on a twin of the model that computes in float32 and rounds nothing on its way.

    `relative` are the differences of its steps to the twin's own reference run, as fractions of the spread. `own`
    is the outcome by the model's own runs.
    """

    outcome: Outcome
    relative: tuple[float, ...] = ()
    failed_step: int | None = None
    reason: str | None = None
    own: Outcome = "passed"

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max(self.relative, default=0.0)

    def at(self, step: "Step | None") -> float:
        """The difference at a step; the largest where that step was not run."""
        return self.relative[step.step] if step is not None and step.step < len(self.relative) else self.worst


@dataclass(frozen=True, slots=True)
class Run:
    """One experiment on one stack, as it went. `died_by` names the signal or limit that ended the process.

    `passes_with` says what makes the failed call pass: the runtime's optimisations off, or its reuse of buffers.
    `growth` is None where too few steps can be compared. `unrounded` is what the same experiment shows without what the
    model rounds, None where it rounds nothing or that was not tried: what differs there differs here for more than
    rounding, however small it is beside it, and the outcome says so.
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
    growth: ErrorGrowth | None = None
    unrounded: Unrounded | None = None
    place: Place | None = None
    no_place: str | None = None
    node_names: tuple[str, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether the same tokens went twice from an empty state: what takes one at a time has no reference run."""
        first, later = self.steps[:1], self.steps[1:]
        begun = [step for step in later if step.past_length == 0 and step.difference]
        return bool(begun) and all(step.difference is None for step in first)

    @property
    def yardstick(self) -> str:
        """What its logits were held against, in words."""
        return "its own first pass" if self.repeats else "the reference run"

    @property
    def by_rounding(self) -> bool:
        """Whether the logits are off, or cannot be told apart, by nothing but what the model rounds."""
        unclear = self.outcome in ("ambiguous", "differs", "inconclusive")
        return unclear and self.unrounded is not None and self.unrounded.outcome == "passed"

    @property
    def hidden(self) -> bool:
        """Whether the logits are off by more than rounding, but not by more than rounding moves them."""
        return self.unrounded is not None and self.unrounded.outcome == "differs" and self.unrounded.own != "differs"

    @property
    def shows(self) -> Outcome:
        """The outcome, but for what is rounding alone."""
        return "passed" if self.by_rounding else self.outcome
