"""What several tests of loops need."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.isolated import give_up

PACKAGES = (
    "onnxruntime-node@1.30.0",
    "onnxruntime-web@1.30.0",
    "typescript@7.0.2",
    "@types/node@20.19.43",
    "prettier@3.10.1",
)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that programs in JavaScript need and are checked with; projects below it find them."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        give_up("neither node nor npm is on the path")
    folder = tmp_path_factory.mktemp("modules")
    (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
    install = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES)
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        give_up(f"npm cannot install here: {done.stderr.strip()[-200:]}")
    return folder
