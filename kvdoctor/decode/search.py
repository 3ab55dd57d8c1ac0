"""A search operator (BeamSearch, GreedySearch, ...): how it is called, and the same search written anew.

The rules are those of ONNX Runtime on the CPU. Sources: docs/ContribOperators.md and
onnxruntime/contrib_ops/cpu/transformers (beam_search_scorer.cc, logits_processor.cc, greedy_search_impl_base.h).
Standard library and numpy only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdoctor.records import record

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = Any  # numpy is loaded where arrays are made: the parent of a worker makes none

LOWEST, OUT_OF_PLAY = -3.4028234663852886e38, -1e9
"""The scores of a token that a rule forbids, and of all beams but the first before the first token."""


@record
class SearchPlan:
    """One node that searches.

    Attributes:
        operator: Its type.
        fed: For each of its inputs, by the name in its schema, the input of the graph that gives it.
        fixed: The numbers of those of its inputs that are constants.
        prompts: Whether the prompt is the encoder's; the decoder begins with `start` then.
        eos: The token that ends a sequence.
        pad: The token that fills the rest.
        start: The first token of a decoder with an encoder.
        early_stopping: A search ends with as many ended sequences as beams.
        ngram: Runs of so many tokens occur once only; 0 for no limit.
        sequences: The output with the tokens.
        scores: The output with the scores of the sequences; None where the node gives none.
        unknown: Why the node cannot be called or its result not be computed; empty if it can.
        vocabulary: Its `vocab_size`, -1 where it goes by the logits.
    """

    operator: str
    fed: dict[str, str]
    fixed: dict[str, float]
    prompts: bool
    eos: int
    pad: int
    start: int
    early_stopping: bool
    ngram: int
    sequences: str
    scores: str | None
    unknown: str = ""
    vocabulary: int = -1

    @property
    def is_of_one_sequence(self) -> bool:
        """Whether it is a GreedySearch, which has no beams."""
        return self.operator == "GreedySearch"


@record
class SearchRules:
    """The settings of one search: lengths in tokens, the prompt included."""

    plan: SearchPlan
    beams: int
    returned: int
    max_length: int
    min_length: int
    length_penalty: float = 1.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken. A beam search with one beam goes on after a sequence ended."""
        return self.plan.is_of_one_sequence or (self.beams == 1 and self.min_length >= self.max_length)

    def score(self, log_shares: float, length: int) -> float:
        """The score of a sequence of that length, the ending token left out, by the sum of its log probabilities."""
        return log_shares / math.pow(length, self.length_penalty)

    def adjust(self, scores: Array, tokens: Sequence[int]) -> Array:
        """The scores of the next token, float64[vocabulary], after the rules that forbid or penalize tokens."""
        made: Array = scores.copy()
        if self.repetition_penalty != 1:
            seen = [token for token in set(tokens) if 0 <= token < len(made)]
            low = made[seen] < 0
            made[seen] = np.where(low, made[seen] * self.repetition_penalty, made[seen] / self.repetition_penalty)
        size = self.plan.ngram
        if 0 < size <= len(tokens):
            end = tuple(tokens[len(tokens) - size + 1 :])
            runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
            made[[run[-1] for run in runs if run[:-1] == end]] = LOWEST
        if len(tokens) < self.min_length and 0 <= self.plan.eos < len(made):
            made[self.plan.eos] = LOWEST
        return made


def log_softmax(logits: Array) -> Array:
    """The log probabilities of one row of logits, float64[vocabulary]."""
    shifted = logits.astype(np.float64) - float(logits.max())
    found: Array = shifted - math.log(float(np.exp(shifted).sum()))
    return found


Choice = tuple[float, int, int]
"""A continuation: the sum of its log probabilities, its beam, and its token."""


@dataclass
class Ended:
    """The ended sequences of a beam search: the best of them, as many as there are beams."""

    rules: SearchRules
    found: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def add(self, tokens: tuple[int, ...], log_shares: float) -> None:
        """Add a sequence; the worst of too many is dropped."""
        self.found.append((self.rules.score(log_shares, len(tokens)), tokens))
        self.found.sort(key=lambda one: -one[0])
        del self.found[self.rules.beams :]

    def take(self, chosen: list[Choice], beams: Sequence[tuple[int, ...]]) -> list[Choice]:
        """The continuations that the next beams are made of, none where the search is done; `beams` have the tokens."""
        kept: list[Choice] = []
        for rank, (score, beam, token) in enumerate(chosen):
            if token != self.rules.plan.eos:
                kept.append((score, beam, token))
            elif rank < self.rules.beams:
                self.add(beams[beam], score)
            if len(kept) == self.rules.beams:
                break
        return [] if self.is_done(chosen[0][0], len(beams[0])) else kept

    def is_done(self, best: float, length: int) -> bool:
        """Whether no running beam, the best of them with that sum of log probabilities, can still be better."""
        if len(self.found) < self.rules.beams:
            return False
        return self.rules.plan.early_stopping or self.found[-1][0] >= self.rules.score(best, length)


def choose(scores: Array, rules: SearchRules) -> list[Choice]:
    """The best twice as many continuations as beams: score, beam, token. `scores` are float64[beams, vocabulary]."""
    flat = scores.reshape(-1)
    best = np.argsort(-flat, kind="stable")[: 2 * rules.beams]
    return [(float(flat[at]), int(at) // scores.shape[1], int(at) % scores.shape[1]) for at in best]
