"""Changes that hurt nobody, and of which nothing may be found."""

import numpy as np
import onnx
from onnx import helper

from evidence.faults.base_models import ALL, LONE, PAIRED, SPELLED_OUT, SPLIT, TF5, Export
from evidence.faults.mathematics import ban_tokens
from evidence.faults.presents import exchange, exchange_pasts
from evidence.faults.registry import harmless


@harmless("nothing is done", ALL)
def untouched(export: Export) -> None:
    pass


@harmless("all inner values and nodes get other names", ALL)
def inner_names(export: Export) -> None:
    for body in export.bodies:
        kept = {*body.inputs, *(v.name for v in body.graph.output), *body.weights, ""}
        kept |= {n for g in (body.model.graph,) for n in (v.name for v in g.output)}
        new: dict[str, str] = {}
        for number, node in enumerate(body.graph.node):
            node.name = f"node_{number}"
            for index, name in enumerate(node.output):
                if name not in kept:
                    node.output[index] = new.setdefault(name, f"value_{len(new)}_{id(body) % 97}")
        for node in body.graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = new.get(name, name)
        for value in body.graph.value_info:
            value.name = new.get(value.name, value.name)


@harmless("Identity stands behind every output and every input", ALL)
def identities(export: Export) -> None:
    for body in export.bodies:
        for value in [v.name for v in body.graph.output]:
            if body.producer(value) is not None:
                body.replace_output(value, lambda inner, body=body: body.op("Identity", inner))
        for name in body.inputs:
            if body.readers(name):
                body.replace_inside(name, lambda old, body=body: body.op("Identity", old))


@harmless("two layers bear each other's names, out and in alike", LONE)
def layers_swapped_both_ways(export: Export) -> None:
    body, slots = export.later, export.later.self_slots()
    for part in (0, 1):
        exchange(body, slots[part][1], slots[2 + part][1])
        exchange_pasts(body, slots[part][0], slots[2 + part][0])


@harmless("the outputs of the cache stand before the logits, the inputs in reverse", (*LONE, *PAIRED))
def ports_reordered(export: Export) -> None:
    for body in export.bodies:
        for values in (body.graph.input, body.graph.output):
            turned = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in reversed(values)]
            del values[:]
            values.extend(turned)


@harmless("ten weights are written as Constant nodes", SPELLED_OUT)
def weights_as_constants(export: Export) -> None:
    for body in export.bodies:
        for tensor in list(body.graph.initializer)[:10]:
            node = helper.make_node("Constant", [], [tensor.name], name=f"of_{tensor.name}", value=tensor)
            body.graph.initializer.remove(tensor)
            body.graph.node.append(node)


@harmless("the output of every normalization is multiplied by 1", (*LONE, *SPLIT))
def multiplied_by_one(export: Export) -> None:
    for body in export.bodies:
        for norm in body.norms():
            body.replace(norm, lambda old, body=body: body.op("Mul", old, np.array(1, np.float32)))


@harmless("some tokens are banned: their logits are -inf", ALL)
def banned_tokens(export: Export) -> None:
    ban_tokens(export)


@harmless("some tokens are banned: their logits are the least of float32", ALL)
def tokens_banned_with_a_number(export: Export) -> None:
    ban_tokens(export, float(np.finfo(np.float32).min))


@harmless("the docs, the producer and the shapes inside are gone", ALL)
def stripped(export: Export) -> None:
    for model in export.models.values():
        model.ClearField("doc_string")
        model.producer_name = ""
        del model.graph.value_info[:]
        for node in model.graph.node:
            node.ClearField("doc_string")


@harmless("both bodies have embeddings 5 % larger", (*SPLIT, *TF5))
def other_weights_in_both(export: Export) -> None:
    for body in export.bodies:
        body.replace(body.embedded(), lambda old, body=body: body.op("Mul", old, np.array(1.05, np.float32)))


@harmless("the scores are hidden by another large number", SPELLED_OUT)
def another_large_number(export: Export) -> None:
    for body in export.bodies:
        for softmax in body.attentions():
            hidden = body.op("Less", softmax.input[0], np.array(-1e4, np.float32))
            softmax.input[0] = body.op("Where", hidden, np.array(-5e4, np.float32), softmax.input[0])


@harmless("the model is saved as onnxruntime has optimized it", (*LONE, *PAIRED))
def optimized(export: Export) -> None:
    import onnxruntime

    def save(folder: "object") -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.log_severity_level = 4
        for name in export.models:
            path = folder / name
            options.optimized_model_filepath = str(path) + ".new"
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            (folder / (name + ".new")).replace(path)

    export.after.append(save)


@harmless("values of the cache are kept 8 times smaller, and made larger again", SPELLED_OUT)
def kept_smaller(export: Export) -> None:
    for body in export.bodies:
        values = [name for name in body.presents if name.endswith(("value", "values"))]
        for now in values:
            if body.producer(now) is not None:
                body.replace_output(now, lambda inner, body=body: body.op("Mul", inner, np.array(0.125, np.float32)))
        for past in [name for name in body.pasts if name.endswith(("value", "values"))]:
            if body.readers(past):
                body.replace_inside(past, lambda old, body=body: body.op("Mul", old, np.array(8, np.float32)))
