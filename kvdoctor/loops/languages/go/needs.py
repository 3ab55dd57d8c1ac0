"""What a plan needs of the binding onnxruntime_go: which parts of the templates are written.

The binding allocates outputs by itself, with four limits that this module is about (v1.27.0). It reads an output of
float16 as half as many bytes as it has and then fails; it has no empty shape for a tensor, only `Scalar`; a session has
one list of outputs for all runs; and names are C strings.
"""

from itertools import chain

from kvdoctor.loops.languages.go.expressions import AXES, LOCALS, element, go_type, has, literal, shape, used
from kvdoctor.loops.plan import FLOATS, CallPlan, Dim, Input, LoopPlan, SlotPlan

WIDTHS = {"float": 4, "float16": 2, "int64": 8, "int32": 4}
"""Bytes of an element; others have one."""

READS = {
    "float": "finite(math.Float32frombits(binary.NativeEndian.Uint32(data[4*at:])))",
    "float16": "finite(fromHalf(binary.NativeEndian.Uint16(data[2*at:])))",
    "int64": "int64(binary.NativeEndian.Uint64(data[8*at:]))",
    "int32": "int32(binary.NativeEndian.Uint32(data[4*at:]))",
    "int8": "int8(data[at])",
    "uint8": "data[at]",
    "bool": "data[at] != 0",
}
"""How the program reads an element of a tensor of bytes."""

CARRIES = {"append": "appended", "write": "written", "shift": "shifted", "drop-oldest": "dropOldest"}


def refuses(plan: LoopPlan) -> str | None:
    """Why there is no loop in Go, or None."""
    names = chain(plan.files, *((*c.outputs, *(i.name for i in c.inputs), *c.pasts) for c in plan.calls))
    if any("\0" in name for name in names):
        return "a name holds a NUL character, at which onnxruntime_go (v1.27.0) ends a name"
    odd = {call.logits_type for call in (plan.prefill, plan.decode)} - set(FLOATS)
    if odd:
        return f"the logits are of type {odd.pop()}, which onnxruntime_go (v1.27.0) has no Go type for"
    alone = [one.dtype for one in plan.inputs if not one.dims] + list(scalars(plan))
    if "float16" in alone:
        return "a float16 without axes cannot be made with onnxruntime_go (v1.27.0)"
    if plan.source is not None and plan.source.dtype == "bool":
        return "the encoder's input is of booleans, which the program has no option for"
    unknown = [slot.past for slot in plan.slots if _needs_room(slot, plan) and not _is_known(slot)]
    unknown += [str(call.logits) for call in _calls_with_room(plan) if not _has_known_logits(call)]
    unknown += [name for name, dims in _halves_of_encoder(plan) if not _encoder_shape(dims, plan)]
    unknown += [str(one.made) for one in _halves_of_embedding(plan) if not _is_counted(one.dims)]
    if unknown:
        reason = "one file is asked for other outputs in its first call" if bound(plan) else "it is float16"
        return f"onnxruntime_go (v1.27.0) must know the size of the output for {unknown[0]!r} before the call: {reason}"
    return None


def inputs(call: CallPlan) -> tuple[str, ...]:
    """The names of all that a call is fed."""
    return (*(one.name for one in call.inputs), *call.pasts)


def axes(plan: LoopPlan) -> list[str]:
    """The constants that stand for sizes of the cache."""
    return [constant for axis, constant in AXES.items() if axis in plan.axes]


def sizes(plan: LoopPlan, batch: str, past: str | int, encoder: str | int) -> str:
    """The entries of a map from these constants to sizes."""
    known = {
        "batch": batch,
        "batch_heads": f"{batch} * heads" if plan.heads > 1 else batch,
        "past": past,
        "encoder": encoder,
        "capacity": "d.capacity",
    }
    return ", ".join(f"{constant}: {known[axis]}" for axis, constant in AXES.items() if axis in plan.axes)


def carry(slot: SlotPlan) -> str:
    """The constant for what becomes of a present."""
    return CARRIES[slot.carry] if slot.copies else "feedBack"


def scalars(plan: LoopPlan) -> list[str]:
    """The element types of what the cache holds without axes."""
    return sorted({slot.dtype for slot in plan.slots if not slot.dims})


def scalar_types(plan: LoopPlan) -> list[str]:
    """The types in Go of all tensors without axes."""
    return sorted({go_type(one.dtype) for one in plan.inputs if not one.dims} | set(map(go_type, scalars(plan))))


def bound(plan: LoopPlan) -> bool:
    """Whether a session returns other outputs in its first run: then an `IoBinding` names them."""
    return plan.prefill.file == plan.decode.file and not plan.same_outputs


def slot_room(plan: LoopPlan) -> str:
    """The condition under which the loop allocates what a call returns of a slot; empty where it never does."""
    conditions = ["d.length == 0"] * bound(plan)
    conditions += [f"slot.dtype == {element('float16')}"] * any(slot.dtype == "float16" for slot in plan.slots)
    conditions += ["len(slot.shape) == 0"] * bool(scalars(plan))
    return " || ".join(conditions)


def logits_room(plan: LoopPlan) -> list[tuple[str, str, str, str]]:
    """Where the loop allocates logits: a condition, the output, its element type and its shape."""
    known = {"batch": "batch", "new": "count"}
    rooms = []
    for call in _calls_with_room(plan):
        shape = ", ".join(str(dim) if isinstance(dim, int) else known[dim] for dim in call.logits_dims)
        rooms.append((str(call.logits), call.logits_type, f"[]int64{{{shape}}}", call is plan.prefill))
    if len(rooms) == 2 and rooms[0][:3] == rooms[1][:3]:
        return [("", *rooms[0][:3])]
    return [("d.length == 0" if first else "d.length > 0", *room) for *room, first in rooms]  # type: ignore[misc]


def reserved(plan: LoopPlan) -> bool:
    """Whether the loop allocates some output itself."""
    return bool(slot_room(plan) or logits_room(plan))


def reserved_first(plan: LoopPlan) -> bool:
    """Whether the loop allocates outputs of first calls alone."""
    conditions = {slot_room(plan), *(condition for condition, *_ in logits_room(plan))}
    return conditions == {"d.length == 0"}


def reserved_words(plan: LoopPlan) -> str:
    """The same for a comment."""
    words = ["those of a first call that returns others than later calls"] * bound(plan)
    words += ["float16, of which it reads half"] * any(slot.dtype == "float16" for slot in plan.slots)
    words += ["float16 logits"] * any(call.logits_type == "float16" for call in (plan.prefill, plan.decode))
    words += ["tensors without axes"] * bool(scalars(plan))
    return "; ".join(words)


def encoder_room(plan: LoopPlan) -> list[str]:
    """The statements that allocate what an encoder returns as float16."""
    return [
        f"call.reserve({literal(name)}, {element('float16')}, {_encoder_shape(dims, plan)})"
        for name, dims in _halves_of_encoder(plan)
    ]


def encoder_reads(plan: LoopPlan, name: str) -> bool:
    """Whether the function that runs the encoder reads a local variable."""
    made = [one for one in plan.encode.inputs if one.rule != "encoder-input"] if plan.encode else []
    return has(made, name) or any(name in line.split("[]int64", 1)[-1] for line in encoder_room(plan))


def embed_room(plan: LoopPlan) -> list[str]:
    """The statements that allocate what an embedding graph returns as float16."""
    return [
        f"call.reserve({literal(one.made)}, {element('float16')}, {shape(one.dims)})"
        for one in _halves_of_embedding(plan)
    ]


def embed_reads(plan: LoopPlan, name: str) -> bool:
    """Whether the function that runs the embedding graph reads a local variable."""
    sized = {LOCALS[dim] for one in _halves_of_embedding(plan) for dim in one.dims if isinstance(dim, str)}
    return name in sized or (plan.embed is not None and used(plan.embed, name, plan.pads))


def uses(plan: LoopPlan, name: str) -> bool:
    """Whether some input is made with a function."""
    source = [plan.source] if plan.source is not None else []
    made = [one for one in plan.inputs if one.rule not in ("encoder-input", "encoder-states", "embeddings")]
    return has([*made, *source], name, plan.pads)


def by_length(plan: LoopPlan) -> bool:
    """Whether the loop asks for the number of encoder states."""
    asked = "encoder" in plan.decode.sizes | plan.prefill.sizes
    return asked or ("encoder" in plan.axes and reserved(plan))


def types(plan: LoopPlan) -> list[str]:
    """The types in Go of the tensors that a trace can show."""
    return sorted({go_type(one) for one in plan.dtypes if one != "float16"})


def cache_types(plan: LoopPlan) -> list[str]:
    """The types in Go of what the binding returns and the loop copies."""
    states = [one.dtype for call in (plan.prefill, plan.decode) for one in call.of_rule("encoder-states")]
    given = [plan.source.dtype] if plan.source is not None and plan.encode is None else []
    kinds = {slot.dtype for slot in plan.slots if slot.dims} | {*states, *given}
    return sorted({go_type(one) for one in kinds if one != "float16"})


def zero_types(plan: LoopPlan) -> list[str]:
    """The element types of what the loop allocates."""
    rooms = {call.logits_type for call in _calls_with_room(plan)} | {"float16"} & plan.dtypes
    return sorted(rooms | {slot.dtype for slot in plan.slots if slot.dims})


def widths(plan: LoopPlan) -> list[tuple[str, int]]:
    """The element types of the cache and of what the encoder made, with the bytes of an element."""
    return [(kind, width) for kind, width in WIDTHS.items() if kind in plan.dtypes]


def trace_widths(plan: LoopPlan) -> list[tuple[str, str]]:
    """The element types of tensors that hold bytes, each with the expression that reads one element of `data`."""
    joined = {slot.dtype for slot in plan.slots} if plan.copies or plan.cuts or plan.reorders else set()
    if plan.source is not None and plan.reorders:
        joined |= {one.dtype for call in (plan.prefill, plan.decode) for one in call.of_rule("encoder-states")}
        joined |= {plan.source.dtype} if plan.encode is None else set()
    return sorted((kind, READS[kind]) for kind in joined | {"float16"} & plan.dtypes)


def _needs_room(slot: SlotPlan, plan: LoopPlan) -> bool:
    return not slot.by_encoder and (bound(plan) or slot.dtype == "float16")


def _is_known(slot: SlotPlan) -> bool:
    return all(isinstance(dim, int) or dim in AXES for dim in slot.dims)


def _calls_with_room(plan: LoopPlan) -> list[CallPlan]:
    calls = [plan.prefill] if bound(plan) or plan.prefill.logits_type == "float16" else []
    return calls + [plan.decode] * (plan.decode.logits_type == "float16")


def _has_known_logits(call: CallPlan) -> bool:
    return bool(call.logits_dims) and _is_counted(call.logits_dims)


def _is_counted(dims: tuple[Dim, ...]) -> bool:
    return all(isinstance(dim, int) or dim in ("batch", "new") for dim in dims)


def _halves_of_embedding(plan: LoopPlan) -> list[Input]:
    """The inputs of float16 that an embedding graph makes, each output once."""
    taken = [one for call in (plan.prefill, plan.decode) for one in call.of_rule("embeddings")]
    return list({one.made: one for one in taken if one.dtype == "float16"}.values())


def _halves_of_encoder(plan: LoopPlan) -> list[tuple[str, tuple[Dim, ...]]]:
    """What an encoder returns as float16, with its shape."""
    if plan.encode is None:
        return []
    halves = [(str(slot.made), slot.dims) for slot in plan.slots if slot.by_encoder and slot.dtype == "float16"]
    states = [one for call in (plan.prefill, plan.decode) for one in call.of_rule("encoder-states")]
    if plan.encode.states and any(one.dtype == "float16" for one in states):
        halves.append((plan.encode.states, plan.encode.states_dims))
    return halves


def _encoder_shape(dims: tuple[Dim, ...], plan: LoopPlan) -> str | None:
    """The shape of what an encoder returns; as many states as tokens, unless it shortens its input."""
    keeps = plan.source is not None and plan.source.dtype in ("int64", "int32")
    known = {"batch": "batch", **({"encoder": LOCALS["encoder_input"]} if keeps else {})}
    if not dims or any(not isinstance(dim, int) and dim not in known for dim in dims):
        return None
    return "[]int64{" + ", ".join(str(dim) if isinstance(dim, int) else known[dim] for dim in dims) + "}"
