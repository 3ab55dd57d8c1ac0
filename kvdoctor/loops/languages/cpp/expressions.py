"""How C++ makes the values of a loop: the expressions that the templates of this folder print."""

from collections.abc import Iterable

from kvdoctor.loops.plan import FLOATS, CallPlan, Dim, Input, LoopPlan, SlotPlan
from kvdoctor.loops.plan_questions import nul_in, words_of

ELEMENTS = {
    "float": "float",
    "float16": "Ort::Float16_t",
    "bfloat16": "Ort::BFloat16_t",
    "double": "double",
    "int64": "std::int64_t",
    "int32": "std::int32_t",
    "int8": "std::int8_t",
    "uint8": "std::uint8_t",
    "bool": "bool",
}
"""The C++ type of an element."""

SIZES = {
    "batch": "batch",
    "new": "count",
    "past": "past",
    "total": "total",
    "encoder": "encoder_length",
    "encoder_input": "source_length",
    "capacity": "capacity",
}
"""The local variable that holds the size of an axis: `new` is a keyword."""

COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "count", "cached": "past > 0"}

ESCAPES = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\", "?": "\\?"}
"""`?` because two of them begin a trigraph before C++17."""

PIECE = 2000
"""The most characters of one literal; MSVC takes 16,380 bytes, and joins literals that stand side by side."""


def literal(text: str | None) -> str:
    """A string literal of any text in UTF-8; None is a null pointer."""
    if text is None:
        return "nullptr"
    pieces = [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)] or [""]
    return " ".join('"' + "".join(map(_escape, piece)) + '"' for piece in pieces)


def _escape(char: str) -> str:
    if char in ESCAPES:
        return ESCAPES[char]
    if char.isascii() and char.isprintable():
        return char
    # Three octal digits end by themselves; the digits of a hexadecimal escape would go on into the next character.
    return "".join(f"\\{byte:03o}" for byte in char.encode())


def path(file: str, constant: str) -> str:
    """The path of a file that a constant names; only ASCII means the same on every system without a conversion."""
    return constant if file.isascii() else f"std::u8string({constant}, {constant} + std::strlen({constant}))"


def element(dtype: str) -> str:
    """The C++ type of an element."""
    return ELEMENTS[dtype]


def onnx_type(dtype: str) -> str:
    """The runtime's number of an element type."""
    return f"ONNX_TENSOR_ELEMENT_DATA_TYPE_{dtype.upper()}"


def source_type(one: Input) -> str:
    """The type in which the caller gives a source: token ids, or floats that are rounded where the model is."""
    return "std::int64_t" if one.dtype in ("int64", "int32") else "float"


def axis(name: str) -> str:
    """The constant of an axis whose size is known only when the loop runs."""
    return f"k{_camel(name)}Axis"


def carry(slot: SlotPlan) -> str:
    """The enumerator of what becomes of a slot's output."""
    return "k" + _camel(slot.carry.replace("-", "_"))


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def first_shape(slot: SlotPlan) -> str:
    """The sizes of a slot in braces, with the constants of axes."""
    return "{" + ", ".join(str(dim) if isinstance(dim, int) else axis(dim) for dim in slot.dims) + "}"


def first_size(name: str, plan: LoopPlan) -> str:
    """The size that an axis of the cache has in the first call."""
    sizes = {
        "batch": "batch",
        "batch_heads": f"batch * {plan.heads}",
        "past": str(plan.first_length),
        "encoder": str(plan.first_length),
        "capacity": "capacity_" if plan.capacity_is_chosen else "1",
    }
    return sizes.get(name, "1")


def local_names(call: CallPlan, plan: LoopPlan) -> frozenset[str]:
    """The local variables by which the inputs of a call are made."""
    return words_of(call, plan, value)


def needs_states(plan: LoopPlan) -> bool:
    """Whether some input is made by the number of encoder states."""
    return any("encoder_length" in local_names(call, plan) for call in (plan.prefill, plan.decode))


def shape(dims: Iterable[Dim]) -> str:
    """Sizes in braces; an axis that is none of a loop's has length 1."""
    return "{" + ", ".join(_size(dim) for dim in dims) + "}"


def _size(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) else SIZES.get(dim, "1")


def number(value: float, dtype: str) -> str:
    """A number as a literal of an element type; of a float where that is a half."""
    if dtype == "bool":
        return "true" if value else "false"
    return f"{float(value)!r}F" if dtype in FLOATS else str(int(value))


def value(one: Input, plan: LoopPlan) -> str:
    """The tensor of an input, from the local variables of the method that makes it."""
    kind, sizes = element(one.dtype), shape(one.dims)
    padding = (", padding_" if "batch" in one.dims else ", {}") if plan.pads else ""
    match one.rule:
        case "tokens":
            return f"tensor<{kind}>({'{batch * count}' if len(one.dims) == 1 else '{batch, count}'}, flat(tokens))"
        case "attention-mask":
            return f"attention_mask<{kind}>({sizes}, total{padding})"
        case "causal-mask":
            first = "past" if one.dims[-2] != "total" else "0"
            ahead = f", {_size(one.dims[-1])} - total" if one.from_right else ", 0" if plan.from_right else ""
            shown, hidden = number(one.shown, one.dtype), number(one.hidden, one.dtype)
            return f"causal_mask<{kind}>({sizes}, {first}{ahead}, {shown}, {hidden})"
        case "positions":
            return f"positions<{kind}>({sizes}, past{padding})"
        case "encoder-mask":
            return f"encoder_mask<{kind}>({sizes}, source_mask_)"
        case "number":
            counted = number(one.value, one.dtype) if one.count == "constant" else COUNTS[one.count]
            return f"filled<{kind}>({sizes}, {counted})"
        case _:
            return f"tensor<{kind}>(source.shape, source.entries)"


def refuses(plan: LoopPlan) -> str | None:
    """Why the C interface, on which the C++ interface stands, cannot serve a plan."""
    name = nul_in(plan)
    if name is not None:
        return f"a name of the model has a NUL ({name[:40]!r}), which ends a name in the C interface of the runtime"
    for call in (plan.prefill, plan.decode):
        if call.logits_type not in ("float", "float16", "bfloat16", "double"):
            return f"the logits have element type {call.logits_type}, for which there is no loop yet"
    return None
