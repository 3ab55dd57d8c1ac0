"""Names of onnxruntime-genai: those of Optimum for keys and values, its own for convolution and recurrent states.

Names in `genai_config.json` take precedence over these. Source: `make_inputs_and_outputs` in
src/python/py/models/builders/base.py, and `recurrent_state.cpp` (onnxruntime-genai 0.18.0).
"""

from kvdoctor.analysis.dialects.dialect import Dialect, N, SlotRule

DIALECT = Dialect(
    name="genai",
    order=20,
    slots=(
        SlotRule(rf"past_key_values\.{N}\.(?P<part>key|value)", "present.{layer}.{part}", "self-attention"),
        SlotRule(rf"past\.{N}\.(?P<leaf>conv)", "present.{layer}.{leaf}", "conv-state", "BCZ"),
        SlotRule(rf"past\.{N}\.(?P<leaf>recurrent)", "present.{layer}.{leaf}", "recurrent-state", ""),
        SlotRule(r"rnn_states_prev", "rnn_states", "recurrent-state", ""),
        SlotRule(r"lstm_(?P<leaf>hidden|cell)_state", "lstm_{leaf}_state_out", "recurrent-state", ""),
    ),
)
