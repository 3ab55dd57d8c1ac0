"""Names of the tools of makers of runtimes: of ONNX Runtime, and of Qualcomm for its NPUs.

onnxruntime-genai has Optimum's names for keys and values, and its own for convolution and recurrent states; names in
`genai_config.json` take precedence. mobius has `.self.key` and `.cross.key`, states of its own prefix, and static
caches with an index. In `onnxruntime.transformers` GPT-2 stacks key and value in `past_N`; T5 and Whisper have
`past_key_self_N` and `past_key_cross_N`, the latter filled by the encoder and never returned.

Of Qualcomm AI Hub, language models return the new rows only and the loop shifts them in from the right; Opus-MT's loop
writes them at the position; Whisper shifts inside the graph; TrOCR returns one row too many, the oldest. Efficient
Transformers retains the state on the device.

Sources: src/python/py/models/builders/base.py and recurrent_state.cpp (onnxruntime-genai 0.18.0);
src/mobius/tasks/_causal_lm.py and components/_attention.py; models/gpt2/gpt2_helper.py, models/t5/t5_decoder.py,
models/whisper/whisper_decoder.py and models/llama/llama_inputs.py (onnxruntime 1.31.1); qai_hub_models/models
(quic/ai-hub-models v0.46.1); quic/efficient-transformers.
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, RoleRule, SlotRule

GENAI = Dialect(
    name="genai",
    order=20,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.{KV}", "present.{layer}.{part}", "self-attention"),
        SlotRule(rf"past\.{N}\.(?P<leaf>conv)", "present.{layer}.{leaf}", "conv-state", "BCZ"),
        SlotRule(rf"past\.{N}\.(?P<leaf>recurrent)", "present.{layer}.{leaf}", "recurrent-state", ""),
        SlotRule(r"rnn_states_prev", "rnn_states", "recurrent-state", ""),
        SlotRule(r"lstm_(?P<leaf>hidden|cell)_state", "lstm_{leaf}_state_out", "recurrent-state", ""),
    ),
)

MOBIUS = Dialect(
    name="mobius",
    order=80,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.self\.{KV}", "present.{layer}.self.{part}", "self-attention"),
        SlotRule(rf"past_key_values\.{N}\.cross\.{KV}", "present.{layer}.cross.{part}", "cross-attention", "BNEH"),
        SlotRule(rf"past_states\.{N}\.(?P<leaf>conv_state)", "present.{layer}.{leaf}", "conv-state", "BCZ"),
        SlotRule(rf"past_states\.{N}\.(?P<leaf>\w+)", "present.{layer}.{leaf}", "recurrent-state", ""),
        SlotRule(rf"{KV}_cache\.{N}", "updated_{part}_cache.{layer}", "self-attention", "", growth="static"),
    ),
)

TRANSFORMERS = Dialect(
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

QUALCOMM = Dialect(
    name="qualcomm",
    order=70,
    slots=(
        SlotRule(
            rf"past_{KV}_{N}_in",
            "past_{part}_{layer}_out",
            "self-attention",
            "NBHM",
            "NBMH",
            growth="delta",
            carry="shift",
        ),
        SlotRule(
            rf"(?P<part>k|v)_cache_self_{N}_in",
            "{part}_cache_self_{layer}_out",
            "self-attention",
            "NBHM",
            "NBMH",
            growth="ring",
        ),
        SlotRule(
            rf"(?P<part>k|v)_cache_cross_{N}",
            None,
            "cross-attention",
            "NBHE",
            "NBEH",
            filled_by="{part}_cache_cross_{layer}",
        ),
        SlotRule(
            rf"block_{N}_past_self_{KV}_states",
            "block_{layer}_present_self_{part}_states",
            "self-attention",
            "BNMH",
            growth="delta",
            carry="write",
        ),
        SlotRule(
            rf"block_{N}_cross_{KV}_states",
            None,
            "cross-attention",
            "BNEH",
            filled_by="block_{layer}_cross_{part}_states",
        ),
        SlotRule(
            rf"kv_{N}_attn_(?P<part>key|val)",
            "kv_cache_{part}_{layer}",
            "self-attention",
            "BNMH",
            growth="ring",
            carry="drop-oldest",
        ),
        SlotRule(
            rf"kv_{N}_cross_attn_(?P<part>key|val)",
            None,
            "cross-attention",
            "BNEH",
            filled_by="kv_cache_{part}_{layer}",
        ),
        SlotRule(rf"past_{KV}\.{N}", "past_{part}.{layer}_RetainedState", "self-attention", "BNMH", growth="static"),
    ),
    inputs=(
        RoleRule(r"input_ids", "token_ids", "BQ", "integer"),
        RoleRule(r"attention_mask", "additive_mask", "B1QT", "float"),
        RoleRule(r"position_ids", "cache_position", "Q", "integer"),
    ),
)
