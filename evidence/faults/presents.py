"""Caches that come back wrong."""

import numpy as np
import onnx

from evidence.faults.anatomy import Body
from evidence.faults.base_models import ALL, MERGED, SPELLED_OUT, SPLIT, Export
from evidence.faults.registry import fault
from evidence.faults.surgery import FLOAT, is_cross


def exchange(body: Body, one: str, other: str) -> None:
    """Two outputs give each other's value."""
    values = {}
    for name in (one, other):
        body.replace_output(name, lambda inner, name=name: values.setdefault(name, inner))
    backs = {node.output[0]: node for node in body.graph.node if node.output[0] in values}
    backs[one].input[0], backs[other].input[0] = values[other], values[one]


def exchange_pasts(body: Body, one: str, other: str) -> None:
    """Two inputs stand in each other's place, for all who read them."""
    trade = {one: other, other: one}
    for node in body.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = trade.get(name, name)


def entries(body: Body, value: str, start: str | int, stop: str | int) -> str:
    start, stop = (each if isinstance(each, str) else np.array([each]) for each in (start, stop))
    return body.op("Slice", value, start, stop, np.array([2]))


END = 2**60


@fault("key-value-swapped", "keys and values of layer 0 come back under each other's names", ALL)
def presents_swapped(export: Export) -> None:
    exchange(export.later, *(now for _, now in export.later.self_slots()[:2]))


@fault("key-value-swapped", "steps take keys for values and values for keys", ALL)
def pasts_swapped(export: Export) -> None:
    body = export.later
    for (key, _), (value, _) in zip(body.self_slots()[::2], body.self_slots()[1::2], strict=True):
        exchange_pasts(body, key, value)


@fault("layers-swapped", "layers 0 and 1 come back under each other's names", ALL)
def layers_swapped(export: Export) -> None:
    slots = export.later.self_slots()
    for part in (0, 1):
        exchange(export.later, slots[part][1], slots[2 + part][1])


@fault("layers-swapped", "layer 0 takes the past of layer 1, and the other way round", ALL)
def layers_of_pasts_swapped(export: Export) -> None:
    slots = export.later.self_slots()
    for part in (0, 1):
        exchange_pasts(export.later, slots[part][0], slots[2 + part][0])


@fault("layers-swapped", "the keys of layer 0 come back for both layers", ALL)
def one_layer_for_all(export: Export) -> None:
    body, slots = export.later, export.later.self_slots()
    made: list[str] = []
    body.replace_output(slots[0][1], lambda inner: made.append(inner) or inner)
    body.replace_output(slots[2][1], lambda _: made[0])


@fault(
    "key-value-swapped",
    "the prefill returns keys and values of the encoder under each other's names",
    (*SPLIT, "t5-tf5"),
)
def cross_swapped(export: Export) -> None:
    cross = [name for name in export.first.presents if "encoder." in name.replace("decoder.", "") or "cross" in name]
    exchange(export.first, cross[0], cross[1])


@fault(
    "layers-swapped",
    "the prefill returns the encoder's keys and values of two layers in each other's place",
    (*SPLIT, "t5-tf5"),
)
def cross_layers_swapped(export: Export) -> None:
    cross = [name for name in export.first.presents if "encoder." in name.replace("decoder.", "") or "cross" in name]
    for part in (0, 1):
        exchange(export.first, cross[part], cross[2 + part])


@fault("present-does-not-grow", "the past comes back as it was", SPELLED_OUT)
def new_token_lost(export: Export) -> None:
    body = export.later
    for past, now in body.self_slots():
        body.replace_output(
            now,
            lambda inner, past=past: body.with_past(inner, past) if body.steps == "later" else _kept(body, inner, past),
        )


def _kept(body: Body, inner: str, past: str) -> str:
    """The past where there is one, else the whole: by the length at which it is cut."""
    whole = body.size(inner, 2)
    return entries(body, inner, 0, body.op("Where", body.has_past(), body.past_length(), whole))


@fault("present-does-not-grow", "layer 1 alone comes back as it was", SPELLED_OUT)
def new_token_lost_in_layer_1(export: Export) -> None:
    body = export.later
    for past, now in body.self_slots()[2:]:
        body.replace_output(now, lambda inner, past=past: _kept(body, inner, past))


@fault("present-drops-past", "the new entries alone come back", ALL)
def past_dropped(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(now, lambda inner: entries(body, inner, body.past_length(), END))


@fault("present-does-not-grow", "the new entries come back twice", ALL)
def new_token_twice(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(
            now, lambda inner: body.op("Concat", inner, entries(body, inner, body.past_length(), END), axis=2)
        )


@fault("present-does-not-grow", "only the last 4 entries are kept", SPELLED_OUT)
def present_cut(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(now, lambda inner: entries(body, inner, -4, END))


@fault("present-does-not-grow", "the place of the new entries is left zero", ALL)
def new_token_zeroed(export: Export) -> None:
    body = export.later

    def zeroed(inner: str) -> str:
        past = entries(body, inner, 0, body.past_length())
        new = body.op("Mul", entries(body, inner, body.past_length(), END), np.array(0, np.float32))
        return body.with_past(inner, body.op("Concat", past, new, axis=2))

    for _, now in body.self_slots():
        body.replace_output(now, zeroed)


def rewrite(export: Export, change: "object", slots: slice = slice(None)) -> None:
    """Change the entries of the past in what comes back; the new ones stay."""
    body = export.later

    def changed(inner: str) -> str:
        past, new = entries(body, inner, 0, body.past_length()), entries(body, inner, body.past_length(), END)
        return body.op("Concat", change(body, past), new, axis=2)

    for _, now in body.self_slots()[slots]:
        body.replace_output(now, changed)


@fault("present-rewrites-past", "each step makes the past 1 % larger", ALL)
def history_scaled(export: Export) -> None:
    rewrite(export, lambda body, past: body.op("Mul", past, np.array(1.01, np.float32)))


@fault("present-rewrites-past", "each step sets the past to zero", ALL)
def history_zeroed(export: Export) -> None:
    rewrite(export, lambda body, past: body.op("Mul", past, np.array(0, np.float32)))


@fault("present-rewrites-past", "each step moves the values of the past by one entry, the keys stay", ALL)
def history_rolled(export: Export) -> None:
    def rolled(body: Body, past: str) -> str:
        return body.op("Concat", entries(body, past, 1, END), entries(body, past, 0, 1), axis=2)

    rewrite(export, rolled, slice(1, None, 2))


@fault("present-rewrites-past", "each step rotates the keys of the past again", ALL)
def history_rotated_again(export: Export) -> None:
    def turned(body: Body, past: str) -> str:
        width = next(
            d.dim_value
            for v in body.graph.output
            for d in [v.type.tensor_type.shape.dim[-1]]
            if v.name in body.presents
        )
        width = width or 16
        angle = np.repeat(0.5 ** np.arange(width // 2), 2)[:width]
        flip = np.eye(width)[np.arange(width) ^ 1].astype(np.float32) * np.where(np.arange(width) % 2, 1, -1)[None]
        other = body.op("MatMul", past, flip.astype(np.float32))
        return body.op(
            "Add",
            body.op("Mul", past, np.cos(angle).astype(np.float32)),
            body.op("Mul", other, np.sin(angle).astype(np.float32)),
        )

    rewrite(export, turned, slice(0, None, 2))


@fault("present-rewrites-past", "layer 1 alone rewrites its keys by a hundredth", ALL)
def history_scaled_in_layer_1(export: Export) -> None:
    rewrite(export, lambda body, past: body.op("Mul", past, np.array(0.99, np.float32)), slice(2, 3))


@fault("present-rewrites-past", "the new entry is put in front of the past", ("t5", "t5-pair", "t5-tf5", "bloom"))
def new_token_in_front(export: Export) -> None:
    body = export.later
    for _, now in body.self_slots():
        body.replace_output(
            now,
            lambda inner: body.op(
                "Concat",
                entries(body, inner, body.past_length(), END),
                entries(body, inner, 0, body.past_length()),
                axis=2,
            ),
        )


@fault("present-rewrites-past", "steps return zeros for the keys and values of the encoder", (*MERGED, "t5-tf5"))
def cross_zeroed(export: Export) -> None:
    body = export.later
    for _, now in body.cross_slots():
        body.replace_output(now, lambda inner: body.op("Mul", inner, np.array(0, np.float32)))


@fault("cross-cache-emptied", "steps return keys and values of the encoder without elements: batch 0", MERGED)
def cross_emptied(export: Export) -> None:
    _empty(export, 0)


@fault("cross-cache-emptied", "steps return keys and values of the encoder without elements: length 0", MERGED)
def cross_of_length_0(export: Export) -> None:
    _empty(export, 2)


@fault("cross-cache-emptied", "only layer 1 returns keys and values of the encoder without elements", MERGED)
def cross_emptied_in_layer_1(export: Export) -> None:
    _empty(export, 0, slice(2, None))


def _empty(export: Export, axis: int, slots: slice = slice(None)) -> None:
    body = export.later
    for past, now in body.cross_slots()[slots]:
        declared = next(v for v in body.model.graph.input if v.name == past).type.tensor_type.shape.dim
        shape = [dim.dim_value or 1 for dim in declared]
        shape[axis] = 0
        maker = body.producer(now)
        tensor = onnx.helper.make_tensor(body.name("empty"), FLOAT, shape, [])
        maker.CopyFrom(onnx.helper.make_node("Constant", [], [now], name=maker.name, value=tensor))


@fault("cached-differs", "what comes back is rounded to 3 bits", ALL, severity="warning")
def rounded_badly(export: Export) -> None:
    def rounded(body: Body, inner: str) -> str:
        step = np.array(0.25, np.float32)
        return body.op("Mul", body.op("Round", body.op("Div", inner, step)), step)

    in_every_body(export, rounded)


def in_every_body(export: Export, change: "object") -> None:
    """Change what comes back of the tokens' cache, of the prefill as well."""
    for body in export.bodies:
        for now in body.presents:
            if not is_cross(now):
                body.replace_output(now, lambda inner, body=body: change(body, inner))


@fault("cache-misread", "what comes back is cut off at 0.3", ALL)
def clipped(export: Export) -> None:
    def cut(body: Body, inner: str) -> str:
        return body.op("Clip", inner, np.array(-0.3, np.float32), np.array(0.3, np.float32))

    in_every_body(export, cut)
