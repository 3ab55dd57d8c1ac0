"""Inputs and outputs that do not fit together."""

import numpy as np
import onnx

from evidence.faults.anatomy import Body
from evidence.faults.base_models import ALL, LONE, MERGED, PAIRED, SPLIT, TF5, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import FLOAT16


def declared(body: Body, name: str) -> list[onnx.ValueInfoProto]:
    """All declarations of an input or output: of the branch, and of the graph around it."""
    values = (*body.model.graph.input, *body.model.graph.output, *body.graph.output)
    return [value for value in values if value.name == name]


def remove_output(export: Export, name: str) -> None:
    """Take an output away; of a merged decoder from both branches."""
    model = export.later.model
    for node in model.graph.node:
        if node.op_type == "If":
            index = list(node.output).index(name)
            del node.output[index]
            for attribute in node.attribute:
                del attribute.g.output[index]
    for index, value in enumerate(model.graph.output):
        if value.name == name:
            del model.graph.output[index]


def remove_input(body: Body, name: str, instead: str) -> None:
    for node in body.graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = instead
    for index, value in enumerate(body.model.graph.input):
        if value.name == name:
            del body.model.graph.input[index]


@fault("cache-dtype-mismatch", "the keys of layer 0 come back as float16", ALL)
def keys_as_float16(export: Export) -> None:
    _cast(export, export.later.self_slots()[:1])


@fault("cache-dtype-mismatch", "the whole cache comes back as float16", (*LONE, *PAIRED, *TF5))
def cache_as_float16(export: Export) -> None:
    _cast(export, export.later.self_slots())


def _cast(export: Export, slots: tuple[tuple[str, str], ...]) -> None:
    for _, now in slots:
        bodies = export.bodies if export.first.model is export.later.model else (export.later,)
        for body in bodies:
            body.replace_output(now, lambda inner, body=body: body.op("Cast", inner, to=FLOAT16))
            for value in declared(body, now):
                value.type.tensor_type.elem_type = FLOAT16


@fault("cache-shape-mismatch", "steps return the tokens before the heads", (*LONE, *SPLIT, *TF5))
def tokens_before_heads(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(now, lambda inner: body.op("Transpose", inner, perm=[0, 2, 1, 3]))
        for value in body.graph.output:
            if value.name == now:
                dims = value.type.tensor_type.shape.dim
                turned = [dims[axis].SerializeToString() for axis in (0, 2, 1, 3)]
                for dim, text in zip(dims, turned, strict=True):
                    dim.ParseFromString(text)


@fault(
    "cache-shape-mismatch",
    "keys and values come back once for each head that asks, not once for each group",
    ("llama-gqa", "qwen2", "llama-tf5", "llama-genai"),
)
def heads_repeated(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(now, lambda inner: body.op("Concat", inner, inner, axis=1))
        for value in declared(body, now):
            heads = value.type.tensor_type.shape.dim[1]
            heads.dim_value = 2 * (heads.dim_value or int(heads.dim_param))


@fault("past-without-present", "the values of layer 1 do not come back", ALL)
def one_output_missing(export: Export) -> None:
    remove_output(export, export.later.self_slots()[3][1])


@fault("past-without-present", "no cache comes back", (*LONE, *PAIRED))
def all_outputs_missing(export: Export) -> None:
    for _, now in export.later.self_slots():
        remove_output(export, now)


@fault(
    "present-without-past",
    "the values of layer 1 are no input: each step begins with none",
    (*LONE, *TF5, *PAIRED, *MERGED),
)
def one_input_missing(export: Export) -> None:
    body = export.later
    past, _ = body.self_slots()[3]
    key, _ = body.self_slots()[2]
    remove_input(body, past, body.op("ConstantOfShape", body.op("Shape", key)))


@fault("layers-inconsistent", "layer 1 is called layer 2", (*LONE, *PAIRED), severity="note")
def a_number_left_out(export: Export) -> None:
    for body in export.bodies:
        for name in (*body.inputs, *(value.name for value in body.graph.output)):
            if ".1." in name and ("past" in name or "present" in name):
                _rename(body, name, name.replace(".1.", ".2."))


def _rename(body: Body, old: str, new: str) -> None:
    for value in declared(body, old):
        value.name = new
    for node in body.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                if name == old:
                    names[index] = new


@fault("layers-inconsistent", "layer 0 keeps its keys and values twice", (*LONE, *PAIRED), severity="note")
def heads_kept_twice(export: Export) -> None:
    for body in export.bodies:
        for past, now in body.self_slots()[:2] or [("", name) for name in body.presents[:2]]:
            heads = declared(body, now)[0].type.tensor_type.shape.dim[1]
            count = heads.dim_value
            body.replace_output(now, lambda inner, body=body: body.op("Concat", inner, inner, axis=1))
            heads.dim_value = 2 * count
            if past:
                body.replace_inside(
                    past,
                    lambda old, body=body, count=count: body.op(
                        "Slice", old, np.array([0]), np.array([count]), np.array([1])
                    ),
                )
                declared(body, past)[0].type.tensor_type.shape.dim[1].dim_value = 2 * count
