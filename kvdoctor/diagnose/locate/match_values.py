"""Matches the values of two graphs: the one of the step with the cache, and the one of the run without it.

Where one graph serves both, every value is its own counterpart. Values of two branches or files are matched by
operator, attributes and inputs, constants by their content. Values that depend on lengths alone (masks, positions,
targets of a Reshape) may be computed differently and match anything, and so do constants where all else is equal. The
present of a slot matches on both sides. Where inputs could not be matched, a large weight that one node alone uses
matches the next node.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path

from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.records import record

ANCHORS = operators_with("product", "convolve", "embed", "normalize")
LEAST_ANCHOR = 16
SAMPLE = 512
"""Bytes read at either end of a weight: enough to tell it from others of its size."""

Key = tuple[object, ...]


@record(slots=False)
class FlatFile:
    """A flat graph with its inputs by role, and its caches.

    `content` are the inputs with token content: tokens, encoder states and pasts. `slots` gives the values that hold
    the whole cache of a slot. `feeds` is the file of a call, and `logits` the value that its logits are.
    """

    flat: RunnableGraph
    roles: Mapping[str, str]
    content: tuple[str, ...]
    slots: Mapping[str, str]
    feeds: Path
    logits: str

    @cached_property
    def token_dependent(self) -> set[str]:
        """Values that depend on the content of tokens or of the cache, not on lengths alone."""
        return self.flat.depending_on(self.content)

    @cached_property
    def new(self) -> set[str]:
        """Values that depend on the tokens of the call itself."""
        return self.flat.depending_on(set(self.content) - self.slots.keys())

    @cached_property
    def old(self) -> set[str]:
        """Values that depend on the content of the cache that was fed, and on no token of the call."""
        return self.flat.depending_on(self.slots) - self.new


def match_values(left: FlatFile, right: FlatFile) -> list[tuple[str, str]]:
    """Values of two graphs that correspond, in the order of the left one."""
    if left.flat is right.flat:
        return [(name, name) for node in left.flat.nodes for name in node.makes]
    theirs = _Numbering(right)
    mine = _Numbering(left, theirs)  # takes the keys of the other graph where only constants differ
    matched = dict[str, str]()
    for key, names in mine.values.items():
        others = theirs.values.get(key, [])
        if len(others) == len(names):
            matched |= dict(zip(names, others, strict=True))
    matched |= {name: right.slots[slot] for slot, name in left.slots.items() if slot in right.slots}
    return [(name, matched[name]) for node in left.flat.nodes for name in node.makes if name in matched]


class _Numbering:
    """Keys of all values of a graph, made from the part of their computation that depends on tokens."""

    def __init__(self, graph: FlatFile, other: "_Numbering | None" = None) -> None:
        self.graph, self.other = graph, other
        self.keys: dict[str, Key] = {name: ("input", role) for name, role in graph.roles.items()}
        self.values: dict[Key, list[str]] = {}
        self.anchors: dict[Key, list[Key]] = {}
        self.alike: dict[Key, list[Key]] = {}
        self.used = Counter(name for node in graph.flat.nodes for name in set(node.reads))
        behind = {name: slot for slot, name in graph.slots.items()}
        for name, tensor in graph.flat.constants.items():
            self.keys[name] = ("constant", content(tensor, graph.flat.source))
        for name, slot in behind.items():
            self.keys[name] = ("slot", slot)
        for node in graph.flat.nodes:
            self._number(node, behind)

    def _number(self, node: RunnableNode, behind: Mapping[str, str]) -> None:
        inputs = tuple(self._key(name) for name in node.inputs)
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.copy.attribute))
        key: Key = (node.domain, node.op, _digest(attributes, inputs))
        said = tuple(("open",) if key[0] == "constant" else key for key in inputs)
        loose: Key = (node.domain, node.op, _digest(attributes, said))
        anchor = self._anchor(node)
        if self.other is not None and key not in self.other.firsts:
            for known, mine in ((self.other.alike, loose), (self.other.anchors, anchor)):
                if mine is not None and len(known.get(mine, ())) == 1:
                    key = known[mine][0]
                    break
        self.alike.setdefault(loose, []).append(key)
        if anchor is not None:
            self.anchors.setdefault(anchor, []).append(key)
        for index, name in enumerate(node.outputs):
            if name:
                mine = (*key, index)
                self.values.setdefault(mine, []).append(name)
                if name not in behind:
                    self.keys[name] = mine

    @cached_property
    def firsts(self) -> set[Key]:
        """The keys of nodes."""
        return {key[:-1] for key in self.values}

    def _key(self, name: str) -> Key:
        if not name:
            return ("none",)
        if name in self.graph.token_dependent or name in self.graph.flat.constants or name in self.graph.roles:
            return self.keys.get(name, ("unknown", name))
        return ("open",)

    def _anchor(self, node: RunnableNode) -> Key | None:
        """A large weight that no other node of the graph uses."""
        for name in node.inputs if node.op in ANCHORS else ():
            tensor = self.graph.flat.constants.get(name)
            if tensor is not None and prod(tensor.dims) >= LEAST_ANCHOR and self.used[name] == 1:
                return (node.op, *self.keys[name])
        return None


def content(tensor: TensorProto, source: Path) -> str:
    """A constant by its type, its sizes and its bytes, of a large one those at either end."""
    if (reference := read_reference(tensor)) is not None:
        start, length = reference.offset, reference.length
        with (source.parent / reference.location).open("rb") as file:
            file.seek(start)
            first = file.read(min(length or SAMPLE, SAMPLE))
            file.seek(start + max(length - SAMPLE, 0), os.SEEK_SET)
            body = first + file.read(min(length, SAMPLE)) + str(length).encode()
    else:
        bare = TensorProto()
        bare.CopyFrom(tensor)
        bare.ClearField("name")
        bare.ClearField("doc_string")
        body = bare.SerializeToString(deterministic=True)
    return _digest((tensor.data_type, tuple(tensor.dims), body))


def _digest(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def match_entries(
    shape: Sequence[int], whole: Sequence[int], new: int, total: int, batch: int
) -> list[list[int] | None] | None:
    """The part of a whole value that a step computes too: for each axis None (all) or [parts, start, count]."""
    if len(shape) != len(whole):
        return None
    rules: list[list[int] | None] = []
    for size, full in zip(shape, whole, strict=True):
        parts = next((n for n in (1, batch) if size == new * n and full == total * n), None)
        if size == full:
            rules.append(None)
        elif parts is not None:
            rules.append([parts, total - new, new])
        else:
            return None
    return rules


def chunks(items: Iterable[tuple[int, int]], most: int, count: int) -> list[list[int]]:
    """Indices of (index, bytes) in portions of at most so many bytes and so many items."""
    portions: list[list[int]] = [[]]
    size = 0
    for index, needed in items:
        if portions[-1] and (size + needed > most or len(portions[-1]) >= count):
            portions.append([])
            size = 0
        portions[-1].append(index)
        size += needed
    return portions
