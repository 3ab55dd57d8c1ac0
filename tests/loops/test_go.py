"""The loop in Go: literals, the statements that make inputs, and that the written project compiles and is formatted."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.languages.go import expressions, needs
from kvdoctor.loops.plan import Input, LoopPlan, make_plan
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

    assert go(tmp_path, "gofmt", "-l", ".") == ""
    go(tmp_path, "go", "vet", "./...")
    go(tmp_path, "go", "mod", "verify")


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
