"""The C and C++ headers of ONNX Runtime, which its wheel lacks: fetched from a package whose digest is known."""

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from kvdoctor.addons.loops.plan import CannotBuild


class Source(NamedTuple):
    """A package that holds headers, with the SHA-512 that its registry publishes, and the folder in it."""

    package: str
    sha512: str
    inside: str


SOURCES = {
    "1.29": Source(
        "com.github.asus4.onnxruntime@0.4.9",
        "BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg==",
        "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64_x86_64-simulator/onnxruntime.framework/Headers/",
    ),
}
"""By the release of ONNX Runtime."""


class NoHeaders(CannotBuild):
    """The headers could not be had: the message says why."""


def fetch_headers(version: str, folder: Path) -> Path:
    """The folder with the headers of a release; `folder` is a cache, which is filled whole or not at all.

    Raises:
        NoHeaders: no package is known for the release, npm is missing or fails, or the package is another one.
    """
    made = folder / f"onnxruntime-headers-{version}"
    if made.is_dir():
        return made
    if version not in SOURCES:
        raise NoHeaders(f"no package is known for the headers of {version}; known: {', '.join(SOURCES)}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = Path(scratch, "headers")
        unpacked.mkdir()
        _unpack(_packed(SOURCES[version], Path(scratch)), SOURCES[version].inside, unpacked)
        try:
            unpacked.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise
    return made


def _packed(source: Source, scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise NoHeaders("npm, which fetches the package with the headers, is not installed")
    command = [npm, "pack", "--silent", "--pack-destination", os.fspath(scratch), source.package]
    done = subprocess.run(command, cwd=scratch, capture_output=True, encoding="utf-8", errors="replace", check=False)
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise NoHeaders(f"npm does not fetch {source.package}: {done.stderr.strip()[-500:]}")
    if base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode() != source.sha512:
        raise NoHeaders(f"{source.package} does not have the SHA-512 that is written here")
    return archives[0]


def _unpack(archive: Path, inside: str, folder: Path) -> None:
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix(inside)
            content = members.extractfile(member)
            if name != member.name and name.endswith(".h") and "/" not in name and content is not None:
                (folder / name).write_bytes(content.read())
    if not (folder / "onnxruntime_cxx_api.h").is_file():
        raise NoHeaders(f"there is no onnxruntime_cxx_api.h in {inside}")


def find_headers(cache: Path) -> dict[str, str]:
    """The headers next to the library of the wheel, where the environment names no release of its own.

    Those of JSON for Modern C++ are in a package that may be installed (`nlohmann-json`); else CMake fetches them.

    Raises:
        NoHeaders: they could not be had.
    """
    found = importlib.util.find_spec("nlohmann_json")
    made = {}
    if found is not None and found.origin is not None:
        made["NLOHMANN_JSON_INCLUDE"] = os.fspath(Path(found.origin).parent / "include")
    if any(os.environ.get(name) for name in ("ONNXRUNTIME_ROOT", "ONNXRUNTIME_INCLUDE")):
        return made
    return made | {"ONNXRUNTIME_INCLUDE": os.fspath(fetch_headers(max(SOURCES), cache))}
