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

from kvdoctor.addons.loops.plan import CannotBuild

RELEASE = "1.29"
"""That of ONNX Runtime."""
SOURCE = "com.github.asus4.onnxruntime@0.4.9"
"""A package that holds its headers."""
SHA512 = "BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg=="
"""What the registry publishes for it."""
INSIDE = "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64_x86_64-simulator/onnxruntime.framework/Headers/"
"""The folder in it."""


class NoHeaders(CannotBuild):
    """The headers could not be had: the message says why."""


def fetch_headers(folder: Path) -> Path:
    """The folder with the headers; `folder` is a cache, which is filled whole or not at all.

    Raises:
        NoHeaders: npm is missing or fails, or the package is another one.
    """
    made = folder / f"onnxruntime-headers-{RELEASE}"
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unpacked = Path(scratch, "headers")
        unpacked.mkdir()
        _unpack(_packed(Path(scratch)), unpacked)
        try:
            unpacked.rename(made)
        except OSError:
            if not made.is_dir():  # else another process was faster
                raise
    return made


def _packed(scratch: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise NoHeaders("npm, which fetches the package with the headers, is not installed")
    command = [npm, "pack", "--silent", "--pack-destination", os.fspath(scratch), SOURCE]
    done = subprocess.run(command, cwd=scratch, capture_output=True, encoding="utf-8", errors="replace", check=False)
    archives = list(scratch.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise NoHeaders(f"npm does not fetch {SOURCE}: {done.stderr.strip()[-500:]}")
    if base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode() != SHA512:
        raise NoHeaders(f"{SOURCE} does not have the SHA-512 that is written here")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as members:
        for member in members:
            name = member.name.removeprefix(INSIDE)
            content = members.extractfile(member)
            if name != member.name and name.endswith(".h") and "/" not in name and content is not None:
                (folder / name).write_bytes(content.read())
    if not (folder / "onnxruntime_cxx_api.h").is_file():
        raise NoHeaders(f"there is no onnxruntime_cxx_api.h in {INSIDE}")


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
    return made | {"ONNXRUNTIME_INCLUDE": os.fspath(fetch_headers(cache))}
