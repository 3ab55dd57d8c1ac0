"""Two floors: the core works without any add-on (kvdoctor/addons), and imports none."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from make_architecture import PACKAGE, imported, modules, package_of

from kvdoctor import addons

REPOSITORY = PACKAGE.parent
COMMANDS = {
    "comparison": ("diff", "record"),
    "conversions": ("convert",),
    "loops": ("loop",),
    "reproducer": ("repro",),
    "traces": (),
}
"""The add-ons with their commands."""
NAMES = {"comparison": "diff", "conversions": "convert", "loops": "loop", "reproducer": "repro", "traces": "recording"}
"""A public name of each."""
FEW = (
    *("test_architecture.py::test_the_checks_of_a_round_are_found_without_loading_the_others", "test_parity.py"),
    *("test_skeleton.py", "test_thresholds.py", "test_free_axes.py"),
)
MORE = (
    *("test_cache_axes.py", "test_cut_short.py", "test_formats.py", "test_memory.py", "test_policy.py"),
    *("test_slots_crossed.py", "test_validity.py", "test_text_fixtures.py", "repairs/test_engine.py"),
)
"""Tests of the core, from reading a file to a proved repair and the policy of a gate: few for each add-on."""


def test_the_core_imports_no_add_on() -> None:
    for name, path in modules().items():
        if not package_of(name).startswith("addons/"):
            found = imported(path, also_for_types=name != "__init__")  # the package names all functions for callers
            assert not [each for each in found if each.startswith("kvdoctor.addons.")], name


def test_an_add_on_imports_no_other() -> None:
    for name, path in modules().items():
        if package_of(name).startswith("addons/"):
            own = package_of(name).removeprefix("addons/")
            others = {
                each.split(".")[2]
                for each in imported(path, also_for_types=True)
                if each.startswith("kvdoctor.addons.")
            }
            assert others <= {own}, name


def test_every_add_on_is_in_these_tests() -> None:
    assert addons.names() == tuple(sorted(COMMANDS))


def _copy(folder: Path, without: Iterable[str]) -> Path:
    """The repository with a copy of the package that lacks add-ons."""

    def ignore(place: str, names: list[str]) -> set[str]:
        return {n for n in names if n == "__pycache__" or (Path(place).name == "addons" and n in without)}

    shutil.copytree(PACKAGE, folder / "kvdoctor", ignore=ignore)
    shutil.copy(REPOSITORY / "conftest.py", folder)
    for name in ("fixtures", "docs", "evidence", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def _ignore_tests_of_add_ons(place: str, names: list[str]) -> set[str]:
    """The modules that import an add-on."""
    added = re.compile(r"^(from|import) kvdoctor\.addons\.", re.MULTILINE)
    tests = (name for name in names if name.endswith(".py"))
    return {"__pycache__", *(name for name in tests if added.search(Path(place, name).read_text("utf-8")))}


def _run(folder: Path, *call: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *call], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_with_its_folder(name: str, tmp_path: Path) -> None:
    folder = _copy(tmp_path, [name])
    program = (
        f"import kvdoctor.cli.main as m, kvdoctor; print(*m.list_commands(), '|', hasattr(kvdoctor, {NAMES[name]!r}))"
    )
    said = _run(folder, "-c", program).stdout
    there = {
        command for other in COMMANDS if (folder / "kvdoctor/addons" / other).is_dir() for command in COMMANDS[other]
    }
    listed, named = said.split("|")
    assert {each for commands in COMMANDS.values() for each in commands if each in listed.split()} == there
    assert named.strip() == "False"


def assert_works(folder: Path) -> None:
    """The help, an inspection and a step-test, by the package in the folder."""
    assert str(folder) in _run(folder, "-c", "import kvdoctor; print(kvdoctor.__file__)").stdout
    for command in (["--help"], ["inspect", "fixtures/exports/gpt2"], ["step-test", "fixtures/exports/gpt2"]):
        done = _run(folder, "-m", "kvdoctor", *command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_works_without_any_of_them(tmp_path: Path) -> None:
    folder = _copy(tmp_path, COMMANDS)
    assert sorted(path.name for path in (folder / "kvdoctor/addons").iterdir()) == ["__init__.py"]
    assert_works(folder)
    shown = _run(folder, "-m", "kvdoctor", "--help").stdout
    for command in (command for commands in COMMANDS.values() for command in commands):
        assert not re.search(rf"^ *(kvdoctor )?{command} ", shown, re.MULTILINE), command
    done = _run(folder, "-m", "kvdoctor", "convert", "fixtures/exports/gpt2", "--logits", "last", "--dry-run")
    assert (done.returncode, "there is no command and no path 'convert'" in done.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMANDS, "all"])
def test_the_tests_of_the_core_pass_without_an_add_on(name: str, tmp_path: Path) -> None:
    folder = _copy(tmp_path, COMMANDS if name == "all" else [name])
    assert_works(folder)
    shutil.copytree(REPOSITORY / "tests", folder / "tests", ignore=_ignore_tests_of_add_ons)
    traced = "caller-loop or caller-runtime or loop-breaks"  # text fixtures with a trace
    wanted = [f"tests/{each}" for each in (*FEW, *(MORE if name == "all" else ()))]
    done = _run(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"not ({traced})", *wanted)
    assert done.returncode == 0, done.stdout[-4000:]
