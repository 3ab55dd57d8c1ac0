"""What config.json says of a decoder's arithmetic: the keys of each value, by model type, with the defaults.

Sources: configuration_*.py and modeling_*.py of transformers 4.57 and 5.23. A default stands here only where a file
may leave the key out and the model's code decides. Model types that are not listed have no implied values.
"""

from collections.abc import Iterable
from typing import Any

from kvdoctor.analysis.arithmetic.rotary import Declared
from kvdoctor.analysis.configs import is_count, read_part
from kvdoctor.diagnose.checks.side_cars.numbers import HEADS, WIDTHS

EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
ACTIVATIONS = ("hidden_activation", "decoder_hidden_act", "activation_function", "dense_act_fn", "hidden_act")
ACTIVATION_NAMES = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "gelu by tanh"),
    **dict.fromkeys(("silu", "swish"), "silu"),
    **{name: name for name in ("quick_gelu", "relu", "tanh")},
    "relu2": "squared relu",
}
"""The names of ACT2FN, by the function that they stand for."""
ENCODER_DECODERS = {
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "pegasus", "plbart"),
    *("speech_to_text", "trocr", "whisper"),
}
"""The family of BART. All but Whisper scale their embeddings by `scale_embedding`."""
SCALED_BY_WIDTH = ENCODER_DECODERS | {
    *("arcee", "bloom", "codegen", "cohere", "cohere2", "falcon", "gemma", "glm", "gpt2", "gpt_bigcode", "gpt_neox"),
    *("gpt_oss", "gptj", "helium", "llama", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "opt", "phi"),
    *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
}
"""Model types whose scores are divided by the square root of the width of a head, whatever their config says."""
UNSCALED = {"t5", "mt5", "umt5", "longt5", "gpt_neo", "pix2struct_text_model", "switch_transformers"}
"""Model types whose scores have no scale."""
SCALARS = {"gemma2", "gemma3", "gemma3_text"}
"""Model types with `query_pre_attn_scalar`."""
PLAIN = SCALED_BY_WIDTH | SCALARS | UNSCALED | {"granite"}
"""Model types of one kind of block, in which each key has the one meaning that is compared."""
ACTIVATED = PLAIN - {"gpt_oss"}
"""Those whose activation is the one that they name."""
ROTATED = PLAIN | {"deepseek_v2", "deepseek_v3", "falcon_h1", "glm4", "granitemoe", "lfm2", "seed_oss"}
"""Model types whose rotation follows from the keys that are read."""
BIASED = {"arcee", "cohere", "gemma", "gemma2", "gemma3_text", "glm", "granite", "helium", "llama", "nemotron", "olmo"}
BIASED |= {"gpt_oss", "olmo2", "qwen3", "qwen3_moe", "smollm3"}
"""Model types whose `attention_bias` adds a bias to queries."""
MIXED = {"gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
"""Model types whose router chooses among all experts."""
INNER = ("decoder_ffn_dim", "intermediate_size", "ffn_dim", "d_ff", "n_inner")
OTHER_INNER = {"bloom": (), "falcon": ("ffn_hidden_size",), "mpt": (), "opt": ("ffn_dim",)}
"""Keys of the width of feed-forward layers, and those of model types that have others, or none."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
ENCODER_LAYERS = ("encoder_layers", "encoder_num_hidden_layers")


def first_number(part: dict[str, Any], keys: Iterable[str]) -> tuple[str, float] | None:
    """The first of some keys that has a number of usual size, with the number."""
    for key in keys:
        value = part.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
            return key, float(value)
    return None


def head_width(part: dict[str, Any]) -> int | None:
    """The width of a head of queries that a config declares."""
    for key in ("qk_rope_head_dim", "head_dim"):
        if is_count(part.get(key)):
            return int(part[key])
    heads, width = first_number(part, HEADS), first_number(part, WIDTHS)
    return int(width[1] // heads[1]) if heads and width and heads[1] and not width[1] % heads[1] else None


def rotations(part: dict[str, Any]) -> list[Declared]:
    """The rotations that a config declares, one for each kind of layers."""
    if str(part.get("model_type")) not in ROTATED:
        return []
    nested = part.get("rope_parameters")
    kinds = {str(kind) for kind in part["layer_types"]} if isinstance(part.get("layer_types"), list) else set()
    by_kind = {key: one for key, one in nested.items() if isinstance(one, dict)} if isinstance(nested, dict) else {}
    if by_kind:  # since transformers 5, of models whose layers differ
        return [one for key, given in by_kind.items() if key in kinds for one in _rotation(part, given, "rope_theta")]
    scaling = nested if isinstance(nested, dict) else read_part(part, "rope_scaling")
    found = _rotation(part, scaling, "rope_theta")
    local = part.get("rope_local_base_freq")
    if isinstance(local, int | float) and "sliding_attention" in kinds:
        found = [*(found if "full_attention" in kinds else []), *_rotation(part, {}, "rope_local_base_freq")]
    return found


def _rotation(part: dict[str, Any], scaling: dict[str, Any], key: str) -> list[Declared]:
    base = first_number(scaling, (key,)) or first_number(part, (key, "rotary_emb_base"))
    if base is None or base[1] <= 1:
        return []
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    length, most = part.get("original_max_position_embeddings"), part.get("max_position_embeddings")
    factors = {"original_max_position_embeddings": length or most, **scaling}
    return [Declared(base[0], base[1], *rotated_width(part, scaling), str(kind), factors)]


def rotated_width(part: dict[str, Any], scaling: dict[str, Any]) -> tuple[str, int | None]:
    """How many numbers of a head a config rotates, after the key that says so; None where it is not known."""
    if is_count(part.get("rotary_dim")):
        return "rotary_dim", int(part["rotary_dim"])
    width, keys = head_width(part), ("partial_rotary_factor", "rotary_pct", "rope_pct")
    share = first_number(scaling, keys) or first_number(part, keys)
    if share is not None and width is not None:
        return share[0], int(width * share[1])
    return "", width


def score_scale(part: dict[str, Any], kind: str, width: int | None) -> tuple[str, str, float] | None:
    """The scale of the scores: its key, the value there, and the scale; `width` is that of a head in the graph."""
    if kind in SCALARS or kind == "granite":
        given = first_number(part, ("query_pre_attn_scalar" if kind in SCALARS else "attention_multiplier",))
        if given is None or (kind in SCALARS and given[1] <= 0):
            return None
        return given[0], f"{given[1]:g}", given[1] ** -0.5 if kind in SCALARS else given[1]
    if kind == "gpt2" and (part.get("scale_attn_weights") is False or part.get("scale_attn_by_inverse_layer_idx")):
        return None if part.get("scale_attn_by_inverse_layer_idx") else ("scale_attn_weights", "false", 1.0)
    if kind == "mpt" and read_part(part, "attn_config").get("softmax_scale") is not None:
        return None
    if kind in SCALED_BY_WIDTH and width:
        return "model_type", kind, width**-0.5
    return None


def embedding_factor(part: dict[str, Any], kind: str, columns: int) -> tuple[str, str, float] | None:
    """The factor on the embeddings of a table of so many columns: its key, the value there, and the factor."""
    width = first_number(part, WIDTHS)
    if width is None or width[1] != columns:
        return None
    scaled = part.get("scale_embedding")
    if kind in ENCODER_DECODERS - {"whisper"} and isinstance(scaled, bool):
        return "scale_embedding", str(scaled).lower(), width[1] ** 0.5 if scaled else 1.0
    if kind.startswith("gemma") and kind in PLAIN:
        return "model_type", kind, width[1] ** 0.5
    given = first_number(part, ("embedding_multiplier",)) if kind == "granite" else None
    return (given[0], f"{given[1]:g}", given[1]) if given is not None else None


def logits_factor(part: dict[str, Any], kind: str) -> tuple[str, str, float] | None:
    """The factor on the logits: its key, the value there, and the factor."""
    if kind in ("cohere", "cohere2") and (given := first_number(part, ("logit_scale",))):
        return given[0], f"{given[1]:g}", given[1]
    if kind == "granite" and (given := first_number(part, ("logits_scaling",))) and given[1]:
        return given[0], f"{given[1]:g}", 1 / given[1]
    return None
