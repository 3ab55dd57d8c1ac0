"""Names of smaller projects, of recurrent decoders and streaming encoders, and of packed caches.

Sources, k2-fsa/sherpa-onnx and its neighbors (Whisper, FireRedASR, Canary, Moonshine v1, Qwen3-ASR):
scripts/whisper/export-onnx.py, scripts/nemo/canary/export_onnx_180m_flash.py and
sherpa-onnx/csrc/offline-qwen3-asr-model.cc. The self-attention cache of Whisper stacks all layers and is written in
place at `offset`. Canary keeps hidden states, and puts token and position into one tensor.
Sources, states of a fixed size that each call replaces: RWKV/rwkv-onnx convert.py, rwkv-mobile;
wenet/bin/export_onnx_gpu.py; NeMo's cache-aware streaming export.
Sources, others: Export_ONNX (DakeQQ/Native-LLM-for-Android); export/asr/models/decoders/xformer.py (espnet_onnx);
whisper/model.py (PINTO0309/whisper-onnx-cpu).
"""

from kvdoctor.analysis.dialects.dialect import Dialect, N, RoleRule, SlotRule

OTHERS = Dialect(
    name="others",
    order=95,
    slots=(
        SlotRule(rf"in_(?P<part>key|value)_{N}", "out_{part}_{layer}", "self-attention", "BN1HS", "BN1SH"),
        SlotRule(rf"in_(?P<leaf>conv_state)_{N}", "out_{leaf}_{layer}", "conv-state", "BCZ"),
        SlotRule(rf"in_(?P<leaf>recurrent_state)_{N}", "out_{leaf}_{layer}", "recurrent-state", ""),
        SlotRule(rf"cache_{N}", "out_cache_{layer}", "hidden-memory", "BSD", part="state"),
        SlotRule(
            r"kv_cache", "output_kv_cache", "self-attention", "LBSD", growth="static", carry="extend", part="key-value"
        ),
        SlotRule(r"past_kv", "present_kv", "self-attention", "LBNSH", part="key-value"),
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
        SlotRule(r"in_n_layer_self_(?P<part>k|v)_cache", "out_n_layer_self_{part}_cache", "self-attention", "LBMD"),
        SlotRule(r"n_layer_cross_(?P<part>k|v)", None, "cross-attention", "LBED", filled_by="n_layer_cross_{part}"),
        SlotRule(rf"decoder_mems_list_{N}", "next_decoder_mem_list_{layer}", "hidden-memory", "BSD", part="state"),
        SlotRule(rf"cache_(?P<part>key|value)_{N}", "{part}_delta_{layer}", "self-attention", "BMNH", growth="delta"),
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
        SlotRule(r"in(?P<leaf>state(?:wkv)?)(?P<layer>[0-9]{1,5})", "out{leaf}{layer}", "recurrent-state", ""),
        SlotRule(
            r"(?P<leaf>(?:layer[0-9]{1,5}_)?state)(?P<layer>[0-9]{1,5})_in", "{leaf}{layer}_out", "recurrent-state", ""
        ),
        SlotRule(r"(?P<leaf>att_cache|cnn_cache)", "r_{leaf}", "recurrent-state", ""),
        SlotRule(r"(?P<leaf>cache_last_(?:channel_len|channel|time))", "{leaf}_next", "recurrent-state", ""),
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
