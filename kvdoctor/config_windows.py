"""The layers that a config says look back over a window of tokens.

`layer_types` names them since transformers 4.53. Configs from before leave it to the model's code; its rules are here,
by `model_type`. Source: transformers 4.57, which derives `layer_types` from such configs in configuration_*.py, and has
the window in every attention of mistral, mixtral, phi3 and starcoder2.
"""

from typing import Any

from kvdoctor.configs import decoder_config, is_count

IN_EVERY_LAYER = ("mistral", "mixtral", "phi3", "starcoder2")
FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every so many layers one sees all tokens, unless `sliding_window_pattern` has another number."""
PATTERN_IN_CONFIG = ("gemma3", "gemma3_text", "cohere2")
FROM_A_LAYER_ON = ("qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3")
"""The first `max_window_layers` layers see all tokens, and `use_sliding_window` is off unless it is said."""
MOST_LAYERS = 4096


def declared_windows(config: dict[str, Any]) -> dict[int, int]:
    """By layer, how many tokens it looks back over; layers that see all tokens are left out."""
    part = decoder_config(config)
    window: Any = part.get("sliding_window")
    if not is_count(window) or part.get("use_sliding_window") is False:
        return {}
    kinds = part.get("layer_types")
    layers = (
        [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]
        if isinstance(kinds, list)
        else _by_family(part)
    )
    return dict.fromkeys(layers, window)


def _by_family(part: dict[str, Any]) -> list[int]:
    family, count = part.get("model_type"), part.get("num_hidden_layers")
    if not isinstance(family, str) or not is_count(count) or count > MOST_LAYERS:
        return []
    if family in IN_EVERY_LAYER:
        return list(range(count))
    if family in FULL_EVERY:
        told = part.get("sliding_window_pattern") if family in PATTERN_IN_CONFIG else None
        every = told if is_count(told) else FULL_EVERY[family]
        return [layer for layer in range(count) if (layer + 1) % every]
    first = part.get("max_window_layers")
    if family in FROM_A_LAYER_ON and part.get("use_sliding_window") is True and isinstance(first, int):
        return list(range(max(first, 0), count))
    return []
