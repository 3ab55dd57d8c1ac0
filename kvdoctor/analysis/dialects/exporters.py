"""Names of caches and ports, by exporter.

Optimum (which transformers.js reads): `past_key_values.N.decoder.key` goes in, `present.N.decoder.key` comes out. It
calls the self-attention cache `decoder` and the cross-attention cache `encoder`. transformers.js adds names of
convolution and recurrent states. Sources: `OnnxConfigWithPast` and `OnnxSeq2SeqConfigWithPast` in
optimum/exporters/onnx/base.py (optimum-onnx 0.1.0); `getCacheNames` in src/configs.js (transformers.js 4.3.1).

transformers 5: `input.past_key_values.layers.N.keys` goes in, `output.` comes out. Caches are trees; the path of a leaf
is its name. Source: transformers/exporters/exporter_onnx.py (transformers 5.23).

onnxruntime-genai has Optimum's names for keys and values, and its own for convolution and recurrent states; names in
`genai_config.json` take precedence. mobius has `.self.key` and `.cross.key`, states of its own prefix, and static
caches with an index. In `onnxruntime.transformers` GPT-2 stacks key and value in `past_N`; T5 and Whisper have
`past_key_self_N` and `past_key_cross_N`, the latter filled by the encoder and never returned. Sources:
src/python/py/models/builders/base.py and recurrent_state.cpp (onnxruntime-genai 0.18.0);
src/mobius/tasks/_causal_lm.py and components/_attention.py; models/gpt2/gpt2_helper.py, models/t5/t5_decoder.py,
models/whisper/whisper_decoder.py and models/llama/llama_inputs.py (onnxruntime 1.31.1).

Of Qualcomm AI Hub, language models return the new rows only and the loop shifts them in from the right; Opus-MT's loop
writes them at the position; Whisper shifts inside the graph; TrOCR returns one row too many, the oldest. Efficient
Transformers retains the state on the device. Sources: qai_hub_models/models (quic/ai-hub-models v0.46.1);
quic/efficient-transformers.

k2-fsa/sherpa-onnx and its neighbors (Whisper, FireRedASR, Canary, Moonshine v1, Qwen3-ASR): the self-attention cache of
Whisper stacks all layers and is written in place at `offset`. Canary keeps hidden states, and puts token and position
into one tensor. Sources: scripts/whisper/export-onnx.py, scripts/nemo/canary/export_onnx_180m_flash.py and
sherpa-onnx/csrc/offline-qwen3-asr-model.cc.

Sources, states of a fixed size that each call replaces: RWKV/rwkv-onnx convert.py, rwkv-mobile;
wenet/bin/export_onnx_gpu.py; NeMo's cache-aware streaming export. Others: Export_ONNX (DakeQQ/Native-LLM-for-Android);
export/asr/models/decoders/xformer.py (espnet_onnx); whisper/model.py (PINTO0309/whisper-onnx-cpu).
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, RoleRule, SlotRule
from kvdoctor.contract import SlotKind

SELF: SlotKind = "self-attention"
CROSS: SlotKind = "cross-attention"
STATE: SlotKind = "recurrent-state"

GENAI = Dialect(
    name="genai",
    order=20,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.{KV}", "present.{layer}.{part}", SELF),
        SlotRule(rf"past\.{N}\.(?P<leaf>conv)", "present.{layer}.{leaf}", "conv-state", "BCZ"),
        SlotRule(rf"past\.{N}\.(?P<leaf>recurrent)", "present.{layer}.{leaf}", STATE, ""),
        SlotRule(r"rnn_states_prev", "rnn_states", STATE, ""),
        SlotRule(r"lstm_(?P<leaf>hidden|cell)_state", "lstm_{leaf}_state_out", STATE, ""),
    ),
)

MOBIUS = Dialect(
    name="mobius",
    order=80,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.self\.{KV}", "present.{layer}.self.{part}", SELF),
        SlotRule(rf"past_key_values\.{N}\.cross\.{KV}", "present.{layer}.cross.{part}", CROSS, "BNEH"),
        SlotRule(rf"past_states\.{N}\.(?P<leaf>conv_state)", "present.{layer}.{leaf}", "conv-state", "BCZ"),
        SlotRule(rf"past_states\.{N}\.(?P<leaf>\w+)", "present.{layer}.{leaf}", STATE, ""),
        SlotRule(rf"{KV}_cache\.{N}", "updated_{part}_cache.{layer}", SELF, "", growth="static"),
    ),
)

TRANSFORMERS = Dialect(
    name="onnxruntime-transformers",
    order=30,
    slots=(
        SlotRule(rf"past_{KV}_self_{N}", "present_{part}_self_{layer}", SELF),
        SlotRule(rf"past_{KV}_cross_{N}", None, CROSS, "BNEH", filled_by="present_{part}_cross_{layer}"),
        SlotRule(rf"past_self_{KV}_{N}", "present_{part}_self_{layer}", SELF),
        SlotRule(rf"past_cross_{KV}_{N}", None, CROSS, "BNEH", filled_by="present_{part}_cross_{layer}"),
        SlotRule(rf"past_{KV}_{N}", "present_{part}_{layer}", SELF),
        SlotRule(rf"past_{N}", "present_{layer}", SELF, "2BNSH", part="key-value"),
        SlotRule(rf"past_key_values_{KV}_cache_{N}", "present_key_values_{part}_cache_{layer}", SELF),
        SlotRule(rf"past_key_values_{N}_{KV}", "present_key_values_{layer}_{part}", SELF),
        SlotRule(r"(?P<part>k|v)_cache", "{part}_out", SELF, "BLSNH", or_delta=True),
        SlotRule(rf"(?P<part>k|v)_{N}_cache", "{part}_{layer}_out", SELF, or_delta=True),
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
        SlotRule(rf"past_{KV}_{N}_in", "past_{part}_{layer}_out", SELF, "NBHM", "NBMH", growth="delta", carry="shift"),
        SlotRule(
            rf"(?P<part>k|v)_cache_self_{N}_in", "{part}_cache_self_{layer}_out", SELF, "NBHM", "NBMH", growth="ring"
        ),
        SlotRule(
            rf"(?P<part>k|v)_cache_cross_{N}", None, CROSS, "NBHE", "NBEH", filled_by="{part}_cache_cross_{layer}"
        ),
        SlotRule(
            rf"block_{N}_past_self_{KV}_states",
            "block_{layer}_present_self_{part}_states",
            SELF,
            "BNMH",
            growth="delta",
            carry="write",
        ),
        SlotRule(rf"block_{N}_cross_{KV}_states", None, CROSS, "BNEH", filled_by="block_{layer}_cross_{part}_states"),
        SlotRule(
            rf"kv_{N}_attn_(?P<part>key|val)",
            "kv_cache_{part}_{layer}",
            SELF,
            "BNMH",
            growth="ring",
            carry="drop-oldest",
        ),
        SlotRule(rf"kv_{N}_cross_attn_(?P<part>key|val)", None, CROSS, "BNEH", filled_by="kv_cache_{part}_{layer}"),
        SlotRule(rf"past_{KV}\.{N}", "past_{part}.{layer}_RetainedState", SELF, "BNMH", growth="static"),
    ),
    inputs=(
        RoleRule(r"input_ids", "token_ids", "BQ", "integer"),
        RoleRule(r"attention_mask", "additive_mask", "B1QT", "float"),
        RoleRule(r"position_ids", "cache_position", "Q", "integer"),
    ),
)


OPTIMUM = Dialect(
    name="optimum",
    order=10,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.{KV}", "present.{layer}.{part}", SELF),
        SlotRule(rf"past_key_values\.{N}\.decoder\.{KV}", "present.{layer}.decoder.{part}", SELF),
        SlotRule(rf"past_key_values\.{N}\.encoder\.{KV}", "present.{layer}.encoder.{part}", CROSS, "BNEH"),
        SlotRule(rf"past_key_values\.{N}\.key_value", "present.{layer}.key_value", SELF, "", part="key-value"),
        SlotRule(
            rf"past_key_values\.{N}\.(?P<leaf>conv_state|shift_state)", "present.{layer}.{leaf}", "conv-state", "BCZ"
        ),
        SlotRule(rf"past_key_values\.{N}\.(?P<leaf>(recurrent|ssm)_state)", "present.{layer}.{leaf}", STATE, ""),
        SlotRule(rf"past_conv\.{N}(?P<tail>\.\w+)?", "present_conv.{layer}{tail}", "conv-state", "BCZ"),
        SlotRule(
            rf"past_(?P<leaf>ssm|recurrent|compressor|indexer)\.{N}(?P<tail>\.\w+)?",
            "present_{leaf}.{layer}{tail}",
            STATE,
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


TRANSFORMERS_5 = Dialect(
    name="transformers",
    order=40,
    slots=(
        _leaf_rule(r"(?P<way>cross_attention_cache\.)", r"(?P<part>keys|values)", CROSS, "BNEH"),
        _leaf_rule(r"(?P<way>(?:self_attention_cache\.)?)", r"(?P<part>keys|values)", SELF, "BNSH"),
        _leaf_rule(WAY, r"(?P<leaf>cumulative_length(?:\.\w+)?)", "counter", ""),
        _leaf_rule(WAY, r"(?P<leaf>conv_states(?:\.\w+)?)", "conv-state", "BCZ"),
        _leaf_rule(WAY, r"(?P<leaf>(?:recurrent|ssm)_states(?:\.\w+)?)", STATE, ""),
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


OTHERS = Dialect(
    name="others",
    order=95,
    slots=(
        SlotRule(rf"in_(?P<part>key|value)_{N}", "out_{part}_{layer}", SELF, "BN1HS", "BN1SH"),
        SlotRule(rf"in_(?P<leaf>conv_state)_{N}", "out_{leaf}_{layer}", "conv-state", "BCZ"),
        SlotRule(rf"in_(?P<leaf>recurrent_state)_{N}", "out_{leaf}_{layer}", STATE, ""),
        SlotRule(rf"cache_{N}", "out_cache_{layer}", "hidden-memory", "BSD", part="state"),
        SlotRule(r"kv_cache", "output_kv_cache", SELF, "LBSD", growth="static", carry="extend", part="key-value"),
        SlotRule(r"past_kv", "present_kv", SELF, "LBNSH", part="key-value"),
    ),
    inputs=(
        RoleRule(r"attention_mask", "additive_mask", "111QT", "float"),
        RoleRule(r"rotary_(pos_emb_)?cos|cos", "rotary_cos", "111QH", "float"),
        RoleRule(r"rotary_(pos_emb_)?sin|sin", "rotary_sin", "111QH", "float"),
    ),
)


SHERPA = Dialect(
    name="sherpa",
    order=60,
    slots=(
        SlotRule(r"in_n_layer_self_(?P<part>k|v)_cache", "out_n_layer_self_{part}_cache", SELF, "LBMD"),
        SlotRule(r"n_layer_cross_(?P<part>k|v)", None, CROSS, "LBED", filled_by="n_layer_cross_{part}"),
        SlotRule(rf"decoder_mems_list_{N}", "next_decoder_mem_list_{layer}", "hidden-memory", "BSD", part="state"),
        SlotRule(rf"cache_(?P<part>key|value)_{N}", "{part}_delta_{layer}", SELF, "BMNH", growth="delta"),
    ),
    inputs=(
        RoleRule(r"tokens", "token_ids", "BQ", "integer"),
        RoleRule(r"decoder_input_ids", "token_and_position", "BQ", "integer"),
        RoleRule(r"offset", "write_index", "1", "integer"),
    ),
    encoder_inputs=(RoleRule(r"mel", "encoder_input", "B1I", "float"),),
)


RECURRENT = Dialect(
    name="recurrent",
    order=90,
    slots=(
        SlotRule(r"in(?P<leaf>state(?:wkv)?)(?P<layer>[0-9]{1,5})", "out{leaf}{layer}", STATE, ""),
        SlotRule(r"(?P<leaf>(?:layer[0-9]{1,5}_)?state)(?P<layer>[0-9]{1,5})_in", "{leaf}{layer}_out", STATE, ""),
        SlotRule(r"(?P<leaf>att_cache|cnn_cache)", "r_{leaf}", STATE, ""),
        SlotRule(r"(?P<leaf>cache_last_(?:channel_len|channel|time))", "{leaf}_next", STATE, ""),
    ),
    inputs=(
        RoleRule(r"in|token|input", "token_ids", "Q", "integer"),
        RoleRule(r"in|token|input", "token_ids", "BQ", "integer"),
    ),
    outputs=(
        RoleRule(r"out|logits", "logits", "V", "float"),
        RoleRule(r"out|logits", "logits", "BV", "float"),
        RoleRule(r"out|logits", "logits", "BQV", "float"),
    ),
)
