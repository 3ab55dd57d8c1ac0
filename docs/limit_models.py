"""The small models that docs/make_limits.py opens in every release of onnxruntime.

Each is one node. Whether a release takes it is asked by opening it; that the model itself is valid is shown by some
release that does.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

OLD_IR = 8
"""An IR version that every release takes."""
NO_OPSET_LIMIT = 13
"""Operators that stand unchanged since this opset or an earlier one are in every release that kvdoctor runs."""
MOST_CASES = 4

F, I32, I64, U8, I8, F16 = (
    TensorProto.FLOAT,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.UINT8,
    TensorProto.INT8,
    TensorProto.FLOAT16,
)
MS = "com.microsoft"


def ir_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """One model for each IR version, up to two that nobody has released."""
    for version in range(3, onnx.IR_VERSION + 3):
        yield f"ir/{version}", _identity(version, 9)


def opset_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """One model for each opset, up to two that nobody has released."""
    for version in range(7, defs.onnx_opset_version() + 3):
        yield f"opset/{version}", _identity(OLD_IR, version)


def _identity(ir_version: int, opset: int) -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, F, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def standard_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Each standard operator at each opset that changed it, in the cases that ONNX has for its tests.

    A case is written for the newest version of its operator; where an older one does not allow it, no release opens
    it there, and nothing is said of it.
    """
    import numpy as np
    from onnx.backend.test.case.node import collect_testcases

    history: dict[str, set[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.support_level == defs.OpSchema.SupportType.COMMON:
            history.setdefault(schema.name, set()).add(schema.since_version)
    cases: dict[str, list[onnx.ModelProto]] = {}
    with np.errstate(all="ignore"):
        found = collect_testcases(None)
    for case in found:
        model = case.model
        if model is not None and len(model.graph.node) == 1 and not model.functions:
            operator = model.graph.node[0].op_type
            if operator in history and _is_plain(model):
                cases.setdefault(operator, []).append(model)
    for operator, models in sorted(cases.items()):
        for since in sorted(version for version in history[operator] if version > NO_OPSET_LIMIT):
            for number, model in enumerate(models[:MOST_CASES]):
                changed = onnx.ModelProto()
                changed.CopyFrom(model)
                changed.ir_version = OLD_IR
                changed.opset_import[0].version = since
                yield f"standard/{operator}-{since}/{number}", changed


def _is_plain(model: onnx.ModelProto) -> bool:
    """Whether its inputs are of the types that decoders use."""
    plain = {F, I32, I64, TensorProto.BOOL}
    return all(value.type.tensor_type.elem_type in plain for value in model.graph.input)


def contrib_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Operators of other domains that decoders use: each as it is, and with each further attribute."""
    for name, inputs, outputs, attributes, further in CONTRIB:
        domain, operator = name.split(":")
        yield f"contrib/{name}/", _contrib(domain, operator, inputs, outputs, attributes)
        for count in MORE_INPUTS.get(name, ()) if len(inputs.split()) < min(MORE_INPUTS.get(name, (0,))) else ():
            padded = " ".join((*inputs.split(), *["-"] * count))
            padded = " ".join(padded.split()[:count])
            yield f"contrib/{name}/inputs-{count}", _contrib(domain, operator, padded, outputs, attributes)
        for attribute, value in further.items():
            yield (
                f"contrib/{name}/{attribute}",
                _contrib(domain, operator, inputs, outputs, {**attributes, attribute: value}),
            )


def _contrib(domain: str, operator: str, inputs: str, outputs: int, attributes: dict[str, Any]) -> onnx.ModelProto:
    declared, initializers, names = [], [], []
    for number, text in enumerate(inputs.split()):
        if text == "-":
            names.append("")
            continue
        kind, *sizes = text.split(",")
        name = f"x{number}"
        names.append(name)
        shape = [int(size) if size.isdigit() else size for size in sizes]
        if kind.startswith("w"):
            numbers = [int(size) for size in sizes]
            initializers.append(helper.make_tensor(name, TYPES[kind[1:]], numbers, [0] * math.prod(numbers)))
        else:
            declared.append(helper.make_tensor_value_info(name, TYPES[kind], shape))
    made = [f"y{number}" for number in range(outputs)]
    node = helper.make_node(operator, names, made, domain=domain if domain != "ai.onnx" else "", **attributes)
    ends = [onnx.ValueInfoProto(name=name) for name in made]
    graph = helper.make_graph([node], "contrib", declared, ends, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=OLD_IR)


MORE_INPUTS = {
    f"{MS}:GroupQueryAttention": range(8, 15),
    f"{MS}:MultiHeadAttention": range(4, 11),
    f"{MS}:MatMulNBits": range(4, 7),
    f"{MS}:DecoderMaskedMultiHeadAttention": range(9, 12),
}
"""How many inputs newer releases allow; those beyond the ones that are given are left empty."""

TYPES = {"f": F, "i32": I32, "i64": I64, "u8": U8, "i8": I8, "f16": F16, "u4": TensorProto.UINT4}

# name, inputs (type and sizes; `w` makes it a weight, `-` leaves it out), outputs, attributes, further attributes
CONTRIB: tuple[tuple[str, str, int, dict[str, Any], dict[str, Any]], ...] = (
    (
        f"{MS}:Attention",
        "f,b,s,8 f,8,24 f,24",
        1,
        {"num_heads": 2},
        {
            "unidirectional": 1,
            "mask_filter_value": -1.0,
            "scale": 0.5,
            "qkv_hidden_sizes": [8, 8, 8],
            "past_present_share_buffer": 0,
            "do_rotary": 0,
            "rotary_embedding_dim": 0,
        },
    ),
    (f"{MS}:Attention", "f,b,s,8 f,8,24 f,24 - f,2,b,2,p,4", 2, {"num_heads": 2}, {}),
    (
        f"{MS}:MultiHeadAttention",
        "f,b,s,8 f,b,s,8 f,b,s,8",
        1,
        {"num_heads": 2},
        {"mask_filter_value": -1.0, "scale": 0.5, "unidirectional": 1},
    ),
    (
        f"{MS}:GroupQueryAttention",
        "f,b,s,16 f,b,s,8 f,b,s,8 f,b,1,p,8 f,b,1,p,8 i32,b i32,1",
        3,
        {"num_heads": 2, "kv_num_heads": 1},
        {
            "scale": 0.5,
            "local_window_size": 4,
            "do_rotary": 0,
            "rotary_interleaved": 0,
            "softcap": 1.0,
            "smooth_softmax": 0,
            "qk_output": 0,
            "k_quant_type": "NONE",
            "v_quant_type": "NONE",
            "kv_cache_bit_width": 0,
        },
    ),
    (
        f"{MS}:DecoderMaskedMultiHeadAttention",
        "f,b,1,8 f,b,1,8 f,b,1,8 - - f,b,2,16,4 f,b,2,16,4 i32,1",
        3,
        {"num_heads": 2, "past_present_share_buffer": 1},
        {"mask_filter_value": -1.0, "output_qk": 0, "scale": 0.5},
    ),
    (
        f"{MS}:SparseAttention",
        "f,1,s,16 f,1,s,8 f,1,s,8 f,1,1,16,8 f,1,1,16,8 i32,1,2 i32,1,1 i32,1 i32,1",
        3,
        {"num_heads": 2, "kv_num_heads": 1, "sparse_block_size": 16},
        {"do_rotary": 0, "rotary_interleaved": 0, "scale": 0.5},
    ),
    (
        f"{MS}:RotaryEmbedding",
        "f,b,s,8 i64,b,s f,16,2 f,16,2",
        1,
        {},
        {"interleaved": 0, "num_heads": 2, "rotary_embedding_dim": 0, "scale": 1.0, "is_packed_batching": 0},
    ),
    (f"{MS}:SkipLayerNormalization", "f,b,s,8 f,b,s,8 f,8 f,8", 1, {}, {"epsilon": 0.1}),
    (f"{MS}:SkipSimplifiedLayerNormalization", "f,b,s,8 f,b,s,8 f,8", 1, {}, {"epsilon": 0.1}),
    ("ai.onnx:SimplifiedLayerNormalization", "f,b,s,8 f,8", 1, {}, {"axis": -1, "epsilon": 0.1, "stash_type": 1}),
    (f"{MS}:EmbedLayerNormalization", "i32,b,s - f,9,8 f,9,8 - f,8 f,8", 2, {}, {"mask_index_type": 0}),
    (f"{MS}:BiasGelu", "f,b,8 f,8", 1, {}, {}),
    (f"{MS}:FastGelu", "f,b,8 f,8", 1, {}, {}),
    (f"{MS}:Gelu", "f,b,8", 1, {}, {}),
    (f"{MS}:QuickGelu", "f,b,8", 1, {}, {"alpha": 1.0}),
    (f"{MS}:FusedMatMul", "f,b,8 f,8,4", 1, {}, {"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0}),
    (
        f"{MS}:MatMulNBits",
        "f,b,32 wu8,4,1,16 wf,4",
        1,
        {"K": 32, "N": 4, "bits": 4, "block_size": 32},
        {"accuracy_level": 0, "weight_prepacked": 0},
    ),
    (
        f"{MS}:MatMulBnb4",
        "f,b,32 wu8,64 wf,4",
        1,
        {"K": 32, "N": 4, "block_size": 32, "quant_type": 1},
        {"transB": 1, "training_mode": 0},
    ),
    (
        f"{MS}:GatherBlockQuantized",
        "wu8,4,16 i64,b wf,4,1",
        1,
        {"bits": 4, "block_size": 32, "gather_axis": 0, "quantize_axis": 1},
        {},
    ),
    (
        f"{MS}:GatherBlockQuantized",
        "wu4,4,32 i64,b wf,4,1",
        1,
        {"block_size": 32, "gather_axis": 0, "quantize_axis": 1},
        {},
    ),
    (f"{MS}:DynamicQuantizeMatMul", "f,b,8 wu8,8,4 wf,1 wu8,1", 1, {}, {}),
    (f"{MS}:MatMulIntegerToFloat", "u8,b,8 u8,8,4 f,1 f,1", 1, {}, {}),
    (
        f"{MS}:QAttention",
        "u8,b,s,8 wu8,8,24 f,24 f f - u8 u8",
        1,
        {"num_heads": 2},
        {"unidirectional": 1, "scale": 0.5},
    ),
    (f"{MS}:QuantizeLinear", "f,b,8 f u8", 1, {}, {"axis": 0}),
    (f"{MS}:DequantizeLinear", "u8,b,8 f u8", 1, {}, {"axis": 0}),
    (f"{MS}:QLinearAdd", "u8,b f u8 u8,b f u8 f u8", 1, {}, {}),
    (f"{MS}:QLinearMul", "u8,b f u8 u8,b f u8 f u8", 1, {}, {}),
    (f"{MS}:QLinearSoftmax", "u8,b,8 wf wu8 wf wu8", 1, {"opset": 13}, {"axis": 1}),
    (f"{MS}:QGemm", "u8,b,8 f u8 wu8,8,4 wf wu8 - f u8", 1, {}, {"alpha": 1.0}),
    (f"{MS}:MoE", "f,b,8 f,b,2 f,2,8,16 f,2,16 f,2,16,8 f,2,8", 1, {"k": 1}, {"activation_type": "relu"}),
    (f"{MS}:Trilu", "f,b,8", 1, {}, {"upper": 0}),
    (f"{MS}:CausalConvWithState", "f,b,4,s f,4,1,3 f,4 f,b,4,2", 2, {}, {"activation": "silu"}),
    (f"{MS}:LinearAttention", "f,b,s,8 f,b,s,8 f,b,s,8 f,b,2,4,4", 2, {"q_num_heads": 2, "kv_num_heads": 2}, {}),
)


def write_all(folder: Path) -> list[str]:
    """Write every model below a folder; gives their names."""
    names: list[str] = []
    for kind in (ir_models, opset_models, standard_models, contrib_models):
        for name, model in kind():
            names.append(name)
            place = folder / f"{len(names) - 1}.onnx"
            place.write_bytes(model.SerializeToString())
    return names
