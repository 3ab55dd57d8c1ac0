"""A decode loop by hand over the files of a design, and how far two runs of it lie apart."""

from itertools import accumulate
from typing import Any

import numpy as np
import onnx
import onnxruntime

from .designs import NEVER, Design
from .sheet import Array
from .strikes import Walk

ENOUGH = 1e-3
"""In standard deviations of the logits: what differs by less is no fault."""


def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Loop:
    """The sessions of a design's files, and the loop that its cache contract asks for."""

    def __init__(self, design: Design, files: dict[str, onnx.ModelProto]) -> None:
        self.design = design
        self.sessions = {name.removesuffix(".onnx"): session(proto) for name, proto in files.items()}

    def _call(self, name: str, offered: dict[str, Array]) -> dict[str, Array]:
        run = self.sessions[name]
        feeds = {given.name: offered[given.name] for given in run.get_inputs()}
        outputs: list[Any] = run.run(None, feeds)
        return dict(zip((output.name for output in run.get_outputs()), outputs, strict=True))

    def _encoded(self, lengths: tuple[int, ...], rows: int, first_row: int) -> dict[str, Array]:
        sizes = [lengths[row % len(lengths)] for row in range(rows)]
        ids = np.array([np.random.default_rng(first_row + row).integers(10, 900, max(sizes)) for row in range(rows)])
        mask = (np.arange(max(sizes)) < np.array(sizes)[:, None]).astype(np.int64)
        out = self._call("encoder_model", {"input_ids": ids, "attention_mask": mask})
        found = {**out, "encoder_attention_mask": mask}
        if "last_hidden_state" in out:
            found["encoder_hidden_states"] = out["last_hidden_state"]
        return found

    def _first(self, rows: int) -> dict[str, Array]:
        sizes = {"batch_size": rows, "past_length": 0, "encoder_length": 1}
        found = {}
        for slot in self.design.slots:
            shape = [size if isinstance(size, int) else sizes[size] for size in slot.shape("past_length")]
            found[slot.past] = np.zeros(shape, np.float32)
        return found

    def _placed(self, keep: Array, begin: int, end: int) -> dict[str, Array]:
        """Mask, positions and places of the tokens from begin to end: keep is int64[b, end]."""
        design, new = self.design, np.arange(begin, end)
        places = np.maximum(np.cumsum(keep, 1) - 1, 0)
        seen = (np.arange(end)[None] <= new[:, None])[None, None] & (keep[:, None, None] == 1)
        mask = keep if design.mask == "mask2d" else np.where(seen, 0, NEVER).astype(np.float32)
        placed = {"attention_mask": mask, "position_ids": places[:, begin:end], "slot": new}
        return {design.called(role): value for role, value in placed.items()}

    def walk_row(self, ids: Array, row: int, walk: Walk) -> Array:
        """One row of a walk alone, in one call, with the encoder states of that row: float[n, vocabulary]."""
        alone = Walk((len(ids),), encoder=(walk.encoder[row % len(walk.encoder)],))
        return np.asarray(self.walk(ids[None], alone, first_row=row)[0])

    def walk(self, tokens: Array, walk: Walk, first_row: int = 0) -> Array:
        """The logits of int64[b, n] tokens: float[b, n, vocabulary]."""
        design, rows = self.design, len(tokens)
        keep = np.ones(tokens.shape, np.int64)
        for row, pad in enumerate(walk.pads):
            keep[row, :pad] = 0
        state = self._first(rows)
        if design.encoder:
            state |= self._encoded(walk.encoder, rows, first_row)
        logits, ends = [], list(accumulate(walk.chunks))
        for begin, end in zip([0, *ends], ends, strict=False):
            fed = {design.called("input_ids"): tokens[:, begin:end], **self._placed(keep[:, :end], begin, end), **state}
            fed["use_cache_branch"] = np.array([begin > 0])
            fed["token_type_ids"] = np.zeros_like(tokens[:, begin:end])
            pair = "decoder_with_past_model" if begin else "decoder_model"
            (name,) = [pair] if design.files == "pair" else [n for n in self.sessions if n != "encoder_model"]
            out = self._call(name, fed)
            for slot in design.slots:
                if slot.present in out:
                    given = out[slot.present]
                    if design.layout == "delta" and not slot.cross:
                        given = np.concatenate([state[slot.past], given], slot.order.index("p"))
                    state[slot.past] = given
            logits.append(out[design.called("logits")])
        return np.concatenate(logits, 1)


def tokens_of(walk: Walk, vocabulary: int = 1000, seed: int = 7) -> Array:
    """int64[rows, length]."""
    return np.random.default_rng(seed).integers(10, vocabulary - 10, (walk.rows, walk.length))


def spreads(made: Array, right: Array) -> Array:
    """How far logits lie apart, for each row and token, in standard deviations of the logits: float[b, n]."""
    return np.asarray(np.nan_to_num(np.abs(made - right), nan=np.inf).max(-1) / right.std())


def reference(loop: Loop, tokens: Array, walk: Walk) -> Array:
    """The logits of each row alone, in one call without a cache; zeros in front of a padded row: float[b, n, v]."""
    rows = []
    for row, ids in enumerate(tokens):
        pad = walk.pads[row] if row < len(walk.pads) else 0
        alone = loop.walk_row(ids[pad:], row, walk)
        rows.append(np.pad(alone, ((pad, 0), (0, 0))))
    return np.array(rows)


def differences(loop: Loop, clean: Loop, walk: Walk) -> Array:
    """A walk through a loop beside the truth: float[b, n], zero where there is padding."""
    tokens = tokens_of(walk, clean.design.vocabulary)
    right = reference(clean, tokens, walk)
    made = loop.walk(tokens, walk)
    for row, pad in enumerate(walk.pads):
        made[row, :pad] = 0
    return spreads(made, right)


def walks_of(design: Design) -> list[Walk]:
    """Walks that a right decoder must pass: 100 steps, batches, chunks of 1, 2 and 5, padding, encoder lengths."""
    single = (1,) * 20
    walks = [Walk((10, *(1,) * 100)), Walk(single), Walk((7, *single), rows=3), Walk((5, *(2,) * 20))]
    walks += [Walk((5, *(5,) * 6), rows=3), Walk((30, 1, 1, 30, 2, 7))]
    if design.padded:
        walks += [Walk((9, 1, 1, 2, 5, 1), rows=3, pads=(0, 4, 2)), Walk((4, *single), rows=3, pads=(3, 0, 2))]
    if design.encoder:
        walks.append(Walk((5, 1, 1, 3), rows=3, encoder=(9, 4, 6)))
    return walks
