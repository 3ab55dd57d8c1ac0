"""C++: names as string literals, the expressions that make values, and what its compiler and formatter say."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.isolated import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.check import build_cache
from kvdoctor.loops.languages.cpp import LANGUAGE, expressions
from kvdoctor.loops.plan import CallPlan, Input, LoopPlan, make_plan
from kvdoctor.loops.project import render

FIXTURES = ("marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5")
HOSTILE = (
    'a"b',
    "a\\",
    "a\nb\r\tc",
    "${x} %s {} {{}}",
    "*/ // /*",
    "??/",
    "x??!",
    "\x011",
    "é7",
    "\N{PILE OF POO}9",
    '"""',
    'R"(x)"',
    "class",
    "x" * 10_000,
    "\N{PILE OF POO}" * 5_000,
    "",
)


def plan_of(name: str) -> LoopPlan:
    folder = open_folder(EXPORTS / name)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), name)


def write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_a_literal_is_ascii_on_one_line_whatever_the_name_is() -> None:
    for name in HOSTILE:
        literal = expressions.literal(name)
        assert literal.isascii()
        assert literal.isprintable()


def test_a_digit_after_an_escape_does_not_belong_to_it() -> None:
    assert expressions.literal("\x011") == r'"\0011"'
    assert expressions.literal("é7") == r'"\303\2517"'
    assert expressions.literal('"\\?') == r'"\"\\\?"'


def test_no_name_is_a_null_pointer() -> None:
    assert expressions.literal(None) == "nullptr"


def test_a_path_is_converted_only_where_it_is_not_ascii() -> None:
    assert expressions.path("a.onnx", "kDecoder") == "kDecoder"
    assert expressions.path("é.onnx", "kDecoder") == "std::u8string(kDecoder, kDecoder + std::strlen(kDecoder))"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Input("x", "int64", ("batch", "new"), "tokens"), "tensor<std::int64_t>({batch, count}, flat(tokens))"),
        (Input("x", "int32", ("new",), "tokens"), "tensor<std::int32_t>({batch * count}, flat(tokens))"),
        (
            Input("x", "int64", ("batch", "total"), "attention-mask"),
            "attention_mask<std::int64_t>({batch, total}, total, padding_)",
        ),
        (
            Input("x", "float16", (1, 1, "new", 8), "causal-mask", shown=0.0, hidden=-1e4, from_right=True),
            "causal_mask<Ort::Float16_t>({1, 1, count, 8}, past, 8 - total, 0.0F, -10000.0F)",
        ),
        (Input("x", "bool", (1,), "number", "cached"), "filled<bool>({1}, past > 0)"),
        (Input("x", "bool", (), "number", value=1), "filled<bool>({}, true)"),
        (Input("x", "float", (), "number", value=0.1), "filled<float>({}, 0.1F)"),
        (Input("x", "int32", ("new",), "positions"), "positions<std::int32_t>({count}, past, {})"),
    ],
)
def test_values(one: Input, expected: str) -> None:
    assert expressions.value(one, replace(plan_of("llama-gqa"), pads=True)) == expected


def test_a_name_with_a_nul_is_refused() -> None:
    plan = plan_of("gpt2")
    assert expressions.refuses(plan) is None
    named = replace(plan.slots[0], past="past\0x")
    assert "NUL" in (expressions.refuses(replace(plan, slots=(named, *plan.slots[1:]))) or "")


def hostile_plan() -> LoopPlan:
    """The plan of GPT-2 with names that want to leave their string literals."""
    plan = plan_of("gpt2")
    assert plan.one_graph
    names = iter(name for name in HOSTILE if name)
    new = {slot.past: next(names) for slot in plan.slots} | {one.name: next(names) for one in plan.decode.inputs}
    new |= {name: f"out {new.get(name, name)} {HOSTILE[i]}" for i, name in enumerate(plan.decode.outputs)}

    def call(one: CallPlan) -> CallPlan:
        return replace(
            one,
            file=HOSTILE[9] + '".onnx',
            inputs=tuple(replace(made, name=new[made.name]) for made in one.inputs),
            pasts=tuple(new[name] for name in one.pasts),
            outputs=tuple(new[name] for name in one.outputs),
            logits=new[one.logits or ""],
        )

    slots = tuple(
        replace(slot, past=new[slot.past], made=new[slot.made or ""], present=new[slot.present or ""])
        for slot in plan.slots
    )
    return replace(plan, model='"; */ \n#error', prefill=call(plan.prefill), decode=call(plan.decode), slots=slots)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_hostile_names_are_equal_in_a_compiled_program(tmp_path: Path) -> None:
    rows = "".join(f"    {expressions.literal(name)},\n" for name in HOSTILE)
    (tmp_path / "names.cpp").write_text(
        "#include <cstdio>\n#include <cstring>\n"
        f"constexpr const char* names[] = {{\n{rows}}};\n"
        "int main() {\n  for (const char* name : names) std::fwrite(name, 1, std::strlen(name) + 1, stdout);\n}\n"
    )
    for standard in ("c++14", "c++20"):
        command = ["c++", f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "names.cpp", "-o", "names"]
        subprocess.run(command, cwd=tmp_path, check=True)
        printed = subprocess.run([tmp_path / "names"], capture_output=True, check=True).stdout
        assert printed.decode().split("\0")[:-1] == list(HOSTILE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which fetches the headers")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", [*FIXTURES, "hostile names"])
def test_a_loop_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    write(render(hostile_plan() if name == "hostile names" else plan_of(name), LANGUAGE), tmp_path)
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
    given = os.environ | LANGUAGE.prepare(build_cache() / "cpp")
    include = ["-isystem", given["ONNXRUNTIME_INCLUDE"]]
    for file in ("decoder.cpp", "main.cpp"):
        subprocess.run(["c++", "-std=c++20", "-fsyntax-only", *warnings, *include, file], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang-format") is None, reason="clang-format is not installed")
@pytest.mark.parametrize("name", FIXTURES)
def test_a_loop_is_formatted(name: str, tmp_path: Path) -> None:
    files = render(plan_of(name), LANGUAGE)
    write(files, tmp_path)
    sources = [file for file in files if file.endswith((".cpp", ".hpp"))]
    subprocess.run(["clang-format", "--dry-run", "--Werror", *sources], cwd=tmp_path, check=True)
