"""Finds the LM head: the product of the hidden states with the weights of the vocabulary, and what follows it.

Between the head and the logits every node must compute each row of its result from the same row alone. What is not of
that form is named: nothing is guessed, since a product with constants may stand in many places of a decoder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvdoctor.contract import DECODING, CacheContract
from kvdoctor.model import traverse
from kvdoctor.model.operators import CONTRIB, has, operator_of, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.view import Scope, integers
from kvdoctor.records import record

ROUNDING = operators_with("quantize", "dequantize")
BY_ENTRY = operators_with("copy", "cast", "elementwise") | ROUNDING
"""Operators that compute each entry from the same entry of their inputs."""

LEAST_OPSET = 10
"""The first in which the bounds of a Slice are inputs."""


class NoHead(Exception):
    """The logits cannot be computed for some rows alone; the message says why."""


Scopes = tuple[GraphProto, ...]
"""The graph of a value, after the graphs around it."""


@record(slots=False)
class Head:
    """A head: the node that reads the hidden states, at which input, its graph, and the values up to the logits."""

    graph: GraphProto
    node: NodeProto
    index: int
    values: frozenset[str]


def describe_op(node: NodeProto) -> str:
    """A node as errors name it, its operator with the domain that it is of."""
    domain = traverse.normalize_domain(node.domain)
    return f"{domain}.{traverse.describe_node(node)}" if domain else traverse.describe_node(node)


def find_heads(contract: CacheContract, models: Mapping[str, ModelProto]) -> dict[str, tuple[Head, ...]]:
    """The heads of each file that decodes, one for each branch that ends in the logits.

    `models` are the graphs by file. What an inspection says of such a conversion, and the conversion, rest on it.

    Raises:
        NoHead: all rows are not returned, or a node stands in the way; the message names it.
    """
    if contract.last_logits_only:
        raise NoHead("it already returns the logits of the last token alone")
    if contract.graph("decode").port("logits_to_keep") is not None:
        raise NoHead("it already has an input for the number of rows")
    graphs = [contract.graph(phase) for phase in DECODING if phase in contract.phases]
    found = {}
    for name, graph in {graph.file: graph for graph in graphs}.items():
        port = graph.port("logits")
        if port is None or port.axes != ("batch", "new", "vocabulary"):
            raise NoHead(f"{name} returns no logits with an axis for the new tokens")
        if (old := traverse.explain_old_opset(models[name], name, LEAST_OPSET, "Slice")) is not None:
            raise NoHead(old)
        found[name] = tuple(_find_head(*end) for end in find_ends((models[name].graph,), port.name))
    return found


def find_ends(scopes: Scopes, name: str) -> Iterator[tuple[Scopes, str]]:
    """Where an output is made: in the graph itself, or in each branch of an `If`."""
    scopes, node = find_maker(scopes, name)
    if node is not None and has(node.op_type, "branch") and not traverse.normalize_domain(node.domain):
        index = list(node.output).index(name)
        for body in traverse.subgraphs(node):
            yield from find_ends((*scopes, body), body.output[index].name)
    else:
        yield scopes, name


def find_maker(
    scopes: Scopes, name: str, make: Callable[[GraphProto, str], NodeProto | None] = traverse.producer
) -> tuple[Scopes, NodeProto | None]:
    """The node that makes a value, and its graph with those around it; None for an input or a weight."""
    for depth in range(len(scopes), 0, -1):
        node = make(scopes[depth - 1], name)
        if node is not None:
            return scopes[:depth], node
    return scopes, None


def _find_head(scopes: Scopes, logits: str) -> Head:
    search, waiting = _Search(), [(scopes, logits)]
    while waiting:
        waiting += search.follow(*waiting.pop())
    if len(search.roots) != 1:
        raise NoHead(f"no product of hidden states with weights makes the logits {logits!r}")
    graph, node, index = next(iter(search.roots.values()))
    graph, node, index = _before_rounding(graph, node, index, search)
    found = Head(graph[-1], node, index, frozenset().union(*search.made.values()))
    _refuse_other_readers(scopes, logits, search)
    return found


@dataclass(eq=False, repr=False)
class _Search:
    """The walk from the logits back to the head, without recursion: graphs have chains of any length."""

    listed: dict[int, Scope] = field(default_factory=dict)
    nodes: dict[int, NodeProto] = field(default_factory=dict)
    made: dict[int, set[str]] = field(default_factory=dict)
    roots: dict[tuple[int, int], tuple[Scopes, NodeProto, int]] = field(default_factory=dict)
    fixed: dict[str, bool] = field(default_factory=lambda: {"": False})

    def find_maker(self, scopes: Scopes, name: str) -> tuple[Scopes, NodeProto | None]:
        """The node that makes a value, as `find_maker`; each graph is listed once."""
        return find_maker(scopes, name, lambda graph, one: self._list(graph).producers.get(one))

    def _list(self, graph: GraphProto) -> Scope:
        if id(graph) not in self.listed:
            self.listed[id(graph)] = Scope(graph, "")
        return self.listed[id(graph)]

    def follow(self, scopes: Scopes, name: str) -> list[tuple[Scopes, str]]:
        """The values that come before one; none before a head."""
        scopes, node = self.find_maker(scopes, name)
        if node is None:
            raise NoHead(f"the logits depend on {name!r}, which no node makes, without a product with weights")
        if id(node) in self.nodes:
            return []
        self.nodes[id(node)] = node
        self.made.setdefault(id(scopes[-1]), set()).update(filter(None, node.output))
        computed = [i for i, given in enumerate(node.input) if given and not self.is_fixed(scopes, given)]
        kind = (traverse.normalize_domain(node.domain), str(node.op_type))
        if kind[0] in ("", CONTRIB) and has(kind[1], "rows") and self._is_head(scopes, node, computed):
            if node.op_type != "MatMulInteger":
                computed = []
                self.roots[id(node), 0] = scopes, node, 0
        elif kind[0] == "" and has(kind[1], "quantize-dynamically"):
            computed = []
            self.roots[id(node), 0] = scopes, node, 0
        elif kind[0] == "" and (kind[1] in BY_ENTRY or self._cuts_vocabulary(scopes, node)):
            fixed = [find_dims(scopes, given) for given in node.input if given and self.is_fixed(scopes, given)]
            if any(dims is not None and len(dims) > 1 and dims[-2] != 1 for dims in fixed):  # of a number of tokens
                raise NoHead(f"the node {describe_op(node)} after the LM head has a constant for each row")
        else:
            raise NoHead(
                f"the node {describe_op(node)} between the LM head and the logits is none that computes each row "
                "from the same row"
            )
        return [(scopes, node.input[index]) for index in reversed(computed)]

    def _is_head(self, scopes: Scopes, node: NodeProto, computed: list[int]) -> bool:
        """Whether a product takes rows of hidden states and the weights of the vocabulary, by its own declarations."""
        allowed = {0, 2} if node.op_type == "MatMulInteger" else {0}
        if 0 not in computed or not set(computed) <= allowed:
            raise NoHead(f"the node {describe_op(node)} looks like the LM head, and its weights are computed")
        transposed = traverse.find_attribute(node, "transA")
        if transposed is not None and transposed.i:
            raise NoHead(f"the node {describe_op(node)} looks like the LM head, and takes columns, not rows")
        known = operator_of(node.op_type)
        if len(known.operands) == 1 or known.weight is None:  # packed weights, with their sizes in attributes
            return True
        dims = find_dims(scopes, traverse.input_of(node, known.weight))
        if dims is None or len(dims) != 2:
            shape = "of unknown shape" if dims is None else f"of rank {len(dims)}"
            raise NoHead(f"the node {describe_op(node)} looks like the LM head, and its weights are {shape}")
        return True

    def _cuts_vocabulary(self, scopes: Scopes, node: NodeProto) -> bool:
        """Whether a Slice leaves some tokens of the vocabulary, as of a padded head."""
        if node.op_type != "Slice" or len(node.input) < 4:
            return False
        axes = find_tensor(scopes, node.input[3])
        if axes is None or not self.is_fixed(scopes, node.input[1]) or not self.is_fixed(scopes, node.input[2]):
            return False
        numbers = integers(axes)
        return numbers is not None and set(numbers) <= {-1, 2}

    def is_fixed(self, scopes: Scopes, name: str) -> bool:
        """Whether a value is a weight, or computed of weights alone."""
        waiting = [] if name in self.fixed else [self._open(scopes, name)]
        while waiting:
            one, inner, given = waiting[-1]
            while given and self.fixed.get(given[-1]):
                given.pop()
            if given and given[-1] not in self.fixed:
                waiting.append(self._open(inner, given[-1]))
            else:
                self.fixed[one] = not given
                waiting.pop()
        return self.fixed[name]

    def _open(self, scopes: Scopes, name: str) -> tuple[str, Scopes, list[str]]:
        """A value, the graphs around its node, and what it is computed of, the first input last.

        The empty name stands for what is never fixed; until its answer is known, a value is not, for a cycle.
        """
        self.fixed[name] = False
        inner, node = self.find_maker(scopes, name)
        if node is None:
            held = any(name in self._list(graph).initializers for graph in scopes)
            return name, scopes, [] if held else [""]
        given = [str(value) for value in node.input if value]
        opaque = any(True for _ in traverse.subgraphs(node)) or not (given or has(node.op_type, "constant"))
        return name, inner, [""] if opaque else given[::-1]


def find_tensor(scopes: Scopes, name: str) -> TensorProto | None:
    """The tensor of a weight or Constant."""
    named = (t for graph in reversed(scopes) for t in graph.initializer if t.name == name)
    held: TensorProto | None = next(named, None)
    if held is not None:
        return held
    _, node = find_maker(scopes, name)
    return traverse.constant_tensor(node) if node is not None and has(node.op_type, "constant") else None


def find_dims(scopes: Scopes, name: str) -> tuple[int, ...] | None:
    """The sizes of a fixed value, also after nodes that retain or transpose them; None where they are not known."""
    tensor = find_tensor(scopes, name)
    if tensor is not None:
        return tuple(tensor.dims)
    inner, node = find_maker(scopes, name)
    if node is None or not node.input or not has(node.op_type, "copy", "cast", "dequantize", "permute"):
        return None
    dims = find_dims(inner, node.input[0])
    return dims[::-1] if dims is not None and has(node.op_type, "permute") and len(dims) == 2 else dims


def _before_rounding(scopes: Scopes, node: NodeProto, index: int, search: _Search) -> tuple[Scopes, NodeProto, int]:
    """The first of the nodes that round the hidden states for the head alone: a runtime fuses them with it."""
    while True:
        inner, before = find_maker(scopes, node.input[index])
        if before is None or before.op_type not in ROUNDING or inner[-1] is not scopes[-1]:
            return scopes, node, index
        computed = [i for i, given in enumerate(before.input) if given and not search.is_fixed(inner, given)]
        scale = find_dims(inner, traverse.input_of(before, 1))
        alone = len(traverse.readers(inner[-1]).get(traverse.output_of(before), ())) == 1
        if computed != [0] or scale not in ((), (1,)) or not alone:
            return scopes, node, index
        search.nodes[id(before)] = before
        search.made.setdefault(id(inner[-1]), set()).update(before.output)
        node, index = before, 0


def _refuse_other_readers(scopes: Scopes, logits: str, search: _Search) -> None:
    """Nothing else may read the rows that will no longer be computed."""
    for graph in scopes:
        own = search.made.get(id(graph), set())
        for reader, name in _find_readers(graph, own):
            if id(reader) not in search.nodes:
                where = f"reads {name!r}, which lies between the LM head and the logits, for another output"
                raise NoHead(f"the node {describe_op(reader)} {where}")
        other = next((value.name for value in graph.output if value.name in own - {logits}), None)
        if other is not None:
            raise NoHead(f"the output {other!r} is returned from between the LM head and the logits")


def _find_readers(graph: GraphProto, names: set[str]) -> Iterator[tuple[NodeProto, str]]:
    """The nodes that read some values of a graph, or return them from a body, which sees all but names of its own."""
    for node in graph.node:
        yield from ((node, name) for name in node.input if name in names)
        for inner in traverse.subgraphs(node):
            seen = names - traverse.own_names(inner)
            yield from ((node, value.name) for value in inner.output if value.name in seen)
            yield from _find_readers(inner, seen)
