"""Files that can belong to a model, found by their names alone, and the digest of a file."""

import os
import re
from functools import lru_cache
from pathlib import Path

from kvdoctor.errors import UsageError, how_to_get

GIVE = "give an .onnx file or the folder of an export"
MODEL_SUFFIXES = {".onnx", ".ort"}
SIDE_CARS = (
    "config.json",
    "genai_config.json",
    "export.json",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "inference_metadata.yaml",
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
STEM = re.compile(
    r"(?P<stem>encoder_model|decoder_model_merged|decoder_with_past_model|decoder_model|model|embed_tokens|embeddings?)"
    r"(?P<suffix>_\w+)?",
    re.ASCII,
)


def refuse_nothing(shown: str, path: Path) -> None:
    """Refuse a path at which there is nothing.

    Raises:
        UsageError: there is nothing at the path, or it is `-`.
    """
    if shown == "-":
        raise UsageError("a model cannot be read from standard input, its external data needs a path; give the path")
    if not shown:
        raise UsageError(f"the path of a model is empty; {GIVE}")
    try:
        found = path.exists()
        if not found and path.is_symlink():
            raise UsageError(f"{shown!r} is a link that leads to no file; {GIVE}")
    except RuntimeError:  # Python 3.12 and earlier, of a loop of links
        found = False
    except OSError as error:  # a name that is too long
        raise UsageError(f"{shown[:80]!r} cannot be a path: {error.strerror or error}") from None
    if not found:
        raise UsageError(f"{shown!r} does not exist; {GIVE}{how_to_get(shown)}")


def looked_at(path: Path) -> tuple[Path, tuple[Path, ...]]:
    """The folder of the model at a path, and every existing file that a diagnosis reads there.

    What the models name as external data is not among them.
    """
    root, names = candidates(path)
    folder = side_car_folder(root)
    files = (folder / name for name in (*SIDE_CARS, *TOKENIZER))
    return root, (*names, *(file for file in files if file.exists()))


def list_names(folder: Path) -> tuple[str, ...]:
    """The sorted names in a folder. One with many models is listed once. Raises OSError."""
    return _list_names(folder, folder.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _list_names(folder: Path, changed: int) -> tuple[str, ...]:  # noqa: ARG001 - when it was changed
    return tuple(sorted(os.listdir(folder)))  # noqa: PTH208


def candidates(path: Path) -> tuple[Path, list[Path]]:
    """The folder of a model, and the files that can belong to it."""
    if not path.is_dir():
        if not STEM.fullmatch(path.stem):  # nothing else belongs to it: a folder of 100,000 files is not listed
            return path.parent, [path]
        siblings = (p for p in path.parent.iterdir() if p.suffix in MODEL_SUFFIXES and STEM.fullmatch(p.stem))
        return path.parent, sorted({path, *siblings})
    names = sorted(p for p in path.iterdir() if p.suffix in MODEL_SUFFIXES)
    if not names and (path / "onnx").is_dir():
        names = sorted(p for p in (path / "onnx").iterdir() if p.suffix in MODEL_SUFFIXES)
    return path, names


def side_car_folder(root: Path) -> Path:
    """Where the side-cars of the models in a folder lie."""
    return root.parent if root.name == "onnx" and not (root / "config.json").exists() else root


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    import hashlib  # with OpenSSL: an inspection that hashes nothing does not load it

    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
