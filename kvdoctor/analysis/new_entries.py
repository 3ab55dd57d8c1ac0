"""Finds the caches whose presents hold the new entries alone, which a loop appends to the past."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

from kvdoctor.analysis.dataflow.states import StateFlow
from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.analysis.slot_rules import pair_by_affix
from kvdoctor.contract import Dim
from kvdoctor.model.view import GraphView

WITH_PAST = {"past", "total"}
"""Words in the name of an axis that counts past and new tokens together."""

WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
INVENTED = re.compile(r"_dim_\d+$")
"""The end of a name that torch makes of an operator, an output and the number of the axis."""


@dataclass(eq=False, repr=False)
class NewEntries:
    """The presents of one decode graph; `tokens` are its inputs that carry tokens or embeddings."""

    view: GraphView
    tokens: set[str]

    def find_named(self, names: dict[str, SlotName], states: dict[str, StateFlow | None]) -> set[str]:
        """Pasts with a known name whose presents have the new entries alone; none where only some are like that.

        A present that is declared as long as past and new together, or one among others that grow, lost its past.
        """
        joined = {past: state for past, state in states.items() if state is not None and state.joined}
        found = {past for past, state in joined.items() if past in names and self._is_named(names[past], state)}
        return found if len(found) == len(joined) else set()

    def _is_named(self, name: SlotName, state: StateFlow) -> bool:
        if state.output is not None or state.growth != "grow":
            return False
        if name.present is not None and self._size_of(name.present, state.axis) in self._token_sizes:
            return True
        is_present = name.present == state.delta or name.present not in self.view.outputs
        return state.delta is not None and is_present and self.are_alone(state)

    def find_changed(self, states: dict[str, StateFlow]) -> dict[str, StateFlow]:
        """Unnamed pasts whose new entries are changed on their way out, each with the output that fits it.

        No output returns the entries that the attention sees. One that is declared as long as the tokens, and has the
        name or the place of the past, is what a loop appends; whether its content is right, a run shows.
        """
        joined = {past: state for past, state in states.items() if state.joined and state.growth == "grow"}
        lost = {past for past, state in joined.items() if state.output is None and state.delta is None}
        if not lost or any(state.output is not None for state in joined.values()):
            return {}
        known = {state.delta for state in joined.values() if state.delta is not None}
        fitting = {name for name in self.view.outputs if any(self._fits(past, joined[past], name) for past in lost)}
        pairs = pair_by_affix(list(joined), known | fitting) or self._pair_by_order(joined, known | fitting)
        return {past: replace(joined[past], delta=pairs[past]) for past in lost if pairs.get(past) in fitting - known}

    def _pair_by_order(self, joined: dict[str, StateFlow], presents: set[str]) -> dict[str, str]:
        """Pair pasts and presents in the order of the graph, if those that the dataflow pairs are in this order."""
        pasts = [name for name in self.view.inputs if name in joined]
        pairs = dict(zip(pasts, (name for name in self.view.outputs if name in presents), strict=False))
        known = {past: state.delta for past, state in joined.items() if state.delta is not None}
        return pairs if len(pasts) == len(presents) and known and known.items() <= pairs.items() else {}

    def _fits(self, past: str, state: StateFlow, output: str) -> bool:
        """Whether an output is declared like a past, but for its length, which is that of the tokens."""
        before, after = self.view.inputs[past], self.view.outputs[output]
        if before.shape is None or after.shape is None or len(before.shape) != len(after.shape):
            return False
        if before.dtype != after.dtype or self._size_of(output, state.axis) not in self._token_sizes:
            return False
        sizes = zip(before.shape, after.shape, strict=True)
        return all(one == other for at, (one, other) in enumerate(sizes) if at != state.axis)

    def are_alone(self, state: StateFlow | None) -> bool:
        """Whether an output of new entries is declared as long as the tokens, not as past and new together.

        No run can tell: the loop that appends them computes right logits in both cases. Only the name says what the
        exporter meant.
        """
        output = state.delta if state is not None else None
        size = self._size_of(output, state.axis) if state is not None and output else None
        if not isinstance(size, str) or size in self._token_sizes:
            return True
        if output and _counts_past(size, output):
            return False
        # A name that no other port has proves nothing: torch invents one for each axis.
        ports = (*self.view.inputs.values(), *self.view.outputs.values())
        return sum(size in (port.shape or ()) for port in ports) < 2

    def _size_of(self, output: str, axis: int | None) -> Dim:
        """The declared size of one axis of an output; None where nothing is declared."""
        port = self.view.outputs.get(output)
        shape = port.shape if port is not None else None
        return shape[axis] if shape is not None and axis is not None and axis < len(shape) else None

    @cached_property
    def _token_sizes(self) -> set[str]:
        """Names of the axes of the tokens."""
        sizes = (size for name in self.tokens for size in self.view.inputs[name].shape or ())
        return {size for size in sizes if isinstance(size, str)}


def _counts_past(size: str, output: str) -> bool:
    """Whether the name of an axis says that it counts the past too; the name of the output in it says nothing."""
    if INVENTED.search(size):
        return False
    return any(word.lower() in WITH_PAST for word in WORD.findall(size.replace(output, " ")))
