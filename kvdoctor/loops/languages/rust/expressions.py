"""How Rust makes the values of a loop: the statements and literals that the templates of this folder print.

What depends on the length of a name is printed as rustfmt would print it.
"""

import math
import re
from collections.abc import Iterable, Sequence

from kvdoctor.loops.plan import CallPlan, Dim, Input, LoopPlan
from kvdoctor.loops.plan_questions import nul_in

TYPES = {
    "float": "f32",
    "float16": "f16",
    "int64": "i64",
    "int32": "i32",
    "bool": "bool",
    "int8": "i8",
    "uint8": "u8",
}
KNOWN_AXES = ("batch", "new", "past", "total", "encoder", "encoder_input", "capacity")
COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "new", "cached": "usize::from(past > 0)"}
NUMBERS = {
    "constant": "constant",
    "past": "past_length",
    "total": "total_length",
    "last": "last_index",
    "new": "new_length",
    "cached": "cached",
}
LOCALS = {
    "tokens": "tokens",
    "attention-mask": "mask",
    "causal-mask": "causal_mask",
    "positions": "positions",
    "encoder-mask": "encoder_mask",
    "encoder-input": "source",
}
SIZES = {
    "batch": "let batch = self.batch;",
    "new": "let new = ids.len() / self.batch;",
    "past": "let past = self.length;",
    "total": "let total = self.length + ids.len() / self.batch;",
    "encoder": "let encoder = self.encoder_length();",
}
EMPTY = "// Up to 2.0.0-rc.12 there is no tensor without elements made of data."

LINE = 100
"""What rustfmt puts on one line with the settings of the project."""

SHORT = 10
"""The longest entries of which rustfmt puts several on a line of a longer list."""


def literal(text: str) -> str:
    """A string literal of any text that Rust's strings can hold."""
    escaped = (c if c.isascii() and c.isprintable() and c not in '"\\' else _escape(c) for c in text)
    return '"' + "".join(escaped) + '"'


def _escape(char: str) -> str:
    return "\\" + char if char in '"\\' else f"\\u{{{ord(char):x}}}"


def option(text: str | int | None) -> str:
    """A string or number that may be missing."""
    return "None" if text is None else f"Some({literal(text) if isinstance(text, str) else text})"


def rust_type(name: str) -> str:
    """The type of an element."""
    return TYPES[name]


def variant(text: str) -> str:
    """The name of a variant: `drop-oldest` is `DropOldest`."""
    return "".join(part.capitalize() for part in re.split("[-_]", text))


def axis(dim: Dim) -> str:
    """A size of the table of the cache; an axis that is none of a loop's has length 1."""
    known = ("batch", "batch_heads", "past", "encoder", "capacity")
    return f"Size({dim})" if isinstance(dim, int) else variant(dim) if dim in known else "Size(1)"


def refuses(plan: LoopPlan) -> str | None:
    """Names that do not reach the runtime: ort passes them as C strings, and Rust's strings are UTF-8."""
    if (name := nul_in(plan)) is not None:
        return f"the name {name!r} has a NUL, where a C string ends: every release of ort refuses it"
    slots = [name for slot in plan.slots for name in (slot.past, slot.made, slot.present) if name is not None]
    inputs_of = [one.name for one in plan.inputs]
    outputs = [name for call in plan.calls for name in call.outputs]
    for name in (*plan.files, *slots, *inputs_of, *outputs):
        if any("\ud800" <= char <= "\udfff" for char in name):
            return f"the name {name!r} is not UTF-8, as Rust's strings are"
    return None


def array(items: Sequence[str], before: str = "", indent: int = 0, opening: str = "[", closing: str = "];") -> str:
    """A list behind `before`, on one line, with several entries a line, or with one a line."""
    pad, inner = " " * indent, " " * (indent + 4)
    line = f"{before}{opening}{', '.join(items)}{closing}"
    if len(pad) + len(line) <= LINE and "\n" not in line:
        return line
    below = f"{inner}{opening}{', '.join(items)}{closing}"
    if before.endswith("= ") and len(below) <= LINE and "\n" not in below:
        return f"{before.rstrip()}\n{below}"
    lines = [f"{inner}{item}," for item in items]
    if all(len(item) <= SHORT for item in items):
        lines = _filled(items, inner)
    return "\n".join([f"{before}{opening}", *lines, f"{pad}{closing}"])


def _filled(items: Sequence[str], inner: str) -> list[str]:
    lines = [inner + items[0] + ","]
    for item in items[1:]:
        if len(lines[-1]) + len(item) + 2 <= LINE:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{inner}{item},")
    return lines


def shape(dims: Iterable[Dim]) -> str:
    """The sizes of a tensor."""
    sizes = [str(dim) if isinstance(dim, int) else dim if dim in KNOWN_AXES else "1" for dim in dims]
    return f"[{', '.join(sizes)}]" if sizes else "()"


def _typed(sizes: str) -> str:
    """Sizes as a shape takes them: numbers alone do not say their type."""
    return re.sub(r"^\[(\d+)", r"[\1_usize", sizes)


def _elements(dims: Iterable[Dim]) -> str:
    fixed = math.prod(dim for dim in dims if isinstance(dim, int))
    axes = [dim for dim in dims if isinstance(dim, str) and dim in KNOWN_AXES]
    return " * ".join([*axes, *([str(fixed)] if fixed != 1 or not axes else [])])


def makes(call: CallPlan) -> tuple[Input, ...]:
    """The inputs of a decoder's call that are made for it; the others are values that are there."""
    return tuple(one for one in call.inputs if one.rule not in ("embeddings", "encoder-states", "encoder-input"))


def inputs(call: CallPlan, plan: LoopPlan) -> str:
    """The statements that make the inputs of a call beside the cache, and the list of them with their names."""
    made = call.inputs if plan.encode is call else makes(call)
    entries = [_call([literal(one.name), f"{name}.into()"], 12) for one, name in zip(made, _locals(made), strict=True)]
    before, closing = ("Ok(", "])") if call in (plan.prefill, plan.decode) else ("let feeds = ", "];")
    lines = [*_statements(call, plan), array(entries, before, 8, "vec![", closing)]
    return "\n".join(f"        {line}" for line in lines)


def takes_ids(call: CallPlan, plan: LoopPlan) -> bool:
    """Whether the inputs of a call depend on the new tokens: the compiler warns of a parameter that is not used."""
    return any(re.search(r"\bids\b", line) for line in _statements(call, plan))


def push(one: Input, indent: int) -> str:
    """The statement, at an indent, that feeds a view of embeddings."""
    items = [literal(one.name), f"(&embedded[{literal(str(one.made))}]).into()"]
    line = f"feeds.push(({', '.join(items)}));"
    if indent + len(line) <= LINE:
        return line
    return "\n".join(["feeds.push((", *(f"    {item}," for item in items), "));"])


def _statements(call: CallPlan, plan: LoopPlan) -> list[str]:
    """What makes the inputs of a call, each a local variable; the source of an encoder is one already."""
    encodes = plan.encode is call
    made = call.inputs if encodes else makes(call)
    lines: list[str] = []
    for name, one in zip(_locals(made), made, strict=True):
        if one.rule != "encoder-input":
            lines += _without_shadow(name, statements_of(name, one, plan))
    return lines if encodes else [*_sizes("\n".join(lines), plan), *lines]


def _without_shadow(local: str, lines: list[str]) -> list[str]:
    """The lines of a second variable of one rule: the first one hides the function that has its name."""
    function = re.sub(r"_\d+$", "", local)
    return lines if function == local else [re.sub(rf"\b{function}\(", f"self::{function}(", line) for line in lines]


def _locals(made: Iterable[Input]) -> list[str]:
    """A name of a local variable for each input, by what it holds."""
    names: list[str] = []
    for one in made:
        name = NUMBERS[one.count] if one.rule == "number" else LOCALS[one.rule]
        taken = sum(re.sub(r"_\d+$", "", other) == name for other in names)
        names.append(f"{name}_{taken + 1}" if taken else name)
    return names


def _sizes(text: str, plan: LoopPlan) -> list[str]:
    """The sizes that statements use."""
    capacity = f"let capacity = {'self.capacity' if plan.capacity_is_chosen else plan.context_limit};"
    sizes = {**SIZES, "capacity": capacity}
    return [line for size, line in sizes.items() if re.search(rf"(?<![:.])\b{size}\b", text)]


def _call(items: Sequence[str], indent: int) -> str:
    """A tuple in a list at an indent."""
    line = ", ".join(items)
    if indent + len(line) + 3 <= LINE:
        return f"({line})"
    inner = " " * (indent + 4)
    return "\n".join(["(", *(f"{inner}{item}," for item in items), f"{' ' * indent})"])


def statements_of(local: str, one: Input, plan: LoopPlan) -> list[str]:
    """What makes one tensor, as lines of a method."""
    sizes, values = shape(one.dims), _values(one, plan)
    lines = []
    if "&shape" in values:
        lines, sizes = [f"let shape = {sizes};"], "shape"
    if one.rule == "causal-mask":
        lines, values = [*lines, f"let values = {values};"], "values"
    if 0 in one.dims:
        return [EMPTY, f"let {local} = Tensor::<{rust_type(one.dtype)}>::new(&Allocator::default(), {_typed(sizes)})?;"]
    if "past" not in one.dims:
        made = f"Tensor::from_array(({sizes}, {values}))?;"
        line = f"let {local} = {made}"
        return [*lines, line] if len(line) + 8 <= LINE else [*lines, f"let {local} =", f"    {made}"]
    return [
        *lines,
        f"let {local} = if past == 0 {{",
        f"    {EMPTY}",
        f"    Tensor::new(&Allocator::default(), {sizes})?",
        "} else {",
        f"    Tensor::from_array(({sizes}, {values}))?",
        "};",
    ]


def _values(one: Input, plan: LoopPlan) -> str:
    """The elements of an input, from the local variables of the method that makes it."""
    kind = rust_type(one.dtype)
    match one.rule:
        case "tokens":
            return "ids.to_vec()" if kind == "i64" else f"to_{kind}(ids)"
        case "attention-mask" if not plan.pads and one.dims[-1] == "total":
            return f"vec![{number(1, one.dtype)}; {_elements(one.dims)}]"
        case "attention-mask":
            made = f"mask(&shape, total{', &self.padding' * plan.pads})"
        case "causal-mask":
            rows = "past" if one.dims[-2] != "total" else "0"
            right = f", {'Some(total)' if one.from_right else 'None'}" if plan.from_right else ""
            values = f"{number(one.shown, one.dtype)}, {number(one.hidden, one.dtype)}"
            return f"causal_mask(&shape, {rows}{right}, {values})"
        case "positions":
            made = f"positions(&shape, past{', &self.padding' * plan.pads})"
        case "encoder-mask":
            decides = plan.encode is not None and plan.encode.of_rule("encoder-mask")
            made = f"self.encoder_mask(&shape){'' if decides else '?'}"
        case _ if one.count == "constant":
            return f"vec![{number(one.value, one.dtype)}; {_elements(one.dims)}]"
        case _:
            count = COUNTS[one.count]
            if kind == "bool":
                value = "past > 0" if one.count == "cached" else f"{count} != 0"
            elif kind == "f16":
                value = f"f16::from_f32(({count}) as f32)"
            else:
                value = f"{count} as {kind}" if " - " not in count else f"({count}) as {kind}"
            return f"vec![{value}; {_elements(one.dims)}]"
    return made if kind == "i64" else f"to_{kind}(&{made})"


def number(value: float, dtype: str) -> str:
    """A number with its type."""
    kind = rust_type(dtype)
    if kind == "bool":
        return "true" if value else "false"
    if kind == "f16":
        return f"f16::from_f32({float(value)})" if value else "f16::ZERO"
    return f"{float(value)}_f32" if kind == "f32" else f"{int(value)}_{kind}"


def conversions(plan: LoopPlan) -> list[str]:
    """The types into which whole numbers are turned."""
    made = "\n".join(inputs(call, plan) for call in plan.calls)
    found = set(re.findall(r"\bto_([a-z0-9]+)\(", made))
    if plan.source is not None and plan.source.dtype == "int32":
        found.add("i32")
    return sorted(found - {"vec"})


def makes_mask(plan: LoopPlan) -> bool:
    """Whether some mask is more than ones."""
    masks = [one for one in plan.inputs if one.rule == "attention-mask"]
    return any(plan.pads or one.dims[-1] != "total" for one in masks)


def carries(plan: LoopPlan) -> list[str]:
    """What becomes of the outputs, each once."""
    return sorted({slot.carry if slot.copies else "feed-back" for slot in plan.slots})


def read_types(plan: LoopPlan) -> list[str]:
    """The types whose elements a trace can hold."""
    return sorted({rust_type(name) for name in plan.dtypes} | {"f32"})
