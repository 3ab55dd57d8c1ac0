"""Names of the tools of ONNX Runtime: onnxruntime-genai, onnxruntime/mobius, its conversion scripts, Llama-2-Onnx.

genai has Optimum's names for keys and values, and its own for convolution and recurrent states; names in
`genai_config.json` take precedence. mobius has `.self.key` and `.cross.key`, states of its own prefix, and static
caches with an index. In `onnxruntime.transformers` GPT-2 stacks key and value in `past_N`; T5 and Whisper have
`past_key_self_N` and `past_key_cross_N`, the latter filled by the encoder and never returned.

Sources: src/python/py/models/builders/base.py and recurrent_state.cpp (onnxruntime-genai 0.18.0);
src/mobius/tasks/_causal_lm.py and components/_attention.py; models/gpt2/gpt2_helper.py, models/t5/t5_decoder.py,
models/whisper/whisper_decoder.py and models/llama/llama_inputs.py (onnxruntime 1.31.1).
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
