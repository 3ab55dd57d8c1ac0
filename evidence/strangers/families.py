"""The families of right decoders, and what is drawn for each instance."""

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .design import NAMINGS, WINDOW, Design

ORDERS = ("bhsd", "bshd", "sbhd", "bhds", "hbsd", "hsbd", "1bhsd", "b1hsd", "bs(hd)", "sb(hd)", "(bh)sd")
PACKED = ("cbhsd", "bchsd", "bsc(hd)", "bhs(cd)", "lbhsd", "blhsd", "lbshd", "lb1s(hd)", "bl(hd)s")
WHOLE = ("lcbhsd", "clbhsd", "blchsd", "b(lc)hsd", "(lc)bhsd", "lcbs(hd)", "bslchd", "lcsbhd", "1lcbhsd")
STATES = ("", "lbhde", "bhed", "hbde", "lbd", "1bd", "bl1d", "db", "lbdn", "bnd", "lbdw", "bwd")
SIZES = ((4, 4), (4, 2), (4, 1), (6, 2), (6, 3))
OWN = tuple(NAMINGS)
SHAPED = {
    "names": OWN,
    "block": ("serial", "parallel"),
    "ffn": ("swiglu", "gelu", "moe"),
    "norm": ("rms", "layer"),
    "vocab": (97, 89, 101),
}
ROTARY = {"rotary": ("full", "partial", "interleaved", "read")}


@dataclass(frozen=True)
class Family:
    """One kind of right decoders: the fields of its first instance, and choices for the others."""

    fields: dict[str, Any]
    drawn: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    unclear: bool = False
    """Whether the file leaves open what no run can settle: exit code 3 is right too."""

    def instance(self, name: str, number: int) -> Design:
        """One drawing, the same for the same name and number."""
        random = np.random.default_rng([number, zlib.crc32(name.encode())])
        seed = int(random.integers(1000))
        design = Design(f"{name}_{number}" if number else name, seed=seed, **self.fields)
        if not number:
            return design
        free = {**SHAPED, **self.drawn}
        chosen = {key: values[random.integers(len(values))] for key, values in free.items() if key not in self.fields}
        if "attention" in design.mixers and "kv" not in self.fields:
            heads, kv = SIZES[random.integers(len(SIZES))]
            chosen |= {"heads": heads, "kv": kv}
        return replace(design, **chosen)


def _attention(unclear: bool = False, drawn: dict[str, tuple[Any, ...]] | None = None, **fields: Any) -> Family:
    return Family(fields, {**({"order": ORDERS} if "order" not in fields else {}), **ROTARY, **(drawn or {})}, unclear)


def _static(**fields: Any) -> Family:
    fields = {"store": "static", "counted": "cache_position", **fields}
    drawn = {"write": ("where", "onehot", "elements", "nd", "slice")}
    return _attention(drawn={key: value for key, value in drawn.items() if key not in fields}, **fields)


def _window(store: str, counted: str, **fields: Any) -> Family:
    return _attention(store=store, counted=counted, window=WINDOW, **fields)


def _state(mixer: str, **fields: Any) -> Family:
    given: dict[str, Any] = {"mixers": (mixer, mixer), "positions": "none", **fields}
    return Family(given, {"state_order": STATES, "names": OWN})


FAMILIES: dict[str, Family] = {
    # Growing caches: orders, packings
    "gqa": _attention(),
    "mqa": _attention(kv=1, order="bshd", names="own"),
    "heads_last": _attention(order="sbhd", names="camel"),
    "transposed": _attention(order="bhds", names="hf"),
    "heads_first": _attention(order="hbsd", names="short"),
    "flat_heads": _attention(order="bs(hd)", names="cache"),
    "rows_and_heads": _attention(order="(bh)sd", names="ort"),
    "leading_one": _attention(order="1bhsd", names="german"),
    "packed_kv": _attention(order="cbhsd", names="ort", drawn={"order": PACKED[:4]}),
    "packed_width": _attention(order="bhs(cd)", names="own"),
    "stacked_layers": _attention(order="lbhsd", names="own"),
    "stacked_rows_first": _attention(order="blhsd", names="memory"),
    "one_tensor": _attention(order="lcbhsd", names="memory"),
    "one_tensor_rows": _attention(order="blchsd", names="pairs"),
    "one_tensor_merged": _attention(order="b(lc)hsd", names="short"),
    "delta": _attention(unclear=True, store="delta", names="own"),
    # How tokens are counted
    "position_ids": _attention(counted="position_ids", mask="int"),
    "positions_only": _attention(counted="position_ids", names="numbered", order="bhsd"),
    "cache_position": _attention(counted="cache_position", names="hf"),
    "past_length": _attention(counted="past_length", names="own"),
    "past_length_scalar": _attention(counted="past_length", names="short", extras=("scalars",)),
    "past_lengths": _attention(counted="past_lengths", names="cache"),
    "total_length": _attention(counted="total_length", names="own"),
    "lengths": _attention(counted="lengths", names="german"),
    "seqlens": _attention(counted="lasts", names="ort"),
    "from_mask": _attention(counted="mask", mask="int"),
    "counter": _attention(counted="counter", names="short"),
    # Masks
    "mask_bool": _attention(mask="bool", names="camel"),
    "mask_float": _attention(mask="float", names="own"),
    "mask_int32": _attention(mask="int32"),
    "mask_additive": _attention(mask="add", names="cache"),
    "mask_hides": _attention(mask="bool_hide", names="own"),
    "mask_hides_int": _attention(mask="int_hide", names="short"),
    "mask_4d": _attention(mask="add_4d", names="hf"),
    "mask_4d_bool": _attention(mask="bool_4d"),
    "mask_4d_int": _attention(mask="int_4d", names="german"),
    "mask_rows": _attention(mask="int_row", names="cache"),
    # Caches of a fixed size
    "static_nd": _static(write="nd", names="own"),
    "static_elements": _static(write="elements", names="hf"),
    "static_where": _static(write="where", names="cache", order="bshd"),
    "static_onehot": _static(write="onehot", names="memory"),
    "static_slices": _static(write="slice", names="short"),
    "static_rows": _static(write="elements", counted="past_lengths", names="own"),
    "static_positions": _static(counted="position_ids", write="where"),
    "static_length": _static(counted="past_length", names="qeff"),
    "static_counter": _static(counted="counter", names="german"),
    "static_mask": _static(counted="mask", mask="int", names="own"),
    "static_4d": _static(mask="add_4d", names="hf"),
    "static_one_tensor": _static(order="lcbhsd", counted="past_length", names="memory"),
    "ring": _window("ring", "past_length", names="own"),
    "ring_position": _window("ring", "cache_position", names="camel"),
    "ring_counter": _window("ring", "counter", names="short"),
    "shifted": _window("shift", "past_length", names="own"),
    "shifted_positions": _window("shift", "position_ids", names="cache"),
    "shifted_counter": _window("shift", "counter", names="german"),
    "cut": _window("cut", "position_ids", names="optimum"),
    "cut_counter": _window("cut", "counter", names="short"),
    "window": _attention(window=12, names="optimum"),
    "cut_mixed": _attention(store="mixed", counted="position_ids", window=WINDOW, names="hf"),
    "cut_with_first": _window("sinks", "position_ids", names="own"),
    "cut_with_first_counter": _window("sinks", "counter", names="camel"),
    # Positions
    "learned": _attention(positions="learned", counted="shape", names="own"),
    "learned_ids": _attention(positions="learned", counted="position_ids", mask="int"),
    "alibi": _attention(positions="alibi", names="short"),
    "relative": _attention(positions="t5", names="cache"),
    "nope": _attention(positions="none", names="own"),
    "read_rotated": _attention(rotary="read", names="hf"),
    "partial": _attention(rotary="partial", names="torch"),
    # Forms of the logits
    "logits_bvs": _attention(logits="bvs", names="own"),
    "logits_sbv": _attention(logits="sbv", names="pairs"),
    "logits_flat": _attention(logits="flat", names="short"),
    "logits_last": _attention(logits="last", names="cache"),
    "logits_last_one": _attention(logits="last_one"),
    "tokens": _attention(logits="argmax", names="own"),
    "tokens_last": _attention(logits="argmax_last", names="german"),
    "log_probabilities": _attention(logits="log", names="rnn"),
    "several_heads": _attention(logits="heads", names="own"),
    "books_out": _attention(logits="books", extras=("codebooks",), names="short"),
    "top_values": _attention(unclear=True, logits="topk", names="own"),
    # Inputs beyond
    "beams": _attention(extras=("beam_idx",), names="own"),
    "temperature": _attention(extras=("temperature",), names="cache"),
    "temperature_scalar": _attention(extras=("temperature", "scalars"), names="torch"),
    "training": _attention(extras=("training",), names="own"),
    "lora": _attention(extras=("lora",)),
    "prefix": _attention(extras=("prefix",), names="own"),
    "types": _attention(extras=("types",), mask="int"),
    "speaker": _attention(extras=("speaker",), names="short"),
    "style": _attention(extras=("style",), names="own"),
    "rank_one": _attention(extras=("rank_one",), batch_one=True, names="cache"),
    "int32": _attention(extras=("int32",), names="qeff"),
    "codebooks": _attention(extras=("codebooks",), names="own"),
    "embedded": _attention(extras=("embeds",), mask="int"),
    "keep_logits": _attention(extras=("keep_logits",)),
    "logit_bias": _attention(extras=("logit_bias",), names="short"),
    "hidden_too": _attention(extras=("hidden_out",), names="hf"),
    "cache_first": _attention(extras=("cache_first",), names="memory"),
    "bigram": _attention(extras=("bigram",), names="own"),
    "float_offset": _attention(counted="past_length", extras=("float_offset", "scalars"), names="own"),
    "half_cache": _attention(extras=("half",), names="cache"),
    "half_static": _static(extras=("half",), counted="past_length", names="own"),
    "time_major": _attention(extras=("time_major",), logits="sbv", order="sbhd", names="own"),
    "three_positions": _attention(extras=("mrope",), counted="position_ids", mask="int"),
    "attention_too": _attention(extras=("shares_out",), names="own"),
    "unused_input": _attention(extras=("unused",), names="camel"),
    # Architectures
    "heads_by_layer": _attention(extras=("hetero",), kv=4, order="bhsd", names="own"),
    "shared_by_layers": _attention(mixers=("attention", "shared"), names="hf"),
    "cross_source": _attention(cross="source", names="own"),
    "cross_source_static": _static(cross="source", counted="past_length", names="short"),
    "merged_own_names": _attention(files="merged", order="bshd", names="own"),
    "sinks": _attention(mixers=("sink", "sink"), names="own"),
    "sinks_window": _attention(mixers=("sink", "sink"), window=12, names="hf"),
    "differential": _attention(mixers=("differential",) * 2, rotary="full", names="own"),
    "latent": _attention(mixers=("latent", "latent"), rotary="full", order="bhsd", names="own"),
    "int8": _attention(mixers=("quantized", "quantized"), rotary="full", order="bhsd", names="cache"),
    "memory": _attention(mixers=("memory", "memory"), positions="t5", order="bhsd", names="memory"),
    "parallel": _attention(block="parallel", norm="layer", ffn="gelu", names="own"),
    "experts": _attention(ffn="moe", names="camel"),
    "draft": _attention(mixers=("attention",), extras=("drafted", "hidden_out"), mask="int"),
    "one_layer": _attention(mixers=("attention",), names="numbered"),
    "cross_states": _attention(cross="states", names="own"),
    "cross_cache": _attention(cross="cache", names="own", order="bhsd"),
    "cross_masked": _attention(cross="states", extras=("encoder_mask",), names="cache"),
    "merged": _attention(files="merged", order="bhsd"),
    "merged_cross": _attention(files="merged", cross="cache", order="bhsd"),
    "merged_states": _attention(files="merged", cross="states", order="bhsd", positions="t5"),
    "pair": _attention(files="pair", order="bhsd"),
    "pair_cross": _attention(files="pair", cross="cache", order="bhsd"),
    # States
    "mamba": _state("mamba", names="own"),
    "mamba_one": _state("mamba", one_token=True, names="short"),
    "mamba_attention": Family({"mixers": ("mamba", "attention"), "names": "hf"}),
    "rwkv4": _state("rwkv4", names="rnn"),
    "rwkv4_one": _state("rwkv4", one_token=True, names="numbered"),
    "rwkv5": _state("rwkv5", names="rnn"),
    "retention": _state("retention", names="own"),
    "retention_chunked": _state("chunked_retention", names="memory"),
    "linear_attention": _state("normalized", names="own"),
    "gated_linear": _state("gated", names="cache"),
    "delta_rule": _state("delta", names="own"),
    "delta_attention": Family({"mixers": ("delta", "attention"), "names": "own"}),
    "lstm": _state("LSTM", names="rnn"),
    "gru": _state("GRU", names="own"),
    "rnn": _state("RNN", names="pairs"),
    "lstm_cells": _state("lstm_cell", names="short"),
    "lstm_cells_one": _state("lstm_cell", one_token=True, names="rnn"),
    "xlstm": _state("xlstm", names="own"),
    "convolution": _state("conv", names="own"),
    "gated_conv_attention": Family({"mixers": ("gated_conv", "attention"), "names": "optimum"}),
    "long_convolution": _state("hyena", names="memory"),
    "gru_attention": Family({"mixers": ("GRU", "attention"), "names": "own", "mask": "int"}),
    "transducer": _state("conv", mixers=(), extras=("bigram",), names="own"),
    "lstm_transducer": _state("LSTM", mixers=("LSTM",), extras=("bigram",), names="rnn"),
    "window_and_full": Family(
        {"mixers": ("attention", "sink"), "window": 12, "names": "hf", "extras": ("hidden_out",)}
    ),
}
