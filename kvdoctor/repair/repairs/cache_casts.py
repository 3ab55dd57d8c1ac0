"""Returns the cache in the element type of its past.

Requires: a present that is declared as another float type than its past.
Ensures: the present is cast to the type of the past, or the Cast that gave it another type is bypassed; it is declared
so.
"""

from collections.abc import Iterator

from kvdoctor.model.edit import describe_graph, describe_maker, new_name, return_value
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto
from kvdoctor.model.traverse import input_of, producer
from kvdoctor.model.view import GraphView, Scope, declared
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared, forget_declaration

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
    inner = find_declared(graph.output, name) or value
    types = inner.type.tensor_type, value.type.tensor_type
    if all(one.elem_type == wanted for one in types):
        return
    before, place = f"{describe_maker(graph, name)} {describe_type(inner)}", describe_graph(view, graph)
    if types[0].elem_type != wanted:
        _cast_output(model, graph, name, wanted)
    for one in types:
        one.elem_type = wanted
    after = f"{describe_maker(graph, name)} {describe_type(inner)}"
    yield Change(file, f"{place}, output {output!r}", before, after)


def _cast_output(model: ModelProto, graph: GraphProto, name: str, wanted: int) -> None:
    """Cast a returned value; an earlier Cast of it is bypassed, so that nothing is rounded twice."""
    forget_declaration(graph, name)
    source = Scope(graph, "").through(name)
    maker = producer(graph, source)
    source = input_of(maker, 0) if maker is not None and has(maker.op_type, "cast") else name
    made = new_name(model, f"{name}.cast")
    return_value(model, graph, name, source)
    last = producer(graph, name)
    assert last is not None  # noqa: S101 - it was just made
    last.op_type, last.name = "Cast", made
    last.attribute.add(name="to", type=AttributeProto.INT, i=wanted)


ADVICE = ("Cast each present to the element type of its past before you feed it.",)
REPAIR = Repair("cache-casts", ("cache-dtype-mismatch",), "slots", "first-step", apply, ADVICE)
