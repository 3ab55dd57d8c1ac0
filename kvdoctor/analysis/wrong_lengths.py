"""Lengths in a graph that are wrong: counts of padding, declared shapes, constants selected by the number of tokens.

A count of padding may see the columns of the new tokens alone. Positions are made inside: the number of a token less
the padding before it. Where the mask is cut to the new tokens first, and counted along afterwards, the prefill is
right, and each later step is as many positions too far.

A tool that keeps the last token before the output head leaves the names of all tokens in the shapes that the file
declares. ONNX Runtime computes shapes itself; compilers and loops that allocate outputs take them from the file.
"""

from collections.abc import Iterator, Mapping
from itertools import islice

from kvdoctor.analysis.proof.prove import find_shapes
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.analysis.thresholds import COUNTS, FixedNumbers, Threshold, whole_numbers
from kvdoctor.contract import CacheContract, Dim, Graph
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import find_attribute, input_of, output_of, readers
from kvdoctor.model.view import GraphView, Scope, declared, integers
from kvdoctor.records import record

MOST_BETWEEN = 8
"""Nodes between a mask and a count along it that are followed."""


@record(slots=False)
class SlicedCount:
    """A node that counts along a mask which was cut before; `between` stand after the cut, the last one first."""

    scope: Scope
    count: NodeProto
    cut: NodeProto
    between: tuple[NodeProto, ...]


def find_sliced_counts(view: GraphView, mask: str) -> Iterator[SlicedCount]:
    """The counts of padding along a mask [batch, total] that was cut along the same axis, and that are subtracted."""
    for scope in view.scopes():
        users = readers(scope.graph)
        for node in scope.graph.node:
            subtracted = any(has(user.op_type, "subtract") and at == 1 for user, at in users.get(output_of(node), ()))
            if has(node.op_type, "accumulate") and subtracted and not find_attribute(node, "exclusive"):
                found = _follow_back(scope, node, mask)
                yield from (found,) if found is not None else ()


def _follow_back(scope: Scope, count: NodeProto, mask: str) -> SlicedCount | None:
    """The cut between a mask and a count along it; None where there is none, or more than the mask comes in."""
    cut, between, name = None, list[NodeProto](), input_of(count, 0)
    for _ in range(MOST_BETWEEN):
        if name == mask:
            return SlicedCount(scope, count, cut, tuple(between)) if cut is not None else None
        node = scope.producers.get(name)
        if node is None:
            return None
        if node.op_type == "Slice" and cut is None:
            if _number(scope, node, 3) is None or _number(scope, node, 3) != _number(scope, count, 1):
                return None
            cut, name = node, input_of(node, 0)
            continue
        values = [each for each in node.input if scope.constant(each) is None]
        if len(values) != 1 or not has(node.op_type, "copy", "cast", "elementwise"):
            return None
        between += [node] if cut is None else []
        name = values[0]
    return None


def _number(scope: Scope, node: NodeProto, index: int) -> int | None:
    """The axis that an input says, of the two of a mask."""
    tensor = scope.constant(input_of(node, index)) if input_of(node, index) else None
    numbers = integers(tensor) if tensor is not None else None
    return numbers[0] % 2 if numbers is not None and len(numbers) == 1 else None


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


MOST_NODES = 2_000
"""Nodes before the first layer's keys that are looked at, at most."""
NEAR = 32
"""Nodes between a length and the selection, at most."""
ONE_NUMBER = frozenset(COUNTS) - {"position_ids", "cache_position"}
"""Roles of inputs with a number for the whole call."""
KEEPS = operators_with("arithmetic", "copy", "cast", "view", "pick", "repeat", "logic", "clamp")


def find_selected_constants(flow: Flow, graph: Graph, key: str) -> Threshold | None:
    """The first selection of constants by the number of tokens before the output `key`, and its length.

    The output is the present of the first layer's keys. A model of two sets of rotary factors (LongRoPE) compares the
    total length with `original_max_position_embeddings` and rotates all keys by the short or by the long set: with a
    Where, or with an If that returns tables of cosines and sines. Keys in the cache that were rotated by the other set
    are not those that a call without a cache computes. A selection by the position of each token is none of these.
    """
    numbers = FixedNumbers(flow)
    for node in islice(flow.before(flow.results.get(key, key)), MOST_NODES):
        if node.has("select"):
            conditions, chosen = {node.input(0)}, node.inputs[1:3]
        elif node.has("copy") and len(node.inputs) > 1:  # the outputs of an If, whose conditions are apart
            conditions, chosen = flow.decides, node.inputs
        else:
            continue
        if not _are_tables(flow, chosen):
            continue
        lengths = {length for one in conditions for length in _compared(flow, graph, one, numbers)}
        if len(lengths) == 1:
            kind = node.op if node.has("select") else "an If"
            return Threshold(lengths.pop(), f'{kind} "{node.proto.name}"' if node.proto.name else kind)
    return None


def _are_tables(flow: Flow, names: tuple[str, ...]) -> bool:
    """Whether all values are constants, or computed of constants alone, and differ."""
    if len(names) < 2 or not all(name in flow.constants or name in flow.fixed for name in names):
        return False
    tensors = [flow.constants.get(name) for name in names]
    contents = {(tuple(one.dims), one.raw_data, *one.float_data) for one in tensors if one is not None}
    return len(contents) > 1 or None in tensors


def _compared(flow: Flow, graph: Graph, condition: str, numbers: FixedNumbers) -> Iterator[int]:
    """The numbers with which a length of the whole call is compared, for a condition."""
    for node in islice(flow.before(condition), NEAR):
        if node.has("compare"):
            for one, other in (node.inputs[:2], node.inputs[1::-1]):
                found = whole_numbers(flow.constant(one)) or numbers.of(one)
                if len(found) == 1 and _is_one_number(flow, graph, other):
                    yield found[0]


def _is_one_number(flow: Flow, graph: Graph, name: str) -> bool:
    """Whether a value is a length of the whole call, and not a position of each token."""
    numbers = {port.name for port in graph.inputs if port.role in ONE_NUMBER}
    waiting = [name]
    for value in islice(waiting, NEAR):
        node = flow.producers.get(value)
        if value in numbers or (node is not None and node.has("measure", "reduce")):
            return True
        if node is not None and node.op in KEEPS:
            waiting += [one for one in node.inputs if one and one not in waiting]
    return False
