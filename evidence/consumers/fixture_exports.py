"""The committed exports made again, in the environments that made them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from support.isolated import FIXTURES, Environment, call

NEW_TOKENS = 16
"""As many as generate.py asks for."""


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its data classes look up their annotations
    spec.loader.exec_module(module)
    return module


make_exports = load_script(FIXTURES / "make_exports.py")


def environment(name: str) -> Environment:
    """Returns the environment that the fixture `name` is made in."""
    requirements = tuple(make_exports.BY_NAME[name].requirements())
    return Environment(make_exports.PYTHON, requirements, ("torch", "transformers", "onnxruntime"))


def make_again(name: str, folder: Path) -> tuple[Path, Path]:
    """Makes the fixture `name` once more; returns the folders of its export and of its checkpoint."""
    environment(name).require()
    exports, checkpoints = folder / "exports", folder / "checkpoints"
    options = ("--out", exports, "--keep-checkpoint", checkpoints)
    done = call((sys.executable, FIXTURES / "make_exports.py", name, *options))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return exports / name, checkpoints / name
