"""A twin of a stack: the same graphs without what they round, so that rounding can be told from a fault.

Where a graph computes in float16, or rounds what it multiplies to 8 bits, a cached step and the whole sequence in one
call rightly differ, and a fault may hide in that. The twin has the same nodes, weights and cache, computed in float32
without rounding: there right splits differ by 1e-6. Weights stay as they are stored and are widened when the file is
opened, so that a twin costs the size of its file on disk. It is written to a private folder; user files are only read.
"""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvdoctor.contract import CacheContract, Graph, Port
from kvdoctor.exactness import exactness_of
from kvdoctor.graph import ELEMENT_TYPES, GraphView
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.out_folder import copy_whole
from kvdoctor.stacks import OnnxFile
from kvdoctor.twins import integers, scales, widen
from kvdoctor.twins.names import NoTwin

__all__ = ["SETTINGS", "NoTwin", "Twin", "unrounded_bytes", "write_twin"]

SETTINGS = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""What keeps ONNX Runtime from rounding where the graph does not: MatMulNBits that it fuses itself compute in float32.
Source: onnxruntime_session_options_config_keys.h; a version that does not know the key ignores it."""

NARROW = {"float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
WIDE = 4
FLOAT16 = {"float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class Twin:
    """Where the twin lies, and how it is driven."""

    folder: Path
    contract: CacheContract


def unrounded_bytes(files: Iterable[OnnxFile]) -> int:
    """Bytes that the weights of some files take in float32."""
    total = 0
    for file in files:
        for scope in file.view.scopes() if file.view else ():
            for tensor in scope.graph.initializer:
                kind = ELEMENT_TYPES.get(tensor.data_type, "")
                total += math.prod(tensor.dims) * (WIDE if kind in NARROW or kind == "float" else 0)
    return total


def write_twin(files: Iterable[OnnxFile], contract: CacheContract, target: Path) -> Twin:
    """Write the twin of a stack's files into a folder that is there and empty.

    Raises:
        NoTwin: what the graphs round cannot be taken out, or there is no room; the message says why.
    """
    wanted = {graph.file: name for name, graph in contract.graphs.items()}
    chosen = [file for file in files if file.name in wanted]
    decoding = {contract.phases[phase].graph for phase in contract.phases if phase != "encode"}
    views = []
    try:
        _demand_room(chosen, target)
        for file in chosen:
            model = _unrounded(file)
            place = target / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(model.SerializeToString())
            for external in file.external:
                if not (copied := place.parent / external.location).exists():
                    copy_whole(external.path, copied)
            if wanted[file.name] in decoding:
                views.append((wanted[file.name] == contract.phases["decode"].graph, GraphView(model)))
    except OSError as error:
        raise NoTwin(f"it cannot be written: {error.strerror or error}") from None
    widened = _widened(contract)
    views.sort(key=lambda pair: not pair[0])
    exactness = exactness_of([view for _, view in views], widened.slots, twin=True)
    if exactness != "float":
        raise NoTwin(f"it would still round ({exactness})")
    return Twin(target, replace(widened, exactness=exactness))


def _unrounded(file: OnnxFile) -> ModelProto:
    """The model of a file without what it rounds; its weights outside are not read."""
    model = ModelProto()
    model.ParseFromString(file.path.read_bytes())
    widen.apply(model)
    integers.apply(model)
    scales.apply(model)
    return model


def _demand_room(files: list[OnnxFile], target: Path) -> None:
    sizes = [file.path.stat().st_size for file in files]
    sizes += {external.path: external.bytes or 0 for file in files for external in file.external}.values()
    if sum(sizes) * 1.1 > shutil.disk_usage(target).free:
        raise NoTwin(f"{target.parent} has no room for a copy of {sum(sizes) >> 20} MiB")


def _widened(contract: CacheContract) -> CacheContract:
    """The contract with float32 where the graphs had fewer bits."""
    return replace(
        contract,
        graphs={
            name: Graph(graph.file, tuple(map(_wide, graph.inputs)), tuple(map(_wide, graph.outputs)))
            for name, graph in contract.graphs.items()
        },
        slots=tuple(replace(slot, dtype="float") if slot.dtype in FLOAT16 else slot for slot in contract.slots),
    )


def _wide(port: Port) -> Port:
    return replace(port, dtype="float") if port.dtype in FLOAT16 else port
