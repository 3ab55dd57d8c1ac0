"""Cuts a subgraph out of its model: a model of its own, with the constants that it reads from around it."""

from kvdoctor.model.proto import GraphProto, ModelProto
from kvdoctor.model.traverse import captures, needed_for, producers, values_read


class NotClosed(Exception):
    """A subgraph reads values that the graph around it computes from its inputs; the message names the first."""


def cut_out(model: ModelProto, body: GraphProto) -> ModelProto:
    """The model of a subgraph of the main graph. The tensors are as they are there: left out, located or whole.

    Raises:
        NotClosed: it cannot be run by itself.
    """
    main, cut = model.graph, GraphProto()
    cut.CopyFrom(body)
    wanted = needed_for(main, captures(body)) | set(captures(body))
    constants = {tensor.name for tensor in main.initializer}
    fed = sorted(wanted & ({value.name for value in main.input} - constants))
    made = producers(main)
    nodes = [node for node in main.node if wanted & set(node.output)]
    lost = sorted(name for node in nodes for name in values_read(node) if name not in made and name not in constants)
    if fed or lost:
        raise NotClosed(f"it reads {(fed or lost)[0]!r} of the graph around it")
    own = list(cut.node)
    del cut.node[:]
    cut.node.extend([*nodes, *own])
    cut.initializer.extend(tensor for tensor in main.initializer if tensor.name in wanted)
    cut.sparse_initializer.extend(one for one in main.sparse_initializer if one.values.name in wanted)
    return ModelProto(
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=cut,
    )
