"""The changes: nine values of each family's config.json, and what kvdoctor says of each."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evidence.zoo.row import Row
from evidence.zoo.tables import ROWS
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.findings import Finding

SCALED: Any = {"rope_type": "linear", "factor": 4.0}
ROTARY: dict[str, Any] = {"rope_theta": 500000.0, "rope_scaling": SCALED}
LLAMA: dict[str, Any] = {
    **ROTARY,
    "rms_norm_eps": 0.001,
    "hidden_act": "relu",
    "tie_word_embeddings": True,
    "intermediate_size": 48,
    "num_attention_heads": 8,
}
CAPS: dict[str, Any] = {"attn_logit_softcapping": 15.0, "final_logit_softcapping": 15.0, "query_pre_attn_scalar": 64}
GEMMA: dict[str, Any] = {**CAPS, "rms_norm_eps": 0.001, "hidden_activation": "silu", "sliding_window": 3}
MULTIPLIERS = dict.fromkeys(
    ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), 0.25
)

FAMILIES: dict[tuple[str, str], dict[str, Any]] = {
    ("optimum", "llama"): {**LLAMA, "attention_bias": True, "partial_rotary_factor": 0.5},
    ("optimum", "mistral"): {**LLAMA, "sliding_window": 3, "partial_rotary_factor": 0.5},
    ("optimum", "qwen3"): {**LLAMA, "attention_bias": True, "head_dim": 24},
    ("optimum", "qwen3_moe"): {
        **{key: value for key, value in LLAMA.items() if key not in ("intermediate_size", "num_attention_heads")},
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 48,
        "attention_bias": True,
    },
    ("transformers", "gemma2"): {
        **GEMMA,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "intermediate_size": 48,
    },
    ("optimum", "gemma3_text"): {
        **GEMMA,
        "rope_local_base_freq": 500000.0,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
    },
    ("optimum", "phi3"): {**LLAMA, "sliding_window": 3, "partial_rotary_factor": 0.5},
    ("optimum", "phi"): {
        **{key: value for key, value in LLAMA.items() if key != "rms_norm_eps"},
        "layer_norm_eps": 0.001,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": 1,
    },
    ("optimum", "granite"): {
        **MULTIPLIERS,
        "rope_theta": 500000.0,
        "rms_norm_eps": 0.001,
        "hidden_act": "relu",
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    ("optimum", "cohere"): {
        **{key: value for key, value in LLAMA.items() if key != "rms_norm_eps"},
        "layer_norm_eps": 0.001,
        "logit_scale": 0.5,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    ("optimum", "gpt2"): {
        "activation_function": "relu",
        "layer_norm_epsilon": 0.001,
        "n_inner": 48,
        "scale_attn_weights": False,
        "tie_word_embeddings": False,
        "n_head": 8,
        "n_embd": 48,
        "n_layer": 3,
        "n_positions": 1024,
    },
    ("optimum", "t5"): {
        "dense_act_fn": "silu",
        "layer_norm_epsilon": 0.001,
        "d_ff": 48,
        "tie_word_embeddings": False,
        "relative_attention_num_buckets": 16,
        "relative_attention_max_distance": 64,
        "num_heads": 8,
        "d_kv": 24,
        "num_decoder_layers": 3,
    },
}
"""The changed values by exporter and architecture; each is another one than that of the export."""


@dataclass(frozen=True)
class Change:
    """One changed value: its key, the value that was right and the wrong one, and the finding; None where none is."""

    key: str
    right: Any
    wrong: Any
    finding: Finding | None


def row_of(exporter: str, architecture: str) -> Row:
    """The row of the zoo whose export is changed."""
    return next(
        row for row in ROWS if (row.exporter, row.architecture, row.variant) == (exporter, architecture, "exported")
    )


def findings(folder: Path) -> list[Finding]:
    """What an inspection finds wrong with the config.json of a folder."""
    found = inspect(str(folder)).findings
    return [one for one in found if one.name == "config-disagrees" and one.file == "config.json"]


def change_each(export: Path, changed: dict[str, Any]) -> Iterator[Change]:
    """Change one value after another in a copy of an export, and inspect it."""
    with TemporaryDirectory(prefix="kvdoctor-evidence-") as scratch:
        copy = Path(scratch) / "model"
        shutil.copytree(export, copy)
        right = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        for key, wrong in changed.items():
            place = right if key in right or key not in right.get("rope_parameters", {}) else right["rope_parameters"]
            before = place.get(key)
            place[key] = wrong
            (copy / "config.json").write_text(json.dumps(right), encoding="utf-8")
            named = [one for one in findings(copy) if any(key in part.split(" / ") for part in one.subject)]
            yield Change(key, before, wrong, named[0] if named else None)
            place[key] = before
            if before is None:
                del place[key]
