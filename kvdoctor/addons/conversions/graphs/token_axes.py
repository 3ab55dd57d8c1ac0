"""The axes of the tokens through a decoder without a cache: what has a row for each new token, and what is a key.

The walk follows the content of tokens (ids, embeddings, positions that are fed), operator by operator. Each must
compute every row from the same row, or be a product of an attention, whose operand on the key side is cut. Values that
follow from sizes, constants, masks and encoder states alone are free: they can be computed for the whole sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvdoctor.addons.conversions.graphs.cache_axes import (
    Inputs,
    KeySide,
    Labels,
    Mixes,
    Shape,
    Sizes,
    broadcast,
    find_key_side,
    multiply,
    regroup,
    spell_product,
    unlabelled,
)
from kvdoctor.model.operator_axes import read_equation
from kvdoctor.model.operators import CONTRIB, has, operator_of, ports_of
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import STANDARD, describe_node, find_attribute, input_of, producers, readers, values_read
from kvdoctor.repair.workspace import CannotRepair

LAST_AXIS_FROM = 13
"""The opset from which Softmax normalizes one axis; before, all from its axis on."""
BY_ROW = ("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization")
SKIPPING = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")


@dataclass(eq=False)
class TokenAxes:
    """The labels of all values that have content of tokens, and the key sides of the attentions.

    `softmaxes` are the nodes that weigh the key side, `fused` attentions that do so by themselves. `flipped` says that
    the first operand of each product of scores has the keys.
    `dynamic` are nodes whose scale is taken from all tokens of a call.
    """

    graph: GraphProto
    sizes: Sizes
    opset: int
    flipped: bool = False
    labels: dict[str, Labels] = field(default_factory=dict, init=False)
    sides: list[KeySide] = field(default_factory=list, init=False)
    softmaxes: list[NodeProto] = field(default_factory=list, init=False)
    dynamic: list[NodeProto] = field(default_factory=list, init=False)
    fused: list[NodeProto] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.makers, self.readers = producers(self.graph), readers(self.graph)

    def walk(self, given: Inputs) -> None:
        """Label everything that follows from the tokens.

        Raises:
            CannotRepair: a node mixes positions in another way; the message names it.
        """
        for name, axis in given.new.items():
            rank = len(self.sizes.shape(name) or ())
            self.labels[name] = tuple("new" if at == axis else "" for at in range(rank))
        for node in self.graph.node:
            contents = [at for at, name in enumerate(node.input) if name in self.labels]
            if has(node.op_type, "measure") and node.domain in STANDARD:
                continue
            if any(name in self.labels for name in values_read(node)[len([one for one in node.input if one]) :]):
                self._refuse(node, "it has a body that computes with the tokens")
            if contents:
                self._follow(node, contents)

    def _follow(self, node: NodeProto, contents: list[int]) -> None:
        try:
            found = self._find_rule(node)(self, node, contents)
        except Mixes as reason:
            self._refuse(node, str(reason))
        for name, labels in zip(node.output, found, strict=False):
            if name:
                self.labels[name] = labels

    def _find_rule(self, node: NodeProto) -> "Rule":
        if node.domain not in (*STANDARD, CONTRIB):
            raise Mixes("an operator of somebody's own may mix positions")
        rule = next((rule for traits, rule in RULES if has(node.op_type, *traits)), None)
        if rule is None:
            raise Mixes("it may mix positions, or is not known to compute each row alone")
        if any(self.sizes.shape(name) is None for name in (*node.output, *node.input) if name):
            raise Mixes("its sizes are not known")
        return rule

    def _refuse(self, node: NodeProto, reason: str) -> None:
        raise CannotRepair(f"the node {describe_node(node)} stands in the way: {reason}")

    # What a rule asks.

    def shape(self, name: str) -> Shape:
        """The sizes of a value in the shorter run."""
        return self.sizes.shape(name) or ()

    def own(self, name: str) -> Labels:
        """The labels of a value; empty ones where it has no content of tokens."""
        return self.labels.get(name) or unlabelled(len(self.shape(name)))

    def listed(self, node: NodeProto, index: int, attribute: str) -> tuple[int, ...] | None:
        """Integers that are an input, or an attribute in older opsets; None where there are none.

        Raises:
            Mixes: they are not known.
        """
        found = find_attribute(node, attribute)
        if found is not None:
            return tuple(found.ints) or (int(found.i),)
        if not input_of(node, index):
            return None
        numbers = self.sizes.integers(input_of(node, index))
        if numbers is None:
            raise Mixes(f"its {attribute} are not known")
        return numbers

    def number(self, node: NodeProto, attribute: str, otherwise: int, rank: int) -> int:
        """An attribute that is an axis, counted from the front."""
        found = find_attribute(node, attribute)
        axis = int(found.i) if found is not None else otherwise
        return axis + rank if axis < 0 else axis

    def cut(self, node: NodeProto, index: int) -> None:
        """Make an operand the key side."""
        name = node.input[index]
        side = find_key_side(self, node, index)
        self.sides.append(side)
        for value in side.below:
            self.labels[value] = tuple("total" if one == "new" else one for one in self.labels[value])
        if name not in side.below and name != side.value:
            raise Mixes("its key side cannot be cached")


def _same(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    if has(node.op_type, "dynamic"):
        walk.dynamic.append(node)
    return [walk.own(node.input[0]) if walk.shape(name) == walk.shape(node.input[0]) else () for name in node.output]


def _broadcast(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    made = broadcast(walk.own(name) for name in node.input)
    if has(node.op_type, "join"):
        axis = walk.number(node, "axis", 0, len(made))
        if made[axis] and sum(walk.shape(name)[axis] > 0 for name in node.input) > 1:
            raise Mixes("it joins other entries to the tokens")
    _check_free(walk, node, made)
    return [made]


def _check_free(walk: TokenAxes, node: NodeProto, made: Labels) -> None:
    """Refuse a free value whose axis of tokens meets no token axis: which side it is of is open."""
    for name in node.input:
        if name in walk.labels or not name:
            continue
        short, long = walk.shape(name), walk.sizes.longer(name) or ()
        for at, (one, other) in enumerate(zip(reversed(short), reversed(long), strict=True), 1):
            if one != other and (made[-at] not in ("new", "total") or one != walk.sizes.lengths[0]):
                raise Mixes("a value for all positions meets one of the tokens that has no axis for them")


def _normalized(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    own = walk.own(node.input[0])
    if node.op_type not in (*BY_ROW, *SKIPPING):
        raise Mixes("it may normalize over positions")
    axis = walk.number(node, "axis", -1, len(own)) if node.op_type in BY_ROW else len(own) - 1
    if any(own[axis:]):
        raise Mixes("it normalizes over positions")
    if node.op_type in SKIPPING:
        own = broadcast(walk.own(name) for name in node.input[:2])
    return [own if walk.shape(name) == walk.shape(node.input[0]) else () for name in node.output]


def _softmax(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    own = walk.own(node.input[0])
    axis = walk.number(node, "axis", -1 if walk.opset >= LAST_AXIS_FROM else 1, len(own))
    over = own[axis : axis + 1] if walk.opset >= LAST_AXIS_FROM else own[axis:]
    if "new" in over or "folded" in over:
        raise _Flip("it normalizes over queries") if "total" in own else Mixes("it normalizes over positions")
    if "total" in over:
        walk.softmaxes.append(node)
    return [own]


class _Flip(Mixes):
    """The axis that a softmax runs over was taken for that of the queries."""


def _reduced(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    own = walk.own(node.input[0])
    axes = walk.listed(node, 1, "axes")
    rank, keep = len(own), find_attribute(node, "keepdims")
    over = {axis % rank for axis in axes} if axes else set(range(rank))
    if any(own[axis] in ("new", "folded") for axis in over):
        raise Mixes("it reduces over positions")
    if keep is not None and not keep.i:
        return [tuple(label for at, label in enumerate(own) if at not in over)]
    return [tuple("" if at in over else label for at, label in enumerate(own))]


def _permuted(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    own = walk.own(node.input[0])
    order = walk.listed(node, len(node.input), "perm") or tuple(reversed(range(len(own))))
    return [tuple(own[at] for at in order)]


def _viewed(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    if contents != [0]:
        raise Mixes("its shape follows from the tokens")
    name, made, (short, long) = node.input[0], node.output[0], walk.sizes.lengths
    found = regroup(walk.own(name), walk.shape(name), walk.shape(made), short)
    if found != regroup(walk.own(name), walk.sizes.longer(name) or (), walk.sizes.longer(made) or (), long):
        raise Mixes("its axes cannot be followed")
    return [found]


def _repeated(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    if contents != [0]:
        raise Mixes("its shape follows from the tokens")
    own, before, after = walk.own(node.input[0]), walk.shape(node.input[0]), walk.shape(node.output[0])
    made = unlabelled(len(after) - len(own)) + own
    sizes = (0,) * (len(after) - len(before)) + before
    for label, one, other, longer in zip(made, sizes, after, walk.sizes.longer(node.output[0]) or (), strict=True):
        if (label and one != other) or (not label and other != longer):
            raise Mixes("it repeats along an axis of positions")
    return [made]


def _picked(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    rule = {"Slice": _sliced, "Gather": _gathered, "Split": _split}.get(node.op_type)
    if rule is None:
        raise Mixes("it takes some positions by number")
    return rule(walk, node, contents)


def _split(walk: TokenAxes, node: NodeProto, _: list[int]) -> list[Labels]:
    own = walk.own(node.input[0])
    if own[walk.number(node, "axis", 0, len(own))]:
        raise Mixes("it splits the axis of positions")
    return [own] * len(node.output)


def _sliced(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    own, before, after = walk.own(node.input[0]), walk.shape(node.input[0]), walk.shape(node.output[0])
    if contents != [0]:
        raise Mixes("its bounds follow from the tokens")
    starts, steps = walk.listed(node, 1, "starts") or (), walk.listed(node, 4, "steps")
    axes = walk.listed(node, 3, "axes") or tuple(range(len(starts)))
    made = list(own)
    for place, axis in enumerate(axis % len(own) for axis in axes):
        whole = after[axis] == before[axis] and (not steps or steps[place] == 1)
        if whole or not own[axis]:
            continue
        last = starts[place] in (-1, before[axis] - 1)
        if own[axis] != "new" or after[axis] != 1 or not last:
            raise Mixes("it takes some positions, not all or the last")
        made[axis] = ""
    return [tuple(made)]


def _gathered(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    data, index = walk.own(node.input[0]), walk.own(node.input[1])
    axis = walk.number(node, "axis", 0, len(data))
    if data[axis]:
        places = walk.sizes.integers(node.input[1])
        if data[axis] != "new" or places is None or set(places) - {-1, walk.shape(node.input[0])[axis] - 1}:
            raise Mixes("it takes some positions, not all or the last")
    if len(contents) > 1 and any(data):
        raise Mixes("it takes entries of tokens by their content")
    return [(*data[:axis], *index, *data[axis + 1 :])]


def _multiplied(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    operands = [at for at in operator_of(node.op_type).operands if input_of(node, at)]
    if has(node.op_type, "dynamic"):
        walk.dynamic.append(node)
    if len(operands) == 1:  # weights of few bits, packed
        own = walk.own(node.input[0])
        if own[-1]:
            raise Mixes("it adds up over positions")
        return [(*own[:-1], "")]
    letters, result = _spell(walk, node, operands)
    labels = [walk.own(node.input[at]) for at in operands]
    for at in operands:
        if at not in contents and walk.sizes.varies(node.input[at]):
            raise Mixes("it multiplies the tokens with a value for all positions")
    made, cuts = multiply(letters, result, labels, walk.flipped)
    for cut in cuts:
        walk.cut(node, operands[cut])
    return [made]


def _spell(walk: TokenAxes, node: NodeProto, operands: Sequence[int]) -> tuple[list[str], str]:
    if (equation := find_attribute(node, "equation")) is not None:
        terms, result = read_equation(equation)
        if not terms:
            raise Mixes("its equation cannot be read")
        return terms, result
    flags = [find_attribute(node, name) for name in ("transA", "transB")]
    one, other = (len(walk.shape(node.input[at])) for at in operands)
    return spell_product(one, other, (bool(flags[0] and flags[0].i), bool(flags[1] and flags[1].i)))


KEYS, VALUES, MASK = 1, 2, 3
KNOWN_INPUTS = 4
"""Without a past, and without lengths that the caller gives."""


def label_attention(walk: TokenAxes, node: NodeProto, contents: list[int]) -> list[Labels]:
    """Cut the key side of an attention.

    Raises:
        Mixes: it has another form.
    """
    own = [walk.own(node.input[at]) for at in (0, KEYS, VALUES)]
    at = 1 if len(own[0]) == 3 else 2
    ports = ports_of("", node.op_type)
    if node.domain not in STANDARD or ports is None or ports.keys != (KEYS,):
        raise Mixes("a fused attention of this kind is not known to take a past in another order")
    if any(labels[at : at + 1] != ("new",) or labels.count("new") != 1 for labels in own) or MASK in contents:
        raise Mixes("its queries, keys and values are not those of the tokens")
    if any(filter(None, node.input[KNOWN_INPUTS:])) or any(filter(None, node.output[1:])):
        raise Mixes("it has a past, or returns more than its result")
    if is_causal(node) and input_of(node, MASK):
        raise Mixes("it is causal and has a mask as well")
    walk.cut(node, KEYS)
    walk.cut(node, VALUES)
    walk.fused.append(node)
    return [own[0]]


def is_causal(node: NodeProto) -> bool:
    """Whether the node hides later tokens by itself."""
    found = find_attribute(node, "is_causal")
    return found is not None and found.i == 1


Rule = Callable[[TokenAxes, NodeProto, list[int]], list[Labels]]
RULES: tuple[tuple[tuple, Rule], ...] = (  # type: ignore[type-arg]
    (("quantize", "quantize-dynamically", "dequantize", "copy", "cast", "dropout"), _same),
    (("elementwise", "join"), _broadcast),
    (("normalize",), _normalized),
    (("softmax",), _softmax),
    (("reduce",), _reduced),
    (("permute",), _permuted),
    (("view",), _viewed),
    (("repeat",), _repeated),
    (("pick",), _picked),
    (("product",), _multiplied),
    (("attend",), label_attention),
)
"""The rule of an operator by its traits, the first that fits."""


def label_tokens(graph: GraphProto, sizes: Sizes, opset: int, given: Inputs) -> TokenAxes:
    """Walk a graph; where a softmax runs over the first operand of its scores, that one has the keys.

    Raises:
        CannotRepair: a node stands in the way; the message names it.
    """
    walk = TokenAxes(graph, sizes, opset)
    try:
        walk.walk(given)
    except CannotRepair as reason:
        if not isinstance(reason.__context__, _Flip):
            raise
        walk = TokenAxes(graph, sizes, opset, flipped=True)
        walk.walk(given)
    if not walk.sides:
        raise CannotRepair("no attention is found that mixes the positions of its tokens")
    return walk
