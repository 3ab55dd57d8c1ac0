"""Rust: names as string literals, the statements that make values, and what its compiler, linter and formatter say."""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import text_fixtures
from support.isolated import EXPORTS, give_up, re_export
from support.loop_programs import assert_decodes
from support.sampling import first

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.loops.check import build_cache, find_library
from kvdoctor.loops.judge import judge
from kvdoctor.loops.languages.rust import LANGUAGE, ORT, expressions
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.pipeline import LoopRequest, write_loop
from kvdoctor.loops.plan import INTEGERS, CallPlan, Input, LoopPlan
from kvdoctor.loops.project import render
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

FIXTURES = ("marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5")
EMBEDDINGS = {
    "layout-embed-tokens-healthy": "embed_tokens.onnx",
    "layout-embedding-image-healthy": "embedding.onnx",
    "layout-per-layer-embeddings-healthy": "embed_tokens.onnx",
}
"""Decoders that take embeddings, and the graphs that make these."""
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
PROVIDERS = "coreml,cuda,directml,openvino,tensorrt,xnnpack"
TRACE_PAGE = (Path(__file__).parents[2] / "docs" / "trace.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(Options().limits) as warm:
        yield warm


def plan_of(name: str | Path) -> LoopPlan:
    folder = open_folder(EXPORTS / name)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), str(name))


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


def test_a_tensor_without_elements_is_not_made_of_data() -> None:
    for dims, shape in (((0, 8), "[0_usize, 8]"), (("batch", 0), "[batch, 0]")):
        made = expressions.statements_of("t", Input("x", "float", dims, "number"), plan_of("gpt2"))
        assert made[-1] == f"let t = Tensor::<f32>::new(&Allocator::default(), {shape})?;"


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


def embedding_plan(folder: Path) -> LoopPlan:
    """A first call that takes token ids, and later ones that take nothing but embeddings, by long names."""
    model = text_fixtures.load_all()["layout-per-layer-embeddings-healthy"].write(folder)
    plan = plan_of(model)
    assert plan.embed is not None
    taken = tuple(replace(one, name=f"{one.name} {'x' * 40}") for one in plan.decode.of_rule("embeddings"))
    prefill = replace(plan.prefill, file="first.onnx", inputs=plan.embed.inputs)
    return replace(plan, prefill=prefill, decode=replace(plan.decode, inputs=taken), pads=False)


def test_a_call_that_takes_embeddings_alone_has_no_method_for_its_inputs(tmp_path: Path) -> None:
    program = render(embedding_plan(tmp_path), LANGUAGE)["src/lib.rs"]
    assert "fn first_inputs(&self, ids: &[i64])" in program
    assert "fn inputs(" not in program
    assert program.count("self.embed(ids)?") == 1
    assert program.count("(&embedded[") == 2


def test_a_method_has_no_parameter_that_it_does_not_use(tmp_path: Path) -> None:
    plan = embedding_plan(tmp_path)
    given = (*plan.decode.inputs, Input("ids", "bool", (1,), "number", value=1))
    program = render(replace(plan, decode=replace(plan.decode, inputs=given)), LANGUAGE)["src/lib.rs"]
    assert "fn inputs(&self) ->" in program
    assert "self.inputs()?" in program


def any_plan(name: str, folder: Path) -> LoopPlan:
    """The plan of a fixture, or one put together here."""
    if name == "hostile names":
        return hostile_plan()
    return embedding_plan(folder) if name == "embeddings" else plan_of(name)


def cargo(
    folder: Path, *arguments: str, program: tuple[str, ...] = (), variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
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
    environment = {**os.environ, **settings, **(variables or {})}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
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
@pytest.mark.parametrize("name", first(["hostile names", "embeddings", *FIXTURES], 3))
def test_a_loop_is_clean_under_clippy(name: str, tmp_path: Path) -> None:
    loop = write(render(any_plan(name, tmp_path / "model"), LANGUAGE), tmp_path / "loop")
    done = cargo(loop, "clippy", "--release", *DYNAMIC, program=("-D", "warnings"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXTURES, "embeddings"])
def test_a_loop_is_formatted(name: str, tmp_path: Path) -> None:
    loop = write(render(any_plan(name, tmp_path / "model"), LANGUAGE), tmp_path / "loop")
    done = cargo(loop, "fmt", "--check")
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
    with_providers = (*RC10[:-1], f"{RC10[-1]},{PROVIDERS}")
    done = cargo(with_rc10(plan_of("llama-gqa"), tmp_path), "clippy", *with_providers, program=("-D", "warnings"))
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
    fixed = cargo(plain, "run", "--quiet", program=(str(repaired), source, start, "6"))
    assert fixed.returncode == 0, fixed.stderr

    folder = with_rc10(plan_of("marian-4.57.6"), tmp_path / "loop")
    for given in (("--most", "6"), ("--follow", "9,40,77,3,101")):
        arguments = ("--source", source, "--prompt", start, *given)
        runs = [cargo(folder, "run", *RC10, program=("--model", str(one), *arguments)) for one in (sick, repaired)]
        assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
        assert runs[0].stdout == runs[1].stdout
        if given[0] == "--most":
            assert runs[0].stdout.strip().split(",") == fixed.stdout.split()


class Program:
    """A loop, built."""

    def __init__(self, model: Path, folder: Path, features: str = "dynamic") -> None:
        write(render(plan_of(model), LANGUAGE), folder)
        done = cargo(folder, "build", "--release", "--quiet", "--no-default-features", "--features", features)
        assert done.returncode == 0, done.stderr
        self.model, self.program = model, folder / "target" / "release" / "decode-loop"

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [self.program, "--model", self.model, *arguments]
        environment = {**os.environ, "ORT_DYLIB_PATH": str(find_library()), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(EXPORTS / "marian-4.57.6", tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(EXPORTS / "llama-gqa", tmp_path_factory.mktemp("llama"))


RUNS = {
    "marian": (
        ("one", ("--source", "5,6,7", "--prompt", "1", "--follow", "9,40,77")),
        (
            "two",
            ("--source", "5,6,7", "--source", "8,9", *("--prompt", "1") * 2, "--follow", "9,40", "--follow", "3,101"),
        ),
    ),
    "llama": (
        ("one", ("--prompt", "5,6,7", "--follow", "9,40,77")),
        ("two", ("--prompt", "5,6,7", "--prompt", "8,9", "--follow", "9,40", "--follow", "3,101")),
    ),
}
"""What each program decodes, and a name for it."""


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def assert_sampled(call: Mapping[str, Any]) -> None:
    """Small tensors have their data, others a sample."""
    for one in (*call["fed"].values(), *call["got"].values()):
        size = math.prod(one["shape"])
        assert {"dtype", "shape", "data" if size <= 64 else "sample"} == set(one)
        assert len(one.get("data", one.get("sample"))) == min(size, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian", "llama"])
def test_a_probe_is_run(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """One token is expected wrong, and one run fails: the other runs are as expected, and each has its lines."""
    program: Program = request.getfixturevalue(name)
    lines = []
    for title, arguments in RUNS[name]:
        rows = program.run(*arguments).stdout.split()
        assert len(rows) == arguments.count("--prompt")
        expected = [part for row in rows for part in ("--expect", row)]
        lines.append(" ".join(["--run", title, *arguments, *expected]))
    (one, _, tokens), two = lines[0].rpartition(" "), lines[1]
    first = tokens.split(",")
    wrong, free = [*first[:2], str(int(first[2]) + 1), *first[3:]], [first[0], "-1", *first[2:]]
    lines += [
        "",
        f"{one} {','.join(wrong)}".replace("--run one", "--run wrong"),
        lines[0].replace("--run one", "--run fails").replace("9,40,77", "9,40,77777"),
        f"{one} {','.join(free)}".replace("--run one", "--run free"),
        two.replace("--run two", "--run reorder") + " --self-test rewind,reorder",
    ]
    (tmp_path / "probe.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    result = tmp_path / "result.jsonl"
    result.write_text("what was here before\n", encoding="utf-8")
    done = program.run("--probe", str(tmp_path / "probe.txt"), "--result", str(result))
    vocabulary = plan_of(program.model).vocabulary
    error = f"token ids are 0 to {(vocabulary or 0) - 1}, not 77777"
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "one: as expected",
        "two: as expected",
        f"wrong: sequence 0, step 2: token {first[2]} in place of {int(first[2]) + 1}",
        f"fails: error: {error}",
        "free: as expected",
        "reorder: as expected",
    ]
    found = records(result)
    ends = {line["run"]: line for line in found if "tokens" in line}
    assert list(ends) == ["one", "two", "wrong", "fails", "free", "reorder"]
    assert ends["one"] == {"run": "one", "tokens": [[int(token) for token in first]], "error": None}
    assert ends["fails"] == {"run": "fails", "tokens": [], "error": error}
    calls = [line for line in found if "tokens" not in line]
    assert [line["run"] for line in calls].count("one") == 4 + (name == "marian")
    assert [line["run"] for line in calls].count("fails") == 3 + (name == "marian")
    for call in calls:
        assert list(call) == ["run", "file", "fed", "got", "error"]
        assert_sampled(call)
    right = tmp_path / "right.txt"
    right.write_text("\n".join(lines[:2]), encoding="utf-8")
    assert program.run("--probe", str(right), "--result", str(result)).returncode == 0
    same = program.run("--probe", str(right), "--result", str(right))
    assert (same.returncode, same.stderr) == (1, "error: --result is the file of --probe itself\n")
    assert right.read_text(encoding="utf-8").splitlines() == lines[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--run x --prompt 5 --expect 1,2", "one --expect"),
        ("--run x --prompt 5 --follow 3 --expect 1,2 --most 3", "no option --most"),
        ("--prompt 5 --expect 1", "needs a name"),
        ("--run x --prompt 5 --expect", "--expect needs a value"),
    ],
)
def test_a_line_of_a_probe_that_is_none_is_named(line: str, reason: str, llama: Program, tmp_path: Path) -> None:
    (tmp_path / "probe.txt").write_text(f"--run y --prompt 5 --expect -1\n{line}\n", encoding="utf-8")
    done = llama.run("--probe", str(tmp_path / "probe.txt"), "--result", str(tmp_path / "result.jsonl"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "probe.txt, line 2: " in done.stderr
    assert reason in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    first(
        [
            "marian-4.57.6",
            "decoder-only-half-cache-healthy",
            "llama-gqa",
            "whisper",
            "layout-embedding-image-healthy",
        ],
        2,
    ),
)
def test_the_result_of_a_probe_is_judged_healthy(name: str, tmp_path: Path, runtime: Runtime) -> None:
    """The samples are compared with those of the same steps here, element by element."""
    model = EXPORTS / name
    if not model.exists():
        model = text_fixtures.load_all()[name].write(tmp_path / "model")
    folder = tmp_path / "probe"
    assert write_loop(LoopRequest(str(model), str(folder), "rust", probe=True), Options()).reason is None
    program = ("--model", str(model), "--probe", "probe.txt")
    done = cargo(folder, "run", "--release", *DYNAMIC, program=program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": as expected\n") == len(done.stdout.splitlines()) > 1
    report = judge(str(model), str(folder / "result.jsonl"), Options(), runtime)
    assert [finding for finding in report.findings if finding.code in ("KV208", "KV420")] == []
    assert {run.outcome for run in report.runs} == {"passed"}
    assert any("sample" in one for line in records(folder / "result.jsonl") for one in line.get("got", {}).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["marian", "llama"])
def test_the_trace_of_a_loop_is_accepted(
    name: str, tmp_path: Path, runtime: Runtime, request: pytest.FixtureRequest
) -> None:
    program: Program = request.getfixturevalue(name)
    trace = tmp_path / "loop.jsonl"
    _, arguments = RUNS[name][0]
    assert program.run(*arguments, KVDOCTOR_TRACE=str(trace)).returncode == 0
    for call in records(trace):
        assert list(call) == ["file", "fed", "got", "error"]
        assert_sampled(call)
    report = step_test(str(program.model), Options(consumer="held", trace=str(trace)), runtime)
    assert [finding for finding in report.findings if finding.code in ("KV208", "KV420")] == []
    assert any("4 steps of" in note and "none breaks it" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(EMBEDDINGS, 1))
def test_a_decoder_gets_the_embeddings_of_the_graph_beside_it(name: str, tmp_path: Path, runtime: Runtime) -> None:
    """Each call of the decoder is fed what the embedding graph returned just before it."""
    model = text_fixtures.load_all()[name].write(tmp_path / "model")
    assert_decodes("rust", model)
    program, trace = Program(model, tmp_path / "loop"), tmp_path / "loop.jsonl"
    done = program.run("--prompt", "5,6,7", "--follow", "9,4,2", KVDOCTOR_TRACE=str(trace))
    assert done.returncode == 0, done.stderr
    calls, plan = records(trace), plan_of(model)
    assert [call["file"] for call in calls] == [EMBEDDINGS[name], plan.decode.file] * 4
    for embed, decode in zip(calls[::2], calls[1::2], strict=True):
        assert_sampled(embed)
        for one in plan.decode.of_rule("embeddings"):
            assert decode["fed"][one.name] == embed["got"][one.made]
    report = step_test(str(model), Options(consumer="held", trace=str(trace)), runtime)
    assert [finding for finding in report.findings if finding.code in ("KV208", "KV420")] == []
    assert any("4 steps of" in note and "none breaks it" in note for note in report.notes)


@pytest.mark.slow
def test_features_of_no_image_are_fed_in_rc10(tmp_path: Path) -> None:
    """A debug build, which checks for undefined behavior: a tensor without elements."""
    model = text_fixtures.load_all()["layout-embedding-image-healthy"].write(tmp_path / "model")
    loop, trace = with_rc10(plan_of(model), tmp_path / "loop"), tmp_path / "loop.jsonl"
    prompts = ("--prompt", "5,6,7", "--prompt", "8,9", "--follow", "1,2", "--follow", "3,4")
    program = ("--model", str(model), *prompts, "--self-test", "rewind,reorder")
    done = cargo(loop, "run", *RC10, program=program, variables={"KVDOCTOR_TRACE": str(trace)})
    assert done.returncode == 0, done.stderr
    assert records(trace)[0]["fed"]["image_features"] == {"dtype": "f32", "shape": [0, 8], "data": []}


@pytest.mark.slow
def test_options_that_cannot_be_right_are_refused(marian: Program, llama: Program) -> None:
    source, prompt = ("--source", "5,6"), ("--prompt", "1")
    follow = ("--follow", "9")
    for arguments, reason in (
        (prompt, "give a --source"),
        ((*source, "--source", "", *prompt, *prompt), "a --source needs at least one id"),
        ((*source, "--prompt", "128"), "token ids are 0 to 127, not 128"),
        ((*source, "--prompt", "-1"), "token ids are 0 to 127, not -1"),
        ((*source, *prompt, "--follow", "9,128"), "token ids are 0 to 127, not 128"),
        ((*source, "--prompt", "1", "--prompt", "1,2"), "must have the same length, and not 0"),
        ((*source, "--prompt", ""), "must have the same length, and not 0"),
        ((*source, *prompt, *follow, "--follow", "8"), "--follow once for each --prompt"),
        ((*source, *prompt, "--most", "0"), "--most and --top-k are 1 or more"),
        ((*source, *prompt, "--top-k", "0"), "--most and --top-k are 1 or more"),
        ((*source, *prompt, "--temperature", "-0.5"), "--temperature is 0 or more"),
        ((*source, *prompt, "--temperature", "nan"), "--temperature is 0 or more"),
        ((*source, *prompt, *follow, "--self-test", "rewind,turn"), "rewind and reorder, not turn"),
        ((*source, *prompt, "--self-test", "rewind"), "--self-test needs --follow"),
        ((*source, *prompt, "--capacity", "9"), "no option --capacity"),
        ((*source, *prompt, "--run", "x"), "no option --run"),
        ((*source, *prompt, "--probe", "x"), "at least one --prompt, or a --probe"),
        ((*source, *prompt, "--provider", "cuda"), "no execution provider cuda; it has cpu"),
    ):
        done = marian.run(*arguments)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert done.stderr.startswith("error: ")
        assert reason in done.stderr
    done = llama.run("--prompt", "5", "--prompt", "")
    assert (done.returncode, "a prompt needs at least one token" in done.stderr) == (1, True)


@pytest.mark.slow
def test_sources_of_unequal_length_are_padded_and_masked(marian: Program) -> None:
    """Each decodes as it does alone."""
    rest = ("--prompt", "1", "--follow", "9,40,77")
    alone = [marian.run("--source", source, *rest).stdout for source in ("5,6,7", "8,9")]
    both = marian.run("--source", "5,6,7", "--source", "8,9", *rest, *rest)
    assert both.stdout == "".join(alone)
    assert alone[0] != alone[1]


@pytest.mark.slow
def test_the_limit_of_a_sequence_ends_it(marian: Program, tmp_path: Path) -> None:
    limit = plan_of("marian-4.57.6").context_limit
    assert limit is not None
    done = marian.run("--source", "5,6", "--prompt", "1", "--most", str(limit + 9))
    assert (done.returncode, len(done.stdout.split(","))) == (0, limit)
    model = text_fixtures.load_all()["layout-tensor-scatter-heads-healthy"].write(tmp_path / "model")
    program = Program(model, tmp_path / "loop")
    short = program.run("--prompt", "5,6", "--most", "9", "--capacity", "4")
    long = program.run("--prompt", "5,6", "--most", "9", "--capacity", "64")
    assert (short.returncode, long.returncode) == (0, 0), short.stderr + long.stderr
    assert len(long.stdout.split(",")) == 9
    assert short.stdout.strip().split(",") == long.stdout.strip().split(",")[:3]
    full = program.run("--prompt", "5,6,7", "--capacity", "2")
    assert (full.returncode, "at most 2 tokens" in full.stderr) == (1, True)


@pytest.mark.slow
def test_a_provider_that_the_runtime_does_not_have_is_an_error(tmp_path: Path) -> None:
    """It does not decode on the CPU in its place."""
    program = Program(EXPORTS / "llama-gqa", tmp_path, f"dynamic,{PROVIDERS}")
    prompt = ("--prompt", "5,6,7", "--most", "3")
    unknown = program.run(*prompt, "--provider", "abacus")
    names = ", ".join(("cpu", *PROVIDERS.split(",")))
    assert unknown.stderr == f"error: this build has no execution provider abacus; it has {names}\n"
    cpu = [program.run(*prompt, "--provider", name) for name in ("cpu", "CPUExecutionProvider")]
    assert [done.returncode for done in cpu] == [0, 0]
    assert cpu[0].stdout == cpu[1].stdout == program.run(*prompt).stdout
    for name in ("xnnpack", "XnnpackExecutionProvider", "openvino"):
        done = program.run(*prompt, "--provider", name)
        assert (done.returncode, done.stdout) == (1, "")
        assert "execution provider is not supported in this build" in done.stderr


@pytest.mark.slow
def test_calls_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    write(render(plan_of("marian-4.57.6"), LANGUAGE), tmp_path)
    write({"tests/refusals.rs": REFUSALS}, tmp_path)
    done = cargo(tmp_path, "test", *DYNAMIC, variables={"MODEL": str(EXPORTS / "marian-4.57.6")})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


REFUSALS = """
use decode_loop::{Decoder, Result, likeliest};

fn refused<T>(result: Result<T>, reason: &str) {
    let error = result.err().expect("an error").to_string();
    assert!(error.contains(reason), "{error}");
}

#[test]
fn calls_are_refused() -> Result<()> {
    let mut decoder = Decoder::open(std::env::var("MODEL")?)?;
    refused(decoder.prefill(&[[1]]), "begin with encode()");
    refused(decoder.encode(&[[5, 6, 7]], Some(&[vec![1, 1]])), "[1, 3] here; got [1, 2]");
    refused(decoder.encode(&[[5, 6], [7, 8]], Some(&[vec![1, 1]])), "[2, 2] here; got [1, 2]");
    refused(decoder.encode(&[[5, 6], [7, 8]], Some(&[vec![1], vec![1, 1]])), "the same length");
    refused(decoder.encode(&[[0; 0]], None), "not 0");
    refused(decoder.encode(&[[5, -1]], None), "0 or more");
    refused(decoder.encode(&[[0; 0]; 0], None), "not 0");
    refused(decoder.prefill(&[[1]]), "begin with encode()");

    decoder.encode(&[[5, 6, 7], [8, 9, 10]], Some(&[vec![1, 1, 1], vec![1, 1, 0]]))?;
    refused(decoder.step(&[[1], [1]]), "begin with prefill()");
    refused(decoder.reorder(&[0]), "begin with prefill()");
    refused(decoder.prefill(&[vec![1], vec![1, 2]]), "the same length");
    refused(decoder.prefill(&[[1], [128]]), "token ids are 0 to 127, not 128");
    refused(decoder.prefill(&[[1]]), "1 prompts for 2 sources");
    let first = decoder.prefill(&[[1], [1]])?;
    refused(decoder.step(&[[1]]), "tokens for 1 of 2");
    refused(decoder.step(&[vec![1], vec![]]), "the same length");
    refused(decoder.step(&[[1], [-1]]), "token ids are 0 to 127, not -1");
    refused(decoder.rewind(1), "cannot forget 1 of 1");
    refused(decoder.reorder(&[]), "are not rows of 2");
    refused(decoder.reorder(&[2]), "are not rows of 2");
    assert_eq!(decoder.length(), 1);

    decoder.step(&[[9], [9]])?;
    assert_eq!(decoder.prefill(&[[1], [1]])?, first);
    decoder.reorder(&[1, 0])?;
    refused(decoder.prefill(&[[1], [1]]), "again after reorder()");
    refused(decoder.generate(&[[1], [1]], 9, &[], likeliest, |_, _| ()), "again after reorder()");
    decoder.encode(&[[5, 6, 7]], None)?;
    refused(decoder.generate(&[[1]], 0, &[], likeliest, |_, _| ()), "1 or more");
    assert_eq!(decoder.generate(&[[1]], 3, &[], likeliest, |_, _| ())?[0].len(), 3);
    decoder.reset();
    refused(decoder.rewind(1), "cannot forget 1 of 0");
    Ok(())
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layout-ort-t5-init-healthy", "merged-healthy"])
def test_a_mask_that_a_decoder_alone_takes_has_the_shape_of_the_source(name: str, tmp_path: Path) -> None:
    """Models without an encoder graph."""
    model = text_fixtures.load_all()[name].write(tmp_path / "model")
    plan = plan_of(model)
    assert plan.source is not None
    assert plan.encode is None
    write(render(plan, LANGUAGE), tmp_path / "loop")
    write({"tests/masks.rs": INTEGER_MASK if plan.source.dtype in INTEGERS else FLOAT_MASK}, tmp_path / "loop")
    dims = ", ".join(str(dim) if isinstance(dim, int) else {"batch": "1"}.get(dim, "3") for dim in plan.source.dims)
    file = tmp_path / "loop" / "tests" / "masks.rs"
    file.write_text(file.read_text(encoding="utf-8").replace("SHAPE", f"[{dims}]"), encoding="utf-8")
    done = cargo(tmp_path / "loop", "test", *DYNAMIC, variables={"MODEL": str(model)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


INTEGER_MASK = """
#[test]
fn a_mask_has_the_shape_of_the_source() -> decode_loop::Result<()> {
    let mut decoder = decode_loop::Decoder::open(std::env::var("MODEL")?)?;
    decoder.encode(&[[5, 6, 7]], Some(&[vec![1, 1]]))?;
    let error = decoder.prefill(&[[1]]).expect_err("a mask of another shape");
    assert!(error.to_string().contains("[1, 3] here; got [1, 2]"), "{error}");
    decoder.encode(&[[5, 6, 7]], Some(&[vec![1, 1, 0]]))?;
    decoder.prefill(&[[1]])?;
    Ok(())
}
"""
FLOAT_MASK = """
#[test]
fn a_mask_has_the_shape_of_the_source() -> decode_loop::Result<()> {
    let mut decoder = decode_loop::Decoder::open(std::env::var("MODEL")?)?;
    let shape = SHAPE;
    let source = || vec![0.5; shape.iter().product()];
    let error = decoder.encode(Vec::new(), &[0, 3, 8], None).expect_err("an empty source");
    assert!(error.to_string().contains("cannot have shape [0, 3, 8]"), "{error}");
    decoder.encode(source(), &shape, Some(&[vec![1, 1]]))?;
    let error = decoder.prefill(&[[1]]).expect_err("a mask of another shape");
    assert!(error.to_string().contains("[1, 3] here; got [1, 2]"), "{error}");
    decoder.encode(source(), &shape, Some(&[vec![1, 1, 0]]))?;
    decoder.prefill(&[[1]])?;
    Ok(())
}
"""


SNIPPET_PROGRAM = """
use std::borrow::Cow;
use std::error::Error;
use std::fs::File;

use ort::memory::Allocator;
use ort::session::{Session, SessionInputValue};
use ort::value::Tensor;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let mut trace = File::create(&arguments[2])?;
    let mut session = SESSION.commit_from_file(&arguments[1])?;
    let mut pasts = Vec::new();
    for name in ["0.key", "0.value", "1.key", "1.value"] {
        let empty = Tensor::<f32>::new(&Allocator::default(), [1_usize, 4, 0, 8])?;
        pasts.push((format!("past_key_values.{name}"), empty.into_dyn()));
    }
    for past in 0..4_usize {
        let mask = vec![1_i64; past + 1];
        let mut inputs: Vec<(Cow<str>, SessionInputValue)> = vec![
            ("input_ids".into(), Tensor::from_array(([1, 1], vec![5 + past as i64]))?.into()),
            ("position_ids".into(), Tensor::from_array(([1, 1], vec![past as i64]))?.into()),
            ("attention_mask".into(), Tensor::from_array(([1, past + 1], mask))?.into()),
        ];
        for (name, value) in &pasts {
            inputs.push((name.as_str().into(), value.into()));
        }
        SNIPPET
        let made = outputs.into_iter().filter_map(|(name, value)| {
            Some((format!("past_key_values.{}", name.strip_prefix("present.")?), value))
        });
        pasts = made.collect();
    }
    Ok(())
}
"""
SNIPPET_MANIFEST = """
[package]
name = "snippet"
version = "0.1.0"
edition = "2024"

[dependencies]
ort = { version = "=RELEASE", default-features = false, features = ["std", "load-dynamic"] }

[workspace]
"""


@pytest.mark.slow
@pytest.mark.parametrize("release", ["2.0.0-rc.10", ORT])
def test_the_lines_for_rust_write_a_trace(release: str, tmp_path: Path, runtime: Runtime) -> None:
    snippet = re.search(r"<!-- snippet: rust -->\n```rust\n(.+?)```", TRACE_PAGE, re.DOTALL)
    assert snippet is not None
    builder = "Session::builder()?" if release == "2.0.0-rc.10" else "Session::builder(&ort::init().build()?)?"
    program = SNIPPET_PROGRAM.replace("SNIPPET", snippet[1]).replace("SESSION", builder)
    write({"Cargo.toml": SNIPPET_MANIFEST.replace("RELEASE", release), "src/main.rs": program}, tmp_path)
    trace = tmp_path / "loop.jsonl"
    done = cargo(tmp_path, "run", "--quiet", program=(str(EXPORTS / "gpt2" / "model.onnx"), str(trace)))
    assert (done.returncode, done.stderr) == (0, "")
    report = step_test(str(EXPORTS / "gpt2"), Options(trace=str(trace)), runtime)
    assert [finding for finding in report.findings if finding.code in ("KV208", "KV420")] == []
    assert any("4 steps of decoder compared with the contract, none breaks it" in note for note in report.notes)
