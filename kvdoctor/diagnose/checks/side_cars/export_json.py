"""export.json of the exporters of transformers 5 against the graph: its files, and the inputs as they were traced.

Source: transformers 5.23, `exporters/metadata.py` and `exporters/base.py`: the runner drops what was not traced, and
asks for every input of the graph.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.configs import is_count
from kvdoctor.contract import describe
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, on_disk, part_of, plain, quoted
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.view import Declared

MOST_LEAVES = 500
ONNX_WORDS = {"float32": "float", "float64": "double"}


def export_json(context: ContractContext) -> list[Disagreement]:
    """Files that are not there, and traced inputs that are not those of the graph."""
    components = part_of(context.folder.side_cars.export, "components")
    views = {file.name: file.view for file in context.stack.files.values() if file.view is not None}
    found: list[Disagreement] = []
    for name in components:
        entry, key = part_of(components, name), f"components.{plain(name)}"
        file = entry.get("file")
        if not isinstance(file, str):
            continue
        if file in views:
            kwargs = part_of(part_of(entry, "metadata"), "kwargs")
            found += _traced(f"{key}.metadata.kwargs", kwargs, views[file].inputs) if kwargs else ()
        elif file.endswith(".onnx") and not on_disk(context, file):
            found.append(Disagreement(f"{key}.file", quoted(file), "no such file", "the file of that component"))
    return found


def _traced(key: str, kwargs: dict[str, Any], inputs: dict[str, Declared]) -> Iterator[Disagreement]:
    """A cache was traced as a whole, and what the graph does not read is no input of it."""
    ports = {name.removeprefix("input."): port for name, port in inputs.items()}
    for path, port in ports.items():
        if path.partition(".")[0] not in kwargs:
            missing = f"no {quoted(path.partition('.')[0])}"
            yield Disagreement(key, missing, f"input {quoted(port.name)}", quoted(path), "the runner cannot feed it")
    for path, spec in _tensors(kwargs):
        if path in ports and not _fits(spec, ports[path]):
            there = describe(ports[path].dtype, ports[path].shape)
            yield Disagreement(f"{key}.{plain(path)}", _words(spec), there, there)


def _tensors(kwargs: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors among the traced inputs by path."""
    waiting = list(kwargs.items())
    for path, spec in waiting:
        if not isinstance(spec, dict) or len(waiting) > MOST_LEAVES:
            continue
        leaves = spec.get("leaves")
        if isinstance(leaves, dict):
            waiting += [(f"{path}.{name}", leaf) for name, leaf in leaves.items()]
        else:
            yield path, spec


def _fits(spec: dict[str, Any], port: Declared) -> bool:
    """Whether a traced tensor is one that the port takes; what is no type, rank or size tells nothing."""
    dtype, shape = spec.get("dtype"), port.shape
    if isinstance(dtype, str) and port.dtype and ONNX_WORDS.get(dtype, dtype) != port.dtype:
        return False
    sizes = _shape(spec)
    rank = len(sizes) if sizes is not None else spec.get("rank")
    if shape is None or not is_count(rank):
        return True
    fixed = zip(shape, sizes or shape, strict=False)
    return rank == len(shape) and all(not isinstance(dim, int) or dim == size for dim, size in fixed)


def _shape(spec: dict[str, Any]) -> list[int] | None:
    shape = spec.get("shape")
    return shape if isinstance(shape, list) and all(is_count(size) for size in shape) else None


def _words(spec: dict[str, Any]) -> str:
    dtype, sizes = spec.get("dtype"), _shape(spec)
    word = plain(dtype) if isinstance(dtype, str) else "a tensor"
    return f"{word} {sizes}" if sizes is not None else f"{word} of rank {spec.get('rank')!r:.20}"
