"""What the rewriting of a graph rests on: all its bodies of nodes, names that are free, and small nodes."""

import struct
from collections.abc import Iterator
from typing import Any

from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.scoping import bodies as bodies_of_node
from kvdoctor.scoping import graphs

FLOAT = int(TensorProto.FLOAT)


class NoTwin(Exception):
    """What a graph rounds cannot be taken out of it."""


class Names:
    """Names of a model, and new ones that it does not have."""

    def __init__(self, model: ModelProto) -> None:
        self.taken: set[str] = set()
        for graph in graphs(model.graph):
            values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
            self.taken |= {value.name for value in values}
        for nodes in bodies(model):
            self.taken |= {name for node in nodes for name in (node.name, *node.input, *node.output)}

    def fresh(self, stem: str) -> str:
        """A name that begins like another one."""
        name, number = f"{stem}_unrounded", 1
        while name in self.taken:
            number += 1
            name = f"{stem}_unrounded_{number}"
        self.taken.add(name)
        return name


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node holds, and all below them."""
    for body in bodies_of_node(node):
        yield from graphs(body)


def bodies(model: ModelProto) -> Iterator[Any]:
    """All lists of nodes, those of subgraphs and of functions included."""
    for graph in graphs(model.graph):
        yield graph.node
    for function in model.functions:
        yield function.node
        for node in function.node:
            for graph in subgraphs(node):
                yield graph.node


def scalar(name: str, kind: int, value: float) -> NodeProto:
    """A Constant of one number, float32 or of an integer type."""
    tensor = TensorProto(data_type=kind)
    if kind == FLOAT:
        tensor.raw_data = struct.pack("<f", value)
    else:
        tensor.int32_data.append(int(value))
    attribute = AttributeProto(name="value", type=AttributeProto.TENSOR, t=tensor)
    return NodeProto(op_type="Constant", output=[name], attribute=[attribute])


def cast(source: str, target: str) -> NodeProto:
    """A Cast to float32."""
    attribute = AttributeProto(name="to", type=AttributeProto.INT, i=FLOAT)
    return NodeProto(op_type="Cast", input=[source], output=[target], attribute=[attribute])
