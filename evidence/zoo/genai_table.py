"""What is true of each export by the model builder of onnxruntime-genai 0.18.0, for the CPU.

GroupQueryAttention decides at run time what its cache is: fed a past of the tokens so far, it grows; fed a longer
buffer, it writes in place. The contract says `shared`. In a layer with a window the buffer is a ring. Half precision on
the CPU uses MultiHeadAttention, whose cache grows.
"""

from evidence.zoo.row import FLOAT, HALF, Fault, Row, Slots, Stack, cross_cache, keys_and_values


def row(
    name: str, *slots: Slots, kind: str = "decoder-only", fault: Fault | None = None, largest: float = FLOAT
) -> Row:
    """One export: a single graph that starts with an empty past, and its cache."""
    stack = Stack.of("decoder", f"genai-{kind}", "empty-past", slots)
    return Row("genai", name, (stack,), faults=(fault,) if fault else (), largest=largest)


SHARED = keys_and_values(growth="shared")
SHARED_LAYER = keys_and_values(layers=1, growth="shared")
RING_LAYER = keys_and_values(layers=1, growth="ring")
CONVOLUTION = Slots(1, "conv-state", "replace")
RECURRENCE = Slots(1, "recurrent-state", "replace")

ONE_BY_ONE = Fault(
    "chunk-fails",
    "decoder",
    "the mask of MultiHeadAttention is expanded to the new tokens alone: several on a cache fail in that Expand",
    "warning",
)
NAME_SHARED = Fault(
    "axis-name-collision",
    "decoder",
    "inner shapes name past + new tokens `sequence_length`, so the runtime reuses a buffer that is too small; "
    "it runs where memory is not reused",
)
WINDOW_LOST = Fault(
    "config-disagrees",
    "decoder",
    "the builder leaves the sliding window out of the graph, though not out of genai_config.json",
    "warning",
)

KEYS_CHANGE = Fault(
    "keys-change-with-length",
    "decoder",
    "from the 33rd token on all keys are rotated by the long factors (LongRoPE)",
    "warning",
)

ROWS = (
    row("llama", SHARED),
    row("llama-int4", SHARED),
    row("llama-fp16", keys_and_values(), fault=ONE_BY_ONE, largest=HALF),
    row("llama-fp16-grouped", keys_and_values(), fault=NAME_SHARED),
    row("llama-kv8", SHARED),  # the cache is int8
    row("llama-kv4", SHARED),  # the cache is int4, two numbers a byte
    row("llama-pruned", SHARED),  # logits of the last token only
    row("llama-embeds", SHARED),  # takes embeddings
    row("qwen2", SHARED),
    row("qwen3", SHARED),
    row("mistral", SHARED, fault=WINDOW_LOST),
    row("mistral-window", keys_and_values(growth="ring"), kind="decoder-only-ring"),
    row("gemma", SHARED),
    row("gemma2", SHARED_LAYER, RING_LAYER, kind="decoder-only-ring"),
    row("gpt-oss", SHARED_LAYER, RING_LAYER, kind="decoder-only-ring"),
    row("phi", SHARED),
    row("phi3", SHARED),
    row("phi3-long", SHARED, fault=KEYS_CHANGE),
    row("lfm2", SHARED_LAYER, CONVOLUTION, kind="decoder-only-hybrid"),
    row("qwen3.5", SHARED_LAYER, CONVOLUTION, RECURRENCE, kind="decoder-only-hybrid"),
    row("whisper", keys_and_values(), cross_cache(), kind="encoder-decoder"),  # the encoder fills the cross cache
)

LEFT_OUT: dict[str, str] = {}
"""What the script can make beyond the rows, and why it has none."""
