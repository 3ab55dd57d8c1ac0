"""Files of a decoder: one graph, one graph with two branches, or a pair of graphs; with the contract of its caller."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper, numpy_helper

from .body import Body
from .design import Contract, Design, Port
from .sheet import Weights

if TYPE_CHECKING:
    from .faults import Fault

FLAG = "use_cache_branch"


@dataclass
class Decoder:
    """Models by file name, and what a caller must know: `first` is the file of the first call."""

    design: Design
    contract: Contract
    body: Body
    """The graph or branch that has the past."""
    slips: dict[str, tuple[str, ...]]
    """The mistakes that its author could have made, with the findings that are right for them."""
    files: dict[str, onnx.ModelProto] = field(default_factory=dict)
    first: str = "model.onnx"
    later: str = "model.onnx"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, model in self.files.items():
            (folder / name).write_bytes(model.SerializeToString())


def build(design: Design, fault: Fault | None = None) -> Decoder:
    """The decoder of a design, with one mistake or none."""
    weights = Weights(design.seed)
    if design.files == "one":
        body = Body(design, weights, fault)
        found = Decoder(design, body.contract, body, body.slips)
        found.files["model.onnx"] = _model(body, body.contract.ports, weights)
        return found
    if design.files == "merged":
        return _merged(design, weights, fault)
    empty, cached = (Body(design, weights, fault, each, "p_" if not each else "") for each in (False, True))
    found = Decoder(design, cached.contract, cached, cached.slips | empty.slips)
    found.first, found.later = "decoder_model.onnx", "decoder_with_past_model.onnx"
    found.files = {
        found.first: _model(empty, empty.contract.ports, weights),
        found.later: _model(cached, cached.contract.ports, weights),
    }
    ports = cached.contract.ports + empty.contract.ports
    found.contract.ports = list({port.name: port for port in ports}.values())
    return found


def _merged(design: Design, weights: Weights, fault: Fault | None) -> Decoder:
    outer = Body(design, weights, None, cached=True)
    cached, empty = (Body(design, weights, fault, each, "c_" if each else "n_") for each in (True, False))
    branches = []
    for body, name in ((cached, "with_past"), (empty, "without_past")):
        outs = [f"{body.prefix}out_{port}" for port, _, _ in body.outputs]
        for (_, value, _), out in zip(body.outputs, outs, strict=True):
            body.rename(value, out)
        infos = [helper.make_tensor_value_info(out, k, None) for out, (_, _, k) in zip(outs, body.outputs, strict=True)]
        branches.append(helper.make_graph(body.nodes, name, [], infos))
    names, flag = [port for port, _, _ in cached.outputs], cached.naming.port(FLAG)
    node = helper.make_node("If", [flag], names, name="branch", then_branch=branches[0], else_branch=branches[1])
    ports = {port.name: port for port in cached.contract.ports + empty.contract.ports}
    contract = replace(cached.contract, ports=[*ports.values(), Port(flag, FLAG, TensorProto.BOOL, (1,))])
    outer.nodes, outer.outputs = [node], [(name, name, kind) for name, _, kind in cached.outputs]
    found = Decoder(design, contract, cached, cached.slips | empty.slips)
    found.files["model.onnx"] = _model(outer, contract.ports, weights, renamed=False)
    return found


def _model(body: Body, ports: list[Port], weights: Weights, renamed: bool = True) -> onnx.ModelProto:
    slots = body.contract.slots
    if renamed:
        for name, value, _ in body.outputs:
            body.rename(value, name)
    inputs = [helper.make_tensor_value_info(p.name, p.kind, p.shape) for p in ports]
    pasts = [helper.make_tensor_value_info(s.past, s.kind, s.shape) for s in slots]
    inputs = pasts + inputs if "cache_first" in body.design.extras else inputs + pasts
    outputs = [helper.make_tensor_value_info(n, k, _shape(n, body)) for n, _, k in body.outputs]
    held = [numpy_helper.from_array(array, name) for name, array in weights.arrays.items()]
    graph = helper.make_graph(body.nodes, "main", inputs, outputs, held)
    used = _names_in(graph)
    kept = [each for each in graph.initializer if each.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    opset = helper.make_opsetid("", body.design.opset)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8 if body.design.opset < 20 else 10)


def _shape(name: str, body: Body) -> list[str | int]:
    """The declared shape of an output: of other logits only the rank."""
    design, batch = body.design, 1 if body.design.batch_one else "batch"
    new = 1 if design.one_token else "new"
    logits, form = body.contract.logits
    if name == logits and form == "bsv":
        return [batch, new, design.vocab]
    for slot in body.cache.slots():
        if slot.present == name:
            grown = {"past": "total" if slot.growth == "grow" else "new", "held": "kept"}
            return [grown.get(str(size), size) for size in slot.shape]
    ranks = {"flat": 2, "last": 2, "argmax": 2, "argmax_last": 2, "books": 4}
    return [f"{name}_{axis}" for axis in range(ranks.get(form, 3) if name == logits else 3)]


def _names_in(graph: onnx.GraphProto) -> set[str]:
    found = set()
    for node in graph.node:
        found.update(node.input)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found |= _names_in(attribute.g)
    return found
