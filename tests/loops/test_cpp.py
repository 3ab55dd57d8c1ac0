"""C++: names as string literals, the expressions that make values, and what its compiler and formatter say."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.embedding_models import TWO_KINDS, pair_of_graphs, plan_of_layout
from support.isolated import EXPORTS
from support.probed_programs import (
    BuiltProgram,
    assert_a_trace_is_accepted,
    assert_a_wrong_token_is_found,
    assert_requests_that_cannot_be_right_are_refused,
    assert_samples_are_those_of_the_model,
    assert_sources_of_unequal_length_are_masked,
    assert_the_judge_finds_nothing,
    assert_the_probe_is_as_expected,
    assert_the_readme_decodes,
    built,
    snippet,
)
from support.sampling import first

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.check import build_cache, find_library
from kvdoctor.loops.languages.cpp import LANGUAGE, expressions
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import CallPlan, Input, LoopPlan
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
@pytest.mark.parametrize("name", first(["hostile names", *FIXTURES], 2))
def test_a_loop_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    write(render(hostile_plan() if name == "hostile names" else plan_of(name), LANGUAGE), tmp_path)
    assert_no_warning(tmp_path)


def assert_no_warning(folder: Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
    given = os.environ | LANGUAGE.prepare(build_cache() / "cpp")
    include = ["-isystem", given["ONNXRUNTIME_INCLUDE"]]
    for file in sorted(folder.glob("*.cpp")):
        subprocess.run(["c++", "-std=c++20", "-fsyntax-only", *warnings, *include, file], cwd=folder, check=True)


LAYOUTS = (
    "layout-aihub-whisper-healthy",
    "layout-delta-healthy",
    "layout-embedding-image-healthy",
    "layout-ort-t5-init-healthy",
    TWO_KINDS,
    "layout-rwkv-healthy",
    "layout-tensor-scatter-heads-healthy",
    "layout-transformersjs-healthy",
    "merged-healthy",
)
"""Layouts with other code: fixed sizes, buffers, states, float16, one token a call, embeddings, no encoder graph."""


@pytest.mark.parametrize("name", [*FIXTURES, *LAYOUTS])
def test_a_loop_is_formatted(name: str, tmp_path: Path) -> None:
    plan = plan_of_layout(name, tmp_path / "model") if name in LAYOUTS else plan_of(name)
    files = render(plan, LANGUAGE)
    write(files, tmp_path)
    sources = [file for file in files if file.endswith((".cpp", ".hpp"))]
    formatter = shutil.which("clang-format", path=Path(sys.executable).parent) or "clang-format"
    subprocess.run([formatter, "--dry-run", "--Werror", *sources], cwd=tmp_path, check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which fetches the headers")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", first(LAYOUTS, 2))
def test_a_loop_of_a_layout_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    write(render(plan_of_layout(name, tmp_path / "model"), LANGUAGE), tmp_path)
    assert_no_warning(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm, which fetches the headers")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_first_call_with_other_embeddings_compiles_without_a_warning(tmp_path: Path) -> None:
    write(render(pair_of_graphs(tmp_path / "model"), LANGUAGE), tmp_path)
    assert_no_warning(tmp_path)


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("cpp", EXPORTS / "marian-4.57.6", tmp_path_factory.mktemp("cpp") / "marian")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("cpp", EXPORTS / "llama-gqa", tmp_path_factory.mktemp("cpp") / "llama")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("cpp", EXPORTS / "whisper", tmp_path_factory.mktemp("cpp") / "whisper")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian", "llama", "whisper"])
def test_a_probe_is_decoded_and_compared(name: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(name)
    assert_the_probe_is_as_expected(program)
    assert_the_judge_finds_nothing(program)
    assert_a_wrong_token_is_found(program)


@pytest.mark.slow
def test_samples_are_those_of_the_model(llama: BuiltProgram) -> None:
    assert_samples_are_those_of_the_model(llama, [5, 6, 7, 8])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian", "llama", "whisper"])
def test_the_command_of_the_readme_decodes_and_its_trace_is_accepted(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = request.getfixturevalue(name)
    assert_the_readme_decodes(program, tmp_path / "loop.jsonl")


@pytest.mark.slow
def test_requests_that_cannot_be_right_are_refused(marian: BuiltProgram, llama: BuiltProgram) -> None:
    assert_requests_that_cannot_be_right_are_refused(marian, "--source 5,6 --prompt 1")
    assert_requests_that_cannot_be_right_are_refused(llama, "--prompt 5,6")


@pytest.mark.slow
def test_sources_of_unequal_length_are_masked(marian: BuiltProgram) -> None:
    assert_sources_of_unequal_length_are_masked(marian)


MISUSE = """
#include <iostream>

#include "decoder.hpp"

template <typename Call>
void said(Call call) {
  try {
    call();
    std::cout << "nothing" << std::endl;
  } catch (const std::exception& error) {
    std::cout << error.what() << std::endl;
  }
}

int main(int, char** argv) {
  Decoder decoder(argv[2]);
  const Source two{.shape = {2, 3}, .entries = {5, 6, 7, 8, 9, 10}};
  said([&] { decoder.prefill({{1}}); });
  said([&] { decoder.encode({.shape = {1, 0}, .entries = {}}); });
  said([&] { decoder.encode({.shape = {1, 2}, .entries = {5, -1}}); });
  said([&] { decoder.encode(two, {{1, 1}}); });
  said([&] { decoder.encode(two, {{1, 1, 0}, {1, 1, 1}}); });
  said([&] { decoder.prefill({{1}}); });
  said([&] { decoder.prefill({{1}, {}}); });
  said([&] { decoder.prefill({{1}, {128}}); });
  said([&] { decoder.prefill({{1}, {-1}}); });
  said([&] { decoder.prefill({{1}, {2}}); });
  said([&] { decoder.step({{1}}); });
  said([&] { decoder.step({{1}, {2, 3}}); });
  said([&] { decoder.step({{}, {}}); });
  said([&] { decoder.reorder(std::vector<std::size_t>{1, 0}); });
  said([&] { decoder.step({{1}, {2}}); });
  said([&] { decoder.prefill({{1}, {2}}); });
  said([&] { decoder.encode(two); });
  said([&] { decoder.generate({{1}, {2}}, 0); });
  std::cout << decoder.generate({{1}, {2}}, 1000).front().size() << std::endl;
}
"""
ANSWERS = """
encode() first, and again after reorder()
the source has 2 axes and is not empty; got shape [1, 0]
the ids of the source are 0 or more
the mask has shape [2, 3]; got [1, 2]
nothing
1 prompts for 2 sources
same length
the model has no token 128
the model has no token -1
nothing
a step takes tokens of each of 2 sequences
different lengths
every sequence takes at least one token
nothing
nothing
encode() first, and again after reorder()
nothing
most is at least 1
64
"""


@pytest.mark.slow
def test_a_decoder_refuses_what_it_cannot_do(marian: BuiltProgram) -> None:
    (marian.folder / "misuse.cpp").write_text(MISUSE)
    objects = [f"build/CMakeFiles/decode.dir/{name}.cpp.o" for name in ("decoder", "trace")]
    compile_with_runtime(marian.folder, "misuse.cpp", *objects, program="misuse")
    done = marian.start("./misuse", "--model", str(marian.model))
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), ANSWERS.strip().splitlines(), strict=True):
        assert expected in said


SNIPPET = """
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

%s
int main(int, char** argv) {
  Ort::Env env;
  Ort::Session session(env, argv[1], Ort::SessionOptions{});
  Ort::AllocatorWithDefaultOptions allocator;
  std::ofstream trace(argv[2]);
  std::vector<std::string> input_texts = session.GetInputNames(), output_texts = session.GetOutputNames();
  std::vector<const char*> input_names, output_names;
  for (const auto& name : input_texts) input_names.push_back(name.c_str());
  for (const auto& name : output_texts) output_names.push_back(name.c_str());
  std::vector<Ort::Value> outputs;
  for (std::int64_t step = 0; step < 4; ++step) {
    std::vector<Ort::Value> inputs;
    for (const auto& name : input_texts) {
      if (name.starts_with("past")) {
        if (step == 0) {
          const std::int64_t shape[] = {1, 2, 0, 8};
          inputs.push_back(Ort::Value::CreateTensor<float>(allocator, shape, 4));
        } else {
          const std::string present = "present" + name.substr(std::string("past_key_values").size());
          for (std::size_t i = 0; i < output_texts.size(); ++i) {
            if (output_texts[i] == present) inputs.push_back(std::move(outputs[i]));
          }
        }
        continue;
      }
      const std::int64_t shape[] = {1, name == "attention_mask" ? step + 1 : 1};
      inputs.push_back(Ort::Value::CreateTensor<std::int64_t>(allocator, shape, 2));
      for (std::int64_t i = 0; i < shape[1]; ++i) {
        inputs.back().GetTensorMutableData<std::int64_t>()[i] =
            name == "attention_mask" ? 1 : name == "position_ids" ? step : 5 + step;
      }
    }
    outputs = session.Run(Ort::RunOptions{}, input_names.data(), inputs.data(), inputs.size(), output_names.data(),
                          output_names.size());
    note(trace, input_names, inputs, output_names, outputs);
  }
}
"""


@pytest.mark.slow
def test_the_lines_for_cpp_write_a_trace(llama: BuiltProgram, tmp_path: Path) -> None:
    (llama.folder / "snippet.cpp").write_text(SNIPPET % snippet("cpp"))
    compile_with_runtime(llama.folder, "snippet.cpp", program="snippet")
    model, trace = llama.model / "model.onnx", tmp_path / "loop.jsonl"
    done = llama.start("./snippet", str(model), str(trace))
    assert done.returncode == 0, done.stderr
    assert_a_trace_is_accepted(llama.model, trace, steps=4)


def compile_with_runtime(folder: Path, *sources: str, program: str) -> None:
    """Compile a program of one file, in a folder where a project was built, with warnings as errors."""
    include = LANGUAGE.prepare(build_cache() / "cpp")["ONNXRUNTIME_INCLUDE"]
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-isystem", include, *sources, str(find_library())]
    subprocess.run([*command, f"-Wl,-rpath,{folder / 'build'}", "-o", program], cwd=folder, check=True)
