"""Whole numbers that a graph computes of constants alone: of the size of a table, of a product of numbers.

An exporter writes the end of a table as `Shape(table)[0] - 1` where another writes 99. The rules of an abstract run
compute it (abstract_run/graph_run.py); no weights are read for it.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.proto import TensorProto

if TYPE_CHECKING:
    from kvdoctor.analysis.abstract_run.values import Abstract

MOST_NODES = 2_000
"""Nodes that are computed for one graph, at most: the numbers behind them are unknown."""
MOST_DEEP = 32
"""Nodes behind one another between a number and the constants that it is computed of, at most."""
MOST_LISTED = 64
"""Elements of a value that is read as numbers; a larger one is data."""


class FixedNumbers:
    """The numbers of the values of one flow that no input has a part in; each is computed once."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._known: dict[str, Abstract | None] = {}

    def of(self, name: str) -> Sequence[int]:
        """The one number of a value, a float rounded down; none where it is not known, or has several.

        Rows of positions are computed as well: where one ends is the capacity of a buffer.
        """
        if name in self.flow.constants or name not in self.flow.fixed:
            return ()
        value = self._compute(name, MOST_DEEP)
        found = value.numbers if value is not None else None
        if found is None or found.size != 1:
            return ()
        return tuple(math.floor(number) for number in found.ravel().tolist() if math.isfinite(number))

    def _compute(self, name: str, left: int) -> "Abstract | None":
        """A value; None where it is not known. `left` is the number of nodes that may still stand behind it."""
        if name not in self._known:
            self._known[name] = None  # of a value that depends on itself
            tensor, node = self.flow.constants.get(name), self.flow.producers.get(name)
            if tensor is not None:
                self._known[name] = _read(tensor)
            elif node is not None and name in self.flow.fixed and left and len(self._known) < MOST_NODES:
                given = [self._compute(one, left - 1) if one else None for one in node.inputs]
                self._known[name] = _apply(node, given, name)
        return self._known[name]


# What computes is loaded here, with numpy: most graphs compare lengths with constants, or with other lengths.
def _read(tensor: TensorProto) -> "Abstract":
    """A constant: its numbers where it is small, the shape of any other."""
    from kvdoctor.analysis.abstract_run.values import Abstract, read_tensor

    small = math.prod(tensor.dims) <= MOST_LISTED
    return read_tensor(tensor, "") if small else Abstract(tuple(tensor.dims))


def _apply(node: FlatNode, given: "list[Abstract | None]", output: str) -> "Abstract | None":
    """One output of a node."""
    import numpy as np

    from kvdoctor.analysis.abstract_run.graph_run import ANY_NUMPY, RULES
    from kvdoctor.analysis.abstract_run.reading import Reading
    from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun

    rule = RULES.get(node.op)
    if rule is None:
        return None
    inputs = [value or UNKNOWN if name else None for name, value in zip(node.inputs, given, strict=True)]
    try:
        with np.errstate(all="ignore"):
            made = rule(Reading(node.proto, inputs, np.random.default_rng(0)))
    except (CannotRun, *ANY_NUMPY):
        return None
    return dict(zip(node.outputs, [made] if isinstance(made, Abstract) else made, strict=False)).get(output)
