"""Shapes that a graph declares and does not compute: an axis named as that of an input, and of another length.

A tool that keeps the last token before the output head leaves the names of all tokens in the shapes that the file
declares. ONNX Runtime computes shapes itself; compilers and loops that allocate outputs take them from the file.
"""

from collections.abc import Iterator, Mapping

from kvdoctor.analysis.proof.prove import find_shapes
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract, Dim
from kvdoctor.model.view import GraphView, declared
from kvdoctor.records import record

Shape = tuple[int, ...]


@record
class StaleShape:
    """A value of the main graph with the shape that it declares and the one that it has in a step; `axes` differ."""

    name: str
    dtype: str
    declared: tuple[Dim, ...]
    found: Shape
    axes: tuple[int, ...]


def find_stale_shapes(stack: StackFiles, contract: CacheContract) -> tuple[StaleShape, ...]:
    """The values that a decode step computes in other shapes than declared, by types alone; presents are left out."""
    graph, read = stack.main.graph.model.graph, {port.name for port in contract.graph("decode").inputs}
    if contract.missing or len({value.name for value in graph.input} & read) < len(read):
        return ()
    found = find_shapes(stack, contract)
    return tuple(compare_declared(stack.main.graph, contract, found, found))


def compare_declared(
    view: GraphView, contract: CacheContract, fed: Mapping[str, Shape], found: Mapping[str, Shape]
) -> Iterator[StaleShape]:
    """The values whose declared axes have the name of an input's axis, and another length than that in one call."""
    presents = {port.name for port in contract.graph("decode").outputs if port.role == "present"}
    lengths: dict[str, set[int]] = {}
    for name, port in view.inputs.items():
        for size, length in zip(port.shape or (), fed.get(name, ()), strict=False):
            if isinstance(size, str):
                lengths.setdefault(size, set()).add(length)
    known = {size: next(iter(those)) for size, those in lengths.items() if len(those) == 1}
    graph = view.model.graph
    for value in (*graph.output, *graph.value_info):
        shape, one = found.get(value.name), declared(value)
        if shape is None or one.shape is None or len(shape) != len(one.shape) or value.name in presents:
            continue
        if 0 in shape:  # an output that one branch leaves empty
            continue
        pairs = enumerate(zip(one.shape, shape, strict=True))
        axes = tuple(at for at, (size, length) in pairs if known.get(str(size), length) != length)
        if axes:
            yield StaleShape(value.name, one.dtype, one.shape, shape, axes)
