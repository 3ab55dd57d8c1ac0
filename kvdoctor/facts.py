"""What the report says of files and stacks, read off the graphs and the disk."""

import hashlib
import math
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvdoctor.config_windows import declared_windows
from kvdoctor.configs import encoder_length
from kvdoctor.contract import CacheContract
from kvdoctor.graph import ELEMENT_TYPES, Declared, GraphView
from kvdoctor.kept import Load
from kvdoctor.memory import plan
from kvdoctor.model_folder import SideCars
from kvdoctor.onnx_schema import NodeProto, onnx_version
from kvdoctor.report.document import FileFacts, GraphFacts, StackFacts
from kvdoctor.stacks import OnnxFile, StackFiles


def environment() -> dict[str, str]:
    """Versions that a report depends on."""
    return {
        "onnx": onnx_version(),
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
    }


def file_facts(file: OnnxFile, hash_it: bool) -> FileFacts:
    """One file as the report shows it; `hash_it` reads every byte of it."""
    size = file.skeleton.bytes_on_disk if file.skeleton else _size(file.path)
    sha256 = _sha256(file.path) if hash_it and file.path.is_file() else None
    if file.view is None:
        return FileFacts(file.name, file.role, size, sha256)
    view = file.view
    return FileFacts(
        path=file.name,
        role=file.role,
        bytes=size,
        sha256=sha256,
        ir_version=view.model.ir_version,
        opsets=view.opsets,
        producer=view.producer,
        external=tuple(external.location for external in file.external),
        inputs=tuple(_port_facts(port) for port in view.inputs.values()),
        outputs=tuple(_port_facts(port) for port in view.outputs.values()),
        graph=_graph_facts(view),
    )


def _graph_facts(view: GraphView) -> GraphFacts:
    graphs = [scope.graph for scope in view.scopes()]
    bodies = [graph.node for graph in graphs] + [function.node for function in view.model.functions]
    operators = Counter(_operator(node) for nodes in bodies for node in nodes)
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    size = sum(_bits(tensor.data_type) * math.prod(tensor.dims) for tensor in tensors)
    return GraphFacts(operators.total(), dict(sorted(operators.items())), len(tensors), math.ceil(size / 8))


def _operator(node: NodeProto) -> str:
    return str(node.op_type) if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _bits(data_type: int) -> int:
    """Bits of an element, by the digits of its type's name: uint4, bfloat16, float8e4m3fn; 0 where it has no size."""
    name = ELEMENT_TYPES.get(data_type, "")
    known = {"float": 32, "double": 64, "bool": 8}
    digits = re.search(r"\d+", name)
    return known.get(name) or (int(digits.group()) if digits else 0)


def _port_facts(port: "Declared") -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": None if port.shape is None else list(port.shape)}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def stack_facts(
    stack: StackFiles, contract: CacheContract, side_cars: SideCars, load: Load | None = None
) -> StackFacts:
    """One stack as the report shows it, its cache planned for a load."""
    names = tuple(file.name for file in stack.files.values())
    cache = plan(contract, load, encoder_length(side_cars.config), declared_windows(side_cars.config))
    return StackFacts(stack.name, contract.layout, names, contract, cache)
