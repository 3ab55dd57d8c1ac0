"""Names of k2-fsa/sherpa-onnx and its neighbors: Whisper, FireRedASR, Canary, Moonshine v1, Qwen3-ASR.

The self-attention cache of Whisper stacks all layers and is written in place at `offset`. Canary keeps hidden states,
and puts token and position into one tensor. Sources: scripts/whisper/export-onnx.py,
scripts/nemo/canary/export_onnx_180m_flash.py and sherpa-onnx/csrc/offline-qwen3-asr-model.cc (k2-fsa/sherpa-onnx).
"""

from kvdoctor.analysis.dialects.dialect import Dialect, N, RoleRule, SlotRule

DIALECT = Dialect(
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
