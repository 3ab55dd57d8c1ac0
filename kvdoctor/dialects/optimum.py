"""Names of Hugging Face Optimum: `past_key_values.N.decoder.key` goes in, `present.N.decoder.key` comes out.

Source: `OnnxConfigWithPast` and `OnnxSeq2SeqConfigWithPast` in optimum/exporters/onnx/base.py (optimum-onnx 0.1.0).
Optimum calls the self-attention cache `decoder` and the cross-attention cache `encoder`.
"""

import re

from kvdoctor.dialects import Dialect, RoleRule, SlotRule

OPTIMUM = Dialect(
    name="optimum",
    slots=(
        SlotRule(
            re.compile(r"past_key_values\.(?P<layer>[0-9]{1,5})\.(?P<part>key|value)"),
            "present.{layer}.{part}",
            "self-attention",
            ("batch", "kv_heads", "past", "head_dim"),
        ),
        SlotRule(
            re.compile(r"past_key_values\.(?P<layer>[0-9]{1,5})\.decoder\.(?P<part>key|value)"),
            "present.{layer}.decoder.{part}",
            "self-attention",
            ("batch", "kv_heads", "past", "head_dim"),
        ),
        SlotRule(
            re.compile(r"past_key_values\.(?P<layer>[0-9]{1,5})\.encoder\.(?P<part>key|value)"),
            "present.{layer}.encoder.{part}",
            "cross-attention",
            ("batch", "kv_heads", "encoder", "head_dim"),
        ),
    ),
    inputs=(
        RoleRule(re.compile(r"(decoder_)?input_ids"), "token_ids", ("batch", "new")),
        RoleRule(re.compile(r"attention_mask|decoder_attention_mask"), "attention_mask", ("batch", "total")),
        RoleRule(re.compile(r"position_ids"), "position_ids", ("batch", "new")),
        RoleRule(re.compile(r"cache_position"), "cache_position", ("new",)),
        RoleRule(re.compile(r"encoder_attention_mask"), "encoder_mask", ("batch", "encoder")),
        RoleRule(re.compile(r"encoder_hidden_states"), "encoder_states", ("batch", "encoder", "hidden")),
        RoleRule(re.compile(r"use_cache_branch"), "branch_switch", ("fixed",)),
        RoleRule(re.compile(r"(num_)?logits_to_keep"), "logits_to_keep", ()),
    ),
    outputs=(RoleRule(re.compile(r"logits"), "logits", ("batch", "new", "vocabulary")),),
    encoder_inputs=(
        RoleRule(re.compile(r"attention_mask"), "encoder_mask", ("batch", "encoder_input")),
        RoleRule(re.compile(r"input_ids"), "encoder_input", ("batch", "encoder_input")),
        RoleRule(re.compile(r"input_features"), "encoder_input", ("batch", "fixed", "encoder_input")),
        RoleRule(re.compile(r"input_values"), "encoder_input", ("batch", "encoder_input")),
        RoleRule(re.compile(r"pixel_values"), "encoder_input", ("batch", "fixed", "fixed", "fixed")),
    ),
    encoder_outputs=(RoleRule(re.compile(r"last_hidden_state"), "encoder_states", ("batch", "encoder", "hidden")),),
    looks_like_cache=re.compile(r"(past|present|cache)(_|\.|$).*"),
)
