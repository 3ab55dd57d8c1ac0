"""Names of single projects: DakeQQ, ESPnet, PINTO0309's Whisper, and packed caches.

Sources: Export_ONNX (DakeQQ/Native-LLM-for-Android); export/asr/models/decoders/xformer.py (espnet_onnx);
whisper/model.py (PINTO0309/whisper-onnx-cpu).
"""

from kvdoctor.analysis.dialects.dialect import Dialect, N, RoleRule, SlotRule

DIALECT = Dialect(
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
