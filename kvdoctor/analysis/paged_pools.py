"""Finds the pools of a paged cache: buffers of blocks, of which a table of the caller selects those of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvdoctor.analysis.dataflow.operators import outputs_with_content
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dataflow.walks import MOST_VISITED, Walk
from kvdoctor.analysis.port_roles import INTEGERS
from kvdoctor.contract import Dim
from kvdoctor.model.view import Declared

NO_TABLES = ("mask", "position")
"""Parts of the names of inputs that say which tokens are there, and where."""


@dataclass(eq=False, repr=False)
class PagedPools:
    """The inputs of one decode graph; `tokens` are those that carry tokens, `batches` the names of the batch axis."""

    dataflow: Dataflow
    inputs: Mapping[str, Declared]
    tokens: set[str]
    batches: set[Dim]

    def has(self, port: Declared) -> bool:
        """Whether a table selects what an attention sees of a buffer, along its first axis: blocks, not sequences."""
        if not port.shape or port.shape[0] in self.batches or not self._selected:
            return False
        walk = Walk([port.name], self.dataflow.budget, MOST_VISITED)
        for value in walk:
            for node, index in self.dataflow.flow.consumers.get(value, ()):
                by_table = node.op == "Gather" and index == 0 and node.input(1) in self._selected
                if by_table and node.number("axis", 0) == 0:
                    return True
                walk.add(output for output, _ in outputs_with_content(node, index))
        return False

    @cached_property
    def _selected(self) -> set[str]:
        """Values that depend on integers of two axes, as a table of blocks has them: no tokens, positions or masks."""
        alike = [self.inputs[name].shape for name in self.tokens]
        tables = {
            name
            for name, port in self.inputs.items()
            if port.dtype in INTEGERS
            and len(port.shape or ()) == 2
            and name not in self.tokens
            and port.shape not in alike
            and not any(word in name.lower() for word in NO_TABLES)
        }
        return self.dataflow.descent.reached_from(tables) if tables else set()
