"""The truth about a decoder, on ONNX Runtime alone: each use against each row alone in one call of the right model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from .decoder import FLAG, Decoder
from .design import ENCODER, Port, Slot

Array = NDArray[Any]
FAILED = 1e3
"""The harm of a use that fails to run."""


@dataclass(frozen=True)
class Use:
    """How a caller splits tokens into calls: `sizes` of the calls, and the rows of the batch."""

    name: str
    sizes: tuple[int, ...]
    rows: int = 1
    padded: bool = False


USES = (
    Use("plain", (5, 1, 1, 1, 1)),
    Use("one", (1, 1, 1, 1, 1, 1)),
    Use("long", (4, *([1] * 24))),
    Use("longprefill", (24, 1, 1, 1)),
    Use("batch", (5, 1, 1, 1), 3),
    Use("chunk", (5, 3, 3, 3)),
    Use("batchchunk", (4, 3, 3), 3),
    Use("leftpad", (6, 1, 1, 1), 3, padded=True),
    Use("leftpadchunk", (6, 3, 3), 3, padded=True),
)


def uses_of(decoder: Decoder) -> list[Use]:
    """The uses that the design promises."""
    design = decoder.design
    padded = (
        design.mask != "none"
        and (design.store == "grow" or (design.store == "static" and design.counted != "position_ids"))
        and (design.positions != "learned" or design.counted in ("position_ids", "mask"))
        and set(design.mixers) <= {"attention", "sink", "latent", "differential", "quantized", "memory"}
        and not {"prefix", "bigram"} & set(design.extras)
    )
    found = [use for use in USES if padded or not use.padded]
    if design.one_token:
        found = [use for use in found if "chunk" not in use.name and use.name != "longprefill"]
        found = [Use(use.name, (1,) * sum(use.sizes), use.rows, use.padded) for use in found]
    if design.batch_one or "rank_one" in design.extras:
        found = [use for use in found if use.rows == 1]
    return found


@dataclass
class Call:
    """One call: tokens [b, s], the past, and the pads in front of each row."""

    ids: Array
    past: int
    pads: Array
    seed: int
    drafted: Array | None = None


class Runner:
    """Sessions of a decoder, and the loop that its contract asks for."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        self.sessions = {
            name: onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            for name, model in decoder.files.items()
        }
        random = np.random.default_rng(7)
        width = decoder.design.width
        self.table = random.standard_normal((decoder.design.vocab, width)).astype(np.float32)
        self.encoder = random.standard_normal((3, ENCODER, width)).astype(np.float32)
        self.tokens = random.integers(1, decoder.design.vocab, (3, 40))

    def loop(self, rows: list[int], sizes: tuple[int, ...], pads: Array | None = None) -> Array:
        """Logits [b, tokens, v] of all tokens, or of the last of each call where the model returns no others."""
        pads = np.zeros(len(rows), int) if pads is None else pads
        state: dict[str, Array] = {}
        past, found = 0, []
        for size in sizes:
            places = np.arange(past, past + size)[None] - pads[:, None]
            ids = np.where(places >= 0, self.tokens[rows][np.arange(len(rows))[:, None], np.maximum(places, 0)], 0)
            name = self.decoder.first if past == 0 else self.decoder.later
            found.append(self._call(name, Call(ids, past, pads, 0), rows, state))
            past += size
        return np.concatenate(found, axis=1)

    def _call(self, name: str, call: Call, rows: list[int], state: dict[str, Array]) -> Array:
        session, contract = self.sessions[name], self.decoder.contract
        wanted = {each.name for each in session.get_inputs()}
        feed = {port.name: self._value(port, call, rows) for port in contract.ports if port.name in wanted}
        for number, slot in enumerate(contract.slots):
            if slot.past in wanted:
                if slot.past not in state:
                    state[slot.past] = self._first(slot, len(rows), number, rows)
                feed[slot.past] = state[slot.past]
        names = [each.name for each in session.get_outputs()]
        found = dict(zip(names, session.run(None, feed), strict=True))
        for slot in contract.slots:
            if slot.present in found:
                new = found[slot.present]
                state[slot.past] = np.concatenate([state[slot.past], new], slot.axis) if slot.growth == "delta" else new
        return as_logits(found[contract.logits[0]], contract.logits[1], len(rows))

    def _first(self, slot: Slot, batch: int, number: int, rows: list[int]) -> Array:
        dtype = helper.tensor_dtype_to_np_dtype(slot.kind)
        sizes = [_size(size, {"batch": batch, "past": 0, "held": 0, "encoder": ENCODER}) for size in slot.shape]
        if slot.growth == "held" and self.decoder.design.files == "one":
            full = [_size(size, {"batch": 3, "encoder": ENCODER}) for size in slot.shape]
            axis = next(place for place, size in enumerate(slot.shape) if "batch" in str(size))
            return np.take(np.random.default_rng(number).standard_normal(full), rows, axis).astype(dtype)
        return np.zeros(sizes, dtype)

    def _value(self, port: Port, call: Call, rows: list[int]) -> Array:
        dtype = helper.tensor_dtype_to_np_dtype(port.kind)
        batch, new = call.ids.shape
        total = call.past + new
        if (made := ROLES.get(port.role)) is not None:
            value = made(call)
        elif port.role == "attention_mask":
            value = self._mask(port, call)
        elif port.role == "encoder_hidden_states":
            value = self.encoder[rows]
        elif port.role == "source_ids":
            value = self.tokens[rows, -ENCODER:]
        elif port.role in ("inputs_embeds", "hidden_states"):
            value = self.table[(call.ids * (1 if port.role == "inputs_embeds" else 7)) % len(self.table)]
        elif port.role == "codes":
            value = np.stack([call.ids, call.ids * 3 % len(self.table), call.ids * 5 % len(self.table)], 2)
        else:
            seed = np.random.default_rng(len(port.name))
            sizes = [_size(size, {"batch": 3, "new": new, "total": total, "encoder": ENCODER}) for size in port.shape]
            value = seed.standard_normal(sizes) * 0.3
            value = value[rows] if port.shape and "batch" in str(port.shape[0]) else value
        sizes = [_size(s, {"batch": batch, "new": new, "total": total, "encoder": ENCODER}) for s in port.shape]
        return np.array(np.broadcast_to(np.asarray(value), sizes), dtype)

    def _mask(self, port: Port, call: Call) -> Array:
        new = call.ids.shape[1]
        sense = self.decoder.design.mask.partition("_")[2]
        length = port.shape[-1] if isinstance(port.shape[-1], int) else call.past + new
        keys = np.arange(length)[None]
        keep: Array = (keys >= call.pads[:, None]) & (keys < call.past + new)
        if sense in ("row", "4d"):
            query = call.past + np.arange(new)
            keep = keep[:, None] & (keys[None] <= query[None, :, None])
            keep = keep if sense == "row" else keep[:, None]
        if self.decoder.design.mask.startswith("add"):
            return np.asarray(np.where(keep, 0.0, np.finfo(np.float32).min))
        return np.logical_not(keep) if sense == "hide" else keep


def _positions(call: Call) -> Array:
    return np.maximum(call.past + np.arange(call.ids.shape[1])[None] - call.pads[:, None], 0)


ROLES: dict[str, Any] = {
    "input_ids": lambda call: call.ids,
    "tokens_first": lambda call: call.ids.T,
    "tokens_flat": lambda call: call.ids[0],
    "position_ids": _positions,
    "cache_position": lambda call: call.past + np.arange(call.ids.shape[1]),
    "past_length": lambda call: call.past,
    "past_lengths": lambda call: call.past,
    "total_length": lambda call: call.past + call.ids.shape[1],
    "lengths": lambda call: call.past + call.ids.shape[1],
    "lasts": lambda call: call.past + call.ids.shape[1] - 1,
    "beam_idx": lambda call: np.arange(len(call.ids)),
    "token_type_ids": lambda call: np.zeros_like(call.ids),
    "speaker_id": lambda _: 1,
    "training": lambda _: False,
    "temperature": lambda _: 1.0,
    "prefix_length": lambda _: 0,
    "num_logits_to_keep": lambda _: 0,
    "encoder_attention_mask": lambda _: 1,
    FLAG: lambda call: call.past > 0,
}


def _size(size: str | int, words: dict[str, int]) -> int:
    if isinstance(size, int):
        return size
    word, _, factor = size.partition("_x_")
    return words[word] * int(factor or 1)


def as_logits(value: Array, form: str, rows: int) -> Array:
    """[b, tokens, ...] whatever the form."""
    if form == "bvs":
        return np.moveaxis(value, 1, 2)
    if form == "sbv":
        return np.moveaxis(value, 0, 1)
    if form == "flat":
        return value.reshape(rows, -1, value.shape[-1])
    if form == "last":
        return value[:, None]
    return value


# The truth


@dataclass
class Truth:
    """Harm of each use, in standard deviations of the logits: against the right model, and the model's own one call."""

    harm: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    error: str = ""


ONLY_LAST = ("last", "last_one", "argmax_last")


class Reference:
    """Each row alone in one call, which a model of one token at a time answers token by token."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.form = runner, runner.decoder.contract.logits[1]
        self.made: dict[tuple[int, int], Array] = {}

    def row(self, row: int, length: int, ends: list[int]) -> Array:
        """Logits of the tokens that calls ending at `ends` return."""
        runner = self.runner
        if runner.decoder.design.one_token:
            return np.asarray(runner.loop([row], (1,) * length)[0])
        if self.form in ONLY_LAST:
            return np.stack([self._once(row, end)[-1] for end in ends])
        return self._once(row, length)

    def _once(self, row: int, length: int) -> Array:
        if (row, length) not in self.made:
            self.made[row, length] = self.runner.loop([row], (length,))[0]
        return self.made[row, length]


def compare(runner: Runner, reference: Reference, use: Use) -> float:
    """The largest difference in standard deviations; 1 for any other token where tokens are returned."""
    rows = list(range(use.rows))
    pads = np.array([0, 2, 3]) if use.padded else np.zeros(use.rows, int)
    try:
        found = runner.loop(rows, use.sizes, pads if use.padded else None)
    except Exception:
        return FAILED
    ends, worst = list(np.cumsum(use.sizes)), 0.0
    for row in rows:
        last = reference.form in ONLY_LAST and not runner.decoder.design.one_token
        wanted = reference.row(row, ends[-1] - pads[row], [end - pads[row] for end in ends])
        mine = found[row] if last else found[row][pads[row] :]
        if "argmax" in reference.form:
            worst = max(worst, float((mine != wanted).any()))
        else:
            if not np.isfinite(mine).all():
                return FAILED
            worst = max(worst, float(np.abs(mine - wanted).max() / max(wanted.std(), 1e-9)))
    return worst


def probe(decoder: Decoder, right: Decoder) -> Truth:
    """What each use of a decoder does."""
    truth = Truth()
    decoder.contract = right.contract  # a caller knows what was meant
    try:
        runner = Runner(decoder)
        mine, true = Reference(runner), Reference(Runner(right))
        for use in uses_of(right):
            truth.harm[use.name] = compare(runner, true, use)
            truth.own[use.name] = compare(runner, mine, use)
    except Exception as error:
        truth.error = str(error)
    return truth
