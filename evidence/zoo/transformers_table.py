"""What is true of each export by transformers 5 (`OnnxExporter`) and by plain `torch.onnx.export(dynamo=True)`.

The exporter of transformers writes a graph without past and one with past. Its encoder-decoders return the
cross-attention cache as they got it, so that even a loop that feeds everything back is right. Plain dynamo graphs have
anonymous outputs, and one of them serves the first step too.
"""

from evidence.zoo.row import Fault, Row, Slots, Stack, cross_cache, keys_and_values

PAIR = (Stack.of("pair", "transformers-pair", "no-past-graph", [keys_and_values()]),)
CROSS_PAIR = (Stack.of("pair", "transformers-pair", "no-past-graph", [keys_and_values(), cross_cache()]),)
STATIC = (
    Stack.of(
        "pair",
        "transformers-pair-static",
        "no-past-graph",
        # a buffer of 32 tokens, written in place, and each layer counts the tokens that it holds
        [keys_and_values(growth="static"), Slots(2, "counter", "replace")],
    ),
)
CROSS_STATIC = (
    Stack.of(
        "pair",
        "transformers-pair-static",
        "no-past-graph",
        # the cross-attention cache counts as well
        [keys_and_values(growth="static"), cross_cache(), Slots(4, "counter", "replace")],
    ),
)
BROKEN_WINDOW = (
    Stack.of("pair", "transformers-pair", "no-past-graph", [keys_and_values(), Slots(2, "counter", "replace")]),
)
CONVOLUTION = (
    Stack.of(
        "pair",
        "transformers-pair-hybrid",
        "no-past-graph",
        [keys_and_values(layers=1), Slots(1, "conv-state", "replace")],
    ),
)
RECURRENCE = (
    Stack.of(
        "pair",
        "transformers-pair-hybrid",
        "no-past-graph",
        [keys_and_values(layers=1), Slots(1, "conv-state", "replace"), Slots(1, "recurrent-state", "replace")],
    ),
)
STATES = (
    Stack.of(
        "pair",
        "transformers-pair-recurrent",
        "no-past-graph",
        [Slots(2, "conv-state", "replace"), Slots(2, "recurrent-state", "replace")],
    ),
)
DYNAMO = (Stack.of("decoder", "torch-decoder-only", "empty-past", [keys_and_values()]),)
DYNAMO_PAIR = (Stack.of("pair", "torch-pair", "no-past-graph", [keys_and_values()]),)

ONE_TOKEN = Fault(
    "past-axis-frozen", "pair", "traced after a prompt of one token: torch takes a length of 1 for a constant"
)
FIXED = (
    Fault("past-axis-frozen", "pair", "exported with fixed shapes"),
    Fault("batch-axis-frozen", "pair", "exported with fixed shapes", "warning"),
    Fault("sequence-axis-frozen", "pair", "exported with fixed shapes: prompts of one length only", "warning"),
)
TOKEN_LOST = Fault(
    "present-does-not-grow",
    "pair",
    "traced with a full window: a step shifts the cache, does not write its token, and the counters stay at 0",
)
SHORT_STATE = Fault(
    "step-fails",
    "pair",
    "the state of the convolution is the last three inputs of the prompt: of a prompt of one token it is one",
)
SHORT_STATE_SILENT = Fault(
    "cached-differs",
    "pair",
    "the state of the convolution is too short after a prompt of one token, and this graph takes it as it is",
)
CHUNK = Fault(
    "step-fails",
    "pair",
    "the number of chunks of the scan is frozen at 1: a prompt longer than a chunk, eight tokens, fails",
)
ONE_LENGTH = Fault("sequence-axis-frozen", "pair", "the length of the sample prompt is frozen", "warning")


def row(name: str, stacks: tuple[Stack, ...], *faults: Fault) -> Row:
    """One export."""
    return Row("transformers", name, stacks, faults=faults)


ROWS = (
    row("llama", PAIR),
    row("gpt2", PAIR),
    row("qwen3", PAIR),
    row("mistral", PAIR),  # a sliding window, and yet the cache keeps every token: the window is a mask
    row("gemma2", PAIR),  # the same in every other layer
    row("llama-padded", PAIR),  # traced with padding: takes a mask
    row("llama-multi", PAIR),  # several new tokens on a cache
    row("llama-listed", PAIR),  # axes listed by hand
    row("t5", CROSS_PAIR),
    row("marian", CROSS_PAIR),
    row("bart", CROSS_PAIR),
    row("whisper", CROSS_PAIR),
    row("t5-frozen", CROSS_PAIR, ONE_TOKEN),
    row("whisper-frozen", CROSS_PAIR, ONE_TOKEN),
    row("llama-fixed", PAIR, *FIXED),
    row("llama-static", STATIC),
    row("gpt2-static", STATIC),
    row("marian-static", CROSS_STATIC),  # takes as many encoder states as its trace had, and declares them
    row("mistral-static", BROKEN_WINDOW, TOKEN_LOST),
    row("lfm2", CONVOLUTION, SHORT_STATE),
    row("lfm2-multi", CONVOLUTION, SHORT_STATE_SILENT),
    row("bamba", RECURRENCE, CHUNK),
    Row("transformers", "mamba", STATES, faults=(ONE_LENGTH,), incomplete="a prompt of seven tokens is all it takes"),
    row("llama-dynamo", DYNAMO),
    row("llama-dynamo-named", DYNAMO),
    row("llama-dynamo-keys-first", DYNAMO),  # all keys, then all values, under the same names
    row("llama-dynamo-empty", DYNAMO),  # traced with a past of length 0
    row("llama-dynamo-opset23", DYNAMO),  # the operator Attention, the Concat of the cache outside of it
    row("llama-dynamo-pair", DYNAMO_PAIR),
    row("llama-dynamo-fixed", DYNAMO_PAIR, *FIXED),
    # with the fused operators of onnxruntime for a provider
    *(row(f"{name}-cpu", PAIR) for name in ("llama", "gpt2", "qwen3", "mistral", "gemma2")),
    *(row(f"{name}-cpu", CROSS_PAIR) for name in ("t5", "marian", "bart")),
    row("llama-webgpu", PAIR),
)

LEFT_OUT = {
    "gemma3": "the graphs of gemma2",
    "marian-frozen": "frozen like t5-frozen",
    "bart-frozen": "frozen like t5-frozen",
    "llama-dynamo-opset24": "the graph of opset 23",
    "falcon-h1": "a recurrent scan takes long to trace and shows nothing that bamba does not",
    "qwen3-next": "a recurrent scan takes long to trace and shows nothing that genai's qwen3.5 does not",
}
"""What the script can make beyond the rows, and why it has none."""
