"""Returns the cache in the element type in which it is taken.

Requires: a present whose declared type is a float other than that of its past.
Ensures: that present is cast to the type of the past, or the Cast that made it another type keeps it; it is declared
so.
"""

from collections.abc import Iterator

from kvdoctor.contract import describe
from kvdoctor.graph import GraphView, Scope, declared
from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import fresh, in_words, place_of, producer, return_value, returned_in

FLOATS = ("float", "float16", "bfloat16", "double")


def apply(patient: Patient) -> tuple[Change, ...]:
    """Mend the presents of the decode step, and those of the first step that fill the same slots."""
    changes: list[Change] = []
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in patient.model(patient.file_of("decode")).graph.input
        if declared(value).dtype in FLOATS
    }
    for phase, file in patient.graphs():
        for slot in patient.drivable.slots:
            output = slot.present if phase == "decode" else slot.filled_by
            view = patient.view(file)
            if output in view.outputs and slot.past in types and view.outputs[output].dtype in FLOATS:
                changes += _mended(view, file, phase == "decode", output, types[slot.past])
    return tuple(changes)


def _mended(view: GraphView, file: str, cached: bool, output: str, wanted: int) -> Iterator[Change]:
    model = view.model
    value = next(value for value in model.graph.output if value.name == output)
    graph, name = returned_in(view, output, cached)
    inner = next((value for value in graph.output if value.name == name), value)
    if inner.type.tensor_type.elem_type == wanted and value.type.tensor_type.elem_type == wanted:
        return
    old = describe(declared(inner).dtype, declared(inner).shape)
    before, place = in_words(graph, name), place_of(view, graph)
    if inner.type.tensor_type.elem_type != wanted:
        _cast(model, graph, name, wanted)
    for each in (inner, value):
        each.type.tensor_type.elem_type = wanted
    now = declared(inner)
    yield Change(
        file,
        f"{place}, output {output!r}",
        f"{before} {old}",
        f"{in_words(graph, name)} {describe(now.dtype, now.shape)}",
    )


def _cast(model: ModelProto, graph: GraphProto, name: str, wanted: int) -> None:
    """Cast a returned value; a Cast that made it what it is, is led past, so that nothing is rounded."""
    for index in reversed([index for index, known in enumerate(graph.value_info) if known.name == name]):
        del graph.value_info[index]
    source = Scope(graph, "").through(name, {"Identity"})
    maker = producer(graph, source)
    source = str(maker.input[0]) if maker is not None and maker.op_type == "Cast" else name
    made = fresh(model, f"{name}.cast")
    to = AttributeProto(name="to", type=AttributeProto.INT, i=wanted)
    return_value(model, graph, name, source)
    last = producer(graph, name)
    assert last is not None  # noqa: S101 - it was just made
    last.op_type = "Cast"
    last.name = made
    last.attribute.append(to)


REPAIR = Repair(
    name="cache-casts",
    mends=("cache-dtype-mismatch",),
    stage="slots",
    keeps="first-step",
    apply=apply,
    advice=("Cast each present to the element type of its past before you feed it.",),
)
