"""C++: its warnings and formatter, two models in one process, and the headers of the runtime."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.isolated import EXPORTS
from support.loop_programs import assert_a_trace_is_accepted, program_text, snippet

from kvdoctor.addons.loops.check import build_cache, find_library
from kvdoctor.addons.loops.cpp_headers import NoHeaders
from kvdoctor.addons.loops.languages import CPP
from kvdoctor.addons.loops.pipeline import LoopRequest, write_loop
from kvdoctor.options import Options
from kvdoctor.runtime.process import NO_TELEMETRY

WARNINGS = ("-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror")
HEADERS = ("ONNXRUNTIME_INCLUDE", "NLOHMANN_JSON_INCLUDE")
PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(two_models LANGUAGES CXX)
add_subdirectory(../first_loop first_loop)
add_subdirectory(../second_loop second_loop)
add_executable(two_models main.cpp)
target_compile_features(two_models PRIVATE cxx_std_20)
target_link_libraries(two_models PRIVATE first_loop second_loop)
find_package(Threads REQUIRED)
target_link_libraries(two_models PRIVATE Threads::Threads)
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables with which programs are built; a skip where compiler, headers or library are missing."""
    if shutil.which("c++") is None or shutil.which("cmake") is None:
        pytest.skip("no C++ compiler, or no CMake")
    try:
        headers = CPP.prepare(build_cache() / "cpp")
    except NoHeaders as reason:
        pytest.skip(str(reason))
    return {**os.environ, "ONNXRUNTIME_LIB": str(find_library()), **headers, **NO_TELEMETRY}


def sources() -> list[Path]:
    return [path for path in sorted(CPP.folder.rglob("*")) if path.suffix in (".cpp", ".hpp")]


def test_the_program_is_formatted() -> None:
    formatter = shutil.which("clang-format", path=Path(sys.executable).parent) or "clang-format"
    subprocess.run([formatter, "--dry-run", "--Werror", *sources()], check=True)


@pytest.mark.slow
def test_the_program_compiles_without_a_warning(environment: dict[str, str]) -> None:
    headers = [word for name in HEADERS for word in ("-isystem", environment[name])]
    given = ["-I", CPP.folder, *headers, '-DPROJECT_FOLDER=""']
    for file in (path for path in sources() if path.suffix == ".cpp"):
        subprocess.run(["c++", "-fsyntax-only", *WARNINGS, *given, file], check=True)


@pytest.mark.slow
def test_two_models_run_in_one_process(environment: dict[str, str], tmp_path: Path) -> None:
    """Two libraries link into one program; what cannot be right is refused and changes nothing."""
    models = {"first_loop": "llama-gqa", "second_loop": "marian-4.57.6"}
    for name, model in models.items():
        made = write_loop(LoopRequest(str(EXPORTS / model), str(tmp_path / name), "cpp", name=name), Options())
        assert made.reason is None
    folder = tmp_path / "two_models"
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT)
    (folder / "main.cpp").write_text(program_text("two_models.cpp"))
    for command in CPP.build:
        subprocess.run(command, cwd=folder, env=environment, check=True)
    contracts = [str(tmp_path / name / "contract.json") for name in models]
    command = ["build/two_models", *(str(EXPORTS / model) for model in models.values()), *contracts]
    (tmp_path / "libonnxruntime.so.1").symlink_to(environment["ONNXRUNTIME_LIB"])
    running = environment | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=folder, env=running, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [len(line.split()) for line in done.stdout.splitlines()] == [6, 6]


@pytest.mark.slow
def test_the_lines_for_cpp_write_a_trace(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "snippet.cpp").write_text(program_text("traced.cpp").replace("// SNIPPET\n", snippet("cpp")))
    library = Path(environment["ONNXRUNTIME_LIB"])
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)
    include = ["-isystem", environment["ONNXRUNTIME_INCLUDE"], f"-Wl,-rpath,{tmp_path}"]
    compiler = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", *include, "snippet.cpp", library]
    subprocess.run([*compiler, "-o", "snippet"], cwd=tmp_path, check=True)
    model, trace = EXPORTS / "llama-gqa", tmp_path / "loop.jsonl"
    subprocess.run([tmp_path / "snippet", model / "model.onnx", trace], check=True)
    assert_a_trace_is_accepted(model, trace, steps=4)
