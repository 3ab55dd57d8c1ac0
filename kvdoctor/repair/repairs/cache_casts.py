"""Returns the cache in the element type of its past.

Requires: a present that is declared as another float type than its past.
Ensures: the present is cast to the type of the past, or the Cast that gave it another type is bypassed; it is declared
so.
"""

from collections.abc import Iterator

from kvdoctor.contract import describe
from kvdoctor.model.edit import describe_graph, describe_maker, new_name, return_value
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto
from kvdoctor.model.traverse import input_of, producer
from kvdoctor.model.view import GraphView, Scope, declared
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

FLOATS = ("float", "float16", "bfloat16", "double")


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Repair the presents of the decode step, and the outputs of the first step that fill the same slots."""
    changes: list[Change] = []
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in context.model(context.file_of("decode")).graph.input
        if declared(value).dtype in FLOATS
    }
    for phase, file in context.graphs():
        for slot in context.drivable.slots:
            output = slot.present if phase == "decode" else slot.filled_by
            view = context.view(file)
            if output in view.outputs and slot.past in types and view.outputs[output].dtype in FLOATS:
                changes += _repair_output(view, file, phase == "decode", output, types[slot.past])
    return tuple(changes)


def _repair_output(view: GraphView, file: str, cached: bool, output: str, wanted: int) -> Iterator[Change]:
    model = view.model
    value = next(value for value in model.graph.output if value.name == output)
    scope, name = view.behind(output, cached)
    graph = scope.graph
    inner = next((value for value in graph.output if value.name == name), value)
    if inner.type.tensor_type.elem_type == wanted and value.type.tensor_type.elem_type == wanted:
        return
    old = describe(declared(inner).dtype, declared(inner).shape)
    before, place = describe_maker(graph, name), describe_graph(view, graph)
    if inner.type.tensor_type.elem_type != wanted:
        _cast_output(model, graph, name, wanted)
    for each in (inner, value):
        each.type.tensor_type.elem_type = wanted
    now = declared(inner)
    yield Change(
        file,
        f"{place}, output {output!r}",
        f"{before} {old}",
        f"{describe_maker(graph, name)} {describe(now.dtype, now.shape)}",
    )


def _cast_output(model: ModelProto, graph: GraphProto, name: str, wanted: int) -> None:
    """Cast a returned value; an earlier Cast of it is bypassed, so that nothing is rounded twice."""
    for index in reversed([index for index, known in enumerate(graph.value_info) if known.name == name]):
        del graph.value_info[index]
    source = Scope(graph, "").through(name)
    maker = producer(graph, source)
    source = input_of(maker, 0) if maker is not None and has(maker.op_type, "cast") else name
    made = new_name(model, f"{name}.cast")
    to = AttributeProto(name="to", type=AttributeProto.INT, i=wanted)
    return_value(model, graph, name, source)
    last = producer(graph, name)
    assert last is not None  # noqa: S101 - it was just made
    last.op_type = "Cast"
    last.name = made
    last.attribute.append(to)


REPAIR = Repair(
    name="cache-casts",
    checks=("cache-dtype-mismatch",),
    stage="slots",
    keeps="first-step",
    apply=apply,
    advice=("Cast each present to the element type of its past before you feed it.",),
)
