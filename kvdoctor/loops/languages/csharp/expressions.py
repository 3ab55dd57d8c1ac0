"""How C# makes the values of a loop: the expressions that the templates of this folder print."""

from collections.abc import Iterable

from kvdoctor.loops.plan import FLOATS, CallPlan, Dim, Input, LoopPlan, SlotPlan
from kvdoctor.loops.plan_questions import nul_in, words_of

ELEMENTS = {
    "float": ("float", "Float", 4),
    "float16": ("Float16", "Float16", 2),
    "bfloat16": ("BFloat16", "BFloat16", 2),
    "double": ("double", "Double", 8),
    "int64": ("long", "Int64", 8),
    "int32": ("int", "Int32", 4),
    "int8": ("sbyte", "Int8", 1),
    "uint8": ("byte", "UInt8", 1),
    "bool": ("bool", "Bool", 1),
}
"""The C# type of an element, its name in `TensorElementType`, and its bytes."""

SIZES = {
    "batch": "batch",
    "new": "count",
    "past": "past",
    "total": "total",
    "encoder": "encoderLength",
    "encoder_input": "sourceLength",
    "capacity": "capacity",
}
"""The local variable that holds the size of an axis: `new` is a keyword."""

COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "count", "cached": "past > 0"}


def literal(text: str | None) -> str:
    """A string literal of any text; None is `null`."""
    if text is None:
        return "null"
    escaped = (c if c.isascii() and c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    return '"' + "".join(escaped) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def element(dtype: str) -> str:
    """The C# type of an element."""
    return ELEMENTS[dtype][0]


def element_type(dtype: str) -> str:
    """The runtime's name of an element type."""
    return f"TensorElementType.{ELEMENTS[dtype][1]}"


def element_size(dtype: str) -> int:
    """The bytes of an element."""
    return ELEMENTS[dtype][2]


def source_type(one: Input) -> str:
    """The type in which the caller gives a source: token ids, or floats that are rounded where the model is."""
    return "long" if one.dtype in ("int64", "int32") else "float"


def carry(slot: SlotPlan) -> str:
    """The enumerator of what becomes of a slot's output."""
    return "".join(part.capitalize() for part in slot.carry.split("-"))


def first_shape(slot: SlotPlan, plan: LoopPlan) -> str:
    """The sizes of a slot in the first call, of which the batch is known only then."""
    sizes = {
        "batch": "batch",
        "batch_heads": f"batch * {plan.heads}",
        "past": str(plan.first_length),
        "encoder": str(plan.first_length),
        "capacity": "_capacity" if plan.capacity_is_chosen else "1",
    }
    return "[" + ", ".join(str(dim) if isinstance(dim, int) else sizes.get(dim, "1") for dim in slot.dims) + "]"


def shape(dims: Iterable[Dim]) -> str:
    """Sizes in brackets; an axis that is none of a loop's has length 1."""
    return "[" + ", ".join(_size(dim) for dim in dims) + "]"


def _size(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) else SIZES.get(dim, "1")


def number(value: float, dtype: str) -> str:
    """A number as an expression of an element type."""
    if dtype == "bool":
        return "true" if value else "false"
    if dtype == "float16":
        return f"(Float16)({float(value)!r}f)"
    return f"{float(value)!r}f" if dtype in FLOATS else str(int(value))


def cast(text: str, dtype: str, given: str) -> str:
    """An expression of type `given` (long, float or bool) as one of an element type."""
    kind = element(dtype)
    if kind == given:
        return text
    if given == "bool":
        text, given = f"({text} ? 1 : 0)", "int"
    if dtype == "bool":
        return f"{text} != 0"
    if dtype == "float16":
        return f"(Float16)(float)({text})"
    return text if kind == given else f"({kind})({text})"


def value(one: Input, plan: LoopPlan) -> str:
    """The tensor of an input, from the local variables of the method that makes it."""
    sizes = shape(one.dims)
    padding = (", _padding" if "batch" in one.dims else ", []") if plan.pads else ""
    converted = cast("x", one.dtype, "long")
    match one.rule:
        case "tokens":
            tokens = "[batch * count]" if len(one.dims) == 1 else "[batch, count]"
            return f"Tensor({tokens}, Flat(tokens), x => {converted})"
        case "attention-mask":
            return f"AttentionMask({sizes}, total{padding}, x => {converted})"
        case "causal-mask":
            first = "past" if one.dims[-2] != "total" else "0"
            ahead = f", {_size(one.dims[-1])} - total" if one.from_right else ", 0" if plan.from_right else ""
            shown, hidden = number(one.shown, one.dtype), number(one.hidden, one.dtype)
            return f"CausalMask<{element(one.dtype)}>({sizes}, {first}{ahead}, {shown}, {hidden})"
        case "positions":
            return f"Positions({sizes}, past{padding}, x => {converted})"
        case "encoder-mask":
            return f"EncoderMask({sizes}, _sourceMask, x => {converted})"
        case "number" if one.count == "constant":
            return f"Filled<{element(one.dtype)}>({sizes}, {number(one.value, one.dtype)})"
        case "number":
            counted = cast(COUNTS[one.count], one.dtype, "bool" if one.count == "cached" else "long")
            return f"Filled<{element(one.dtype)}>({sizes}, {counted})"
        case _:
            return f"Tensor(source.Shape, source.Entries, x => {cast('x', one.dtype, source_type(one))})"


def local_names(call: CallPlan, plan: LoopPlan) -> frozenset[str]:
    """The local variables by which the inputs of a call are made."""
    return words_of(call, plan, value)


def needs_states(plan: LoopPlan) -> bool:
    """Whether some input is made by the number of encoder states."""
    return any("encoderLength" in local_names(call, plan) for call in (plan.prefill, plan.decode))


def refuses(plan: LoopPlan) -> str | None:
    """Why the C interface, on which the binding stands, cannot serve a plan."""
    name = nul_in(plan)
    if name is not None:
        return f"a name of the model has a NUL ({name[:40]!r}), which ends a name in the C interface of the runtime"
    for call in (plan.prefill, plan.decode):
        if call.logits_type not in ("float", "float16", "bfloat16", "double"):
            return f"the logits have element type {call.logits_type}, for which there is no loop yet"
    return None
