"""How Python makes the values of a loop: the expressions that the templates of this folder print."""

import re
from collections.abc import Iterable

from kvdoctor.loops.plan import CallPlan, Dim, Input

NUMPY = {"float": "float32", "bool": "bool_"}
"""Element types that numpy calls otherwise."""

KNOWN_AXES = ("batch", "new", "past", "total", "encoder", "encoder_input", "capacity")
COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "new", "cached": "past > 0"}


def literal(text: str | None) -> str:
    """A string literal of any text; None is `None`."""
    if text is None:
        return "None"
    escaped = (c if c.isprintable() and ord(c) < 0x7F and c not in '"\\' else _escape(c) for c in text)
    return '"' + "".join(escaped) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def dtype(name: str) -> str:
    """The element type as an attribute of numpy."""
    return NUMPY.get(name, name)


def shape(dims: Iterable[Dim]) -> str:
    """A tuple of sizes; an axis that is none of a loop's has length 1."""
    sizes = [str(dim) if isinstance(dim, int) else dim if dim in KNOWN_AXES else "1" for dim in dims]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def value(one: Input) -> str:
    """The array of an input, from the local variables of the method that makes it."""
    kind = f"np.{dtype(one.dtype)}"
    match one.rule:
        case "tokens":
            flat = ".reshape(-1)" if len(one.dims) == 1 else ""
            return f"tokens{flat}" if one.dtype == "int64" else f"tokens{flat}.astype({kind})"
        case "attention-mask":
            return f"_mask({shape(one.dims)}, total, self._padding).astype({kind})"
        case "causal-mask":
            rows = "past" if one.dims[-2] != "total" else "0"
            made = f"_causal_mask({shape(one.dims)}, {rows}{', total' * one.from_right})"
            return made if one.dtype == "bool" else f"np.where({made}, {one.shown}, {one.hidden}).astype({kind})"
        case "positions":
            return f"_positions({shape(one.dims)}, past, self._padding).astype({kind})"
        case "encoder-mask":
            return f"self._encoder_mask({shape(one.dims)}).astype({kind})"
        case "number" if one.count != "constant":
            return f"np.full({shape(one.dims)}, {COUNTS[one.count]}, {kind})"
        case "number":
            number = {"bool": bool}.get(one.dtype, float if one.dtype in ("float", "float16") else int)(one.value)
            return f"np.full({shape(one.dims)}, {number}, {kind})"
        case _:
            return "source"


def used(call: CallPlan) -> frozenset[str]:
    """The local variables that the values of a call are made from."""
    return frozenset(re.findall("|".join(rf"\b{name}\b" for name in KNOWN_AXES), " ".join(map(value, call.inputs))))
