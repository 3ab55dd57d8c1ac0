"""The float32 copy of a stack: the same graphs without their rounding, so that rounding can be told from a fault.

Where a graph computes in float16, or rounds its operands to 8 bits, a cached step and the whole sequence in one call
rightly differ, and a fault may hide in that difference. The copy has the same nodes, weights and cache, computed in
float32 without rounding: there right splits differ by 1e-6. Weights stay as they are stored and are widened when the
file is opened, so that a copy costs the size of its file on disk. It is written to a private folder; user files are
only read.
"""

import math
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import DECODING, CacheContract, Port
from kvdoctor.diagnose.float32.presents import unround_presents
from kvdoctor.diagnose.float32.quantization import unround_integers, unround_scales
from kvdoctor.diagnose.float32.widen import NoFloat32Copy, widen
from kvdoctor.model.output_folder import copy_whole
from kvdoctor.model.precision import exactness_of
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import ELEMENT_TYPES, GraphView
from kvdoctor.records import record

__all__ = ["SETTINGS", "Float32Copy", "NoFloat32Copy", "unrounded_bytes", "write_float32_copy"]

SETTINGS = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Keeps ONNX Runtime from rounding where the graph does not: MatMulNBits nodes that it fuses itself compute in float32.
Source: onnxruntime_session_options_config_keys.h; a version that does not know the key ignores it."""

NARROW = {"float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}
WIDE = 4
FLOAT16 = {"float16", "bfloat16"}


@record
class Float32Copy:
    """The folder of the copy, and the contract to run it by."""

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


def write_float32_copy(files: Iterable[OnnxFile], contract: CacheContract, target: Path) -> Float32Copy:
    """Write the float32 copy of a stack's files into an existing empty folder.

    Raises:
        NoFloat32Copy: the rounding cannot be taken out, or there is no room; the message says why.
    """
    wanted = {file: name for name, graph in contract.graphs.items() for file in graph.files}
    chosen = [file for file in files if file.name in wanted]
    decoding = {contract.phases[phase].graph for phase in DECODING}
    views = []
    try:
        _demand_room(chosen, target)
        for file in chosen:
            model = _unround(file, contract)
            place = target / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(model.SerializeToString())
            for external in file.external:
                if not (copied := place.parent / external.location).exists():
                    copy_whole(external.path, copied)
            if wanted[file.name] in decoding:
                views.append((wanted[file.name] == contract.phases["decode"].graph, GraphView(model)))
    except OSError as error:
        raise NoFloat32Copy(f"it cannot be written: {error.strerror or error}") from None
    widened = _widen_contract(contract)
    views.sort(key=lambda pair: not pair[0])
    exactness = exactness_of([view for _, view in views], widened.slots, without_rounding=True)
    if exactness != "float":
        raise NoFloat32Copy(f"it would still round ({exactness})")
    return Float32Copy(target, replace(widened, exactness=exactness))


def _unround(file: OnnxFile, contract: CacheContract) -> ModelProto:
    """The model of a file without its rounding; external weights are not read."""
    model = ModelProto()
    model.ParseFromString(file.path.read_bytes())
    unround_presents(model, contract)
    widen(model)
    unround_integers(model)
    unround_scales(model)
    return model


def _demand_room(files: list[OnnxFile], target: Path) -> None:
    sizes = [file.path.stat().st_size for file in files]
    sizes += {external.path: external.bytes or 0 for file in files for external in file.external}.values()
    if sum(sizes) * 1.1 > shutil.disk_usage(target).free:
        raise NoFloat32Copy(f"{target.parent} has no room for a copy of {sum(sizes) >> 20} MiB")


def _widen_contract(contract: CacheContract) -> CacheContract:
    """The contract with float32 where the graphs had fewer bits."""
    return replace(
        contract,
        graphs={
            name: replace(
                graph, inputs=tuple(map(_widen_port, graph.inputs)), outputs=tuple(map(_widen_port, graph.outputs))
            )
            for name, graph in contract.graphs.items()
        },
        slots=tuple(replace(slot, dtype="float") if slot.dtype in FLOAT16 else slot for slot in contract.slots),
    )


def _widen_port(port: Port) -> Port:
    return replace(port, dtype="float") if port.dtype in FLOAT16 else port
