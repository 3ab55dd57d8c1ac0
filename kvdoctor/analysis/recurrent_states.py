"""Pairs inputs and outputs that neither a name nor the content pairs: states that are replaced, and changed pasts.

A state of a fixed size without a known name is an input, and the output of its type that returns it.

A graph may change a past by arithmetic on the way to an output: scaled, masked, added to. No output returns the content
of such a past. The output that depends on it through a Concat, has its type and shape but for the length, and returns
no other past is its present. Whether the loop can use that is what a run shows.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvdoctor.analysis.axes import slot_axes, unequal_axes
from kvdoctor.analysis.dataflow.axis_walks import DeclaredSizes
from kvdoctor.analysis.dataflow.states import Dataflow, StateFlow
from kvdoctor.analysis.dataflow.walks import BLENDS
from kvdoctor.analysis.dialects.dialect import CACHE_LIKE
from kvdoctor.analysis.port_roles import INTEGERS, InputFlow
from kvdoctor.analysis.slot_rules import INVENTED, pair_by_name, share_words
from kvdoctor.analysis.stacks import FLOATS
from kvdoctor.contract import Slot, SlotKind
from kvdoctor.model.view import Declared


def is_convolved(dataflow: Dataflow, name: str, rank: int) -> bool:
    """Whether the entries of an input and new ones are added up along their axis, each with a weight of its own."""
    for value, path in dataflow.walk(name, rank, computed=True):
        takers = dataflow.flow.consumers.get(value, ()) if path.join is not None and path.axes is not None else ()
        if sum(node.has("pick") for node, _ in takers) > 1:
            return True
        if any(
            n.has("reduce") and path.axis not in (dataflow.axes.axes_after(n, i, path.axes) or ()) for n, i in takers
        ):
            return True
    return False


def find_masked_axis(dataflow: Dataflow, name: str, rank: int) -> int | None:
    """The axis of an input along which it is multiplied by a mask, or selected by one, before it is written."""
    declared = tuple(dataflow.shapes.get(name) or ())
    for value, path in dataflow.walk(name, rank):
        for node, index in dataflow.flow.consumers.get(value, ()) if (path.join, path.place) == (None, None) else ():
            if not node.has("select") and not node.has("multiply"):
                continue
            mask = node.input(0 if node.has("select") else 1 - index)
            sizes = DeclaredSizes(dataflow.flow, {**dataflow.shapes}).shape(mask) or ()
            axes = path.axes or tuple(declared.index(size) if declared.count(size) == 1 else -1 for size in sizes)
            places = [(axes[at - len(sizes)], size) for at, size in enumerate(sizes) if at >= len(sizes) - len(axes)]
            for narrow in ((1,), (1, None)):  # each row may have a mask of its own
                found = [axis for axis, size in places if size not in narrow]
                if len(found) == 1 and found[0] in range(rank):
                    return found[0]
    return None


@dataclass(eq=False, repr=False)
class ReplacedStates:
    """Finds such states among the ports of one graph that have no other role.

    `tokens` are the inputs that carry the new tokens, if it takes any; `roles` tells those of all inputs.
    """

    roles: InputFlow
    inputs: Sequence[Declared]
    outputs: Sequence[Declared]
    tokens: set[str]
    has_other_slots: bool

    @property
    def flow(self) -> Dataflow:
        """The dataflow of the graph."""
        return self.roles.dataflow

    def read(self) -> Iterator[Slot]:
        """Read all of them: counters, and states of fixed size."""
        for kind in dict.fromkeys(port.fixed for port in self.inputs):
            found = [port for port in self.inputs if port.fixed == kind]
            given = {port.name for port in self.outputs if _known_by(found[0], port).fixed == kind}
            if kind is None or not given:
                continue
            if kind[0] in INTEGERS and len(kind[1]) < 2:
                yield from self._read_counters(found, given)
                continue
            if kind[0] not in FLOATS:
                tokens = {name for one in self.tokens for name, _ in self.flow.outputs_reached(one, 2)}
                given = {name for port in found for name in given & (self._returned(port) | tokens)}
            likely = [port for port in found if given and self._is_likely(port, given)]
            takers = self.flow.flow.consumers
            likely.sort(key=lambda port: min((node.index for node, _ in takers.get(port.name, ())), default=-1))
            named, proven = pair_by_name([port.name for port in likely], given), self._pair(likely, given)
            layers = _number_by_name([port.name for port in likely])
            for port in likely:
                present = named.get(port.name, None if named else proven.get(port.name))
                if present is not None:
                    is_own = len(proven) < len(likely) or self._blends(port.name, {present})
                    sure = present if is_own else proven[port.name]
                    yield replace(self._make_slot(port, present, sure), layer=layers.get(port.name, -1))

    def _is_likely(self, port: Declared, given: set[str]) -> bool:
        """Whether an input may be a state: at most one of its sizes, the batch, is open.

        With other slots it must also be named like a cache or like an output, belong to a graph of tokens, or be
        returned: the inputs and outputs of pipeline stages are hidden states, and one row for all tokens may be a
        speaker.
        """
        shape = port.shape or ()
        if len(shape) < 2 or sum(not isinstance(size, int) for size in shape) > 1:
            return False
        if port.dtype not in FLOATS or not self.has_other_slots or CACHE_LIKE.match(port.name):
            return True
        if not self.tokens or len(shape) > 2 or given & self._returned(port):
            return bool(self.tokens)
        return self._blends(port.name, given) or any(share_words(port.name, name) for name in given)

    def _blends(self, past: str, given: set[str]) -> bool:
        """Whether a loop carries an input to one of some outputs, or new values are added to it there."""
        descent = self.flow.descent
        return bool(descent.find_carried(past, given) or descent.find_update(past, given, BLENDS))

    def _returned(self, port: Declared) -> set[str]:
        """The outputs that hold the content of an input, alone or among new entries."""
        return {output for output, _ in self.flow.outputs_reached(port.name, len(port.shape or ()))}

    @cached_property
    def _reached(self) -> set[str]:
        """All values that depend on the content of the tokens."""
        return self.flow.descent.reached_from(self.tokens)

    def _pair(self, ports: list[Declared], given: set[str]) -> dict[str, str]:
        """Pair the past that is used first, the first of `ports`, with the present that is computed first, and so on.

        A past that a loop carries, or that is partly retained, comes first: it is blended with new values into its
        present (of an LSTM the cell, which is used last and computed first). Layers follow one another, so both are in
        the order of layers: no past reaches the present of a layer before its own. Its own may not depend on it: of a
        shift by one token it is the new token. Where the numbers differ, each past gets the nearest present.
        """
        descent, free, pairs = self.flow.descent, set(given), dict[str, str]()
        pasts = [port.name for port in ports]

        def take(find: Callable[[str], str | None]) -> list[str]:
            """Pair each past that is left with the present that is found for it; gives those that are left then."""
            for past in [past for past in pasts if past not in pairs] if free else ():
                present = find(past) if free else None
                if present is not None:
                    free.discard(present)
                    pairs[past] = present
            return [past for past in pasts if past not in pairs]

        take(lambda past: descent.find_carried(past, free))
        take(self._pair_in_order(take(lambda past: descent.find_update(past, free, BLENDS)), free).get)
        rest = take(lambda past: descent.find_update(past, free))
        return pairs | dict(zip(rest, free, strict=True)) if len(rest) == len(free) == 1 else pairs

    def _pair_in_order(self, pasts: list[str], given: set[str]) -> dict[str, str]:
        """Each past with the present in its place; none where one reaches a present before its own."""
        descent, presents = self.flow.descent, sorted(given, key=self.flow.descent.computed_at)
        if len(pasts) != len(presents) or len({*map(descent.computed_at, presents)}) != len(presents):
            return {}
        values = [self.flow.flow.results[present] for present in presents]
        reached = [descent.reached_from({past}) for past in pasts]
        crossed = any(value in reached[i] for i in range(len(pasts)) for value in values[:i])
        return {} if crossed else dict(zip(pasts, presents, strict=True))

    def _read_counters(self, found: list[Declared], free: set[str]) -> Iterator[Slot]:
        """Numbers that are returned increased by the number of new tokens.

        Where positions may need one and the graph returns another number, that is a counter with a fault.
        """
        for port in found:
            present = self.flow.descent.find_count(port.name, free, self.tokens)
            others = {name for name in free if self.flow.flow.results[name] not in self._reached}
            role = self.roles.find_role(port.name, set())
            if role is None and len(self.flow.flow.consumers.get(port.name, ())) < 2:  # returned, and not used
                others -= self._returned(port)
            if present is None and (role is None or role[0] == "past_length"):
                likely = [port.name for port in found]
                present = next(iter(others)) if len(others) == 1 else pair_by_name(likely, others).get(port.name)
            if present is not None:
                free.discard(present)
                yield self._make_slot(port, present, present, "counter")

    def _make_slot(self, port: Declared, present: str, proven: str, kind: SlotKind | None = None) -> Slot:
        shape = port.shape or ()
        state = self.flow.state(port.name, len(shape))
        ways = [path for output, path in self.flow.outputs_reached(port.name, len(shape)) if output == present]
        grows = any(path.join is not None for path in ways) and self.flow.flow.results[present] not in self._reached
        if kind is None and self.tokens and grows:
            kind = "counter"  # a mask of the entries of a window: it depends on the number of tokens alone
        if kind is None:
            is_conv = state.use is not None and state.use.part == "conv"
            is_conv = is_conv or is_convolved(self.flow, port.name, len(shape))
            kind = "conv-state" if is_conv else "recurrent-state"
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
            continues_as=proven,
        )


def _known_by(past: Declared, port: Declared) -> Declared:
    """An output with the sizes of a past in place of names that the exporter invented."""
    shape, given = past.shape or (), port.shape or ()
    if len(given) != len(shape):
        return port
    pairs = zip(given, shape, strict=True)
    known = (own if isinstance(size, str) and INVENTED.search(size) else size for size, own in pairs)
    return replace(port, shape=tuple(known))


def _number_by_name(names: list[str]) -> dict[str, int]:
    """The layer of each name by its number, where each has one and all numbers from the first one on come as often."""
    found = {name: re.findall("[0-9]{1,5}", name) for name in names}
    if any(len(numbers) != 1 for numbers in found.values()):
        return {}
    layers = Counter(int(number) for (number,) in found.values())
    first = min(layers, default=0)
    complete = first < 2 and sorted(layers) == list(range(first, first + len(layers))) and len({*layers.values()}) == 1
    return {name: int(number) - first for name, (number,) in found.items()} if complete else {}


def find_computed(
    flow: Dataflow,
    inputs: Iterable[Declared],
    found: Mapping[str, StateFlow | None],
    outputs: Mapping[str, Declared],
    named: Iterable[str | None],
) -> dict[str, StateFlow]:
    """Find such pasts among inputs without a known name, each with its present.

    `found` are the states that the dataflow pairs, `named` the presents of pasts with a known name.
    """
    returned = {output for state in found.values() if state for output in (state.output, state.delta)}
    taken, computed = returned.union(named), dict[str, StateFlow]()
    for port in inputs:
        state, known = None, found.get(port.name)
        if port.dtype in FLOATS and port.shape is not None and len(port.shape) >= 3:
            is_open = known is None or (known.output is None and known.delta is None)
            state = flow.computed_state(port.name, len(port.shape)) if is_open else None
        if state is not None and state.output not in taken:
            unequal = unequal_axes(port, outputs[state.output or ""])
            computed |= {port.name: state} if unequal is not None and unequal <= {state.axis} else {}
    times = Counter(state.output for state in computed.values())
    return {past: state for past, state in computed.items() if times[state.output] == 1}
