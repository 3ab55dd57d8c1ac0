"""From a path to the model there: ONNX files with their roles, grouped into stacks, and side-car configs."""

import json
import os
from pathlib import Path
from typing import Any

from kvdoctor.analysis.configs import SideCars
from kvdoctor.analysis.embedding_graphs import add_embedding_graphs, find_embedded_input
from kvdoctor.analysis.feature_encoders import add_feature_encoders
from kvdoctor.analysis.pipelines import find_pipelines
from kvdoctor.analysis.stacks import INPUT_ROLES, OnnxFile, StackFiles, group_stacks, role_of
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UnreadableError, as_argument, free_name
from kvdoctor.model.external_data import examine
from kvdoctor.model.files import SIDE_CARS, candidates, refuse_nothing, side_car_folder
from kvdoctor.model.skeleton import read_skeleton
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

MOST_AXES = 64
"""Axes of an array. Source: numpy, NPY_MAXDIMS."""
MOST_CONFIG_BYTES = 8 << 20
MOST_YAML_BYTES = 1 << 20
"""YAML is read forty times as slowly as JSON; a package of 48 layers has 50 KiB."""
MOST_TOKENIZER_BYTES = 64 << 20
"""Bytes of a tokenizer.json up to which it is read; the largest in use have some 35 MB."""


@record(slots=False)
class ModelFolder:
    """The files and stacks at a path. `shown` is the path as the user wrote it."""

    shown: str
    root: Path
    files: tuple[OnnxFile, ...]
    stacks: tuple[StackFiles, ...]
    side_cars: SideCars = SideCars()

    @property
    def out(self) -> str:
        """A folder for a repaired copy, as commands suggest it."""
        return self.name_copy("FIXED")

    def name_copy(self, wanted: str) -> str:
        """A free name for a folder with a copy: in this folder or, from within the model's folder, next to that."""
        root = self.root.resolve()
        inside = Path.cwd() == root or root in Path.cwd().parents
        return as_argument(free_name(os.path.relpath(root.parent / wanted) if inside else wanted))


def open_folder(shown: str, at: Path | None = None) -> ModelFolder:
    """Find the model at a path: an `.onnx` file, a folder of them, or a repository with an `onnx/` subfolder.

    `at` is the real path of a model that is reported under another one.

    Raises:
        UsageError: there is nothing at the path, or it is `-`.
    """
    path = at or Path(shown)
    refuse_nothing(shown, path)
    root, names = candidates(path)
    chosen = None if path.is_dir() else path
    files = tuple(_read_file(p, root) for p in names)
    side_cars = _read_side_cars(side_car_folder(root))
    pipelines = tuple(find_pipelines(files, side_cars.genai))
    staged = {file.name for stack in pipelines for file in stack.members}
    rest = tuple(file for file in files if file.name not in staged)
    stacks = (*pipelines, *group_stacks(rest, side_cars.genai))
    files, stacks = add_embedding_graphs(files, stacks, side_cars.config, side_cars.genai)
    embedded = {stack.name: find_embedded_input(stack, side_cars.config, side_cars.genai) for stack in stacks}
    widths = {name: port for name, port in embedded.items() if port is not None}
    files, stacks = add_feature_encoders(files, stacks, side_cars, widths)
    if chosen is not None:
        stacks = tuple(s for s in stacks if any(f.path == chosen for f in s.members if f.role not in INPUT_ROLES))
        kept = {f.name for s in stacks for f in s.members} | {f.name for f in files if f.path == chosen}
        files = tuple(f for f in files if f.name in kept)
    return ModelFolder(shown, root, files, stacks, side_cars)


def _read_file(path: Path, root: Path) -> OnnxFile:
    name = path.relative_to(root).as_posix()
    try:
        skeleton = read_skeleton(path)
        view = GraphView(skeleton.model)
        _refuse_high_ranks(view)
    except UnreadableError as problem:
        return OnnxFile(path, name, "unreadable", problem=problem)
    external, problems = examine(skeleton.model, path)
    return OnnxFile(path, name, role_of(path, view), skeleton, view, None, external, problems)


def _refuse_high_ranks(view: GraphView) -> None:
    """Refuse a tensor with more axes than arrays have: what follows each axis of it would never end."""
    for scope in view.scopes():
        graph = scope.graph
        values = ((v.name, v.type.tensor_type.shape.dim) for v in (*graph.input, *graph.output, *graph.value_info))
        for name, axes in (*values, *((tensor.name, tensor.dims) for tensor in graph.initializer)):
            if len(axes) > MOST_AXES:
                reason = f"it has a tensor of {len(axes):,} axes, {name[:80]!r}"
                raise UnreadableError(reason, f"export the model again; arrays have at most {MOST_AXES} axes")


def _read_side_cars(folder: Path) -> SideCars:
    found, problems = {}, []
    for name in SIDE_CARS:
        content, problem = read_object(folder / name)
        found[name] = content
        problems += [problem] if problem else []
    fields = ("config", "genai", "export", "generation", "processor", "preprocessor", "inference")
    named: dict[str, Any] = dict(zip(fields, map(found.get, SIDE_CARS), strict=True))
    return SideCars(**named, problems=tuple(problems))


def read_object(path: Path, most: int | None = None) -> tuple[dict[str, Any], str | None]:
    """The object of a JSON or YAML file, empty if there is no file; and why it was not read, if it was not.

    `most` are the bytes up to which it is read; without it those of a config.
    """
    in_yaml = path.suffix == ".yaml"
    most = most or (MOST_YAML_BYTES if in_yaml else MOST_CONFIG_BYTES)
    try:
        text = read_side_file(path, most).decode("utf-8")
        content = _parse_yaml(text) if in_yaml else json.loads(text)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and not path.is_symlink()
        return {}, None if missing else f"{path.name} was not read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {type(error.__cause__ or error).__name__}"
    if isinstance(content, dict):
        return content, None
    return {}, f"{path.name} is not a {'YAML mapping' if in_yaml else 'JSON object'}"


def _parse_yaml(text: str) -> Any:
    """Parse YAML without objects of Python. The library is loaded only for a model that has such a file.

    Raises:
        ValueError: it is not YAML.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 - both loaders are safe
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
