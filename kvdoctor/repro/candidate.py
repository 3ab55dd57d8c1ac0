"""A candidate: files without weights, and the script that is to fail on them."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvdoctor.contract import CacheContract, Port
from kvdoctor.external_data import BITS
from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import ModelProto, TensorProto
from kvdoctor.repro.sizes import WIDTHS, Sizes
from kvdoctor.repro.weights import FEW, INTEGERS, MOST_INTEGERS, Cleaner, Tally, uses_of
from kvdoctor.scoping import bodies, graphs
from kvdoctor.script import Given, Returned, Script, made

TOKENS = ("token_ids",)


@dataclass(frozen=True)
class Candidate:
    """Skeletons by file, and what is to become of them. `folder` holds the files that they were read from."""

    folder: Path
    models: dict[str, ModelProto]
    script: Script
    contract: CacheContract
    sizes: Sizes = field(default_factory=Sizes)
    strength: float = 1.0
    cuts: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, set[str]]:
        """The inputs of each file."""
        return {file: set(GraphView(model).inputs) for file, model in self.models.items()}

    def weight_bytes(self) -> int:
        """Bytes that noise will take."""
        total = 0
        for model in self.models.values():
            tables = uses_of(model).tables
            total += sum(_bits(tensor, self.sizes, tensor.name in tables) // 8 for tensor in _tensors(model))
        return total

    def write(self, folder: Path, seed: int, names: "dict[str, str] | None" = None) -> Tally:
        """Write the files with noise for weights, under other names where those are given."""
        tally = Tally()
        twins: dict[str, str] = {}
        used = {call.file for call in self.script.calls} | set(self.script.files)
        for file in sorted(used & set(self.models)):
            place = folder / (names or {}).get(file, file)
            place.parent.mkdir(parents=True, exist_ok=True)
            parent = (self.folder / file).parent
            cleaned = Cleaner(parent, seed, self.sizes, self.strength, tally, twins).clean(self.models[file])
            place.write_bytes(cleaned.SerializeToString(deterministic=True))
        return tally

    def fitted_contract(self) -> CacheContract:
        """The contract of what is left: without the ports and slots that were cut away, without the encoder."""
        contract = self.sizes.contract(self.contract)
        phases = {phase: served for phase, served in contract.phases.items() if phase != "encode"}
        there = {name: GraphView(model) for name, model in self.models.items()}
        graphs = {}
        for name in {served.graph for served in phases.values()}:
            graph, view = contract.graphs[name], there[contract.graphs[name].file]
            graphs[name] = replace(
                graph,
                inputs=tuple(port for port in graph.inputs if port.name in view.inputs),
                outputs=tuple(port for port in graph.outputs if port.name in view.outputs),
            )
        inputs = {port.name for graph in graphs.values() for port in graph.inputs}
        slots = tuple(slot for slot in contract.slots if slot.past in inputs)
        return replace(contract, phases=phases, graphs=graphs, slots=slots)

    def resized_script(self) -> Script:
        """The script for the inputs that are left, in the sizes of the candidate."""
        script = self.script.fitting(self.inputs)
        ports = {(graph.file, port.name): port for graph in self.contract.graphs.values() for port in graph.inputs}
        calls = tuple(
            replace(
                call,
                feeds={
                    name: value if isinstance(value, Returned) else self._resized(value, ports[call.file, name])
                    for name, value in call.feeds.items()
                },
            )
            for call in script.calls
        )
        return replace(script, calls=calls)

    def _resized(self, given: Given, port: Port) -> Given:
        axes = port.axes if len(port.axes) == len(given.shape) else ("fixed",) * 0
        shape = tuple(
            self.sizes.of(size) if axes and axes[index] in WIDTHS else size for index, size in enumerate(given.shape)
        )
        numbers = given.numbers
        vocabulary = self.contract.vocabulary
        if numbers is not None and shape != given.shape:
            part = made(given)[tuple(slice(0, size) for size in shape)]
            numbers = tuple(part.ravel().astype(np.float64).tolist())
        if vocabulary is not None and port.role in TOKENS and self.sizes.of(vocabulary) != vocabulary:
            fewer = self.sizes.of(vocabulary)
            numbers = tuple(float(fewer // 4 + n % (fewer // 2)) for n in made(given).ravel().tolist())
        return replace(given, shape=shape, numbers=numbers)


def _tensors(model: ModelProto) -> "list[TensorProto]":
    found = []
    for graph in graphs(model.graph):
        found += [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
        found += [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
    for function in model.functions:
        for node in function.node:
            found += [attribute.t for attribute in node.attribute if attribute.HasField("t")]
            for body in bodies(node):
                for graph in graphs(body):
                    found += graph.initializer
    return found


def _bits(tensor: TensorProto, sizes: Sizes, table: bool) -> int:
    count = math.prod(tensor.dims)
    if count <= FEW or (tensor.data_type in INTEGERS and count <= MOST_INTEGERS):
        return 0
    return math.prod(sizes.dims(tensor, table)) * BITS.get(tensor.data_type, 32)
