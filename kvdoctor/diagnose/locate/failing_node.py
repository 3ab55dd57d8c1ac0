"""A failing node: its inputs, which of their sizes do not fit, where those come from, and what is at fault.

Which sizes conflict is decided by the rule of the operator (ONNX operator schemas).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from kvdoctor.contract import Axis
from kvdoctor.decode.calls import Array
from kvdoctor.decode.runs import FaultLocation, FaultSource, ObservedTensor
from kvdoctor.diagnose.locate.graph_runner import GraphRunner, ObservedValues, TrialFailed
from kvdoctor.diagnose.locate.origins import Origins, SizeSource, describe_origin
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode, locate_at
from kvdoctor.model.node_sizes import AxisOf, NodeSizes, NumberOf, find_unequal
from kvdoctor.model.operator_axes import axes_of, read_equation
from kvdoctor.model.operators import has, ports_of
from kvdoctor.model.view import ELEMENT_TYPES
from kvdoctor.records import record
from kvdoctor.report.wording import format_count

MOST_PROOFS = 4
"""Fed lengths that are changed to see whether an axis depends on them."""
SHORT = 64


@record(slots=False)
class Suspect:
    """An axis of a value, or a number in it, that the node cannot take; `fits` is a size that it would take."""

    value: str
    axis: int
    is_number: bool = False
    fits: int | None = None


def find_conflict(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str]:
    """The sizes or numbers that do not fit together, and in one clause why; nothing where no rule is known."""
    found = _RULES.get(node.op, _unequal)(node, o)
    attends = ports_of(node.domain, node.op) is not None  # a past of length 0 is one
    empty = [] if attends else find_empty_axes(node, o)
    return found or (([*empty], "an input has an axis of length 0") if empty else ([], ""))


def find_empty_axes(node: RunnableNode, o: Origins) -> list[Suspect]:
    """Axes of length 0: the standard allows them, and a kernel may still refuse them."""
    sizes = [(name, axis, size) for name in node.inputs if name for axis, size in enumerate(o.shape(name) or ())]
    return [Suspect(name, axis, fits=1) for name, axis, size in sizes if size == 0]


def _unequal(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    """Sizes that must be equal, or broadcast to each other, by the rule for the axes of the outputs."""
    known = o.node_sizes(node)
    found = find_unequal(known, axes_of(known) or ())
    if found is None:
        return None
    how, ((one, first), (other, second)) = found
    pairs = ((one, second), (other, first))
    suspects = [Suspect(node.inputs[part.input], part.at, isinstance(part, NumberOf), fits) for part, fits in pairs]
    return suspects, _explain(known, how, one, first, second)


def _explain(node: NodeSizes, how: str, at: AxisOf | NumberOf, first: int, other: int) -> str:
    """Why two sizes do not fit; `at` is where the first of them stands."""
    if has(node.op, "join"):
        joined = node.axis(0, len(node.axes(at.input)))
        return f"inputs joined along axis {joined} must agree in axis {at.at}, and have {first} and {other}"
    if node.op == "Einsum":
        return f"{read_equation(node.attribute('equation'))[0][at.input][at.at]!r} cannot be {first} and {other}"
    if how == "equal":
        columns, rows = format_count(first, "column"), format_count(other, "row")
        return f"{columns} {'does' if first == 1 else 'do'} not fit {rows}"
    return f"{first} and {other} cannot be broadcast"


def _reshape(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, target = node.inputs[0], node.inputs[1]
    into, numbers = o.shape(data), o.numbers(target)
    if into is None or numbers is None:
        return None
    copies = not node.number("allowzero", 0)
    wrong = [Suspect(target, i, True) for i, n in enumerate(numbers) if n == 0 and copies and i >= len(into)]
    if wrong:
        return wrong, f"the target {list(numbers)} copies an axis that does not exist"
    wanted = [into[i] if n == 0 and copies else n for i, n in enumerate(numbers)]
    fixed, total = prod(n for n in wanted if n != -1), prod(into)
    if (-1 not in wanted and fixed == total) or (-1 in wanted and fixed and total % fixed == 0):
        return None
    needed = f"{'a multiple of ' if -1 in wanted else ''}{fixed} elements"
    clause = f"the target {list(numbers)} needs {needed}, the input has {total}"
    suspects = [
        Suspect(data, i, fits=wanted[i] if len(wanted) == len(into) and wanted[i] > 0 else None)
        for i, size in enumerate(into)
        if i >= len(wanted) or wanted[i] not in (-1, size)
    ]
    suspects = suspects or [Suspect(data, i) for i, size in enumerate(into) if size != 1]
    unlike = len(into) != len(numbers)
    fixing = [i for i, n in enumerate(numbers) if n > 0 and (unlike or into[i] != n)]
    return [*suspects, *(Suspect(target, i, True) for i in fixing)], clause


def _gather(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, picks = o.shape(node.inputs[0]), o.numbers(node.inputs[1])
    if data is None or picks is None:
        return None
    axis = node.number("axis", 0) % max(len(data), 1)
    outside = [i for i, pick in enumerate(picks) if not -data[axis] <= pick < data[axis]]
    if not outside:
        return None
    suspects = [Suspect(node.inputs[1], outside[0], True), Suspect(node.inputs[0], axis)]
    return suspects, f"index {picks[outside[0]]} is outside an axis of length {data[axis]}"


def _split(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data = o.shape(node.inputs[0])
    sizes = o.numbers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    sizes = sizes or node.numbers("split")
    if data is None or sizes is None:
        return None
    axis = node.number("axis", 0) % max(len(data), 1)
    if sum(sizes) == data[axis]:
        return None
    return [Suspect(node.inputs[0], axis)], f"parts of {list(sizes)} do not add up to {data[axis]}"


def _conv(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    data, weight = o.shape(node.inputs[0]), o.shape(node.inputs[1])
    if data is None or weight is None or len(data) != len(weight):
        return None
    padding, places = node.attribute("auto_pad"), len(data) - 2
    if padding is not None and padding.s not in (b"", b"NOTSET"):
        return None
    pads, spread = node.numbers("pads") or (0,) * 2 * places, node.numbers("dilations") or (1,) * places
    for place in range(places):
        reach = (weight[place + 2] - 1) * spread[place] + 1
        if data[place + 2] + pads[place] + pads[place + places] < reach:
            text = f"an axis of length {data[place + 2]} is shorter than the reach of the kernel, {reach}"
            return [Suspect(node.inputs[0], place + 2, fits=reach)], text
    return None


def _rotary(node: RunnableNode, o: Origins) -> tuple[list[Suspect], str] | None:
    """The head size that ONNX Runtime rotates by eights of pairs (contrib_ops, group_query_attention_helper.h)."""
    key, past = o.shape(node.inputs[1]) if len(node.inputs) > 1 else None, o.shape(node.inputs[3])
    width = past[-1] if past else (key or (0,))[-1] // max(node.number("kv_num_heads", 1), 1)
    if not node.number("do_rotary", 0) or width % 16 == 0:
        return None
    return [Suspect(node.inputs[3], 3)], f"with do_rotary the head size must be a multiple of 16, and it is {width}"


_RULES: dict[str, Callable[[RunnableNode, Origins], tuple[list[Suspect], str] | None]] = {
    "Conv": _conv,
    "Reshape": _reshape,
    "Gather": _gather,
    "GroupQueryAttention": _rotary,
    "Split": _split,
}


NO_LENGTHS = ("GroupQueryAttention",)
"""Operators whose rule compares no lengths."""

SourcedSuspect = tuple[Suspect, list[SizeSource]]
"""A size that does not fit, and where it comes from."""


@dataclass
class FailingNode:
    """A failing node and its call: the axes of inputs, the steps that returned pasts, the layers of pasts."""

    runner: GraphRunner
    flat: RunnableGraph
    node: RunnableNode
    feeds: Mapping[str, Array]
    axes: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)

    def locate(self, feeds: Path) -> FaultLocation:
        """Describe the fault; `CannotCheck` where the worker process crashed, or time is up."""
        known = self._known(feeds)
        origins = Origins(self.flat, known, {name: tuple(array.shape) for name, array in self.feeds.items()})
        suspects, clash = find_conflict(self.node, origins)
        if not suspects:
            computed = [n for n in dict.fromkeys(self.node.reads) if n in self.flat.producers or n in self.feeds]
            suspects = [Suspect(name, axis) for name in computed for axis in range(len(origins.shape(name) or ()))]
        sourced = self._trace(origins, suspects)
        if not clash:
            sourced = [(suspect, sources) for suspect, sources in sourced if _moves(sources)]
        elif not self._names_void(sourced):
            # Axes of length 0 that come from a feed without elements may have caused the conflict.
            emptied = self._trace(origins, find_empty_axes(self.node, origins))
            sourced += [one for one in emptied if self._names_void([one])]
        made = [name for name in self.node.makes if name]
        empty = bool(clash) and self._names_void(sourced) and self._makes(made, self._filled)
        frozen = _find_frozen(sourced) if clash and not empty else None
        source, words = self._assign_source(origins, sourced, frozen, clash)
        return locate_at(
            self.node,
            words,
            source,
            layer=self.node.layer(self.layers),
            shapes={self.flat.label(name): self._seen(known, name) for name in self.node.inputs if name},
            provenance=tuple(dict.fromkeys(self._describe(origins, *one) for one in sourced)),
            frozen_by=frozen,
        )

    def _known(self, feeds: Path) -> ObservedValues:
        reads = [name for name in self.node.reads if name in self.flat.producers]
        before = [name for node in self.flat.before(reads) for name in node.makes]
        known = self.runner.known(self.flat, before, feeds, reads) if before else ObservedValues()
        for name, array in self.feeds.items():
            if array.dtype.kind in "iub" and array.size <= SHORT:
                known.numbers[name] = tuple(int(number) for number in array.ravel())
        return known

    def _seen(self, known: ObservedValues, name: str) -> ObservedTensor:
        if name in known.shapes:
            return known.observed(name)
        if name in self.feeds:
            kind = self.feeds[name].dtype.name
            kind = {"float32": "float", "float64": "double"}.get(kind, kind)
            return ObservedTensor(kind, tuple(self.feeds[name].shape))
        tensor = self.flat.constants.get(name)
        kind, shape = (ELEMENT_TYPES.get(tensor.data_type, "?"), tuple(tensor.dims)) if tensor else ("?", ())
        return ObservedTensor(kind, shape)

    def _trace(self, origins: Origins, suspects: list[Suspect]) -> list[SourcedSuspect]:
        found = ((one, origins.of(one.value, one.axis, one.is_number)) for one in suspects)
        return [(suspect, self._drop_refuted(suspect, sources)) for suspect, sources in found]

    def _drop_refuted(self, suspect: Suspect, sources: list[SizeSource]) -> list[SizeSource]:
        """The sources without the fed lengths that the axis does not depend on, as feeding another length shows."""
        if suspect.is_number or suspect.value not in self.flat.producers:
            return sources
        fed = [source for source in sources if source.kind == "fed length"]
        void = [source for source in fed if self._is_void(source)]
        other = [source for source in fed if source not in void][:MOST_PROOFS]
        refuted = [source for source in other if self._depends_on(suspect, source) is False]
        if void and self._moves_with(suspect, self._filled) is False:
            refuted += void
        return [source for source in sources if source not in refuted]

    def _depends_on(self, suspect: Suspect, source: SizeSource) -> bool | None:
        """Whether an axis depends on a fed length, changed alone, then with all that count the same."""
        kind = self._kind(source)
        others = [self._resized(source, source.size + 1), *([self._longer(kind)] if kind else [])]
        moved = (self._moves_with(suspect, feeds) for feeds in others)
        return next((one for one in moved if one is not None), None)

    def _moves_with(self, suspect: Suspect, feeds: dict[str, Array]) -> bool | None:
        """Whether an axis has another length on other feeds; None where the graph does not get that far with them."""
        variant = self.runner.variant(self.flat, shapes=[suspect.value])
        with contextlib.suppress(TrialFailed):
            after = self.runner.run(variant, self.runner.feeds(feeds))[suspect.value].values or ()
            before = self.runner.run(variant, self.runner.feeds(self.feeds))[suspect.value].values or ()
            return bool(after[suspect.axis] != before[suspect.axis])
        return None

    @cached_property
    def _filled(self) -> dict[str, Array]:
        """The feeds, with all empty ones as long as other inputs that count the same: each alone empties the value."""
        feeds = dict(self.feeds)
        for name, axes in self.axes.items():
            for axis, kind in enumerate(axes):
                void = name in feeds and axis < feeds[name].ndim and feeds[name].shape[axis] == 0
                if void and (sizes := [size for size in self._others(name, kind) if size]):
                    feeds[name] = _resized(feeds[name], axis, sizes[0])
        return feeds

    def _makes(self, values: Sequence[str], feeds: dict[str, Array]) -> bool:
        try:
            self.runner.run(self.runner.variant(self.flat, shapes=values), self.runner.feeds(feeds))
        except TrialFailed:
            return False
        return True

    def _longer(self, kind: Axis) -> dict[str, Array]:
        """The feeds of a call with one more of what an axis counts."""
        longer = (kind, "total") if kind in ("past", "new") else (kind,)
        feeds = dict(self.feeds)
        for name, axes in self.axes.items():
            for axis, counted in enumerate(axes):
                if counted in longer and name in feeds and axis < feeds[name].ndim:
                    feeds[name] = _resized(feeds[name], axis, feeds[name].shape[axis] + 1)
        return feeds

    def _resized(self, source: SizeSource, size: int) -> dict[str, Array]:
        return {**self.feeds, source.name: _resized(self.feeds[source.name], source.axis, size)}

    def _describe(self, origins: Origins, suspect: Suspect, sources: list[SizeSource]) -> str:
        name = self.flat.label(suspect.value)
        sizes = origins.numbers(suspect.value) if suspect.is_number else origins.shape(suspect.value)
        size = (sizes or ())[suspect.axis]
        what = f"number {suspect.axis} of {name}" if suspect.is_number else f"axis {suspect.axis} of {name}"
        direct = [s for s in sources if not s.through and s.kind.startswith("fed") and s.name == suspect.value]
        held = [s for s in sources if not s.through and s.kind in ("constant", "weight")]
        words = "as fed" if direct else "in the graph" if held else describe_origin(size, sources)
        returned = {self.carried[s.name] for s in sources if s.kind == "fed length" and s.name in self.carried}
        return f"{what} is {size} {words}" + (f", as {sorted(returned)[0]}" if direct and returned else "")

    def _assign_source(
        self, origins: Origins, sourced: list[SourcedSuspect], frozen: str | None, clash: str
    ) -> tuple[FaultSource, str]:
        """Blame the feed where another fed length makes the call pass, else the graph."""
        if not clash:
            return "graph", f"no shape rule of {self.node.op} is known here"
        for suspect, sources in sourced:
            fed = [source for source in sources if source.kind == "fed length"]
            if suspect.fits is None or suspect.is_number or len(sources) != 1 or not fed or self._kind(fed[0]):
                continue
            size = fed[0].size + suspect.fits - (origins.shape(suspect.value) or ())[suspect.axis]
            if size >= 0 and self._makes(self.flat.ends, self._resized(fed[0], size)):
                return "feed", f"{clash}: with axis {fed[0].axis} of {fed[0].name} fed as {size} the call passes"
        if frozen is not None:
            return "graph", f"{clash}: the graph holds {frozen}"
        odd = [s for _, sources in sourced for s in sources if s.kind == "fed length" and self._odd(s)]
        odd.sort(key=lambda source: source.size > 0)  # an empty feed says more than one that is too long
        if odd:
            shape, returned = list(self.feeds[odd[0].name].shape), self.carried.get(odd[0].name)
            return "feed", f"{clash}: {odd[0].name} was fed as {shape}" + (f", {returned}" if returned else "")
        return (
            "graph",
            clash if self.node.op in NO_LENGTHS else f"{clash}, although the lengths that were fed fit together",
        )

    def _kind(self, source: SizeSource) -> Axis | None:
        """What a fed axis counts."""
        kinds = self.axes.get(source.name, ())
        return kinds[source.axis] if source.axis < len(kinds) else None

    def _odd(self, source: SizeSource) -> bool:
        """Whether a fed length differs from the lengths of other inputs that count the same."""
        kind = self._kind(source)
        sizes = self._others(source.name, kind) if kind is not None else []
        return bool(sizes) and source.size not in sizes

    def _others(self, name: str, kind: Axis) -> list[int]:
        """The lengths of other inputs that count the same: of tokens, or of caches where tokens have no such axis."""
        if kind not in ("batch", "past", "new", "total", "encoder"):
            return []
        tokens, caches = list[int](), list[int]()
        for other, axes in self.axes.items():
            for axis, counted in enumerate(axes):
                if counted == kind and other != name and other in self.feeds:
                    (caches if other in self.layers else tokens).append(self.feeds[other].shape[axis])
        return tokens or caches

    def _is_void(self, source: SizeSource) -> bool:
        """Whether a feed has no elements, and other inputs that count the same have some."""
        return source.kind == "fed length" and source.size == 0 and self._odd(source)

    def _names_void(self, sourced: list[SourcedSuspect]) -> bool:
        return any(self._is_void(source) for _, sources in sourced for source in sources)


def _resized(array: Array, axis: int, size: int) -> Array:
    """Another length of one axis: its entries over again, zeros where there are none."""
    length = array.shape[axis]
    if length:
        longer: Array = np.take(array, np.arange(size) % length, axis=axis)
        return longer
    return np.zeros([size if at == axis else n for at, n in enumerate(array.shape)], array.dtype)


def _moves(sources: list[SizeSource]) -> bool:
    return any(source.kind.startswith("fed") for source in sources)


def _find_frozen(sourced: list[SourcedSuspect]) -> str | None:
    """The constant or weight that makes the first size that no feed influences, or that is one factor of a size."""
    alone = [sources[0] for _, sources in sourced if sources and not _moves(sources)]
    parts = [source for _, sources in sourced for source in sources if source.kind == "constant" and source.size > 1]
    for source in (*alone, *parts):
        return f"{source.name} {source.text}".strip() if source.kind == "constant" else source.name
    return None
