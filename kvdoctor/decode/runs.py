"""What runs showed: small facts about each step, never tensors. Standard library only."""

import re
from dataclasses import field
from typing import Literal

from kvdoctor.records import record

PLAIN_LOOP = "plain-loop"
"""The experiment that feeds every present back."""

HELD_LOOP = "held-loop"
"""The experiment that feeds presents back but keeps the cross-attention cache of the first step."""

PAGED_LOOP = "paged-loop"
"""The experiment that keeps the blocks of a paged cache; no other one is run on such a cache."""

LOOPS = (PLAIN_LOOP, HELD_LOOP, PAGED_LOOP)

HISTORY = "history"
"""The experiment on what a graph that takes one token a call keeps of earlier tokens."""
OWN_SESSION = "own-session"
"""The experiment that repeats the loop of such a graph in another process."""

REPLAY = "caller-replay"
"""The experiment that runs the caller's own steps again."""
SEARCH = "operator-search"
"""The experiment that compares an operator with the whole loop inside with a loop over its decoder."""
CALLER_ROUNDS = "caller-runtime-rounds"
"""The cause of a replay whose outputs differ from those of the trace by no more than rounding to float16 does."""

Outcome = Literal["passed", "failed", "differs", "ambiguous", "inconclusive", "skipped", "died"]

WRONG: tuple[Outcome, ...] = ("failed", "differs", "died")
"""The outcomes of a run that shows a fault."""
UNDECIDED: tuple[Outcome, ...] = ("ambiguous", "inconclusive")
"""The outcomes of a run whose numbers show neither a fault nor its absence."""

SHORTEST, LONGEST = 30, 150
"""Characters of a runtime's message that are quoted."""


@record
class ObservedTensor:
    """A tensor that went in or came out: element type, shape, and whether its data pointer was null."""

    dtype: str
    shape: tuple[int, ...]
    null: bool = False

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape


@record
class LogitsDifference:
    """The difference of two arrays of logits, float[batch, new, vocabulary].

    `relative` is `max_abs` over the standard deviation of the expected logits over the vocabulary.
    `same_top1` is the fraction of positions with the same argmax; `near_ties` that of positions where they differ
    but the two candidates lie closer together than the noise, which decides nothing. `kl` is the divergence of the next
    token's distribution from the expected one, in nats, at the worst position. Not `finite`: the numbers mean nothing.
    """

    max_abs: float
    relative: float
    same_top1: float
    near_ties: float
    finite: bool
    kl: float = 0.0


@record
class Step:
    """One call into the runtime. Steps are counted from 0, the prefill. Lengths in tokens.

    `slots` is what a loop has after its last step against the cache of one call over the same tokens: by the name of
    the present, the largest difference as a fraction of the standard deviation of that tensor.
    """

    step: int
    phase: str
    past_length: int
    new_tokens: int
    fed: dict[str, ObservedTensor]
    returned: dict[str, ObservedTensor]
    empty: tuple[str, ...] = ()
    null_pointer: tuple[str, ...] = ()
    difference: LogitsDifference | None = None
    slots: dict[str, float] = field(default_factory=dict)


@record
class Control:
    """A call with one deliberate error. It must change the logits, or the experiment is inconclusive."""

    corrupted: str
    visible: bool
    difference: LogitsDifference | None


@record
class Node:
    """A place in the graph, as the graph itself names it."""

    name: str
    op: str

    @property
    def shown(self) -> str:
        """As reports name it."""
        return f'{self.op} "{self.name}"'


FaultSource = Literal["feed", "graph", "optimization", "buffer-reuse", "kernel", "precision"]
"""The component at fault: the sizes or values fed, the graph itself, an optimization of the runtime, its reuse of
buffers, the provider's kernel, or rounding that adds up without a place."""


@record
class FaultLocation:
    """Where in a graph a judged run fails, or first parts from the run without a cache.

    `scope` is the path of branches and functions that the node stands in, `layer` counts from 0. `shapes` are the
    tensors that came in, by the names of the graph; `provenance` says of each axis or value concerned where it came
    from; `frozen_by` is the constant that holds it where one does. `source` is the component at fault,
    and `words` give the reason. `cause` is the check whose fault the place shows, empty where it shows none. `scores`
    says that the value which differs goes to a softmax as it is.
    """

    node: Node | None
    scope: str
    layer: int | None
    shapes: dict[str, ObservedTensor]
    provenance: tuple[str, ...]
    frozen_by: str | None
    source: FaultSource
    words: str
    cause: str = ""
    scores: bool = False


@record
class PartDifference:
    """A part of a decoder (embedding, attention, MLP, norms, head), compared with a checkpoint of PyTorch.

    `layer` counts from 0, None outside of the layers. `relative` is the largest difference of the outputs of its
    modules in standard deviations, -1 where one side alone is not finite; `differs` says that it is more than rounding.
    """

    part: str
    layer: int | None
    relative: float
    differs: bool


@record
class Cause:
    """The hypothesis that an experiment confirmed: the name of its check, and evidence that no other one predicts.

    `slot` is the past input of the slot concerned, empty where it is none alone; `dropped` counts the oldest entries of
    its past that a step left out; `from_length` is the number of tokens from which on steps are wrong, and `again` says
    that longer sequences change the keys of earlier tokens again. `read_right` says that the logits of the step itself
    are right. `unseen` are entries of the past that a step does not attend to. `masked`: a mask removes the fault.
    """

    name: str
    evidence: str
    slot: str = ""
    dropped: int = 0
    from_length: int = 0
    again: bool = False
    read_right: bool = False
    unseen: tuple[int, ...] = ()
    masked: bool = False


ONLY_THOROUGH = "only with --thorough"
"""The reason of a run that was skipped since nobody asked for what takes long."""

NOTHING_CHANGES = "no token changes"
"""Begins the reason of a run that shows that the logits, or a layer of the cache, do not depend on the tokens."""

RING, NOT_FULL = "ring", "nothing was run on a full ring"
"""The experiment on steps that write over the oldest entries, and how the reason begins why it shows nothing."""

REFERENCE_CHANGES = "without a cache, the logits of the first tokens change with the number of tokens"
"""Why a run was skipped that has no reference run to be judged by."""

KEYS_CHANGE = "keys-change-with-length"
"""The name of a cause: from `Cause.from_length` on, the keys in the cache are not those of a call without a cache."""

ROWS_DIFFER = "encoder-rows-differ"
"""The name of a cause: an encoder returns another number of rows than the prompt has placeholders."""

GENERAL_CAUSES = ("cache-misread", "new-entries-wrong")
"""Names of causes that say which half of a step is wrong, and not why: other experiments may show more."""


@record
class Float32Result:
    """The result of an experiment on the float32 copy of a model, which rounds no intermediate value.

    `relative` are the differences of its steps to the copy's own reference run, in standard deviations of the logits.
    `own` is the outcome by the model's own runs. `too_coarse`: the copy is right, and what the model rounds makes its
    logits wrong all the same.
    """

    outcome: Outcome
    relative: tuple[float, ...] = ()
    failed_step: int | None = None
    reason: str | None = None
    own: Outcome = "passed"
    too_coarse: bool = False

    @property
    def worst(self) -> float:
        """The largest difference."""
        return max(self.relative, default=0.0)

    def at(self, step: "Step | None") -> float:
        """The difference at a step; the largest where that step was not run."""
        return self.relative[step.step] if step is not None and step.step < len(self.relative) else self.worst


@record
class Run:
    """One experiment on one stack, as it went. `died_by` names the signal or limit that ended the process.

    `passes_with` says what makes the failed call pass: the runtime's optimizations off, or its reuse of buffers.
    `unrounded` is what the same experiment shows without what the model rounds, None where it rounds nothing or that
    was not tried: what differs there differs here for more than rounding, however small it is, and the outcome says so.
    `location` is looked for where the run is what a finding rests on; `no_location` is the reason why none was found.
    `parts` are those of a run that differs from a checkpoint, in the order in which they are computed.
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
    passes_with: Literal["no-optimization", "no-buffer-reuse"] | None = None
    steps: tuple[Step, ...] = ()
    controls: tuple[Control, ...] = ()
    died_by: str | None = None
    cause: Cause | None = None
    unrounded: Float32Result | None = None
    location: FaultLocation | None = None
    no_location: str | None = None
    node_names: tuple[str, ...] = ()
    parts: tuple[PartDifference, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether the same tokens went twice from an empty state: what takes one at a time has no reference run."""
        first, later = self.steps[:1], self.steps[1:]
        begun = [step for step in later if step.past_length == 0 and step.difference]
        return bool(begun) and all(step.difference is None for step in first)

    @property
    def yardstick(self) -> str:
        """What its logits were compared with, for a message."""
        if self.experiment in (OWN_SESSION, HISTORY):
            return "the loop in the first session" if self.experiment == OWN_SESSION else "other histories"
        own = "its own first pass" if self.experiment == PLAIN_LOOP else "each row alone"
        return own if self.repeats else "the reference run"

    @property
    def fault_node(self) -> Node | None:
        """The node at which it fails or first differs: the one that was located, else the one that its error names."""
        located = self.location.node if self.location is not None else None
        return located or self.node

    @property
    def wrong_step(self) -> Step | None:
        """The step that fails or differs; None where none does, or where it was not run."""
        return next((step for step in self.steps if step.step == self.failed_step), None)

    @property
    def not_finite(self) -> tuple[int, ...]:
        """The steps whose logits have no difference, since they are NaN or infinite."""
        return tuple(step.step for step in self.steps if step.difference and not step.difference.finite)

    @property
    def by_rounding(self) -> bool:
        """Whether the logits differ, or are ambiguous, by nothing but the model's rounding, and can be used."""
        float32, unclear = self.unrounded, self.outcome in ("differs", *UNDECIDED)
        return unclear and float32 is not None and float32.outcome == "passed" and not float32.too_coarse

    @property
    def too_coarse(self) -> bool:
        """Whether the logits are wrong by nothing but what the model rounds, and are numbers."""
        return self.unrounded is not None and self.unrounded.too_coarse and not self.not_finite

    @property
    def hidden(self) -> bool:
        """Whether the logits are off by more than rounding, but not by more than rounding moves them."""
        return self.unrounded is not None and self.unrounded.outcome == "differs" and self.unrounded.own != "differs"

    @property
    def without_tokens(self) -> bool:
        """Whether the logits, or a layer of the cache, do not depend on the tokens: no run could show a fault there."""
        return self.outcome == "inconclusive" and (self.reason or "").startswith(NOTHING_CHANGES)

    @property
    def shows(self) -> Outcome:
        """The outcome, but for what is rounding alone."""
        return "passed" if self.by_rounding else self.outcome


def quote_error(error: str) -> str:
    """The end of a runtime's message, which says what is wrong; paths and names of functions stand before it.

    It is for a person to read: no cause is decided by it.
    """
    sentences = [part for part in re.split(r"(?<=[.:]) (?=[A-Z])|(?<=Message:) ", " ".join(error.split())) if part]
    quoted = ""
    while sentences and len(quoted) < SHORTEST:
        quoted = f"{sentences.pop()} {quoted}".strip()
    quoted = quoted.rpartition("&) ")[2]  # after the signature of a function of C++
    return quoted if len(quoted) <= LONGEST else "... " + re.sub(r"^\S* ", "", quoted[4 - LONGEST :])
