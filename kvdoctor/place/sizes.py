"""What came into a failing node, which of its sizes do not fit, where those come from, and whom that is laid to."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kvdoctor.contract import Axis
from kvdoctor.graph import ELEMENT_TYPES
from kvdoctor.place.bench import Bench, Known, TrialFailed
from kvdoctor.place.conflicts import Suspect, conflict, emptied
from kvdoctor.place.flat import Flat, FlatNode
from kvdoctor.place.origins import Origins, Source
from kvdoctor.place.words import layer_in, node_of, origin_words, scope_of
from kvdoctor.trace import Blame, Place, Seen

if TYPE_CHECKING:
    from kvdoctor.calls import Array

MOST_PROOFS = 4
"""Fed lengths of one axis that are changed to see whether the axis moves with them."""

SHORT = 64

Told = tuple[Suspect, list[Source]]
"""A size that does not fit, and where it comes from."""


@dataclass
class Sizes:
    """A failing node in its graph and the call it fails in. `axes` are what the axes of its inputs count.

    `carried` says of fed presents which step returned them, `layers` of pasts to which layer they belong.
    """

    bench: Bench
    flat: Flat
    source: Path
    node: FlatNode
    feeds: "Mapping[str, Array]"
    axes: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[str, int] = field(default_factory=dict)

    def place(self, feeds: Path) -> Place:
        """Everything that is known of the place.

        Raises:
            NoPlace: the worker died, or time is up.
        """
        known = self._known(feeds)
        origins = Origins(self.flat, known, {name: tuple(array.shape) for name, array in self.feeds.items()})
        suspects, clash = conflict(self.node, origins)
        if not suspects:
            suspects = [
                Suspect(name, axis) for name in self._computed() for axis in range(len(origins.shape(name) or ()))
            ]
        told = [(suspect, self._proved(suspect, self._sources(origins, suspect))) for suspect in suspects]
        if not clash:
            told = [(suspect, sources) for suspect, sources in told if _moves(sources)]
        elif not self._names_void(told):
            told += self._emptied(origins)
        made = [name for name in self.node.makes if name]
        empty = bool(clash) and self._names_void(told) and self._makes(made, self._filled)
        frozen = _frozen(told) if clash and not empty else None
        blame, words = self._blame(origins, told, frozen, clash)
        return Place(
            node=node_of(self.node),
            scope=scope_of(self.node),
            layer=layer_in(self.node, self.layers),
            shapes={self.flat.label(name): self._seen(known, name) for name in self.node.proto.input if name},
            provenance=tuple(dict.fromkeys(self._line(origins, *one) for one in told)),
            frozen_by=frozen,
            blame=blame,
            words=words,
        )

    def _emptied(self, origins: Origins) -> list[Told]:
        """Axes of length 0 that come from a feed without elements: what does not fit may have come of that."""
        empty = emptied(self.node, origins)
        told = [(suspect, self._proved(suspect, self._sources(origins, suspect))) for suspect in empty]
        return [one for one in told if self._names_void([one])]

    def _computed(self) -> list[str]:
        return [n for n in dict.fromkeys(self.node.reads) if n in self.flat.producers or n in self.feeds]

    def _known(self, feeds: Path) -> Known:
        reads = [name for name in self.node.reads if name in self.flat.producers]
        before = [name for node in self.flat.before(reads) for name in node.makes]
        known = self.bench.known(self.flat, self.source, before, feeds, reads) if before else Known()
        for name, array in self.feeds.items():
            if array.dtype.kind in "iub" and array.size <= SHORT:
                known.numbers[name] = tuple(int(number) for number in array.ravel())
        return known

    def _seen(self, known: Known, name: str) -> Seen:
        if name in known.shapes:
            return known.seen(name)
        if name in self.feeds:
            kind = {"float32": "float", "float64": "double"}.get(
                self.feeds[name].dtype.name, self.feeds[name].dtype.name
            )
            return Seen(kind, tuple(self.feeds[name].shape))
        tensor = self.flat.constants.get(name)
        return Seen("?", ()) if tensor is None else Seen(ELEMENT_TYPES.get(tensor.data_type, "?"), tuple(tensor.dims))

    @staticmethod
    def _sources(origins: Origins, suspect: Suspect) -> list[Source]:
        way = origins.of_number if suspect.is_number else origins.of_axis
        return way(suspect.value, suspect.axis)

    def _proved(self, suspect: Suspect, sources: list[Source]) -> list[Source]:
        """The sources without the fed lengths that the axis does not move with when another length is fed."""
        if suspect.is_number or suspect.value not in self.flat.producers:
            return sources
        fed = [source for source in sources if source.kind == "fed length"]
        void = [source for source in fed if self._is_void(source)]
        other = [source for source in fed if source not in void][:MOST_PROOFS]
        refuted = [source for source in other if self._moved(suspect, source) is False]
        if void and self._moves_with(suspect, self._filled) is False:
            refuted += void
        return [source for source in sources if source not in refuted]

    def _moved(self, suspect: Suspect, source: Source) -> bool | None:
        """Whether an axis moves with a fed length; None where the graph does not get that far with another one.

        That length alone is changed first, then all that a longer past, more tokens, ... would change.
        """
        kind = self._kind(source)
        for feeds in (self._resized(source, source.size + 1), self._longer(kind) if kind else None):
            if feeds is not None and (moved := self._moves_with(suspect, feeds)) is not None:
                return moved
        return None

    def _moves_with(self, suspect: Suspect, feeds: "dict[str, Array]") -> bool | None:
        """Whether an axis has another length on other feeds; None where the graph does not get that far with them."""
        variant = self.bench.variant(self.flat, self.source, shapes=[suspect.value])
        with contextlib.suppress(TrialFailed):
            after = self.bench.run(variant, self.bench.feeds(feeds))[suspect.value]["values"]
            before = self.bench.run(variant, self.bench.feeds(self.feeds))[suspect.value]["values"]
            return bool(after[suspect.axis] != before[suspect.axis])
        return None

    @cached_property
    def _filled(self) -> "dict[str, Array]":
        """The feeds, those without elements as long as what else counts the same: all, since each alone empties it."""
        feeds = dict(self.feeds)
        for name, axes in self.axes.items():
            for axis, kind in enumerate(axes):
                void = name in feeds and axis < feeds[name].ndim and feeds[name].shape[axis] == 0
                if void and (sizes := [size for size in self._others(name, kind) if size]):
                    feeds[name] = _resized(feeds[name], axis, sizes[0])
        return feeds

    def _makes(self, values: Sequence[str], feeds: "dict[str, Array]") -> bool:
        """Whether the graph comes as far as some values on other feeds."""
        try:
            self.bench.run(self.bench.variant(self.flat, self.source, shapes=values), self.bench.feeds(feeds))
        except TrialFailed:
            return False
        return True

    def _longer(self, kind: Axis) -> "dict[str, Array]":
        """The feeds of a call with one more of what an axis counts."""
        longer = (kind, "total") if kind in ("past", "new") else (kind,)
        feeds = dict(self.feeds)
        for name, axes in self.axes.items():
            for axis, counted in enumerate(axes):
                if counted in longer and name in feeds and axis < feeds[name].ndim:
                    feeds[name] = _resized(feeds[name], axis, feeds[name].shape[axis] + 1)
        return feeds

    def _resized(self, source: Source, size: int) -> "dict[str, Array]":
        return {**self.feeds, source.name: _resized(self.feeds[source.name], source.axis, size)}

    def _line(self, origins: Origins, suspect: Suspect, sources: list[Source]) -> str:
        name = self.flat.label(suspect.value)
        sizes = origins.numbers(suspect.value) if suspect.is_number else origins.shape(suspect.value)
        size = (sizes or ())[suspect.axis]
        what = f"number {suspect.axis} of {name}" if suspect.is_number else f"axis {suspect.axis} of {name}"
        direct = [s for s in sources if not s.through and s.kind.startswith("fed") and s.name == suspect.value]
        held = [s for s in sources if not s.through and s.kind in ("constant", "weight")]
        words = "as fed" if direct else "in the graph" if held else origin_words(size, sources)
        returned = {self.carried[s.name] for s in sources if s.kind == "fed length" and s.name in self.carried}
        return f"{what} is {size} {words}" + (f", as {sorted(returned)[0]}" if direct and returned else "")

    def _blame(self, origins: Origins, told: list[Told], frozen: str | None, clash: str) -> tuple[Blame, str]:
        """The feed where another fed length makes the call pass, else the graph."""
        if not clash:
            return "graph", f"no rule is known here for what {self.node.op} takes"
        for suspect, sources in told:
            fed = [source for source in sources if source.kind == "fed length"]
            if suspect.fits is None or suspect.is_number or len(sources) != 1 or not fed or self._kind(fed[0]):
                continue
            size = fed[0].size + suspect.fits - (origins.shape(suspect.value) or ())[suspect.axis]
            if size >= 0 and self._makes(self.flat.ends, self._resized(fed[0], size)):
                return "feed", f"{clash}: with axis {fed[0].axis} of {fed[0].name} fed as {size} the call passes"
        if frozen is not None:
            return "graph", f"{clash}: the graph holds {frozen}"
        odd = [s for _, sources in told for s in sources if s.kind == "fed length" and self._odd(s)]
        odd.sort(key=lambda source: source.size > 0)  # what has no elements says more than what has too many
        if odd:
            shape, returned = list(self.feeds[odd[0].name].shape), self.carried.get(odd[0].name)
            return "feed", f"{clash}: {odd[0].name} was fed as {shape}" + (f", {returned}" if returned else "")
        return "graph", f"{clash}, and the lengths that were fed agree with one another"

    def _kind(self, source: Source) -> Axis | None:
        """What a fed axis counts."""
        kinds = self.axes.get(source.name, ())
        return kinds[source.axis] if source.axis < len(kinds) else None

    def _odd(self, source: Source) -> bool:
        """Whether a length that was fed is another one than that of what else counts the same."""
        kind = self._kind(source)
        sizes = self._others(source.name, kind) if kind is not None else []
        return bool(sizes) and source.size not in sizes

    def _others(self, name: str, kind: Axis) -> list[int]:
        """The lengths of what else counts the same: of the tokens, or where they have no such axis of the caches."""
        if kind not in ("batch", "past", "new", "total", "encoder"):
            return []
        tokens, caches = list[int](), list[int]()
        for other, axes in self.axes.items():
            for axis, counted in enumerate(axes):
                if counted == kind and other != name and other in self.feeds:
                    (caches if other in self.layers else tokens).append(self.feeds[other].shape[axis])
        return tokens or caches

    def _is_void(self, source: Source) -> bool:
        """Whether a feed has no elements, and what else counts the same has some."""
        return source.kind == "fed length" and source.size == 0 and self._odd(source)

    def _names_void(self, told: list[Told]) -> bool:
        return any(self._is_void(source) for _, sources in told for source in sources)


def _resized(array: "Array", axis: int, size: int) -> "Array":
    """Another length of one axis: its entries over again, zeros where there are none."""
    import numpy as np

    length = array.shape[axis]
    if length:
        longer: Array = np.take(array, np.arange(size) % length, axis=axis)
        return longer
    return np.zeros([size if at == axis else n for at, n in enumerate(array.shape)], array.dtype)


def _moves(sources: list[Source]) -> bool:
    return any(source.kind.startswith("fed") for source in sources)


def _frozen(told: list[Told]) -> str | None:
    """The constant or weight behind the first size that nothing fed has a part in, or that is a part of a size."""
    alone = [sources[0] for _, sources in told if sources and not _moves(sources)]
    parts = [source for _, sources in told for source in sources if source.kind == "constant" and source.size > 1]
    for source in (*alone, *parts):
        return f"{source.name} {source.text}".strip() if source.kind == "constant" else source.name
    return None
