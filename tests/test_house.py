"""The rules of the house that a program can check: which room may import which, and where the doors are."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kvdoctor"

ROOMS = (
    *("errors", "plain", "choices", "uses", "contract", "trace", "tolerances", "parity", "samples"),
    *("calls", "words", "filling", "encoding", "feeds", "script"),
    *("experiments", "kept_calls", "caller"),
    *("sessions", "ceilings", "examination", "trials", "replaying", "worker", "child", "runtimes"),
    *(
        "out_folder",
        "listing",
        "wire",
        "onnx_schema",
        "skeleton",
        "external_data",
        "graph",
        "scoping",
        "targets",
        "cache_operators",
        "exactness",
    ),
    *(
        "flow",
        "dataflow",
        "dialects",
        "axes",
        "roles",
        "configs",
        "config_windows",
        "stacks",
        "lost_state",
        "head_sizes",
        "lacks",
        "model_folder",
    ),
    *(
        "affixes",
        "slot_rules",
        "first_filling",
        "replaced_states",
        "slots",
        "encoder_reading",
        "reading",
        "given_misfits",
        "given",
        "given_samples",
        "twins",
        "place",
    ),
    *("fingerprints", "findings", "baseline", "case", "checks", "kept", "memory_notes", "memory", "report", "facts"),
    *("second_look", "options", "policy", "obstacles", "open_questions"),
    *("export", "reference", "stack_test", "elsewhere"),
    *("layouts", "rewiring", "patient", "sizing", "lowering", "repairs", "foreseeing", "doctor", "gating"),
    *(
        "cure",
        "re_exporting",
        "afresh",
        "exporting_afresh",
        "repro",
        "reproducing",
        "comparing",
        "environment",
        "progress",
        "asking",
        "api",
        "cli_options",
        "cli_output",
        "cli_examples",
        "cli_running",
        "cli_policy",
        "cli_gate",
        "cli_config",
        "cli_baseline",
        "cli_diff",
        "cli",
        "__main__",
    ),
)
"""From early to late: a room imports earlier ones only."""

LIGHT = (
    "errors",
    "plain",
    "contract",
    "trace",
    "tolerances",
    "parity",
    "samples",
    "calls",
    "words",
    "filling",
    "encoding",
    "feeds",
    "script",
    "experiments",
    "kept_calls",
    "caller",
)
"""What the worker loads in an environment with nothing but onnxruntime and numpy."""

FRAMEWORK_DOORS = "export/scripts"
"""Scripts that run in a Python of their own: nothing imports them."""


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path, *, also_for_types: bool = False) -> tuple[str, ...]:
    """Names of the modules that a file imports when it runs, at any depth of the file."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not also_for_types:
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names if node.module == "kvdoctor")
    return tuple(found)


def test_imports_point_to_earlier_rooms() -> None:
    for path in modules():
        mine = ROOMS.index(room(path))
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "kvdoctor" and len(parts) > 1 and parts[1] in ROOMS:
                assert ROOMS.index(parts[1]) <= mine, f"{path} must not import {name}"


def test_every_room_is_named_in_the_table_of_rooms() -> None:
    page = (PACKAGE.parent / "docs" / "design.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) == len(set(named))
    assert {name.partition("/")[0].removesuffix(".py") for name in named} == set(ROOMS)
    assert all((PACKAGE / name).exists() for name in named)
    assert {room(path) for path in modules()} == set(ROOMS)


def test_onnxruntime_is_imported_behind_its_door_only() -> None:
    behind = {"kvdoctor.worker", "kvdoctor.sessions", "kvdoctor.ceilings"}
    for path in modules():
        if room(path) not in ("worker", "sessions", "ceilings", "trials"):
            assert "onnxruntime" not in {name.split(".")[0] for name in imported(path, also_for_types=True)}, path
            assert not behind & set(imported(path)) or room(path) in ("examination", "replaying"), path


def test_frameworks_are_imported_behind_their_doors_only() -> None:
    frameworks = {"torch", "transformers", "optimum", "requests", "httpx", "urllib3"}
    for path in modules():
        roots = {name.split(".")[0] for name in imported(path, also_for_types=True)}
        if path.parent == PACKAGE / FRAMEWORK_DOORS:
            assert "kvdoctor" not in roots, path
        else:
            assert not [name for name in imported(path) if name.startswith(FRAMEWORK_DOORS.replace("/", "."))], path
            assert not roots & frameworks, path


@pytest.mark.parametrize("name", LIGHT)
def test_what_the_worker_needs_is_light(name: str) -> None:
    files = [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").exists() else list((PACKAGE / name).rglob("*.py"))
    for path in files:
        for module in imported(path, also_for_types=True):
            root = module.split(".")[0]
            assert root in {*sys.stdlib_module_names, "numpy", "kvdoctor"}, f"{path.name} imports {module}"
            if root == "kvdoctor" and "." in module:
                assert module.split(".")[1] in LIGHT, f"{path.name} imports {module}"


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"onnx", "numpy", "rich", "onnxruntime", "psutil"}),
        (["--version"], {"onnx", "numpy", "rich", "onnxruntime", "psutil"}),
        (["inspect", "fixtures/exports/gpt2", "--format", "json"], {"numpy", "rich", "onnxruntime", "onnx"}),
        (["step-test", "fixtures/exports/gpt2", "--format", "json"], {"onnxruntime"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_loads_only_what_it_needs(arguments: list[str], absent: set[str]) -> None:
    program = (
        "import sys\n"
        "from kvdoctor.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print(sorted(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    assert not set(ast.literal_eval(done.stderr.strip().splitlines()[-1])) & absent


def test_what_is_no_option_of_a_model_is_said_once() -> None:
    holders = [path.name for path in modules() if re.search(r'"format_", "outputs", "quiet"', path.read_text("utf-8"))]
    assert holders == ["cli_options.py"]
