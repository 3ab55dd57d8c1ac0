"""Picks tokens from logits: the likeliest one, or one that is drawn from the likely ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .contract import Generation
from .values import Array

Choose = Callable[[Array, Sequence[int]], int]
"""Picks a token of logits float32[vocabulary] and the tokens of the sequence so far, its prompt among them."""


def likeliest(logits: Array, _so_far: Sequence[int]) -> int:
    """The token with the largest logit."""
    return int(logits.argmax())


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. What is left at its default changes nothing.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draws from so many likeliest tokens; 0 from all.
        top_p: Draws from the likeliest tokens that together have this probability.
        min_p: Leaves out tokens with less than this part of the likeliest one's probability.
        repetition_penalty: Divides the positive logits of tokens that were there before, and multiplies the others.
        seed: Of the random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError("temperature and top_k are 0 or more, top_p is above 0 and at most 1, min_p is 0 to 1")
        if not self.repetition_penalty > 0:
            raise ValueError("repetition_penalty is above 0")

    def chooser(self) -> Choose:
        """A function that draws tokens, with random numbers of its own."""
        random = np.random.default_rng(self.seed)

        def choose(logits: Array, so_far: Sequence[int]) -> int:
            scores = self._penalized(logits, so_far)
            if self.temperature == 0:
                return int(scores.argmax())
            tokens, weights = self._candidates(scores / self.temperature)
            return int(random.choice(tokens, p=weights))

        return choose

    def _penalized(self, logits: Array, so_far: Sequence[int]) -> Array:
        if self.repetition_penalty == 1 or not so_far:
            return logits
        scores, seen = logits.copy(), np.unique(np.asarray(so_far))
        found, by = scores[seen], self.repetition_penalty
        scores[seen] = np.where(found > 0, found / by, found * by)
        return scores

    def _candidates(self, scores: Array) -> tuple[Array, Array]:
        """The tokens that may be drawn, the likeliest first, and their probabilities."""
        tokens = np.argsort(-scores, kind="stable")[: self.top_k or None]
        weights = np.exp(scores[tokens].astype(np.float64) - scores[tokens[0]])
        weights /= weights.sum()
        enough = np.cumsum(weights) - weights < self.top_p
        chosen = enough & (weights >= self.min_p * weights[0])
        tokens, weights = tokens[chosen], weights[chosen]
        return tokens, weights / weights.sum()


def constrain(logits: Array, so_far: Sequence[int], prompt: int, ids: Generation) -> Array:
    """The logits of a sequence without the tokens that the model's configs keep out, or with the forced one alone."""
    forced = dict(ids.forced).get(len(so_far))
    out = [*ids.suppress, *(ids.begin_suppress if len(so_far) == prompt else ())]
    if forced is None and not out:
        return logits
    made = np.full_like(logits, -np.inf) if forced is not None else logits.copy()
    if forced is not None:
        made[forced] = 0
    else:
        made[out] = -np.inf
    return made
