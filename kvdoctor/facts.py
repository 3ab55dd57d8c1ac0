"""What the report says of files and stacks, read off the graphs and the disk."""

import hashlib
import platform
import sys
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract
from kvdoctor.graph import Declared
from kvdoctor.onnx_schema import onnx_version
from kvdoctor.report.document import CacheSize, FileFacts, StackFacts
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
    )


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


def stack_facts(stack: StackFiles, contract: CacheContract) -> StackFacts:
    """One stack as the report shows it."""
    names = tuple(file.name for file in stack.files.values())
    return StackFacts(stack.name, contract.layout, names, contract, cache_size(contract))


def cache_size(contract: CacheContract) -> CacheSize:
    """Bytes of the cache for one sequence, from the declared widths; None where one is not known."""
    per_token = _summed(contract, "self-attention")
    limit = contract.context_limit
    return CacheSize(
        bytes_per_token=per_token,
        bytes_per_encoder_state=_summed(contract, "cross-attention"),
        context=limit,
        bytes_at_context=per_token * limit if per_token is not None and limit is not None else None,
    )


def _summed(contract: CacheContract, kind: str) -> int | None:
    sizes = [slot.bytes_per_position() for slot in contract.of_kind(kind)]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
