"""Rust: names as string literals, the statements that make values, and what its compiler, linter and formatter say."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.isolated import EXPORTS, give_up, re_export

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.check import build_cache, find_library
from kvdoctor.loops.languages.rust import LANGUAGE, ORT, expressions
from kvdoctor.loops.plan import CallPlan, Input, LoopPlan, make_plan
from kvdoctor.loops.project import render

FIXTURES = ("marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5")
HOSTILE = (
    'a"b',
    "a\\",
    "a\nb\r\tc",
    "${x} %s {} {{}} {x:?}",
    "*/ // /*",
    "\x011",
    "é7",
    "\N{PILE OF POO}9",
    '"""',
    'r#"x"#',
    "fn",
    "x" * 10_000,
    "\N{PILE OF POO}" * 5_000,
    "\u2028\u202e",
    "\0",
    "",
)
PLAIN = Path(__file__).parent / "plain_rust"
DYNAMIC = ("--quiet", "--no-default-features", "--features", "dynamic")
RC10 = ("--quiet", "--no-default-features", "--features", "dynamic,ort-rc10")


def plan_of(name: str) -> LoopPlan:
    folder = open_folder(EXPORTS / name)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), name)


def write(files: Mapping[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_literal_is_ascii_on_one_line_whatever_the_name_is() -> None:
    for name in HOSTILE:
        literal = expressions.literal(name)
        assert literal.isascii()
        assert literal.isprintable()
    assert expressions.literal('"\\é\0') == r'"\"\\\u{e9}\u{0}"'


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (
            Input("x", "int64", ("batch", "new"), "tokens"),
            ["let t = Tensor::from_array(([batch, new], ids.to_vec()))?;"],
        ),
        (Input("x", "int32", (1,), "tokens"), ["let t = Tensor::from_array(([1], to_i32(ids)))?;"]),
        (
            Input("x", "float", ("batch", "total"), "attention-mask"),
            [
                "let shape = [batch, total];",
                "let t = Tensor::from_array((shape, to_f32(&mask(&shape, total, &self.padding))))?;",
            ],
        ),
        (
            Input("x", "float16", (1, 1, "new", 8), "causal-mask", shown=0.0, hidden=-1e4),
            [
                "let shape = [1, 1, new, 8];",
                "let values = causal_mask(&shape, past, f16::ZERO, f16::from_f32(-10000.0));",
                "let t = Tensor::from_array((shape, values))?;",
            ],
        ),
        (Input("x", "bool", (1,), "number", "cached"), ["let t = Tensor::from_array(([1], vec![past > 0; 1]))?;"]),
        (Input("x", "bool", (), "number", value=1), ["let t = Tensor::from_array(((), vec![true; 1]))?;"]),
        (
            Input("x", "int32", ("batch",), "number", "last"),
            ["let t = Tensor::from_array(([batch], vec![(total - 1) as i32; batch]))?;"],
        ),
        (
            Input("x", "int64", ("new",), "positions"),
            ["let shape = [new];", "let t = Tensor::from_array((shape, positions(&shape, past, &self.padding)))?;"],
        ),
    ],
)
def test_values(one: Input, expected: list[str]) -> None:
    assert expressions.statements_of("t", one, replace(plan_of("llama-gqa"), pads=True)) == expected


def test_a_tensor_that_may_be_empty_is_not_made_of_data() -> None:
    made = expressions.statements_of("t", Input("x", "int64", ("batch", "past"), "number"), plan_of("gpt2"))
    assert made[0] == "let t = if past == 0 {"
    assert "    Tensor::new(&Allocator::default(), [batch, past])?" in made


def test_lists_are_broken_as_rustfmt_breaks_them() -> None:
    assert expressions.array(["a", "b"], "x: ", 4) == "x: [a, b];"
    assert expressions.array(["a" * 44, "b" * 44], "const X: Y = ", 0) == f"const X: Y =\n    [{'a' * 44}, {'b' * 44}];"
    assert expressions.array(["a" * 60, "b" * 60], "x: ", 4, "[", "],").splitlines()[1] == f"        {'a' * 60},"
    assert (
        expressions.array(["Size(10)"] * 20, "x: ", 4, "[", "],").splitlines()[1]
        == " " * 8 + ", ".join(["Size(10)"] * 9) + ","
    )


@pytest.mark.parametrize(("name", "reason"), [("past\0x", "NUL"), ("past\udc80", "UTF-8")])
def test_a_name_that_does_not_reach_the_runtime_is_refused(name: str, reason: str) -> None:
    plan = plan_of("gpt2")
    assert expressions.refuses(plan) is None
    slots = (replace(plan.slots[0], past=name), *plan.slots[1:])
    assert reason in (expressions.refuses(replace(plan, slots=slots)) or "")


def hostile_plan() -> LoopPlan:
    """The plan of GPT-2 with names that want to leave their string literals."""
    plan = plan_of("gpt2")
    names = [name for name in HOSTILE if name and "\0" not in name]
    given = iter(names)
    new = {
        name: next(given) for name in (*(slot.past for slot in plan.slots), *(one.name for one in plan.decode.inputs))
    }
    new |= {name: f"out {names[i]}" for i, name in enumerate(plan.decode.outputs)}

    def renamed(one: CallPlan) -> CallPlan:
        inputs = tuple(replace(made, name=new[made.name]) for made in one.inputs)
        outputs, pasts = tuple(new[name] for name in one.outputs), tuple(new[name] for name in one.pasts)
        return replace(one, file='".onnx', inputs=inputs, pasts=pasts, outputs=outputs, logits=new[one.logits or ""])

    slots = tuple(
        replace(slot, past=new[slot.past], made=new[slot.made or ""], present=new[slot.present or ""])
        for slot in plan.slots
    )
    return replace(plan, model='"; */ \n}{', prefill=renamed(plan.prefill), decode=renamed(plan.decode), slots=slots)


def cargo(folder: Path, *arguments: str, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run cargo in a project; where it cannot fetch a package the test gives up.

    What is built of ort is kept for later runs. The version tells projects apart: cargo does not do so by their paths.
    """
    if shutil.which("cargo") is None:
        give_up("cargo is not on the path; it comes with https://rustup.rs")
    manifest = folder / "Cargo.toml"
    own = f'version = "0.1.0+{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"'
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('version = "0.1.0"', own), encoding="utf-8")
    settings = {
        "ORT_DYLIB_PATH": str(find_library()),
        "CARGO_TARGET_DIR": str(folder / "target"),
        "CARGO_BUILD_BUILD_DIR": str(build_cache() / "rust"),
    }
    command = ["cargo", *arguments, *(("--", *program) if program else ())]
    done = subprocess.run(command, cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False)
    if any(sign in done.stderr for sign in ("failed to download", "failed to get", "no such command")):
        give_up(done.stderr[-300:])
    return done


@pytest.mark.slow
def test_hostile_names_are_equal_in_a_compiled_program(tmp_path: Path) -> None:
    if shutil.which("rustc") is None:
        give_up("rustc is not on the path; it comes with https://rustup.rs")
    lines = "".join(f'    print!("{{}}\\u{{1e}}", {expressions.literal(name)});\n' for name in HOSTILE)
    (tmp_path / "names.rs").write_text(f"fn main() {{\n{lines}}}\n", encoding="utf-8")
    subprocess.run(["rustc", "--edition=2024", "names.rs"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "names"], capture_output=True, check=True).stdout
    assert printed.decode().split("\x1e")[:-1] == list(HOSTILE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXTURES, "hostile names"])
def test_a_loop_is_clean_under_clippy(name: str, tmp_path: Path) -> None:
    write(render(hostile_plan() if name == "hostile names" else plan_of(name), LANGUAGE), tmp_path)
    done = cargo(tmp_path, "clippy", "--release", *DYNAMIC, program=("-D", "warnings"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXTURES)
def test_a_loop_is_formatted(name: str, tmp_path: Path) -> None:
    done = cargo(write(render(plan_of(name), LANGUAGE), tmp_path), "fmt", "--check")
    assert done.returncode == 0, done.stdout


def with_rc10(plan: LoopPlan, folder: Path) -> Path:
    """The project with the older release of ort."""
    files = render(plan, LANGUAGE)
    assert ORT in files["Cargo.toml"]
    return write({**files, "Cargo.toml": files["Cargo.toml"].replace(ORT, "2.0.0-rc.10")}, folder)


@pytest.mark.slow
def test_a_loop_begins_with_an_empty_cache_in_rc10(tmp_path: Path) -> None:
    """A debug build: it checks for undefined behavior, and rc.10 refuses a length of 0 in a tensor made of data."""
    folder = with_rc10(plan_of("llama-gqa"), tmp_path)
    prompts = ("--prompt", "5,6,7", "--prompt", "8,9", "--follow", "1,2", "--follow", "3,4")
    model = ("--model", str(EXPORTS / "llama-gqa"), *prompts, "--self-test", "rewind,reorder")
    older = cargo(folder, "run", *RC10, program=model)
    assert older.returncode == 0, older.stderr
    newest = cargo(write(render(plan_of("llama-gqa"), LANGUAGE), tmp_path), "run", "--release", *DYNAMIC, program=model)
    assert newest.returncode == 0, newest.stderr
    assert older.stdout == newest.stdout
    done = cargo(with_rc10(plan_of("llama-gqa"), tmp_path), "clippy", *RC10, program=("-D", "warnings"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_plain_loop_fails_where_the_written_one_goes_on(tmp_path: Path) -> None:
    """The merged decoder whose second call returns an empty cross-attention cache, with ort 2.0.0-rc.10."""
    sick, source, start = EXPORTS / "marian-4.57.6", "5,6,7", "1"
    repaired = re_export("marian-4.57.6", tmp_path / "repaired")
    plain = Path(shutil.copytree(PLAIN, tmp_path / "plain"))
    failed = cargo(plain, "run", "--quiet", program=(str(sick), source, start, "6"))
    assert failed.returncode != 0
    assert len(failed.stdout.splitlines()) == 2
    assert "step 3:" in failed.stderr or failed.returncode < 0
    mended = cargo(plain, "run", "--quiet", program=(str(repaired), source, start, "6"))
    assert mended.returncode == 0, mended.stderr

    folder = with_rc10(plan_of("marian-4.57.6"), tmp_path / "loop")
    for given in (("--most", "6"), ("--follow", "9,40,77,3,101")):
        arguments = ("--source", source, "--prompt", start, *given)
        runs = [cargo(folder, "run", *RC10, program=("--model", str(one), *arguments)) for one in (sick, repaired)]
        assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
        assert runs[0].stdout == runs[1].stdout
        if given[0] == "--most":
            assert runs[0].stdout.strip().split(",") == mended.stdout.split()
