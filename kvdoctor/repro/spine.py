"""The spine of a decoder: the values that everything from the tokens to an end passes through, in order.

Residual streams make every layer begin and end in one such value, whatever the layer does between. Led past a piece of
the spine, a model has fewer layers and still takes what it took.
"""

from collections.abc import Iterable

from kvdoctor.onnx_schema import GraphProto
from kvdoctor.scoping import needed_for, producers, taken

SIZES_ONLY = {"Shape", "Size"}
"""Operators that take nothing of a value but its sizes."""


def spine(graph: GraphProto, sources: set[str], end: str) -> list[str]:
    """Values on every way from the sources (token ids or embeddings) to `end`, both included where they are one."""
    made = producers(graph)
    order = _in_order(graph, end)
    behind: dict[str, str | None] = {}
    depth: dict[str, int] = {}
    for name in order:
        before: list[str]
        if name in sources:
            behind[name], depth[name] = None, 0
            continue
        node = made.get(name)
        if node is None or node.op_type in SIZES_ONLY:
            continue
        before = [value for value in taken(node) if value in depth]
        if before:
            nearest = before[0]
            for value in before[1:]:
                nearest = _meet(nearest, value, behind, depth)
                if nearest == "":
                    break
            behind[name], depth[name] = nearest or None, (depth[nearest] + 1 if nearest else 0)
    chain, at = [], end if end in depth else None
    while at is not None:
        chain.append(at)
        at = behind[at]
    return chain[::-1]


def reached(graph: GraphProto, sources: set[str]) -> set[str]:
    """The sources, and the values of a graph that are made of them, sizes not counted: what its branches may take."""
    found = set(sources)
    for node in graph.node:
        if node.op_type not in SIZES_ONLY and not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def last_on(graph: GraphProto, chain: list[str], end: str) -> int | None:
    """The index of the last value of a spine that `end` hangs on, itself left out; None where there is none."""
    needed = needed_for(graph, [end]) - {end}
    found = [index for index, name in enumerate(chain) if name in needed]
    return found[-1] if found else None


def _meet(one: str, other: str, behind: dict[str, str | None], depth: dict[str, int]) -> str:
    """The nearest value that both hang on; empty where they come from sources of their own."""
    while one != other:
        if depth[one] < depth[other]:
            one, other = other, one
        step = behind[one]
        if step is None:
            return ""
        one = step
    return one


def _in_order(graph: GraphProto, end: str) -> Iterable[str]:
    """The values that `end` hangs on, each after those it needs."""
    made, done, ordered = producers(graph), set(), []
    stack = [(end, False)]
    while stack:
        name, ready = stack.pop()
        if ready:
            ordered.append(name)
            continue
        if name in done:
            continue
        done.add(name)
        stack.append((name, True))
        if name in made:
            stack += [(value, False) for value in sorted(taken(made[name])) if value not in done]
    return ordered
