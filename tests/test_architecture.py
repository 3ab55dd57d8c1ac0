"""The structure that docs/architecture.md describes: which package imports which, and what each may import at all."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from make_architecture import (
    LAYERS,
    PACKAGE,
    PAGE,
    PICTURE,
    PROGRAMS,
    imported,
    imports,
    modules,
    package_of,
    page,
    picture,
)

from kvdoctor.findings import Round, all_checks

LIGHT = {"decode", "errors", "choices", "records", "contract"}
"""What the worker loads in an environment with nothing but onnxruntime and numpy."""

IN_WORKER = re.compile(r"(runtime|addons\.\w+)\.worker\.")
LIGHT_MODULES = re.compile(
    r"(runtime\.worker|addons\.\w+\.(worker|messages)"
    r"|addons\.traces\.(recorded|read|step|inputs|lengths|pasts|check|replay|outputs|runs))\."
)
"""The same of modules: the worker itself, and what the add-ons do in it."""

MOST_FOLDERS, MOST_FILES = 10, 10

BUDGET = {
    "addons": 50,
    "addons/comparison": 1_550,
    "addons/conversions": 8_650,
    "addons/loops": 2_200,
    "addons/reproducer": 2_250,
    "addons/traces": 3_525,
    "analysis": 14_650,
    "cli": 1_425,
    "decode": 9_275,
    "diagnose": 13_375,
    "gating": 2_550,
    "model": 4_350,
    "repair": 6_600,
    "report": 6_650,
    "root": 2_975,
    "runtime": 3_700,
}
"""The most lines of Python that each package and each add-on may have; `root` are the modules outside of packages.

The figures are those of the day on which they were written, and they only go down. A package may take lines from
another one in the same commit, whose message names what they are for; nothing else raises a figure.
"""
MOST_MODULES, MOST_TEST_LINES, MOST_EVIDENCE_LINES = 405, 31_600, 17_725


def test_the_root_is_as_the_table_says() -> None:
    named = {name for level in LAYERS for name in level}
    assert {package_of(name) for name in modules()} == named
    assert sum((PACKAGE / name).is_dir() for name in named if "/" not in name) <= MOST_FOLDERS
    assert sum((PACKAGE / f"{name}.py").is_file() for name in named) <= MOST_FILES


def test_each_package_keeps_to_its_budget() -> None:
    lines = dict.fromkeys(BUDGET, 0)
    for path in (path for path in PACKAGE.rglob("*.py") if PROGRAMS not in path.parents):
        inside = path.relative_to(PACKAGE).parts
        room = "/".join(inside[:-1][: 2 if inside[0] == "addons" else 1]) or "root"
        lines[room] = lines.get(room, 0) + _count_lines(path)
    over = {room: f"{count} of {BUDGET.get(room, 0)}" for room, count in lines.items() if count > BUDGET.get(room, 0)}
    assert not over
    assert len(modules()) <= MOST_MODULES
    for folder, most in (("tests", MOST_TEST_LINES), ("evidence", MOST_EVIDENCE_LINES)):
        assert sum(map(_count_lines, (PACKAGE.parent / folder).rglob("*.py"))) <= most, folder


def test_imports_point_to_lower_layers() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in sorted(others)
        if package_of(other) != package_of(name) and level[package_of(other)] >= level[package_of(name)] > 0
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle() -> None:
    circles = [" -> ".join(circle) for circle in _circles(imports())]
    assert not circles, "\n".join(circles)


def test_onnxruntime_is_imported_in_the_worker_only() -> None:
    for name, path in modules().items():
        if not name.startswith("runtime.worker."):
            roots = {each.split(".")[0] for each in imported(path, also_for_types=True)}
            assert "onnxruntime" not in roots, name
            inside = [each for each in imported(path) if IN_WORKER.match(each.removeprefix("kvdoctor."))]
            assert not inside or IN_WORKER.match(name), f"{name} imports {inside}"


def test_frameworks_are_imported_in_the_exporters_scripts_only() -> None:
    frameworks = {"torch", "transformers", "optimum", "onnxruntime_genai", "requests", "httpx", "urllib3"}
    scripts = "repair.export.scripts"
    for name, path in modules().items():
        roots = {each.split(".")[0] for each in imported(path, also_for_types=True)}
        if name.startswith(f"{scripts}."):
            assert "kvdoctor" not in roots, name
        else:
            assert not [each for each in imported(path) if each.startswith(f"kvdoctor.{scripts}.")], name
            assert not roots & frameworks, name


def test_click_is_imported_by_the_command_line_only() -> None:
    for name, path in modules().items():
        if package_of(name) != "cli" and not re.fullmatch(r"addons\.\w+\.commands", name):
            assert "click" not in {each.split(".")[0] for each in imported(path, also_for_types=True)}, name


def test_the_command_line_calls_the_api_and_prints() -> None:
    may = {"__init__", "_version", "api", "choices", "cli", "errors", "options", "records", "report"}
    may |= {"model.output_folder"}
    for name, others in imports().items():
        if package_of(name) == "cli" or re.fullmatch(r"addons\.\w+\.commands", name):
            package = name.rpartition(".")[0]
            allowed = {*may, "addons", package, f"{package}.api", f"{package}.report"}
            assert not {other for other in others if not {other, package_of(other)} & allowed}, name


def test_what_the_worker_needs_is_light() -> None:
    for name, path in modules().items():
        if package_of(name) not in LIGHT and not LIGHT_MODULES.match(f"{name}."):
            continue
        for each in imported(path, also_for_types=package_of(name) in LIGHT):
            root, *rest = each.split(".")
            if root == "kvdoctor":
                inside = ".".join(rest)
                known = not rest or rest[0] in LIGHT or inside == "runtime" or LIGHT_MODULES.match(f"{inside}.")
                assert known, f"{name} imports {each}"
            else:
                known = {*sys.stdlib_module_names, "numpy", "onnxruntime"}
                known |= {"typing_extensions"}  # for types, never loaded
                known |= {"psutil"} if name == "runtime.worker.decoding" else set()  # not on Linux
                assert root in known, f"{name} imports {each}"


HEAVY = {
    *("rich", "onnxruntime", "onnx", "email", "msgspec"),
    *("kvdoctor.runtime.client", "kvdoctor.gating.run", "kvdoctor.addons.comparison.document"),
    *("kvdoctor.diagnose.pipeline", "kvdoctor.report.html", "kvdoctor.report.page.elements"),
}
"""Not needed to read a model, faulty or not; each takes a tenth of the time of an inspection or more."""


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"onnx", "numpy", "rich", "onnxruntime", "psutil"}),
        (["--version"], {"onnx", "numpy", "rich", "onnxruntime", "psutil"}),
        (["inspect", "fixtures/exports/gpt2", "--format", "json"], {*HEAVY, "kvdoctor.repair"}),
        (["inspect", "fixtures/exports/marian-4.57.6", "--format", "json"], HEAVY),
        (["step-test", "fixtures/exports/gpt2", "--format", "json"], {"onnxruntime", "numpy.lib"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], absent: set[str]) -> None:
    program = (
        "import sys\n"
        "from kvdoctor.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert not set(ast.literal_eval(done.stderr.strip().splitlines()[-1])) & absent


@pytest.mark.parametrize("when", get_args(Round))
def test_the_checks_of_a_round_are_found_without_loading_the_others(when: Round) -> None:
    program = f"from kvdoctor.findings import checks_of\nprint([one.code for one in checks_of({when!r})])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [one.code for one in all_checks() if when in one.functions]


def test_each_package_says_what_it_contains() -> None:
    for name in (name for level in LAYERS for name in level if (PACKAGE / name).is_dir()):
        text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert text.count(".") >= 3, (
            f"{name}/__init__.py: what lives here, what it may be asked for, what it must not know"
        )


def test_the_page_shows_the_packages_of_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python docs/make_architecture.py"
    assert PICTURE.read_text(encoding="utf-8") == picture(), "python docs/make_architecture.py"


def test_every_file_and_function_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    roots = (PACKAGE, PACKAGE.parent)
    named = re.findall(r"`([\w/-]+(?:/|\.py|\.json|\.toml|\.md))(?::(\w+))?`", text)
    wrong = []
    for path, name in named:
        file = next((root / path for root in roots if (root / path).exists()), None)
        if file is None and "NAME" not in path and path != "__init__.py":
            wrong.append(path)
        elif name and not re.search(
            rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", file.read_text("utf-8"), re.MULTILINE
        ):
            wrong.append(f"{path}:{name}")
    assert len(named) > 60
    assert not wrong, wrong


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _circles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """Groups of modules that reach each other."""
    reached = {name: _reached(name, graph) for name in graph}
    told: set[str] = set()
    for name in graph:
        circle = sorted(other for other in reached[name] if name in reached[other])
        if circle and name not in told:
            told |= set(circle)
            yield circle


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[name])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += graph[other]
    return found
