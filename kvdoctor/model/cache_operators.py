"""The operators that take a past and give a present, or keys and values, by port: data.

Sources: the operator schemas of ONNX (Attention 23 and 24, TensorScatter 24, CausalConvWithState and LinearAttention
27) and of ONNX Runtime 1.31 (docs/ContribOperators.md).
"""

from dataclasses import field
from typing import Literal

from kvdoctor.contract import Growth
from kvdoctor.model.traverse import normalize_domain
from kvdoctor.records import record

CONTRIB = "com.microsoft"

PortPart = Literal["key", "value", "key-value", "conv", "recurrent", ""]
"""What a port holds; empty where only the rest of the graph can tell."""


@record
class CachePorts:
    """The ports of one operator. `pasts` maps an input to the part it holds and the output that carries it on.

    `keys`, `values` and `mask` are further inputs that take keys, values and a mask or bias; `growth` says what becomes
    of the length. `fixed_with` is an input whose presence makes the cache a buffer of fixed size. `roles` are inputs
    whose meaning the operator fixes. `batch` is the axis of the past that counts the batch.
    """

    pasts: dict[int, tuple[PortPart, int]] = field(default_factory=dict)
    growth: Growth = "grow"
    keys: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    fixed_with: int | None = None
    roles: dict[int, str] = field(default_factory=dict)
    batch: int = 0


CACHE_OPERATORS: dict[tuple[str, str], CachePorts] = {
    ("", "Attention"): CachePorts(
        {4: ("key", 1), 5: ("value", 2)}, keys=(1,), values=(2,), mask=(3,), roles={6: "total_length"}
    ),
    ("", "TensorScatter"): CachePorts({0: ("", 0)}, growth="static", roles={2: "write_index"}),
    ("", "CausalConvWithState"): CachePorts({3: ("conv", 1)}, growth="replace"),
    ("", "LinearAttention"): CachePorts({3: ("recurrent", 1)}, growth="replace"),
    ("", "LSTM"): CachePorts({5: ("recurrent", 1), 6: ("recurrent", 2)}, growth="replace", batch=1),
    ("", "GRU"): CachePorts({5: ("recurrent", 1)}, growth="replace", batch=1),
    ("", "RNN"): CachePorts({5: ("recurrent", 1)}, growth="replace", batch=1),
    (CONTRIB, "Attention"): CachePorts({4: ("key-value", 1)}, mask=(3, 5), fixed_with=6, roles={6: "past_length"}),
    (CONTRIB, "QAttention"): CachePorts({8: ("key-value", 1)}, mask=(5,)),
    (CONTRIB, "DecoderAttention"): CachePorts({6: ("key", 1), 7: ("value", 2)}),
    (CONTRIB, "MultiHeadAttention"): CachePorts(
        {6: ("key", 1), 7: ("value", 2)},
        keys=(1,),
        values=(2,),
        mask=(4, 5),
        fixed_with=8,
        roles={8: "past_length", 9: "beam_input"},
    ),
    (CONTRIB, "DecoderMaskedSelfAttention"): CachePorts(
        {4: ("key-value", 1)}, growth="static", mask=(3, 5), roles={6: "past_length", 7: "beam_input", 8: "beam_input"}
    ),
    (CONTRIB, "DecoderMaskedMultiHeadAttention"): CachePorts(
        {5: ("key", 1), 6: ("value", 2)},
        growth="static",
        keys=(1,),
        values=(2,),
        mask=(3, 4),
        roles={7: "past_length", 8: "beam_input", 9: "beam_input"},
    ),
    (CONTRIB, "GroupQueryAttention"): CachePorts(
        {3: ("key", 1), 4: ("value", 2)},
        growth="shared",
        keys=(1,),
        values=(2,),
        mask=(10,),
        roles={5: "last_index", 6: "total_length", 9: "position_ids", 12: "scale", 13: "scale"},
    ),
    (CONTRIB, "SparseAttention"): CachePorts(
        {3: ("key", 1), 4: ("value", 2)}, growth="static", roles={7: "total_length", 8: "total_length"}
    ),
    (CONTRIB, "PagedAttention"): CachePorts(
        {3: ("key", 1), 4: ("value", 2)}, growth="paged", roles={6: "past_length", 7: "block_table"}
    ),
    (CONTRIB, "CausalConvWithState"): CachePorts({3: ("conv", 1)}, growth="replace"),
    (CONTRIB, "VarlenCausalConvWithState"): CachePorts({4: ("conv", 1)}, growth="replace"),
    (CONTRIB, "LinearAttention"): CachePorts({3: ("recurrent", 1)}, growth="replace"),
    (CONTRIB, "GatedDeltaNet"): CachePorts({6: ("recurrent", 1)}, growth="replace"),
}

DECODING_OPERATORS = {"BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"}
"""Operators of com.microsoft that run the whole decode loop, with the cache inside."""


def ports_of(domain: str, operator: str) -> CachePorts | None:
    """The ports of an operator that holds a cache, or None."""
    return CACHE_OPERATORS.get((normalize_domain(domain), operator))
