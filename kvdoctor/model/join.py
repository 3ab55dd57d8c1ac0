"""Joins graphs that run one after the other into one, and cuts a subgraph out: models to be read, no files.

Inputs of the same name are one input, except those that keep a state: each stage has caches of its own.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import PurePosixPath

from kvdoctor.contract import Stage
from kvdoctor.model.edit import fresh_name, function_key, rename_all, rename_banned, replace_all
from kvdoctor.model.proto import GraphProto, ModelProto
from kvdoctor.model.traverse import captures, names_in, needed_for, producers, values_read
from kvdoctor.model.view import GraphView
from kvdoctor.records import record


class CannotJoin(Exception):
    """Two graphs cannot be read as one; the message says why."""


@record(slots=False)
class PartToJoin:
    """A graph of a chain.

    `links` has, for each input that an earlier graph makes, the number of that graph and the name of its output; `own`
    are the inputs that belong to this graph alone, also where another one has an input of the same name.
    """

    file: str
    model: ModelProto
    links: Mapping[str, tuple[int, str]]
    own: Collection[str] = ()


def join_models(parts: Sequence[PartToJoin]) -> tuple[ModelProto, tuple[Stage, ...]]:
    """Join graphs in the order in which they run; with the model, how the names of each stand for those of the whole.

    Raises:
        CannotJoin: they call different functions of the same name.
    """
    joined, known, stages = ModelProto(), set[str](), list[Stage]()
    joined.graph.name = "pipeline"
    fed: set[str] = set()
    handed = {(number, output) for part in parts for number, output in part.links.values()}
    for number, part in enumerate(parts):
        stage, model = _rename(part, known, fed, stages)
        stages.append(stage)
        known |= names_in(model)
        _add_header(joined, model)
        graph, linked = model.graph, {stage.inputs[name] for name in part.links}
        given = {tensor.name for tensor in graph.initializer}
        for value in graph.input:
            if value.name not in fed and value.name not in linked:
                joined.graph.input.append(value)
                fed |= {value.name} - given
        for value, own in zip(graph.output, stage.outputs, strict=True):
            if (number, own) not in handed:
                joined.graph.output.append(value)
        for field in ("node", "initializer", "sparse_initializer", "value_info"):
            getattr(joined.graph, field).extend(getattr(graph, field))
    return joined, tuple(stages)


def _rename(part: PartToJoin, known: set[str], fed: set[str], before: Sequence[Stage]) -> tuple[Stage, ModelProto]:
    """A copy of a graph in the names of the whole, and what its own names stand for."""
    model = deepcopy(part.model)
    graph, view = model.graph, GraphView(part.model)
    names, outputs = list(view.inputs), [value.name for value in graph.output]
    taken = known | names_in(model)
    rename_banned(graph, known - set(names), taken)
    place = PurePosixPath(part.file).stem
    links = {name: before[number].outputs[output] for name, (number, output) in part.links.items()}
    apart = {n for n in names if n in known and n not in links and (n in part.own or n not in fed)}
    renamed = links | {name: fresh_name(f"{place}/{name}", taken) for name in sorted(apart)}
    rename_all(graph, renamed)
    inputs = {name: renamed.get(name, name) for name in names}
    return Stage(part.file, inputs, dict(zip(outputs, [value.name for value in graph.output], strict=True))), model


def _add_header(joined: ModelProto, model: ModelProto) -> None:
    """Add versions and functions; of different versions the newest counts."""
    joined.ir_version = max(joined.ir_version, model.ir_version)
    joined.producer_name = joined.producer_name or model.producer_name
    joined.producer_version = joined.producer_version or model.producer_version
    known = {entry.domain: entry for entry in joined.opset_import}
    for entry in model.opset_import:
        if entry.domain in known:
            known[entry.domain].version = max(known[entry.domain].version, entry.version)
        else:
            joined.opset_import.append(entry)
    functions = {function_key(function): function for function in joined.functions}
    for function in model.functions:
        other = functions.get(function_key(function))
        if other is None:
            joined.functions.append(function)
        elif other != function:
            raise CannotJoin(f"they have different functions of the name {function.name!r}")


class NotClosed(Exception):
    """A subgraph reads values that the graph around it computes from its inputs; the message names the first."""


def cut_out(model: ModelProto, body: GraphProto) -> ModelProto:
    """The model of a subgraph of the main graph. The tensors are as they are there: left out, located or whole.

    Raises:
        NotClosed: it cannot be run by itself.
    """
    main, cut = model.graph, deepcopy(body)
    wanted = needed_for(main, captures(body)) | set(captures(body))
    constants = {tensor.name for tensor in main.initializer}
    fed = sorted(wanted & ({value.name for value in main.input} - constants))
    made = producers(main)
    nodes = [node for node in main.node if wanted & set(node.output)]
    lost = sorted(name for node in nodes for name in values_read(node) if name not in made and name not in constants)
    if fed or lost:
        raise NotClosed(f"it reads {(fed or lost)[0]!r} of the graph around it")
    replace_all(cut.node, [*nodes, *cut.node])
    cut.initializer.extend(tensor for tensor in main.initializer if tensor.name in wanted)
    cut.sparse_initializer.extend(one for one in main.sparse_initializer if one.values.name in wanted)
    return ModelProto(
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=cut,
    )
