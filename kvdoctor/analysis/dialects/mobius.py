"""Names of onnxruntime/mobius: `.self.key` and `.cross.key`, states of its own prefix, static caches with an index.

Source: src/mobius/tasks/_causal_lm.py and components/_attention.py (onnxruntime/mobius).
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, SlotRule

DIALECT = Dialect(
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
