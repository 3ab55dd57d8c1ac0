"""The role of each input and output besides the cache: by name, else by its use in the graph.

The inputs that carry the new tokens are found by name, by the embedding table they index, or as hidden states.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS, LOOKUPS
from kvdoctor.analysis.dataflow.walks import KEEPS, MIXES, NEAR_USE, Walk
from kvdoctor.analysis.dialects.dialect import INPUTS, RoleRule, parse_axes
from kvdoctor.analysis.stacks import OnnxFile, StackParts
from kvdoctor.contract import Axis, MissingPart, Port, Role
from kvdoctor.model.operators import operators_with, places_of, ports_of
from kvdoctor.model.view import Declared, GraphView
from kvdoctor.records import record

INTEGERS = ("int64", "int32")
Goal = Mapping[str, tuple[int, ...]]
ROTATIONS = places_of("rotate", "wave")
WRITTEN_AT = places_of("write")
SUMS = dict.fromkeys(operators_with("accumulate"), (0,))
RANGES = dict.fromkeys(operators_with("range"), (0,))
LOGIC = operators_with("compare", "logic", "accumulate", "triangle")
LENGTHS = ("last_index", "past_length", "total_length")
COMPUTED = KEEPS | MIXES | LOGIC | operators_with("product")
"""Operators between an input and the one that shows its role: those that keep, combine, multiply or compare."""
WHOLE = operators_with("copy", "cast", "view", "repeat")
"""Operators that pass on all of an input, not a part of it."""
COUNTS = ("past_length", "write_index")
FLOATS = ("float", "float16", "bfloat16", "double")
FEW_ROWS = 8
"""A table of fewer rows holds kinds of tokens (segments, languages), not positions."""


def match_rule(port: Declared, rules: Iterable[RoleRule]) -> Port | None:
    """The port with the role and the axes of the first rule that fits; None where none does."""
    rank = len(port.shape) if port.shape is not None else None
    open_axis = port.shape is not None and len(port.shape) == 1 and isinstance(as_number(port.shape[0]), str)
    fitting = (rule for rule in rules if rule.fits(port.name, port.dtype, rank))
    # A count of tokens has one element: an input `pos` of int64[new] is no count.
    rule = next((rule for rule in fitting if not (open_axis and rule.role in COUNTS and rule.order == "1")), None)
    if rule is None:
        return None
    if port.shape is None:
        return Port(port.name, port.dtype, None, rule.role)
    return Port(port.name, port.dtype, port.shape, rule.role, parse_axes(rule.order))


def convert_sizes(port: Port) -> Port:
    """An input with numbers for sizes that are written as names, "9"."""
    return replace(port, shape=tuple(map(as_number, port.shape))) if port.shape is not None else port


def role_by_name(port: Declared, rules: Iterable[RoleRule]) -> Role | None:
    """The role of a name at any rank: distinguishes a known input of an unexpected shape from an unknown one."""
    return next((rule.role for rule in rules if rule.fits(port.name, port.dtype, None)), None)


def plain_port(port: Declared, role: Role) -> Port:
    """A port with nothing known of its axes but their number."""
    return Port(port.name, port.dtype, port.shape, role, tuple("fixed" for _ in port.shape or ()))


def find_hidden_states(view: GraphView, flow: Dataflow) -> str | None:
    """Find the input that replaces tokens: embeddings, or the hidden states of a pipeline stage.

    The new keys and values of every growing cache depend on it, those of the first layer too, which never depend on
    encoder states. None where no input, or more than one, is like that, and where there are no weights: the inputs of
    one operator are no hidden states.
    """
    if not any(len(tensor.dims) > 1 for tensor in flow.flow.constants.values()):
        return None
    wide = {name: port for name, port in view.inputs.items() if port.dtype in FLOATS and len(port.shape or ()) >= 3}
    states = {name: flow.state(name, len(port.shape or ())) for name, port in wide.items()}
    grown = {
        s.output for s in states.values() if s.output and s.growth == "grow" and s.use and s.use.part in ATTENTION_PARTS
    }
    if not grown or any(state.use is not None and state.use.part == "conv" for state in states.values()):
        return None
    results = {flow.flow.results[output] for output in grown}
    behind = flow.descent.ancestors(min(results))  # one walk for all inputs: there may be thousands
    near = [
        name
        for name, port in wide.items()
        if states[name].output not in grown and len(port.shape or ()) == 3 and name in behind
    ]
    fitting = [name for name in near if results <= flow.descent.reached_from({name})]
    return fitting[0] if len(fitting) == 1 else None


@record(slots=False)
class InputFlow:
    """The roles of one graph's inputs by their use.

    `widths` are those of the outputs that may be logits; `hidden` is the input that replaces tokens, if one does.
    """

    dataflow: Dataflow
    inputs: dict[str, Declared]
    widths: frozenset[int] = frozenset()
    hidden: str | None = None

    def find_token_ids(self, candidates: Iterable[str]) -> list[str]:
        """Find the integer input that indexes the embedding table; several where nothing distinguishes them."""
        tables = {name: rows for name in candidates if (rows := self.table_rows(name)) is not None}
        tables = {name: rows for name, rows in tables.items() if not self._of_other_tokens(name)} or tables
        exact = [name for name, rows in tables.items() if rows in self.widths]
        if len(exact) == 1:
            return exact
        largest = max(tables.values(), default=0)
        return [name for name, rows in tables.items() if rows == largest]

    def find_role(self, name: str, cross_sites: set[int]) -> tuple[Role, tuple[Axis, ...]] | None:
        """Find the role and axes of an input that no name rule knows.

        `cross_sites` are the attentions over encoder states.
        """
        port = self.inputs[name]
        rank = len(port.shape) if port.shape is not None else 0
        by_port = self._operator_role(name)
        if by_port is not None:
            # The beam that each entry of a buffer comes from is given by row.
            letters = "B" if rank == 1 else "B1M" if by_port == "beam_input" and rank == 3 else "1" * rank
            return by_port, parse_axes(letters)
        found = self._integer_role(name, port, rank) if port.dtype in INTEGERS else None
        found = found or self._mask_role(name, port, rank, cross_sites)
        if found is None and rank == 3 and port.dtype.startswith(("float", "bfloat")):
            projected = self.dataflow.uses.use_of(name)
            if projected is not None and projected.part in ("memory", "key-value"):
                return "encoder_states", parse_axes("BED")
        return found

    def _integer_role(self, name: str, port: Declared, rank: int) -> tuple[Role, tuple[Axis, ...]] | None:
        """The role of integers: positions of tokens, their number, or their kind, which is fed as 0."""
        if rank == 0 or port.shape == (1,):
            if self._is_kind(name):
                return "setting", parse_axes("1" * rank)
            found = self._is_position(name) or self._reaches(name, RANGES, through=KEEPS)
            return ("past_length", parse_axes("1" * rank)) if found else None
        batches = {
            one.shape[0]
            for one in self.inputs.values()
            if one.dtype in INTEGERS and len(one.shape or ()) > 1 and one.shape
        }
        if rank == 1 and port.shape and isinstance(port.shape[0], str) and port.shape[0] in batches:
            return ("setting", parse_axes("B")) if self._is_kind(name) else None
        if rank in (1, 2, 3) and self._is_position(name) and not self._of_other_tokens(name):
            if rank == 1:
                return "cache_position", parse_axes("Q")
            return "position_ids", parse_axes("BQ" if rank == 2 else "1BQ")
        if rank == 1 and self._reaches(name, WRITTEN_AT):
            return "cache_position", parse_axes("Q")
        if rank == 2 and 0 < (self.table_rows(name) or 0) < FEW_ROWS:
            return "setting", parse_axes("BQ")
        return None

    def _of_other_tokens(self, name: str) -> bool:
        """Whether a row of integers has a fixed length, and all others that index a table are open: earlier tokens."""
        shape = self.inputs[name].shape or ()
        fixed = len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1
        others = [one for one in self.inputs.values() if one.name != name and self.table_rows(one.name) is not None]
        lengths = {type(one.shape[-1]) for one in others if one.shape and len(one.shape) > 1}
        return fixed and lengths == {str}

    def _is_kind(self, name: str) -> bool:
        """Whether a number selects one table row for all tokens of a sequence: a language, a speaker.

        A number that positions are counted from, or that makes a mask, does not.
        """
        if not self._several_tokens or self.table_rows(name) is None:
            return False
        return not self._reaches(name, RANGES, WRITTEN_AT, ROTATIONS) and not self.mask_sites(name)

    @cached_property
    def _several_tokens(self) -> bool:
        """Whether a step may take more than one token or embedding."""
        for port in self.inputs.values():
            shape = port.shape or ()
            if port.dtype in INTEGERS and len(shape) > 1 and shape[-1] != 1 and self.table_rows(port.name) is not None:
                return True
            embedded = port.name == self.hidden or role_by_name(port, INPUTS) == "embeddings"
            if embedded and len(shape) == 3 and shape[1] != 1:
                return True
        return False

    def _mask_role(
        self, name: str, port: Declared, rank: int, cross_sites: set[int]
    ) -> tuple[Role, tuple[Axis, ...]] | None:
        # An input with one number for all keys is a scale or a temperature, no mask.
        sites = self.mask_sites(name) if port.shape and port.shape[-1] != 1 else set()
        if rank == 2 and sites:
            return ("encoder_mask", parse_axes("BE")) if sites <= cross_sites else ("attention_mask", parse_axes("BT"))
        if rank == 2 and port.dtype in INTEGERS and self._is_summed(name):
            return "attention_mask", parse_axes("BT")
        if rank in (3, 4, 5) and sites:
            return "additive_mask", parse_axes({3: "BQT", 4: "B1QT", 5: "B11QT"}[rank])
        return None

    def _is_position(self, name: str) -> bool:
        """Whether an input looks like positions: it feeds a rotation, or indexes a table longer than one of kinds."""
        rows = self.table_rows(name)
        return rows >= FEW_ROWS if rows is not None else self._reaches(name, LOOKUPS, ROTATIONS)

    def _is_summed(self, name: str) -> bool:
        """Whether positions or cache lengths are computed by summing an input: then it is a mask."""
        if self._reaches(name, SUMS) and self._reaches(name, LOOKUPS, ROTATIONS, summed=True):
            return True
        walk = Walk([name], self.dataflow.budget, NEAR_USE)
        for node, index in walk.takers(self.dataflow.flow):
            if node.has("sum") and not index:
                return any(self._operator_role(output, MIXES) in LENGTHS for output in node.outputs)
            if node.has("cast"):
                walk.add(node.outputs)
        return False

    def mask_sites(self, name: str) -> set[int]:
        """The attentions that an input masks: it reaches their scores through no product and no table."""
        found, walk = set(), Walk([name], self.dataflow.budget)
        for node, index in walk.takers(self.dataflow.flow):
            ports = ports_of(node.domain, node.op)
            if self.dataflow.uses.is_softmax(node) or (ports is not None and index in ports.mask):
                found.add(node.index)
            elif node.op in KEEPS or node.op in MIXES or node.op in LOGIC:
                walk.add(node.outputs)
        return found

    def softmax_after(self, product: int) -> set[int]:
        """The Softmax that a product of queries and keys reaches, or the fused operator itself."""
        flow = self.dataflow.flow
        start = flow.nodes[product]
        if ports_of(start.domain, start.op) is not None:
            return {product}
        walk = Walk(start.outputs, self.dataflow.budget)
        for node, _ in walk.takers(flow):
            if self.dataflow.uses.is_softmax(node):
                return {node.index}
            if node.op in KEEPS or node.op in MIXES:
                walk.add(node.outputs)
        return set()

    def table_rows(self, name: str) -> int | None:
        """Rows of the constant table that an integer input indexes directly; None where there is none."""
        return self.dataflow.uses.table_rows(name) if self.inputs[name].dtype in INTEGERS else None

    def _reaches(self, name: str, *goals: Goal, summed: bool = False, through: Container[str] = COMPUTED) -> bool:
        """Whether an input reaches one of some operators within NEAR_USE values.

        A walk stops at a CumSum unless `summed`: an input that is summed up is a mask, from which positions are made.
        """
        walk = Walk([name], self.dataflow.budget, NEAR_USE)
        for node, index in walk.takers(self.dataflow.flow):
            if any(index in goal.get(node.op, ()) for goal in goals):
                return True
            if node.op in through and (summed or not node.has("accumulate")):
                walk.add(node.outputs)
        return False

    def _operator_role(self, name: str, through: Container[str] = ()) -> Role | None:
        """The role that a cache operator gives to the input at one of its ports."""
        walk = Walk([name], self.dataflow.budget, NEAR_USE)
        for node, index in walk.takers(self.dataflow.flow):
            ports = ports_of(node.domain, node.op)
            if ports is not None and index in ports.roles:
                return ports.roles[index]  # type: ignore[return-value]
            if node.op in WHOLE or node.op in through:
                walk.add(node.outputs)
        return None


LOGITS_RANK = 3
"""Of float[batch, new, vocabulary]."""


@record(slots=False)
class TokenInputs:
    """The inputs that carry new tokens.

    `ids` has the input of token ids by file name, None where a graph has none. `names` are all inputs of the decode
    graph that carry tokens or embeddings; `hidden` is the one that is not named so but replaces tokens.
    """

    ids: dict[str, str | None]
    names: set[str]
    hidden: str | None


def find_token_inputs(parts: StackParts) -> TokenInputs:
    """Find the inputs that carry tokens in the graphs of the first step and of decode steps."""
    ids: dict[str, str | None] = {}
    for file in {parts.decode.name: parts.decode, parts.first.name: parts.first}.values():
        ids[file.name] = next(iter(_find_candidates(file, parts)), None)
    view = parts.decode.graph
    embedded = {name for name, port in view.inputs.items() if role_by_name(port, parts.rules("inputs")) == "embeddings"}
    own, hidden = ids[parts.decode.name], None
    if not own and not embedded and parts.first is parts.decode and parts.decode.dataflow is not None:
        hidden = find_hidden_states(view, parts.decode.dataflow)
    names_found = embedded | {name for name in (own, hidden) if name is not None}
    return TokenInputs(ids, names_found, hidden)


def _find_candidates(file: OnnxFile, parts: StackParts) -> list[str]:
    """The inputs that may carry token ids, best first: one by name, else those that index the embedding table."""
    view = file.graph
    known = [(name, role_by_name(port, parts.rules("inputs"))) for name, port in view.inputs.items()]
    tokens = [name for name, role in known if role in ("token_ids", "token_and_position")]
    if tokens or any(role == "embeddings" for _, role in known):
        return tokens[:1]
    dataflow = file.first_dataflow
    if dataflow is None:
        return []
    flow = InputFlow(dataflow, view.inputs, find_logits_widths(view))
    found = flow.find_token_ids([name for name, role in known if role is None])
    if len(found) > 1:  # the last ids of earlier calls come back in the same size
        returned = {port.fixed for port in view.outputs.values()}
        found = [name for name in found if view.inputs[name].fixed not in returned] or found
    if len(found) == 1 and flow.table_rows(found[0]) not in flow.widths and find_hidden_states(view, dataflow):
        return []  # with embeddings, integers that index another table than that of the tokens are positions
    lengths = {size for port in view.outputs.values() if len(port.shape or ()) > 1 for size in (port.shape or ())[1:]}
    return sorted(found, key=lambda name: not lengths.intersection((view.inputs[name].shape or ())[1:]))


def find_swapped_inputs(decode: OnnxFile) -> Iterator[MissingPart]:
    """Token ids and positions whose names are swapped, by the tables that they index."""
    view, flow = decode.graph, decode.first_dataflow
    roles = {role_by_name(port, INPUTS): name for name, port in view.inputs.items()}
    ids, positions = roles.get("token_ids"), roles.get("position_ids") or roles.get("cache_position")
    if flow is None or ids is None or positions is None or "logits" not in view.outputs:
        return
    by_flow = InputFlow(flow, view.inputs, find_logits_widths(view))
    rows, others = by_flow.table_rows(ids), by_flow.table_rows(positions)
    if rows is not None and others in by_flow.widths and rows > max(by_flow.widths) + FEW_ROWS:
        reason = f"it indexes a table of {rows} rows, while {positions!r} indexes that of the {others} tokens"
        yield MissingPart(ids, reason)


def find_logits_widths(view: GraphView) -> frozenset[int]:
    """Widths of the outputs that may be logits: of `logits`, else of all of float[batch, new, width]."""
    named = view.outputs.get("logits")
    ports = [named] if named is not None else [p for p in view.outputs.values() if len(p.shape or ()) == LOGITS_RANK]
    return frozenset(size for port in ports if port.shape and isinstance(size := port.shape[-1], int))
