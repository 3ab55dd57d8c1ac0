"""The files of a design."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from .decoders import Body
from .designs import NEW, PAST, STATES, TOTAL, Design
from .sheet import BOOL, FLOAT, INT64, Sheet, Size, Weights, declared, model
from .strikes import Fault


def _inputs(design: Design, branch: str) -> list[onnx.ValueInfoProto]:
    total: Size = NEW if branch == "prefill" else TOTAL
    found = [declared(design.called("input_ids"), INT64, ("batch_size", NEW))]
    if design.mask == "mask2d":
        found.append(declared(design.called("attention_mask"), INT64, ("batch_size", total)))
    if design.mask == "mask4d":
        found.append(declared(design.called("attention_mask"), FLOAT, ("batch_size", 1, NEW, total)))
    if design.counted == "input":
        found.append(declared(design.called("position_ids"), INT64, ("batch_size", NEW)))
    if design.buffered:
        found.append(declared(design.called("slot"), INT64, (NEW,)))
    if design.encoder:
        found.append(declared("encoder_attention_mask", INT64, ("batch_size", STATES)))
    if design.encoder != "given" and design.encoder and branch != "step":
        found.append(declared("encoder_hidden_states", FLOAT, ("batch_size", STATES, design.width)))
    if branch != "prefill":
        found += [declared(slot.past, FLOAT, slot.shape(PAST)) for slot in design.slots]
    if branch == "merged":
        found.append(declared("use_cache_branch", BOOL, (1,)))
    return found


def _outputs(design: Design, names: Sequence[str], branch: str) -> list[onnx.ValueInfoProto]:
    shapes: dict[str, tuple[Size, ...]] = {design.called("logits"): ("batch_size", NEW, design.vocabulary)}
    length = NEW if branch == "prefill" or design.layout == "delta" else TOTAL
    shapes |= {slot.present: slot.shape(length) for slot in design.slots}
    return [declared(name, FLOAT, shapes[name]) for name in names]


def _file(design: Design, branch: str, fault: Fault | None) -> onnx.ModelProto:
    weights = Weights(design.seed)
    body = Body(design, weights, branch, fault)
    results = body.results()
    for name, value in results.items():
        body.hand_out(value, name)
    return model(body.nodes, _inputs(design, branch), _outputs(design, list(results), branch), weights)


def _merged(design: Design, fault: Fault | None) -> onnx.ModelProto:
    weights, graphs, names = Weights(design.seed), {}, []
    for branch in ("step", "prefill"):
        body = Body(design, weights, branch, fault, f"{branch}/")
        results = body.results()
        names = list(results)
        for name, value in results.items():
            body.hand_out(value, f"{branch}/{name}")
        outputs = [helper.make_tensor_value_info(f"{branch}/{name}", FLOAT, None) for name in names]
        graphs[branch] = helper.make_graph(body.nodes, branch, [], outputs)
    node = helper.make_node(
        "If", ["use_cache_branch"], names, "if", then_branch=graphs["step"], else_branch=graphs["prefill"]
    )
    return model([node], _inputs(design, "merged"), _outputs(design, names, "merged"), weights)


def encoder(design: Design) -> onnx.ModelProto:
    """Token ids and their mask, int64[b, e], to states, float[b, e, x], or to the cross-attention cache."""
    weights = Weights(design.seed)
    sheet = Sheet(weights)
    inputs = [declared(name, INT64, ("batch_size", STATES)) for name in ("input_ids", "attention_mask")]
    x = sheet.op("Gather", weights.normal("encoder.embedding", (design.vocabulary, design.width)), "input_ids")
    kept = sheet.op("Unsqueeze", sheet.cast("attention_mask", FLOAT), [2])
    x = sheet.op("Mul", sheet.op("LayerNormalization", x, np.ones(design.width), np.zeros(design.width)), kept)
    if design.encoder != "given":
        sheet.hand_out(x, "last_hidden_state")
        outputs = [declared("last_hidden_state", FLOAT, ("batch_size", STATES, design.width))]
        return model(sheet.nodes, inputs, outputs, weights)
    outputs = []
    for slot in design.slots:
        if slot.cross:
            layer, part = slot.key
            name = weights.normal(
                f"layers.{layer}.cross.{part}",
                (design.width, design.kv_heads * design.depth),
                1 / np.sqrt(design.width),
            )
            made = sheet.op("Reshape", sheet.op("MatMul", x, name), [0, 0, design.kv_heads, design.depth])
            sheet.hand_out(sheet.op("Transpose", made, perm=[0, 2, 1, 3]), slot.past)
            outputs.append(declared(slot.past, FLOAT, slot.shape(PAST)))
    return model(sheet.nodes, inputs, outputs, weights)


def build(design: Design, fault: Fault | None = None) -> dict[str, onnx.ModelProto]:
    """The files of a design by their names."""
    if design.files == "pair":
        files = {"decoder_model.onnx": _file(design, "prefill", fault)}
        files["decoder_with_past_model.onnx"] = _file(design, "step", fault)
    elif design.files == "merged":
        files = {"decoder_model_merged.onnx": _merged(design, fault)}
    else:
        files = {"decoder_model.onnx" if design.encoder else "model.onnx": _file(design, "single", fault)}
    if design.encoder:
        files["encoder_model.onnx"] = encoder(design)
    if fault is not None and fault.edit is not None:
        fault.edit(files, design)
    return files
