"""Made-up words: the token ids and embeddings of a sequence, from a seed. numpy only."""

import numpy as np

from kvdoctor.calls import Array
from kvdoctor.contract import CacheContract


def plain_words(contract: CacheContract) -> tuple[int, int]:
    """The middle half of the vocabulary: padding and other special tokens stand at its ends.

    A padding token is no word like others: M2M100 counts positions without it, so that its cached and its uncached
    positions rightly differ from then on.
    """
    size = max(contract.vocabulary or 16, 4)
    return size // 4, size - size // 4


def random_tokens(contract: CacheContract, shape: tuple[int, ...], seed: int) -> Array:
    """Random ids of plain words, int64[batch, total]."""
    return np.random.default_rng(seed).integers(*plain_words(contract), shape)


def word_table(contract: CacheContract, width: int) -> Array:
    """Made up embeddings, float[vocabulary, width], in place of those of a file that is not here."""
    return np.random.default_rng(7).standard_normal((max(contract.vocabulary or 16, 4), width))
