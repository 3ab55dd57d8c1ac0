"""What the side-car configs say: sizes that the graph leaves open, names of ports, limits.

Configs hold anything, so nothing in them is believed unchecked.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from kvdoctor.contract import Port, Role, SlotKind
from kvdoctor.dialects import SlotName, SlotRule, axes
from kvdoctor.graph import Declared

CONTEXT_KEYS = (
    "max_target_positions",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_decoder_position_embeddings",
)
ENCODER_LENGTH_KEYS = ("max_source_positions", "max_encoder_position_embeddings")
MOST_COUNTED = 2**31 - 1

GENAI_SLOTS: tuple[tuple[str, str, SlotKind, str, str], ...] = (
    ("past_key_names", "present_key_names", "self-attention", "key", "BNSH"),
    ("past_value_names", "present_value_names", "self-attention", "value", "BNSH"),
    ("past_names", "present_names", "self-attention", "", "2BNSH"),
    ("cross_past_key_names", "cross_present_key_names", "cross-attention", "key", "BNEH"),
    ("cross_past_value_names", "cross_present_value_names", "cross-attention", "value", "BNEH"),
    ("past_conv_names", "present_conv_names", "conv-state", "", "BCZ"),
    ("past_recurrent_names", "present_recurrent_names", "recurrent-state", "", ""),
)
"""Entries of genai_config.json: past template, present template, kind, part, axes. Source: src/config.h."""

GENAI_ROLES: dict[str, tuple[Role, tuple[str, ...]]] = {
    "input_ids": ("token_ids", ("BQ",)),
    "inputs_embeds": ("embeddings", ("BQD",)),
    "attention_mask": ("attention_mask", ("BT",)),
    "position_ids": ("position_ids", ("BQ", "1BQ")),
    "encoder_hidden_states": ("encoder_states", ("BED",)),
    "past_sequence_length": ("past_length", ("1", "")),
    "total_sequence_length": ("total_length", ("1", "")),
    "current_sequence_length": ("total_length", ("1", "")),
    "seqlens_k": ("last_index", ("B",)),
}


@dataclass(frozen=True)
class Configured:
    """What is known beside the graphs: `numbers` are sizes by axis, and `heads`; `family` is who wrote the config."""

    numbers: dict[str, int] = field(default_factory=dict)
    family: str | None = None
    decoder: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)

    def slots(self, names: Iterable[str]) -> Iterator[SlotName]:
        """The past inputs that genai_config.json names by template."""
        given, made, encoded = (
            _strings(part)
            for part in (self.decoder.get("inputs"), self.decoder.get("outputs"), self.encoder.get("outputs"))
        )
        names = list(names)
        for past_key, present_key, kind, part, order in GENAI_SLOTS:
            template = given.get(past_key)
            if template is None or "%d" not in template:
                continue
            before, _, after = template.partition("%d")
            present = _braced(made.get(present_key or ""))
            pattern = re.escape(before) + r"(?P<layer>[0-9]{1,5})" + re.escape(after)
            rule = SlotRule(
                pattern,
                present,
                kind,
                order,
                filled_by=_braced(encoded.get(present_key or "")),
                part="key-value" if past_key == "past_names" else None,
            )
            for name in names:
                found = rule.match(name)
                if found is not None:
                    part_of: Any = part or found.part
                    yield SlotName(name, rule, found.layer, part_of, found.present, found.filled_by)

    def role(self, port: Declared) -> Port | None:
        """The role of an input that genai_config.json names."""
        for key, name in _strings(self.decoder.get("inputs")).items():
            if name == port.name and key in GENAI_ROLES:
                role, orders = GENAI_ROLES[key]
                order = next((o for o in orders if port.shape is not None and len(o) == len(port.shape)), None)
                return Port(port.name, port.dtype, port.shape, role, axes(order)) if order is not None else None
        return None

    def output(self, port: Declared) -> Port | None:
        """The logits, where genai_config.json names them."""
        if _strings(self.decoder.get("outputs")).get("logits") == port.name and len(port.shape or ()) == 3:
            return Port(port.name, port.dtype, port.shape, "logits", axes("BQV"))
        return None


def configured(config: dict[str, Any], genai: dict[str, Any]) -> Configured:
    """Read what both configs say of the decoder."""
    model = genai.get("model")
    model = model if isinstance(model, dict) else {}
    decoder, encoder = _part(model, "decoder"), _part(model, "encoder")
    part = decoder_config(config)
    heads = _first_count(part, ("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads"))
    hidden = _first_count(part, ("hidden_size", "n_embd", "d_model"))
    head_dim = _first_count(decoder, ("head_size",)) or _first_count(part, ("head_dim", "d_kv"))
    if head_dim is None and heads and hidden and hidden % heads == 0:
        head_dim = hidden // heads
    kv_heads = _first_count(decoder, ("num_key_value_heads",)) or _first_count(part, ("num_key_value_heads",))
    numbers = {"head_dim": head_dim, "kv_heads": kv_heads, "heads": heads}
    return Configured(
        numbers={name: number for name, number in numbers.items() if number is not None},
        family="genai" if decoder else None,
        decoder=decoder,
        encoder=encoder,
    )


DECODER_PARTS = ("decoder", "text_config")
"""Where a config.json that describes several models keeps that of its decoder."""


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the decoder: nested for vision and speech encoder-decoders."""
    for key in DECODER_PARTS:
        if isinstance(config.get(key), dict):
            return dict(config[key])
    return config


def context_limit(config: dict[str, Any], genai: dict[str, Any] | None = None) -> int | None:
    """Tokens that a config declares usable. T5 has relative positions and declares none."""
    model = (genai or {}).get("model")
    if isinstance(model, dict) and is_count(model.get("context_length")):
        return int(model["context_length"])
    return _first_count(decoder_config(config), CONTEXT_KEYS)


def encoder_length(config: dict[str, Any]) -> int | None:
    """Encoder states that a config declares: the most that the encoder makes, of Whisper those it always makes.

    `max_position_embeddings` of an encoder-decoder speaks of the decoder; of a nested encoder it is its own.
    """
    declared = _first_count(config, ENCODER_LENGTH_KEYS)
    return declared or _first_count(_part(config, "encoder"), (*ENCODER_LENGTH_KEYS, "max_position_embeddings"))


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from a config can be a number of tokens or words: configs hold anything."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNTED


def _part(model: dict[str, Any], name: str) -> dict[str, Any]:
    part = model.get(name)
    return dict(part) if isinstance(part, dict) else {}


def _first_count(part: dict[str, Any], keys: Iterable[str]) -> int | None:
    return next((part[key] for key in keys if is_count(part.get(key))), None)


def _strings(part: object) -> dict[str, str]:
    return {k: v for k, v in part.items() if isinstance(v, str)} if isinstance(part, dict) else {}


def _braced(template: str | None) -> str | None:
    """A `%d` template of genai as one of ours."""
    if template is None or "%d" not in template:
        return None
    return template.replace("{", "{{").replace("}", "}}").replace("%d", "{layer}", 1)
