"""Finds states of a fixed size without a known name: an input, and the output of its type that returns it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvdoctor.analysis.axes import slot_axes
from kvdoctor.analysis.dataflow.operators import BLENDS
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dialects.dialect import CACHE_LIKE
from kvdoctor.analysis.stacks import FLOATS
from kvdoctor.contract import Dim, Slot, SlotKind
from kvdoctor.model.view import Declared

COUNTERS = ("int64", "int32")

Type = tuple[str, tuple[Dim, ...]]


@dataclass(eq=False, repr=False)
class ReplacedStates:
    """Finds such states among the ports of one graph that have no other role.

    `tokens` are the inputs that carry the new tokens, if it takes any.
    """

    flow: Dataflow
    inputs: Sequence[Declared]
    outputs: Sequence[Declared]
    tokens: set[str]
    has_other_slots: bool

    def read(self) -> Iterator[Slot]:
        """Read all of them: counters, and states of floats."""
        for kind, found in _group_by_type(self.inputs).items():
            given = _group_by_type(self.outputs).get(kind, [])
            if kind[0] in COUNTERS and len(kind[1]) < 2:
                yield from self._read_counters(found, {port.name for port in given})
            elif kind[0] in FLOATS:
                for past, present in self._pair([port.name for port in found if self._is_likely(port)], given):
                    yield self._make_slot(next(port for port in found if port.name == past), present)

    def _is_likely(self, port: Declared) -> bool:
        """Whether an input may be a state: at most one of its sizes, the batch, is open.

        Beside other slots it must also be named like a cache or belong to a graph of tokens: the inputs and outputs of
        pipeline stages are hidden states.
        """
        shape = port.shape or ()
        likely = not self.has_other_slots or CACHE_LIKE.match(port.name) or (self.tokens and len(shape) > 2)
        return len(shape) > 1 and bool(likely) and sum(not isinstance(size, int) for size in shape) < 2

    def _pair(self, pasts: list[str], given: list[Declared]) -> Iterator[tuple[str, str]]:
        """Pair the past that is used first with the present that is computed first, and so on.

        A past that is kept in part comes first: it is blended with new values into its present (of an LSTM the cell,
        which is used last and computed first). Layers follow one another, so both are in the order of layers. Where a
        present does not depend on its past, each past gets the nearest present that does.
        """
        free, pasts = {port.name for port in given}, sorted(pasts, key=self.flow.descent.first_use)
        blended: dict[str, str] = {}
        for past in pasts:
            present = self.flow.descent.find_update(past, free, BLENDS) if free else None
            if present is not None:
                free.discard(present)
                blended[past] = present
        yield from blended.items()
        pasts = [past for past in pasts if past not in blended]
        presents = [port.name for port in given if port.name in free]
        if len(pasts) == len(presents):
            pairs = list(zip(pasts, sorted(presents, key=self.flow.descent.computed_at), strict=True))
            if all(self.flow.descent.find_update(past, {present}) for past, present in pairs):
                yield from pairs
                return
        for past in pasts:
            present = self.flow.descent.find_update(past, free) if free else None
            if present is not None:
                free.discard(present)
                yield past, present

    def _read_counters(self, found: list[Declared], free: set[str]) -> Iterator[Slot]:
        """Numbers that are returned increased by the number of new tokens."""
        for port in found:
            present = self.flow.descent.find_count(port.name, free, self.tokens)
            if present is not None:
                free.discard(present)
                yield self._make_slot(port, present, "counter")

    def _make_slot(self, port: Declared, present: str, kind: SlotKind | None = None) -> Slot:
        shape = port.shape or ()
        state = self.flow.state(port.name, len(shape))
        kind = kind or ("conv-state" if state.use is not None and state.use.part == "conv" else "recurrent-state")
        return Slot(
            kind=kind,
            layer=-1,  # until the slots without a name are numbered
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


def _group_by_type(ports: Sequence[Declared]) -> dict[Type, list[Declared]]:
    found: dict[Type, list[Declared]] = {}
    for port in ports:
        if port.shape is not None:
            found.setdefault((port.dtype, port.shape), []).append(port)
    return found
