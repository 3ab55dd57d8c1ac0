"""How JavaScript makes the values of a loop: what the templates of `_script` print, for TypeScript as well."""

import math
import re
from collections.abc import Iterable, Sequence

from kvdoctor.loops.plan import CallPlan, Dim, Input, LoopPlan
from kvdoctor.loops.plan_questions import nul_in

TYPES = {"float": "float32"}
"""Element types that onnxruntime calls otherwise in JavaScript."""

ARRAYS = {
    "float": "Float32Array",
    "float16": "Uint16Array",
    "int64": "BigInt64Array",
    "int32": "Int32Array",
    "bool": "Uint8Array",
    "int8": "Int8Array",
    "uint8": "Uint8Array",
}

LOCALS = {"new": "count", "encoder_input": "encoderInput"}
"""Axes whose variable is named otherwise: `new` is a keyword."""

KNOWN_AXES = ("batch", "new", "past", "total", "encoder", "encoder_input", "capacity")
COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "count", "cached": "past > 0"}
WIDTH = 100
"""Characters of a line, as the project's setting of prettier has it."""

PROTOTYPE = "__proto__"
"""The one name that is no key of its own in an object: `{ __proto__: x }` sets something else."""


def literal(text: str | None) -> str:
    """A string literal of any text; None is `null`."""
    if text is None:
        return "null"
    return '"' + "".join(c if " " <= c <= "~" and c not in '"\\' else _escape(c) for c in text) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def keys(names: Sequence[str]) -> dict[str, str]:
    """The keys of an object, by name: without quotes if none of them needs quotes, as prettier writes them."""
    plain = all(re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$]*", name) for name in names)
    written = {name: name if plain else literal(name) for name in names}
    return written | ({PROTOTYPE: f'["{PROTOTYPE}"]'} if PROTOTYPE in names else {})


def listed(items: Iterable[str], column: int, indent: int = 0) -> str:
    """An array of expressions that begins in a column: on one line where it fits, else an element a line."""
    items = tuple(items)
    line = f"[{', '.join(items)}]"
    if column + len(line) < WIDTH:
        return line
    return "[\n" + "".join(f"{' ' * (indent + 2)}{item},\n" for item in items) + " " * indent + "]"


def fitted(items: Iterable[str], head: str, tail: str, indent: int = 0) -> str:
    """A head, items with commas, and a tail: on one line where it fits, else an item a line."""
    items, pad = tuple(items), " " * indent
    line = head + ", ".join(items) + tail
    if indent + len(line) <= WIDTH:
        return line
    return f"{head}\n" + "".join(f"{pad}  {item},\n" for item in items) + pad + tail


def element_type(name: str) -> str:
    """The element type as tensors have it in JavaScript."""
    return TYPES.get(name, name)


def array_type(name: str) -> str:
    """The typed array that holds elements of a type."""
    return ARRAYS[name]


def shape(dims: Iterable[Dim]) -> str:
    """An array of sizes; an axis that is none of a loop's has length 1."""
    sizes = (str(dim) if isinstance(dim, int) else LOCALS.get(dim, dim) if dim in KNOWN_AXES else "1" for dim in dims)
    return f"[{', '.join(sizes)}]"


def local_names(inputs: Iterable[Input], plan: LoopPlan) -> list[str]:
    """The variables that the values of some inputs are made of."""
    made = " ".join(value(one, plan) for one in inputs)
    return sorted(set(re.findall(r"(?<![.\w])(?:batch|count|past|total|encoder|encoderInput|capacity)\b", made)))


def feeds_params(call: CallPlan, plan: LoopPlan) -> list[tuple[str, str]]:
    """The parameters of the method that makes what a call is fed, each with its type."""
    made = [one for one in call.inputs if one.rule != "embeddings"]
    sized = {"batch", "count", "total"} & set(local_names(made, plan))
    tokens = [("tokens", "Tokens")] if sized or call.of_rule("tokens") else []
    return tokens + [("embedded", "Values")] * (len(made) < len(call.inputs))


def made_types(plan: LoopPlan) -> list[str]:
    """The element types of the values that the function `filled` makes."""
    return sorted({element_type(one.dtype) for one in plan.inputs if _is_filled(one)})


def bounds_mask(plan: LoopPlan) -> bool:
    """Whether some mask has columns behind the last token, as for a cache of fixed length."""
    return any(one.rule == "attention-mask" and one.dims[-1] != "total" for one in plan.inputs)


def has_mask(plan: LoopPlan) -> bool:
    """Whether some mask is not ones alone."""
    return "attention-mask" in plan.rules and (plan.pads or bounds_mask(plan))


def _is_filled(one: Input) -> bool:
    """Whether the values are computed from their place, one by one."""
    if one.rule == "number":
        return not _is_one(one) or one.dtype == "float16"
    return one.rule in ("attention-mask", "causal-mask", "positions", "encoder-mask")


def _is_one(one: Input) -> bool:
    """Whether a number is a tensor of one element in every call."""
    return all(dim == 1 or (isinstance(dim, str) and dim not in KNOWN_AXES) for dim in one.dims)


def value(one: Input, plan: LoopPlan) -> str:
    """The tensor of an input, from the local variables of the method that makes it."""
    kind, sizes = literal(element_type(one.dtype)), shape(one.dims)
    made = f"{kind}, {sizes}" if len(made_types(plan)) > 1 else sizes
    # One row stands for all sequences: their padding cannot be told in it.
    padding = (", this.#padding" if "batch" in one.dims else ", [0]") if plan.pads else ""
    match one.rule:
        case "tokens":
            sizes = "[batch * count]" if len(one.dims) == 1 else "[batch, count]"
            return f"new Tensor({kind}, tokens.flat(), {sizes})"
        case "attention-mask":
            if not has_mask(plan):
                return f"filled({made}, () => 1)"
            return f"mask({made}{', total' * bounds_mask(plan)}{padding})"
        case "causal-mask":
            rows = "past" if one.dims[-2] != "total" else "0"
            return f"causalMask({made}, {rows}{', total' * one.from_right})"
        case "positions":
            return f"positions({made}, past{padding})"
        case "encoder-mask":
            return f"this.#encoderMask({made})"
        case "number":
            entry = _number(one)
            return f"filled({made}, () => {entry})" if _is_filled(one) else f"new Tensor({kind}, [{entry}], {sizes})"
        case "embeddings":
            return f"embedded[{literal(one.made)}]"
        case _:
            return _source(one)


def _number(one: Input) -> str:
    """The expression of a number: `new Tensor` takes booleans, `filled` takes numbers."""
    if one.count == "constant":
        if one.dtype == "bool" and not _is_filled(one):
            return "true" if one.value else "false"
        return number(one.value)
    counted = COUNTS[one.count]
    as_bool = one.dtype == "bool" and not _is_filled(one)
    if as_bool:
        return counted if one.count == "cached" else f"{counted} > 0"
    return f"Number({counted})" if one.count == "cached" else counted


def number(constant: float) -> str:
    """A number as JavaScript writes it."""
    if math.isnan(constant):
        return "NaN"
    if math.isinf(constant):
        return "Infinity" if constant > 0 else "-Infinity"
    return str(int(constant)) if constant == int(constant) else repr(float(constant))


def _source(one: Input) -> str:
    """What the caller gives to the encoder: rows of ids, or numbers with their shape."""
    kind = literal(element_type(one.dtype))
    if one.dtype in ("int64", "int32"):
        return f"new Tensor({kind}, source.flat(), [batch, encoderInput])"
    data = {
        "float": "source.data",
        "float16": "Uint16Array.from(source.data, toHalf)",
    }.get(one.dtype, f"{ARRAYS[one.dtype]}.from(source.data)")
    return f"new Tensor({kind}, {data}, source.shape)"


def ids_source(plan: LoopPlan) -> bool:
    """Whether the caller gives token ids to the encoder."""
    return plan.source is not None and plan.source.dtype in ("int64", "int32")


def refuses(plan: LoopPlan) -> str | None:
    """Names that do not get through the binding: it takes them as C strings, and as keys of plain objects."""
    if (name := nul_in(plan)) is not None:
        return f"the name {name!r} has a NUL, which ends it in the C interface of onnxruntime; rename it"
    if any(PROTOTYPE in call.outputs for call in plan.calls):
        return f"an output is called {PROTOTYPE!r}, which onnxruntime-common (up to 1.30.0) cannot return; rename it"
    return None
