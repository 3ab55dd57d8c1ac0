"""C#: names as string literals, and the expressions that make values."""

import json
import re
from pathlib import Path

import pytest
from support.embedding_models import LAYOUTS, pair_of_graphs, plan_of_layout
from support.isolated import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.loops.languages.csharp import LANGUAGE, expressions
from kvdoctor.loops.make_plan import make_plan
from kvdoctor.loops.plan import Input, LoopPlan
from kvdoctor.loops.project import render

HOSTILE = ('a"b', "a\\", "a\nb\r\tc", "${x} {y}", "*/ // ", '"""', "\x011", "é7", "\u2028", "class", "x" * 10_000, "")


def plan_of(name: str) -> LoopPlan:
    folder = open_folder(EXPORTS / name)
    return make_plan(read_contract(folder.stacks[0], folder.side_cars), name)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_literal_is_the_name_again(name: str) -> None:
    literal = expressions.literal(name)
    assert literal.isascii()
    assert json.loads(literal) == name  # the escapes that are used are those of JSON


def test_a_character_beyond_16_bits_has_eight_digits() -> None:
    assert expressions.literal("\N{PILE OF POO}9") == r'"\U0001f4a99"'


def test_no_name_is_null() -> None:
    assert expressions.literal(None) == "null"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (Input("x", "int64", ("batch", "new"), "tokens"), "Tensor([batch, count], Flat(tokens), x => x)"),
        (Input("x", "int32", ("new",), "tokens"), "Tensor([batch * count], Flat(tokens), x => (int)(x))"),
        (
            Input("x", "float16", (1, 1, "new", 8), "causal-mask", shown=0.0, hidden=-1e4),
            "CausalMask<Float16>([1, 1, count, 8], past, (Float16)(0.0f), (Float16)(-10000.0f))",
        ),
        (
            Input("x", "bool", ("batch", "total"), "encoder-mask"),
            "EncoderMask([batch, total], _sourceMask, x => x != 0)",
        ),
        (Input("x", "bool", (1,), "number", "cached"), "Filled<bool>([1], past > 0)"),
        (Input("x", "int64", (), "number", "last"), "Filled<long>([], total - 1)"),
        (Input("x", "int32", (1,), "number", "last"), "Filled<int>([1], (int)(total - 1))"),
        (Input("x", "float", (), "number", value=0.1), "Filled<float>([], 0.1f)"),
    ],
)
def test_values(one: Input, expected: str) -> None:
    assert expressions.value(one, plan_of("gpt2")) == expected


@pytest.mark.parametrize("name", ["marian-4.57.6", "llama-gqa", "whisper", "gpt2", "t5"])
def test_braces_and_parentheses_of_a_program_are_even(name: str) -> None:
    assert_even(plan_of(name))


@pytest.mark.parametrize("name", LAYOUTS)
def test_braces_and_parentheses_of_a_program_with_an_embedding_graph_are_even(name: str, tmp_path: Path) -> None:
    assert_even(plan_of_layout(name, tmp_path))


def assert_even(plan: LoopPlan) -> None:
    for text in render(plan, LANGUAGE).values():
        assert text.count("{") == text.count("}")
        assert text.count("(") == text.count(")")
        assert text.count("[") == text.count("]")


@pytest.mark.parametrize("name", ["marian-4.57.6", "llama-gqa", "whisper"])
def test_a_trace_reads_every_element_type_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    program = render(plan, LANGUAGE)["Decoder.cs"]
    for dtype in plan.dtypes:
        assert f"{expressions.element_type(dtype)} => Some<{expressions.element(dtype)}>(value, x => " in program


@pytest.mark.parametrize("name", ["marian-4.57.6", "llama-gqa", "whisper"])
def test_the_options_that_the_help_lists_are_those_that_are_known(name: str) -> None:
    files = render(plan_of(name), LANGUAGE)
    listed = set(re.findall(r"^ {10}(--[a-z-]+) ", files["Program.cs"], re.MULTILINE))
    known = set(re.findall(r'"(--[a-z-]+)"[],]', files["Program.cs"] + files["Run.cs"])) - {"--help"}
    assert listed == known


def test_what_the_embedding_graph_makes_is_fed_and_the_rest_is_disposed(tmp_path: Path) -> None:
    plan = pair_of_graphs(tmp_path)
    text = render(plan, LANGUAGE)["Decoder.cs"]
    first, later = (text.partition(f"Feeds {name}(long[][] tokens)")[2].partition("return fed;")[0] for name in NAMES)
    for body in (first, later):
        assert "Dictionary<string, OrtValue> embedded = Embed(tokens);" in body
        assert 'fed.Add("inputs_embeds", embedded["inputs_embeds"]);' in body
    assert 'embedded["per_layer_inputs"].Dispose();' in first
    assert 'fed.Add("per_layer_inputs"' not in first
    assert 'fed.Add("per_layer_inputs", embedded["per_layer_inputs"]);' in later
    assert ".Dispose()" not in later
    made = text.partition("OrtValue> Embed(long[][] tokens)")[2].partition("\n    }")[0]
    assert 'fed.Add("input_ids", Tensor([batch, count], Flat(tokens), x => x));' in made
    assert "Run(_embedding, EmbeddingFile, fed, EmbeddingOutputs)" in made
    for statement in ("_embedding = new InferenceSession", "_embedding.Dispose()", '"embed_tokens.onnx"'):
        assert text.count(statement) == 1


NAMES = ("FirstFeedsOf", "FeedsOf")
