"""What the sandbox of a worker lets it read: the files that its jobs name, and what they link to."""

import os
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvdoctor.choices import CPU
from kvdoctor.contract import CacheContract
from kvdoctor.decode.messages import AddedExperiment, Job, PairedSide
from kvdoctor.model.files import MODEL_SUFFIXES

DEVICES = ("/dev/dri", "/dev/nvidia*", "/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/shm")  # noqa: S108 - of drivers
"""The device files of graphics cards and accelerators: Linux names them by driver."""

MOST_DEPTH, MOST_INSIDE = 3, 4096
WRITTEN = ("keep", "keep_logits", "keep_calls", "scratch")
"""The fields of jobs that name files or folders for what the worker leaves."""


def device_files(job: Job) -> tuple[str, ...]:
    """Patterns of the device files that a job needs: with each provider but that of the CPU, those of all drivers."""
    models = (getattr(job, name, None) for name in ("model", "left", "right"))
    providers = {job.provider, *(getattr(model, "provider", None) for model in models)}
    return () if providers <= {CPU, None} else DEVICES


def readable(job: Job) -> frozenset[str]:
    """The files and folders that a job has to read, with the targets of the links in its folders."""
    return frozenset(found for path in _paths(job) for found in _resolve(path))


def writable(job: Job) -> frozenset[str]:
    """The folders in which a job has to write: those of the private files that it names."""
    paths = [path for name in WRITTEN if isinstance(path := getattr(job, name, None), Path)]
    return frozenset(os.path.realpath(path if path.is_dir() else path.parent) for path in paths)


def lie_within(paths: Collection[str], granted: Collection[str]) -> bool:
    """Whether each path is one of those granted, or lies in a folder among them."""
    return all(path in granted or any(os.fspath(one) in granted for one in Path(path).parents) for path in paths)


def _paths(value: Any) -> Iterator[Path]:
    """The paths in a message: the values of that type, not the names in a model that look like some."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, AddedExperiment):
        yield from (Path(text) for name, text in value.data.items() if name == "path")
    elif isinstance(value, (tuple, list)):
        yield from (path for one in value for path in _paths(one))
    elif is_dataclass(value) and not isinstance(value, CacheContract):
        yield from (path for one in fields(value) for path in _paths(getattr(value, one.name)))
    if isinstance(value, PairedSide):
        files = (file for graph in value.contract.graphs.values() for file in graph.files)
        yield from {(value.folder / file).parent for file in files}


def _resolve(path: Path, depth: int = MOST_DEPTH) -> Iterator[str]:
    """A path and what it leads to. A model is read with its folder, and next to the target of a link."""
    real = os.path.realpath(path)
    if depth < MOST_DEPTH and path.parent.is_relative_to(real):
        return  # a link to a folder around the model, which is no part of it
    if os.path.isdir(real):  # noqa: PTH112
        yield real
        if depth:
            for found in _list_inside(real, os.stat(real).st_mtime_ns):  # noqa: PTH116
                yield from _resolve(found, depth - 1)
    elif os.path.exists(real):  # noqa: PTH110
        yield os.path.dirname(real) if path.suffix in MODEL_SUFFIXES else real  # noqa: PTH120


@lru_cache(maxsize=256)
def _list_inside(folder: str, changed: int) -> tuple[Path, ...]:  # noqa: ARG001 - when it was changed
    """The links and the folders in a folder, of those that a model has: weights may lie in a folder of their own."""
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_symlink() or entry.is_dir()]
    return tuple(found[:MOST_INSIDE])
