"""Names of the conversion scripts in `onnxruntime.transformers`, and of microsoft/Llama-2-Onnx.

GPT-2 stacks key and value in `past_N`; T5 and Whisper have `past_key_self_N` and `past_key_cross_N`, the latter filled
by the encoder and never returned. Sources: models/gpt2/gpt2_helper.py, models/t5/t5_decoder.py,
models/whisper/whisper_decoder.py and models/llama/llama_inputs.py (onnxruntime 1.31.1).
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, RoleRule, SlotRule

DIALECT = Dialect(
    name="onnxruntime-transformers",
    order=30,
    slots=(
        SlotRule(rf"past_{KV}_self_{N}", "present_{part}_self_{layer}", "self-attention"),
        SlotRule(rf"past_{KV}_cross_{N}", None, "cross-attention", "BNEH", filled_by="present_{part}_cross_{layer}"),
        SlotRule(rf"past_self_{KV}_{N}", "present_{part}_self_{layer}", "self-attention"),
        SlotRule(rf"past_cross_{KV}_{N}", None, "cross-attention", "BNEH", filled_by="present_{part}_cross_{layer}"),
        SlotRule(rf"past_{KV}_{N}", "present_{part}_{layer}", "self-attention"),
        SlotRule(rf"past_{N}", "present_{layer}", "self-attention", "2BNSH", part="key-value"),
        SlotRule(rf"past_key_values_{KV}_cache_{N}", "present_key_values_{part}_cache_{layer}", "self-attention"),
        SlotRule(rf"past_key_values_{N}_{KV}", "present_key_values_{layer}_{part}", "self-attention"),
        SlotRule(r"(?P<part>k|v)_cache", "{part}_out", "self-attention", "BLSNH", or_delta=True),
        SlotRule(rf"(?P<part>k|v)_{N}_cache", "{part}_{layer}_out", "self-attention", or_delta=True),
    ),
    inputs=(
        RoleRule(r"attn_mask", "additive_mask", "BTT"),
        RoleRule(r"encoder_input_ids", "encoder_input", "BI"),
        RoleRule(r"decoder_input_ids", "token_ids", "BQ"),
    ),
)
