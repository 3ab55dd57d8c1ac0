"""From a path to what lies there: ONNX files with their roles, grouped into stacks, and the side-car configs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdoctor.errors import UnreadableError, UsageError
from kvdoctor.external_data import examine
from kvdoctor.graph import GraphView
from kvdoctor.skeleton import read_skeleton
from kvdoctor.stacks import STEM, OnnxFile, StackFiles, group, role_of

MODEL_SUFFIXES = {".onnx", ".ort"}
SIDE_CARS = ("config.json", "genai_config.json", "export.json")
MOST_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class SideCars:
    """The JSON files beside a model, each empty where it is not there. `problems` are those that cannot be read."""

    config: dict[str, Any] = field(default_factory=dict)
    genai: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelFolder:
    """What lies at the path. `shown` is the path as the user wrote it."""

    shown: str
    root: Path
    files: tuple[OnnxFile, ...]
    stacks: tuple[StackFiles, ...]
    side_cars: SideCars = SideCars()


def open_folder(shown: str, at: Path | None = None) -> ModelFolder:
    """Find the model at a path: an `.onnx` file, a folder of them, or a repository with an `onnx/` subfolder.

    `at` is where it really lies, for a model that is shown under another path.

    Raises:
        UsageError: there is nothing at the path, or it is `-`.
    """
    path = at or Path(shown)
    refuse_nothing(shown, path)
    root, names = _names(path)
    chosen = None if path.is_dir() else path
    files = tuple(_read(p, root) for p in names)
    side_cars = _side_cars(_side_car_folder(root))
    stacks = tuple(group(files, side_cars.genai))
    if chosen is not None:
        stacks = tuple(s for s in stacks if any(f.path == chosen for f in s.files.values() if f.role != "encoder"))
        kept = {f.name for s in stacks for f in s.files.values()} | {f.name for f in files if f.path == chosen}
        files = tuple(f for f in files if f.name in kept)
    return ModelFolder(shown, root, files, stacks, side_cars)


def refuse_nothing(shown: str, path: Path) -> None:
    """Refuse a path at which there is nothing.

    Raises:
        UsageError: there is nothing at the path, or it is `-`.
    """
    if shown == "-":
        raise UsageError("a model cannot be read from standard input, its external data needs a path; give the path")
    if not path.exists():
        raise UsageError(f"{shown!r} does not exist; give an .onnx file or the folder of an export")


def looked_at(path: Path) -> tuple[Path, tuple[Path, ...]]:
    """The folder of the model at a path, and every file that `open_folder` reads there, as far as it exists.

    What the models name as external data is not among them.
    """
    root, names = _names(path)
    beside = _side_car_folder(root)
    return root, (*names, *(beside / name for name in SIDE_CARS if (beside / name).exists()))


def _names(path: Path) -> tuple[Path, list[Path]]:
    """The folder of a model, and the files that can belong to it."""
    if not path.is_dir():
        siblings = (p for p in path.parent.iterdir() if p.suffix in MODEL_SUFFIXES and _could_belong(path, p))
        return path.parent, sorted({path, *siblings})
    names = sorted(p for p in path.iterdir() if p.suffix in MODEL_SUFFIXES)
    if not names and (path / "onnx").is_dir():
        names = sorted(p for p in (path / "onnx").iterdir() if p.suffix in MODEL_SUFFIXES)
    return path, names


def _side_car_folder(root: Path) -> Path:
    return root.parent if root.name == "onnx" and not (root / "config.json").exists() else root


def _could_belong(chosen: Path, other: Path) -> bool:
    """Of the files beside a chosen one, only those with Optimum's names can belong to its stack."""
    return bool(STEM.fullmatch(chosen.stem) and STEM.fullmatch(other.stem))


def _read(path: Path, root: Path) -> OnnxFile:
    name = path.relative_to(root).as_posix()
    try:
        skeleton = read_skeleton(path)
    except UnreadableError as problem:
        return OnnxFile(path, name, "unreadable", problem=problem)
    view = GraphView(skeleton.model)
    external, problems = examine(skeleton.model, path)
    return OnnxFile(path, name, role_of(path, view), skeleton, view, None, external, problems)


def _side_cars(folder: Path) -> SideCars:
    found, problems = {}, []
    for name in SIDE_CARS:
        content, problem = _read_json(folder / name)
        found[name] = content
        problems += [problem] if problem else []
    config, genai, export = (found[name] for name in SIDE_CARS)
    return SideCars(config, genai, export, tuple(problems))


def _read_json(path: Path) -> tuple[dict[str, Any], str | None]:
    try:
        if not path.is_file():
            return {}, None
        if path.stat().st_size > MOST_CONFIG_BYTES:
            return {}, f"{path.name} is larger than 8 MiB and was not read"
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {type(error).__name__}"
    return (content, None) if isinstance(content, dict) else ({}, f"{path.name} holds no JSON object")
