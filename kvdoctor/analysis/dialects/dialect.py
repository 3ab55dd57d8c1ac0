"""The form of a naming table, the search for the one that a graph follows, and the names common to all exporters."""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Literal

from kvdoctor.analysis import dialects
from kvdoctor.contract import Axis, Carry, Dim, Growth, Part, Role, SlotKind
from kvdoctor.records import record

LETTERS: dict[str, Axis] = {
    "B": "batch",
    "X": "batch_heads",
    "b": "batch_new",
    "c": "codebooks",
    "N": "kv_heads",
    "S": "past",
    "M": "capacity",
    "E": "encoder",
    "H": "head_dim",
    "D": "hidden",
    "2": "parts",
    "L": "layers",
    "C": "channels",
    "Z": "state",
    "K": "blocks",
    "k": "block",
    "Q": "new",
    "T": "total",
    "I": "encoder_input",
    "V": "vocabulary",
    "1": "fixed",
}
"""The field's letters for axes: BNSH is float[batch, kv_heads, past, head_dim]."""

N, KV = r"(?P<layer>[0-9]{1,5})", r"(?P<part>key|value)"
"""The number of a layer, and the two parts of a cache, in the names of a table."""

OPEN = re.compile(r"\([^()]*\)|\[[^]]*\]|\{[^}]*\}")
LITERAL = re.compile(r"(?:\\\.|(?<!\\)\w(?![?*]|\0\0))+", re.ASCII)
"""Parts of a pattern that stand for several texts, and letters and escaped dots that do not, none of them optional."""

PARTS: dict[str, Literal["key", "value"]] = {
    "key": "key",
    "value": "value",
    "keys": "key",
    "values": "value",
    "k": "key",
    "v": "value",
    "val": "value",
}
"""The names that exporters use for the two parts of a cache."""


def parse_axes(letters: str) -> tuple[Axis, ...]:
    """Axes by their letters: `BNSH` is batch, kv_heads, past, head_dim."""
    return tuple(LETTERS[letter] for letter in letters)


@record
class SlotRule:
    """How a past input is named, and the name of its present.

    `past` is a regular expression with the groups `layer`, `part` (a name in PARTS) and any other; the templates
    `present` and `filled_by` (the output of another graph that fills the slot) refer to the groups by name. `order` are
    the axes in letters, `value_order` those of values where they differ; empty where the shape decides. `growth` and
    `carry` are known from the producer's code where no graph shows them. `or_delta` says that some exports return the
    new rows alone, which the declared length of the present then shows.
    """

    past: str
    present: str | None
    kind: SlotKind
    order: str = "BNSH"
    value_order: str = ""
    filled_by: str | None = None
    growth: Growth | None = None
    carry: Carry | None = None
    part: Literal["key-value", "latent", "state"] | None = None
    or_delta: bool = False

    def match(self, name: str) -> "SlotName | None":
        """Read the name of a past input; None where it is named otherwise."""
        found = _fullmatch(self.past, name)
        if found is None:
            return None
        groups = {key: value or "" for key, value in found.groupdict().items()}
        layer = groups.get("layer", "")
        return SlotName(
            past=name,
            rule=self,
            layer=int(layer) if layer else None,
            part=self.part if self.part is not None else PARTS.get(groups.get("part", ""), "state"),
            present=self.present.format(**groups) if self.present is not None else None,
            filled_by=self.filled_by.format(**groups) if self.filled_by is not None else None,
        )


@lru_cache(1 << 14)
def _fullmatch(pattern: str, name: str) -> re.Match[str] | None:
    # Most names are those of another dialect: nothing is compiled to find that out.
    held = any(one in name for one in _list_literals(pattern))
    return re.compile(pattern, re.ASCII).fullmatch(name) if held else None


@cache
def _list_literals(pattern: str) -> tuple[str, ...]:
    """For each alternative of a pattern the longest text that all its matches hold."""
    before, outside = "", pattern
    while before != outside:
        before, outside = outside, OPEN.sub(lambda part: "\0\0" if part[0][0] == "{" else "\0", outside)
    return tuple(max(LITERAL.findall(one), key=len, default="").replace("\\", "") for one in outside.split("|"))


@record
class SlotName:
    """What the name of a past input says about its slot."""

    past: str
    rule: SlotRule
    layer: int | None
    part: Part
    present: str | None
    filled_by: str | None


@record
class RoleRule:
    """The role of an input or output with this name, and its axes in letters."""

    name: str
    role: Role
    order: str = ""
    dtype: Literal["float", "integer", "any"] = "any"

    def fits(self, name: str, dtype: str, rank: int | None) -> bool:
        """Whether the rule applies to this tensor. A rank of None fits every rule."""
        if (rank is not None and rank != len(self.order)) or _fullmatch(self.name, name) is None:
            return False
        return self.dtype in ("any", "float" if "float" in dtype or dtype == "double" else "integer")


@record
class Dialect:
    """One exporter's names. The first rule that fits holds; `INPUTS` and `OUTPUTS` are common to all exporters."""

    name: str
    slots: tuple[SlotRule, ...] = ()
    inputs: tuple[RoleRule, ...] = ()
    outputs: tuple[RoleRule, ...] = ()
    encoder_inputs: tuple[RoleRule, ...] = ()
    order: int = 50

    def find_slots(self, names: Iterable[str]) -> Iterator[SlotName]:
        """Find the slots among input names."""
        for name in names:
            found = next(filter(None, (rule.match(name) for rule in self.slots)), None)
            if found is not None:
                yield found


@cache
def load_dialects() -> tuple[Dialect, ...]:
    """All dialects, those that are preferred where names fit several first."""
    found: list[Dialect] = []
    for module in pkgutil.iter_modules(dialects.__path__):
        named = vars(importlib.import_module(f"{dialects.__name__}.{module.name}"))
        found += [one for one in named.values() if isinstance(one, Dialect)]
    return tuple(sorted(found, key=lambda dialect: (dialect.order, dialect.name)))


def find_dialect(names: Iterable[str]) -> Dialect | None:
    """Find the dialect in which most of the names are past inputs."""
    return _find_dialect(tuple(names))


@lru_cache(maxsize=64)  # asked several times of each file
def _find_dialect(names: tuple[str, ...]) -> Dialect | None:
    counts = [(sum(1 for _ in dialect.find_slots(names)), dialect) for dialect in load_dialects()]
    most = max((count for count, _ in counts), default=0)
    return next((dialect for count, dialect in counts if count == most), None) if most else None


ENCODER_LIKE = re.compile(r"last_hidden_state|n_layer_cross_[kv]|present_(key|value)_cross_[0-9]+", re.ASCII)
"""Outputs that only an encoder has: its states, or the cross-attention cache that it computes."""

CACHE_LIKE = re.compile(r"(input\.)?(past|present|cache)(_|\.|$).*", re.ASCII)
"""Names of inputs that look like a cache in any dialect."""


def looks_like_cache(name: str, shape: tuple[Dim, ...] | None) -> bool:
    """Whether an input looks like a cache: by its name, and as a tensor of three axes and more."""
    return CACHE_LIKE.match(name) is not None and (shape is None or len(shape) > 2)


# Names besides the cache that all dialects have in common. Sources: transformers, onnxruntime-genai, sherpa-onnx, the
# conversion scripts of ONNX Runtime, and, for adapters, PEFT and Olive (ExtractAdapters with make_inputs).
PAST_LENGTH = r"past_sequence_length|past_key_values_length|past_(seq_)?len(gth)?|history_len|start_pos|pos"

INPUTS = (
    RoleRule(r"(input\.)?(decoder_)?input_ids|tokens|targets|tgt", "token_ids", "BQ", "integer"),
    RoleRule(r"(decoder_)?inputs?_embeds|x", "embeddings", "BQD", "float"),
    RoleRule(r"per_layer_inputs", "embeddings", "BQ11", "float"),
    RoleRule(r"deepstack_(features|embeds|visual_embeds)_\d{1,3}", "embeddings", "BQD", "float"),
    RoleRule(r"(decoder_)?attention_mask", "attention_mask", "BT"),
    RoleRule(r"(decoder_)?attention_mask|attn_mask|causal_mask", "additive_mask", "B1QT"),
    RoleRule(r"attn_mask|attention_mask", "additive_mask", "BQT", "float"),
    RoleRule(r"position_ids|positions", "position_ids", "BQ"),
    RoleRule(r"position_ids", "position_ids", "1BQ"),
    RoleRule(r"position_ids|positions|cache_position", "cache_position", "Q"),
    RoleRule(r"position_ids_cos|rotary_cos|cos", "rotary_cos", "11QH", "float"),
    RoleRule(r"position_ids_sin|rotary_sin|sin", "rotary_sin", "11QH", "float"),
    RoleRule(r"write_indices", "write_index", "B", "integer"),
    RoleRule(r"offset|position|index|step", "write_index", "1", "integer"),
    RoleRule(r"offset|position|index|step", "write_index", "", "integer"),
    RoleRule(PAST_LENGTH, "past_length", "", "integer"),
    RoleRule(PAST_LENGTH, "past_length", "1", "integer"),
    RoleRule(r"past_sequence_lengths|past_seq_lens", "past_length", "B", "integer"),
    RoleRule(r"seqlens_k", "last_index", "B", "integer"),
    RoleRule(r"total_sequence_length|current_sequence_length", "total_length", "", "integer"),
    RoleRule(r"total_sequence_length|current_sequence_length", "total_length", "1", "integer"),
    RoleRule(r"nonpad_kv_seqlen|context_lengths", "total_length", "B", "integer"),
    RoleRule(r"ids_len", "new_length", "", "integer"),
    RoleRule(r"ids_len", "new_length", "1", "integer"),
    RoleRule(r"encoder_attention_mask|enc_mask|encoder_mask", "encoder_mask", "BE"),
    RoleRule(r"encoder_hidden_states|enc_states|hidden_states|encoder_states", "encoder_states", "BED", "float"),
    RoleRule(r"args_0", "token_ids", "BQ", "integer"),
    RoleRule(r"args_1", "encoder_states", "BED", "float"),
    RoleRule(r"args_2", "total_length", "1", "integer"),
    RoleRule(r"(.*[./_])?lora_?(A|B|a|b|down|up)([./_].*)?", "adapter", "11", "float"),
    RoleRule(r"use_cache_branch", "branch_switch", "1"),
    RoleRule(r"(num_)?logits_to_keep", "logits_to_keep", "", "integer"),
    RoleRule(r"(num_)?logits_to_keep", "logits_to_keep", "1", "integer"),
    RoleRule(r"sliding_window", "setting", "", "integer"),
    RoleRule(r"sliding_window", "setting", "1", "integer"),
    RoleRule(r"beam_width", "beam_input", "1", "integer"),
    RoleRule(r"cache_indirection", "beam_input", "B1M", "integer"),
    RoleRule(r"block_tables?(_windowed)?|kv_page_table", "block_table", "BK", "integer"),
    RoleRule(r"slot_mapping|attention_metadata", "block_table", "1", "integer"),
    RoleRule(r"cumulative_sequence_lengths", "total_length", "B", "integer"),
    RoleRule(r"logits_indices", "logits_to_keep", "1", "integer"),
)

OUTPUTS = (
    RoleRule(r"(output\.)?logits", "logits", "BQV"),
    RoleRule(r"logits", "logits", "BV"),
    RoleRule(r"logits", "logits", "BV11"),
    RoleRule(r"next_token", "next_token", "B"),
    RoleRule(r"next_token", "next_token", "B1"),
)

ENCODER_INPUTS = (
    RoleRule(r"(encoder_)?attention_mask|input_mask", "encoder_mask", "BI"),
    RoleRule(r"(encoder_)?input_ids", "encoder_input", "BI"),
    RoleRule(r"input_features|audio_features|mel", "encoder_input", "B1I"),
    RoleRule(r"input_values|audio", "encoder_input", "BI"),
    RoleRule(r"pixel_values", "encoder_input", "B111"),
    RoleRule(r"flattened_patches|x", "encoder_input", "BI1", "float"),
    RoleRule(r"args_0", "encoder_input", "BI1", "float"),
    RoleRule(r"args_1", "encoder_length", "1", "integer"),
    RoleRule(r"x_len|encoder_input_lengths?", "encoder_length", "B", "integer"),
)

DECODER_ONLY_NAMES = re.compile(r"decoder_(input_ids|inputs_embeds)")
SHARED_NAMES = re.compile(r"input_ids|attention_mask")
"""Parameters of forward() of an encoder-decoder (transformers): next to DECODER_ONLY_NAMES, these are the encoder's."""

ENCODER_OUTPUTS = (
    RoleRule(r"last_hidden_state|encoder_hidden_states|hidden_states|encoder_outputs?", "encoder_states", "BED"),
)

COMMON = {"inputs": INPUTS, "outputs": OUTPUTS, "encoder_inputs": ENCODER_INPUTS}
"""The rules for the ports of a decoder and of an encoder."""
