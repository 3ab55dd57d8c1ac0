"""Pasts that a graph changes by arithmetic on the way to an output: scaled, masked, added to.

No output returns the content of such a past, so the dataflow alone does not pair it. The output that depends on it
through a Concat, has its type and shape but for the length, and returns no other past is its present. Whether the loop
can use that is what a run shows.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.dataflow.states import Dataflow, StateFlow
from kvdoctor.analysis.stacks import FLOATS
from kvdoctor.model.view import Declared


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
            state = flow.computed_state(port.name, len(port.shape)) if known is None or not _leaves(known) else None
        if state is not None and state.output not in taken and _fits(port, outputs[state.output or ""], state.axis):
            computed[port.name] = state
    times = Counter(state.output for state in computed.values())
    return {past: state for past, state in computed.items() if times[state.output] == 1}


def _leaves(state: StateFlow) -> bool:
    """Whether an output returns the state or the entries that join it."""
    return state.output is not None or state.delta is not None


def _fits(past: Declared, present: Declared, axis: int | None) -> bool:
    """Whether past and present are declared alike but for the axis along which entries join."""
    before, after = past.shape or (), present.shape or ()
    if past.dtype != present.dtype or len(before) != len(after):
        return False
    pairs = (
        (as_number(one), as_number(other))
        for at, (one, other) in enumerate(zip(before, after, strict=True))
        if at != axis
    )
    return all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int))
