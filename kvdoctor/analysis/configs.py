"""What the side-car configs say: sizes that the graph leaves open, names of ports, limits, attention windows.

Configs may have any content, so every value is checked before it is used.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, TypeGuard

from kvdoctor.analysis.dialects.dialect import SlotName, SlotRule, parse_axes
from kvdoctor.contract import PhaseName, Port, Role, SlotKind
from kvdoctor.model.view import Declared
from kvdoctor.records import record

CONTEXT_KEYS = (
    "max_target_positions",
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_decoder_position_embeddings",
)
ENCODER_LENGTH_KEYS = ("max_source_positions", "max_encoder_position_embeddings")
MOST_COUNTED = 2**31 - 1

MOST_CODEBOOKS = 64
"""Twice as many as EnCodec has, the codec with the most codebooks of those that audio decoders are written for."""

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


@record(slots=False)
class SideCars:
    """The configs next to a model, each empty where it is missing.

    `inference` is inference_metadata.yaml. `problems` says which files cannot be read, and why.
    """

    config: dict[str, Any] = field(default_factory=dict)
    genai: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    processor: dict[str, Any] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    inference: dict[str, Any] = field(default_factory=dict)

    def part(self, kind: PhaseName) -> dict[str, Any]:
        """The part of config.json on an encoder of images or audio."""
        return read_part(self.config, f"{kind}_config")

    def first_count(self, keys: Iterable[str]) -> tuple[int, str] | None:
        """The first number under some keys of processor_config.json or config.json, and where it stands."""
        for key in keys:
            for file, content in (("processor_config.json", self.processor), ("config.json", self.config)):
                if is_count(content.get(key)):
                    return content[key], f"{file}, {key}"
        return None


@record(slots=False)
class ConfigFacts:
    """Facts about a decoder from its configs: `numbers` are sizes by axis, and `heads`; `family` is the config's tool.

    `decoder` and `encoder` are the parts of genai_config.json.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    family: str | None = None
    decoder: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)

    def find_slots(self, names: Iterable[str]) -> Iterator[SlotName]:
        """Find the past inputs that genai_config.json names by template."""
        given, returned, encoded = (
            read_strings(part)
            for part in (self.decoder.get("inputs"), self.decoder.get("outputs"), self.encoder.get("outputs"))
        )
        names = list(names)
        for past_key, present_key, kind, part, order in GENAI_SLOTS:
            template = given.get(past_key)
            if template is None or "%d" not in template:
                continue
            before, _, after = template.partition("%d")
            present = _to_braces(returned.get(present_key or ""))
            pattern = re.escape(before) + r"(?P<layer>[0-9]{1,5})" + re.escape(after)
            rule = SlotRule(
                pattern,
                present,
                kind,
                order,
                filled_by=_to_braces(encoded.get(present_key or "")),
                part="key-value" if past_key == "past_names" else None,
            )
            for name in names:
                found = rule.match(name)
                if found is not None:
                    part_of: Any = part or found.part
                    yield SlotName(name, rule, found.layer, part_of, found.present, found.filled_by)

    def find_role(self, port: Declared) -> Port | None:
        """Find the role of an input that genai_config.json names."""
        for key, name in read_strings(self.decoder.get("inputs")).items():
            if name == port.name and key in GENAI_ROLES:
                role, orders = GENAI_ROLES[key]
                order = next((o for o in orders if port.shape is not None and len(o) == len(port.shape)), None)
                return Port(port.name, port.dtype, port.shape, role, parse_axes(order)) if order is not None else None
        return None

    def find_logits(self, port: Declared) -> Port | None:
        """The output as logits, where genai_config.json names it so."""
        if read_strings(self.decoder.get("outputs")).get("logits") == port.name and len(port.shape or ()) == 3:
            return Port(port.name, port.dtype, port.shape, "logits", parse_axes("BQV"))
        return None


def read_config_facts(config: dict[str, Any], genai: dict[str, Any]) -> ConfigFacts:
    """Read what config.json and genai_config.json say about the decoder."""
    model = read_part(genai, "model")
    decoder, encoder = read_part(model, "decoder"), read_part(model, "encoder")
    part = decoder_config(config)
    heads = _first_count(part, ("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads"))
    hidden = _first_count(part, ("hidden_size", "n_embd", "d_model"))
    head_dim = _first_count(decoder, ("head_size",)) or _first_count(part, ("head_dim", "d_kv"))
    if head_dim is None and heads and hidden and hidden % heads == 0:
        head_dim = hidden // heads
    kv_heads = _first_count(decoder, ("num_key_value_heads",)) or _first_count(part, ("num_key_value_heads",))
    numbers = {"head_dim": head_dim, "kv_heads": kv_heads, "heads": heads}
    return ConfigFacts(
        numbers={name: number for name, number in numbers.items() if number is not None},
        family="genai" if decoder else None,
        decoder=decoder,
        encoder=encoder,
    )


DECODER_PARTS = ("decoder", "text_config")
"""Keys under which a config.json of several models has the config of its decoder."""


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the decoder; it is nested for vision and speech encoder-decoders."""
    for key in DECODER_PARTS:
        if isinstance(config.get(key), dict):
            return dict(config[key])
    return config


def context_limit(config: dict[str, Any], genai: dict[str, Any] | None = None) -> int | None:
    """The number of tokens that a config declares usable. T5 has relative positions and declares none."""
    declared = _first_count(read_part(genai or {}, "model"), ("context_length",))
    return declared or _first_count(decoder_config(config), CONTEXT_KEYS)


POSITION_ROWS = 3
"""Time, height and width of a token among those of an image."""


def count_position_rows(config: dict[str, Any]) -> int:
    """The rows of positions that a decoder of images takes: one for each part of the rotary embedding."""
    part = decoder_config(config)
    for key in ("rope_parameters", "rope_scaling"):
        rotary = part.get(key)
        sections = rotary.get("mrope_section") if isinstance(rotary, dict) else None
        if isinstance(sections, list) and 0 < len(sections) <= POSITION_ROWS + 1:
            return len(sections)
    return POSITION_ROWS


def embeddings_width(config: dict[str, Any]) -> int | None:
    """The width of the decoder's embeddings that a config declares."""
    return _first_count(decoder_config(config), ("hidden_size", "n_embd", "d_model"))


def encoder_length(config: dict[str, Any]) -> int | None:
    """The number of encoder states that a config declares: the most that the encoder returns; Whisper's is constant.

    `max_position_embeddings` of an encoder-decoder is the decoder's; that of a nested encoder is the encoder's.
    """
    declared = _first_count(config, ENCODER_LENGTH_KEYS)
    return declared or _first_count(read_part(config, "encoder"), (*ENCODER_LENGTH_KEYS, "max_position_embeddings"))


def read_codebooks(config: dict[str, Any]) -> int | None:
    """The number of codebooks that a config of an audio decoder declares."""
    count = decoder_config(config).get("num_codebooks")
    return count if is_count(count) and count <= MOST_CODEBOOKS else None


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from a config can be a count of tokens, states or heads."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_COUNTED


def read_part(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under a name, empty where there is none."""
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def _first_count(part: dict[str, Any], keys: Iterable[str]) -> int | None:
    return next((part[key] for key in keys if is_count(part.get(key))), None)


def read_strings(part: object) -> dict[str, str]:
    """The strings of an object."""
    return {key: text for key, text in part.items() if isinstance(text, str)} if isinstance(part, dict) else {}


def _to_braces(template: str | None) -> str | None:
    """Convert a `%d` template of genai_config.json to one for `str.format`."""
    if template is None or "%d" not in template:
        return None
    return template.replace("{", "{{").replace("}", "}}").replace("%d", "{layer}", 1)


IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""One in so many layers attends to all tokens, unless `sliding_window_pattern` has another number.

Configs since transformers 4.53 list `layer_types`. Older ones leave them to the model's code; these are its rules, by
`model_type`. Source: transformers 4.57, which derives `layer_types` from such configs in configuration_*.py, and has
the window in every attention of mistral, mixtral, phi3 and starcoder2.
"""
PATTERN_IN_CONFIG = ("gemma3", "gemma3_text", "cohere2")
FROM_A_LAYER_ON = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3")
"""The first `max_window_layers` layers attend to all tokens, and `use_sliding_window` is off by default."""
MOST_LAYERS = 4096


def declared_windows(config: dict[str, Any]) -> dict[int, int]:
    """The attention window in tokens by layer; layers that attend to all tokens are left out."""
    part = decoder_config(config)
    window: Any = part.get("sliding_window")
    if not is_count(window) or part.get("use_sliding_window") is False:
        return {}
    kinds = part.get("layer_types")
    if not isinstance(kinds, list):
        return dict.fromkeys(_window_layers_by_family(part), window)
    return {layer: window for layer, kind in enumerate(kinds) if kind == "sliding_attention"}


def declared_lengths(config: dict[str, Any]) -> frozenset[int]:
    """The lengths in tokens from which a model computes otherwise: windows, and the switch of rotary factors."""
    part = decoder_config(config)
    parts = (part, read_part(part, "rope_scaling"), read_part(part, "rope_parameters"))
    switches = (one.get("original_max_position_embeddings") for one in parts)
    return frozenset([*filter(is_count, switches), *declared_windows(config).values()])


def _window_layers_by_family(part: dict[str, Any]) -> list[int]:
    family, count = part.get("model_type"), part.get("num_hidden_layers")
    if not isinstance(family, str) or not is_count(count) or count > MOST_LAYERS:
        return []
    if family in IN_EVERY_LAYER:
        return list(range(count))
    if family in FULL_EVERY:
        pattern = part.get("sliding_window_pattern") if family in PATTERN_IN_CONFIG else None
        every = pattern if is_count(pattern) else FULL_EVERY[family]
        return [layer for layer in range(count) if (layer + 1) % every]
    first = part.get("max_window_layers")
    if family in FROM_A_LAYER_ON and part.get("use_sliding_window") is True and isinstance(first, int):
        return list(range(max(first, 0), count))
    return []
