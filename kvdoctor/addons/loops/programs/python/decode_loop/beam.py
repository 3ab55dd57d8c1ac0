"""An example over the library: a beam search for one prompt, for a model whose contract has `reorders`."""

from collections.abc import Sequence

import numpy as np

from .decoder import Decoder


def beam_search(
    decoder: Decoder, prompt: Sequence[int], beams: int = 3, most: int = 20, end: Sequence[int] = ()
) -> list[int]:
    """The tokens with the best mean log probability that `beams` sequences find; a token of `end` is not among them.

    An encoder reads the source once for each of the beams before it.
    """
    logits = decoder.prefill([prompt] * beams)
    begun: list[tuple[float, list[int]]] = [(0.0 if row == 0 else -np.inf, []) for row in range(beams)]
    ended: list[tuple[float, list[int]]] = []
    for count in range(1, most + 1):
        shifted = logits - logits.max(-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)) + np.array([[one[0]] for one in begun])
        best = np.argsort(-scores, axis=None, kind="stable")[: 2 * beams]
        found = [(float(scores.flat[at]), *divmod(int(at), scores.shape[1])) for at in best]
        ended += [(score / count, begun[row][1]) for score, row, token in found[:beams] if token in end]
        ended = sorted(ended, key=lambda one: -one[0])[:beams]
        going = [one for one in found if one[2] not in end][:beams]
        done = len(ended) == beams and ended[-1][0] >= found[0][0] / count
        begun = [(score, [*begun[row][1], token]) for score, row, token in going]
        if done or count == most or decoder.length >= decoder.most:
            break
        decoder.reorder([row for _, row, _ in going])
        logits = decoder.step([[token] for _, _, token in going])
    ended += [(score / len(tokens), tokens) for score, tokens in begun]
    return max(ended, key=lambda one: one[0])[1]
