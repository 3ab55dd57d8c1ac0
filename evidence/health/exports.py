"""The exports of the health page: which exporter, beside which release of transformers, makes which of them.

An export lies in a folder of its own, or is one file of the repository. `make_missing` makes the folders that are not
there yet, each source with one call of its script in an isolated environment.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from support.isolated import EXPORTS, FIXTURES, Environment, call

from evidence.health import ort_exports, torch_exports
from evidence.zoo import genai_exports, optimum_exports, transformers_exports

HERE = Path(__file__).parent
ZOO = HERE.parent / "zoo"
TRANSFORMERS_4 = ("4.46.3", "4.48.3", "4.51.3", "4.53.3", "4.55.4", "4.57.6")
"""Releases of transformers that optimum-onnx 0.1.0 accepts, about two months apart."""
OLDER_NAMES = ("marian", "t5", "bart", "whisper", "gpt2", "llama", "qwen2", "mistral", "gemma2", "phi3")
"""What is exported with each of them; with the newest one it is all that the zoo has."""
TORCH_BESIDE = ("4.46.3", "4.51.3", "4.57.6")
"""Those that torch.onnx alone is tried beside: tracing the masks of the last one differs from the others."""
MOST_SECONDS = 3600
FILES = ("*.onnx", "*.onnx.data", "*.onnx_data", "config.json", "genai_config.json", "generation_config.json")
"""What the digest of an export covers: all that a diagnosis reads."""


@dataclass(frozen=True)
class Source:
    """An exporter in one environment, and the exports that it makes.

    Attributes:
        exporter: Its name and release, as the page shows it.
        beside: The other package whose release matters, as `transformers 4.57.6`.
        folder: Its folder below that of all exports; empty where the exports are files of the repository.
        names: The exports.
        environment: The isolated environment, None for files of the repository.
        command: The script and its first arguments; the output folder and the names follow.
        more: Arguments after the names.
    """

    exporter: str
    beside: str
    folder: str
    names: tuple[str, ...]
    environment: Environment | None = None
    command: tuple[str | Path, ...] = ()
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Export:
    """One export, or the exporter's refusal.

    Attributes:
        source: Where it comes from.
        name: Its name on the page.
        path: Folder or file.
    """

    source: Source
    name: str
    path: Path

    @property
    def key(self) -> str:
        """What it is found by in the stored results."""
        return f"{self.source.exporter} | {self.source.beside} | {self.name}"

    def failure(self) -> str | None:
        """What the exporter said when it did not make it, in one line; None where it did, or was not asked."""
        failed = self.path / "failed.txt"
        if not failed.is_file():
            return None
        lines = [line.strip() for line in failed.read_text(encoding="utf-8").splitlines() if line.strip()]
        return (lines or ["no message"])[0][:300]

    def is_there(self) -> bool:
        """Whether there is something to diagnose."""
        return self.path.is_file() or any(self.path.rglob("*.onnx"))

    def digest(self) -> str:
        """SHA-256 of all files that a diagnosis reads, with their names."""
        found = {self.path} if self.path.is_file() else {file for glob in FILES for file in self.path.rglob(glob)}
        total = hashlib.sha256()
        for file in sorted(found):
            total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        return total.hexdigest()


def sources() -> tuple[Source, ...]:
    """All of them, newest release first within an exporter."""
    return (*_optimum(), *_transformers(), *_genai(), *_torch(), *_onnxruntime(), *_fixtures())


def exports(source: Source, root: Path) -> list[Export]:
    """The exports of a source; `root` is the folder of all exports."""
    if source.folder:
        return [Export(source, name, root / source.folder / name) for name in source.names]
    if source.exporter.startswith("optimum"):
        return [Export(source, f"{name} (fixture)", EXPORTS / name) for name in source.names]
    scratch = FIXTURES / "from_scratch"
    return [Export(source, f"gpt by hand: {name}", scratch / f"{name}.onnx") for name in source.names]


def make_missing(source: Source, root: Path, names: tuple[str, ...] = ()) -> str | None:
    """Makes the exports of a source that are not below `root` yet, or those of `names` alone.

    Returns:
        Why its environment cannot be made; None where all were asked for.
    """
    if source.environment is None:
        return None
    wanted = [each for each in exports(source, root) if not names or each.name in names]
    missing = [each.name for each in wanted if not each.is_there() and each.failure() is None]
    if not missing:
        return None
    if (obstacle := source.environment.obstacle()) is not None:
        return obstacle
    out = root / source.folder
    more = [str(root / "optimum") if part == "EXPORTS" else part for part in source.more]
    call([*source.environment.command(), *source.command, out, *missing, *more], MOST_SECONDS)
    return None


def _optimum() -> list[Source]:
    found = []
    for release in reversed(TRANSFORMERS_4):
        newest = f"transformers=={release}" in optimum_exports.REQUIREMENTS
        kept = tuple(each for each in optimum_exports.REQUIREMENTS if not each.startswith("transformers=="))
        environment = Environment(
            optimum_exports.PYTHON, (*kept, f"transformers=={release}"), ("torch", "transformers", "optimum")
        )
        folder = "optimum" if newest else f"optimum-{release}"
        names = tuple(optimum_exports.BY_NAME) if newest else OLDER_NAMES
        command = (ZOO / "optimum_exports.py",)
        found.append(Source("optimum-onnx 0.1.0", f"transformers {release}", folder, names, environment, command))
    return found


def _transformers() -> list[Source]:
    """The exporter of transformers 5, and the graphs that its recipes make with torch.onnx alone."""
    requirements = transformers_exports.REQUIREMENTS
    environment = Environment(transformers_exports.PYTHON, requirements, ("torch", "transformers", "onnxscript"))
    every = (*transformers_exports.RECIPES, *transformers_exports.MORE_RECIPES)
    dynamo = tuple(name for name in every if "-dynamo" in name)
    own = tuple(name for name in every if name not in dynamo)
    release, torch = _release("transformers", requirements), _release("torch", requirements)
    command = (ZOO / "transformers_exports.py",)
    return [
        Source(f"transformers {release}", f"torch {torch}", "transformers", own, environment, command),
        Source(f"torch.onnx dynamo {torch}", f"transformers {release}", "transformers", dynamo, environment, command),
    ]


def _genai() -> list[Source]:
    requirements = genai_exports.REQUIREMENTS
    environment = Environment(genai_exports.PYTHON, requirements, ("torch", "transformers", "onnxruntime_genai"))
    exporter = f"onnxruntime-genai {_release('onnxruntime-genai', requirements)}"
    beside = f"transformers {_release('transformers', requirements)}"
    names = tuple(genai_exports.RECIPES)
    return [Source(exporter, beside, "genai", names, environment, (ZOO / "genai_exports.py",))]


def _torch() -> list[Source]:
    found = []
    torch = _release("torch", torch_exports.REQUIREMENTS)
    for exporter in ("torchscript", "dynamo"):
        for release in reversed(TORCH_BESIDE):
            requirements = (*torch_exports.REQUIREMENTS, f"transformers=={release}")
            environment = Environment(torch_exports.PYTHON, requirements, ("torch", "transformers", "onnxscript"))
            command = (HERE / "torch_exports.py", exporter)
            folder, names = f"{exporter}-{release}", torch_exports.ARCHITECTURES
            title = f"torch.onnx {'TorchScript' if exporter == 'torchscript' else exporter} {torch}"
            found.append(Source(title, f"transformers {release}", folder, names, environment, command))
    return found


def _onnxruntime() -> list[Source]:
    requirements = ort_exports.REQUIREMENTS
    environment = Environment(ort_exports.PYTHON, requirements, ("torch", "transformers", "onnxruntime"))
    exporter = f"onnxruntime.transformers {_release('onnxruntime', requirements)}"
    beside = f"transformers {_release('transformers', requirements)}"
    command, more = (HERE / "ort_exports.py",), ("--sources", "EXPORTS")
    return [Source(exporter, beside, "onnxruntime", ort_exports.NAMES, environment, command, more)]


def _fixtures() -> list[Source]:
    """The exports that lie in the repository, so that anyone can run their cells again."""
    optimum = {
        "4.46.3": ("marian-4.46.3",),
        "4.57.6": ("marian-4.57.6", "t5", "whisper", "gpt2", "llama-gqa"),
    }
    files = sorted(file.stem for file in (FIXTURES / "from_scratch").glob("*.onnx"))
    dynamo = tuple(name for name in files if name.endswith("-dynamo"))
    script = tuple(name for name in files if name not in dynamo)
    torch = _release("torch", torch_exports.REQUIREMENTS)
    return [
        *(Source("optimum-onnx 0.1.0", f"transformers {release}", "", names) for release, names in optimum.items()),
        Source(f"torch.onnx TorchScript {torch}", "a model by hand", "", script),
        Source(f"torch.onnx dynamo {torch}", "a model by hand", "", dynamo),
    ]


def _release(package: str, requirements: tuple[str, ...]) -> str:
    return next(each.partition("==")[2] for each in requirements if each.startswith(f"{package}=="))
