"""The sizes and integers of all values of a decoder without a cache, what their axes count, and what is cached of them.

Sizes come from abstract runs at two lengths and two batches: an axis of the tokens has another size in each run, so
that no name of an axis is needed to find it. `new` is one row for each token of the call, `total` one for each token of
the sequence, on the key side of an attention; `folded` are new tokens and something else in one axis. Axes that count
neither have an empty label.

An operand on the key side is cached before it is permuted, repeated and scaled: of the values from which it follows,
each read by the next alone, that one is taken which has the shape of a cache: [batch, heads, tokens, width].
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget
from kvdoctor.analysis.abstract_run.tables import read_tables
from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun, TooMuchWork, exactly, unknown
from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.dialects.dialect import INPUTS
from kvdoctor.analysis.port_roles import INTEGERS, InputFlow, match_rule
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Role
from kvdoctor.decode.calls import Array
from kvdoctor.model.operators import has
from kvdoctor.model.proto import ModelProto, NodeProto
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.repair.workspace import CannotRepair

if TYPE_CHECKING:
    from kvdoctor.addons.conversions.graphs.token_axes import TokenAxes


LENGTHS = ((23, 29), (11, 13), (5, 7))
"""Tokens of the two runs, the first pair that the tables of the model allow: prime, so that few widths are equal."""
BATCHES = (3, 2)
STATES = 17
"""Encoder states, and any other open size."""
NODES = 1_000_000
TOKENS: tuple[Role, ...] = ("token_ids", "embeddings", "position_ids")
"""Inputs with a row for each token: of the new tokens from now on."""
MASKS: tuple[Role, ...] = ("attention_mask", "padding_mask")
"""Inputs with an entry for each token of the whole sequence."""
KNOWN: tuple[Role, ...] = (*TOKENS, *MASKS, "encoder_mask", "encoder_states")
ENCODER = re.compile(r"encoder", re.ASCII)


@record(slots=False)
class Inputs:
    """The inputs of a decoder without a cache: their token axes by name.

    `ids` is the input of the tokens themselves; `batch` and `length` are the declared names of its axes.
    """

    ids: str
    new: Mapping[str, int]
    masks: Mapping[str, int]
    batch: str
    length: str


@record(slots=False)
class Sizes:
    """All values of a graph at two lengths, and with another batch where that is open."""

    lengths: tuple[int, int]
    short: Mapping[str, Abstract]
    long: Mapping[str, Abstract]
    other: Mapping[str, Abstract] | None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The sizes of a value in the shorter run; None where they are unknown."""
        return self.short.get(name, UNKNOWN).shape

    def longer(self, name: str) -> tuple[int, ...] | None:
        """Its sizes in the longer run."""
        return self.long.get(name, UNKNOWN).shape

    def numbers(self, name: str) -> tuple[Array | None, Array | None]:
        """The exact numbers of a value in both runs, None where they are unknown."""
        return self.short.get(name, UNKNOWN).numbers, self.long.get(name, UNKNOWN).numbers

    def integers(self, name: str) -> tuple[int, ...] | None:
        """The integers of a value in the shorter run."""
        found = self.numbers(name)[0]
        return None if found is None else tuple(int(one) for one in found.ravel())

    def varies(self, name: str) -> bool:
        """Whether the shape of a value is another one in the longer run, or is unknown."""
        return self.shape(name) is None or self.shape(name) != self.longer(name)

    def counts_tokens(self, name: str, axis: int) -> bool:
        """Whether an axis has as many entries as the sequence has tokens."""
        short, long = self.shape(name), self.longer(name)
        if short is None or long is None or len(short) != len(long):
            return False
        return (short[axis], long[axis]) == self.lengths

    def batch_axis(self, name: str) -> int | None:
        """The axis that counts the batch alone; None where there is none, or where no run tells."""
        short, other = self.shape(name), (self.other or {}).get(name, UNKNOWN).shape
        if short is None or other is None or len(short) != len(other):
            return None
        return next((at for at, pair in enumerate(zip(short, other, strict=True)) if pair == BATCHES), None)


def read_inputs(file: OnnxFile) -> Inputs:
    """The inputs of the tokens and of everything that is as long.

    Raises:
        CannotRepair: there are no tokens, or an input has no known meaning.
    """
    view, flow = file.graph, file.dataflow
    roles: dict[str, Role | None] = {}
    for name, port in view.inputs.items():
        rule = match_rule(port, INPUTS)
        roles[name] = rule.role if rule is not None and rule.role in KNOWN else None
        if ENCODER.search(name):
            roles[name] = "encoder_mask" if "mask" in name else "encoder_states"
    ids = [name for name, role in roles.items() if role == "token_ids"]
    by_use = InputFlow(flow, view.inputs) if flow is not None else None
    if not ids and by_use is not None:
        ids = by_use.find_token_ids(
            name for name, port in view.inputs.items() if port.dtype in INTEGERS and not ENCODER.search(name)
        )
        roles.update(dict.fromkeys(ids, "token_ids"))
    for name in [name for name, role in roles.items() if role is None and by_use is not None]:
        found = by_use.find_role(name, set()) if by_use is not None else None
        roles[name] = found[0] if found is not None and found[0] in KNOWN else None
    ids = ids or [name for name, role in roles.items() if role == "embeddings"]
    if len(ids) != 1:
        raise CannotRepair(f"which input has the tokens is not known (inputs: {', '.join(roles)})")
    shape = view.inputs[ids[0]].shape or ()
    if len(shape) < 2 or isinstance(length := as_number(shape[1]), int):
        raise CannotRepair(f"the input {ids[0]!r} takes a fixed number of tokens: {list(shape)}")
    for name, role in roles.items():
        if role is None or (role in (*TOKENS, *MASKS) and len(view.inputs[name].shape or ()) < 2):
            raise CannotRepair(f"what the input {name!r} means is not known")
    new = {name: 1 for name, role in roles.items() if role in TOKENS}
    masks = {name: 1 for name, role in roles.items() if role in MASKS}
    batch = as_number(shape[0])
    return Inputs(ids[0], new, masks, batch if isinstance(batch, str) else "", length or "sequence_length")


def read_sizes(model: ModelProto, path: Path, given: Inputs) -> Sizes:
    """Run a graph abstractly at the first pair of lengths that it allows.

    Raises:
        CannotRepair: it cannot be run at any of them.
    """
    view, reason = GraphView(model), ""
    tables = read_tables(view, path)
    for lengths in LENGTHS:
        batches = BATCHES if given.batch else (as_number((view.inputs[given.ids].shape or (1,))[0]),) * 2
        calls = [(lengths[0], batches[0]), (lengths[1], batches[0]), (lengths[0], batches[1])]
        try:
            runs = []
            for length, batch in calls:
                graph = AbstractGraph(view, frozenset(), Budget(NODES), tables=tables)
                runs.append(graph.run_all(dict(_feed(view, given, length, int(batch or 1)))))
            return Sizes(lengths, runs[0], runs[1], runs[2] if given.batch else None)
        except (CannotRun, TooMuchWork) as error:
            reason = str(error)
    raise CannotRepair(f"it has no sizes at other lengths than those of its export: {reason or 'it is too large'}")


def _feed(view: GraphView, given: Inputs, length: int, batch: int) -> Iterator[tuple[str, Abstract]]:
    """Ones for a mask, and nothing but sizes for all else."""
    for name, port in view.inputs.items():
        sizes = [as_number(size) for size in port.shape or ()]
        found = [size if isinstance(size, int) else STATES for size in sizes]
        for axis in (at for known in (given.new, given.masks) if name in known for at in (known[name],)):
            found[axis] = length
        if found and not isinstance(sizes[0], int):
            found[0] = batch
        masked = name in given.masks or (ENCODER.search(name) and "int" in port.dtype)
        yield name, exactly(np.ones(found, np.int64)) if masked else unknown(found)


Label = Literal["", "new", "total", "folded"]
Labels = tuple[Label, ...]
Shape = tuple[int, ...]


class Mixes(Exception):
    """An operator combines positions in a way that a cache of keys and values does not follow; says how."""


def unlabelled(rank: int) -> Labels:
    """The labels of a value without content of tokens."""
    labels: list[Label] = [""] * rank
    return tuple(labels)


def broadcast(operands: Iterable[Labels]) -> Labels:
    """The labels of a result whose operands are broadcast to each other.

    Raises:
        Mixes: one operand has new tokens where another has the key side, or a folded axis.
    """
    found: dict[int, Label] = {}
    rank = 0
    for labels in operands:
        rank = max(rank, len(labels))
        for at, label in enumerate(reversed(labels)):
            if label and found.setdefault(at, label) != label:
                raise Mixes(f"it combines {found[at]} tokens with {label} tokens on one axis")
    return tuple(found.get(at, "") for at in reversed(range(rank)))


def regroup(labels: Labels, before: Shape, after: Shape, tokens: int) -> Labels:
    """The labels of a value under another shape.

    Raises:
        Mixes: the axis of the tokens is split, or the key side is folded into another axis.
    """
    made: list[Label] = [""] * len(after)
    for sources, targets in _pair_axes(before, after):
        inside = {labels[at] for at in sources} - {""}
        if not inside:
            continue
        alone = [at for at in targets if after[at] == tokens]
        if len(inside) == 1 and len(alone) == 1:
            made[alone[0]] = "new" if inside == {"folded"} else next(iter(inside))
            continue
        if inside & {"total"}:
            raise Mixes("it folds positions of the key side into another axis")
        holding = [at for at in targets if after[at] % tokens == 0]
        if len(holding) != 1:
            raise Mixes("it splits the axis of the tokens")
        made[holding[0]] = "folded"
    return tuple(made)


def _pair_axes(before: Shape, after: Shape) -> Iterable[tuple[list[int], list[int]]]:
    """The smallest runs of axes of both shapes that have as many entries, without axes of one entry."""
    ones = [at for at, size in enumerate(before) if size != 1]
    others = [at for at, size in enumerate(after) if size != 1]
    sources, targets, left, right = list[int](), list[int](), 1, 1
    while ones or others:
        if others and (right < left or not ones):
            targets.append(others.pop(0))
            right *= after[targets[-1]]
        else:
            sources.append(ones.pop(0))
            left *= before[sources[-1]]
        if left == right:
            yield sources, targets
            sources, targets, left, right = [], [], 1, 1


def multiply(
    letters: Sequence[str], result: str, labels: Sequence[Labels], flipped: bool
) -> tuple[Labels, tuple[int, ...]]:
    """The labels of a product by the letters of its axes, and the operands that become the key side.

    Of scores, the second operand has the keys; where it is `flipped`, the first.

    Raises:
        Mixes: it adds positions up otherwise than by the weights of an attention.
    """
    counted = [dict(zip(term, own, strict=True)) for term, own in zip(letters, labels, strict=True)]
    cuts = list[int]()
    for letter in sorted({one for term in letters for one in term} - set(result)):
        found = [own.get(letter, "") for own in counted]
        if set(found) == {"total", "new"}:
            cuts.append(found.index("new"))
        elif found != ["total", "total"] and any(found):
            raise Mixes("it adds up over positions with weights that are no attention")
    made: dict[str, Label] = {}
    for own in counted:
        for letter in set(own) & set(result):
            if own[letter] and made.setdefault(letter, own[letter]) != own[letter]:
                raise Mixes(f"it combines {made[letter]} tokens with {own[letter]} tokens on one axis")
    if sum(label == "new" for label in made.values()) > 1:
        operand = 0 if flipped else len(letters) - 1
        made[_find_keys(counted, made, operand)] = "total"
        cuts.append(operand)
    if sum(label == "total" for label in made.values()) > 1:
        raise Mixes("it relates the key side with itself")
    return tuple(made.get(letter, "") for letter in result), tuple(cuts)


def _find_keys(counted: Sequence[dict[str, Label]], made: dict[str, Label], operand: int) -> str:
    """The axis of scores that counts the keys: that of the tokens which one operand has alone."""
    new = [letter for letter, label in made.items() if label == "new"]
    keys = [letter for letter in new if [own.get(letter, "") == "new" for own in counted].count(True) == 1]
    keys = [letter for letter in keys if counted[operand].get(letter) == "new"]
    if len(new) != 2 or len(keys) != 1 or "total" in made.values():
        raise Mixes("it relates positions in a way that is no attention")
    return keys[0]


def spell_product(left: int, right: int, transposed: tuple[bool, bool] = (False, False)) -> tuple[list[str], str]:
    """The letters of a MatMul of operands with so many axes."""
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    rows, columns = ("" if left == 1 else "m"), ("" if right == 1 else "n")
    one, other = f"{rows}k", f"k{columns}"
    one = one[::-1] if transposed[0] else one
    other = other[::-1] if transposed[1] else other
    lead = [batch[len(batch) - max(rank - 2, 0) :] for rank in (left, right)]
    return [lead[0] + one, lead[1] + other], batch + rows + columns


RANK, LENGTH_AXIS = 4, 2
"""Axes of a cache, and the one that most loops expect its tokens on."""


@record(slots=False)
class KeySide:
    """A value that is cached: on its `axis` it counts tokens, and the product `node` reads it as keys or values.

    The node `reads` uses it for this product, at that input; the values `below`, between it and the product, are on the
    key side as well.
    """

    node: NodeProto
    part: Literal["key", "value"]
    value: str
    axis: int
    reads: tuple[NodeProto, int]
    below: tuple[str, ...]


def find_key_side(walk: "TokenAxes", node: NodeProto, index: int) -> KeySide:
    """The value to cache for an operand of a product.

    Raises:
        Mixes: there is none whose axes a loop can carry.
    """
    part: Literal["key", "value"] = "value"
    others = [walk.own(name) for at, name in enumerate(node.input) if at != index and name in walk.labels]
    if not any("total" in labels for labels in others) and not (has(node.op_type, "attend") and index > 1):
        part = "key"
    found = [(node.input[index], (node, index))]
    while (above := _step_up(walk, found[-1][0])) is not None:
        found.append(above)
    # The tokens have an axis of their own, and the batch one where that is open.
    alone = ((at, name) for at, (name, _) in enumerate(found) if walk.own(name).count("new") == 1)
    fits = [
        at
        for at, name in alone
        if not {"folded", "total"} & {*walk.own(name)}
        and (walk.sizes.other is None or walk.sizes.batch_axis(name) is not None)
    ]
    if not fits:
        raise Mixes(f"its {part}s have no axis for the batch alone, or one axis for tokens and others")
    whole = [at for at in fits if len(walk.shape(found[at][0])) == RANK]
    best = [at for at in whole if walk.own(found[at][0])[LENGTH_AXIS] == "new"]
    at = (best or whole or fits)[-1]
    value, reads = found[at]
    return KeySide(node, part, value, walk.own(value).index("new"), reads, tuple(name for name, _ in found[:at]))


def _step_up(walk: "TokenAxes", name: str) -> tuple[str, tuple[NodeProto, int]] | None:
    """The value that another one is made of by moving or scaling its entries; None where it is made otherwise."""
    maker = walk.makers.get(name)
    used = [one for one, _ in walk.readers.get(name, ()) if not has(one.op_type, "measure")]
    if maker is None or len(used) != 1:
        return None
    sources = [at for at, one in enumerate(maker.input) if one in walk.labels]
    if len(sources) != 1 or not has(maker.op_type, "copy", "cast", "permute", "view", "repeat", "scale"):
        return None
    source = maker.input[sources[0]]
    if any(walk.sizes.varies(one) for one in maker.input if one != source and has(maker.op_type, "scale")):
        return None
    labels = walk.own(source)
    return (source, (maker, sources[0])) if labels.count("new") == 1 and not {"folded", "total"} & set(labels) else None
