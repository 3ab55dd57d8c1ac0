"""Constants that a graph selects by the number of tokens, of which the first layer's keys are made.

A model of two sets of rotary factors (LongRoPE) compares the total length with `original_max_position_embeddings` and
rotates all keys by the short or by the long set: with a Where, or with an If that returns tables of cosines and sines.
Keys in the cache that were rotated by the other set are not those that a call without a cache computes. A selection by
the position of each token is none of these: that of a key does not change.
"""

from collections.abc import Iterator
from itertools import islice

from kvdoctor.analysis.thresholds import COUNTS, FixedNumbers, whole_numbers
from kvdoctor.contract import Graph
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operators_with
from kvdoctor.records import record

MOST_NODES = 2_000
"""Nodes before the first layer's keys that are looked at, at most."""
NEAR = 32
"""Nodes between a length and the selection, at most."""
ONE_NUMBER = frozenset(COUNTS) - {"position_ids", "cache_position"}
"""Roles of inputs with a number for the whole call."""
KEEPS = operators_with("arithmetic", "copy", "cast", "view", "pick", "repeat", "logic", "clamp")


@record
class SelectedConstants:
    """A selection between constants: the number that the length is compared with, and the node that selects."""

    length: int
    node: str


def find_selected_constants(flow: Flow, graph: Graph, key: str) -> SelectedConstants | None:
    """The first such selection before the output `key`, the present of the first layer's keys."""
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
            return SelectedConstants(lengths.pop(), f'{kind} "{node.proto.name}"' if node.proto.name else kind)
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
