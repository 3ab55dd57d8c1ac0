"""The loop in Go: literals, the statements that make inputs, and that the written project compiles and is formatted."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import text_fixtures
from support.embedding_models import TWO_KINDS, pair_of_graphs, plan_of_layout, write_half
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
from kvdoctor.loops.language import languages
from kvdoctor.loops.languages.go import expressions, needs
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import Input, LoopPlan
from kvdoctor.loops.project import render

EXPORTS = Path(__file__).parents[2] / "fixtures" / "exports"

HOSTILE = (
    'quote"',
    "back\\slash\\n",
    "${HOME} {{ x }} %s",
    "two\nlines\r\ttab",
    '*/ // `tick` """ \'',
    "func",
    "emoji \U0001f600 \u00e9 \ufeff \u2028",
    "x" * 10_000,
    "",
)

needs_go = pytest.mark.skipif(not (shutil.which("go") and shutil.which("gcc")), reason="go and gcc are not installed")


def plan_of(model: str, stack: int = 0) -> LoopPlan:
    folder = open_folder(EXPORTS / model)
    return make_plan(read_contract(folder.stacks[stack], folder.side_cars), model)


def go(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(plan: LoopPlan, folder: Path) -> None:
    for name, text in render(plan, languages()["go"]).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("input_ids", '"input_ids"'),
        (None, '""'),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("\n\x7f\u00e9", '"\\u000a\\u007f\\u00e9"'),
        ("\U0001f600", '"\\U0001f600"'),
        ("\ud800", '"\\xed\\xa0\\x80"'),
    ],
)
def test_a_literal_is_plain_ascii(text: str | None, written: str) -> None:
    assert expressions.literal(text) == written


@pytest.mark.parametrize(
    ("one", "written"),
    [
        (Input("ids", "int64", ("batch", "new"), "tokens"), 'put(call, "ids", tokens)'),
        (Input("ids", "int32", ("batch",), "tokens"), 'put(call, "ids", convert[int32](tokens.flat()))'),
        (
            Input("m", "int64", ("batch", "total"), "attention-mask"),
            'put(call, "m", mask([]int64{batch, total}, total, d.padding, int64(1), int64(0)))',
        ),
        (
            Input("m", "bool", (1, "capacity"), "attention-mask"),
            'put(call, "m", mask([]int64{1, capacity}, total, nil, true, false))',
        ),
        (
            Input("m", "float16", (1, 1, "new", "total"), "causal-mask", hidden=-1e4),
            'putHalf(call, "m", causalMask([]int64{1, 1, count, total}, past, float32(0), float32(-10000.0)))',
        ),
        (
            Input("p", "int32", ("new",), "positions"),
            'put(call, "p", convert[int32](positions([]int64{count}, past, nil)))',
        ),
        (Input("c", "bool", (1,), "number", "cached"), 'put(call, "c", full([]int64{1}, min(past, 1) != 0))'),
        (Input("c", "int64", (), "number", "last"), 'put(call, "c", full([]int64{}, total-1))'),
    ],
)
def test_an_input_is_made_by_one_statement(one: Input, written: str) -> None:
    assert expressions.put(one, pads=True) == written


def test_a_variable_is_used_where_a_statement_reads_it_not_where_a_name_spells_it() -> None:
    call = replace(plan_of("llama-gqa").decode, inputs=(Input("past", "int64", ("batch", "new"), "tokens"),))

    assert not expressions.used(call, "past")


def test_what_the_binding_cannot_do_is_refused() -> None:
    plan = plan_of("llama-gqa")
    cut = replace(plan, decode=replace(plan.decode, outputs=(*plan.decode.outputs, "a\0b")))
    odd = replace(plan, decode=replace(plan.decode, logits_type="bfloat16"))
    half = replace(plan, decode=replace(plan.decode, logits_type="float16", logits_dims=()))

    assert needs.refuses(plan) is None
    assert [bool(needs.refuses(one)) for one in (cut, odd, half)] == [True, True, True]
    assert "bfloat16" in str(needs.refuses(odd))


def test_a_first_call_with_other_outputs_of_the_same_file_has_room_made_for_them() -> None:
    merged, single = plan_of("marian-4.57.6"), plan_of("llama-gqa")

    assert (needs.slot_room(merged), needs.slot_room(single)) == ("d.length == 0", "")
    assert [room[1:] for room in needs.logits_room(merged)] == [("logits", "float", "[]int64{batch, count, 128}")]


@needs_go
@pytest.mark.slow
def test_literals_are_the_same_text_in_go(tmp_path: Path) -> None:
    texts = (*HOSTILE, "nul \0 inside")
    lines = "\n".join(f'\tfmt.Printf("%x\\n", {expressions.literal(text)})' for text in texts)
    (tmp_path / "main.go").write_text(
        f'package main\n\nimport "fmt"\n\nfunc main() {{\n{lines}\n}}\n', encoding="utf-8"
    )

    printed = go(tmp_path, "go", "run", "main.go").split("\n")

    assert [bytes.fromhex(line).decode() for line in printed[: len(texts)]] == list(texts)


@needs_go
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stack"), [("llama-gqa", 0), ("marian-4.57.6", 0), ("marian-4.57.6", 1), ("whisper", 0), ("gpt2", 0)]
)
def test_the_project_is_formatted_and_clean(model: str, stack: int, tmp_path: Path) -> None:
    write(plan_of(model, stack), tmp_path)

    assert_clean(tmp_path)
    go(tmp_path, "go", "mod", "verify")


LAYOUTS = (
    "layout-aihub-whisper-healthy",
    "layout-delta-healthy",
    "layout-embedding-image-healthy",
    "layout-ort-t5-init-healthy",
    "layout-rwkv-healthy",
    "layout-tensor-scatter-heads-healthy",
    "layout-transformersjs-healthy",
    "merged-healthy",
)
"""Layouts with other code: fixed sizes, buffers, states, float16, one token a call, embeddings, no encoder graph."""


@needs_go
@pytest.mark.slow
@pytest.mark.parametrize("name", first(LAYOUTS, 3))
def test_the_project_of_a_layout_is_formatted_and_clean(name: str, tmp_path: Path) -> None:
    folder = open_folder(text_fixtures.load_all()[name].write(tmp_path / "model"))
    plan = make_plan(read_contract(folder.stacks[0], folder.side_cars), name)
    assert needs.refuses(plan) is None
    write(plan, tmp_path / "decode")

    assert_clean(tmp_path / "decode")


@needs_go
@pytest.mark.slow
def test_a_first_call_with_other_embeddings_is_formatted_and_clean(tmp_path: Path) -> None:
    write(pair_of_graphs(tmp_path / "model"), tmp_path / "decode")

    assert_clean(tmp_path / "decode")


def test_embeddings_of_float16_have_room_made_for_them(tmp_path: Path) -> None:
    plan = plan_of_layout(TWO_KINDS, tmp_path)
    half = tuple(replace(one, dtype="float16") if one.rule == "embeddings" else one for one in plan.decode.inputs)
    plan = replace(plan, prefill=replace(plan.prefill, inputs=half), decode=replace(plan.decode, inputs=half))
    rooms = [
        'call.reserve("inputs_embeds", ort.TensorElementDataTypeFloat16, []int64{batch, count, 8})',
        'call.reserve("per_layer_inputs", ort.TensorElementDataTypeFloat16, []int64{batch, count, 2, 6})',
    ]
    assert needs.embed_room(plan) == rooms
    assert needs.refuses(plan) is None

    unknown = (replace(half[0], dims=("batch", "new", "other")), *half[1:])  # type: ignore[arg-type]
    assert "'inputs_embeds'" in str(needs.refuses(replace(plan, decode=replace(plan.decode, inputs=unknown))))


@pytest.mark.slow
def test_embeddings_of_float16_are_passed_on(tmp_path: Path) -> None:
    program = built("go", write_half(tmp_path / "model"), tmp_path / "decode")
    assert_clean(program.folder)
    assert_the_probe_is_as_expected(program)
    assert_the_readme_decodes(program, tmp_path / "loop.jsonl")


def assert_clean(project: Path) -> None:
    assert go(project, "gofmt", "-l", ".") == ""
    go(project, "go", "vet", "./...")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("go", EXPORTS / "marian-4.57.6", tmp_path_factory.mktemp("go") / "marian")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("go", EXPORTS / "llama-gqa", tmp_path_factory.mktemp("go") / "llama")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> BuiltProgram:
    return built("go", EXPORTS / "whisper", tmp_path_factory.mktemp("go") / "whisper")


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
    assert_the_readme_decodes(request.getfixturevalue(name), tmp_path / "loop.jsonl")


@pytest.mark.slow
def test_requests_that_cannot_be_right_are_refused(marian: BuiltProgram, llama: BuiltProgram) -> None:
    assert_requests_that_cannot_be_right_are_refused(marian, "--source 5,6 --prompt 1")
    assert_requests_that_cannot_be_right_are_refused(llama, "--prompt 5,6")


@pytest.mark.slow
def test_sources_of_unequal_length_are_masked(marian: BuiltProgram) -> None:
    assert_sources_of_unequal_length_are_masked(marian)


@pytest.mark.slow
def test_float16_is_noted_as_numbers(tmp_path: Path) -> None:
    model = text_fixtures.load_all()["decoder-only-half-cache-healthy"].write(tmp_path / "model")
    program = built("go", model, tmp_path / "decode")
    assert_the_probe_is_as_expected(program)
    assert_the_judge_finds_nothing(program)
    calls = [json.loads(line) for line in (program.folder / "result.jsonl").read_text("utf-8").splitlines()]
    halves = [one for call in calls for one in call.get("fed", {}).values() if one["dtype"] == "float16"]
    numbers = [number for one in halves for number in one.get("data") or one.get("sample") or []]
    assert any(numbers)
    assert all(number is None or number == np.float16(number) for number in numbers)


MISUSE = """package main

import (
	"fmt"
	"os"

	"decode/decoder"
)

func said[T any](_ []T, err error) { fmt.Println(err) }

func main() {
	d, err := decoder.Open(os.Args[1], nil)
	if err != nil {
		panic(err)
	}
	defer d.Close()
	two := [][]int64{{5, 6, 7}, {8, 9, 10}}
	said(d.Prefill([][]int64{{1}}))
	fmt.Println(d.Encode([][]int64{{}}, nil))
	fmt.Println(d.Encode([][]int64{{5, -1}}, nil))
	fmt.Println(d.Encode(two, [][]int64{{1, 1}}))
	fmt.Println(d.Encode(two, [][]int64{{1, 1, 0}, {1, 1, 1}}))
	said(d.Prefill([][]int64{{1}}))
	said(d.Prefill([][]int64{{1}, {}}))
	said(d.Prefill([][]int64{{1}, {128}}))
	said(d.Prefill([][]int64{{1}, {-1}}))
	said(d.Prefill([][]int64{{1}, {2}}))
	said(d.Step([][]int64{{1}}))
	said(d.Step([][]int64{{1}, {2, 3}}))
	said(d.Step([][]int64{{}, {}}))
	fmt.Println(d.Reorder([]int64{1, 0}))
	said(d.Step([][]int64{{1}, {2}}))
	said(d.Prefill([][]int64{{1}, {2}}))
	fmt.Println(d.Encode(two, nil))
	said(d.Generate([][]int64{{1}, {2}}, decoder.Options{Most: -1}))
	made, err := d.Generate([][]int64{{1}, {2}}, decoder.Options{Most: 1000})
	fmt.Println(len(made[0]), err)
	d.Reset()
	fmt.Println(d.Rewind(1))
}
"""
ANSWERS = """
call Encode before Prefill, and again after Reorder
source: there is nothing in it
the ids of the source are 0 or more; got -1
the mask has shape [2 3]; got [1 2]
<nil>
1 prompts for 2 sources
must have the same length
token ids are 0 to 127; got 128
token ids are 0 to 127; got -1
<nil>
tokens of 1 sequences for a cache of 2
must have the same length
there is nothing in it
<nil>
<nil>
call Encode before Prefill, and again after Reorder
<nil>
at least 1
64 <nil>
cannot forget 1 of 0 tokens
"""


@pytest.mark.slow
def test_a_decoder_refuses_what_it_cannot_do(marian: BuiltProgram) -> None:
    (marian.folder / "misuse").mkdir()
    (marian.folder / "misuse" / "main.go").write_text(MISUSE)
    done = marian.start("go", "run", "./misuse", str(marian.model))
    assert done.returncode == 0, done.stderr
    for said, expected in zip(done.stdout.splitlines(), ANSWERS.strip().splitlines(), strict=True):
        assert expected in said


SNIPPET = """package main

import (
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"

	ort "github.com/yalue/onnxruntime_go"
)

%s
func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	ort.SetSharedLibraryPath(os.Getenv("ONNXRUNTIME_LIB"))
	check(ort.InitializeEnvironment())
	in, out, err := ort.GetInputOutputInfo(os.Args[1])
	check(err)
	var inputNames, outputNames []string
	for _, one := range in {
		inputNames = append(inputNames, one.Name)
	}
	for _, one := range out {
		outputNames = append(outputNames, one.Name)
	}
	session, err := ort.NewDynamicAdvancedSession(os.Args[1], inputNames, outputNames, nil)
	check(err)
	trace, err := os.Create(os.Args[2])
	check(err)
	var outputs []ort.Value
	for step := int64(0); step < 4; step++ {
		inputs := make([]ort.Value, len(inputNames))
		for i, name := range inputNames {
			switch {
			case strings.HasPrefix(name, "past") && step == 0:
				inputs[i], err = ort.NewEmptyTensor[float32](ort.NewShape(1, 2, 0, 8))
			case strings.HasPrefix(name, "past"):
				inputs[i] = outputs[slices.Index(outputNames, strings.Replace(name, "past_key_values", "present", 1))]
			case name == "attention_mask":
				ones := make([]int64, step+1)
				for k := range ones {
					ones[k] = 1
				}
				inputs[i], err = ort.NewTensor(ort.NewShape(1, step+1), ones)
			case name == "position_ids":
				inputs[i], err = ort.NewTensor(ort.NewShape(1, 1), []int64{step})
			default:
				inputs[i], err = ort.NewTensor(ort.NewShape(1, 1), []int64{5 + step})
			}
			check(err)
		}
		outputs = make([]ort.Value, len(outputNames))
		check(session.Run(inputs, outputs))
		check(note(trace, inputNames, inputs, outputNames, outputs))
	}
}
"""


@pytest.mark.slow
def test_the_lines_for_go_write_a_trace(llama: BuiltProgram, tmp_path: Path) -> None:
    (llama.folder / "snippet").mkdir()
    (llama.folder / "snippet" / "main.go").write_text(SNIPPET % snippet("go"))
    assert go(llama.folder / "snippet", "gofmt", "-l", ".") == ""
    trace = tmp_path / "loop.jsonl"
    done = llama.start("go", "run", "./snippet", str(llama.model / "model.onnx"), str(trace))
    assert done.returncode == 0, done.stderr
    assert_a_trace_is_accepted(llama.model, trace, steps=4)


@needs_go
@pytest.mark.slow
def test_hostile_names_compile(tmp_path: Path) -> None:
    plan = plan_of("llama-gqa")
    hostile = iter(HOSTILE * 9)
    names = {slot.past: next(hostile) + slot.past for slot in plan.slots}
    names |= {slot.present: next(hostile) + str(slot.present) for slot in plan.slots if slot.present}
    slots = tuple(replace(s, past=names[s.past], present=names[s.present], made=names[s.made]) for s in plan.slots)
    inputs = tuple(replace(one, name=next(hostile) + one.name) for one in plan.decode.inputs)
    call = replace(
        plan.decode,
        file='../a"b\\c\n${d}.onnx',
        inputs=inputs,
        pasts=tuple(slot.past for slot in slots),
        outputs=("logits", *(str(slot.present) for slot in slots)),
    )
    write(replace(plan, model='*/ "; panic()\n', prefill=call, decode=call, slots=slots), tmp_path)

    assert go(tmp_path, "gofmt", "-l", ".") == ""
    go(tmp_path, "go", "vet", "./...")
