"""The first divergence of a step with the cache from the run without one: the value that differs, and its root cause.

Corresponding values are compared in portions of bounded size, in the order of the graph. The search goes back from the
first token-dependent value that differs over inputs that differ as well. The root is the earliest of these that makes
the logits right when the reference value replaces it: an experiment, which holds for masks, positions, swapped caches.

To compare them, values of the two graphs are matched. Where one graph serves both, every value is its own counterpart.
Else values are matched by operator, attributes and inputs, constants by their content. Values that depend on lengths
alone (masks, positions, targets of a Reshape) match anything, and so do constants where all else is equal. The present
of a slot matches on both sides. Where inputs could not be matched, a large weight that one node alone uses matches the
next node.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path

from kvdoctor.decode.messages import ValueDifference
from kvdoctor.diagnose.locate.graph_runner import GraphRunner, side
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode
from kvdoctor.errors import CannotCheck
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
    """A flat graph: its inputs by role and by token content, the values of its slots, and a call with its logits."""

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
        tensors = graph.flat.constants.items()
        self.keys |= {name: ("constant", content(tensor, graph.flat.source)) for name, tensor in tensors}
        self.keys |= {name: ("slot", slot) for name, slot in behind.items()}
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
            known = (self.other.alike.get(loose, ()), self.other.anchors.get(anchor, ()) if anchor is not None else ())
            key = next((found[0] for found in known if len(found) == 1), key)
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


MOST_BYTES = 48 << 20
"""Bytes that the values of one portion may take, in each run."""
MOST_VALUES = 600
MOST_PATCHES = 8
SUDDEN = 20.0
"""Factor between the differences of an output and of its inputs that separates a fault from accumulated rounding."""

Take = list[list[int] | None]


@record(slots=False)
class CallPair:
    """Two calls: sizes in tokens and sequences, `caches` with their values at right, what `passes` as equal."""

    left: FlatFile
    right: FlatFile
    new: int
    total: int
    batch: int
    passes: float
    caches: Mapping[str, tuple[str, Take]] = field(default_factory=dict)


@record(slots=False)
class Divergence:
    """The result of the comparison.

    `node` is where the runs first diverge and `value` its output, off by `relative` standard deviations; `sudden` says
    that its token-dependent inputs are not. `root` is the later value whose reference value makes the logits right,
    None where no single one does; `numbers` are its elements in both runs, where they are few integers. `compared` of
    `values` token-dependent values had a counterpart. `equal` are the inputs that do not differ.
    `order`: a value at `value` or before it that holds expected entries at other places of an axis, and which.
    """

    node: RunnableNode | None
    value: str
    relative: float
    sudden: bool
    root: str | None
    numbers: tuple[tuple[int, ...], tuple[int, ...]] | None
    compared: int
    values: int
    equal: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    order: tuple[str, tuple[int, ...]] | None = None


@dataclass
class DivergenceSearch:
    """The search over two calls."""

    runner: GraphRunner
    sides: CallPair

    def __post_init__(self) -> None:
        self.found: dict[str, ValueDifference] = {}
        self.pairs: dict[str, tuple[str, Take]] = {}

    def run(self) -> Divergence | None:
        """Find the first divergence; None where no token-dependent value differs. Raises like `GraphRunner`."""
        left = self.sides.left
        listed = match_values(left, self.sides.right)
        if left.flat is self.sides.right.flat:  # what is made of a past alone has no counterpart in a run without one
            listed = [pair for pair in listed if pair[0] not in left.old]
        self.pairs = dict(self.sides.caches) | self._pair_entries(listed)
        order = [name for node in left.flat.nodes for name in node.makes if name in self.pairs]
        order = [*self.sides.caches, *order]
        if left.logits not in self.pairs:
            raise CannotCheck("the logits of the two runs could not be matched")
        first = self._find_first(order)
        if first is None:
            return None
        node, root, told = left.flat.producers.get(first), self._find_root(first), left.token_dependent
        numbers = self.found[root] if root is not None else None
        return Divergence(
            node=node,
            value=first,
            relative=self.found[first].relative,
            sudden=self._is_sudden(first),
            root=root,
            numbers=(numbers.actual, numbers.expected) if numbers and numbers.actual and numbers.expected else None,
            compared=sum(name in told and name in left.flat.producers for name in order),
            values=sum(name in told for node in left.flat.nodes for name in node.makes),
            equal=tuple(n for n in (node.reads if node else ()) if n in self.found and not self.differs(n)),
            switches=self._find_switches() if root is None or numbers is None or not numbers.actual else (),
            order=self._find_order(first),
        )

    def _find_order(self, first: str) -> tuple[str, tuple[int, ...]] | None:
        """The earliest value, back from one by equal operators, that holds expected entries in another order."""
        sides, listed = self.sides, [(first, self.pairs[first][0])]
        for name, counterpart in listed:
            one, other = sides.left.flat.producers.get(name), sides.right.flat.producers.get(counterpart)
            if one is not None and other is not None and one.op == other.op and len(listed) < MOST_VALUES:
                inputs = zip(one.inputs, other.inputs, strict=False)
                listed += [pair for pair in inputs if pair[0] in sides.left.token_dependent - self.pairs.keys()]
        fit = self._pair_entries(listed)
        found = self._compare_values([(name, *pair) for name, pair in fit.items()])
        orders = [(name, facts.order) for name, facts in zip(fit, found, strict=True) if facts and facts.order]
        return orders[-1] if orders else None

    def holders(self, value: str, take: Take) -> list[str]:
        """The pasts that hold the first entries of the counterpart of a value."""
        sides = self.sides
        names, other = list(sides.caches), self.pairs[value][0]
        found = self._compare_values([(name, other, take) for name in names])
        return [name for name, facts in zip(names, found, strict=True) if facts and 0 <= facts.relative <= sides.passes]

    def _pair_entries(self, listed: list[tuple[str, str]]) -> dict[str, tuple[str, Take]]:
        """The pairs whose sizes show which entries correspond."""
        sides, fit = self.sides, dict[str, tuple[str, Take]]()
        own = self.runner.sizes(sides.left.flat, [one for one, _ in listed], sides.left.feeds)
        whole = self.runner.sizes(sides.right.flat, [two for _, two in listed], sides.right.feeds)
        self.sizes = own
        for one, two in listed:
            if one in own and two in whole:
                rules = match_entries(own[one], whole[two], sides.new, sides.total, sides.batch)
                if rules is not None and (any(rules) or len(own[one]) > 1 or one == sides.left.logits):
                    fit[one] = (two, rules)
        return fit

    def _find_first(self, order: list[str]) -> str | None:
        """Compare portions until one has a sudden difference in a token-dependent value; else the first gradual one."""
        token_dependent, gradual = self.sides.left.token_dependent, None
        needed = [(index, 8 * prod(self.sizes.get(name, (1,)))) for index, name in enumerate(order)]
        for portion in chunks(needed, MOST_BYTES, MOST_VALUES):
            names = [order[index] for index in portion]
            self._compare(names)
            for name in names:
                if name in token_dependent and self.differs(name) and self.found[name].actual is None:
                    if self._is_sudden(name):
                        return name
                    gradual = gradual or name
        return gradual

    def _compare(self, names: list[str]) -> None:
        results = self._compare_values([(name, *self.pairs[name]) for name in names])
        self.found |= {name: facts for name, facts in zip(names, results, strict=True) if facts is not None}

    def _compare_values(
        self, wanted: list[tuple[str, str, Take]], replaced: Sequence[str] = ()
    ) -> tuple[ValueDifference | None, ...]:
        """Compare values of the left graph with values of the right one; some are replaced by their counterparts."""
        sides, flat = self.sides, self.sides.left.flat
        given = {name: element_type(self.found[name].dtype) for name in replaced if name in flat.producers}
        left = self.runner.variant(flat, values=[one for one, _, _ in wanted], given=given)
        others = dict.fromkeys([*(self.pairs[name][0] for name in replaced), *(two for _, two, _ in wanted)])
        right = self.runner.variant(sides.right.flat, values=others)
        pairs = [(left.outputs[one], right.outputs[two], take) for one, two, take in wanted]
        inject = [(name, right.outputs[self.pairs[name][0]], self.pairs[name][1]) for name in replaced]
        return self.runner.compare(side(left, sides.left.feeds), side(right, sides.right.feeds), pairs, inject)

    def differs(self, name: str) -> bool:
        """Whether a value was compared, and is not that of the other run."""
        facts = self.found.get(name)
        return facts is not None and not 0 <= facts.relative <= self.sides.passes

    def _is_sudden(self, name: str) -> bool:
        """Whether a value is much farther off than the token-dependent inputs of its node."""
        node, token_dependent = self.sides.left.flat.producers.get(name), self.sides.left.token_dependent
        given = [self.found[n] for n in (node.reads if node else ()) if n in token_dependent and n in self.found]
        reads = [facts.relative for facts in given if facts.actual is None]
        own = self.found[name].relative
        return min(reads, default=0.0) >= 0 and (own < 0 or own > SUDDEN * max(reads, default=0.0))

    def _find_root(self, first: str) -> str | None:
        """The first value from another one on, itself included, whose reference value makes the logits right."""
        if first == self.sides.left.logits:
            return None
        flat, found = self.sides.left.flat, {first}
        waiting = [first]
        while waiting:
            node = flat.producers.get(waiting.pop())
            reads = {n for n in (node.reads if node else ()) if n in self.pairs and self.differs(n)} - found
            # Wrong, and not only of a different length: integers must belong to single tokens.
            reads = {n for n in reads if self.found[n].actual is None or any(self.pairs[n][1])}
            found |= reads
            waiting += reads
        ordered = [name for node in flat.nodes for name in node.makes if name in found]
        tried = [*[n for n in found if n not in flat.producers], *ordered][:MOST_PATCHES]
        return next((name for name in dict.fromkeys([*tried, first]) if self._makes_logits_right(name)), None)

    def _find_switches(self) -> tuple[str, ...]:
        """Values that one graph chooses by comparing lengths, and otherwise in the other run, if they are the cause."""
        left, right = self.sides.left, self.sides.right
        if left.flat is not right.flat:
            return ()
        names = find_switches(left)
        feeds = (left.feeds, right.feeds)
        own, whole = (self.runner.sizes(left.flat, names, one) for one in feeds) if names else ({}, {})
        names = [name for name in names if name in own and own[name] == whole.get(name)]
        self.pairs |= {name: (name, [None] * len(own[name])) for name in names}
        if names:
            self._compare(names)
        chosen = tuple(name for name in names if self.differs(name))
        return chosen if chosen and self._makes_logits_right(*chosen) else ()

    def _makes_logits_right(self, *names: str) -> bool:
        """Whether the logits are right where the reference values replace some values."""
        logits = self.sides.left.logits
        found = self._compare_values([(logits, *self.pairs[logits])], names)[0]
        return found is not None and 0 <= found.relative <= self.sides.passes


def find_switches(graph: FlatFile) -> list[str]:
    """Values chosen by comparing lengths, which token-dependent ones rest on; not what chooses between caches."""
    flat, told = graph.flat, graph.token_dependent
    compared = [name for node in flat.nodes if node.has("compare", "clamp") for name in node.makes if name not in told]
    chosen = flat.depending_on(compared) - told
    found, kept = dict[str, None](), set[str]()
    for node in flat.nodes:
        if told.isdisjoint(node.makes):
            continue
        read = [name for name in node.reads if name in chosen]
        (kept.update if not graph.old.isdisjoint(node.reads) else found.update)(dict.fromkeys(read))
    return [name for name in found if name not in kept]


def element_type(dtype: str) -> int:
    """The number that ONNX gives an element type."""
    return int(TensorProto.DataType.Value(dtype.upper()))
