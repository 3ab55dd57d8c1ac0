"""What a model may be used for beyond one sequence, token by token: the experiment that tries it, and who needs it.

A use that fails is a warning, since the loop that was asked for is right; `--require` makes it an error.
"""

from dataclasses import dataclass
from typing import Literal

from kvdoctor.choices import Required


@dataclass(frozen=True, slots=True)
class Use:
    """What an experiment with other sizes stands for, in words that follow `with`.

    `severity` holds where only this use fails. `after` are experiments that fail from the same cause, if they do.
    """

    words: str
    severity: Literal["warning", "error"] = "warning"
    required: Required | None = None
    after: tuple[str, ...] = ()


USES: dict[str, Use] = {
    "one-token-prompt": Use("a prompt of one token", "error"),
    "long-past": Use("up to 50 tokens", "error"),
    "batch": Use("a batch of 2", required="batch"),
    "other-encoder-length": Use("an encoder length other than the first"),
    "chunk": Use("several new tokens on top of a cache", required="chunked-prefill"),
    "second-turn": Use("several new tokens after single ones", required="chunked-prefill", after=("chunk",)),
    "rewind": Use("steps taken back by cutting the cache"),
    "beam-reorder": Use("rows of the cache reordered", required="beam", after=("batch", "batch-rows")),
    "left-padding": Use("padding on the left", required="left-padding", after=("batch", "batch-rows")),
    "encoder-padding": Use(
        "encoder states of two lengths in one batch", after=("batch", "batch-rows", "other-encoder-length")
    ),
    "unread-content": Use("other content than zeros in places of the cache that count as empty"),
    "sweep": Use("other lengths", after=("chunk", "second-turn", "one-token-prompt", "long-past")),
    "way-basic": Use("basic graph optimisation only"),
    "way-off": Use("graph optimisation off", after=("way-basic",)),
    "way-io-binding": Use("inputs and outputs bound"),
    "full-context": Use("as many tokens as are promised", required="full-context", after=("long-past",)),
}
"""By the name of the experiment."""
