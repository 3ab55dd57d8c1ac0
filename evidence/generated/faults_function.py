"""Faults of the function that a branch computes, of the cross-attention, and of what is declared."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .decoders import Body
from .designs import Design
from .kinds import (
    BRANCH,
    CHUNK,
    DIFFERS,
    EARLY,
    MIXED,
    REWRITES,
    apart,
    appends,
    crossed,
    masked,
    merged,
    passes,
    to_past,
)
from .strikes import Edit, Fault, Strike, Walk, Wrong
from .wrongs import first_row, noise, not_a_number, of_layer, ones, rolled, times, turned_around


def function() -> list[Fault]:
    """Another function in one branch: weights, norms, logits, tokens."""

    def other(name: str, point: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        return Fault(name, point, wrong, strike, walk, accept or BRANCH)

    def cut(at: int) -> Wrong:
        return lambda b, v, _: b.op("Where", np.arange(b.design.vocabulary) < at, v, 0.0)

    def again(b: Body, v: str, layer: int) -> str:
        return b.record["before", layer]

    def mlp_of_0(b: Body, _: str, layer: int) -> str:
        return b.mlp(b.record["normed", layer], layer, weights_of=0)

    two = Walk((9, 1, 1), rows=2)
    return [
        other("embedding scaled in a step", "embedded", times(1.2), Strike(), EARLY),
        other("norm scaled in layer 2 of the step", "normed", times(1.15), Strike(layer=2), EARLY),
        other("norm scaled from past 21 on", "normed", times(1.15), Strike(layer=1, past_from=21), to_past(21)),
        other("query scaled in a step", "query", times(0.8), Strike(), EARLY),
        other("query scaled in a chunk", "query", times(0.8), Strike(new_from=2), CHUNK),
        other("heads in another order in a step", "heads out", turned_around(1), Strike(), EARLY),
        other("last layer skipped in a step", "hidden", again, Strike(layer=3), EARLY, *BRANCH, "past-ignored"),
        other(
            "layer 1 skipped at past 22 only",
            "hidden",
            again,
            Strike(layer=1, past_from=22, past_to=22),
            to_past(22),
            *BRANCH,
            "past-ignored",
        ),
        other("weights of layer 0 in layer 2 of the step", "mlp", mlp_of_0, Strike(layer=2), EARLY),
        other("mlp lost for the last tokens of a chunk", "mlp", times(0), Strike(layer=2, token=2), CHUNK),
        other("vocabulary cut at 700 in a step", "logits", cut(700), Strike(), EARLY),
        other("vocabulary cut at 990 from past 10 on", "logits", cut(990), Strike(past_from=10), to_past(10)),
        other("logits cooled in a step", "logits", times(0.9), Strike(), EARLY),
        other(
            "logits rounded from past 12 on",
            "logits",
            lambda b, v, _: b.op("Round", v),
            Strike(past_from=12),
            to_past(12),
        ),
        other("logits of a chunk rolled", "logits", rolled(1), Strike(new_from=2), CHUNK),
        other("logits of a chunk in reverse", "logits", turned_around(1), Strike(new_from=2), CHUNK),
        other("logits of row 0 in all rows", "logits", first_row, Strike(), two, *MIXED),
        other(
            "logits of row 0 in all rows everywhere",
            "logits",
            first_row,
            Strike(branch="any"),
            Walk((9,), rows=2),
            "batch-rows-interact",
        ),
        other(
            "tokens clipped at 500 in a step",
            "tokens",
            lambda b, v, _: b.op("Min", v, [500]),
            Strike(),
            Walk((9, 1, 1, 1, 1)),
        ),
        other("tokens of a chunk in reverse", "tokens", turned_around(1), Strike(new_from=2), CHUNK),
        other("tokens of row 0 in all rows", "tokens", first_row, Strike(), two, *MIXED),
        other(
            "attention lost in layer 1 at past 33 only",
            "attention",
            times(0),
            Strike(layer=1, past_from=33, past_to=33),
            to_past(33),
            *BRANCH,
            "past-ignored",
        ),
        other("attention scaled up to past 5", "attention", times(0.5), Strike(past_to=5), Walk((4, 1, 1))),
        other("noise in a step", "hidden", noise, Strike(layer=1), EARLY, "nondeterministic"),
        other(
            "noise from past 25 on",
            "hidden",
            noise,
            Strike(layer=1, past_from=25),
            to_past(25),
            "nondeterministic",
            *DIFFERS,
        ),
        other(
            "no number from past 30 on",
            "hidden",
            not_a_number,
            Strike(layer=2, past_from=30),
            to_past(30),
            "non-finite",
        ),
        other("no number in row 1", "hidden", not_a_number, Strike(layer=2, row=1), two, "non-finite", *MIXED),
    ]


def cross() -> list[Fault]:
    """The cross-attention cache and the mask of the encoder."""
    lengths, two = Walk((5, 1, 1), encoder=(12,)), Walk((5, 1, 1), rows=2, encoder=(9, 9))
    padding = Walk((5, 1, 1), rows=2, encoder=(9, 5))

    def cross(name: str, point: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        return Fault(name, point, wrong, strike, walk, accept or BRANCH, crossed)

    def first(count: int) -> Wrong:
        def wrong(b: Body, v: str, _: int) -> str:
            at = b.op("Unsqueeze", b.count(b.size(v, 1)), [0])
            return b.op("Where", b.op("Less", at, count), v, [[0]])

        return wrong

    def emptied(b: Body, v: str, _: int) -> str:
        return b.weights.constant(np.zeros((0, b.design.kv_heads, 1, b.design.depth), np.float32))

    return [
        cross(
            "encoder mask ignored in steps", "encoder mask", ones, Strike(), padding, "padding-changes-logits", *DIFFERS
        ),
        cross(
            "encoder mask ignored everywhere",
            "encoder mask",
            ones,
            Strike(branch="any"),
            padding,
            "padding-changes-logits",
        ),
        cross("only 8 encoder states seen in steps", "encoder mask", first(8), Strike(), lengths),
        cross("cross keys scaled in a step", "cross key", times(1.3), Strike(), EARLY),
        cross("cross values of row 0 in all rows", "cross value", first_row, Strike(), two, *MIXED),
        cross(
            "cross keys in reverse from past 12 on",
            "cross key",
            turned_around(2),
            Strike(past_from=12),
            to_past(12),
            *DIFFERS,
        ),
        cross(
            "cross values lost with 11 encoder states",
            "cross value",
            times(0),
            Strike(encoder_from=11),
            Walk((5, 1, 1), encoder=(11,)),
            *BRANCH,
        ),
        cross("cross values lost in layer 2", "cross value", times(0), Strike(layer=2), EARLY),
        cross("cross keys of a chunk in reverse", "cross key", turned_around(2), Strike(new_from=2), CHUNK),
        Fault(
            "cross cache emptied by a step",
            "cross present key",
            emptied,
            Strike(),
            Walk((5, 1, 1)),
            ("cross-cache-emptied",),
            passes,
            fails=True,
            outright=True,
        ),
        Fault("cross cache decays", "cross present value", times(0.9), Strike(), EARLY, REWRITES, passes),
        Fault(
            "cross cache lost at past 14 only",
            "cross present key",
            times(0),
            Strike(past_from=14, past_to=14),
            to_past(14, 1, 1),
            REWRITES,
            passes,
        ),
        Fault(
            "cross cache of another layer kept",
            "cross present key",
            of_layer("cross present key", -1),
            Strike(layer=1),
            EARLY,
            (*REWRITES, "layers-swapped"),
            passes,
        ),
        Fault(
            "cross cache scaled by the prefill",
            "cross present value",
            times(1.2),
            Strike(branch="prefill"),
            EARLY,
            BRANCH,
            lambda d: d.encoder in ("passed", "held"),
        ),
    ]


def _swap_outputs(first: int, second: int) -> Edit:
    def edit(files: dict[str, onnx.ModelProto], design: Design) -> None:
        own = [slot.present for slot in design.slots if not slot.cross]
        names = {own[first]: own[second], own[second]: own[first]}
        for name, proto in files.items():
            if name not in ("encoder_model.onnx", "decoder_model.onnx") or len(files) == 1:
                for node in proto.graph.node:
                    node.output[:] = [names.get(output, output) for output in node.output]

    return edit


def _fix(role: str, axis: int, size: int) -> Edit:
    """An input declared with a fixed size on one axis."""

    def edit(files: dict[str, onnx.ModelProto], design: Design) -> None:
        names = {slot.past for slot in design.slots if not slot.cross} if role == "past" else {design.called(role)}
        for file, proto in files.items():
            for value in proto.graph.input if file != "encoder_model.onnx" else ():
                if value.name in names:
                    value.type.tensor_type.shape.dim[axis].Clear()
                    value.type.tensor_type.shape.dim[axis].dim_value = size

    return edit


def _switch(kind: str) -> Edit:
    """The switch of a merged decoder is not obeyed: always true, always false, or inverted."""

    def edit(files: dict[str, onnx.ModelProto], design: Design) -> None:
        graph = files["decoder_model_merged.onnx"].graph
        if kind == "inverted":
            graph.node.insert(0, helper.make_node("Not", ["use_cache_branch"], ["turned"], "not"))
            graph.node[1].input[0] = "turned"
        else:
            graph.initializer.append(numpy_helper.from_array(np.array([kind == "true"]), "always"))
            graph.node[0].input[0] = "always"

    return edit


def declared() -> list[Fault]:
    """Names, declared sizes, and the switch."""

    def named(design: Design) -> bool:
        return appends(design) and apart(design) and design.names == "optimum"

    def uncrossed(design: Design) -> bool:
        return merged(design) and not design.encoder

    always = ("cached-differs", "past-ignored", "step-fails", "present-drops-past", "present-does-not-grow")
    swapped = ("key-value-swapped", "names-mislead", *DIFFERS)
    return [
        Fault("presents of key and value swapped", walk=EARLY, accept=swapped, fits=named, edit=_swap_outputs(0, 1)),
        Fault(
            "presents of two layers swapped",
            walk=EARLY,
            accept=("layers-swapped", "names-mislead", *DIFFERS),
            fits=named,
            edit=_swap_outputs(2, 4),
        ),
        Fault(
            "past length declared as 8",
            walk=EARLY,
            accept=("past-axis-frozen", "step-fails"),
            fits=lambda d: d.layout == "bhsd",
            edit=_fix("past", 2, 8),
            fails=True,
        ),
        Fault(
            "batch of the past declared as 1",
            walk=Walk((9, 1), rows=2),
            accept=("batch-axis-frozen", "step-fails"),
            fits=lambda d: d.layout == "bhsd",
            edit=_fix("past", 0, 1),
            fails=True,
        ),
        Fault(
            "batch of the tokens declared as 1",
            walk=Walk((9, 1), rows=2),
            accept=("batch-axis-frozen", "step-fails"),
            fits=lambda d: not d.branched,
            edit=_fix("input_ids", 0, 1),
            fails=True,
        ),
        Fault(
            "mask declared for 16",
            walk=EARLY,
            accept=("past-axis-frozen", "sequence-axis-frozen", "step-fails"),
            fits=masked,
            edit=_fix("attention_mask", 1, 16),
            fails=True,
        ),
        Fault(
            "switch always false",
            walk=EARLY,
            accept=(*always, "cached-branch-first"),
            fits=uncrossed,
            edit=_switch("false"),
            fails=True,
        ),
        Fault(
            "switch inverted",
            walk=EARLY,
            accept=(*always, "cached-branch-first"),
            fits=merged,
            edit=_switch("inverted"),
            fails=True,
        ),
        Fault(
            "switch always true",
            walk=EARLY,
            accept=(*always, "cached-branch-first", "empty-past-rejected", "past-without-present"),
            fits=passes,
            edit=_switch("true"),
            fails=True,
        ),
    ]
