"""What is true of each export by Optimum (optimum-onnx 0.1.0).

Every model has two layers, so four slots of self-attention. A decoder alone is one graph that starts with an empty
past. An encoder-decoder comes twice in its folder: merged, with `use_cache_branch`, and as a pair of graphs.
"""

from evidence.zoo.row import Fault, Row, Slots, Stack, cross_cache, keys_and_values

EMPTIED = Fault(
    "cross-cache-emptied",
    "merged",
    "the merge gives the cached branch constants without elements for the cross-attention cache, which its graph does "
    "not return; a loop that feeds them back fails, or is silently wrong",
    consumers=("plain",),
)
UNMASKED = tuple(
    Fault(
        "mask-not-offset",
        stack,
        "with a past there is no causal mask: right for one new token, not for several",
        "warning",
    )
    for stack in ("merged", "pair")
)
COUNTED = Fault(
    "padding-changes-logits",
    "decoder",
    "learned positions are counted from the start of the past, padding on the left included",
    "warning",
)
CAP_LOST = Fault(
    "config-disagrees",
    "decoder",
    "traced with an attention that leaves out the cap of the scores, which config.json has",
    "warning",
)
DECODER = (Stack.of("decoder", "optimum-decoder-only", "empty-past", [keys_and_values()]),)
ENCODER_DECODER = (
    Stack.of("merged", "optimum-merged", "no-past-branch", [keys_and_values(), cross_cache()]),
    Stack.of("pair", "optimum-pair", "no-past-graph", [keys_and_values(), cross_cache()]),
)
PAIR_ALONE = (ENCODER_DECODER[1],)
FRAMES = (
    # the spectrogram so far is fed to the next step, and computed on anew
    Stack.of(
        "pair",
        "optimum-pair",
        "no-past-graph",
        [keys_and_values(), cross_cache(), Slots(1, "hidden-memory", "grow")],
    ),
)
NO_CROSS_CACHE = (
    Stack.of("merged", "optimum-merged-self-only", "no-past-branch", [keys_and_values()]),
    Stack.of("pair", "optimum-pair", "no-past-graph", [keys_and_values()]),
)


def decoder(name: str, *faults: Fault) -> Row:
    """A decoder alone. It is right in every loop."""
    return Row("optimum", name, DECODER, faults=faults)


def encoder_decoder(name: str, *more: Fault) -> Row:
    """An encoder-decoder: the pair is right in every loop, the merged file only where the cross cache is held."""
    return Row("optimum", name, ENCODER_DECODER, faults=(EMPTIED, *more))


def no_cross_cache(name: str) -> Row:
    """An encoder-decoder that computes the keys of its cross-attention anew in each step: nothing can be emptied."""
    return Row("optimum", name, NO_CROSS_CACHE)


ROWS = (
    encoder_decoder("marian"),
    encoder_decoder("t5"),
    encoder_decoder("bart"),
    encoder_decoder("whisper"),
    encoder_decoder("mbart"),
    encoder_decoder("m2m_100"),
    encoder_decoder("pegasus"),
    encoder_decoder("blenderbot"),
    encoder_decoder("blenderbot-small"),
    encoder_decoder("bigbird_pegasus"),
    encoder_decoder("mt5"),
    encoder_decoder("longt5"),
    encoder_decoder("bert2bart"),
    encoder_decoder("speech_to_text", *UNMASKED),
    encoder_decoder("moonshine"),
    encoder_decoder("trocr", *UNMASKED),  # its plain loop runs to the end, with wrong logits
    encoder_decoder("donut"),
    encoder_decoder("pix2struct"),  # has a mask for the decoder as well
    Row("optimum", "musicgen", PAIR_ALONE),  # ids in rows of codebooks; Optimum does not merge it
    Row(
        "optimum",
        "speecht5",
        FRAMES,
        not_applicable="it decodes frames of a spectrogram: there are no tokens to decode and no logits to compare",
    ),
    no_cross_cache("bert2gpt2"),
    no_cross_cache("vit-gpt2"),
    decoder("gpt2"),
    decoder("llama"),
    decoder("bart-causal", COUNTED),  # takes the position from the length of the past
    decoder("gptj"),
    decoder("gpt_bigcode"),  # one head for key and value
    decoder("codegen"),
    decoder("gpt_neo"),  # a local layer masks, its cache grows like the others
    decoder("gpt_neox"),
    decoder("opt"),
    decoder("bloom"),  # no position_ids: takes the positions from the mask
    decoder("falcon"),
    decoder("falcon-alibi"),
    decoder("mpt"),
    decoder("mistral"),  # the window is a mask here and in the five of its kind below
    decoder("qwen2"),
    decoder("qwen3"),
    decoder("qwen3_moe"),
    decoder("phi"),
    decoder("phi3"),
    decoder("gemma"),
    decoder("gemma2", CAP_LOST),
    decoder("gemma3_text"),
    decoder("gpt_oss"),
    decoder("olmo"),
    decoder("olmo2"),
    decoder("cohere"),
    decoder("granite"),
    decoder("stablelm"),
    decoder("deepseek_v3"),  # keys are wider than values
    decoder("glm"),
    decoder("helium"),
    decoder("nemotron"),
    decoder("smollm3"),
    decoder("arcee"),
)

LEFT_OUT: dict[str, str] = {}
"""What the script can make beyond the rows, and why it has none."""
