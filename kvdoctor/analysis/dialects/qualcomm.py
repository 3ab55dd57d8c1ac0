"""Names of Qualcomm AI Hub and of Efficient Transformers: static graphs for NPUs.

AI Hub's language models return the new rows only and the loop shifts them in from the right; Opus-MT's loop writes
them at the position; Whisper shifts inside the graph; TrOCR returns one row too many, the oldest. Efficient
Transformers retains the state on the device. Sources: qai_hub_models/models (quic/ai-hub-models v0.46.1);
quic/efficient-transformers.
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, RoleRule, SlotRule

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
