"""Conversions: healthy models converted and proved, graphs of another form refused by node, and failing proofs."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from support.proofs import failed, repair_of
from support.text_fixtures import Fixture, load_all

import kvdoctor
from kvdoctor import api
from kvdoctor.addons.conversions import api as conversions
from kvdoctor.addons.conversions import pipeline
from kvdoctor.addons.conversions.graphs.conversion import Asked, Converted, load, read_asked
from kvdoctor.addons.conversions.graphs.logits import KEEP
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.addons.conversions.pipeline import ConvertRequest, refuse_impossible_conversions
from kvdoctor.choices import LogitsRows
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.document import Report, exit_code

FIXTURES = load_all()
DECODER = "decoder-only-healthy"
GROUPED: dict[str, Any] = {"attention": "gqa"}
EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"
OPERATORS = ("GroupQueryAttention", "Softmax", "Trilu")


def write(folder: Path, name: str = DECODER, *edits: tuple[str, str]) -> Path:
    """A fixture in a folder, after replacements in its text."""
    fixture: Fixture = FIXTURES[name]
    files = dict(fixture.files)
    for old, new in edits:
        assert any(old in text for text in files.values()), old
        files = {file: text.replace(old, new) for file, text in files.items()}
    folder.mkdir()
    replace(fixture, files=files).write(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def proved(source: Path, out: Path | None, **choices: Any) -> Report:
    """The report of a conversion that is proved and leaves its source as it is."""
    before = contents(source)
    report = conversions.convert(source, out, **choices)
    assert not failed(report)
    assert contents(source) == before
    assert exit_code(report, "error") == 0
    return report


def lines(report: Report) -> list[str]:
    """What was proved, and what a loop must do."""
    return [*(f"{entry.claim}: {entry.detail}" for entry in repair_of(report).proof), *repair_of(report).loop]


def refusal(source: Path, out: Path, **choices: Any) -> str:
    """Why there is no copy: the error of wrong usage, or of a model with errors the notes of its report."""
    try:
        report = conversions.convert(source, out, **choices)
    except UsageError as error:
        return str(error)
    assert exit_code(report, "error") == 1
    assert [finding for finding in report.findings if finding.severity == "error"]
    assert repair_of(report).out is None
    return " ".join(report.notes)


def test_every_conversion_has_an_option_and_a_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "conversions.md").read_text(encoding="utf-8")
    assert [one.name for one in load()], "there are conversions"
    for one in load():
        assert one.name in page
        assert one.summary


@pytest.mark.parametrize("name", ["marian-4.46.3", "marian-4.57.6", "t5", "whisper"])
@pytest.mark.parametrize("rows", ["last", "selectable"])
def test_branches_with_values_of_the_same_names_have_heads_of_their_own(name: str, rows: LogitsRows) -> None:
    """The Add after the head of Marian has one name in both branches of the merged decoder."""
    source = Path(__file__).parents[1] / "fixtures" / "exports" / name / "decoder_model_merged.onnx"
    refuse_impossible_conversions(str(source), read_asked(ConvertChoices(logits=rows)), Options())


def test_a_head_that_a_later_branch_reads_is_refused(tmp_path: Path) -> None:
    """A body sees the values of the graph around it, but for names of its own."""
    branches = (
        "peak = If (truth) <then_branch = one () => (float[batch_size, s, 16] a) { a = Neg (rows) }, "
        "else_branch = two () => (float[batch_size, s, 16] b) { b = Abs (rows) }>"
    )
    head = f"  rows = MatMul (x2, w_logits)\n  logits = Identity (rows)\n  {branches}"
    returned = "  float[batch_size, sequence_length, 16] logits,"
    more = [
        (returned, f"  float[batch_size, s, 16] peak,\n{returned}"),
        ("float hide = {10000}", "float hide = {10000}, bool truth = {1}"),
    ]
    source = write(tmp_path / "model", DECODER, ("  logits = MatMul (x2, w_logits)", head), *more)
    said = refusal(source, tmp_path / "out", logits="last")
    assert "Neg" in said or "Abs" in said
    assert "for another output" in said


def test_a_later_graph_of_one_token_is_compared_with_one_token_a_step(tmp_path: Path) -> None:
    """Its inputs have that size, so a chunk cannot even be fed."""
    frozen = ("int64[s43, s69]", "int64[s43, 1]")
    source = write(tmp_path / "model", "layout-scatter-static-pair-healthy", frozen)
    (proof,) = (text for text in lines(proved(source, None, logits="last")) if "the last row of logits" in text)
    assert "steps of 1 on pasts up to" in proof
    assert "not run" not in proof


@pytest.mark.parametrize("name", [DECODER, pytest.param("merged-healthy", marks=pytest.mark.slow), "pair-healthy"])
def test_last_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", name), tmp_path / "out"
    assert advises_last_logits(source)
    report = proved(source, out, logits="last")
    for text in ("the last row of logits", "float[batch, 1, vocabulary]"):
        assert any(text in line for line in lines(report))
    assert [stack.contract.last_logits_only for stack in report.stacks if stack.contract] == [True] * len(report.stacks)
    assert exit_code(api.step_test(out), "error") == 0


def test_only_the_last_row_reaches_the_head(tmp_path: Path) -> None:
    conversions.convert(write(tmp_path / "model"), tmp_path / "out", logits="last")
    model = onnx.load(str(tmp_path / "out" / "model.onnx"))
    onnx.checker.check_model(model, full_check=True)
    head = next(node for node in model.graph.node if "logits" in node.output)
    model.graph.output.append(onnx.ValueInfoProto(name=head.input[0]))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run([head.input[0], "logits"], first_step(4))
    assert [value.shape[1] for value in found] == [1, 1]


def first_step(tokens: int) -> dict[str, np.ndarray]:
    empty = np.zeros((1, 2, 0, 4), np.float32)
    return {
        "input_ids": np.arange(tokens).reshape(1, -1),
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.arange(tokens).reshape(1, -1),
        **{f"past_key_values.{layer}.{part}": empty for layer in (0, 1) for part in ("key", "value")},
    }


HEAD = "logits = MatMul (x2, w_logits)"
OTHER_FORMS = {
    "flattened": (
        "rows = Reshape (x2, flat)\n  made = MatMul (rows, w_logits)\n  logits = Reshape (made, wide)",
        "Reshape",
    ),
    "einsum": ('logits = Einsum <equation = "bsh,hv->bsv"> (x2, w_logits)', "Einsum"),
    "computed weights": ("turned = Mul (w_logits, x_sum)\n  logits = MatMul (x2, turned)", "weights are computed"),
    "softmax over tokens": ("made = MatMul (x2, w_logits)\n  logits = Softmax <axis = 1> (made)", "Softmax"),
    "a number for each row": ("made = MatMul (x2, w_logits)\n  logits = Add (made, w_rows)", "a constant for each row"),
    "read by another output": (
        "made = MatMul (x2, w_logits)\n  logits = Identity (made)\n  best = ArgMax <axis = -1, keepdims = 0> (made)",
        "ArgMax",
    ),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
@pytest.mark.parametrize("rows", ["last", pytest.param("selectable", marks=pytest.mark.slow)])
def test_what_looks_like_a_head_is_refused_with_the_node(form: str, rows: str, tmp_path: Path) -> None:
    text, named = OTHER_FORMS[form]
    edits = [(HEAD, f"x_sum = ReduceSum <keepdims = 0> (x2)\n  {text}")]
    more = "float[1, 3, 16] w_rows, int64[2] flat = {-1, 8}, int64[3] wide = {1, -1, 16},"
    edits.append(("float[8, 16] w_logits,", f"float[8, 16] w_logits, {more}"))
    if form == "read by another output":
        edits.append(("logits,\n", "logits,\n  int64[batch_size, sequence_length] best,\n"))
    source = write(tmp_path / "model", DECODER, *edits)
    assert named in refusal(source, tmp_path / "out", logits=rows)
    assert not (tmp_path / "out").exists()
    assert not advises_last_logits(source)


def test_a_decoder_in_a_function_is_refused_and_no_inspection_advises_it(tmp_path: Path) -> None:
    head = "logits = local.heads.head (x2, w_logits)"
    body = '<domain: "local.heads", opset_import: ["" : 17]>\nhead (x, w) => (made)\n{\n  made = MatMul (x, w)\n}\n'
    imports = ('["" : 17]', '["" : 17, "local.heads" : 1]')
    source = write(tmp_path / "model", DECODER, (HEAD, head), imports, ("\n}\n", f"\n}}\n\n{body}"))
    assert 'local.heads.head "' in refusal(source, tmp_path / "out", logits="last")
    assert not advises_last_logits(source)


def test_a_long_chain_before_and_behind_the_head_is_followed(tmp_path: Path) -> None:
    """Each node in a time that does not depend on the others, and without recursion."""
    chain = "\n  ".join(f"h{at + 1} = Neg (h{at})" for at in range(3000))
    behind = "\n  ".join(f"g{at + 1} = Neg (g{at})" for at in range(3000))
    text = f"h0 = Neg (x2)\n  {chain}\n  g0 = MatMul (h3000, w_logits)\n  {behind}\n  logits = Neg (g3000)"
    source = write(tmp_path / "model", DECODER, (HEAD, text))
    begin = time.process_time()
    assert advises_last_logits(source)
    assert time.process_time() - begin < 5  # half a second


def advises_last_logits(source: Path) -> bool:
    """Whether an inspection names the conversion."""
    return [stack.logits_can_be_cut for stack in api.inspect(source).stacks] == [True]


def test_a_model_that_returns_the_last_row_is_refused(tmp_path: Path) -> None:
    conversions.convert(write(tmp_path / "model"), tmp_path / "out", logits="last")
    with pytest.raises(UsageError, match="already returns the logits of the last token"):
        conversions.convert(tmp_path / "out", tmp_path / "again", logits="last")


@pytest.mark.parametrize(
    "name",
    [
        DECODER,
        "merged-healthy",
        pytest.param("pair-healthy", marks=pytest.mark.slow),
        pytest.param("key-value-swapped-names-healthy", marks=pytest.mark.slow),
    ],
)
def test_selectable_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for stack in proved(write(tmp_path / "model", name), out, logits="selectable").stacks:
        assert stack.contract is not None
        port = stack.contract.graph("decode").port("logits_to_keep")
        assert port is not None
        assert (port.name, port.dtype, port.shape) == (KEEP, "int64", ())
        assert not stack.contract.last_logits_only
    assert exit_code(api.step_test(out), "error") == 0
    with pytest.raises(UsageError, match="already has an input"):
        conversions.convert(out, tmp_path / "again", logits="last")


def test_as_many_rows_as_are_asked_for(tmp_path: Path) -> None:
    conversions.convert(write(tmp_path / "model"), tmp_path / "out", logits="selectable")
    session = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    kept = {k: session.run(["logits"], {**first_step(4), KEEP: np.array(k)})[0] for k in (0, 1, 3, 9)}
    assert {k: rows.shape[1] for k, rows in kept.items()} == {0: 4, 1: 1, 3: 3, 9: 4}
    np.testing.assert_allclose(kept[1], kept[0][:, -1:], atol=1e-6)


Spoil = Callable[[onnx.GraphProto], None]


def not_proved(source: Path, out: Path, spoil: Spoil, **choices: Any) -> list[str]:
    """What is not proved of a faulty conversion, and is not written."""
    asked = faulty(spoil, "model.onnx", **choices)
    report = pipeline.convert(ConvertRequest(str(source), str(out), ConvertChoices(), (asked,)), Options())
    assert not out.exists()
    assert exit_code(report, "error") == 1
    return failed(report)


def faulty(spoil: Spoil, file: str, **choices: Any) -> Asked:
    """A conversion of kvdoctor whose result is then spoilt."""
    (asked,) = read_asked(ConvertChoices(**choices))

    def convert(context: RepairContext, choice: object) -> Converted:
        made = asked.conversion.convert(context, choice)
        spoil(context.model(file).graph)
        return made

    return Asked(replace(asked.conversion, convert=convert), asked.choice)


def constants(prefix: str, **values: int) -> Spoil:
    """Other numbers in the constants of these names."""

    def spoil(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            begin, _, name = tensor.name.partition(".")
            if begin == prefix and name in values:
                tensor.CopyFrom(numpy_helper.from_array(np.array([values[name]], np.int64), tensor.name))

    return spoil


def one_less(graph: onnx.GraphProto) -> None:
    """All rows, whatever is asked for."""
    node = next(node for node in graph.node if node.op_type == "Neg")
    node.op_type = "Sub"
    node.input.append(node.input[0])


SIZES = ("batch=1", "new=1", "past=6")
NO_SIZES = (("past=0",), ("batch=1", "batch=2"), ("length=3",), ("past=4",), ("batch=x",))
FAULTY: dict[str, tuple[Spoil, dict[str, Any], str]] = {
    "the first row, equal only while there is one token": (
        *(constants("logits_rows", starts=0, ends=1, axes=1), {"logits": "last"}),
        "batch 1, prompt of 2 tokens",
    ),
    "all rows": (one_less, {"logits": "selectable"}, "2 rows of logits with 1 rows requested"),
    "sizes declared alone, as the tools of ONNX Runtime do": (
        *(constants("fixed_past", starts=0), {"sizes": SIZES}),
        "first difference: batch 1, prompt of 1",
    ),
    "the new row cut off in place of the oldest": (
        *(constants("fixed_past", starts=0, ends=6), {"sizes": SIZES}),
        "first difference: batch 1, prompt of 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_conversion_that_is_not_proved_writes_nothing(fault: str, tmp_path: Path) -> None:
    spoil, choices, said = FAULTY[fault]
    source = write(tmp_path / "model", DECODER)
    assert said in "\n".join(not_proved(source, tmp_path / "out", spoil, **choices))


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    report = conversions.convert(source, None, logits="last")
    assert repair_of(report).is_planned
    assert repair_of(report).changes
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("more", [{}, {"logits": "last"}])
def test_fixed_sizes_decode_as_the_original_from_an_empty_past_on(more: dict[str, str], tmp_path: Path) -> None:
    source, out = write(tmp_path / "model"), tmp_path / "out"
    report = proved(source, out, sizes=SIZES, **more)
    assert report.verdict == "healthy"
    (claim,) = (line for line in lines(report) if "those of the original" in line)
    assert "prompts of 1, steps of 1 on pasts up to 5" in claim
    assert any("attention_mask of 7 columns is 0 for the first 6 - n" in line for line in lines(report))
    (stack,) = report.stacks
    assert stack.contract is not None
    for slot in stack.contract.slots:
        assert (slot.growth, slot.carry, slot.first, slot.shape) == ("ring", "feed-back", "zeros", (1, 2, 6, 4))
    model = onnx.load(str(out / "model.onnx"))
    onnx.checker.check_model(model, full_check=True)
    for value in (*model.graph.input, *model.graph.output):
        assert all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim), value.name
    again = api.step_test(out)
    assert not [finding for finding in again.findings if finding.severity != "note"]
    assert [run.shows for run in again.runs if run.experiment == "plain-loop"] == ["passed"]


def without_cache(source: Path, tokens: list[int]) -> tuple[np.ndarray, list[str]]:
    """The logits of all tokens in one call, and the names of the pasts."""
    session = ort.InferenceSession(str(source / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = {**first_step(len(tokens)), "input_ids": np.array([tokens])}
    return session.run(["logits"], feeds)[0], [name for name in feeds if name.startswith("past")]


def test_the_loop_of_the_fix_report_decodes(tmp_path: Path) -> None:
    """The rules, followed by hand in a loop of a few lines."""
    source = write(tmp_path / "model")
    conversions.convert(source, tmp_path / "out", sizes=SIZES)
    tokens = [3, 7, 5, 9, 4]
    want, names = without_cache(source, tokens)
    fixed = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    returned = ["logits", *(name.replace("past_key_values", "present") for name in names)]
    past = {name: np.zeros((1, 2, 6, 4), np.float32) for name in names}
    for n, token in enumerate(tokens):
        mask = np.array([[0] * (6 - n) + [1] * (n + 1)])
        given = {"input_ids": np.array([[token]]), "attention_mask": mask, "position_ids": np.array([[n]]), **past}
        logits, *presents = fixed.run(returned, given)
        past = dict(zip(names, presents, strict=True))
        np.testing.assert_allclose(logits[0, 0], want[0, n], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "choices", "named"),
    [
        ("pair-healthy", {"sizes": SIZES}, "no input masks the entries of the cache.* instead: --cache static=N"),
        ("layout-gqa-growing-healthy", {"sizes": SIZES}, "com.microsoft.GroupQueryAttention"),
        ("merged-healthy", GROUPED, "its first step is another graph or branch"),
        (
            "layout-gqa-growing-healthy",
            GROUPED,
            'the node com.microsoft.GroupQueryAttention "mixed0" holds the cache of .* already',
        ),
        (DECODER, {"attention": "plain"}, "no node of its main graph is a GroupQueryAttention"),
        ("config-values-healthy", GROUPED, "has the width 4: GroupQueryAttention takes one multiple of 8"),
        ("context-limit-healthy", GROUPED, "'bias' is added to the scores .* more than a mask of later tokens"),
        *((DECODER, {"sizes": sizes}, "--sizes") for sizes in NO_SIZES),
    ],
)
def test_what_a_graph_cannot_have_is_refused(name: str, choices: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        conversions.convert(write(tmp_path / "model", name), tmp_path / "out", **choices)
    assert not (tmp_path / "out").exists()


WIDE = [(f"float[8, 8] w_{part}{at}", f"float[8, 16] w_{part}{at}") for part in "qkv" for at in "01"]
WIDE += [
    ("float[8, 8] w_o0", "float[16, 8] w_o0"),
    ("float[8, 8] w_o1", "float[16, 8] w_o1"),
    (" 8}", " 16}"),
    (", 4}", ", 8}"),
]
WIDER = {
    "config-values-healthy": [
        *(*WIDE, ("length, 4]", "length, 8]"), ('length", 4]', 'length", 8]'), ('"head_dim": 4', '"head_dim": 8')),
        ("float[2] frequencies = {1, 0.01}", "float[4] frequencies = {1, 0.1, 0.01, 0.001}"),
    ],
    "layout-dynamo-anonymous-grouped-healthy": [
        *(*WIDE, ("s36, 4]", "s36, 8]"), ('s54", 4]', 's54", 8]')),
        *(("attention_mask", "x1"), ("input_ids", "x0"), ("past_key_values", "past")),
    ],
}


@pytest.mark.parametrize("name", WIDER)
def test_a_window_a_cap_and_unknown_names_become_those_of_the_operator(name: str, tmp_path: Path) -> None:
    out, window = tmp_path / "out", 6 if name == "config-values-healthy" else None
    report = proved(write(tmp_path / "model", name, *WIDER[name]), out, **GROUPED, cache="static=12")
    assert any(f"the window of {window} tokens was left" in line for line in lines(report)) == bool(window)
    nodes = [node for node in onnx.load(out / "model.onnx").graph.node if node.op_type in OPERATORS]
    found = [{one.name: one.i or one.f for one in node.attribute} for node in nodes]
    assert [one.get("local_window_size") for one in found] == [window, None]
    assert ["softcap" in one for one in found] == [bool(window)] * 2
    assert report.stacks[0].contract.graph("decode").port("attention_mask") is not None


GENAI = "layout-gqa-growing-healthy"
PACKED = [(f"GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1> (\n    q{i}, k{i}, v{i},",
           f'GroupQueryAttention <num_heads = 2, kv_num_heads = 1, do_rotary = 1, softcap = 2.5, scale = 0.5> (\n    '
           f'packed{i}, "", "",') for i in "01"]  # fmt: skip
PACKED += [(f"  v{i} = MatMul (x{i}, w_v{i})\n", f"  v{i} = MatMul (x{i}, w_v{i})\n  packed{i} = Concat <axis = -1> "
            f"(q{i}, k{i}, v{i})\n") for i in "01"]  # fmt: skip
PACKED += [("float[8, 32] w_q", "float[8, 64] w_q"), ("float[32, 8] w_o", "float[64, 8] w_o"), (", 16] ", ", 32] ")]
PACKED.append(('"head_size": 16', '"head_size": 32'))  # the tables rotate 16 numbers of the 32
PLAIN: dict[str, Any] = {"attention": "plain"}


@pytest.mark.parametrize(
    ("name", "edits"),
    [(GENAI, []), (GENAI, PACKED), ("layout-gqa-window-healthy", []), ("layout-genai-kv-cache-dim-healthy", [])],
    ids=["rotary", "packed-capped-partly-rotated", "window", "config-of-genai"],
)
def test_the_operator_becomes_plain_attention(name: str, edits: list[tuple[str, str]], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = proved(write(tmp_path / "model", name, *edits), out, **PLAIN)
    graph = onnx.load(out / "model.onnx").graph
    assert not [node for node in graph.node if node.domain]
    assert any("the window of 6 tokens was left" in line for line in lines(report)) == ("window" in name)
    contract = report.stacks[0].contract
    assert contract is not None
    assert {slot.growth for slot in contract.slots} == {"grow"}
    if (out / "genai_config.json").is_file():
        assert not json.loads((out / "genai_config.json").read_text())["search"]["past_present_share_buffer"]
    proved(out, None, cache="static=12")  # what the operator holds itself, other conversions change now


@pytest.mark.parametrize("name", WIDER)
def test_attention_becomes_the_operator_and_plain_again(name: str, tmp_path: Path) -> None:
    proved(write(tmp_path / "model", name, *WIDER[name]), tmp_path / "fused", **GROUPED)
    proved(tmp_path / "fused", tmp_path / "out", **PLAIN)
    assert not [node for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node if node.domain]


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (("do_rotary = 1", "do_rotary = 1, rotary_interleaved = 1"), '"mixed0" has rotary_interleaved'),
        (("cos_cache, sin_cache\n", 'cos_cache, sin_cache, "", "", sinks\n'), '"mixed0" has input 11'),
    ],
    ids=["interleaved", "sinks"],
)
def test_what_plain_operators_do_not_compute_is_refused(edit: tuple[str, str], why: str, tmp_path: Path) -> None:
    edits = [edit, ("float step = {1}", "float step = {1}, float[2] sinks = {1, 2}")]
    with pytest.raises(UsageError, match=why):
        conversions.convert(write(tmp_path / "model", GENAI, *edits), tmp_path / "out", **PLAIN)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_rows_with_padding_on_the_right_are_those_of_each_sequence_alone(name: str, tmp_path: Path) -> None:
    """What the fix report of GroupQueryAttention says of padding: the next tokens take its place in the cache."""
    proved(EXPORTS / name, tmp_path / "out", **GROUPED)
    model = onnx.load(tmp_path / "out" / "model.onnx")
    assert sorted(node.op_type for node in model.graph.node if node.op_type in OPERATORS) == ["GroupQueryAttention"] * 2
    session, original = (
        ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        for folder in (tmp_path / "out", EXPORTS / name)
    )
    empty = {p.name: np.zeros((1, p.shape[1], 0, 8), np.float32) for p in session.get_inputs() if p.name[:4] == "past"}
    rows, past = [[3, 7, 5, 9, 4], [8, 2]], {name: np.repeat(one, 2, axis=0) for name, one in empty.items()}
    mask, places = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]), np.array([np.arange(5)] * 2)
    tokens = np.array([rows[0], [8, 2, 0, 0, 0]])
    for _ in range(2):
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": places, **past}
        logits, *presents = session.run(["logits", *(one.replace("past_key_values", "present") for one in past)], given)
        for at, row in enumerate(rows):
            alone = {"input_ids": [row], "attention_mask": [[1] * len(row)], "position_ids": [list(range(len(row)))]}
            want = original.run(["logits"], {**{key: np.array(one) for key, one in alone.items()}, **empty})[0]
            np.testing.assert_allclose(logits[at, min(len(row), tokens.shape[1]) - 1], want[0, -1], atol=1e-5)
        past = dict(zip(past, presents, strict=True))
        tokens, places = np.array([[6], [6]]), np.array([[len(row)] for row in rows])
        mask = np.concatenate([mask, [[1], [1]]], axis=1)
        rows = [[*row, 6] for row in rows]


def test_positions_that_count_the_padding_are_not_proved(tmp_path: Path) -> None:
    """A graph that counts positions from the length of the past: no node stands in the way, and the proof fails."""
    edits = (
        ("  int64[batch_size, sequence_length] position_ids,\n", ""),
        ("float one = {1}", "float one = {1}, int64 start = {0}, int64 step = {1}, int64[1] batch_axis = {0}"),
        (
            "places = Gather (w_positions, position_ids)",
            "end = Squeeze (total)\n  all = Range (start, end, step)\n  counted = Slice (all, past, total)\n"
            "  position_row = Unsqueeze (counted, batch_axis)\n  places = Gather (w_positions, position_row)",
        ),
    )
    source, out = write(tmp_path / "model", DECODER, *edits), tmp_path / "out"
    report = conversions.convert(source, out, sizes=SIZES)
    assert any("first difference: batch 1, prompt of 1 token: logits off by" in text for text in failed(report))
    assert not out.exists()
    assert exit_code(report, "error") == 1


def test_a_loop_is_written_for_a_mask_that_counts_from_the_right(tmp_path: Path) -> None:
    conversions.convert(write(tmp_path / "model"), tmp_path / "out", sizes=SIZES)
    written = kvdoctor.loop(tmp_path / "out", tmp_path / "loop", language="python", check=True)
    assert written.exit_code == 0
    assert all(result.problem is None for result in written.results)


CHOICES = (
    GROUPED,
    {"logits": "last"},
    {"logits": "selectable"},
    {"sizes": SIZES},
    {"cache": "static=24"},
    {"cache": "growing"},
    PLAIN,
)


@pytest.mark.parametrize("every", [len(CHOICES), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("choices", CHOICES)
def test_every_fixture_is_planned_or_refused_with_a_reason(choices: dict[str, Any], every: int, tmp_path: Path) -> None:
    """Broken graphs among them: what is not known is refused in words. Quickly, each fixture under one choice."""
    asked, planned, refused = read_asked(ConvertChoices(**choices)), 0, list[str]()
    for name in list(FIXTURES)[CHOICES.index(choices) % every :: every]:
        (tmp_path / name).mkdir()
        FIXTURES[name].write(tmp_path / name)
        try:
            refuse_impossible_conversions(str(tmp_path / name), asked, Options())
            planned += 1
        except UsageError as error:
            refused.append(f"{name}: {error}")
    assert refused
    assert every > 1 or planned >= 4 or choices is GROUPED  # heads of 4
    assert not [text for text in refused if "crashed" in text or "cannot be converted" not in text]


def test_numbers_that_a_model_has_already_are_nothing_to_do(tmp_path: Path) -> None:
    request = ConvertRequest("fixtures/exports/gpt2", str(tmp_path / "out"), ConvertChoices(opset=18), ())
    report = pipeline.convert(request, Options())
    assert report.verdict == "healthy"
    assert not (tmp_path / "out").exists()
    assert any("nothing to repair" in note for note in report.notes)
