"""Names of Hugging Face Optimum: `past_key_values.N.decoder.key` goes in, `present.N.decoder.key` comes out.

Optimum calls the self-attention cache `decoder` and the cross-attention cache `encoder`. transformers.js reads the
same names, and adds those of convolution and recurrent states.

Sources: `OnnxConfigWithPast` and `OnnxSeq2SeqConfigWithPast` in optimum/exporters/onnx/base.py (optimum-onnx 0.1.0);
`getCacheNames` in src/configs.js (@huggingface/transformers 4.3.1).
"""

from kvdoctor.analysis.dialects.dialect import KV, Dialect, N, SlotRule

DIALECT = Dialect(
    name="optimum",
    order=10,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.{KV}", "present.{layer}.{part}", "self-attention"),
        SlotRule(rf"past_key_values\.{N}\.decoder\.{KV}", "present.{layer}.decoder.{part}", "self-attention"),
        SlotRule(rf"past_key_values\.{N}\.encoder\.{KV}", "present.{layer}.encoder.{part}", "cross-attention", "BNEH"),
        SlotRule(
            rf"past_key_values\.{N}\.key_value", "present.{layer}.key_value", "self-attention", "", part="key-value"
        ),
        SlotRule(
            rf"past_key_values\.{N}\.(?P<leaf>conv_state|shift_state)", "present.{layer}.{leaf}", "conv-state", "BCZ"
        ),
        SlotRule(
            rf"past_key_values\.{N}\.(?P<leaf>(recurrent|ssm)_state)", "present.{layer}.{leaf}", "recurrent-state", ""
        ),
        SlotRule(rf"past_conv\.{N}(?P<tail>\.\w+)?", "present_conv.{layer}{tail}", "conv-state", "BCZ"),
        SlotRule(
            rf"past_(?P<leaf>ssm|recurrent|compressor|indexer)\.{N}(?P<tail>\.\w+)?",
            "present_{leaf}.{layer}{tail}",
            "recurrent-state",
            "",
        ),
    ),
)
