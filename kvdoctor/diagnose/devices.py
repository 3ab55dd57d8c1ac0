"""What devices and their execution providers are documented to refuse of a graph, from the table `devices.json`.

Nothing here was measured: each entry quotes a document or an issue of its project. So an entry is a fact for
`inspect`, and never a finding.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import CacheContract
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, constant_tensor, name_node
from kvdoctor.model.view import Declared, GraphView, declared
from kvdoctor.records import record
from kvdoctor.report.facts import DeviceLimit

When = Literal[
    "empty-past",
    "dynamic-axes",
    "if",
    "branch-shapes",
    "int64",
    "float64",
    "attention-past",
    "growing-gqa",
    "operators",
]
"""What a limit is about; `_FOUND` has the question to the graph for each."""
NOT_ASKED = {"Constant", "If", "Loop", "Scan"}
"""Operators that lists of kernels leave out: constants are folded, and control flow has limits of its own."""


@record
class DocumentedLimit:
    """An entry of the table. `supported` or `unsupported` is the list of operators that it is about, if any."""

    device: str
    when: When
    effect: Literal["fails", "left-out"]
    words: str
    as_of: str
    sources: tuple[str, ...]
    supported: frozenset[str] = frozenset()
    unsupported: frozenset[str] = frozenset()


@record
class _Stack:
    """The graphs that decode, and their contract."""

    contract: CacheContract
    views: tuple[GraphView, ...]


@cache
def list_limits() -> tuple[DocumentedLimit, ...]:
    """All entries."""
    table = json.loads(files("kvdoctor.diagnose").joinpath("devices.json").read_text(encoding="utf-8"))
    return tuple(
        DocumentedLimit(
            device=entry["device"],
            when=limit["when"],
            effect=limit["effect"],
            words=limit["words"],
            as_of=limit["as_of"],
            sources=tuple(limit["sources"]),
            supported=frozenset(limit.get("supported", "").split()),
            unsupported=frozenset(limit.get("unsupported", "").split()),
        )
        for entry in table
        for limit in entry["limits"]
    )


def find_limits(contract: CacheContract, members: Iterable[OnnxFile]) -> tuple[DeviceLimit, ...]:
    """The documented limits that the graphs of a stack touch, each with what in the graph does so."""
    graphs = {name for graph in contract.graphs.values() for name in graph.files}
    views = tuple(file.view for file in members if file.view is not None and file.name in graphs)
    stack = _Stack(contract, views)
    found = []
    for limit in list_limits():
        subject = tuple(dict.fromkeys(_FOUND[limit.when](stack, limit)))
        if subject:
            found.append(
                DeviceLimit(limit.device, limit.when, limit.effect, limit.words, subject, limit.as_of, limit.sources)
            )
    return tuple(found)


def _empty_past(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    """Past inputs that the first step feeds without elements."""
    inputs = {name for view in stack.views for name in view.inputs}
    for slot in stack.contract.slots:
        if slot.first in ("empty", "ignored") and slot.past in inputs:
            yield slot.past


def _dynamic_axes(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    """Inputs with an axis that is no number."""
    for port in _ports(stack):
        if port.shape is None or any(not isinstance(dim, int) for dim in port.shape):
            yield port.name


def _if(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    for node in _nodes(stack):
        if node.op_type == "If" and node.domain in STANDARD:
            yield node.name or "If"


def _branch_shapes(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    """Outputs of an If whose branches declare other sizes, or of which one is a constant without elements."""
    for view in stack.views:
        for scope in view.scopes():
            for node in scope.graph.node:
                if node.op_type != "If" or node.domain not in STANDARD:
                    continue
                bodies = [attribute.g for attribute in node.attribute if attribute.name.endswith("_branch")]
                for output, *values in zip(node.output, *(body.output for body in bodies), strict=False):
                    if len(values) == 2 and not _compatible(*(declared(value) for value in values)):
                        yield output
        yield from (name for name in view.outputs if view.emptied(name) is not None)


def _compatible(one: Declared, other: Declared) -> bool:
    """Whether two declared shapes have the same rank and no size that contradicts; an unknown shape may."""
    if one.shape is None or other.shape is None:
        return True
    pairs = zip(one.shape, other.shape, strict=False)
    same = all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
    return same and len(one.shape) == len(other.shape)


def _of_type(dtype: str) -> Callable[[_Stack, DocumentedLimit], Iterator[str]]:
    """A question for ports, initializers and constants of an element type."""

    def find(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
        yield from (port.name for port in _ports(stack) if port.dtype == dtype)
        if dtype == "int64":
            return  # shapes and axes are int64 in every graph; they are read on the CPU
        number = {"double": 11}[dtype]
        for view in stack.views:
            for scope in view.scopes():
                yield from (tensor.name for tensor in scope.graph.initializer if tensor.data_type == number)
        for node in _nodes(stack):
            tensor = constant_tensor(node) if node.op_type == "Constant" else None
            casts = node.op_type == "Cast" and any(a.name == "to" and a.i == number for a in node.attribute)
            if casts or (tensor is not None and tensor.data_type == number):
                yield name_node(node)

    return find


def _attention_past(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    """Attention of the standard domain with past_key (its input 4) or presents (outputs 1 and 2)."""
    for node in _nodes(stack):
        if node.op_type == "Attention" and node.domain in STANDARD and (any(node.input[4:6]) or any(node.output[1:3])):
            yield node.name or "Attention"


def _growing_gqa(stack: _Stack, _limit: DocumentedLimit) -> Iterator[str]:
    """GroupQueryAttention where the cache of the contract grows."""
    if any(slot.growth in ("grow", "shared") for slot in stack.contract.slots):
        yield from (node.name or node.op_type for node in _nodes(stack) if node.op_type == "GroupQueryAttention")


def _operators(stack: _Stack, limit: DocumentedLimit) -> Iterator[str]:
    """Operators that a device's list lacks, or names as not supported."""
    own = {(function.domain, function.name) for view in stack.views for function in view.model.functions}
    names = {
        node.op_type if node.domain in STANDARD else f"{node.domain}.{node.op_type}"
        for node in _nodes(stack)
        if node.op_type not in NOT_ASKED and (node.domain, node.op_type) not in own
    }
    yield from sorted(names - limit.supported if limit.supported else names & limit.unsupported)


def _ports(stack: _Stack) -> Iterator[Declared]:
    for view in stack.views:
        yield from view.inputs.values()


def _nodes(stack: _Stack) -> Iterator[NodeProto]:
    """Every node at any depth, and those of functions."""
    for view in stack.views:
        for scope in view.scopes():
            yield from scope.graph.node
        for function in view.model.functions:
            yield from function.node


_FOUND: dict[When, Callable[[_Stack, DocumentedLimit], Iterator[str]]] = {
    "empty-past": _empty_past,
    "dynamic-axes": _dynamic_axes,
    "if": _if,
    "branch-shapes": _branch_shapes,
    "int64": _of_type("int64"),
    "float64": _of_type("double"),
    "attention-past": _attention_past,
    "growing-gqa": _growing_gqa,
    "operators": _operators,
}
"""The question to the graph behind each kind of limit: the names of what touches it."""
assert set(_FOUND) == set(get_args(When))  # noqa: S101 - one question for each kind
