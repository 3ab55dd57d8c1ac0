"""Models that an experiment needs: parts of a flat graph with other outputs, in a private folder.

Weights are not copied: tensors point into the user's files, and the runtime is given the bytes of the variant while the
worker stands in the folder that holds those files. That is the one way that every onnxruntime from 1.16 to 1.31 takes:
links out of a folder are refused since 1.24, and hard links do not cross file systems.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.external_data import external_tensors
from kvdoctor.onnx_schema import GraphProto, ModelProto, ValueInfoProto
from kvdoctor.place.flat import Flat, NotFlat
from kvdoctor.skeleton import payload_left_out, read_skeleton

SEQUENCES = ("Sequence", "Optional", "SplitToSequence")
"""How the names of operators begin whose results are no tensors."""


@dataclass(frozen=True)
class Variant:
    """A model on disk: its file, the folder its weights are named from, and its outputs by the value they tell of."""

    path: Path
    root: Path
    outputs: Mapping[str, str]


def read_located(path: Path) -> ModelProto:
    """Read a model whose weights stay where they are.

    Raises:
        UnreadableError: the file cannot be read.
    """
    return read_skeleton(path, located=True).model


def is_tensor(flat: Flat, value: str) -> bool:
    """Whether a value is a tensor, as far as its operator tells."""
    node = flat.producers.get(value)
    return node is None or not node.op.startswith(SEQUENCES)


def write_variant(  # noqa: PLR0913 - by keyword
    flat: Flat,
    source: Path,
    to: Path,
    *,
    shapes: Iterable[str] = (),
    values: Iterable[str] = (),
    given: Mapping[str, int] | None = None,
) -> Variant:
    """Write the part of a graph that gives the shapes of some values, and others whole.

    `given` are values of the graph that become inputs, with the numbers of their element types.

    Raises:
        NotFlat: the part needs what cannot be had, such as weights that lie on two drives.
    """
    shapes, values, given = list(shapes), list(values), given or {}
    nodes = flat.before([*shapes, *values], given)
    graph, outputs = GraphProto(name="variant"), dict[str, str]()
    graph.node.extend(node.proto for node in nodes)
    for kind, op, names in (("shape", "Shape", shapes), ("value", "Identity", values)):
        for index, name in enumerate(names):
            outputs[name] = f"kvdoctor.{kind}.{index}"
            graph.node.add(op_type=op, name=f"{kind}{index}", input=[name], output=[outputs[name]])
    reads = {name for node in nodes for name in node.reads} | {*shapes, *values}
    for name, tensor in flat.constants.items():
        if name in reads and name not in given:
            if payload_left_out(tensor):
                raise NotFlat(f"the values of {tensor.name!r} are in no form that can be pointed to")
            copy = graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = name
    # Declared sizes are left out: they may lie, and some calls are made with other ones on purpose.
    kinds = {v.name: v.type.tensor_type.elem_type for v in flat.model.graph.input if v.name not in flat.constants}
    graph.input.extend(_typed(name, number) for name, number in (kinds | dict(given)).items() if name in reads)
    graph.output.extend(ValueInfoProto(name=name) for name in outputs.values())
    model = ModelProto(ir_version=max(flat.model.ir_version, 4), graph=graph)
    for domain, version in flat.opsets.items():
        model.opset_import.add(domain=domain, version=version)
    if flat.keeps_calls:
        model.functions.extend(flat.model.functions)
    root = rerooted(model, source)
    to.write_bytes(model.SerializeToString())
    return Variant(to, root, outputs)


def _typed(name: str, number: int) -> ValueInfoProto:
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = number
    return value


def rerooted(model: ModelProto, source: Path) -> Path:
    """Name the files of weights from one folder that holds them all, and return it."""
    real = dict[str, str]()
    entries = [e for tensor in external_tensors(model) for e in tensor.external_data if e.key == "location"]
    for entry in entries:
        real.setdefault(entry.value, os.path.realpath(source.parent / entry.value))
    if not real:
        return Path(os.path.realpath(source)).parent
    try:
        folder = Path(os.path.commonpath([str(Path(path).parent) for path in real.values()]))
    except ValueError:
        raise NotFlat("the weights lie on two drives") from None
    for entry in entries:
        entry.value = Path(real[entry.value]).relative_to(folder).as_posix()
    return folder
