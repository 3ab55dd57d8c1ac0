"""export.json of the exporters of transformers 5 against the graph: its files, and the inputs as they were traced.

Source: transformers 5.23, `exporters/metadata.py` and `exporters/base.py`: the runner drops what was not traced, and
asks for every input of the graph.
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor.analysis.configs import read_part
from kvdoctor.contract import describe
from kvdoctor.diagnose.checks.side_cars.disagreement import Disagreement, on_disk, plain, quoted
from kvdoctor.diagnose.checks.side_cars.tensors import describe_tensor, fits_port
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.view import Declared

MOST_LEAVES = 500


def export_json(context: ContractContext) -> list[Disagreement]:
    """Files that are not there, and traced inputs that are not those of the graph."""
    components = read_part(context.folder.side_cars.export, "components")
    views = {file.name: file.view for file in context.stack.files.values() if file.view is not None}
    found: list[Disagreement] = []
    for name in components:
        entry, key = read_part(components, name), f"components.{plain(name)}"
        file = entry.get("file")
        if not isinstance(file, str):
            continue
        if file in views:
            kwargs = read_part(read_part(entry, "metadata"), "kwargs")
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
        if path in ports and not fits_port(spec, ports[path]):
            there = describe(ports[path].dtype, ports[path].shape)
            yield Disagreement(f"{key}.{plain(path)}", describe_tensor(spec), there, there)


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
