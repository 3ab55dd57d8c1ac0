"""States of a fixed size that no name tells: an input, and the output of the same type that it comes back as."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvdoctor.axes import slot_axes
from kvdoctor.contract import Dim, Slot, SlotKind
from kvdoctor.dataflow import Dataflow
from kvdoctor.dialects import CACHE_LIKE
from kvdoctor.graph import Declared
from kvdoctor.stacks import FLOATS

COUNTERS = ("int64", "int32")

Type = tuple[str, tuple[Dim, ...]]


@dataclass
class ReplacedStates:
    """Finds them among the ports of one graph that nothing else claims.

    `tokens` are the inputs that carry the new tokens, if it takes any; `beside` says that it has other slots.
    """

    flow: Dataflow
    inputs: Sequence[Declared]
    outputs: Sequence[Declared]
    tokens: set[str]
    beside: bool

    def read(self) -> Iterator[Slot]:
        """All of them: counters, and states of floats."""
        for kind, found in self._by_type(self.inputs).items():
            given = self._by_type(self.outputs).get(kind, [])
            if kind[0] in COUNTERS and len(kind[1]) < 2:
                yield from self._counters(found, {port.name for port in given})
            elif kind[0] in FLOATS:
                for past, present in self._paired([port.name for port in found if self._likely(port)], given):
                    yield self._slot(next(port for port in found if port.name == past), present)

    def _by_type(self, ports: Sequence[Declared]) -> dict[Type, list[Declared]]:
        found: dict[Type, list[Declared]] = {}
        for port in ports:
            if port.shape is not None:
                found.setdefault((port.dtype, port.shape), []).append(port)
        return found

    def _likely(self, port: Declared) -> bool:
        """Beside other slots only what is named so, or stands in a graph of tokens: stages pass hidden states on.

        Of a state only the batch may vary.
        """
        shape = port.shape or ()
        likely = not self.beside or CACHE_LIKE.match(port.name) or (self.tokens and len(shape) > 2)
        return len(shape) > 1 and bool(likely) and sum(not isinstance(size, int) for size in shape) < 2

    def _paired(self, pasts: list[str], given: list[Declared]) -> Iterator[tuple[str, str]]:
        """The first that is used with the first that is made, and so on, if each depends on its own; else the nearest.

        Layers come one after the other, so that of two states the one that is used first is made first.
        """
        presents = [port.name for port in given]
        free, pasts = set(presents), sorted(pasts, key=self.flow.descent.used_first)
        if len(pasts) == len(presents):
            pairs = list(zip(pasts, sorted(presents, key=self.flow.descent.made_last), strict=True))
            if all(self.flow.descent.updated(past, {present}) for past, present in pairs):
                yield from pairs
                return
        for past in pasts:
            present = self.flow.descent.updated(past, free) if free else None
            if present is not None:
                free.discard(present)
                yield past, present

    def _counters(self, found: list[Declared], free: set[str]) -> Iterator[Slot]:
        """Numbers that come back with something added to them."""
        for port in found:
            present = self.flow.descent.counted(port.name, free, self.tokens)
            if present is not None:
                free.discard(present)
                yield self._slot(port, present, "counter")

    def _slot(self, port: Declared, present: str, kind: SlotKind | None = None) -> Slot:
        shape = port.shape or ()
        state = self.flow.state(port.name, len(shape))
        kind = kind or ("conv-state" if state.use is not None and state.use.part == "conv" else "recurrent-state")
        return Slot(
            kind=kind,
            layer=-1,
            part="state",
            dtype=port.dtype,
            shape=shape,
            axes=slot_axes(shape, kind, "replace", None, state),
            past=port.name,
            present=present,
            filled_by=None,
            carry="feed-back",
            growth="replace",
            continues_as=present,
        )
