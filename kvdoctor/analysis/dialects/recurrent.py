"""Names of recurrent decoders and of streaming encoders: states of a fixed size that each call replaces.

Sources: RWKV/rwkv-onnx convert.py, rwkv-mobile; wenet/bin/export_onnx_gpu.py; NeMo's cache-aware streaming export.
"""

from kvdoctor.analysis.dialects.dialect import Dialect, RoleRule, SlotRule

DIALECT = Dialect(
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
