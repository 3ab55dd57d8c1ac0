"""How Go makes the values of a loop: the statements that the templates of this folder print."""

import re
from collections.abc import Iterable

from kvdoctor.loops.plan import FLOATS, CallPlan, Dim, Input

TYPES = {"float": "float32", "float16": "float32"}
"""Element types that Go calls otherwise. It has no float16: the loop holds such numbers as float32."""

AXES = {
    "batch": "axisBatch",
    "batch_heads": "axisBatchHeads",
    "past": "axisPast",
    "encoder": "axisEncoder",
    "capacity": "axisCapacity",
}
"""Sizes of the cache that are known only when the loop runs, as constants of the program."""

LOCALS = {
    "batch": "batch",
    "new": "count",
    "past": "past",
    "total": "total",
    "encoder": "encoder",
    "encoder_input": "encoderInput",
    "capacity": "capacity",
}
"""The same as local variables of the functions that make the inputs."""

COUNTS = {"past": "past", "total": "total", "last": "total-1", "new": "count", "cached": "min(past, 1)"}


def literal(text: str | None) -> str:
    """A string literal of any text; None is the empty string, which is the name of nothing."""
    return '"' + "".join(map(_escaped, text or "")) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    if 0xD800 <= code < 0xE000:  # half of a pair has no escape in Go, only bytes
        return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def go_type(name: str) -> str:
    """The element type of the slices that hold such numbers."""
    return TYPES.get(name, name)


def element(name: str) -> str:
    """The element type as a constant of the binding."""
    return f"ort.TensorElementDataType{name.capitalize()}"


def dims(sizes: Iterable[Dim]) -> str:
    """A shape of the cache; an axis that is none of a loop's has length 1."""
    return "[]int64{" + ", ".join(str(d) if isinstance(d, int) else AXES.get(d, "1") for d in sizes) + "}"


def shape(sizes: Iterable[Dim]) -> str:
    """The shape of an input, from local variables."""
    return "[]int64{" + ", ".join(str(d) if isinstance(d, int) else LOCALS.get(d, "1") for d in sizes) + "}"


def put(one: Input, pads: bool = False) -> str:
    """The statement that makes an input and adds it to the call."""
    half = "putHalf" if one.dtype == "float16" else "put"
    return f"{half}(call, {literal(one.name)}, {_array(one, pads)})"


def _array(one: Input, pads: bool) -> str:
    kind = go_type(one.dtype)
    sizes = shape(one.dims)
    by_sequence = one.dims[:1] == ("batch",) or (one.rule == "positions" and "batch" in one.dims)
    padding = ", d.padding" if pads and by_sequence else ", nil" if pads else ""
    match one.rule:
        case "tokens":
            flat = "tokens.flat()" if len(one.dims) == 1 else "tokens"
            return flat if one.dtype == "int64" else f"convert[{kind}]({flat})"
        case "encoder-input" | "encoder-states" | "embeddings":
            return "input" if kind in ("float32", "int64") else f"convert[{kind}](input)"
        case "attention-mask":
            return f"mask({sizes}, total{padding}, {_number(one, 1)}, {_number(one, 0)})"
        case "causal-mask":
            first = "past" if one.dims[-2] != "total" else "0"
            newest = ", total" if one.from_right else ""
            return f"causalMask({sizes}, {first}{newest}, {_number(one, one.shown)}, {_number(one, one.hidden)})"
        case "positions":
            made = f"positions({sizes}, past{padding})"
            return made if kind == "int64" else f"convert[{kind}]({made})"
        case "encoder-mask":
            made = f"d.encoderMask({sizes})"
            if kind == "bool":
                return f"nonzero({made})"
            return made if kind == "int64" else f"convert[{kind}]({made})"
        case "number" if one.count == "constant":
            return f"full({sizes}, {_number(one, one.value)})"
        case "number":
            count = COUNTS[one.count]
            number = f"{count} != 0" if kind == "bool" else count if kind == "int64" else f"{kind}({count})"
            return f"full({sizes}, {number})"


def _number(one: Input, value: float) -> str:
    kind = go_type(one.dtype)
    if kind == "bool":
        return str(bool(value)).lower()
    return f"{kind}({value if one.dtype in FLOATS else int(value)})"


def has(inputs: Iterable[Input], name: str, pads: bool = False) -> bool:
    """Whether a variable or function stands in the statements that make inputs.

    Go refuses a variable that nobody reads, and a function that nobody calls is only in the way.
    """
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    return any(
        word.search(f"putHalf {_array(one, pads)}" if one.dtype == "float16" else _array(one, pads)) for one in inputs
    )


def used(call: CallPlan, name: str, pads: bool = False) -> bool:
    """Whether the statements of a call read a local variable."""
    made = (one for one in call.inputs if one.rule not in ("encoder-input", "encoder-states", "embeddings"))
    return has(made, name, pads)
