"""Places a difference to a PyTorch checkpoint: the first module whose inputs agree and whose output does not.

What the modules of the checkpoint were given and gave in one call comes from its own process. They are grouped by their
names into the parts of the decoder: the embedding, each layer's attention and MLP, the final norm and the head. A norm
of a layer is a part by its own name, such as `input_layernorm`: it is applied before or after the attention. The value
of the graph that corresponds to the output of a module is one that leaves the nodes of its scope (`node_source`), with
as many elements; where there are several, the closest. A module without a scope counts as equal where a value of the
graph equals its output, and is never called different. So nothing is placed in a graph whose names tell nothing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path

import numpy as np

from kvdoctor.decode.calls import Array
from kvdoctor.decode.runs import FaultLocation, PartDifference
from kvdoctor.diagnose.locate.first_divergence import SUDDEN
from kvdoctor.diagnose.locate.graph_runner import GraphRunner
from kvdoctor.diagnose.locate.runnable import LAYER, RunnableGraph, RunnableNode, locate_at
from kvdoctor.diagnose.node_source import module_of
from kvdoctor.errors import CannotCheck
from kvdoctor.model.operators import operators_with
from kvdoctor.records import record
from kvdoctor.report.wording import shorten_names

NORM = re.compile(r"norm|\bln_|(?:^|[._])ln\d?(?:[._]|$)", re.IGNORECASE)
KINDS = {
    "cross-attention": re.compile(r"encoder_attn|cross_?attn|EncDecAttention|cross_attention", re.IGNORECASE),
    "attention": re.compile(r"attn|attention", re.IGNORECASE),
    "mixer": re.compile(r"mixer|mamba|linear_attn|conv", re.IGNORECASE),
    "MLP": re.compile(r"mlp|ffn?|feed_?forward|fc\d?|dense|moe|experts", re.IGNORECASE),
}
"""Parts of a layer by the names of their modules, the most special first."""
MOST_BYTES = 512 << 20
"""Bytes of values of the graph that are read at once."""
SENSITIVE = 0.1
"""Fraction of the tolerance of the logits by which a module counts as different: a small error grows on its way."""
NOISE = 1e-6
SHOWN_NODES = 8
MOVING = operators_with("copy", "cast", "view", "permute", "repeat", "pick", "join") - operators_with("embed")
"""Operators that compute nothing new: they are left out where other nodes stand between."""
UNKNOWN = -1.0
"""The difference of a value that is finite on one side only."""
MOST_LEADING = 2
"""Leading parts of a name that may be left out."""


@record(slots=False)
class Module:
    """A module of the checkpoint: all its names, its class, and what it was given and gave."""

    names: tuple[str, ...]
    kind: str
    given: Array | None
    gave: Array | None

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def shown(self) -> str:
        """How people call it."""
        return f"{self.name} ({self.kind})" if self.name else f"the model itself ({self.kind})"


@record(slots=False)
class ModuleCall:
    """One call of the checkpoint: its modules in the order in which they ended, the names of two, and the feeds."""

    modules: tuple[Module, ...]
    embedding: str
    head: str
    feeds: Path


def list_parts(call: ModuleCall, differences: Mapping[str, float], limit: float) -> tuple[PartDifference, ...]:
    """The parts in the order of the graph, each with the largest difference of its modules."""
    found: dict[tuple[int | None, str], float] = {}
    for module in call.modules:
        key = part_of(module.names, call.embedding, call.head)
        if key is None or module.name not in differences:
            continue
        relative, worst = differences[module.name], found.get(key, 0.0)
        found[key] = -1.0 if min(relative, worst) < 0 else max(relative, worst)
    rounded = ((key, relative, float(f"{relative:.3g}")) for key, relative in found.items())
    return tuple(PartDifference(name, at, short, not 0 <= off <= limit) for (at, name), off, short in rounded)


def part_of(names: tuple[str, ...], embedding: str, head: str) -> tuple[int | None, str] | None:
    """The layer and the part that a module belongs to; None for those that hold several parts."""
    for name in names:
        if name and name in (embedding, head):
            return None, "embedding" if name == embedding else "head"
    match = LAYER.search(names[0])
    if match is None:
        last = names[0].rsplit(".", 1)[-1]
        return (None, "final norm") if last and NORM.search(last) and "embed" not in last else None
    rest = [part for part in names[0][match.end() :].split(".") if part]
    for part in rest:
        kinds = [kind for kind, pattern in KINDS.items() if pattern.search(part)] if not NORM.search(part) else []
        if kinds or (part is rest[-1] and NORM.search(part)):
            return int(match[1]), next(iter(kinds), part)
    return None


@record(slots=False)
class Placed:
    """The output of a module and its value in the graph, off by `relative`; `by_scope` is false if found by value."""

    module: Module
    value: str
    relative: float
    by_scope: bool


@record(slots=False)
class ModuleComparison:
    """All parts of the model with their differences, and the location, or the reason why there is none."""

    parts: tuple[PartDifference, ...]
    location: FaultLocation | None
    reason: str | None = None


@dataclass
class ModuleSearch:
    """Compares one call of a graph without a cache with the modules of a checkpoint."""

    runner: GraphRunner
    flat: RunnableGraph
    call: ModuleCall
    passes: float
    arrays: dict[str, Array] = field(default_factory=dict)

    def compare(self) -> ModuleComparison:
        """Compare all modules that can be found; `CannotCheck` where none can, otherwise as `GraphRunner` says."""
        if not any(module.name and LAYER.search(module.name) for module in self._named.values()):
            raise CannotCheck("no node of the graph is named after a module of the checkpoint")
        self.arrays = self._read()
        placed = [found for module in self.call.modules if (found := self._place(module)) is not None]
        parts = list_parts(self.call, {one.module.name: one.relative for one in placed}, self._limit)
        wrong = [one for one in placed if one.by_scope and self._differs(one.relative)]
        if not wrong:
            reason = f"all {len(placed)} modules that could be matched agree; what differs stands outside of them"
            return ModuleComparison(parts, None, reason)
        return ModuleComparison(parts, self._locate(wrong, placed))

    @property
    def _limit(self) -> float:
        return max(self.passes * SENSITIVE, 10 * NOISE)

    def _differs(self, relative: float) -> bool:
        return not 0 <= relative <= self._limit

    @cached_property
    def _scopes(self) -> dict[int, str]:
        """The scope of each node that has one, by its index."""
        return {node.index: scope for node in self.flat.nodes if (scope := module_of(node.proto)) is not None}

    @cached_property
    def _named(self) -> dict[str, Module]:
        modules = {name: module for module in self.call.modules for name in module.names if name}
        scopes = {around for scope in self._scopes.values() for around in _around(scope)}
        return {scope: modules[name] for scope, name in match_scopes(scopes, list(modules)).items()}

    @cached_property
    def _inside(self) -> dict[str, list[RunnableNode]]:
        """The nodes of each module, by its name, those of its own modules included."""
        found: dict[str, list[RunnableNode]] = {}
        for node in self.flat.nodes:
            around = (self._named.get(scope) for scope in _around(self._scopes.get(node.index, "")))
            for name in {module.name for module in around if module is not None}:
                found.setdefault(name, []).append(node)
        found[""] = self.flat.nodes
        return found

    @cached_property
    def _readers(self) -> Mapping[str, set[int]]:
        found: dict[str, set[int]] = {}
        for node in self.flat.nodes:
            for name in node.reads:
                found.setdefault(name, set()).add(node.index)
        return found

    def _leaving(self, module: Module) -> list[str]:
        """The values made inside a module that are read outside, or returned."""
        nodes = self._inside.get(module.name, [])
        inside, results = {node.index for node in nodes}, set(self.flat.results.values())
        made = (name for node in nodes for name in node.makes)
        return [name for name in made if name in results or not self._readers.get(name, set()) <= inside]

    def _entering(self, nodes: Iterable[RunnableNode]) -> list[str]:
        """The values that nodes read and do not make; no constants."""
        nodes = list(nodes)
        made = {name for node in nodes for name in node.makes}
        read = dict.fromkeys(name for node in nodes for name in node.reads)
        return [name for name in read if name not in made and name not in self.flat.constants]

    def _read(self) -> dict[str, Array]:
        """The values that have as many elements as something that a module was given or gave."""
        seen = (array for module in self.call.modules for array in (module.given, module.gave))
        wanted = {array.size for array in seen if array is not None}
        values = [name for node in self.flat.nodes for name in node.makes]
        fed = self._entering(self.flat.nodes)
        sizes = self.runner.sizes(self.flat, [*fed, *values], self.call.feeds)
        chosen, total = [], 0
        for name, shape in sizes.items():
            total += 4 * prod(shape) if prod(shape) in wanted else 0
            if prod(shape) in wanted and prod(shape) > 1 and total <= MOST_BYTES:
                chosen.append(name)
        return self.runner.arrays(self.flat, chosen, self.call.feeds)

    def _closest(self, names: Iterable[str], expected: Array | None) -> tuple[float, str] | None:
        """The value closest to an array: its difference and its name."""
        if expected is None:
            return None
        found: tuple[float, str] | None = None
        for name in names:
            array = self.arrays.get(name)
            if array is None or array.size != expected.size or array.shape[-1:] != expected.shape[-1:]:
                continue
            relative = measure(array.reshape(expected.shape), expected)
            if found is None or _rank(relative) < _rank(found[0]):
                found = relative, name
        return found

    def _place(self, module: Module) -> Placed | None:
        found = self._closest(self._leaving(module), module.gave)
        if found is not None:
            return Placed(module, found[1], found[0], by_scope=True)
        found = self._closest(self.arrays, module.gave) if module.gave is not None and module.gave.size > 1 else None
        if found is None or self._differs(found[0]):
            return None
        return Placed(module, found[1], found[0], by_scope=False)

    def _off_before(self, module: Module) -> float | None:
        """How far the inputs of a module are off; None where they cannot be found."""
        found = self._closest(self._entering(self._inside.get(module.name, [])), module.given)
        return found[0] if found is not None else None

    def _locate(self, wrong: Sequence[Placed], placed: Sequence[Placed]) -> FaultLocation:
        """The innermost module whose inputs agree around the first output that differs."""
        first = wrong[0]
        before = self._off_before(first.module)
        if before is not None and not self._differs(before):
            sudden = not 0 <= first.relative <= SUDDEN * max(before, NOISE)
            return self._describe(first, first.module, placed, sudden)
        for module in self.call.modules:  # inner ones end before outer ones
            around = (not one or name.startswith(f"{one}.") for one in module.names for name in first.module.names)
            if module.name == first.module.name or not any(around):
                continue
            before = self._off_before(module)
            if before is not None and not self._differs(before):
                return self._describe(first, module, placed, sudden=True)
        raise CannotCheck(f"the output of {first.module.shown} differs, and no inputs around it could be matched")

    def _describe(self, first: Placed, at: Module, placed: Sequence[Placed], sudden: bool) -> FaultLocation:
        equal = {one.value for one in placed if not self._differs(one.relative)}
        equal |= {name for name in self._entering(self._inside.get(at.name, [])) if name in self.arrays or at.name}
        targets = [first.value] if at is first.module else self._entering(self._inside[first.module.name])
        between = self.flat.before([name for name in targets if name not in equal], equal)
        # Nodes that compute sizes and the like are left out: nothing of what they make depends on what was fed.
        fed = self.flat.depending_on(self._entering(self.flat.nodes))
        computing = [node for node in between if not node.has("measure", "constant", "fill")]
        nodes = [node for node in computing if fed & set(node.makes)] or between
        nodes = [node for node in nodes if node.op not in MOVING] or nodes
        off = "finite in other entries" if first.relative < 0 else f"off by {first.relative:.2g} standard deviations"
        inner = "its" if at is first.module else f"those of {first.module.shown} in it do not: its"
        words = f"the inputs of {at.shown} agree, and {inner} output is {off}"
        if not sudden:
            words = f"no single module stands out: differences grow, and the output of {first.module.shown} is {off}"
        match = LAYER.search(first.module.name)
        listed = shorten_names([node.in_file.shown for node in nodes], SHOWN_NODES)
        compute = "this node computes" if len(nodes) == 1 else "these nodes compute"
        return locate_at(
            next(iter(nodes), None),
            words,
            "graph" if sudden else "precision",
            layer=int(match[1]) if match else None,
            provenance=(f"{compute} it: {listed}",) if nodes else (),
        )


def _around(scope: str) -> Iterable[str]:
    parts = scope.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _rank(relative: float) -> float:
    return float("inf") if relative < 0 else relative


def measure(actual: Array, expected: Array) -> float:
    """The largest difference in standard deviations of the expected values; -1 where one side alone is not finite."""
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    both = np.isfinite(got) & np.isfinite(want)
    if not (both | (got == want) | (np.isnan(got) & np.isnan(want))).all():
        return UNKNOWN
    if not both.any():
        return 0.0
    finite = want[both]
    scale = max(float(finite.std()), 0.1 * float(np.sqrt(np.mean(finite**2))), 1e-12)
    return float(np.abs(got[both] - finite).max()) / scale


def match_scopes(scopes: Iterable[str], modules: Sequence[str]) -> dict[str, str]:
    """The module of each scope that has one, without the leading parts that make most names of layers equal."""
    found = sorted({scope for scope in scopes if scope})
    best: dict[str, str] = {}
    for more, less in sorted(product(_leading(found), _leading(modules)), key=lambda pair: len(pair[0] + pair[1])):
        named = _without(modules, less)
        matched = {scope: named[short] for short, scope in _without(found, more).items() if short in named}
        if _count_layered(matched) > _count_layered(best):
            best = matched
    return best


def _count_layered(matched: Mapping[str, str]) -> int:
    return sum(LAYER.search(scope) is not None for scope in matched)


def _leading(names: Iterable[str]) -> list[str]:
    """What may be left out at the front of names, the empty text first."""
    split = (name.split(".") for name in names)
    starts = (parts[:length] for parts in split for length in range(1, min(MOST_LEADING, len(parts) - 1) + 1))
    counted = Counter(".".join(start) + "." for start in starts)
    return ["", *(prefix for prefix, _ in counted.most_common(6))]


def _without(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Names by what is left without a prefix; those that do not have it keep all, if that is free."""
    cut = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {name: name for name in names if not name.startswith(prefix) and name not in cut} | cut
