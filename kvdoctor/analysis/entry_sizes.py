"""The widths of new entries, where a cache declares none: as the operators and weights that make them show."""

from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.contract import Dim
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.view import integers

FIRST_INPUT = {"Identity", "Cast", "Add", "Sub", "Mul", "Div", "Neg", "RotaryEmbedding", "LayerNormalization"}
"""Operators whose output has the sizes of their first input, if that has as many axes."""

MOST_NODES_BACK = 12

Sizes = tuple[int | None, ...]


def find_entry_sizes(dataflow: Dataflow, past: str, shape: tuple[Dim, ...]) -> Sizes:
    """The sizes of the entries that are concatenated to a past, by the axes of the past; None for what is not known."""
    rank = len(shape)
    found = dataflow.find_joined(past, rank)
    if found is None:
        return (None,) * rank
    value, axes = found
    sizes = dict(zip(axes, _sizes_of(dataflow.flow, value, len(axes), MOST_NODES_BACK), strict=True))
    return tuple(sizes.get(axis) for axis in range(rank))


def _sizes_of(flow: Flow, value: str, rank: int, left: int) -> Sizes:
    """The sizes of a value of that rank."""
    tensor, node = flow.constants.get(value), flow.producers.get(value)
    if tensor is not None and len(tensor.dims) == rank:
        return tuple(tensor.dims)
    found: Sizes = ()
    if node is None or left == 0:
        found = ()
    elif node.op == "Transpose":
        order = node.numbers("perm") or tuple(reversed(range(rank)))
        inner = _sizes_of(flow, node.input(0), rank, left - 1)
        found = tuple(inner[axis] for axis in order) if sorted(order) == list(range(rank)) else ()
    elif node.op == "Reshape":
        found = tuple(size if size is not None and size > 0 else None for size in _listed(flow, node.input(1)))
    elif node.op == "Einsum":
        found = _sizes_by_letter(flow, node)
    elif node.op in FIRST_INPUT:
        found = _sizes_of(flow, node.input(0), rank, left - 1)
    return found if len(found) == rank else (None,) * rank


def _listed(flow: Flow, value: str) -> Sizes:
    """The numbers of a shape; None for those that depend on the feeds."""
    tensor, node = flow.constant(value), flow.producers.get(value)
    if tensor is not None:
        return tuple(integers(tensor) or ())
    if node is None or node.op != "Concat":
        return ()
    parts = (_listed(flow, name) or (None,) for name in node.inputs)
    return tuple(size for part in parts for size in part)


def _sizes_by_letter(flow: Flow, node: FlatNode) -> Sizes:
    """The sizes of the result of an Einsum, by the letters that a weight among its operands has too."""
    equation = node.attribute("equation")
    taken, _, made = equation.s.decode(errors="replace").replace(" ", "").partition("->") if equation else ("", "", "")
    sizes: dict[str, int] = {}
    for letters, name in zip(taken.split(","), node.inputs, strict=False):
        tensor = flow.constants.get(name)
        if tensor is not None and len(tensor.dims) == len(letters):
            sizes |= dict(zip(letters, tensor.dims, strict=True))
    return tuple(sizes.get(letter) for letter in made)
