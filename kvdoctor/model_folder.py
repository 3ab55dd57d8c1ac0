"""From a path to the files that belong together: ONNX files with their roles, grouped into stacks, and the config.

A stack is what decodes together: the merged decoder with its encoder, the pair decoder + decoder_with_past with
theirs, or one decoder-only file; each suffix (`_q4`, `_fp16`, ...) makes a stack of its own.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvdoctor.dataflow import appended_states
from kvdoctor.errors import UnreadableError, UsageError
from kvdoctor.external_data import ExternalFile, ExternalProblem, examine
from kvdoctor.graph import GraphView
from kvdoctor.skeleton import Skeleton, read_skeleton

FileRole = Literal["encoder", "decoder", "decoder-with-past", "decoder-merged", "other", "unreadable"]

STEM = re.compile(
    r"(?P<stem>encoder_model|decoder_model_merged|decoder_with_past_model|decoder_model|model)(?P<suffix>_\w+)?",
    re.ASCII,
)
NAMED_ROLES: dict[str, FileRole] = {
    "encoder_model": "encoder",
    "decoder_model_merged": "decoder-merged",
    "decoder_with_past_model": "decoder-with-past",
    "decoder_model": "decoder",
}
MODEL_SUFFIXES = {".onnx", ".ort"}
MOST_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True)
class OnnxFile:
    """One ONNX file. `name` is its path relative to the folder, with forward slashes."""

    path: Path
    name: str
    role: FileRole
    skeleton: Skeleton | None = None
    view: GraphView | None = None
    problem: UnreadableError | None = None
    external: tuple[ExternalFile, ...] = ()
    external_problems: tuple[ExternalProblem, ...] = ()

    @property
    def suffix(self) -> str:
        """What follows the stem that Optimum gives the file: `_q4` of `model_q4.onnx`."""
        match = STEM.fullmatch(self.path.stem)
        return (match["suffix"] or "") if match else ""


@dataclass(frozen=True)
class StackFiles:
    """The files of one stack by role. `name` is unique in the folder; `suffix` included."""

    name: str
    kind: Literal["merged", "pair", "decoder-only", "unpaired"]
    files: dict[FileRole, OnnxFile]

    @property
    def main(self) -> OnnxFile:
        """The file that decodes with the cache."""
        return next(
            self.files[role] for role in ("decoder-merged", "decoder-with-past", "decoder") if role in self.files
        )


@dataclass(frozen=True)
class ModelFolder:
    """What lies at the path. `shown` is the path as the user wrote it; `config` is config.json, or empty."""

    shown: str
    root: Path
    files: tuple[OnnxFile, ...]
    stacks: tuple[StackFiles, ...]
    config: dict[str, Any] = field(default_factory=dict)
    config_problem: str | None = None


def open_folder(shown: str, at: Path | None = None) -> ModelFolder:
    """Find the model at a path: an `.onnx` file, a folder of them, or a repository with an `onnx/` subfolder.

    `at` is where it really lies, for a model that is shown under another path.

    Raises:
        UsageError: there is nothing at the path, or it is `-`.
    """
    if shown == "-":
        raise UsageError("a model cannot be read from standard input, its external data needs a path; give the path")
    path = at or Path(shown)
    if not path.exists():
        raise UsageError(f"{shown!r} does not exist; give an .onnx file or the folder of an export")
    if path.is_dir():
        root, chosen = path, None
        names = sorted(p for p in path.iterdir() if p.suffix in MODEL_SUFFIXES)
        if not names and (path / "onnx").is_dir():
            names = sorted(p for p in (path / "onnx").iterdir() if p.suffix in MODEL_SUFFIXES)
    else:
        root, chosen = path.parent, path
        siblings = (p for p in path.parent.iterdir() if p.suffix in MODEL_SUFFIXES and _could_belong(path, p))
        names = sorted({path, *siblings})
    files = tuple(_read(p, root) for p in names)
    stacks = tuple(_stacks(files))
    if chosen is not None:
        stacks = tuple(s for s in stacks if any(f.path == chosen for f in s.files.values() if f.role != "encoder"))
        kept = {f.name for s in stacks for f in s.files.values()} | {f.name for f in files if f.path == chosen}
        files = tuple(f for f in files if f.name in kept)
    config, problem = _read_config(root.parent if root.name == "onnx" and not (root / "config.json").exists() else root)
    return ModelFolder(shown, root, files, stacks, config, problem)


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


def role_of(path: Path, view: GraphView) -> FileRole:
    """The part a file plays, by its graph; its name decides only between graphs that look alike."""
    present = _cache_like(view.outputs)
    past = takes_past(view)
    match = STEM.fullmatch(path.stem)
    named = NAMED_ROLES.get(match["stem"]) if match else None
    if past:
        if view.branches is not None:
            return "decoder-merged"
        return "decoder-with-past" if named == "decoder-with-past" else "decoder"
    if present:
        return "decoder"
    if "logits" in view.outputs:
        return "other"
    return "encoder" if named == "encoder" or "last_hidden_state" in view.outputs else "other"


def takes_past(view: GraphView) -> bool:
    """Whether inputs look like a cache by name, or are appended to and returned beside logits."""
    return _cache_like(view.inputs) or ("logits" in view.outputs and bool(appended_states(view)))


def _cache_like(ports: dict[str, Any]) -> bool:
    return any(name.startswith(("past", "present", "cache_")) or ".past" in name for name in ports)


def _stacks(files: tuple[OnnxFile, ...]) -> Iterator[StackFiles]:
    """Group the files: by suffix first, then merged, pair and single decoders."""
    encoders = {file.suffix: file for file in files if file.role == "encoder"}
    for suffix in sorted({file.suffix for file in files}):
        mine = [file for file in files if file.suffix == suffix]
        encoder = encoders.get(suffix) or encoders.get("")
        shared: dict[FileRole, OnnxFile] = {"encoder": encoder} if encoder else {}
        tail = suffix.replace("_", "-")
        merged = [file for file in mine if file.role == "decoder-merged"]
        with_past = next((file for file in mine if file.role == "decoder-with-past"), None)
        first = next((file for file in mine if file.role == "decoder" and STEM.fullmatch(file.path.stem)), None)
        for file in merged:
            name = "merged" if len(merged) == 1 else f"merged-{file.path.stem}"
            yield StackFiles(name + tail, "merged", {"decoder-merged": file, **shared})
        if with_past and first:
            yield StackFiles("pair" + tail, "pair", {"decoder": first, "decoder-with-past": with_past, **shared})
        elif with_past:
            # Without a cross-attention cache the file can take an empty past, and needs no other one.
            crossed = any(".encoder." in name for name in with_past.view.inputs) if with_past.view else False
            kind: Literal["unpaired", "decoder-only"] = "unpaired" if crossed else "decoder-only"
            yield StackFiles("with-past" + tail, kind, {"decoder-with-past": with_past, **shared})
        yield from _single_decoders(mine, with_past, bool(merged), shared, tail)


def _single_decoders(
    mine: list[OnnxFile],
    with_past: OnnxFile | None,
    merged: bool,
    shared: dict[FileRole, OnnxFile],
    tail: str,
) -> Iterator[StackFiles]:
    for file in (file for file in mine if file.role == "decoder"):
        assert file.view is not None  # noqa: S101 - only read files have the role
        named = STEM.fullmatch(file.path.stem)
        if takes_past(file.view):
            name = "decoder" if named else file.path.stem
            yield StackFiles(name + tail, "decoder-only", {"decoder": file, **shared})
        elif not (named and (with_past or merged)):
            # The no-past half alone. Beside a merged decoder it is a spare copy of one of its branches.
            yield StackFiles("first-step" + tail, "unpaired", {"decoder": file, **shared})


def _read_config(folder: Path) -> tuple[dict[str, Any], str | None]:
    path = folder / "config.json"
    try:
        if not path.is_file():
            return {}, None
        if path.stat().st_size > MOST_CONFIG_BYTES:
            return {}, "config.json is larger than 8 MiB and was not read"
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"config.json cannot be read: {type(error).__name__}"
    return (content, None) if isinstance(content, dict) else ({}, "config.json holds no JSON object")
