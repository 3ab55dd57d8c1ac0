"""The part that each input and output plays besides the cache: by name first, by what the graph does with it else."""

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvdoctor.axes import as_number
from kvdoctor.cache_operators import ports_of
from kvdoctor.contract import Axis, Dim, Port, Role
from kvdoctor.dataflow import Dataflow
from kvdoctor.dataflow.operators import KEEPS, MIXES, PRODUCTS
from kvdoctor.dialects import RoleRule, axes, inputs
from kvdoctor.graph import Declared, GraphView

INTEGERS = ("int64", "int32")
LOOKUPS = {"Gather": 1, "GatherBlockQuantized": 1, "EmbedLayerNormalization": 0}
ROTATIONS = {"RotaryEmbedding": 1, "Cos": 0, "Sin": 0}
SUMS = {"CumSum": 0}
LOGIC = {
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "And",
    "Or",
    "Not",
    "CumSum",
    "ReduceMax",
    "Trilu",
}
RANGES = {"Range": 0}
CHOOSES = {"Clip": (0,), "Where": (1, 2), "Max": (0, 1)}
LENGTHS = ("last_index", "past_length", "total_length")
RECKONED = KEEPS.keys() | MIXES | PRODUCTS.keys() | LOGIC
WHOLE = {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Flatten"}
"""Operators that pass an input on as it is, not a part of it."""
WRITTEN_AT = {"ScatterND": 1, "ScatterElements": 1, "Scatter": 1}
COUNTS = ("past_length", "write_index")
FLOATS = ("float", "float16", "bfloat16", "double")
KEPT_PARTS = ("key", "value", "key-value")
NEAR = 600
FEW_ROWS = 8
"""A table of fewer rows holds kinds of tokens (segments, languages), not positions."""


def ruled(port: Declared, rules: Iterable[RoleRule]) -> Port | None:
    """A port as the first fitting rule has it."""
    rank = len(port.shape) if port.shape is not None else None
    open_axis = port.shape is not None and len(port.shape) == 1 and isinstance(as_number(port.shape[0]), str)
    fitting = (rule for rule in rules if rule.fits(port.name, port.dtype, rank))
    # A count of tokens has one element: `pos` of int64[new] is none.
    rule = next((rule for rule in fitting if not (open_axis and rule.role in COUNTS and rule.order == "1")), None)
    if rule is None:
        return None
    if port.shape is None:
        return Port(port.name, port.dtype, None, rule.role)
    return Port(port.name, port.dtype, port.shape, rule.role, axes(rule.order))


def with_numbers(port: Port) -> Port:
    """An input whose sizes are numbers where they are written as names, "9"."""
    return replace(port, shape=tuple(map(as_number, port.shape))) if port.shape is not None else port


def named(port: Declared, rules: Iterable[RoleRule]) -> Role | None:
    """The role of a name whatever the rank: tells a known input of an unknown shape from an unknown one."""
    return next((rule.role for rule in rules if rule.fits(port.name, port.dtype, len(rule.order))), None)


def plain_port(port: Declared, role: Role) -> Port:
    """A port of which only the number of axes is known."""
    return Port(port.name, port.dtype, port.shape, role, tuple("fixed" for _ in port.shape or ()))


def hidden_states(view: GraphView, flow: Dataflow) -> str | None:
    """The input that stands in place of tokens: embeddings, or the hidden states of a stage.

    New keys and values of every cache that grows are made of it, those of the first layer as well, which encoder states
    have no part in. None where no input does so, or several.
    """
    wide = {name: port for name, port in view.inputs.items() if port.dtype in FLOATS and len(port.shape or ()) >= 3}
    states = {name: flow.state(name, len(port.shape or ())) for name, port in wide.items()}
    grown = {
        s.output for s in states.values() if s.output and s.growth == "grow" and s.use and s.use.part in KEPT_PARTS
    }
    if not grown or any(state.use is not None and state.use.part == "conv" for state in states.values()):
        return None
    results = {flow.flow.results[output] for output in grown}
    behind = flow.descent.behind(min(results))  # one walk for all inputs, where there may be thousands
    near = [
        name
        for name, port in wide.items()
        if states[name].output not in grown and len(port.shape or ()) == 3 and name in behind
    ]
    fitting = [name for name in near if results <= flow.descent.reached_from({name})]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True)
class Looks:
    """What dataflow tells of the unnamed inputs of one graph.

    `widths` are those of the outputs that may be logits, `hidden` is the input that stands in place of tokens.
    """

    dataflow: Dataflow
    inputs: dict[str, Declared]
    widths: frozenset[int] = frozenset()
    hidden: str | None = None

    def token_ids(self, candidates: Iterable[str]) -> list[str]:
        """The integer input that looks rows up in the table of words; several where nothing tells them apart."""
        tables = {name: rows for name in candidates if (rows := self._table_rows(name)) is not None}
        exact = [name for name, rows in tables.items() if rows in self.widths]
        if len(exact) == 1:
            return exact
        largest = max(tables.values(), default=0)
        return [name for name, rows in tables.items() if rows == largest]

    def words(self, ids: str) -> int | None:
        """Rows of the table in which token ids are looked up; None where there is none."""
        return self._table_rows(ids)

    def role(self, name: str, cross_sites: set[int]) -> tuple[Role, tuple[Axis, ...]] | None:
        """The part of an input that no name rule knows. `cross_sites` are the attentions over encoder states."""
        port = self.inputs[name]
        rank = len(port.shape) if port.shape is not None else 0
        by_port = self._operator_role(name)
        if by_port is not None:
            # Which beam each entry of a buffer comes from is told row by row.
            letters = "B" if rank == 1 else "B1M" if by_port == "beam_input" and rank == 3 else "1" * rank
            return by_port, axes(letters)
        found = self._counted(name, port, rank) if port.dtype in INTEGERS else None
        found = found or self._mask(name, port, rank, cross_sites)
        if found is None and rank == 3 and port.dtype.startswith(("float", "bfloat")):
            projected = self.dataflow.uses.of(name)
            if projected is not None and projected.part in ("memory", "key-value"):
                return "encoder_states", axes("BED")
        return found

    def _counted(self, name: str, port: Declared, rank: int) -> tuple[Role, tuple[Axis, ...]] | None:
        """What integers are: places of tokens, how many there are, or their kinds, of which all are the first."""
        if rank == 0 or port.shape == (1,):
            if self._is_kind(name):
                return "setting", axes("1" * rank)
            found = self._counts_places(name) or self._begins(name)
            return ("past_length", axes("1" * rank)) if found else None
        if rank == 1 and port.shape and self._is_batch(port.shape[0]):
            return ("setting", axes("B")) if self._is_kind(name) else None
        if rank in (1, 2, 3) and self._counts_places(name):
            return ("position_ids", axes("BQ" if rank == 2 else "1BQ")) if rank > 1 else ("cache_position", axes("Q"))
        if rank == 1 and self._reaches(name, WRITTEN_AT):
            return "cache_position", axes("Q")
        if rank == 2 and 0 < (self._table_rows(name) or 0) < FEW_ROWS:
            return "setting", axes("BQ")
        return None

    def _is_kind(self, name: str) -> bool:
        """Whether a number looks up one row for all tokens of a sequence, where several come: a language, a speaker.

        What places are counted from, or what is masked by, is none.
        """
        if not self._several_tokens or self._table_rows(name) is None:
            return False
        return not self._reaches(name, RANGES, WRITTEN_AT, ROTATIONS) and not self.mask_sites(name)

    @cached_property
    def _several_tokens(self) -> bool:
        """Whether tokens, or what stands in their place, may be more than one in a step."""
        for port in self.inputs.values():
            shape = port.shape or ()
            if port.dtype in INTEGERS and len(shape) > 1 and shape[-1] != 1 and self._table_rows(port.name) is not None:
                return True
            embedded = port.name == self.hidden or named(port, inputs.INPUTS) == "embeddings"
            if embedded and len(shape) == 3 and shape[1] != 1:
                return True
        return False

    def _is_batch(self, size: Dim) -> bool:
        """Whether an axis is called like the first one of an input of integers with more axes."""
        shapes = [port.shape for port in self.inputs.values() if port.dtype in INTEGERS and port.shape]
        return isinstance(size, str) and any(shape[0] == size for shape in shapes if len(shape) > 1)

    def _mask(
        self, name: str, port: Declared, rank: int, cross_sites: set[int]
    ) -> tuple[Role, tuple[Axis, ...]] | None:
        # What has one number for all keys is a scale, a temperature: no mask.
        sites = self.mask_sites(name) if port.shape and port.shape[-1] != 1 else set()
        if rank == 2 and sites:
            return ("encoder_mask", axes("BE")) if sites <= cross_sites else ("attention_mask", axes("BT"))
        if rank == 2 and port.dtype in INTEGERS and self._is_counted(name):
            return "attention_mask", axes("BT")
        if rank in (3, 4, 5) and sites:
            return "additive_mask", axes({3: "BQT", 4: "B1QT", 5: "B11QT"}[rank])
        return None

    def _counts_places(self, name: str) -> bool:
        """Whether an input looks like positions: rotated by, or looked up in a table longer than one of kinds."""
        rows = self._table_rows(name)
        return rows >= FEW_ROWS if rows is not None else self._reaches(name, LOOKUPS, ROTATIONS)

    def _is_counted(self, name: str) -> bool:
        """Whether positions or the lengths of a cache are made by counting the ones of an input: then it is a mask."""
        if self._reaches(name, SUMS) and self._reaches(name, LOOKUPS, ROTATIONS, summed=True):
            return True
        flow = self.dataflow.flow
        sums = [node for node, index in flow.consumers.get(name, ()) if node.op == "ReduceSum" and index == 0]
        return any(self._operator_role(output, MIXES) in LENGTHS for node in sums for output in node.outputs)

    def _begins(self, name: str) -> bool:
        """Whether an input is where the numbers of the new tokens begin."""
        return self._reaches(name, RANGES, through=KEEPS)

    def mask_sites(self, name: str) -> set[int]:
        """The attentions whose scores an input takes part in without passing a product or a table: those it masks."""
        found, waiting, seen = set(), deque([name]), {name}
        while waiting and self.dataflow.effort.goes_on():
            for node, index in self.dataflow.flow.consumers.get(waiting.popleft(), ()):
                ports = ports_of(node.domain, node.op)
                if self.dataflow.uses.is_softmax(node) or (ports is not None and index in ports.mask):
                    found.add(node.index)
                elif node.op in KEEPS or node.op in MIXES or node.op in LOGIC or node.op == "ReduceSum":
                    for output in node.outputs:
                        if output and output not in seen:
                            seen.add(output)
                            waiting.append(output)
        return found

    def softmax_behind(self, product: int) -> set[int]:
        """The Softmax that a product of queries and keys runs into, or the fused operator itself."""
        flow = self.dataflow.flow
        start = flow.nodes[product]
        if ports_of(start.domain, start.op) is not None:
            return {product}
        waiting, seen = deque(start.outputs), set(start.outputs)
        while waiting and self.dataflow.effort.goes_on():
            for node, _ in flow.consumers.get(waiting.popleft(), ()):
                if self.dataflow.uses.is_softmax(node):
                    return {node.index}
                if node.op in KEEPS or node.op in MIXES:
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    waiting.extend(fresh)
        return set()

    def _table_rows(self, name: str) -> int | None:
        """Rows of the constant table that an integer input looks up without being reckoned with first."""
        if self.inputs[name].dtype not in INTEGERS:
            return None
        flow, waiting, seen = self.dataflow.flow, deque([name]), {name}
        while waiting and len(seen) < NEAR and self.dataflow.effort.goes_on():
            for node, index in flow.consumers.get(waiting.popleft(), ()):
                if LOOKUPS.get(node.op) == index:
                    name_of_table = node.input(0 if index else 2)
                    table, made = flow.constant(name_of_table), flow.producers.get(name_of_table)
                    if table is not None and len(table.dims) >= 2:
                        turned = made is not None and made.op == "Transpose"  # the weights of the head, used again
                        return int(table.dims[-1 if turned else 0])
                elif index in KEEPS.get(node.op, ()) or index in CHOOSES.get(node.op, ()):
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    waiting.extend(fresh)
        return None

    def _reaches(
        self, name: str, *goals: dict[str, int], summed: bool = False, through: Container[str] = RECKONED
    ) -> bool:
        """Whether an input reaches one of some operators before long, reckoned with or not.

        What is summed up on the way is a mask, of which positions are made: positions are not.
        """
        flow, waiting, seen = self.dataflow.flow, deque([name]), {name}
        while waiting and len(seen) < NEAR and self.dataflow.effort.goes_on():
            for node, index in flow.consumers.get(waiting.popleft(), ()):
                if any(goal.get(node.op) == index for goal in goals):
                    return True
                if node.op == "CumSum" and not summed:
                    continue
                if node.op in through:
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    waiting.extend(fresh)
        return False

    def _operator_role(self, name: str, through: Container[str] = ()) -> Role | None:
        """The meaning that a cache operator gives to the input at one of its ports."""
        flow, waiting, seen = self.dataflow.flow, deque([name]), {name}
        while waiting and len(seen) < NEAR and self.dataflow.effort.goes_on():
            for node, index in flow.consumers.get(waiting.popleft(), ()):
                ports = ports_of(node.domain, node.op)
                if ports is not None and index in ports.roles:
                    return ports.roles[index]  # type: ignore[return-value]
                if node.op in WHOLE or node.op in through:
                    fresh = [output for output in node.outputs if output and output not in seen]
                    seen.update(fresh)
                    waiting.extend(fresh)
        return None
