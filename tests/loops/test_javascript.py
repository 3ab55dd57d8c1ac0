"""The loop in TypeScript and JavaScript: literals, expressions, types; what is written compiles and is formatted."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support import text_fixtures
from support.isolated import EXPORTS
from support.sampling import first

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.language import languages
from kvdoctor.loops.languages.typescript import expressions
from kvdoctor.loops.languages.typescript.annotations import Annotations
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import Input, LoopPlan
from kvdoctor.loops.project import render

LANGUAGES = ("typescript", "javascript")
MODELS = ("marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5")
EMBEDDINGS = (
    "layout-embed-tokens-healthy",
    "layout-embedding-image-healthy",
    "layout-per-layer-embeddings-healthy",
    "embeddings of float16",
    "embeddings alone",
)
"""Decoders that take embeddings; the last two are put together here."""
HOSTILE = (
    'quote"',
    "back\\slash\\n",
    "${process.exit()} `tick`",
    "two\nlines\r\ttab \u2028",
    '*/ // <!-- </script> """ \'',
    "class",
    "constructor",
    "5",
    "emoji \U0001f600 \u00e9 \ufeff",
    "\ud800",
    "a\0b",
    "x" * 10_000,
    "",
)


def plan_of(model: str) -> LoopPlan:
    return plan_in(EXPORTS / model)


def plan_in(path: Path) -> LoopPlan:
    folder = open_folder(path)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), path.name)


def embedding_plan(name: str, folder: Path) -> LoopPlan:
    texts = text_fixtures.load_all()
    if name in texts:
        return plan_in(texts[name].write(folder))
    plan = plan_in(texts["layout-per-layer-embeddings-healthy"].write(folder))
    assert plan.embed is not None
    if name == "embeddings alone":  # of the later calls; the first one takes token ids
        first = replace(plan.prefill, file="first.onnx", inputs=plan.embed.inputs)
        return replace(plan, prefill=first, decode=replace(plan.decode, inputs=plan.decode.of_rule("embeddings")))
    inputs = tuple(replace(one, dtype="float16") if one.rule == "embeddings" else one for one in plan.decode.inputs)
    return replace(plan, prefill=replace(plan.prefill, inputs=inputs), decode=replace(plan.decode, inputs=inputs))


@pytest.fixture(scope="module")
def llama() -> LoopPlan:
    return plan_of("llama-gqa")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("input_ids", '"input_ids"'),
        (None, "null"),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("\n\x7f\u00e9", '"\\u000a\\u007f\\u00e9"'),
        ("\U0001f600", '"\\ud83d\\ude00"'),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_a_literal_is_plain_ascii(text: str | None, written: str) -> None:
    assert expressions.literal(text) == written


def test_keys_have_quotes_only_where_one_of_them_needs_quotes() -> None:
    assert expressions.keys(["ids", "class"]) == {"ids": "ids", "class": "class"}
    assert expressions.keys(["ids", "a.b"]) == {"ids": '"ids"', "a.b": '"a.b"'}


def test_a_key_by_the_name_of_the_prototype_is_computed() -> None:
    assert expressions.keys(["__proto__"]) == {"__proto__": '["__proto__"]'}


def test_a_list_breaks_where_it_is_too_long() -> None:
    assert expressions.listed(['"a"', '"b"'], 16) == '["a", "b"]'
    assert expressions.listed(['"' + "a" * 90 + '"'], 16) == '[\n  "' + "a" * 90 + '",\n]'


@pytest.mark.parametrize(
    ("one", "written"),
    [
        (Input("i", "int64", ("batch", "new"), "tokens"), 'new Tensor("int64", tokens.flat(), [batch, count])'),
        (Input("i", "int32", ("new",), "tokens"), 'new Tensor("int32", tokens.flat(), [batch * count])'),
        (Input("m", "int64", ("batch", "total"), "attention-mask"), "mask([batch, total], this.#padding)"),
        (Input("p", "int64", ("batch", "new"), "positions"), "positions([batch, count], past, this.#padding)"),
        (Input("c", "bool", (1,), "number", "cached"), 'new Tensor("bool", [past > 0], [1])'),
        (Input("c", "bool", (1,), "number", value=1), 'new Tensor("bool", [true], [1])'),
        (Input("c", "int64", (1,), "number", "last"), 'new Tensor("int64", [total - 1], [1])'),
        (Input("c", "int64", ("batch",), "number", "past"), "filled([batch], () => past)"),
        (Input("c", "float", (), "number", value=0.5), 'new Tensor("float32", [0.5], [])'),
        (Input("e", "float", ("batch", "new", 8), "embeddings", made='"x"'), 'embedded["\\"x\\""]'),
        (
            Input("s", "float16", ("batch", 80, 3000), "encoder-input"),
            'new Tensor("float16", Uint16Array.from(source.data, toHalf), source.shape)',
        ),
    ],
)
def test_the_value_of_an_input(one: Input, written: str, llama: LoopPlan) -> None:
    assert expressions.value(one, llama) == written


def test_an_element_type_is_named_only_where_there_are_several(llama: LoopPlan) -> None:
    mask = Input("m", "float16", ("batch", 1, "new", "capacity"), "causal-mask", hidden=-1e4)
    both = replace(llama, prefill=replace(llama.prefill, inputs=(*llama.prefill.inputs, mask)))
    assert expressions.value(mask, both) == 'causalMask("float16", [batch, 1, count, capacity], past)'
    assert expressions.made_types(both) == ["float16", "int64"]


def test_a_mask_without_padding_is_ones(llama: LoopPlan) -> None:
    mask = Input("m", "int64", ("batch", "total"), "attention-mask")
    assert expressions.value(mask, replace(llama, pads=False)) == "filled([batch, total], () => 1)"


@pytest.mark.parametrize("name", ["__proto__", "a\0b"])
def test_a_name_that_the_binding_loses_is_refused(name: str, llama: LoopPlan) -> None:
    refused = replace(llama, decode=replace(llama.decode, outputs=(*llama.decode.outputs, name)))
    assert expressions.refuses(llama) is None
    assert repr(name) in str(expressions.refuses(refused))


def test_only_a_call_that_takes_embeddings_has_them_made(tmp_path: Path) -> None:
    program = render(embedding_plan("embeddings alone", tmp_path), languages()["typescript"])["src/loop.ts"]
    assert "this.#run(this.#first, PREFILL, this.#firstFeeds(tokens), " in program
    assert "this.#run(this.#decoder, DECODER, this.#feeds(embedded), " in program
    assert program.count("this.#withEmbeddings(") == 1


def test_types_are_in_the_program_or_in_its_comments() -> None:
    params = [("rows", "number[]"), ("count?", "number", "how many")]
    typed, plain = Annotations(typed=True), Annotations(typed=False)
    assert typed.signature("take", params, "void") == "function take(rows: number[], count?: number): void {"
    assert plain.signature("take", params, "void") == "function take(rows, count) {"
    assert typed.doc("Takes.", 0, params) == "/**\n * Takes.\n *\n * @param count - how many\n */"
    assert "@param {number[]} rows\n * @param {number} [count] - how many" in plain.doc("Takes.", 0, params)


def test_what_a_browser_has_too_does_without_node(llama: LoopPlan) -> None:
    for language in LANGUAGES:
        files = render(llama, languages()[language], probe=True)
        modules = [text for name, text in files.items() if Path(name).stem in ("loop", "probe", "page")]
        assert len(modules) == 3
        assert not any("node:" in text or "process." in text for text in modules)


def test_only_a_probe_has_a_page(llama: LoopPlan) -> None:
    for language in LANGUAGES:
        plain, probe = (render(llama, languages()[language], probe=flag) for flag in (False, True))
        assert {Path(name).name for name in set(probe) - set(plain)} >= {"index.html", "serve.mjs"}
        assert "onnxruntime-web" not in plain["package.json"]
        assert json.loads(probe["package.json"])["dependencies"].keys() == {"onnxruntime-node", "onnxruntime-web"}


def printed(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_compiles(plan: LoopPlan, language: str, modules: Path, folder: Path) -> None:
    for name, text in render(plan, languages()[language], probe=True).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    strict = ("--strict", "--noEmit", "--noUnusedLocals", "--noUnusedParameters")
    checked = ("--allowJs", "--checkJs", "--module", "nodenext", "--target", "es2022", "--types", "node")
    checked += ("main.js", "page.js", "serve.mjs")
    compiler = str(modules / "node_modules" / ".bin" / "tsc")
    printed(folder, compiler, *strict, *(checked if language == "javascript" else ()))


@pytest.mark.slow
@pytest.mark.parametrize("model", first([*MODELS, *EMBEDDINGS], 3))
@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_written_is_formatted_and_typed(language: str, model: str, modules: Path, tmp_path: Path) -> None:
    folder = modules / language / model
    plan = plan_of(model) if model in MODELS else embedding_plan(model, tmp_path)
    assert_compiles(plan, language, modules, folder)
    prettier = str(modules / "node_modules" / ".bin" / "prettier")
    printed(folder, prettier, "--check", "**/*.{ts,js,mjs,json,html}", "!kvdoctor-loop.json")


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_hostile_names_compile(language: str, modules: Path, llama: LoopPlan) -> None:
    slots = tuple(replace(llama.slots[0], past=name, made=name, present=f"p{name}") for name in HOSTILE)
    call = replace(
        llama.decode,
        file=HOSTILE[4],
        inputs=tuple(replace(llama.decode.inputs[0], name=name) for name in (*HOSTILE, "__proto__")),
        pasts=HOSTILE[:3],
        outputs=HOSTILE,
        logits=HOSTILE[0],
    )
    plan = replace(llama, model="*/ process.exit() //\n", prefill=call, decode=call, slots=slots)
    assert_compiles(plan, language, modules, modules / language / "hostile")


@pytest.mark.slow
def test_node_reads_literals_as_they_are_meant(modules: Path) -> None:
    listed = ", ".join(expressions.literal(text) for text in HOSTILE)
    (modules / "literals.mjs").write_text(f"console.log(JSON.stringify([{listed}]));", encoding="ascii")
    assert json.loads(printed(modules, "node", "literals.mjs")) == list(HOSTILE)
