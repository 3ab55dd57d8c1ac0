"""Names of Hugging Face: of Optimum, which transformers.js reads, and of the exporter of transformers 5.

Optimum: `past_key_values.N.decoder.key` goes in, `present.N.decoder.key` comes out. It calls the self-attention cache
`decoder` and the cross-attention cache `encoder`. transformers.js adds names of convolution and recurrent states.
Sources: `OnnxConfigWithPast` and `OnnxSeq2SeqConfigWithPast` in optimum/exporters/onnx/base.py (optimum-onnx 0.1.0);
`getCacheNames` in src/configs.js (@huggingface/transformers 4.3.1).

transformers 5: `input.past_key_values.layers.N.keys` goes in, `output.` comes out. Caches are trees; the path of a leaf
is its name. Source: transformers/exporters/exporter_onnx.py (transformers 5.23).
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, RoleRule, SlotRule
from kvdoctor.contract import SlotKind

OPTIMUM = Dialect(
    name="optimum",
    order=10,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.{KV}", "present.{layer}.{part}", "self-attention"),
        SlotRule(rf"past_key_values\.{N}\.decoder\.{KV}", "present.{layer}.decoder.{part}", "self-attention"),
        SlotRule(rf"past_key_values\.{N}\.encoder\.{KV}", "present.{layer}.encoder.{part}", "cross-attention", "BNEH"),
        SlotRule(
            rf"past_key_values\.{N}\.key_value", "present.{layer}.key_value", "self-attention", "", part="key-value"
        ),
        SlotRule(
            rf"past_key_values\.{N}\.(?P<leaf>conv_state|shift_state)", "present.{layer}.{leaf}", "conv-state", "BCZ"
        ),
        SlotRule(
            rf"past_key_values\.{N}\.(?P<leaf>(recurrent|ssm)_state)", "present.{layer}.{leaf}", "recurrent-state", ""
        ),
        SlotRule(rf"past_conv\.{N}(?P<tail>\.\w+)?", "present_conv.{layer}{tail}", "conv-state", "BCZ"),
        SlotRule(
            rf"past_(?P<leaf>ssm|recurrent|compressor|indexer)\.{N}(?P<tail>\.\w+)?",
            "present_{leaf}.{layer}{tail}",
            "recurrent-state",
            "",
        ),
    ),
)


ROOT = r"(?P<root>past_key_values|cache_params)\."
WAY = r"(?P<way>(?:(?:self|cross)_attention_cache\.)?)"
LAYER = r"layers\.(?P<layer>[0-9]{1,5})\."
LEAF = "{root}.{way}layers.{layer}."


def _leaf_rule(way: str, leaf: str, kind: SlotKind, order: str) -> SlotRule:
    """A leaf of the cache: the first-step graph returns it without a prefix, or with one if it also takes it."""
    path = LEAF + "{part}" if "<part>" in leaf else LEAF + "{leaf}"
    return SlotRule(rf"input\.{ROOT}{way}{LAYER}{leaf}", f"output.{path}", kind, order, filled_by=path)


TRANSFORMERS = Dialect(
    name="transformers",
    order=40,
    slots=(
        _leaf_rule(r"(?P<way>cross_attention_cache\.)", r"(?P<part>keys|values)", "cross-attention", "BNEH"),
        _leaf_rule(r"(?P<way>(?:self_attention_cache\.)?)", r"(?P<part>keys|values)", "self-attention", "BNSH"),
        _leaf_rule(WAY, r"(?P<leaf>cumulative_length(?:\.\w+)?)", "counter", ""),
        _leaf_rule(WAY, r"(?P<leaf>conv_states(?:\.\w+)?)", "conv-state", "BCZ"),
        _leaf_rule(WAY, r"(?P<leaf>(?:recurrent|ssm)_states(?:\.\w+)?)", "recurrent-state", ""),
    ),
    inputs=(
        RoleRule(r"(input\.)?(decoder_)?input_ids", "token_ids", "BQ"),
        RoleRule(r"(input\.)?(decoder_)?inputs_embeds", "embeddings", "BQD"),
        RoleRule(r"(input\.)?position_ids", "position_ids", "BQ"),
        RoleRule(r"(input\.)?cache_position", "cache_position", "Q"),
        RoleRule(r"(input\.)?(decoder_)?attention_mask", "attention_mask", "BT"),
        RoleRule(r"(input\.)?encoder_outputs\.last_hidden_state", "encoder_states", "BED"),
        RoleRule(r"(input\.)?encoder_attention_mask", "encoder_mask", "BE"),
        RoleRule(r"input\..*_sliding_window_tensor", "setting", ""),
    ),
    outputs=(RoleRule(r"(output\.)?logits", "logits", "BQV"),),
)
