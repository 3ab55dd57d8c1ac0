"""The numbers that config.json declares of the decoder, each with its key."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from kvdoctor.analysis.configs import CONTEXT_KEYS, decoder_config, is_count
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, Disagreements, either, span
from kvdoctor.diagnose.checks.side_cars.graph_sizes import cache_sizes, head_widths, logits_width, positions
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.records import record

DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = (
    *("decoder_attention_heads", "decoder_num_attention_heads", "num_decoder_attention_heads"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
)
WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model")
VOCABULARIES = ("draft_vocab_size", "decoder_vocab_size", "output_vocab_size", "padded_vocab_size", "vocab_size")
"""Keys by what they count, the most special first: `vocab_size` of a translator may be that of its encoder."""
OTHER_HEADS = ("num_global_key_value_heads", "swa_num_key_value_heads")
OTHER_WIDTHS = ("global_head_dim", "swa_head_dim", "attention_head_dim")
"""Keys of a second kind of attention layers in the same model."""
UNGROUPED = {
    *("bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "bloom", "codegen", "gpt2"),
    *("gpt_neo", "gpt_neox", "gptj", "m2m_100", "marian", "mbart", "mpt", "musicgen_decoder", "opt"),
    *("pegasus", "plbart", "speech_to_text", "speecht5", "trocr", "whisper", "xglm"),
}
"""Model types that have as many kv heads as attention heads, each as wide as the model divided by them."""
RELATIVE = {"t5", "mt5", "umt5", "longt5", "switch_transformers", "pix2struct_text_model"}
"""Model types with as many kv heads as attention heads, and a `d_kv` of their own."""
DIVIDED = UNGROUPED | {
    *("bamba", "cohere", "cohere2", "falcon", "falcon_h1", "gpt_bigcode", "granite", "granitemoe", "lfm2"),
    *("llama", "mistral", "mixtral", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "smollm3"),
    *("stablelm", "starcoder2"),
}
"""Model types whose heads are as wide as the model divided by them, unless `head_dim` is given."""
ALL_LAYERS_CACHE = {
    *("arcee", "cohere", "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "gpt_bigcode", "gpt_oss", "gptoss", "granite", "granitemoe", "helium", "llama", "mistral"),
    *("mixtral", "moonshine", "nemotron", "olmo", "olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3", "stablelm", "starcoder2"),
}
ALL_LAYERS_CACHE |= UNGROUPED | RELATIVE
"""Model types in which every layer of the decoder has a self-attention cache of its own.

Sources of these lists: the attention classes and configurations of transformers 4.57 and 5.23.
"""

What = Literal["layers", "kv_heads", "head_dim", "key_dim", "value_dim", "vocabulary", "context"]


@record
class ConfigClaim:
    """A number that a config declares under `key`; `also` agree. Keys and values may differ: `key_dim`, `value_dim`."""

    what: What
    key: str
    value: int
    also: frozenset[int] = frozenset()


def claimed(part: dict[str, Any], path: str, **keys: What) -> Iterator[ConfigClaim]:
    """The numbers that a part of a config declares under some keys, by what they count."""
    for key, what in keys.items():
        if is_count(part.get(key)):
            yield ConfigClaim(what, f"{path}.{key}", int(part[key]))


def claims(config: dict[str, Any]) -> Iterator[ConfigClaim]:
    """The numbers that config.json declares of the decoder. Defaults, and values that are no numbers, do not count."""
    part = decoder_config(config)
    kind = str(part.get("model_type"))
    keys = _counted(part, (*DECODER_LAYERS, *LAYERS))
    # Of an encoder-decoder, num_hidden_layers are those of the encoder.
    if keys and not (part.get("is_encoder_decoder") is True and keys[0] == "num_hidden_layers"):
        extra, value = part.get("num_nextn_predict_layers"), part[keys[0]]
        yield ConfigClaim("layers", keys[0], value, frozenset([value + extra] if is_count(extra) else []))
    yield from _claimed_heads(part, kind)
    yield from _claimed_widths(part, kind)
    for key in _counted(part, VOCABULARIES)[:1]:
        more = part.get("additional_vocab_size")
        yield ConfigClaim("vocabulary", key, part[key], frozenset([part[key] + more] if is_count(more) else []))
    for key in _counted(part, CONTEXT_KEYS)[:1]:
        yield ConfigClaim("context", key, part[key])


def _claimed_heads(part: dict[str, Any], kind: str) -> Iterator[ConfigClaim]:
    given = _counted(part, ("decoder_num_key_value_heads", "num_key_value_heads"))
    heads = _counted(part, HEADS)
    if kind == "falcon":
        yield from _falcon_heads(part)
    elif kind == "gpt_bigcode" and part.get("multi_query") in (True, False) and heads:
        one = part["multi_query"]
        yield ConfigClaim("kv_heads", "multi_query" if one else heads[0], 1 if one else part[heads[0]])
    elif given:
        others = [part[key] for key in _counted(part, OTHER_HEADS)]
        # Latent attention keeps a cache for each head, or one that all of them share.
        latent = [1] if is_count(part.get("kv_lora_rank")) else []
        yield ConfigClaim("kv_heads", given[0], part[given[0]], frozenset([*others, *latent]))
    elif heads and kind in UNGROUPED | RELATIVE:
        yield ConfigClaim("kv_heads", heads[0], part[heads[0]])


def _falcon_heads(part: dict[str, Any]) -> Iterator[ConfigClaim]:
    heads, groups = part.get("num_attention_heads"), part.get("num_kv_heads")
    if part.get("new_decoder_architecture") is True:
        # transformers repeats the heads before it caches them; others do not.
        if is_count(groups) and is_count(heads):
            yield ConfigClaim("kv_heads", "num_kv_heads", groups, frozenset([heads]))
    elif part.get("multi_query") is True:
        yield ConfigClaim("kv_heads", "multi_query", 1)
    elif part.get("multi_query") is False and is_count(heads):
        yield ConfigClaim("kv_heads", "num_attention_heads", heads)


def _claimed_widths(part: dict[str, Any], kind: str) -> Iterator[ConfigClaim]:
    plain, rotated, value = (part.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    others = frozenset(part[key] for key in _counted(part, OTHER_WIDTHS))
    if is_count(plain) and is_count(rotated):
        rank = part.get("kv_lora_rank")
        latent = frozenset([rank, rank + rotated, rotated] if is_count(rank) else [])
        yield ConfigClaim("key_dim", "qk_nope_head_dim + qk_rope_head_dim", plain + rotated, latent)
        if is_count(value):
            yield ConfigClaim("value_dim", "v_head_dim", value, latent)
        return
    heads, widths = _counted(part, HEADS), _counted(part, WIDTHS)
    for key in _counted(part, ("head_dim", "d_kv"))[:1]:
        yield ConfigClaim("head_dim", key, part[key], others)
        return
    # A head_dim that is there and no number is none of ours to replace.
    if kind in DIVIDED and heads and widths and part.get("head_dim") is None:
        width, count = part[widths[0]], part[heads[0]]
        if width % count == 0:
            yield ConfigClaim("head_dim", f"{widths[0]} / {heads[0]}", width // count, others)


def _counted(part: dict[str, Any], keys: Iterable[str]) -> list[str]:
    return [key for key in keys if is_count(part.get(key))]


ATTENTION = ("self-attention", "cross-attention")
PARTS = {
    "kv_heads": ("key", "value", "key-value"),
    "head_dim": ("key", "value"),
    "key_dim": ("key",),
    "value_dim": ("value",),
}
PADDED_TO = (8, 16, 32, 64, 128, 256, 512, 1024)
MOST_PADDED = 0.06
"""Share of a vocabulary that padding may add: 50257 tokens become 51200 rows, but 64 do not become 128."""


def layers(context: ContractContext, claim: ConfigClaim, model_type: str) -> Disagreements:
    """Another number of layers with a cache than the graph has."""
    slots = context.contract.slots
    numbered = [slot for slot in slots if slot.layer is not None]
    cached = {slot.layer or 0 for slot in numbered if slot.kind in ATTENTION}
    growing = {slot.layer or 0 for slot in numbered if slot.kind == "self-attention"}
    limit = max(claim.value, *claim.also, 0)
    from_nought = any(slot.layer == 0 for slot in numbered)
    # A number left out is a fault of the graph (KV106): then the highest one does not count the layers.
    whole = from_nought and {slot.layer for slot in numbered} == set(range(max(s.layer or 0 for s in numbered) + 1))
    if not numbered:  # one tensor for all layers, unless it also stacks keys and values
        own = context.contract.of_kind("self-attention")
        counts = {slot.size("layers") for slot in own if slot.part in ("key", "value") or "parts" in slot.axes}
        count = next(iter(counts)) if len(counts) == 1 else None
        if count is not None and count not in {claim.value, *claim.also}:
            yield _numbered(claim, f"{count} layers in one tensor", str(count))
    elif len(cached) > limit or (whole and max(cached, default=0) >= limit):
        yield _numbered(claim, f"caches of layers {span(cached)}", str(max(len(cached), max(cached) + from_nought)))
    elif model_type in ALL_LAYERS_CACHE and growing == set(range(len(growing))) and 0 < len(growing) < claim.value:
        yield _numbered(claim, f"caches of layers {span(growing)} and no more", str(len(growing)))


def sizes(context: ContractContext, claim: ConfigClaim, *, fused: bool = False) -> Disagreements:
    """Kv heads and widths, one of which a config may name; `fused` asks operators where no cache declares one."""
    seen = cache_sizes(context, "kv_heads" if claim.what == "kv_heads" else "head_dim", PARTS[claim.what])
    seen = seen or (head_widths(context) if fused else set())
    if seen and claim.value not in seen and not seen <= claim.also:
        word = {"kv_heads": "kv heads", "key_dim": "head_dim of keys", "value_dim": "head_dim of values"}
        so = "the runtime refuses a cache that is allocated by the config"
        yield _numbered(claim, f"{word.get(claim.what, 'head_dim')} {either(seen)}", either(seen), so)


def vocabulary(context: ContractContext, claim: ConfigClaim, *, exactly: bool = False) -> Disagreements:
    """The width of the logits: that of the vocabulary, or that of a table padded to a round number of rows."""
    width = logits_width(context)
    if width is None or width == claim.value:
        return
    if exactly or not any(_is_padded(words, width) for words in (claim.value, *claim.also)):
        so = "the runtime allocates logits of the width in the config and stops" if exactly else ""
        yield _numbered(claim, f"logits of width {width}", str(width), so)


def context(context: ContractContext, claim: ConfigClaim) -> Disagreements:
    """A table of positions that ends before the context does. A longer one is no fault."""
    rows = positions(context.stack, context.contract)
    if rows is not None and rows < claim.value:
        so = f"token {rows + 1} and later ones have no position"
        yield _numbered(claim, f"a table of {rows} positions", f"{rows} at most", so)


def _numbered(claim: ConfigClaim, observed: str, right: str, so: str = "") -> Disagreement:
    if claim.key == "multi_query":  # a flag that stands for one head
        return Disagreement(claim.key, "true", observed, "false", so)
    return Disagreement(claim.key, str(claim.value), observed, right, so)


def _is_padded(words: int, width: int) -> bool:
    """Whether a table of that width can be one of so many tokens, padded to a round number."""
    if not words <= width <= words * (1 + MOST_PADDED):
        return False
    return width == words or any(-(-words // unit) * unit == width for unit in PADDED_TO)
