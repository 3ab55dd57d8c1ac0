"""The decoder: opens the files of a model, runs its calls, and holds the cache of one batch of sequences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .cache import Cache
from .contract import Contract, File, compare, read_contract
from .sampling import Choose, constrain, likeliest
from .values import Array, Step, Value, as_float32, numpy_type

Tokens = Sequence[Sequence[int]]
"""Token ids, a list for each sequence of the batch."""
Trace = Callable[[Mapping[str, Any]], None]
"""Takes a call: its `file`, the tensors `fed` and `got` by name, and the `error` or None."""


Feeds = dict[str, ort.OrtValue]
"""Tensors by the names of inputs or outputs."""


class Decoder:
    """A model, and the cache of one batch of sequences.

    The cache goes from call to call as the runtime made it. A step that fails changes nothing: the sequences are those
    before it; after a prefill that fails there are none. A decoder is used by one thread at a time.

    Attributes:
        contract: What `contract.json` says.
        length: Tokens in the cache, padding counted.
        most: The most tokens that a sequence may have.
        trace: Called after each call of a session, for a record of what was fed and returned.
    """

    def __init__(
        self,
        folder: str | Path,
        contract: str | Path | Contract,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        options: ort.SessionOptions | None = None,
        capacity: int = 512,
    ) -> None:
        """Open the files of a model.

        Args:
            folder: Where they are.
            contract: `contract.json`, or what `read_contract` made of it.
            providers: Execution providers, the preferred one first.
            options: Session options, of threads for example.
            capacity: Room for tokens in a cache whose length the caller chooses.

        Raises:
            ContractError: the contract is of another schema or model.
            FileNotFoundError: a file is missing.
        """
        self.contract = contract if isinstance(contract, Contract) else read_contract(contract)
        calls = [call for phase in self.contract.calls.values() for call in phase]
        self._made = {id(call): {one.name: Value(one) for one in call.made} for call in calls}
        self._sessions = {
            file.file: _open(Path(folder), file, providers, options or ort.SessionOptions())
            for file in self.contract.files
        }
        self._limit = self.contract.context_limit
        self._capacity = capacity if self.contract.capacity_is_chosen else self._limit
        longest = self.contract.longest
        self.most = min(longest, capacity) if self.contract.capacity_is_chosen else longest
        self.trace: Trace | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew: no sequences, and nothing encoded."""
        self._encoded = Cache()
        """What every prefill begins with: the source, and what the encoder made of it."""
        self._source_mask: Array | None = None
        self._clear()

    def _clear(self, padding: Sequence[int] = ()) -> None:
        self.length = 0
        self._padding = tuple(padding)
        self._mask = self._source_mask
        self._cache = Cache(self._encoded.values)
        self._logits: ort.OrtValue | None = None

    def encode(self, source: Array, mask: Array | None = None) -> None:
        """Say what the sequences are about, and run the encoder where there is one.

        Args:
            source: In the type and the axes of `contract.source`.
            mask: int[batch, length], 0 for padding on the right; without it all of the source is read.

        Raises:
            ValueError: the model takes no source, or one of another shape.
        """
        due = self.contract.source
        if due is None:
            raise ValueError("this model takes no source")
        given: Array = np.ascontiguousarray(source, numpy_type(due.dtype))
        wrong = [dim for dim, size in zip(due.dims, given.shape, strict=False) if isinstance(dim, int) and dim != size]
        if given.ndim != len(due.dims) or not given.size or wrong:
            raise ValueError(
                f"the source has the axes {list(due.dims)} and is not empty; got shape {list(given.shape)}"
            )
        if given.dtype.kind in "iu" and given.min() < 0:  # a Gather counts it from the end
            raise ValueError("the ids of the source are 0 or more")
        self.reset()
        batch = 1 if due.batch_axis is None else given.shape[due.batch_axis]
        shape = (batch, given.shape[due.length_axis])
        if mask is not None and np.shape(mask) != shape:
            raise ValueError(f"the mask has shape {list(shape)}; got {list(np.shape(mask))}")
        if mask is not None and not due.masked:
            raise ValueError("this model takes no mask of its source")
        self._mask = self._source_mask = None if mask is None else np.asarray(mask)
        self._encoded.hold("source", given)
        self._run("encode", self._encoded, np.empty((batch, 0), np.int64))
        self._clear()

    def prefill(self, prompts: Tokens) -> Array:
        """Begin sequences with their prompts; the last logits of each, float32[batch, vocabulary].

        Shorter prompts are padded on the left where the contract has `pads`.

        Raises:
            ValueError: the prompts do not fit the model or each other, or there is no source yet.
        """
        tokens, padding = self._pad(prompts)
        if (source := self.contract.source) is not None:
            if "source" not in self._encoded.values:
                raise ValueError("encode() first")
            sources = self._encoded.values["source"].shape()[source.batch_axis or 0]
            if source.batch_axis is not None and sources != len(tokens):
                raise ValueError(f"there are {sources} sources: give a prompt for each; got {len(tokens)}")
        if self.contract.batch not in (None, len(tokens)):
            raise ValueError(f"this model takes a batch of {self.contract.batch}; got {len(tokens)} prompts")
        self._refuse_length(tokens.shape[1], padding)
        self._clear(padding)
        self._cache.fill(self.contract.zeros, self._sizes(tokens))
        try:
            return self._advance(tokens)
        except BaseException:
            self._clear()
            raise

    def step(self, tokens: Tokens) -> Array:
        """Continue each sequence with its new tokens; logits as `prefill` returns them.

        Raises:
            ValueError: there are no sequences yet, or the tokens do not fit them; nothing has changed.
        """
        if not self.length:
            raise ValueError("begin with prefill()")
        ids = self._check(tokens)
        if len(ids) != len(self._padding) or (ids.shape[1] != 1 and not self.contract.chunks):
            count = "tokens" if self.contract.chunks else "one token"
            raise ValueError(f"a step takes {count} of each of {len(self._padding)} sequences")
        self._refuse_length(self.length + ids.shape[1], self._padding)
        return self._advance(ids)

    @property
    def logits(self) -> Array:
        """The logits of all new tokens of the last call, float32[batch, new, vocabulary].

        A graph that returns those of its last token alone has one for `new`.
        """
        if self._logits is None:
            raise ValueError("begin with prefill()")
        made, batch = as_float32(self._logits), len(self._padding)
        return made if made.ndim == 3 and len(made) == batch else made.reshape(batch, 1, -1)

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence. At least one token must stay.

        Raises:
            ValueError: the cache of this model cannot go back, or not so far.
        """
        shortest = self.length - max(self._padding, default=0)
        rewinds = self.contract.rewinds and self.length <= self._limit  # what was written over is gone
        if not rewinds or not 0 <= count < shortest:
            reason = f"the shortest sequence has {shortest}" if rewinds else "this cache cannot go back"
            raise ValueError(f"cannot forget {count} tokens: {reason}")
        if count:
            self._cache.cut(self.contract.cut, self.length - count)
        self.length -= count

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.

        Raises:
            ValueError: the sequences of this model cannot change places, or there is no such row.
        """
        if not self.contract.reorders:
            raise ValueError("the sequences of this model cannot change places")
        if not self.length or not rows or not all(0 <= row < len(self._padding) for row in rows):
            raise ValueError(f"rows {list(rows)} of {len(self._padding)} sequences cannot be taken")
        self._cache.reorder(self.contract.rows, rows)
        self._padding = tuple(self._padding[row] for row in rows)
        if self._mask is not None:
            self._mask = self._mask[list(rows)]

    def stream(
        self,
        prompts: Tokens,
        most: int = 20,
        stop: Sequence[int] | None = None,
        choose: Choose | None = None,
        continued: bool = False,
    ) -> Iterator[list[int | None]]:
        """Decode step by step: the new token of each sequence, None for one that has ended.

        Close the iterator, or leave it, to end early; the sequences can then be continued with `step`.

        Args:
            prompts: What each sequence begins with.
            most: The most new tokens of a sequence.
            stop: Tokens that end a sequence, and are not returned; None for those of the contract.
            choose: Picks a token; None takes the likeliest. `Sampling(...).chooser()` draws.
            continued: Go on from the sequences as they are: `prompts` are their new tokens. The last tokens of an
                earlier turn are not in the cache yet: they come first.
        """
        if most < 1:
            raise ValueError("most is 1 or more")
        ends = frozenset(self.contract.generation.end if stop is None else stop)
        sequences = [list(prompt) for prompt in prompts]
        begun, running = [len(one) for one in sequences], [True] * len(sequences)
        logits = self.step(prompts) if continued else self.prefill(prompts)
        for count in range(1, most + 1):
            chosen = [
                (choose or likeliest)(constrain(row, one, first, self.contract.generation), one)
                for row, one, first in zip(logits, sequences, begun, strict=True)
            ]
            running = [goes_on and token not in ends for goes_on, token in zip(running, chosen, strict=True)]
            if not any(running):
                return
            for one, token in zip(sequences, chosen, strict=True):
                one.append(token)
            yield [token if goes_on else None for goes_on, token in zip(running, chosen, strict=True)]
            if count == most or self.length >= self.most:
                return
            logits = self.step([[token] for token in chosen])

    def generate(
        self,
        prompts: Tokens,
        most: int = 20,
        stop: Sequence[int] | None = None,
        choose: Choose | None = None,
        continued: bool = False,
    ) -> list[list[int]]:
        """The new tokens of each sequence that `stream` yields."""
        made: list[list[int]] = [[] for _ in prompts]
        for tokens in self.stream(prompts, most, stop, choose, continued):
            for row, token in zip(made, tokens, strict=True):
                row.extend([] if token is None else [token])
        return made

    def _advance(self, tokens: Array) -> Array:
        """Run the calls on new tokens, int64[batch, new], and take over what they return of the cache."""
        count = tokens.shape[1]
        alone = self.contract.one_token or self.length + count > self._limit  # in a ring, one is written over another
        for part in map(np.ascontiguousarray, np.split(tokens, count, axis=1) if alone else [tokens]):
            self._logits = self._run("decode" if self.length else "prefill", self._cache, part)
            self.length += part.shape[1]
        return self.logits[:, -1]

    def _sizes(self, tokens: Array) -> dict[str, int]:
        """What axes and terms count in a call."""
        batch, new = tokens.shape
        sizes = {"one": 1, "batch": batch, "new": new, "past": self.length, "total": self.length + new, "padding": 0}
        return sizes | {"batch_heads": batch * self.contract.heads, "capacity": self._capacity}

    def _run(self, phase: str, cache: Cache, tokens: Array) -> ort.OrtValue | None:
        """Run the calls of a phase; returns the logits of the last one, where it has some."""
        padding = self._padding if any(self._padding) else ()
        step = Step({"tokens": tokens}, self._sizes(tokens), padding)
        if self._mask is not None:
            step.rows["mask"] = self._mask
        logits = None
        for call in self.contract.calls[phase]:
            for name, of in call.sizes.items():
                step.sizes[name] = cache.values[of.value].shape()[of.axis]
            feeds = {name: cache.values[value] for name, value in call.values.items()}
            feeds |= {name: value.make(step) for name, value in self._made[id(call)].items()}
            outputs = self._run_session(call.file, feeds, call.outputs)
            cache.take(call.takes, outputs, self.length)
            logits = outputs.get(call.logits or "")
        return logits

    def _run_session(self, file: str, feeds: Feeds, names: Sequence[str]) -> Feeds:
        outputs: Feeds = {}
        error = None
        try:
            outputs = dict(zip(names, self._sessions[file].run_with_ort_values(names, feeds), strict=True))
        except Exception as raised:
            error = str(raised)
            raise
        finally:
            if self.trace is not None:
                self.trace({"file": file, "fed": feeds, "got": outputs, "error": error})
        return outputs

    def _refuse_length(self, total: int, padding: Sequence[int]) -> None:
        most = min(self.most, self._limit) if any(padding) else self.most  # a ring has no place for padding
        if total > most:
            raise ValueError(f"a sequence has at most {most} tokens here")

    def _pad(self, prompts: Tokens) -> tuple[Array, list[int]]:
        longest = max(map(len, prompts), default=0)
        padding = [longest - len(prompt) for prompt in prompts]
        if not longest or not all(map(len, prompts)):
            raise ValueError("every sequence begins with at least one token")
        if any(padding) and not self.contract.pads:
            raise ValueError("the prompts of a batch must have the same length: padding is not right with this model")
        rows = [[0] * padded + list(prompt) for padded, prompt in zip(padding, prompts, strict=True)]
        return self._check(rows), padding

    def _check(self, rows: Tokens) -> Array:
        """Token ids, int64[batch, new].

        Raises:
            ValueError: the rows have unequal lengths, or hold something else than ids that the model takes.
        """
        if not len(rows) or not len(rows[0]) or any(len(row) != len(rows[0]) for row in rows):
            raise ValueError("give token ids, as many for each sequence")
        ids, vocabulary = np.array(rows), self.contract.vocabulary
        tokens = [token for row in rows for token in row]  # of one token, numpy takes several times as long
        if ids.dtype.kind not in "iu" or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise ValueError(f"token ids are whole numbers, 0 to {vocabulary - 1}; got {tokens}")
        for token in self.contract.placeholders.intersection(tokens):
            raise ValueError(f"token {token} stands for an image or audio, which this program does not take")
        return ids.astype(np.int64, copy=False)


def _open(folder: Path, file: File, providers: Sequence[str], options: ort.SessionOptions) -> ort.InferenceSession:
    path = folder / file.file
    if not path.is_file():
        raise FileNotFoundError(f"there is no {file.file} in {folder}")
    if unknown := [one for one in providers if one not in ort.get_available_providers()]:
        known = ", ".join(ort.get_available_providers())
        raise ValueError(f"there is no provider {unknown[0]!r} here; there is {known}")
    session = ort.InferenceSession(str(path), options, providers=list(providers))
    compare(file, session)
    return session
