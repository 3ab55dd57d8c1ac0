"""What the tests of the CI files share: kvdoctor installed as strangers install it, once."""

import shutil
from pathlib import Path

import pytest
from support.isolated import give_up
from support.strange_machine import ROOT, git

PACKAGED = ("kvdoctor", "pyproject.toml", "README.md", "LICENSE", "action.yml", ".pre-commit-hooks.yaml")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that holds this working tree as its only commit, as `uses:` and `repo:` fetch it."""
    if shutil.which("git") is None:
        give_up("git is not on the path")
    repository = tmp_path_factory.mktemp("kvdoctor")
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, repository / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, repository / name)
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "all of it")
    return repository
