"""A candidate for a reproducer: models without weights, and the script that should fail with them."""

import math
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from kvdoctor.contract import DECODING, CacheContract, Phase, Port
from kvdoctor.decode.script import CallScript, MadeArray, PriorOutput, make_array
from kvdoctor.model.external_data import BITS
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.traverse import all_nodes, graphs_in, subgraphs
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.reproducer.sizes import WIDTHS, SizeMap
from kvdoctor.reproducer.weights import INTEGERS, MAX_FLOATS, MAX_INTEGERS, ReplacedWeights, WeightReplacer, find_uses

TOKENS = ("token_ids",)


@record(slots=False)
class Candidate:
    """A candidate for a reproducer.

    Attributes:
        folder: the folder that the models were read from.
        models: the skeleton of each file.
        script: the calls.
        contract: the cache contract.
        sizes: the smaller sizes.
        strength: the factor of the noise in matrices.
        cuts: what was removed, in words.
    """

    folder: Path
    models: dict[str, ModelProto]
    script: CallScript
    contract: CacheContract
    sizes: SizeMap = field(default_factory=SizeMap)
    strength: float = 1.0
    cuts: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, set[str]]:
        """The inputs of each file."""
        return {file: set(GraphView(model).inputs) for file, model in self.models.items()}

    def weight_bytes(self) -> int:
        """The bytes of noise."""
        total = 0
        for model in self.models.values():
            tables = find_uses(model).tables
            total += sum(_bits(tensor, self.sizes, tensor.name in tables) // 8 for tensor in _tensors(model))
        return total

    def write(self, folder: Path, seed: int, names: "dict[str, str] | None" = None) -> ReplacedWeights:
        """Write the files with noise for weights; `names` are new names of the files."""
        tally = ReplacedWeights()
        origins: dict[str, str] = {}
        used = {call.file for call in self.script.calls} | set(self.script.files)
        for file in sorted(used & set(self.models)):
            target = folder / (names or {}).get(file, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            parent = (self.folder / file).parent
            cleaned = WeightReplacer(parent, seed, self.sizes, self.strength, tally, origins).clean(self.models[file])
            target.write_bytes(cleaned.SerializeToString(deterministic=True))
        return tally

    def fitted_contract(self) -> CacheContract:
        """The contract of the candidate: the decoder's graphs, without the ports and slots that were removed."""
        contract = self.sizes.contract(self.contract)
        phases: dict[str, Phase] = {phase: contract.phases[phase] for phase in DECODING}
        views = {name: GraphView(model) for name, model in self.models.items()}
        graphs = {}
        for name in {served.graph for served in phases.values()}:
            graph, view = contract.graphs[name], views[contract.graphs[name].file]
            graphs[name] = replace(
                graph,
                inputs=tuple(port for port in graph.inputs if port.name in view.inputs),
                outputs=tuple(port for port in graph.outputs if port.name in view.outputs),
            )
        inputs = {port.name for graph in graphs.values() for port in graph.inputs}
        slots = tuple(slot for slot in contract.slots if slot.past in inputs)
        return replace(contract, phases=phases, graphs=graphs, slots=slots)

    def resized_script(self) -> CallScript:
        """The script for the remaining inputs, in the sizes of the candidate."""
        script = self.script.fitting(self.inputs)
        ports = {(graph.file, port.name): port for graph in self.contract.graphs.values() for port in graph.inputs}
        calls = tuple(
            replace(
                call,
                feeds={
                    name: value if isinstance(value, PriorOutput) else self._resize(value, ports[call.file, name])
                    for name, value in call.feeds.items()
                },
            )
            for call in script.calls
        )
        return replace(script, calls=calls)

    def _resize(self, given: MadeArray, port: Port) -> MadeArray:
        axes = port.axes if len(port.axes) == len(given.shape) else ("fixed",) * 0
        shape = tuple(
            self.sizes.of(size) if axes and axes[index] in WIDTHS else size for index, size in enumerate(given.shape)
        )
        numbers = given.numbers
        vocabulary = self.contract.vocabulary
        if numbers is not None and shape != given.shape:
            part = make_array(given)[tuple(slice(0, size) for size in shape)]
            numbers = tuple(part.ravel().astype(np.float64).tolist())
        if vocabulary is not None and port.role in TOKENS and self.sizes.of(vocabulary) != vocabulary:
            fewer = self.sizes.of(vocabulary)
            numbers = tuple(float(fewer // 4 + n % (fewer // 2)) for n in make_array(given).ravel().tolist())
        return replace(given, shape=shape, numbers=numbers)


def _tensors(model: ModelProto) -> "list[TensorProto]":
    found = [attribute.t for node in all_nodes(model) for attribute in node.attribute if attribute.HasField("t")]
    bodies = [body for function in model.functions for node in function.node for body in subgraphs(node)]
    for graph in [inner for outer in (model.graph, *bodies) for inner in graphs_in(outer)]:
        found += [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    return found


def _bits(tensor: TensorProto, sizes: SizeMap, table: bool) -> int:
    count = math.prod(tensor.dims)
    if count <= MAX_FLOATS or (tensor.data_type in INTEGERS and count <= MAX_INTEGERS):
        return 0
    return math.prod(sizes.dims(tensor, table)) * BITS.get(tensor.data_type, 32)
