"""What is proved for every length: nothing of a faulty model, most healthy ones, and each type against runs."""

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto
from onnx.helper import make_node
from onnx.numpy_helper import from_array
from onnx.reference import ReferenceEvaluator
from support.text_fixtures import load_all

from kvdoctor import api
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.proof import Proof, combining
from kvdoctor.analysis.proof.call import NotKnown, Reading
from kvdoctor.analysis.proof.masks import HIDE
from kvdoctor.analysis.proof.padding import hides_padding
from kvdoctor.analysis.proof.prove import Prover, prove
from kvdoctor.analysis.proof.types import (
    BATCH,
    HIDDEN,
    NEW,
    PAST,
    Axis,
    Lengths,
    Term,
    Type,
    axis_of,
    number,
    symbol,
)
from kvdoctor.analysis.proof.walk import Typed, Walk
from kvdoctor.contract import CacheContract
from kvdoctor.diagnose.not_checked import PROVED
from kvdoctor.model.flatten import FlatNode

EXPORTS = Path(__file__).parents[1] / "fixtures" / "exports"
OF_LENGTHS = {
    *("mask-not-offset", "positions-not-offset", "past-ignored", "not-causal", "keys-change-with-length"),
    *("present-drops-past", "present-rewrites-past", "present-does-not-grow", "new-entries-wrong", "cached-differs"),
    *("cache-misread", "chunk-differs", "chunk-fails", "batch-rows-interact", "wrong-at-lengths", "branches-disagree"),
    *("past-without-present", "present-without-past", "past-axis-frozen", "step-fails", "nondeterministic"),
    "empty-past-rejected",
}
"""Findings on lengths, positions, masks, entries of the cache and rows: a model with one is never proved."""


def proofs_of(folder: Path) -> list[Proof]:
    """The proof of each stack of a folder."""
    opened = open_folder(str(folder))
    found = (prove(stack, read_contract(stack, opened.side_cars)) for stack in opened.stacks)
    return [proof for proof in found if proof is not None]


@pytest.mark.parametrize("name", [n for n, f in load_all().items() if OF_LENGTHS & {one.name for one in f.expect}])
def test_a_model_with_a_fault_of_lengths_is_not_proved(name: str, tmp_path: Path) -> None:
    for proof in proofs_of(load_all()[name].write(tmp_path)):
        assert not proof.holds


@pytest.mark.parametrize("name", [n for n in load_all() if n.startswith("sequence-axis-frozen")])
def test_a_graph_for_one_new_token_is_proved_for_no_more(name: str, tmp_path: Path) -> None:
    proofs = proofs_of(load_all()[name].write(tmp_path))
    assert all(proof.single or not proof.holds for proof in proofs)
    assert any(proof.holds for proof in proofs) is ("pair" in name)


def test_most_healthy_models_that_grow_are_proved(tmp_path: Path) -> None:
    healthy = [name for name, fixture in load_all().items() if fixture.healthy and not fixture.platform]
    proofs = {name: proofs_of(load_all()[name].write(tmp_path / name)) for name in healthy}
    proved = [name for name, found in proofs.items() if found and all(proof.holds for proof in found)]
    assert len(proved) >= 70
    layouts = ("attention-23", "attention-23-masked", "multihead-attention", "ort-gpt2-attention", "gqa-window")
    caches = ("delta-appended", "delta-stacked", "fused-split-first", "ort-gpt2-stacked-split", "parts-behind-length")
    assert {"decoder-only-healthy", "merged-healthy", "pair-healthy"} <= set(proved)
    assert {f"layout-{name}-healthy" for name in (*layouts, *caches)} <= set(proved)
    assert proofs["layout-multihead-attention-healthy"][0].weak_mask


@pytest.mark.parametrize(
    ("folder", "up_to", "single", "reason"),
    [
        ("gpt2", 64, False, ""),
        ("llama-gqa", None, False, ""),
        ("marian-4.46.3", 64, True, "Softmax"),
        ("marian-4.57.6", 64, False, ""),
        ("t5", None, False, ""),
        ("whisper", 64, False, ""),
    ],
)
def test_real_exports_are_proved(folder: str, up_to: int | None, single: bool, reason: str) -> None:
    """In older Marian exports the cached branch has no mask: several new tokens see one another."""
    for proof in proofs_of(EXPORTS / folder):
        assert (proof.up_to, proof.single, proof.weak_mask) == (up_to, single, False)
        assert [one.split()[0] for one in proof.exceptions] == ([reason] if reason else [])


LATENT = """rest = Constant <value_ints = [1, 8]> ()
  rows = Shape <start = 0, end = 1> (input_ids)
  sizes = Concat <axis = 0> (rows, rest)
  latent = ReduceMax <keepdims = 1> (w_q0)
  q0 = Expand (latent, sizes)"""
OF_NEW = """one = Constant <value_int = 1> ()
  axis = Constant <value_ints = [1]> ()
  end = Squeeze (total)
  columns = Range (offset, end, one)
  rows = Unsqueeze (columns, axis)
  seen = LessOrEqual (columns, rows)"""
PADDED = """sizes = Shape (input_ids)
  pad = ConstantOfShape <value = int32[1] {1}> (sizes)
  mixed0, "present.0.key", "present.0.value" = com.microsoft.MultiHeadAttention <num_heads = 2> (
    q0, k0, v0, w_qkv_bias0, pad, bias"""
UNEQUAL = """(keys_before_0, joined)
  last = Constant <value_ints = [-1]> ()
  four = Constant <value_ints = [4]> ()
  most = ReduceMax <axes = [-1]> (k0)
  wide = Expand (most, four)
  four_times = ReduceSum (wide, last)
  once = ReduceSum (most, last)
  joined = Add (k0, four_times)
  new_keys_0 = Add (k0, once)"""
AGAIN = """(parts, first)
  more = Unsqueeze (parts0, front)
  parts = Gather <axis = 0> (more, first)"""
OF_LAST = """from = Constant <value_ints = [-1]> ()
  to = Constant <value_ints = [9223372036854775807]> ()
  axis = Constant <value_ints = [3]> ()
  last = Slice (scaled1, from, to, axis)
  logits = Einsum <equation = "bnql,hv->bqv"> (last, w_logits)"""


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("attention-23", "is_causal = 1", "is_causal = 0", 'Attention "mixed0"'),
        ("attention-23", "is_causal = 1", "is_causal = 1, softcap = 5.0", 'Attention "mixed0"'),
        ("attention-23", "q0 = MatMul (x0, w_q0)", LATENT, 'Attention "mixed0"'),
        ("attention-23-masked", "seen = And (causal_seen, real4)", OF_NEW, 'Attention "mixed0"'),
        ("ort-gpt2-attention", "unidirectional = 1", "unidirectional = 0", 'Attention "mixed0"'),
        (
            "ort-gpt2-attention",
            "unidirectional = 1",
            "unidirectional = 1, mask_filter_value = 0.0",
            'Attention "mixed0"',
        ),
        ("multihead-attention", PADDED.split("\n  ", 2)[2].replace("pad", ""), PADDED, 'MultiHeadAttention "mixed0"'),
        ("gqa-window", "do_rotary = 1", "do_rotary = 1, causal = 0", 'GroupQueryAttention "mixed0"'),
        ("delta-appended", "logits = MatMul (x2, w_logits)", OF_LAST, 'Slice "last"'),
        ("dynamo-anonymous-grouped", "Reshape (transpose_7,", "Reshape (unsqueeze,", 'Reshape "view_7"'),
        (
            *(
                "parts-behind-length",
                "(parts0, first)",
                AGAIN,
            ),
            "past 'past_key_values.0.key_value' (joined with other entries than 'present.0.key_value' has)",
        ),
        (
            *("delta-appended", "(keys_before_0, k0)\n  new_keys_0 = Identity (k0)", UNEQUAL),
            "past 'keys_before_0' (joined with other entries than 'new_keys_0' has)",
        ),
    ],
)
def test_a_step_that_may_differ_is_not_proved(name: str, old: str, new: str, reason: str, tmp_path: Path) -> None:
    fixture = load_all()[f"layout-{name}-healthy"]
    assert old in fixture.files["model.onnx"]
    files = {file: text.replace(old, new) for file, text in fixture.files.items()}
    [proof] = proofs_of(replace(fixture, files=files).write(tmp_path))
    assert proof.exceptions == (reason,)


QUANTIZED = """w8_scale = Constant <value_float = 0.01> ()
  w8 = QuantizeLinear (w_logits, w8_scale)
  x8, x8_scale, x8_zero = DynamicQuantizeLinear (x2)
  other8, other_scale, other_zero = DynamicQuantizeLinear (x1)
  x8_product = MatMulInteger (x8, w8, x8_zero)
  x8_float = Cast <to = 1> (x8_product)
  logits = Mul (x8_float, x8_scale)"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("", "", ()),
        ("x8_float, x8_scale", "x8_float, other_scale", ('Mul "logits"',)),
        ("Mul (x8_float", "Add (x8_float", ('Add "logits"',)),
        ("w8, x8_zero)", "w8, other_zero)", ('MatMulInteger "x8_product"',)),
        ("w8, x8_zero)", "w8)", ('MatMulInteger "x8_product"',)),
        ("= MatMulInteger (x8, w8, x8_zero)", "= Identity (x8)", ('Cast "x8_float"',)),
    ],
)
def test_the_scale_of_a_call_goes_where_it_came_from(old: str, new: str, reason: tuple[str], tmp_path: Path) -> None:
    fixture = load_all()["layout-delta-appended-healthy"]
    quantized = QUANTIZED.replace(old, new) if old else QUANTIZED
    text = fixture.files["model.onnx"].replace("logits = MatMul (x2, w_logits)", quantized)
    [proof] = proofs_of(replace(fixture, files={"model.onnx": text}).write(tmp_path))
    assert (proof.exceptions, proof.rounded, proof.covers(8)) == (reason, not reason, False)


@pytest.mark.parametrize(
    ("clamp", "up_to", "reason"),
    [
        ("Max (back, none)", 128, ()),
        ("Clip (back, none)", 128, ()),
        ("Min (back, none)", None, ()),
        ("Max (back, offset)", None, ('Max "from_zero"',)),
    ],
)
def test_positions_that_no_bound_changes_end_with_their_table(
    clamp: str, up_to: int | None, reason: tuple[str], tmp_path: Path
) -> None:
    fixture = load_all()["unnamed-mask-positions-healthy"]
    text = fixture.files["model.onnx"].replace("Max (back, none)", clamp)
    [proof] = proofs_of(replace(fixture, files={"model.onnx": text}).write(tmp_path))
    assert (proof.up_to, proof.exceptions) == (up_to, reason)


EACH_WEIGHT = """sizes = Constant <value_ints = [2, 4]> ()
  all = ConstantOfShape <value = int64[1] {1}> (sizes)
  places_of_all = NonZero (all)
  listed = Transpose (places_of_all)
  SOURCE
  picked = GatherND (source, listed)
  back = Constant <value_ints = [2, 4, 8]> ()
  heads = Reshape (picked, back)
  by_feature = Transpose <perm = [2, 0, 1]> (heads)
  from_end = Constant <value_ints = [-2]> ()
  last = Constant <value_ints = [-1]> ()
  first_head = Gather <axis = 1> (by_feature, from_end)
  last_head = Gather <axis = 1> (by_feature, last)
  w_same = Concat <axis = 1> (first_head, last_head)
  q0 = Einsum <equation = "bsh,hnd->bnsd"> (x0, w_same)"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("source = Transpose <perm = [1, 2, 0]> (w_q0)", ()),
        ("source = Einsum <equation = 'bsh,hnd->bsh'> (x0, w_q0)".replace("'", '"'), ('GatherND "picked"',)),
    ],
)
def test_elements_at_known_places_are_the_same_in_every_call(
    source: str, reason: tuple[str, ...], tmp_path: Path
) -> None:
    """Weights by their indexes: not so entries of a batch and its tokens."""
    fixture = load_all()["decoder-only-healthy"]
    old = 'q0 = Einsum <equation = "bsh,hnd->bnsd"> (x0, w_q0)'
    text = fixture.files["model.onnx"].replace(old, EACH_WEIGHT.replace("SOURCE", source))
    [proof] = proofs_of(replace(fixture, files={"model.onnx": text}).write(tmp_path))
    assert proof.exceptions == reason


@pytest.mark.parametrize(
    ("node", "rows", "lengths", "uniform"),
    [
        (make_node("MatMul", "ab", "c"), NEW, Lengths(single=True), True),
        (make_node("MatMul", "ab", "c"), "total", Lengths(single=True), False),
        (make_node("FusedMatMul", "ab", "c"), NEW, Lengths(first=True), True),
        (make_node("FusedMatMul", "ab", "c", transA=1), NEW, Lengths(first=True), False),
        (make_node("ReduceSum", "a", "c", axes=[1]), NEW, Lengths(first=True), True),
        (make_node("ReduceSum", "a", "c", axes=[0, 1]), NEW, Lengths(first=True), False),
    ],
)
def test_a_sum_is_of_no_later_token(node: NodeProto, rows: str, lengths: Lengths, uniform: bool) -> None:
    axes = (lengths.new if rows == NEW else lengths.total,), (lengths.total,)
    regions = tuple((pair, (0.0, 1.0, 0.0)) for pair in ((-2, -1), (-1, -2)))
    taken = [Type("f", axes, uniform=True, regions=regions), Type("f", axes[::-1], uniform=True)]
    made: Any = combining.RULES[node.op_type](Reading(FlatNode(node, (), ()), taken[: len(node.input)], lengths))
    assert made.type.uniform is uniform


@pytest.mark.parametrize(
    ("name", "node"), [("positions-not-offset", 'Gather "places"'), ("context-limit-fails-narrow", 'Cast "short"')]
)
def test_what_is_not_proved_names_the_node(name: str, node: str, tmp_path: Path) -> None:
    [proof] = proofs_of(load_all()[name].write(tmp_path))
    assert proof == Proof(exceptions=(node,))


ROWS, TOKENS = 2, 7
CALLS = ((0, 7), (0, 3), (3, 4), (5, 2), (6, 1), (2, 2))
"""Past and new tokens of each call; the first one is what the others are compared with."""


@cache
def walk_over(folder: Path) -> tuple[onnx.ModelProto, CacheContract, Walk]:
    """A model of one graph with all its values as outputs, and the types of these."""
    opened = open_folder(str(folder))
    [stack] = opened.stacks
    contract = read_contract(stack, opened.side_cars)
    walk = Prover(stack, contract).walk("decode", Lengths(opset=20), {})
    model = onnx.load(folder / stack.main.name)
    known = {output.name for output in model.graph.output}
    made = [name for node in model.graph.node for name in node.output if name and name not in known]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    return model, contract, walk


def feeds(contract: CacheContract, past: int, new: int, streams: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call: tokens of one fixed sequence, and the entries that earlier steps returned."""
    total, found = past + new, dict[str, Any]()
    tokens = np.random.default_rng(1).integers(4, 12, (ROWS, TOKENS))
    for port in contract.graph("decode").inputs:
        values = {
            "token_ids": tokens[:, past:total],
            "attention_mask": np.ones((ROWS, total), np.int64),
            "position_ids": np.broadcast_to(np.arange(past, total), (ROWS, new)),
        }
        if port.role in values:
            found[port.name] = np.ascontiguousarray(values[port.role], np.int64)
    for slot in contract.slots:
        sizes = {"batch": ROWS, "past": 0}
        shape = [sizes.get(axis, dim) for axis, dim in zip(slot.axes, slot.shape, strict=True)]
        stream = streams.get(slot.present or "", np.zeros(shape, np.float32))
        found[slot.past] = stream.take(range(past), axis=slot.length_axis)
    return found


def value_of(term: Term, past: int, new: int) -> int:
    """A number in one call."""
    for name, value in ((PAST, past), (NEW, new), (BATCH, ROWS)):
        term = term.replaced({name: number(value)})
    assert term.number is not None
    return term.number


def places(shape: tuple[Axis, ...], lengths: Lengths, past: int, new: int) -> tuple[Any, ...]:
    """The absolute places of the elements of a value of one call."""
    ends = {(lengths.new,): slice(past, past + new), (lengths.total,): slice(past + new), (lengths.past,): slice(past)}
    return tuple(ends.get(axis, slice(None)) for axis in shape)


def check_numbers(value: Any, one: Typed, past: int, new: int) -> None:
    """The numbers that a type claims to know."""
    kind = one.type
    if kind.items is not None:
        assert value.reshape(-1).tolist() == [value_of(item, past, new) for item in kind.items]
    if kind.linear is not None:
        start, factors = kind.linear
        wanted: Any = start if isinstance(start, float) else value_of(start, past, new)
        for at, factor in factors:
            index = np.arange(value.shape[at]).reshape(-1, *[1] * (-at - 1))
            wanted = wanted + factor * index
        assert np.allclose(np.asarray(value, np.float64), wanted, rtol=1e-6)


def check_regions(value: Any, one: Typed, lengths: Lengths, past: int) -> None:
    """What a type claims to know above, on and below the diagonal."""
    shape = one.type.shape or ()
    for (row, column), marks in one.type.regions:
        firsts = [past if shape[at] == (lengths.new,) else 0 for at in (row, column)]
        moved = np.moveaxis(value, (row, column), (-2, -1))
        apart = firsts[1] - firsts[0] + np.arange(moved.shape[-1]) - np.arange(moved.shape[-2])[:, None]
        for mark, region in zip(marks, (apart > 0, apart == 0, apart < 0), strict=True):
            found = moved[..., region].astype(np.float64)
            if isinstance(mark, float):
                assert (found == mark).all()
            elif mark == HIDE:
                assert (found <= HIDDEN / 2).all()


MODELS = (
    *("gpt2", "llama-gqa"),
    *("decoder-only-healthy", "mask-not-offset", "positions-not-offset", "layout-heads-first-healthy"),
    *("not-causal", "batch-rows-interact", "wrong-at-lengths-far", "layout-attention-23-healthy"),
)
"""Models of one graph whose inputs this test can feed, and whose pasts are joined with what they hold."""


@pytest.mark.parametrize("name", MODELS)
def test_a_uniform_value_is_the_same_function_in_every_call(name: str, tmp_path: Path) -> None:
    """Every value of healthy and faulty graphs: where its type claims something, all calls agree with it."""
    folder = EXPORTS / name if (EXPORTS / name).is_dir() else load_all()[name].write(tmp_path)
    model, contract, walk = walk_over(folder)
    names, session, lengths = [output.name for output in model.graph.output], ReferenceEvaluator(model), walk.lengths
    whole: dict[str, Any] = {}
    for past, new in CALLS:
        fed = feeds(contract, past, new, whole)
        found = dict(zip(names, session.run(names, fed), strict=True))
        whole = whole or found
        for value_name, value in found.items():
            one = walk.values.get(value_name)
            if one is None or one.type.shape is None:
                continue
            check_numbers(value, one, past, new)
            check_regions(value, one, lengths, past)
            plain = all(len(axis) < 2 and axis != (lengths.past,) for axis in one.type.shape)
            if lengths.is_uniform(one.type) and not one.type.last and plain:
                expected = whole[value_name][places(one.type.shape, lengths, past, new)]
                assert np.allclose(value, np.broadcast_to(expected, value.shape), atol=1e-4, equal_nan=True), value_name
    assert sum(lengths.is_uniform(one.type) for one in walk.values.values()) > len(names) / 3


def test_a_length_is_compared_for_every_call() -> None:
    past, new = symbol(PAST), symbol(NEW)
    lengths = Lengths()
    assert lengths.at_least(past + new, 1)
    assert not lengths.at_least(past, 1)
    assert lengths.equal(past + new, new + past)
    assert lengths.equal(past, number(-1)) is False
    assert lengths.equal(new, number(1)) is None
    assert Lengths(single=True).equal(new, number(1))
    assert (past + new).times(8).divided(past + new) is number(8)
    assert (past * new).divided(new) is past


@pytest.mark.parametrize(
    ("proof", "limit", "covered"),
    [
        (Proof(), None, True),
        (Proof(up_to=64), 64, True),
        (Proof(up_to=64), 65, False),
        (Proof(up_to=64), None, False),  # nothing says that a sequence ends where the table does
        (Proof(single=True, exceptions=("Softmax",)), 64, False),
        (Proof(weak_mask=True), 64, False),
    ],
)
def test_a_proof_covers_a_model_up_to_all_that_it_takes(proof: Proof, limit: int | None, covered: bool) -> None:
    assert proof.covers(limit) is covered


@pytest.mark.parametrize("thorough", [False, True])
def test_lengths_are_visited_where_they_are_not_proved_or_all_is_asked_for(thorough: bool) -> None:
    runs = {run.experiment: run for run in api.step_test(EXPORTS / "gpt2", thorough=thorough).runs}
    assert runs["long-past"].outcome == runs["plain-loop"].outcome == runs["left-padding"].outcome == "passed"
    assert runs["each-length"].outcome == ("passed" if thorough else "skipped")
    assert thorough or runs["each-length"].reason == runs["near-thresholds"].reason == PROVED


def test_lengths_are_visited_where_the_proof_ends_before_the_context(tmp_path: Path) -> None:
    for file in (EXPORTS / "gpt2").iterdir():
        text = file.read_bytes()
        (tmp_path / file.name).write_bytes(text.replace(b'"n_positions": 64', b'"n_positions": 99'))
    report = api.step_test(tmp_path)
    assert next(run for run in report.runs if run.experiment == "each-length").outcome == "passed"


def hides(folder: Path) -> list[bool]:
    """Whether masks are known to hide padding, for each stack of a folder."""
    opened = open_folder(str(folder))
    contracts = [(stack, read_contract(stack, opened.side_cars)) for stack in opened.stacks]
    return [hides_padding(stack, contract, ("attention_mask", "encoder_mask")) for stack, contract in contracts]


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("decoder-only-healthy", True),
        ("padding-changes-logits", False),
        ("decoder-only-distances-healthy", True),
        ("non-finite-renormalized", False),
        ("unnamed-mask-positions-healthy", True),
        ("padding-changes-logits-positions", False),
        ("padding-changes-logits-returned", False),
        ("padding-changes-logits-row", False),
        ("padding-changes-logits-slice", False),
        ("padding-changes-logits-states", False),
        ("padding-changes-logits-unused", False),
    ],
)
def test_masks_are_proved_to_hide_padding(name: str, hidden: bool, tmp_path: Path) -> None:
    assert hides(load_all()[name].write(tmp_path)) == [hidden]


@pytest.mark.parametrize("name", ["llama-gqa", "marian-4.57.6", "t5", "whisper"])
def test_an_inspection_of_a_proved_export_runs_nothing(name: str) -> None:
    """Its masks hide padding, or it takes none; where positions are rotary, padding of tokens is left to runs."""
    load = f"import sys, kvdoctor; kvdoctor.inspect({str(EXPORTS / name)!r}); assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", load], check=True)
    assert name == "llama-gqa" or all(hides(EXPORTS / name))


@pytest.mark.parametrize("lowest", [-1e30, -np.inf])
def test_a_padded_token_that_sees_nothing_is_run(lowest: float, tmp_path: Path) -> None:
    """Where the mask is infinite, the weights of such a token are no numbers."""
    text, old = load_all()["decoder-only-healthy"], "seen_less = Sub (seen, one)\n  bias = Mul (seen_less, hide)"
    faulty = text.files["model.onnx"].replace(old, "b = Cast <to = 9> (seen)\nbias = Where (b, low, hide)")
    faulty = faulty.replace("float hide =", "float low = {0}, float hide =")
    faulty = faulty.replace("mixed0 = MatMul (shares0", "same0 = Mul (shares0, one)\nmixed0 = MatMul (same0")
    faulty = faulty.replace("mixed1 = MatMul (shares1", "same1 = Mul (shares1, one)\nmixed1 = MatMul (same1")
    model = onnx.load(replace(text, files={"model.onnx": faulty}).write(tmp_path) / "model.onnx")
    hide = next(one for one in model.graph.initializer if one.name == "hide")
    hide.CopyFrom(from_array(np.float32(lowest), "hide"))
    onnx.save(model, tmp_path / "model.onnx")
    assert hides(tmp_path) == [np.isfinite(lowest)]
    found = [one.name for one in api.inspect(tmp_path).findings if one.predicted]
    assert found == ([] if np.isfinite(lowest) else ["non-finite"])


def test_factors_of_an_axis_in_another_order_are_another_axis() -> None:
    call = Reading(FlatNode(NodeProto(op_type="Mul"), (), ()), [], Lengths())
    by_head, by_token = (
        (Type("f", (axis_of(*factors),))) for factors in ((number(4), symbol(NEW)), (symbol(NEW), number(4)))
    )
    assert call.broadcast([by_head, by_head])
    with pytest.raises(NotKnown):
        call.broadcast([by_head, by_token])
