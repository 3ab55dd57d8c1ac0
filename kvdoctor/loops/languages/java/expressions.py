"""How Java makes the values of a loop: the expressions that the templates of this folder print.

A value is a function of the index of an element: `int64(i -> past + i % newTokens, batch, newTokens)`. So an input
is one line, and a loop has no function for a mask that it does not need.
"""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdoctor.loops.plan import FLOATS, CallPlan, Dim, Input, LoopPlan, SlotPlan

WIDTH = 100
"""The width of a line by google-java-format."""

SIZES = {
    "batch": "batch",
    "new": "newTokens",
    "past": "past",
    "total": "total",
    "encoder": "encoderLength",
    "encoder_input": "sourceLength",
    "capacity": "capacity",
}
"""The local variables that hold the sizes of axes."""

COUNTS = {"past": "past", "total": "total", "last": "total - 1", "new": "newTokens", "cached": "past > 0 ? 1 : 0"}

SLOT_SIZES = {
    "batch": "BATCH",
    "batch_heads": "BATCH_HEADS",
    "past": "PAST",
    "encoder": "ENCODED",
    "capacity": "CAPACITY",
}
"""The constants that stand in a shape of the cache for a size that is known only when the loop runs."""

MAKERS = {"float": "float32", "bool": "bool"}
"""Element types whose method is not called as they are."""

JAVA_TYPES = {"float": "FLOAT", "float16": "FLOAT16", "int64": "INT64", "int32": "INT32", "bool": "BOOL"}

READERS = {
    "bfloat16": "finite(Fp16Conversions.bf16ToFloat(bytes.getShort(at)))",
    "bool": "Byte.toString(bytes.get(at))",
    "float": "finite(bytes.getFloat(at))",
    "float16": "finite(Fp16Conversions.fp16ToFloat(bytes.getShort(at)))",
    "int32": "Integer.toString(bytes.getInt(at))",
    "int64": "Long.toString(bytes.getLong(at))",
    "int8": "Byte.toString(bytes.get(at))",
    "uint8": "Integer.toString(Byte.toUnsignedInt(bytes.get(at)))",
}
"""The element at a place of a tensor's bytes, as JSON."""

LOGITS = ("float", "float16", "bfloat16")
"""The element types that `OnnxTensor.getFloatBuffer` reads."""

LONGEST_CONSTANT = 0xFFFF // 3
"""Characters that a string constant of a class file takes in any case."""


def literal(text: str | None) -> str:
    """A string literal of any text; None is `null`."""
    if text is None:
        return "null"
    units = _units(text)
    parts = [units[at : at + LONGEST_CONSTANT] for at in range(0, len(units), LONGEST_CONSTANT)] or [[]]
    first, *more = ['"' + "".join(map(_escape, part)) + '"' for part in parts]
    return first + "".join(f".concat({part})" for part in more)


def _units(text: str) -> list[int]:
    """The UTF-16 code units of a text: what a Java string consists of."""
    encoded = text.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(encoded[at : at + 2], "big") for at in range(0, len(encoded), 2)]


def _escape(unit: int) -> str:
    # javac turns \uXXXX into the character before it reads a literal: quotes and line ends need escapes of their own.
    named = {0x22: '\\"', 0x5C: "\\\\", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x00: "\\000"}
    if unit in named:
        return named[unit]
    return chr(unit) if 0x20 <= unit < 0x7F else f"\\u{unit:04x}"


@dataclass(frozen=True)
class Call:
    """A call with its arguments, which `lines` lays out over lines."""

    head: str
    arguments: Sequence["str | Call"]

    @property
    def flat(self) -> str:
        """The call on one line."""
        return f"{self.head}({', '.join(a.flat if isinstance(a, Call) else a for a in self.arguments)})"

    def lines(self, indent: int, tail: str) -> list[str]:
        """The call as google-java-format lays it out: on one line, with all arguments on a second, or on one each."""
        blank, inner = " " * indent, " " * (indent + 4)
        if indent + len(self.flat + tail) <= WIDTH:
            return [f"{blank}{self.flat}{tail}"]
        together = self.flat.removeprefix(f"{self.head}(") + tail
        if len(inner + together) <= WIDTH:
            return [f"{blank}{self.head}(", inner + together]
        made = [f"{blank}{self.head}("]
        for number, argument in enumerate(self.arguments, 1):
            end = f"){tail}" if number == len(self.arguments) else ","
            made += argument.lines(indent + 4, end) if isinstance(argument, Call) else [f"{inner}{argument}{end}"]
        return made


def assigned(arguments: "Iterable[str | Call]", name: str, call: str) -> str:
    """The constant `name` with the value of a call."""
    value = Call(call, tuple(arguments))
    flat = f"  {name} = {value.flat};"
    return flat if len(flat) <= WIDTH else "\n".join([f"  {name} =", *value.lines(6, ";")])


def put(one: Input, plan: LoopPlan, into: str = "inputs", name: str | None = None) -> str:
    """The statement that adds the value of an input to a map."""
    return "\n".join(Call(f"{into}.put", (literal(name or one.name), value(one, plan))).lines(4, ";"))


def javadoc(text: str) -> str:
    """A paragraph of the comment of a class, as google-java-format fills it."""
    return textwrap.fill(
        text, WIDTH, initial_indent=" * ", subsequent_indent=" * ", break_long_words=False, break_on_hyphens=False
    )


def layout_record(plan: LoopPlan) -> str:
    """The declaration of what `layouts` makes."""
    fields = ["OnnxJavaType type"]
    fields += ["int batchAxis"] * plan.reorders + ["int lengthAxis"] * (plan.cuts or plan.copies)
    fields += ["Carry carry"] * plan.copies + ["long... shape"]
    return "\n".join(Call("private record Layout", fields).lines(2, " {}"))


def encoder_run(outputs: Iterable[str], several: bool) -> str:
    """The statement that runs the encoder, of several files or the only one."""
    run = Call("run", (*["ENCODER"] * several, "inputs", "Map.of()", Call("Set.of", tuple(outputs))))
    return "\n".join(Call("encoded.putAll", (run,)).lines(4, ";"))


def embed_run(outputs: Iterable[str]) -> str:
    """The statement that runs the embedding graph and returns what it makes."""
    run = Call("return run", ("EMBEDDING", "inputs", "Map.of()", Call("Set.of", tuple(outputs))))
    return "\n".join(run.lines(4, ";"))


def embedded(name: str, output: str) -> str:
    """The statement that feeds what the embedding graph made."""
    return "\n".join(Call("inputs.put", (literal(name), f"embedded.get({literal(output)})")).lines(4, ";"))


def kept(name: str, source: str, key: str) -> str:
    """The statement that adds an entry of another map to the map `kept`."""
    return "\n".join(Call("kept.put", (literal(name), f"{source}.get({literal(key)})")).lines(4, ";"))


def layouts(plan: LoopPlan) -> dict[str, str]:
    """Name and value of each layout that slots of the cache have in common."""
    return {name: _layout(slot, plan) for slot, name in zip(plan.slots, _layout_names(plan), strict=True)}


def slots(plan: LoopPlan) -> list[Call]:
    """The elements of the list of slots."""
    return [
        Call("new Slot", (literal(one.past), literal(one.made), literal(one.present), layout))
        for one, layout in zip(plan.slots, _layout_names(plan), strict=True)
    ]


def _layout_names(plan: LoopPlan) -> list[str]:
    names: dict[str, str] = {}
    for one in plan.slots:
        kind = one.kind.upper().replace("-", "_")
        number = 1 + sum(name == kind or name.startswith(f"{kind}_") for name in names.values())
        names.setdefault(_layout(one, plan), kind if number == 1 else f"{kind}_{number}")
    return [names[_layout(one, plan)] for one in plan.slots]


def _layout(one: SlotPlan, plan: LoopPlan) -> str:
    made = [f"OnnxJavaType.{java_type(one.dtype)}"]
    if plan.reorders:
        made.append("NONE" if one.batch_axis is None else str(one.batch_axis))
    if plan.cuts or plan.copies:
        made.append("NONE" if one.length_axis is None else str(one.length_axis))
    if plan.copies:
        made.append("Carry." + (one.carry.upper().replace("-", "_") if one.copies else "PASS_ON"))
    made += [str(dim) if isinstance(dim, int) else SLOT_SIZES.get(dim, "1") for dim in one.dims]
    return "\n".join(Call("new Layout", made).lines(6, ""))


def java_type(name: str) -> str:
    """The element type as the binding's `OnnxJavaType` calls it."""
    return JAVA_TYPES.get(name, name.upper())


def readers(plan: LoopPlan) -> list[tuple[str, str]]:
    """Each element type that a plan has, with the expression that reads an element."""
    return [(java_type(dtype), made) for dtype, made in READERS.items() if dtype in plan.dtypes]


def local_variables(call: CallPlan, plan: LoopPlan) -> frozenset[str]:
    """The names of the local variables that a call's values use, beside `tokens`."""
    made = [one for one in call.inputs if one.rule not in ("encoder-states", "encoder-input", "embeddings")]
    words = " ".join(value(one, plan).flat for one in made)
    for sign in "()[],.?:+-":
        words = words.replace(sign, " ")
    return frozenset(words.split())


def value(one: Input, plan: LoopPlan) -> Call:
    """The tensor of an input, from the local variables of the method that makes it."""
    sizes = [_size(dim) for dim in one.dims]
    columns = sizes[-1] if sizes else "1"
    match one.rule:
        case "tokens":
            return _made(one, f"tokens[{_row('newTokens')}][{_column('newTokens')}]", ["batch", "newTokens"])
        case "attention-mask":
            return _made(one, _choice(_tokens_mask(one, columns, plan), "1", "0", one.dtype), sizes)
        case "causal-mask":
            shown, hidden = (f"{int(one.shown)}", f"{int(one.hidden)}")
            return _made(one, _choice(_causal_mask(one, sizes), shown, hidden, one.dtype), sizes)
        case "positions":
            return _made(one, _positions(one, columns, plan), sizes)
        case "encoder-mask" if len(sizes) == 2:
            return _made(one, _truth(f"sourceMask(i, {sizes[0]}, {columns})", one.dtype), sizes)
        case "encoder-mask":
            return _made(one, _truth("1", one.dtype), sizes)
        case "encoder-input" if one.dtype not in FLOATS:
            rows = f"source[{_row('sourceLength')}][{_column('sourceLength')}]"
            return _made(one, rows, ["source.length", "sourceLength"])
        case "encoder-input" | "encoder-states" | "embeddings":
            return _made(one, "source[i]", ["shape"])
        case "number":
            return _made(one, _number(one), sizes)


def _number(one: Input) -> str:
    if one.count == "cached" and one.dtype == "bool":
        return "past > 0"
    if one.count != "constant":
        return _truth(COUNTS[one.count], one.dtype)
    if one.dtype == "bool":
        return "true" if one.value else "false"
    return str(int(one.value) if one.dtype not in FLOATS or one.value == int(one.value) else one.value)


def _made(one: Input, element: str, sizes: Sequence[str]) -> Call:
    # A shape of one axis or none: tokens in a row are those of one sequence.
    if one.rule == "tokens" and len(one.dims) == 1:
        sizes = ["batch * newTokens"]
    return Call(MAKERS.get(one.dtype, one.dtype), (f"i -> {element}", *sizes))


def _size(dim: Dim) -> str:
    return str(dim) if isinstance(dim, int) else SIZES.get(dim, "1")


def _row(columns: str) -> str:
    return "i" if columns == "1" else f"i / {columns}"


def _column(columns: str) -> str:
    return "0" if columns == "1" else f"i % {columns}"


def _choice(condition: str | None, shown: str, hidden: str, dtype: str) -> str:
    """One number where a condition holds, else the other; no condition always holds."""
    if dtype == "bool":
        return condition or "true"
    return f"{condition} ? {shown} : {hidden}" if condition else shown


def _truth(number: str, dtype: str) -> str:
    if dtype != "bool":
        return number
    return "true" if number == "1" else f"({number}) != 0" if " " in number else f"{number} != 0"


def _tokens_mask(one: Input, columns: str, plan: LoopPlan) -> str | None:
    """Where tokens are: behind the padding on the left, and not behind the last token."""
    conditions = []
    if plan.pads and len(one.dims) > 1:
        conditions.append(f"{_column(columns)} >= padding[{_row(columns)}]")
    if columns != "total":
        conditions.append(f"{_column(columns)} < total")
    return " && ".join(conditions) or None


def _causal_mask(one: Input, sizes: Sequence[str]) -> str:
    """Where a query may look: at its own position and at those before it. The rows are queries."""
    columns, rows = sizes[-1], sizes[-2] if len(sizes) > 1 else "1"
    query = "" if rows == "1" else f"i / {columns} % {rows}"
    limit = query or "0" if one.dims[-2] == "total" else f"past + {query}" if query else "past"
    if not one.from_right or columns == "total":
        return f"{_column(columns)} <= {limit}"
    # The newest entry is in the last column.
    return f"i % {columns} >= {columns} - total && i % {columns} - ({columns} - total) <= {limit}"


def _positions(one: Input, columns: str, plan: LoopPlan) -> str:
    """The positions of the new tokens; padding on the left is not counted."""
    position = "past" if columns == "1" else f"past + {_column(columns)}"
    if not plan.pads or len(one.dims) < 2:
        return position
    row = _row(columns) if len(one.dims) == 2 else f"i / {columns} % batch"
    return f"Math.max({position} - padding[{row}], 0)"


def refuses(plan: LoopPlan) -> str | None:
    """Why the binding cannot run a plan, or None."""
    names = {name for call in plan.calls for name in (*_fed(call), *call.outputs, call.file)}
    for name in sorted(names):
        if any(ord(char) > 0xFFFF or char == "\0" for char in name):
            return (
                "onnxruntime 1.29.0 for Java gives names to the runtime as modified UTF-8, in which characters beyond "
                f"U+FFFF and NUL differ from UTF-8: it does not find {name!r}; rename it"
            )
    if shared := [name for call in plan.calls for name in call.outputs if name in _fed(call)]:
        return (
            f"{shared[0]!r} is an input and an output: the runtime returns the very memory that was fed, "
            "which onnxruntime 1.29.0 for Java frees when the input is collected; rename the output"
        )
    if other := next((one.logits_type for one in plan.calls if one.logits and one.logits_type not in LOGITS), None):
        return f"the logits are {other}, which OnnxTensor.getFloatBuffer of onnxruntime 1.29.0 does not read"
    return None


def _fed(call: CallPlan) -> set[str]:
    return {one.name for one in call.inputs} | set(call.pasts)
