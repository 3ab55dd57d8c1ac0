"""The decode loop in Java: its literals and its values, and that javac and google-java-format take what is printed."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.embedding_models import TWO_KINDS, pair_of_graphs, plan_of_layout
from support.isolated import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.languages.java.expressions import Call, layouts, literal, value
from kvdoctor.loops.languages.java.refusals import refuses
from kvdoctor.loops.plan import Input, LoopPlan, make_plan
from kvdoctor.loops.project import render

HOSTILE = [
    "",
    'a"b',
    "back\\slash",
    "\\u0022",
    "${name}",
    "line\nend\r\ttab",
    "\x001",
    "*/ /* //",
    '"""',
    "{@code}",
    "class",
    "\u2028\x85\u202e",
    "日本 é",
    "\U0001f600",
    "\x1a",
    "n" * 10_000,
    "\u20ac" * 30_000,
]

ONNXRUNTIME = "com.microsoft.onnxruntime:onnxruntime:1.29.0"
FORMATTER = "com.google.googlejavaformat:google-java-format:1.28.0:jar:all-deps"
DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"

PLANS = [
    ("marian-4.57.6", "merged"),
    ("marian-4.57.6", "pair"),
    ("llama-gqa", "decoder"),
    ("gpt2", "decoder"),
    ("whisper", "merged"),
    ("t5", "pair"),
]


def plan_of(model: str, stack: str) -> LoopPlan:
    folder = open_folder(str(EXPORTS / model))
    chosen = next(one for one in folder.stacks if one.name == stack)
    return make_plan(read_contract(chosen, folder.side_cars), model)


def programs(plan: LoopPlan, folder: Path) -> list[Path]:
    files = {folder / name: text for name, text in render(plan, languages()["java"]).items() if name.endswith(".java")}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def jar(artifact: str, folder: Path) -> Path:
    """A jar of Maven Central, or of Maven's cache."""
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK and Maven")
    command = ["mvn", "-q", f"{DEPENDENCIES}:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"Maven has no {artifact}: {done.stdout[-300:]}")
    return next(folder.glob("*.jar"))


def compiled(files: list[Path], library: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["javac", "-Xlint:all", "-Werror", "--release", "17", "-encoding", "UTF-8", "-cp", str(library), "-d"]
    return subprocess.run([*command, str(folder), *map(str, files)], capture_output=True, text=True, check=False)


def test_a_literal_escapes_what_ends_it() -> None:
    assert literal('a"b\\c\n') == r'"a\"b\\c\n"'
    assert literal("\x001") == r'"\0001"'
    assert literal("é\U0001f600") == r'"\u00e9\ud83d\ude00"'
    assert literal(None) == "null"


def test_a_literal_longer_than_a_constant_is_put_together() -> None:
    assert literal("n" * 30_000).count(".concat(") == 1


def test_a_value_is_a_function_of_the_index() -> None:
    plan = plan_of("llama-gqa", "decoder")
    made = {one.name: value(one, plan).flat for one in plan.decode.inputs}
    assert made["attention_mask"] == "int64(i -> i % total >= padding[i / total] ? 1 : 0, batch, total)"
    unpadded = replace(plan, pads=False)
    assert value(plan.decode.of_rule("attention-mask")[0], unpadded).flat == "int64(i -> 1, batch, total)"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Input("x", "bool", (1,), "number", "cached"), "bool(i -> past > 0, 1)"),
        (Input("x", "int64", (), "number", "last"), "int64(i -> total - 1)"),
        (Input("x", "float16", (1,), "number", value=0.5), "float16(i -> 0.5, 1)"),
        (
            Input("x", "int32", ("new",), "tokens"),
            "int32(i -> tokens[i / newTokens][i % newTokens], batch * newTokens)",
        ),
        (
            Input("x", "float", ("batch", 1, "new", 24), "causal-mask", hidden=-1e4, from_right=True),
            "float32(i -> i % 24 >= 24 - total && i % 24 - (24 - total) <= past + i / 24 % newTokens ? 0 : -10000, "
            "batch, 1, newTokens, 24)",
        ),
    ],
)
def test_values_of_other_models(one: Input, expected: str) -> None:
    assert value(one, plan_of("llama-gqa", "decoder")).flat == expected


def test_slots_of_the_same_layout_share_a_constant() -> None:
    assert list(layouts(plan_of("marian-4.57.6", "merged"))) == ["SELF_ATTENTION", "CROSS_ATTENTION"]


def test_a_call_is_laid_out_by_its_width() -> None:
    assert Call("f", ("a", "b")).lines(4, ";") == ["    f(a, b);"]
    long, head = "a" * 60, "f" * 30
    assert Call(head, (long, "b")).lines(4, ";") == [f"    {head}({long}, b);"]
    assert Call(head, (long, "bbb")).lines(4, ";") == [f"    {head}(", f"        {long}, bbb);"]
    assert Call(head, (long, long)).lines(4, ";") == [f"    {head}(", f"        {long},", f"        {long});"]


def test_names_that_the_binding_does_not_find_are_refused() -> None:
    plan = plan_of("llama-gqa", "decoder")
    assert refuses(plan) is None
    assert "modified UTF-8" in (refuses(renamed(plan, "\U0001f600")) or "")


def renamed(plan: LoopPlan, name: str) -> LoopPlan:
    """A plan whose names all end in `name`."""

    def call(one):
        inputs = tuple(replace(i, name=i.name + name) for i in one.inputs)
        lists = {field: tuple(n + name for n in getattr(one, field)) for field in ("pasts", "outputs")}
        return replace(one, file=one.file + name, inputs=inputs, logits=one.logits + name, **lists)

    slots = [replace(s, **{f: getattr(s, f) + name for f in ("past", "made", "present")}) for s in plan.slots]
    calls = {"prefill": call(plan.prefill), "decode": call(plan.decode)}
    return replace(plan, model=plan.model + name, slots=tuple(slots), **calls)


@pytest.mark.slow
def test_hostile_names_are_the_strings_that_they_were(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        pytest.skip("needs a JDK")
    names = ",\n".join(map(literal, HOSTILE))
    lines = "    for (String name : new String[] {%s}) {\n System.out.println(name.chars().boxed().toList());\n}\n"
    program = tmp_path / "Names.java"
    program.write_text(f"class Names {{ public static void main(String[] a) {{\n{lines % names}}}}}", encoding="ascii")
    printed = subprocess.run(["java", str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    for name, line in zip(HOSTILE, printed, strict=True):
        units = name.encode("utf-16-be")
        expected = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
        assert [int(unit) for unit in line.strip("[]").split(", ") if unit] == expected


@pytest.mark.slow
def test_a_loop_with_hostile_names_compiles(tmp_path: Path) -> None:
    library = jar(ONNXRUNTIME, tmp_path)
    files = programs(renamed(plan_of("llama-gqa", "decoder"), "".join(HOSTILE[:-1])), tmp_path)
    done = compiled(files, library, tmp_path / "classes")
    assert not done.returncode, done.stderr[:2000]


def test_what_the_embedding_graph_makes_is_fed_and_the_rest_is_closed(tmp_path: Path) -> None:
    plan = pair_of_graphs(tmp_path)
    text = render(plan, languages()["java"])["src/main/java/decodeloop/Decoder.java"]
    assert text.count("embed(tokens);") == 2
    assert text.count('inputs.put("inputs_embeds", embedded.get("inputs_embeds"));') == 2
    assert text.count('inputs.put("per_layer_inputs", embedded.get("per_layer_inputs"));') == 1
    assert text.count('embedded.get("per_layer_inputs").close();') == 1


@pytest.mark.slow
def test_the_loops_of_the_fixtures_are_formatted_and_free_of_warnings(tmp_path: Path) -> None:
    libraries = tmp_path / "library", tmp_path / "formatter"
    for folder in libraries:
        folder.mkdir()
    library, formatter = jar(ONNXRUNTIME, libraries[0]), jar(FORMATTER, libraries[1])
    plans = {f"{model} {stack}": plan_of(model, stack) for model, stack in PLANS}
    for layout in (TWO_KINDS, "layout-embedding-image-healthy"):
        plans[layout] = plan_of_layout(layout, tmp_path / "models" / layout)
    plans["two kinds of embeddings, one of them in the first call"] = pair_of_graphs(tmp_path / "models" / "pair")
    for number, (name, plan) in enumerate(plans.items()):
        folder = tmp_path / str(number)
        files = programs(plan, folder)
        done = compiled(files, library, folder)
        assert not done.returncode, done.stderr
        command = ["java", "-jar", str(formatter), "--dry-run", *map(str, files)]
        unstable = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert not unstable, f"{name}: google-java-format changes {unstable}"
