"""Returns the cross-attention weights of every layer, from which word timestamps are computed.

Requires: in each graph and branch of the decoder, for each layer one Softmax between the product with the key and that
with the value of its cross-attention cache. Ensures: the outputs `cross_attentions.LAYER`, float[batch, heads, new,
encoder], named as transformers and transformers.js do; no other value changes.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.analysis.lm_head import Scopes, describe_op, find_ends, find_maker, find_tensor
from kvdoctor.choices import Attentions
from kvdoctor.contract import Slot
from kvdoctor.model.edit import GraphWriter, declare, fresh_name, make_node
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import input_of, normalize_domain, output_of, readers, subgraphs
from kvdoctor.model.view import ELEMENT_TYPES
from kvdoctor.repair.workspace import CannotRepair, RepairContext
from kvdoctor.report.repair_record import Change

AXES = ("batch_size", "decoder_sequence_length", "encoder_sequence_length")
LEAST_OPSET = 10
"""The first in which the bounds of a Slice are inputs."""
MOST_STEPS = 64
"""Nodes that are followed from one product to the next: a graph may hold a circle."""
PRODUCTS, WEIGHTS = operators_with("product"), ("Softmax",)
MOVING = operators_with("copy", "cast", "view", "permute", "repeat", "scale")
"""Operators between a key or value and its product: they move or scale entries."""
SCORING = MOVING | operators_with("add", "subtract", "select")
"""Operators between the scores and their Softmax: they also mask."""
WEIGHING = operators_with("copy", "cast", "view", "dropout", "select")
"""Operators between the Softmax and the product with the values."""
LOOP = (
    "Every call returns cross_attentions.LAYER, float[batch, heads, new, encoder]: weights over the encoder states, "
    "which sum to 1; concatenate those of all steps along the third axis.",
    "Ask for them by name only where they are needed: a loop that names its outputs runs as before.",
)


@dataclass
class _Layer:
    """The key and the value of one layer in a graph: the values that both are made from."""

    number: int
    key: str
    value: str


_Weights = tuple[Scopes, dict[int, str]]
"""A graph or branch, and the weights that were found in it, by layer."""


def convert(context: RepairContext, choice: Attentions) -> Converted:  # noqa: ARG001 - there is one choice
    """Return the cross-attention weights.

    Raises:
        CannotRepair: an attention is not recognized; the message names the node.
    """
    contract = context.drivable
    slots = contract.of_kind("cross-attention")
    if not slots:
        context.cannot("it has no cross-attention cache")
    layers = sorted({slot.layer for slot in slots if slot.layer is not None})
    if len(slots) != 2 * len(layers):
        context.cannot("its cross-attention cache has no key and value for each layer")
    names = tuple(f"cross_attentions.{layer}" for layer in layers)
    changes = list[Change]()
    for file in dict.fromkeys(name for _, name in context.graphs()):
        model = context.model(file)
        context.require_opset(file, LEAST_OPSET, "Slice")
        taken = next((value.name for value in model.graph.output if value.name in names), None)
        if taken is not None:
            context.cannot(f"{file} already returns {taken!r}")
        graphs = (graph for graph in contract.graphs.values() if graph.file == file)
        logits = next((port.name for graph in graphs for port in graph.outputs if port.role == "logits"), None)
        if logits is None:
            context.cannot(f"{file} returns no logits")
        found = [_find_weights(scopes, slots) for scopes, _ in find_ends((model.graph,), logits)]
        changes += _return_weights(model, found, slots, file)
    return Converted(tuple(changes), LOOP, Comparison(weights=names))


def _find_weights(scopes: Scopes, slots: tuple[Slot, ...]) -> _Weights:
    layers = _find_layers(scopes, slots)
    reading = {name: found for graph in scopes for name, found in readers(graph).items()}
    weights = dict[int, str]()
    for node in scopes[-1].node:
        if node.op_type not in WEIGHTS or normalize_domain(node.domain):
            continue
        keys = _find_operands(scopes, input_of(node, 0))
        layer = next((one for one in layers if one.key in keys), None)
        if layer is None:
            continue
        if layer.number in weights:
            raise CannotRepair(
                f"the node {describe_op(node)} is a second Softmax over the keys of layer {layer.number}"
            )
        weights[layer.number] = _follow_weights(scopes, node, layer, reading)
    for layer in layers:
        if layer.number not in weights:
            _refuse_layer(layer, reading)
    return scopes, weights


def _find_layers(scopes: Scopes, slots: tuple[Slot, ...]) -> list[_Layer]:
    """What the keys and values of each layer are made from: a past, or a product with the encoder states."""
    made: dict[int, dict[str, str]] = {}
    inputs = {value.name for value in scopes[0].input}
    computing = [node for node in scopes[-1].node if not has(node.op_type, "copy")]
    for slot in slots:
        read = slot.past in inputs and any(slot.past in node.input for node in computing)
        output = slot.filled_by or ""
        ends = (name for inner, name in find_ends(scopes[:1], output) if inner[-1] is scopes[-1])
        name = slot.past if read else next(ends, output)
        made.setdefault(slot.layer or 0, {})[slot.part] = _find_root(scopes, name)
    return [_Layer(number, parts.get("key", ""), parts.get("value", "")) for number, parts in made.items()]


def _find_root(scopes: Scopes, name: str) -> str:
    for _ in range(MOST_STEPS):
        inner, node = find_maker(scopes, name)
        if node is None or node.op_type not in MOVING or normalize_domain(node.domain):
            break
        given = input_of(node, 0)
        _, maker = find_maker(inner, given)
        # A scale is a weight, or computed from no more than shapes.
        number = maker is None or has(maker.op_type, "constant", "power") or find_tensor(inner, given) is not None
        if has(node.op_type, "scale") and number:
            given = input_of(node, 1)
        scopes, name = inner, given
    return name


def _find_operands(scopes: Scopes, name: str) -> set[str]:
    """The roots of both operands of the product that reaches a value."""
    inner, node = find_maker(scopes, name)
    for _ in range(MOST_STEPS):
        if node is None or node.op_type not in SCORING or normalize_domain(node.domain):
            break
        at = 1 if has(node.op_type, "select") else 0
        makers = [find_maker(inner, given) for given in (node.input[at], *node.input[at + 1 : at + 2])]
        following = [(s, n) for s, n in makers if n is not None and (n.op_type in PRODUCTS or n.op_type in SCORING)]
        product = next((one for one in following if one[1].op_type in PRODUCTS), None)
        step = product or (following[0] if following else None)
        if step is None:
            return set()
        inner, node = step
    if node is None or node.op_type not in PRODUCTS or len(node.input) != 2:
        return set()
    return {_find_root(inner, given) for given in node.input}


def _follow_weights(
    scopes: Scopes, softmax: NodeProto, layer: _Layer, reading: dict[str, list[tuple[NodeProto, int]]]
) -> str:
    """The weights as the product with the values reads them."""
    name, seen = output_of(softmax), [softmax]
    while len(seen) < MOST_STEPS:
        found = [node for node, _ in reading.get(name, ()) if node.op_type in PRODUCTS or node.op_type in WEIGHING]
        product = next((node for node in found if node.op_type in PRODUCTS), None)
        if product is not None:
            other = next((given for given in product.input if given != name), "")
            if _find_root(scopes, other) != layer.value:
                raise CannotRepair(
                    f"the node {describe_op(product)} multiplies the weights of layer {layer.number} with something "
                    "else than its cross-attention values"
                )
            return str(name)
        if not found:
            raise CannotRepair(
                f"no product with the values of layer {layer.number} follows the node {describe_op(seen[-1])}"
            )
        seen.append(found[0])
        name = output_of(found[0])
    raise CannotRepair(f"too many nodes follow {describe_op(softmax)}")


def _refuse_layer(layer: _Layer, reading: dict[str, list[tuple[NodeProto, int]]]) -> NoReturn:
    names = [layer.key]
    for name in names:
        for node, _ in reading.get(name, ()):
            if has(node.op_type, "sizes") or any(True for _ in subgraphs(node)):
                continue
            if node.op_type not in MOVING or normalize_domain(node.domain):
                raise CannotRepair(
                    f"the node {describe_op(node)} takes the keys of layer {layer.number}, and no Softmax follows it "
                    "gives weights that can be returned"
                )
            names += [made for made in node.output if made not in names]
    raise CannotRepair(f"no node computes an attention over {layer.key!r}, the keys of layer {layer.number}")


def _return_weights(model: ModelProto, found: list[_Weights], slots: tuple[Slot, ...], file: str) -> list[Change]:
    writer, changes = GraphWriter(model, prefix="cross_attentions"), list[Change]()
    heads = {slot.layer or 0: (slot.size("kv_heads") or 0, slot.dtype) for slot in slots}
    types = {dtype: number for number, dtype in ELEMENT_TYPES.items()}
    tail, end = writer.numbers([-2]), writer.numbers([(1 << 63) - 1])
    for number in sorted(found[0][1]):
        output = f"cross_attentions.{number}"
        count, dtype = heads[number]
        front = writer.numbers([-1, count])
        batch, new, encoder = (f"cross_attentions_{axis}" for axis in AXES)
        declared = declare(output, types[dtype], (batch, count, new, encoder))
        for scopes, weights in found:
            _return_from(scopes, weights[number], (front, tail, end), writer.known, declared)
        model.graph.output.append(declared)
        branches = f" of {len(found)} branches" if len(found) > 1 else ""
        changes.append(
            Change(file, f"output {output!r}", "", f"{weights[number]}{branches}, the weights of layer {number}")
        )
    return changes


def _return_from(
    scopes: Scopes, weights: str, constants: tuple[str, str, str], known: set[str], declared: ValueInfoProto
) -> None:
    """Compute float[batch, heads, new, encoder] in a graph, and hand it on from a branch to the model."""
    front, tail, end = constants
    graph, inside = scopes[-1], len(scopes) > 1
    names = {word: fresh_name(f"{declared.name}.{word}", known) for word in ("shape", "sizes", "whole", "inner")}
    returned = names["inner"] if inside else declared.name
    graph.node.extend(
        [
            make_node("Shape", [weights], names["shape"]),
            make_node("Slice", [names["shape"], tail, end], names["sizes"]),
            make_node("Concat", [front, names["sizes"]], names["whole"], axis=0),
            make_node("Reshape", [weights, names["whole"]], returned),
        ]
    )
    for outer, body in reversed([*pairwise(scopes)]):
        body.output.add(name=returned).type.CopyFrom(declared.type)
        node = next(node for node in outer.node if any(inner is body for inner in subgraphs(node)))
        name = declared.name if outer is scopes[0] else fresh_name(f"{declared.name}.outer", known)
        if name not in node.output:
            node.output.append(name)
        returned = name


CONVERSION = GraphConversion(
    "attentions",
    order=10,
    read=lambda choices: choices.attentions,
    title=lambda choice: f"attentions {choice}",
    convert=convert,
)
