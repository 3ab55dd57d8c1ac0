"""Is a wrong cache stored wrong, or read wrong? Decided in the graph, where a past and the new entries come together.

The attention uses new entries directly, and old ones by way of the cache. Where the values that are stored are not
those that it uses, and nothing changes them on their way back, they are stored wrong; where they are the same, and
something changes old ones on their way to the attention, they are read wrong.
"""

from collections import deque
from collections.abc import Container, Iterable
from typing import Literal

from kvdoctor.diagnose.locate.match_values import FlatFile
from kvdoctor.diagnose.locate.runnable import RunnableNode
from kvdoctor.model.operators import operator_of, operators_with
from kvdoctor.records import record

Side = Literal["new-entries-wrong", "cache-misread"]
COPIES = operators_with("copy", "cast")
VIEWS = COPIES | operators_with("view", "permute", "repeat")
MEETS = operators_with("product", "attend")
"""Operators in which a past and new tokens meet that are no entries."""


def find_wrong_side(graph: FlatFile, value: str, packed: Container[str]) -> tuple[Side, str] | None:
    """The check whose fault it is that a value is the first that differs, and why; None where the graph does not tell.

    `graph` is that of a decode step, `value` what its attention reads: old and new entries together. `packed` are the
    pasts that hold several parts, each of which is taken out first.
    """
    for past, present in graph.slots.items():
        cached = graph.flat.depending_on({past})
        for views in (COPIES, VIEWS) if value in cached else ():
            # Views of the one side alone are at fault; those of both may undo each other.
            if (
                found := _SlotWay(graph, past, cached, views, past in packed).find_wrong_side(value, present)
            ) is not None:
                return found
    return None


def change_entries(graph: FlatFile, values: Iterable[str]) -> bool:
    """Whether some values act on entries of a cache, old and new ones, on their way to the attention."""
    entries, acting = set(graph.slots), set(values)
    for node in graph.flat.nodes:
        if node.op not in MEETS and not node.has("measure") and not entries.isdisjoint(node.reads):
            if not acting.isdisjoint(node.reads):
                return True
            entries.update(node.makes)
    return False


@record(slots=False)
class _SlotWay:
    """The way of one slot: `cached` depend on its past, `views` change nothing, `packed` pasts hold several parts."""

    graph: FlatFile
    past: str
    cached: set[str]
    views: frozenset[str]
    packed: bool

    def find_wrong_side(self, value: str, present: str) -> tuple[Side, str] | None:
        """The check and the reason, where one side alone changes entries."""
        used = next(iter(self.find_joins(value)), None)
        stored = self.find_stored(used, present) if used is not None else None
        if used is None or stored is None:
            return None
        known = {(node.op, node.inputs) for node in self.list_changes(stored)}
        read = [node for node in self.list_changes(used) if (node.op, node.inputs) not in known]
        same = self.new(used) == self.new(stored)
        if used is stored and self.views is VIEWS:
            # What is changed before it is read and stored again.
            read = [node for node in self.list_changes(used) if not (self.packed and node.has("pick"))]
        if same and read:
            node = read[0].in_file.shown
            return "cache-misread", f"{self.past} is changed before it is used, first by {node}"
        if same and any(node.has("select") for node in self.graph.flat.before([present], stored.makes)):
            return (
                "new-entries-wrong",
                f"{self.graph.flat.label(present)} is chosen after the attention used its entries",
            )
        if same or read:
            return None
        names = " and ".join(sorted(map(self.graph.flat.label, self.new(stored))))
        return (
            "new-entries-wrong",
            f"the attention reads {self.past} as it is, and uses other new entries than are stored ({names})",
        )

    def find_joins(self, value: str) -> list[RunnableNode]:
        """The nearest nodes, from a value back, in which entries of the past and new ones come together."""
        waiting, seen, found = deque([value]), {value}, []
        while waiting:
            node = self.graph.flat.producers.get(waiting.popleft())
            if node is None:
                continue
            if node.op not in MEETS and self._old(node) and self.new(node):
                found.append(node)
                continue
            fresh = [name for name in node.reads if name in self.cached and name not in seen]
            seen.update(fresh)
            waiting += fresh
        return found

    def find_stored(self, used: RunnableNode, present: str) -> RunnableNode | None:
        """Where the entries that are returned come together; of keys and values in one slot those that are `used`."""
        joins, part = self.find_joins(present), self._sources(self._old(used))
        return next((one for one in joins if self._sources(self._old(one)) == part), next(iter(joins), None))

    def new(self, node: RunnableNode) -> set[str]:
        """The values that a node adds to the past, before casts and views."""
        return self._sources(name for name in _content(node) if name in self.graph.new)

    def list_changes(self, join: RunnableNode) -> list[RunnableNode]:
        """The nodes between the past and its join that do more than view it, or multiply it with its scale."""
        nodes = self.graph.flat.before(self._old(join))
        return [node for node in nodes if not self.cached.isdisjoint(node.makes) and not self._restores(node)]

    def _old(self, node: RunnableNode) -> list[str]:
        """The inputs of a node with entries of the past alone."""
        return [name for name in _content(node) if name in self.cached and name not in self.graph.new]

    def _sources(self, names: Iterable[str]) -> set[str]:
        return {self._source(name) for name in names}

    def _source(self, name: str) -> str:
        node = self.graph.flat.producers.get(name)
        return self._source(node.input(0)) if node is not None and node.op in self.views else name

    def _restores(self, node: RunnableNode) -> bool:
        """Whether a node is a view, or multiplies quantized entries with their scale, which is a slot of its own."""
        if node.has("multiply"):
            return self._sources(node.inputs) <= self.graph.slots.keys()
        return node.op in self.views or node.has("dequantize")


def _content(node: RunnableNode) -> list[str]:
    return [name for index, name in enumerate(node.inputs) if name and operator_of(node.op).takes_content(index)]
