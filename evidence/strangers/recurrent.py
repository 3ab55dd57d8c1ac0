"""Mixers with a state of a fixed size: recurrences, cells, convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from .cache import Kind
from .design import Design
from .mixers import Mixer
from .sheet import FAR, Sheet

if TYPE_CHECKING:
    from .body import Body

Step = Callable[[Sheet, list[str], list[str]], tuple[list[str], str]]
HEADS, INNER, STATES, TAPS = 4, 24, 4, 4


def run(body: Body, layer: int, names: Sequence[str], inputs: Sequence[str], step: Step) -> str:
    """A recurrence over the tokens, by Scan or as the step of one token; its states are loaded and kept.

    Values of a token have no sequence axis inside of `step`; the result is [b, s, ...].
    """
    states = [body.cache.load(name, layer) for name in names]
    if body.design.one_token:
        after, made = step(body, states, [body.drop(value, 1) for value in inputs])
        made = body.lift(made, 1)
    else:

        def inner(sheet: Sheet, old: list[str], now: list[str]) -> tuple[list[str], list[str]]:
            following, out = step(sheet, old, now)
            return following, [out]

        after, (made,) = body.scan(inner, states, inputs)
    for name, value, old in zip(names, after, states, strict=True):
        _keep(body, (name, layer), value, old)
    return made


def _keep(body: Body, part: tuple[str, int], value: str, old: str) -> None:
    """Return a state, or what its author took for it."""
    name, wrong = part[0], ("present-does-not-grow", "past-ignored")
    if body.slip(f"state {name} not renewed", *wrong):
        value = body.op("Identity", old)
    if body.slip(f"state {name} replaced by its change", "new-entries-wrong", "present-drops-past", *wrong[:1]):
        value = body.sub(value, old)
    if body.slip(f"state {name} returned as zeros", *wrong):
        value = body.mul(value, 0.0)
    body.cache.keep(*part, body.at(f"stored.{name}", value, body.cache.kinds[part].axes, part[1]))


def _state(design: Design, name: str, axes: str, **sizes: int) -> Kind:
    order = design.state_order
    fits = sorted(order.replace("l", "").replace("1", "")) == sorted(axes)
    return Kind(name, axes, sizes, "replace", order if fits else "")


# Linear recurrences: state [b, h, d, e], out = q . state


def _linear(body: Body, hidden: str, layer: int, form: str) -> str:
    design = body.design
    dim = design.width // HEADS

    def heads(name: str) -> str:
        value = body.linear(hidden, f"{name}{layer}", design.width, design.width)
        return body.reshape(value, body.rows, body.new, HEADS, dim)

    query, key, value = heads("wq"), heads("wk"), heads("wv")
    names, inputs = ["s"], [query, body.mul(key, np.float32(dim**-0.5)), value]
    if form == "normalized":
        inputs[:2] = [body.add(body.op("Elu", each), 1.0) for each in (query, key)]
        names.append("z")
    if form == "gated":
        inputs.append(body.op("Sigmoid", body.add(heads("wg"), 1.0)))
    if form == "delta":
        inputs[1] = body.op("Div", key, body.op("Sqrt", body.add(body.sum(body.mul(key, key), 3), 1e-3)))
        inputs.append(body.op("Sigmoid", body.linear(hidden, f"wb{layer}", design.width, HEADS)))
    decays = (1 - 2.0 ** (-1 - np.arange(HEADS))).astype(np.float32).reshape(1, HEADS, 1, 1)
    bonus = body.weights.weight(f"bonus{layer}", 1, HEADS, dim, 1, scale=1.0) if form == "rwkv5" else ""

    def step(sheet: Sheet, old: list[str], now: list[str]) -> tuple[list[str], str]:
        state, (q, k, v) = old[0], now[:3]
        outer = sheet.mul(sheet.lift(k, 3), sheet.lift(v, 2))
        row = sheet.lift(q, 2)  # [b, h, 1, d]
        if form == "normalized":
            after = [sheet.add(state, outer), sheet.add(old[1], k)]
            weight = sheet.add(sheet.sum(sheet.mul(q, after[1]), 2), 1e-3)
            return after, sheet.op("Div", sheet.drop(sheet.dot(row, after[0]), 2), weight)
        if form == "rwkv5":
            out = sheet.dot(row, sheet.add(state, sheet.mul(bonus, outer)))
            return [sheet.add(sheet.mul(state, decays), outer)], sheet.drop(out, 2)
        if form == "gated":
            after = [sheet.add(sheet.mul(state, sheet.lift(now[3], 3)), outer)]
        elif form == "delta":
            said = sheet.drop(sheet.dot(sheet.lift(k, 2), state), 2)
            change = sheet.mul(sheet.sub(v, said), sheet.lift(now[3], 2))
            after = [sheet.add(state, sheet.mul(sheet.lift(k, 3), sheet.lift(change, 2)))]
        else:
            after = [sheet.add(sheet.mul(state, decays), outer)]
        return after, sheet.drop(sheet.dot(row, after[0]), 2)

    made = run(body, layer, names, inputs, step)
    flat = body.reshape(made, body.rows, body.new, design.width)
    return body.linear(flat, f"wo{layer}", design.width, design.width)


def _linear_kinds(form: str) -> Callable[[Design, int], list[Kind]]:
    def kinds(design: Design, layer: int) -> list[Kind]:
        dim = design.width // HEADS
        found = [_state(design, "s", "bhde", h=HEADS, d=dim, e=dim)]
        return [*found, _state(design, "z", "bhd", h=HEADS, d=dim)] if form == "normalized" else found

    return kinds


def _retention(body: Body, hidden: str, layer: int) -> str:
    """RetNet in its form by chunks: a matrix of decays inside the chunk, and powers for the state."""
    design = body.design
    dim = design.width // HEADS
    query, key, value = (
        body.split(body.linear(hidden, f"{n}{layer}", design.width, design.width), HEADS, dim)
        for n in ("wq", "wk", "wv")
    )
    key = body.mul(key, np.float32(dim**-0.5))
    logs = np.log(1 - 2.0 ** (-1 - np.arange(HEADS))).astype(np.float32).reshape(1, HEADS, 1, 1)
    steps = body.cast(body.count(body.new), 1)
    gap = body.sub(body.lift(steps, 1), body.lift(steps, 0))
    inside = body.where(
        body.op("GreaterOrEqual", gap, 0.0), body.op("Exp", body.mul(body.op("Max", gap, 0.0), logs)), 0.0
    )
    state = body.cache.load("s", layer)
    made = body.dot(body.mul(body.dot(query, body.move(key, 0, 1, 3, 2)), inside), value)
    reach = body.op("Exp", body.mul(body.lift(body.add(steps, 1.0), 1), logs))  # [1, h, s, 1]
    made = body.add(made, body.mul(body.dot(query, state), reach))
    length = body.cast(body.new, 1)
    left = body.op("Exp", body.mul(body.lift(body.sub(body.sub(length, 1.0), steps), 1), logs))
    fresh = body.dot(body.move(body.mul(key, left), 0, 1, 3, 2), value)
    power = body.mul(length, logs)
    if body.slip("state decayed once, whatever the chunk", "chunk-differs", "new-entries-wrong"):
        power = body.mul(1.0, logs)
    old = body.mul(state, body.op("Exp", power))
    if body.slip("state replaced by that of the new tokens", "present-drops-past", "present-does-not-grow"):
        old = body.mul(old, 0.0)
    if body.slip("state not decayed", "cache-misread", "cached-differs", "new-entries-wrong", "present-rewrites-past"):
        old = state
    body.cache.keep("s", layer, body.add(old, fresh))
    return body.linear(body.merged(made, design.width), f"wo{layer}", design.width, design.width)


# Shift and convolution


def _before(body: Body, hidden: str, layer: int, name: str) -> str:
    """The token before each; the last one is kept: [b, d]."""
    past = body.lift(body.cache.load(name, layer), 1)
    wrong = body.slip(f"first token of the chunk kept in {name}", "chunk-differs", "new-entries-wrong")
    body.cache.keep(name, layer, body.drop(body.part(hidden, 0, 1, 1) if wrong else body.part(hidden, -1, FAR, 1), 1))
    return body.part(body.join(past, hidden, axis=1), 0, -1, 1)


def _convolved(body: Body, value: str, layer: int, width: int) -> str:
    """A causal convolution by channel over [b, s, d]; the last inputs are kept: [b, d, taps - 1]."""
    flat = body.move(value, 0, 2, 1)
    past = body.cache.load("conv", layer)
    whole = body.join(past, flat, axis=2)
    kept = body.part(whole, 1 - TAPS, FAR, 2)
    if body.slip("convolution state is that of activated values", "new-entries-wrong"):
        kept = body.part(body.join(past, body.silu(flat), axis=2), 1 - TAPS, FAR, 2)
    if body.slip("convolution state returned as zeros", "present-does-not-grow", "past-ignored"):
        kept = body.mul(kept, 0.0)
    if body.slip(
        "convolution state one token short", "new-entries-wrong", "present-drops-past", "present-rewrites-past"
    ):
        kept = body.part(body.join(past, whole, axis=2), -TAPS, -1, 2)
    if body.slip("convolution state in reverse", "new-entries-wrong", "present-rewrites-past", "cache-misread"):
        kept = body.op("Slice", kept, [-1], [-FAR], [2], [-1])
    body.cache.keep("conv", layer, body.at("stored.conv", kept, "bdw", layer))
    kernel = body.weights.weight(f"conv{layer}", width, 1, TAPS, scale=0.6)
    return body.move(body.op("Conv", whole, kernel, group=width), 0, 2, 1)


def _conv(body: Body, hidden: str, layer: int) -> str:
    return body.silu(_convolved(body, hidden, layer, body.design.width))


def _gated_conv(body: Body, hidden: str, layer: int) -> str:
    """As in LFM2: gate, convolution, gate."""
    width = body.design.width
    gates = [body.linear(hidden, f"{name}{layer}", width, width) for name in ("in_a", "in_b", "in_c")]
    return body.linear(
        body.mul(gates[2], _convolved(body, body.mul(gates[0], gates[1]), layer, width)), f"out{layer}", width, width
    )


def _mamba(body: Body, hidden: str, layer: int) -> str:
    width = body.design.width
    value = body.silu(_convolved(body, body.linear(hidden, f"in_x{layer}", width, INNER), layer, INNER))
    gate = body.silu(body.linear(hidden, f"in_z{layer}", width, INNER))
    pace = body.op("Softplus", body.linear(value, f"dt{layer}", INNER, INNER))
    into, out = body.linear(value, f"B{layer}", INNER, STATES), body.linear(value, f"C{layer}", INNER, STATES)
    rates = -np.arange(1, STATES + 1, dtype=np.float32).reshape(1, 1, STATES) / 4
    if body.slip("sign of the decay lost", "non-finite", "cached-differs"):
        rates = -rates

    def step(sheet: Sheet, old: list[str], now: list[str]) -> tuple[list[str], str]:
        x, delta, b, c = now
        kept = sheet.mul(old[0], sheet.op("Exp", sheet.mul(sheet.lift(delta, 2), rates)))
        after = sheet.add(kept, sheet.mul(sheet.lift(sheet.mul(delta, x), 2), sheet.lift(b, 1)))
        return [after], sheet.sum(sheet.mul(after, sheet.lift(c, 1)), 2, keep=False)

    made = body.add(run(body, layer, ["ssm"], [value, pace, into, out], step), value)
    return body.linear(body.mul(made, gate), f"out{layer}", INNER, width)


def _rwkv4(body: Body, hidden: str, layer: int) -> str:
    width = body.design.width
    mixed = body.add(body.mul(hidden, 0.6), body.mul(_before(body, hidden, layer, "shift"), 0.4))
    key, value, gate = (body.linear(mixed, f"{n}{layer}", width, width) for n in ("wk", "wv", "wr"))
    decay = -np.exp(np.linspace(-3, 0.5, width, dtype=np.float32))[None]
    bonus = body.weights.weight(f"bonus{layer}", 1, width, scale=0.5)

    def step(sheet: Sheet, old: list[str], now: list[str]) -> tuple[list[str], str]:
        (top, low, power), (k, v) = old, now

        def shares(left: str, right: str) -> tuple[str, str, str]:
            most = sheet.op("Max", left, right)
            return most, sheet.op("Exp", sheet.sub(left, most)), sheet.op("Exp", sheet.sub(right, most))

        _, before, here = shares(power, sheet.add(k, bonus))
        out = sheet.op(
            "Div", sheet.add(sheet.mul(before, top), sheet.mul(here, v)), sheet.add(sheet.mul(before, low), here)
        )
        after, before, here = shares(sheet.add(power, decay), k)
        tops = sheet.add(sheet.mul(before, top), sheet.mul(here, v))
        return [tops, sheet.add(sheet.mul(before, low), here), after], out

    made = run(body, layer, ["aa", "bb", "pp"], [key, value], step)
    return body.linear(body.mul(made, body.op("Sigmoid", gate)), f"wo{layer}", width, width)


# Cells


def _operator(body: Body, hidden: str, layer: int, form: str) -> str:
    """The operator of ONNX, over the whole chunk."""
    width, gates = body.design.width, {"LSTM": 4, "GRU": 3, "RNN": 1}[form]
    names = ["h", "c"] if form == "LSTM" else ["h"]
    states = [body.lift(body.cache.load(name, layer), 0) for name in names]
    given = [body.weights.weight(f"{n}{layer}", 1, gates * width, width, scale=width**-0.5) for n in ("W", "R")]
    bias = body.weights.weight(f"bias{layer}", 1, 2 * gates * width, scale=0.1)
    outs = body.ops(1 + len(names), form, body.move(hidden, 1, 0, 2), *given, bias, "", *states, hidden_size=width)
    after = outs[1:]
    if form == "LSTM" and body.slip(
        "h and c returned exchanged", "key-value-swapped", "new-entries-wrong", "cached-differs"
    ):
        after = after[::-1]
    for name, value, old in zip(names, after, states, strict=True):
        _keep(body, (name, layer), body.drop(value, 0), body.drop(old, 0))
    return body.move(body.drop(outs[0], 1), 1, 0, 2)


def _cell(body: Body, hidden: str, layer: int, form: str) -> str:
    """LSTM and xLSTM (sLSTM with a normalizer), gate by gate."""
    width = body.design.width
    gates = body.linear(hidden, f"gates{layer}", width, 4 * width)
    names = ["h", "c"] if form == "lstm" else ["h", "c", "n"]
    back = body.weights.weight(f"back{layer}", width, 4 * width)

    def step(sheet: Sheet, old: list[str], now: list[str]) -> tuple[list[str], str]:
        inner = sheet.add(now[0], sheet.dot(old[0], back))
        i, f, o, z = (sheet.part(inner, n * width, (n + 1) * width, 1) for n in range(4))
        into, forget, out = (sheet.op("Sigmoid", gate) for gate in (i, f, o))
        cell = sheet.add(sheet.mul(forget, old[1]), sheet.mul(into, sheet.op("Tanh", z)))
        if form == "lstm":
            state = sheet.mul(out, sheet.op("Tanh", cell))
            return [state, cell], sheet.op("Identity", state)
        norm = sheet.add(sheet.mul(forget, old[2]), into)
        state = sheet.mul(out, sheet.op("Div", cell, norm))
        return [state, cell, norm], sheet.op("Identity", state)

    return run(body, layer, names, [gates], step)


# A long convolution, as in Hyena: all inputs are kept


def _hyena(body: Body, hidden: str, layer: int) -> str:
    width = body.design.width
    gate, value = (body.linear(hidden, f"{n}{layer}", width, width) for n in ("gate", "value"))
    past = body.cache.load("u", layer)
    stored = body.mul(value, gate) if body.slip("gated inputs kept", "new-entries-wrong") else value
    body.cache.keep("u", layer, body.join(past, body.at("stored.u", stored, "bsd", layer), axis=1))
    whole = body.join(past, value, axis=1)
    total = body.count(body.size(whole, 1))
    held = body.size(past, 1)
    queries = body.add(body.count(body.new), held)
    gap = body.sub(body.lift(queries, 1), body.lift(total, 0))  # [s, t]
    kernel = body.weights.weight(f"kernel{layer}", 64, width, scale=0.5)
    taps = body.op("Gather", kernel, body.op("Min", body.op("Max", gap, 0), 63))
    taps = body.where(body.lift(body.op("GreaterOrEqual", gap, 0), 2), taps, 0.0)
    made = body.sum(body.mul(body.lift(whole, 1), body.lift(taps, 0)), 2, keep=False)
    return body.linear(body.mul(made, body.op("Sigmoid", gate)), f"out{layer}", width, width)


def _kinds(**axes: str) -> Callable[[Design, int], list[Kind]]:
    sizes = {"conv": {"d": INNER, "w": TAPS - 1}, "ssm": {"d": INNER, "n": STATES}}
    return lambda design, _: [
        _state(design, name, letters, **sizes.get(name, {"d": design.width})) for name, letters in axes.items()
    ]


def _wide_conv(design: Design, layer: int) -> list[Kind]:
    return [_state(design, "conv", "bdw", d=design.width, w=TAPS - 1)]


RECURRENT: dict[str, Mixer] = {
    form: Mixer(_linear_kinds(form), partial(_linear, form=form))
    for form in ("retention", "normalized", "gated", "delta", "rwkv5")
}
RECURRENT |= {
    "LSTM": Mixer(_kinds(h="bd", c="bd"), partial(_operator, form="LSTM")),
    "GRU": Mixer(_kinds(h="bd"), partial(_operator, form="GRU")),
    "RNN": Mixer(_kinds(h="bd"), partial(_operator, form="RNN")),
    "chunked_retention": Mixer(_linear_kinds("retention"), _retention),
    "mamba": Mixer(_kinds(conv="bdw", ssm="bdn"), _mamba),
    "rwkv4": Mixer(_kinds(shift="bd", aa="bd", bb="bd", pp="bd"), _rwkv4),
    "conv": Mixer(_wide_conv, _conv),
    "gated_conv": Mixer(_wide_conv, _gated_conv),
    "lstm_cell": Mixer(_kinds(h="bd", c="bd"), partial(_cell, form="lstm")),
    "xlstm": Mixer(_kinds(h="bd", c="bd", n="bd"), partial(_cell, form="xlstm")),
    "hyena": Mixer(
        lambda d, _: [Kind("u", "bsd", {"d": d.width}, "grow", d.order if d.order != "bhsd" else "")], _hyena
    ),
}
